"""A part of MNIST, from the folder MNIST_DIGITS."""

from __future__ import annotations

import os

from perdure.data.idx import Images, load_images

TRAINING, TEST = 160, 32


def digits(train: bool) -> Images:
    """The first `TRAINING` images with their labels, or the `TEST` that follow them."""
    images, labels = load_images(os.environ["MNIST_DIGITS"])
    part = slice(0, TRAINING) if train else slice(TRAINING, TRAINING + TEST)
    return images[part], labels[part]
