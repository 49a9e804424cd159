"""An image of bytes as a tensor between 0 and 1, normalized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Compose:
    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        self._functions = functions

    def __call__(self, value: Any) -> Any:
        for function in self._functions:
            value = function(value)
        return value


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(image.reshape(1, *image.shape[:2]).copy()).float() / 255


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = mean[0], std[0]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self._mean) / self._std
