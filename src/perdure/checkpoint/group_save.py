"""One checkpoint saved by all processes of a group.

Every process writes its share, and the chief, which holds the lock, commits. Invariant: the checkpoint
is committed for all of them or for none, and an error, also of the prune after the commit, is raised in
every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from perdure import errors
from perdure.checkpoint.group_call import (
    CallOutcome,
    attempt,
    broadcast_outcome,
    decoded,
    follow_chief,
)
from perdure.errors import ArgumentError, PerdureError, SaveError, StateError, WorkerLostError
from perdure.process_group import Processes
from perdure.store import Leaf, Run
from perdure.store.catalog import Catalog
from perdure.store.entry_builder import Held
from perdure.store.format import PACKS, hash_bytes
from perdure.store.leaf import Leaves, RemoteLeaf, containers_of
from perdure.store.manifest import RecipeValue
from perdure.store.pack_part import (
    OwnLeaves,
    OwnRows,
    PackPart,
    assemble,
    join_shards,
    leaf_digests,
    write_pack_part,
)
from perdure.store.pack_writer import Written

_WRITE, _NOTHING = b"write", b"nothing"
_MOST_LINES = 20


@dataclass(frozen=True)
class GroupState:
    """What one process brings to a save: its copy of the shared state and the leaves it alone has."""

    step: int
    leaves: Mapping[str, Leaf]
    own: OwnLeaves = field(default_factory=OwnLeaves)


class _Share(Struct):
    """What one process reports to the others: the part that it has written, or why it has not."""

    step: int
    part: PackPart | None = None
    error: str = ""
    kind: str = ""


class GatherAgreement:
    """Whether all processes are about to gather the sharded arrays of one step.

    Without it, a process that saves another step would gather other arrays, and one that has no state
    to save would leave the others waiting in a collective of the framework.
    """

    def __init__(self, processes: Processes, step: int) -> None:
        self._processes = processes
        self._step = step
        self.failed = False

    def reach(self) -> None:
        """Raise `SaveError` unless all processes call this for the same step. A collective."""
        rows = _gather_rows(self._processes, OwnRows({}, {}, self._step))
        if all(row.ready == self._step for row in rows):
            return
        self.failed = True
        steps = ", ".join(
            f"process {number}: {'none' if row.ready is None else row.ready}"
            for number, row in enumerate(rows)
        )
        raise SaveError(
            f"the processes of the group do not all gather the sharded arrays of step {self._step} "
            f"({steps}). Nothing was saved. All processes must call `save` at the same steps, with a "
            f"state of the same structure; a process with 'none' has another one, or raised an error."
        )


@contextmanager
def save_in_group(
    run: Run,
    processes: Processes,
    state: GroupState,
    recipe: Mapping[str, RecipeValue],
    metrics: Mapping[str, float],
) -> Iterator[None]:
    """Save one checkpoint by all processes, and run the block after the commit.

    Every process enters this with its own copy of the state, on a channel of its own. The block is for
    work of the chief (retention): when it ends, the checkpoint is durable and committed for all
    processes. An error of the save, or of the block in the chief, is raised in all of them. A process
    that has no state to save calls `decline_save` instead.

    Raises:
        StateError: The copies of the state differ; names leaf and process.
        StoreError: As `Run.save`, or as the block.
    """
    rows = _gather_own(processes, state.own)
    if processes.is_chief:
        error = _lead(run, processes, state, rows, recipe, metrics)
        if error is None:
            try:
                yield
            except WorkerLostError:
                raise
            except BaseException as raised:  # noqa: BLE001 (raised below in all processes)
                error = raised
        agreed = None if error is None else as_save_error(error)
        broadcast_outcome(processes, CallOutcome.of(agreed))
        if agreed is not None:
            _raise_agreed(error, agreed)
    else:
        error = _follow(
            processes,
            state.leaves,
            lambda: _write_share(run, processes, state, Catalog(run.storage)),
        )
        try:
            follow_chief(processes)
        except PerdureError as agreed:
            _raise_agreed(error, agreed)
        yield


def decline_save(
    processes: Processes, step: int, error: BaseException, *, gathered: bool = False
) -> None:
    """Take part in a save without a share, so that every other process learns of `error` at once.

    With `gathered`, a `GatherAgreement` failed, which was the first collective of the save.
    """
    if not gathered:
        _gather_own(processes, OwnLeaves())
    if processes.is_chief:
        processes.broadcast(_NOTHING)
        broadcast_outcome(processes, CallOutcome.of(as_save_error(error)))
        return
    try:
        _follow(processes, {}, lambda: (_failed(processes, step, error), None))
        follow_chief(processes)
    except WorkerLostError:
        raise
    except PerdureError:
        pass  # the caller raises `error`


def as_save_error(error: BaseException) -> PerdureError:
    """`error` itself if perdure raised it on purpose, else a `SaveError` about it."""
    if isinstance(error, PerdureError):
        return error
    return SaveError(f"the save failed: {error!r}. Every earlier checkpoint is still there.")


def require_same(processes: Processes, leaves: Mapping[str, Leaf]) -> None:
    """Raise `StateError` naming leaf and process unless all processes hold one state. A collective."""
    digests = leaf_digests(leaves)
    digest = hash_bytes(msgspec.json.encode(digests)).encode()
    if len(set(processes.gather(digest))) > 1:
        _raise_differing(processes, digests)


def _gather_own(processes: Processes, own: OwnLeaves) -> list[OwnRows]:
    """The leaves that each process has alone, by their hashes: the fingerprint covers all of them."""
    return _gather_rows(processes, OwnRows.of(own))


def _gather_rows(processes: Processes, rows: OwnRows) -> list[OwnRows]:
    sent = processes.gather(msgspec.msgpack.encode(rows))
    return [decoded(data, OwnRows) for data in sent]


def _lead(
    run: Run,
    processes: Processes,
    state: GroupState,
    rows: Sequence[OwnRows],
    recipe: Mapping[str, RecipeValue],
    metrics: Mapping[str, float],
) -> BaseException | None:
    """The chief's side of a save, up to the commit; returns its error."""
    merged: dict[str, Any] = dict(state.leaves)
    process_leaves: dict[str, RemoteLeaf] = {}
    for process in rows:
        merged |= process.per_rank
        process_leaves |= process.process_leaves
    others_wait = True

    def commit() -> None:
        nonlocal others_wait
        leaves = Leaves(join_shards(merged), containers_of(state.leaves))
        with run.prepare_save(state.step, leaves, process_leaves) as save:
            written = None
            if not save.is_committed:
                others_wait = False
                processes.broadcast(_WRITE)
                written = _write_parts(run, processes, state, save.held)
            run.commit_save(save, written, recipe, metrics)

    _, error = attempt(commit)
    if others_wait:
        processes.broadcast(_NOTHING)
    return error


