"""Values that differ between logical replicas.

Owns `PerReplica`. Invariant: it holds the values of this process's replicas only, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

    def __iter__(self) -> Iterator[PerReplica]:
        """The elements of values that are tuples or lists, each as a PerReplica.

        So `loss, accuracy = strategy.run(step)` works as in TensorFlow. The values themselves are in
        `values`, and `strategy.local_results` gives them too.
        """
        lengths = {len(each) if isinstance(each, (tuple, list)) else None for each in self.values}
        length = lengths.pop() if len(lengths) == 1 else None
        if length is None:
            raise TypeError(
                "a PerReplica is unpacked into the elements of its values: expected tuples of one "
                "length in all replicas. For the values use strategy.local_results(value)."
            )
        return iter([self[index] for index in range(length)])

    def __getitem__(self, key: Any) -> PerReplica:
        """`value[key]` of every replica's value; the values are tuples, lists or mappings."""
        for each in self.values:
            if not isinstance(each, (tuple, list, Mapping)):
                raise TypeError(
                    f"{key!r}: a PerReplica is indexed by the elements of its values: expected tuples, "
                    f"lists or mappings, found {type(each).__name__}. For the values use "
                    f"strategy.local_results(value)."
                )
        values = tuple(each[key] for each in self.values)
        return PerReplica(values, self.replicas, self.step)


def of(value: Any, replica: int) -> Any:
    """A replica's part of a PerReplica, or the whole of another value."""
    if isinstance(value, PerReplica):
        return value.values[value.replicas.index(replica)]
    return value
