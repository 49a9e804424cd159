"""Handwritten digits as 28x28 images in 0..1: scikit-learn's scans, or the user's MNIST files."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from perdure.data.idx import load_images
from perdure.errors import DataError, needs_extra

SIDE = 28
TRAIN_PART = 0.8


class Digits(NamedTuple):
    """Training and test examples: "image" float32 [n, 28, 28, 1], "label" int32 [n]."""

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


def load_digits(path: str | os.PathLike[str] | None = None) -> Digits:
    """The digits at `path`, by default scikit-learn's 1,797 scans of 8x8 pixels, enlarged."""
    images, labels = _scans() if path is None else load_images(path)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(f"{path}: expected images of {SIDE}x{SIDE}, found {images.shape[1:]}.")
    scaled = (images.astype(np.float32) / np.float32(255))[..., None]
    digits = {"image": scaled, "label": labels.astype(np.int32)}
    count = int(len(labels) * TRAIN_PART)
    return Digits(
        {k: v[:count] for k, v in digits.items()}, {k: v[count:] for k, v in digits.items()}
    )


def save_scans(path: str | os.PathLike[str]) -> None:
    """Write scikit-learn's scans to an .npz file that `load_digits` reads."""
    images, labels = _scans()
    np.savez(path, images=images, labels=labels)


def _scans() -> tuple[np.ndarray, np.ndarray]:
    with needs_extra("demo"):
        from sklearn import datasets
    scans, labels = datasets.load_digits(return_X_y=True)
    small = np.clip(scans.reshape(-1, 8, 8) * (255 / 16), 0, 255).astype(np.uint8)
    large = small.repeat(3, axis=1).repeat(3, axis=2)
    return np.pad(large, ((0, 0), (2, 2), (2, 2))), labels