def _write_parts(
    run: Run, processes: Processes, state: GroupState, held: Mapping[str, Held]
) -> Written:
    """Write the chief's part, wait for the others, and put the parts together. A collective."""
    share, error = _write_share(run, processes, state, held)
    try:
        parts = _agreed_parts(processes, state.leaves, share)
    except PerdureError as agreed:
        _raise_agreed(error, agreed)
    require_visible(run, parts, {place.pack for place in held.values()})
    return assemble(state.leaves, parts)


def _follow(
    processes: Processes,
    leaves: Mapping[str, Leaf],
    write: Callable[[], tuple[_Share, BaseException | None]],
) -> BaseException | None:
    """The side of the other processes, up to the commit; returns the error of this process."""
    if processes.broadcast(None) != _WRITE:
        return None
    share, error = write()
    try:
        _agreed_parts(processes, leaves, share)
    except WorkerLostError:
        raise
    except PerdureError:
        pass  # the chief finds the same, and broadcasts it
    return error


def _raise_agreed(error: BaseException | None, agreed: PerdureError) -> NoReturn:
    """Raise the error that the group agreed on, or an interrupt that only this process has."""
    if error is not None and not isinstance(error, Exception):
        raise error
    raise agreed from (None if error is agreed else error)


def _write_share(
    run: Run, processes: Processes, state: GroupState, held: Mapping[str, Held] | Catalog
) -> tuple[_Share, BaseException | None]:
    def write() -> PackPart:
        known = held.held() if isinstance(held, Catalog) else held
        index, count = processes.index, processes.count
        return write_pack_part(
            run.storage, state.step, state.leaves, known, index, count, run.encode, state.own
        )

    part, error = attempt(write)
    if error is not None:
        return _failed(processes, state.step, error), error
    return _Share(state.step, part), None


