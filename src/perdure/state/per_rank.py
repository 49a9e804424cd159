"""`PerRank`: a part of the state that is not the same in every process of a group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Node, Spec

_RANK = re.compile(r"rank([0-9]+)(?:/|$)")


@dataclass(frozen=True, eq=False)
class PerRank:
    """A member of the state that each process of a group has for itself.

    Every process saves its own `value`, as leaves `<path>/rank<process>/...` of the checkpoint, and
    gets that one back. All other members must be equal in all processes. It is meant for what native
    `DistributedDataParallel` keeps per process, such as the statistics of BatchNorm, and for data
    iterators that read a shard each.

    A checkpoint of another number of processes raises `MismatchError`, because nobody can tell which
    value belongs to which process, unless `on_change` says what to do: "rank0" gives the value of
    process 0 to all, "keep" leaves `value` as the program made it.
    """

    value: Any
    on_change: Literal["error", "rank0", "keep"] = "error"

    def __post_init__(self) -> None:
        if self.on_change not in ("error", "rank0", "keep"):
            raise StateError(
                f"on_change: expected 'error', 'rank0' or 'keep', found {self.on_change!r}."
            )


@dataclass
class Place:
    """The process that flattens or restores a state, and the `PerRank` members that it met.

    `members` has the rank that each of them stands for here, by path; None for one that is kept.
    """

    index: int = 0
    count: int = 1
    members: dict[str, int | None] = field(default_factory=dict)

    def owns(self, path: str) -> bool:
        """Whether a leaf lies in a `PerRank` member."""
        return bool(self.members) and any(
            _rank(path, member) is not None for member in self.members
        )

    def leaves_out(self, path: str) -> bool:
        """Whether a stored leaf lies in a `PerRank` member and is that of another rank."""
        return bool(self.members) and any(
            (rank := _rank(path, member)) is not None and rank != chosen
            for member, chosen in self.members.items()
        )


_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def placed(index: int, count: int) -> Iterator[Place]:
    """States that are flattened and restored inside are those of process `index` of `count`."""
    token = _place.set(place := Place(index, count))
    try:
        yield place
    finally:
        _place.reset(token)


def here() -> Place:
    """The place of this process; that of a process by itself outside of `placed`."""
    return _place.get() or Place()


def per_rank_node(member: PerRank, stored: Mapping[str, Spec] | None, path: str) -> Node:
    """The node of a `PerRank` at `path`: one child, that of this process."""
    place = here()
    if place.owns(f"{path}/"):
        raise UnsupportedLeafError("a PerRank inside of a PerRank; wrap the outer member alone.")
    rank: int | None = place.index
    if stored is not None:
        ranks = {int(found[1]) for name in stored if (found := _RANK.match(name))}
        if ranks and len(ranks) != place.count:
            if member.on_change == "error":
                raise MismatchError(
                    f"{path or 'the state'}: this PerRank member was saved by {len(ranks)} processes, "
                    f"and this run has {place.count}; nothing was changed. Resume with {len(ranks)} "
                    f"processes, or say what to do: PerRank(value, on_change='rank0') gives the value "
                    f"of process 0 to all, on_change='keep' leaves what the program made."
                )
            rank = 0 if member.on_change == "rank0" else None
    place.members[path] = rank
    if rank is None:
        return Node([], lambda _: member)
    return Node([(f"rank{rank}", member.value)], lambda new: PerRank(new[0], member.on_change))


def _rank(path: str, member: str) -> int | None:
    """The rank of a leaf that lies in `member`; None for a leaf elsewhere."""
    prefix = f"{member}/" if member else ""
    found = _RANK.match(path, len(prefix)) if path.startswith(prefix) else None
    return int(found[1]) if found else None
