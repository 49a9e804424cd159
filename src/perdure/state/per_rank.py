"""`PerRank`, a member that differs between processes, and the process that reads a state.

Invariant: neither a save nor a restore gathers an array of which each process has a shard: an error in
one process would leave the other processes waiting in a collective.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state.adapter import Node
from perdure.state.leaf_spec import LeafSpec

_RANK = re.compile(r"rank([0-9]+)(?:/|$)")


@dataclass(frozen=True, eq=False)
class PerRank:
    """A member of the state that has another value in each process of a group.

    Each process saves its own `value` as leaves `<path>/rank<process>/...` and gets it back. All
    other members must be equal in all processes. Use it for what native `DistributedDataParallel`
    keeps per process (statistics of BatchNorm), and for data iterators that read one shard each.

    Args:
        value: the member, anything that a state may hold except another `PerRank`.
        on_change: what a restore does if another number of processes saved: "error" raises
            `MismatchError`, "rank0" gives the value of process 0 to all, "keep" leaves `value`.

    Raises:
        StateError: `on_change` is none of these.
    """

    value: Any
    on_change: Literal["error", "rank0", "keep"] = "error"

    def __post_init__(self) -> None:
        if self.on_change not in ("error", "rank0", "keep"):
            raise StateError(
                f"on_change: expected 'error', 'rank0' or 'keep', found {self.on_change!r}."
            )


@dataclass
class RankContext:
    """The process that flattens or restores a state, and the `PerRank` members of that state.

    `members` has the rank whose leaves are used by the path of each member; None with "keep". A
    restore that meets an array with a shard in each process sets `has_shards`. With `keeps_shards`
    an array on several devices of this process becomes a leaf of shards; with `compares_shards` a
    leaf has the elements of this process alone; with `compares_copies` an array with differing
    copies has no leaf.
    """

    index: int = 0
    count: int = 1
    members: dict[str, int | None] = field(default_factory=dict)
    has_shards: bool = False
    keeps_shards: bool = False
    compares_shards: bool = False
    compares_copies: bool = False

    def owns(self, path: str) -> bool:
        """Whether a leaf belongs to a `PerRank` member."""
        return any(_rank(path, member) is not None for member in self.members)

    def leaves_out(self, path: str) -> bool:
        """Whether a stored leaf belongs to a `PerRank` member and to another rank."""
        ranks = ((_rank(path, member), chosen) for member, chosen in self.members.items())
        return any(rank not in (None, chosen) for rank, chosen in ranks)


_context: ContextVar[RankContext | None] = ContextVar("rank_context", default=None)


def rank_context(
    index: int, count: int, *, keeps_shards: bool = False, compares_copies: bool = False
) -> AbstractContextManager[RankContext]:
    """Inside, states are flattened and restored as by process `index` of `count`."""
    return _entered(
        RankContext(index, count, keeps_shards=keeps_shards, compares_copies=compares_copies)
    )


def own_shards_only() -> AbstractContextManager[RankContext]:
    """Inside, leaves of sharded arrays have only the elements of this process."""
    return _entered(replace(current_rank_context(), compares_shards=True))


@contextmanager
def _entered(context: RankContext) -> Iterator[RankContext]:
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


def current_rank_context() -> RankContext:
    """The innermost `rank_context`; outside of any, the context of a process without a group."""
    return _context.get() or RankContext()


def per_rank_node(member: PerRank, stored: Mapping[str, LeafSpec] | None, path: str) -> Node:
    """The node of a `PerRank` at `path`. Its only child is the value of this process."""
    context = current_rank_context()
    if context.owns(f"{path}/"):
        raise UnsupportedLeafError("a PerRank inside a PerRank; wrap only the outer member.")
    rank: int | None = context.index
    if stored is not None:
        ranks = {int(match[1]) for name in stored if (match := _RANK.match(name))}
        if ranks and len(ranks) != context.count:
            if member.on_change == "error":
                raise MismatchError(
                    f"{path or 'the state'}: this PerRank member was saved by {len(ranks)} processes, "
                    f"and this run has {context.count}; nothing was changed. Resume with "
                    f"{len(ranks)} processes, or choose: PerRank(value, on_change='rank0') gives the "
                    f"value of process 0 to all, on_change='keep' leaves what the program created."
                )
            rank = 0 if member.on_change == "rank0" else None
    context.members[path] = rank
    if rank is None:
        return Node([], lambda _: member)
    return Node([(f"rank{rank}", member.value)], lambda new: PerRank(new[0], member.on_change))


def _rank(path: str, member: str) -> int | None:
    prefix = f"{member}/" if member else ""
    match = _RANK.match(path, len(prefix)) if path.startswith(prefix) else None
    return int(match[1]) if match else None
