"""MNIST from IDX files, a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from digits_on_disk import digits


class MNIST(torch.utils.data.Dataset[Any]):
    """Some of the digits on this disk."""

    def __init__(
        self,
        root: str,
        train: bool = True,
        download: bool = False,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self._images, self._labels = digits(train)
        self._transform = transform or (lambda image: image)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._images[index]), int(self._labels[index])
