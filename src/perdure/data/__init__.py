"""The map from a step to a global batch, by index."""

from perdure.data.arrays import ArrayDataset
from perdure.data.idx import load_images, read_idx
from perdure.data.permutation import permute

__all__ = ["ArrayDataset", "load_images", "permute", "read_idx"]
