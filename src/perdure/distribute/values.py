"""Values that differ between logical replicas.

Owns `PerReplica`. Invariant: it holds the values of this process's replicas only, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PerReplica:
    """One value for each logical replica of this process.

    `replicas` are their numbers in 0 .. V-1. `step` is the global step where the value belongs to
    one: a batch, or keys.
    """

    values: tuple[Any, ...]
    replicas: tuple[int, ...]
    step: int | None = None

    def __post_init__(self) -> None:
        if len(self.values) != len(self.replicas):
            raise ValueError(
                f"expected one value for each of the replicas {self.replicas}, "
                f"got {len(self.values)} values"
            )
