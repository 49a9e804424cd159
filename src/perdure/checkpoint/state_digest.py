"""`state_digest`: 128 bits of a tree of values, the same wherever it was computed."""

from __future__ import annotations

from typing import Any

from blake3 import blake3

from perdure.digests import combined, digests_of_leaves, leaf_digests
from perdure.errors import UnsupportedLeafError
from perdure.process_group import Processes, SingleProcess
from perdure.state import flatten
from perdure.state.per_rank import rank_context
from perdure.store.leaf import Leaves

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
    with rank_context(group.index, group.count) as rank:
        # The chief digests alone, so that nothing here may wait for other processes.
        leaves = leaf_digests(tree) if group.count == 1 else digests_of_leaves(_whole(tree))
        return combined({path: leaves[path] for path in leaves if not rank.owns(path)}).hex


def combined_digest(digests: list[str]) -> str:
    """One digest of several, in their order."""
    return blake3("".join(digests).encode()).hexdigest()[:DIGITS]


def _whole(tree: Any) -> Leaves:
    leaves = flatten(tree)
    for path, leaf in leaves.items():
        if leaf.shards is not None:
            raise UnsupportedLeafError(
                f"{path}: an array that is sharded over the processes of the group, and the journal "
                f"digests whole arrays. Leave `journal_every` out for this run."
            )
    return leaves
