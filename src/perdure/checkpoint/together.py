"""A group of processes that saves and restores as one.

The chief holds the lock and commits; every process writes its share. Invariant: all processes of the
group come out of a call with the same outcome. What one of them cannot do, the others are told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, TypeVar

import msgspec
from msgspec import Struct

from perdure import errors
from perdure.checkpoint.mirror import Found, Mirror
from perdure.checkpoint.processes import Processes
from perdure.errors import (
    NotARunError,
    PerdureError,
    SaveError,
    StateError,
    StoreError,
    WorkerLostError,
)
from perdure.store import Leaf, Run
from perdure.store.contents import Catalog
from perdure.store.format import RecipeValue, hash_bytes
from perdure.store.share import Share, assemble, leaf_digests, write_share
from perdure.store.writer import Held, Written

_WRITE, _NOTHING = b"write", b"nothing"
T = TypeVar("T", bound=Struct)


class _Outcome(Struct):
    """How something ended in one process: nothing went wrong, or the error's class and text."""

    kind: str | None = None
    text: str = ""
    step: int | None = None
    mirrored: bool = False
    """Whether the step is to be read from the mirror."""


class _Part(Struct):
    """What one process brings to a save."""

    share: Share | None = None
    error: str = ""


def save_together(
    run: Run,
    processes: Processes,
    step: int,
    leaves: Mapping[str, Leaf],
    recipe: Mapping[str, RecipeValue],
    metrics: Mapping[str, float],
) -> None:
    """One checkpoint by all processes; committed in all of them on return, or an error in all.

    Called by every process with its own copy of the state, on a channel of its own. Raises
    `StateError` naming the leaf and the process where the copies differ, and what `Run.save` raises.
    """
    if not processes.is_chief:
        if processes.broadcast(None) == _WRITE:
            part = _write_part(run, processes, step, leaves, Catalog(run.storage))
            with suppress(SaveError, StateError):  # the chief sees the same, and says so below
                _agreed(processes, leaves, part)
        _follow(_decode(processes.broadcast(None), _Outcome))
        return
    asked = False

    def write(held: Mapping[str, Held]) -> Written:
        nonlocal asked
        asked = True
        processes.broadcast(_WRITE)
        part = _write_part(run, processes, step, leaves, held)
        return assemble(leaves, _agreed(processes, leaves, part))

    def end(outcome: _Outcome) -> None:
        if not asked:
            processes.broadcast(_NOTHING)
        processes.broadcast(msgspec.msgpack.encode(outcome))

    try:
        run.save(step, leaves, recipe, metrics, write)
    except WorkerLostError:
        raise  # there is nobody left to agree with
    except Exception as error:
        end(_Outcome(type(error).__name__, str(error)))
        raise
    end(_Outcome())


def load_together(
    run: Run, processes: Processes, step: int | None, mirror: Mirror | None = None
) -> Found:
    """The same checkpoint in every process: the chief picks it, the others load the same step.

    With a mirror the chief picks from both, and all read where it did.
    """
    if processes.is_chief:
        try:
            if mirror is not None:
                found = mirror.load(step)
            else:
                found = Found(run.load_newest() if step is None else run.load(step), False, [])
        except PerdureError as error:
            _tell(processes, _Outcome(type(error).__name__, str(error)))
            raise
        loaded = found.loaded
        taken = None if loaded is None else loaded.manifest.step
        _tell(processes, _Outcome(step=taken, mirrored=found.mirrored))
        return found
    outcome = _decode(processes.broadcast(None), _Outcome)
    _follow(outcome)
    if outcome.step is None:
        return Found(None, False, [])
    storage = mirror.storage if mirror is not None and outcome.mirrored else run.storage
    try:
        return Found(Run(storage).load(outcome.step), outcome.mirrored, [])
    except NotARunError as error:
        raise StoreError(
            f"process {processes.index} does not see the run directory that the chief restores from; "
            f"all processes need one shared directory. {error}"
        ) from error


def require_same(processes: Processes, leaves: Mapping[str, Leaf]) -> None:
    """Raise `StateError` naming leaf and process unless all processes hold one state. A collective."""
    digests = leaf_digests(leaves)
    mine = hash_bytes(msgspec.json.encode(digests)).encode()
    if len(set(processes.gather(mine))) > 1:
        _differ(processes, digests)


def _tell(processes: Processes, outcome: _Outcome) -> None:
    if processes.count > 1:
        processes.broadcast(msgspec.msgpack.encode(outcome))


def _write_part(
    run: Run,
    processes: Processes,
    step: int,
    leaves: Mapping[str, Leaf],
    held: Mapping[str, Held] | Catalog,
) -> _Part:
    try:
        known = held.held() if isinstance(held, Catalog) else held
        index, count = processes.index, processes.count
        return _Part(write_share(run.storage, step, leaves, known, index, count, run.encode))
    except (OSError, StoreError) as error:
        return _Part(error=f"process {processes.index}: {error}")


def _agreed(processes: Processes, leaves: Mapping[str, Leaf], part: _Part) -> list[Share]:
    """The shares of all processes, once none failed and all hold the same state. A collective."""
    parts = [_decode(data, _Part) for data in processes.gather(msgspec.msgpack.encode(part))]
    if failed := [part.error for part in parts if part.error]:
        raise SaveError(f"{'; '.join(failed)}. Every earlier checkpoint is still there.")
    shares = [part.share for part in parts if part.share is not None]
    if len({share.state for share in shares}) > 1:
        _differ(processes, leaf_digests(leaves))
    return shares


def _differ(processes: Processes, digests: Mapping[str, str]) -> NoReturn:
    """Say which leaves differ between the processes; every process raises the same."""
    said = processes.gather(msgspec.json.encode(digests))
    every: Sequence[dict[str, str]] = [msgspec.json.decode(data) for data in said]
    lines = [
        f"  {path}: process {number} holds other bits than process 0"
        for number, digests in enumerate(every)
        for path in sorted(every[0].keys() | digests.keys())
        if digests.get(path) != every[0].get(path)
    ]
    raise StateError(
        "the processes of the group hold different states:\n"
        + "\n".join(lines[:20])
        + "\nAll processes must start from the same state and run the same steps: give them one seed, "
        "and restore in all of them."
    )


def _follow(outcome: _Outcome) -> None:
    if outcome.kind is not None:
        kind = getattr(errors, outcome.kind, StoreError)
        raise kind(f"the chief process: {outcome.text}")


def _decode(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)
