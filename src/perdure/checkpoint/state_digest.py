"""`state_digest`: 128 bits of a tree of values, the same wherever it was computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from perdure.digests import combined, digests_of_leaves, leaf_digests, leaf_digests_of_each
from perdure.errors import UnsupportedLeafError
from perdure.process_group import Processes, SingleProcess
from perdure.state import flatten
from perdure.state.per_rank import rank_context

DIGITS = 32


def state_digest(tree: Any, processes: Processes | None = None) -> str:
    """`perdure.digests.digest` of all leaves, as 32 hexadecimal digits.

    Members wrapped in `PerRank` belong to a process and are left out.

    Args:
        tree: What a checkpoint takes.
        processes: The group; None for a single process.

    Raises:
        UnsupportedLeafError: A value has no exact form, or an array is sharded over processes.
    """
    group = processes or SingleProcess()
    with rank_context(group.index, group.count, _refuse_sharded) as rank:
        # The chief digests alone, so that nothing here may wait for other processes.
        leaves = leaf_digests(tree) if group.count == 1 else digests_of_leaves(flatten(tree))
        return combined({path: leaves[path] for path in leaves if not rank.owns(path)}).hex


def share_digests(shares: Sequence[Any]) -> list[str]:
    """`state_digest` of each share of a batch, all in one pass."""
    with rank_context(0, 1, _refuse_sharded) as rank:
        return [
            combined({path: leaves[path] for path in leaves if not rank.owns(f"{n}/{path}")}).hex
            for n, leaves in enumerate(leaf_digests_of_each(shares))
        ]


def combined_digest(digests: list[str]) -> str:
    """One digest of several, in their order."""
    return blake3("".join(digests).encode()).hexdigest()[:DIGITS]


def _refuse_sharded() -> None:
    raise UnsupportedLeafError(
        "an array is sharded over the processes of the group, and the journal digests whole arrays. "
        "Leave `journal_every` out for this run."
    )