def _failed(processes: Processes, step: int, error: BaseException) -> _Share:
    text = str(error) if isinstance(error, (OSError, PerdureError)) else repr(error)
    kind = type(error).__name__ if isinstance(error, (ArgumentError, StateError)) else ""
    return _Share(step, error=f"process {processes.index}: {text}", kind=kind)


def _agreed_parts(
    processes: Processes, leaves: Mapping[str, Leaf], share: _Share
) -> list[PackPart]:
    """The parts of all processes, if none failed and all hold the same state. A collective."""
    shares = [decoded(data, _Share) for data in processes.gather(msgspec.msgpack.encode(share))]
    if failed := [share for share in shares if share.error]:
        kinds = {share.kind for share in failed}
        kind = getattr(errors, kinds.pop()) if len(kinds) == 1 and all(kinds) else SaveError
        texts = "; ".join(share.error.rstrip(".") for share in failed)
        raise kind(
            f"saving step {share.step} failed in {len(failed)} of {processes.count} processes: "
            f"{texts}. Every earlier checkpoint is unchanged. Save again once the cause is removed."
        )
    if len({share.step for share in shares}) > 1:
        steps = ", ".join(f"process {number}: {share.step}" for number, share in enumerate(shares))
        raise StateError(
            f"the processes of the group save different steps ({steps}). Nothing was saved. All "
            f"processes must call `save` at the same steps, from one thread."
        )
    parts = [share.part for share in shares if share.part is not None]
    if len({part.state_hash for part in parts}) > 1:
        _raise_differing(processes, leaf_digests(leaves))
    return parts


def require_visible(run: Run, parts: Sequence[PackPart], held: AbstractSet[str]) -> None:
    """Raise `SaveError` unless the chief sees every pack that another process names, in full.

    On hosts with a directory of their own under one path, the packs of the others are not there. The
    chief knows those in `held` already.
    """
    seen = {*held, *parts[0].packs}
    for number, part in enumerate(parts):
        for name, size in part.packs.items():
            if name in seen:
                continue
            seen.add(name)
            try:
                actual = f"{run.storage.size(PACKS + name)} bytes"
            except FileNotFoundError:
                actual = "no such file"
            if actual != f"{size} bytes":
                raise SaveError(
                    f"{run.where}: process {number} wrote {PACKS}{name} with {size} bytes, and process "
                    f"0 finds {actual}. All processes need one shared directory: a path on a file "
                    f"system that all hosts mount, or a bucket. Nothing was committed; every earlier "
                    f"checkpoint is still there."
                )


def _raise_differing(processes: Processes, digests: Mapping[str, str]) -> NoReturn:
    """Raise, the same in every process, which leaves differ between them. A collective."""
    sent = processes.gather(msgspec.json.encode(digests))
    gathered: Sequence[dict[str, str]] = [msgspec.json.decode(data) for data in sent]
    first = gathered[0]
    lines = [
        f"  {path}: process {number} holds other bits than process 0"
        for number, other in enumerate(gathered)
        for path in sorted(first.keys() | other.keys())
        if other.get(path) != first.get(path)
    ]
    raise StateError(
        "the processes of the group hold different states:\n"
        + "\n".join(lines[:_MOST_LINES])
        + "\nAll processes must start from the same state and run the same steps: give them one seed, "
        "and restore in all of them. What each process has for itself (the buffers of BatchNorm under "
        "DistributedDataParallel, the position in its shard of the data) must be made equal before the "
        "save (buffers: dist.broadcast from rank 0) or be wrapped: perdure.checkpoint.PerRank(member)."
    )
