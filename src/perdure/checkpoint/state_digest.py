"""`state_digest`: 128 bits of a tree of values, the same wherever it was computed."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from perdure.errors import UnsupportedLeafError
from perdure.process_group import Processes, SingleProcess
from perdure.state import flatten
from perdure.state.per_rank import rank_context

DIGITS = 32


def state_digest(tree: Any, processes: Processes | None = None) -> str:
    """A checksum of the paths, dtypes, shapes and bits of all leaves, as 32 hexadecimal digits.

    Members wrapped in `PerRank` belong to a process and are left out.

    Args:
        tree: What a checkpoint takes.
        processes: The group; None for a single process.

    Raises:
        UnsupportedLeafError: A value has no exact form, or an array is sharded over processes.
    """
    group = processes or SingleProcess()
    hasher = blake3()
    with rank_context(group.index, group.count, _refuse_sharded) as rank:
        leaves = flatten(tree)
        for path, leaf in sorted(leaves.items()):
            if not rank.owns(path):
                head = f"{path}\0{leaf.dtype}\0{leaf.shape}\0{len(leaf.data)}\0"
                hasher.update(head.encode())
                hasher.update(leaf.data)
    return hasher.hexdigest()[:DIGITS]


def combined_digest(digests: list[str]) -> str:
    """One digest of several, in their order."""
    return blake3("".join(digests).encode()).hexdigest()[:DIGITS]


def _refuse_sharded() -> None:
    raise UnsupportedLeafError(
        "an array is sharded over the processes of the group, and the journal digests whole arrays. "
        "Leave `journal_every` out for this run."
    )
