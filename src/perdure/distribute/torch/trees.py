"""Trees of plain containers around PyTorch's tensors, for the neutral code."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from perdure.distribute import pytree


class TorchTrees:
    """See perdure.distribute.engine.Trees."""

    def flatten(self, value: Any) -> tuple[list[Any], Hashable]:
        return pytree.leaves_and_structure(value)

    def paths(self, value: Any) -> list[str]:
        return [path for path, _ in pytree.flatten(value)]

    def map(self, fn: Callable[[Any], Any], value: Any) -> Any:
        with torch.no_grad():
            leaves = map(torch.as_tensor, pytree.leaves(value))
            return pytree.rebuild(value, map(fn, leaves))
