"""Values that differ between logical replicas.

Owns `PerReplica`. Invariant: it holds the values of this process's replicas only, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class ReduceOp(Enum):
    """What `reduce` and `all_reduce` may do; the strings "sum" and "mean" mean the same."""

    SUM = "sum"
    MEAN = "mean"


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


def of(value: Any, replica: int) -> Any:
    """A replica's part of a PerReplica, or the whole of another value."""
    if isinstance(value, PerReplica):
        return value.values[value.replicas.index(replica)]
    return value
