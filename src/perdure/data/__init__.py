"""The map from a step to a global batch."""

from perdure.data.dataset import ArrayDataset, Augment, Dataset
from perdure.data.idx import load_images, read_idx
from perdure.data.permutation import permute
from perdure.data.prefetch import Prefetch
from perdure.data.stream import StreamDataset

__all__ = [
    "Augment",
    "Dataset",
    "Prefetch",
    "StreamDataset",
    "load_images",
    "read_idx",
]
