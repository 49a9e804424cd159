"""`PerReplica`: values that differ between logical replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class ReduceOp(Enum):
    """The operations of `reduce` and `all_reduce`; the strings "sum" and "mean" work too."""

    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True)
class PerReplica:
    """One value for each logical replica of this process, in their order.

    Attributes:
        values: The values.
        replicas: The numbers of the replicas, in 0 .. V-1.
        step: The global step of a batch or of keys; None for other values.
    """

    values: tuple[Any, ...]
    replicas: tuple[int, ...]
    step: int | None = None

    def __post_init__(self) -> None:
        if len(self.values) != len(self.replicas):
            raise ValueError(
                f"expected one value for each of the replicas {self.replicas}, "
                f"found {len(self.values)} values"
            )

    def __iter__(self) -> Iterator[PerReplica]:
        """The elements of values that are tuples or lists, each as a PerReplica.

        So `loss, accuracy = strategy.run(step)` works as in TensorFlow. The values themselves are in
        `values`, and `strategy.local_results` gives them too.
        """
        lengths = {len(v) if isinstance(v, (tuple, list)) else None for v in self.values}
        length = lengths.pop() if len(lengths) == 1 else None
        if length is None:
            raise TypeError(
                "a PerReplica is unpacked into the elements of its values: expected tuples of one "
                "length in all replicas. For the values use strategy.local_results(value)."
            )
        return iter([self[index] for index in range(length)])

    def __getitem__(self, key: Any) -> PerReplica:
        """`value[key]` of every replica's value; the values are tuples, lists or mappings."""
        for value in self.values:
            if not isinstance(value, (tuple, list, Mapping)):
                raise TypeError(
                    f"{key!r}: a PerReplica is indexed by the elements of its values: expected tuples, "
                    f"lists or mappings, found {type(value).__name__}. For the values use "
                    f"strategy.local_results(value)."
                )
        values = tuple(value[key] for value in self.values)
        return PerReplica(values, self.replicas, self.step)


def of(value: Any, replica: int) -> Any:
    """A replica's part of a PerReplica, or the whole of another value."""
    if isinstance(value, PerReplica):
        return value.values[value.replicas.index(replica)]
    return value
