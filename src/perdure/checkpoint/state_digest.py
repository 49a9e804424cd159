"""128 bits of a tree of values, the same wherever it was computed; and the digests of the parts of
a step for `perdure bisect` and `perdure doctor`, outside of which that costs a look at the
environment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from blake3 import blake3

from perdure.digests import Digest, combined, digests_of_leaves, leaf_digests
from perdure.digests.digest import leaf_digests_of_each
from perdure.errors import UnsupportedLeafError
from perdure.runtime.process_group import Processes, SingleProcess, group_of
from perdure.state import flatten
from perdure.state.per_rank import rank_context
from perdure.store.drill_hook import drill_hook
from perdure.store.leaf import Leaves

DIGITS = 32


def state_digest(tree: Any, processes: Processes | None = None) -> str:
    """`perdure.digests.digest` of all leaves as 32 hexadecimal digits, without members in
    `PerRank`. An array that is sharded over processes has none."""
    leaves = digests_by_path(tree, group_of(processes))
    return combined(leaves).hex


def digests_by_path(tree: Any, group: Processes) -> dict[str, Digest]:
    """The digest of each leaf, without members in `PerRank`; errors as `state_digest`."""
    with rank_context(group.index, group.count) as rank:
        # The chief digests alone, so that nothing here may wait for other processes.
        leaves = leaf_digests(tree) if group.count == 1 else digests_of_leaves(_whole(tree))
        return {path: leaves[path] for path in leaves if not rank.owns(path)}


def show_doctor(where: str, step: int, tree: Any, group: Processes) -> None:
    """Under `perdure doctor`, show it a state that the program saves or records."""
    hook = drill_hook()
    if hook is not None and hook.is_doctor and group.is_chief:
        leaves = digests_by_path(tree, group)
        hook.recorded(where, step, {path: digest.hex for path, digest in leaves.items()})


def batch_digest(batch: Any) -> str:
    """`state_digest` of a batch, which need not come back: any array counts by its bytes."""
    try:
        return state_digest(_by_bytes(batch))
    except UnsupportedLeafError as error:
        raise _no_batch(error) from error


def share_digests(shares: Sequence[Any]) -> list[str]:
    """`batch_digest` of each share of a batch, all in one pass."""
    with rank_context(0, 1) as rank:
        try:
            return [
                combined(
                    {path: leaves[path] for path in leaves if not rank.owns(f"{n}/{path}")}
                ).hex
                for n, leaves in enumerate(leaf_digests_of_each(_by_bytes(list(shares))))
            ]
        except UnsupportedLeafError as error:
            raise _no_batch(error) from error


def combined_digest(digests: list[str]) -> str:
    """One digest of several, in their order."""
    return blake3("".join(digests).encode()).hexdigest()[:DIGITS]


def _by_bytes(value: Any) -> Any:
    """`value`, with dtype, shape and bytes in place of each array that no checkpoint takes."""
    if isinstance(value, dict):
        return {key: _by_bytes(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_by_bytes, value))
    if type(value) in (list, tuple):
        return [_by_bytes(item) for item in value]
    if isinstance(value, np.memmap):
        value = value.view(np.ndarray)
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    kind = value.dtype
    if kind.hasobject:
        return _by_bytes(value.tolist()) if kind.names is None else value
    if kind.kind in "USmM" or kind.type is np.void:
        octets = np.frombuffer(value.tobytes(), np.uint8)
        return {"dtype": str(kind), "shape": list(value.shape), "bytes": octets}
    return value


def _no_batch(error: UnsupportedLeafError) -> UnsupportedLeafError:
    reason = str(error).replace("(the state itself)", "(the batch itself)")
    reason = reason.replace("leave it out of the state", "leave it out of the batch")
    return UnsupportedLeafError(
        f"the batch has no digest, because of a value in it: {reason} A batch is any tree of arrays, "
        f"numbers and strings; pass these to `record`, or leave `batch` out."
    )


def _whole(tree: Any) -> Leaves:
    leaves = flatten(tree)
    for path, leaf in leaves.items():
        if leaf.shards is not None:
            raise UnsupportedLeafError(
                f"{path}: an array that is sharded over the processes of the group, and the journal "
                f"digests whole arrays. Leave `journal_every` out for this run."
            )
    return leaves


def is_tracing() -> bool:
    """Whether this process replays a step that is compared with that of another run."""
    hook = drill_hook()
    return hook is not None and hook.is_tracing()


def is_computing_traced(step: int) -> bool:
    """Whether a strategy, which counts it as `step`, now computes the step that is asked for."""
    hook = drill_hook()
    return hook is not None and hook.is_computing_traced(step)


def trace_recorded(step: int, part: str, value: Any, group: Processes | None = None) -> None:
    """Report a part of a step (of `perdure.drill.step_bisect.PARTS`), if it is asked for. `step`
    counts how many steps the state contains."""
    hook = drill_hook()
    if hook is not None and hook.traces(step):
        trace_part(part, value, group=group)


def trace_part(
    part: str, value: Any, replica: int | None = None, group: Processes | None = None
) -> None:
    """Report a part of the step that is asked for, of a logical replica if it is one's."""
    hook = drill_hook()
    if hook is None:
        return
    with suppress(UnsupportedLeafError):
        digests = digests_by_path(value, group or SingleProcess())
        hook.trace(part, replica, {path: digest.hex for path, digest in digests.items()})
