"""The little of torchvision that the programs of `make proof-doors` use, over digits on this disk."""

from torchvision import datasets, transforms, utils

__version__ = "0"
__all__ = ["datasets", "transforms", "utils"]
