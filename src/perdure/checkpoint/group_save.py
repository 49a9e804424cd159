"""A group of processes that saves and restores as one.

The chief holds the lock and commits; every process writes its share. Invariant: every process returns
from a call with the same outcome: an error in one process is raised in all of them, as the same class.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import Struct

from perdure import errors
from perdure.checkpoint.mirror import Mirror, RestoreSource
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    NotARunError,
    PerdureError,
    SaveError,
    StateError,
    StoreError,
    WorkerLostError,
)
from perdure.process_group import Processes
from perdure.store import Leaf, Run
from perdure.store.contents import Catalog
from perdure.store.format import PACKS, hash_bytes
from perdure.store.leaf import Leaves, containers_of
from perdure.store.manifest import RecipeValue
from perdure.store.pack_part import Own, OwnRows, PackPart, assemble, leaf_digests, write_pack_part
from perdure.store.record_builder import Held
from perdure.store.writer import Written

_WRITE, _NOTHING = b"write", b"nothing"
R = TypeVar("R")
T = TypeVar("T", bound=Struct)


class _Outcome(Struct):
    """How a call ended in one process: without an error, or with an error of this class and text."""

    kind: str | None = None
    text: str = ""
    step: int | None = None
    steps: tuple[int, ...] = ()
    """What the call returns, where it returns steps."""
    mirrored: bool = False
    """Whether the step is to be read from the mirror."""
    fingerprint: str = ""
    """The fingerprint of the checkpoint of `step`."""


class _Framed(Struct):
    """What one process says in a collective, and in which call of the user."""

    call: str
    data: bytes


class InCall:
    """The group during one call: collectives of other calls are an error in every process.

    Without this, what one process says in a `save` would be read by another one in its `restore`.
    """

    def __init__(self, processes: Processes, call: str) -> None:
        self._processes = processes
        self._call = call
        self.index = processes.index
        self.count = processes.count
        self.is_chief = processes.is_chief

    def barrier(self) -> None:
        self.gather(b"")

    def gather(self, data: bytes) -> list[bytes]:
        if self.count == 1:
            return [data]
        sent = self._processes.gather(msgspec.msgpack.encode(_Framed(self._call, data)))
        framed = [_framed(each) for each in sent]
        if len({each.call for each in framed}) > 1:
            calls = ", ".join(f"process {n} {each.call}" for n, each in enumerate(framed))
            raise StoreError(
                f"the processes of the group made different calls: {calls}. Nothing was changed. In a "
                f"group every process makes the same calls, in the same order."
            )
        return [each.data for each in framed]

    def broadcast(self, data: bytes | None) -> bytes:
        return self._processes.broadcast(data)

    def any(self, flag: bool) -> bool:
        return b"\1" in self.gather(b"\1" if flag else b"\0")

    def channel(self, name: str) -> Processes:
        return self._processes.channel(name)


def _framed(data: bytes) -> _Framed:
    try:
        return _decode(data, _Framed)
    except msgspec.MsgspecError:
        return _Framed("an operation of its own", data)


class _Part(Struct):
    """What one process brings to a save."""

    step: int
    share: PackPart | None = None
    error: str = ""
    kind: str = ""


def save_in_group(
    run: Run,
    processes: Processes,
    step: int,
    leaves: Mapping[str, Leaf],
    recipe: Mapping[str, RecipeValue],
    metrics: Mapping[str, float],
    prune: Callable[[], None],
    own: Own | None = None,
) -> None:
    """One checkpoint by all processes; committed in all of them on return, or an error in all.

    Called by every process with its own copy of the state, on a channel of its own, and with the
    leaves that it alone has. The chief then calls `prune`. Raises `StateError` naming the leaf and the
    process if the copies differ, and what `Run.save` and `prune` raise. A process that has no copy
    calls `decline_save` instead.
    """
    own = own or Own()
    rows = _gather_own(processes, own)
    if not processes.is_chief:
        _follow_save(
            processes,
            leaves,
            lambda: _write_part(run, processes, step, leaves, Catalog(run.storage), own),
        )
        return
    asked = False
    whole: dict[str, Any] = {**leaves, **{row.path: row for each in rows for row in each.ranked}}
    everything = Leaves(whole, containers_of(leaves))
    local: dict[str, Any] = {row.path: row for each in rows for row in each.local}

    def write(held: Mapping[str, Held]) -> Written:
        nonlocal asked
        asked = True
        processes.broadcast(_WRITE)
        part, error = _write_part(run, processes, step, leaves, held, own)
        try:
            shares = _agreed(processes, leaves, part)
        except PerdureError as told:
            _raise_own(error, told)
        _require_visible(run, shares, {at.pack for at in held.values()})
        return assemble(leaves, shares)

    def save_and_prune() -> None:
        run.save(step, everything, recipe, metrics, write, local)
        prune()

    _, error = _attempt(save_and_prune)
    told = None if error is None else as_save_error(error)
    if not asked:
        processes.broadcast(_NOTHING)
    _tell(processes, _outcome(told))
    if told is not None:
        _raise_own(error, told)


def decline_save(processes: Processes, step: int, error: BaseException) -> None:
    """Take part in a save without a share, so that every other process learns of `error` at once."""
    _gather_own(processes, Own())
    if processes.is_chief:
        processes.broadcast(_NOTHING)
        _tell(processes, _outcome(as_save_error(error)))
        return
    try:
        _follow_save(processes, {}, lambda: (_failed(processes, step, error), None))
    except WorkerLostError:
        raise
    except PerdureError:
        pass  # the caller raises `error`


def as_save_error(error: BaseException) -> PerdureError:
    """`error` itself if perdure raised it on purpose, else a `SaveError` about it."""
    if isinstance(error, PerdureError):
        return error
    return SaveError(f"the save failed: {error!r}. Every earlier checkpoint is still there.")


def load_in_group(
    run: Run,
    processes: Processes,
    step: int | None,
    wanted: Callable[[str], bool] | None = None,
    mirror: Mirror | None = None,
) -> tuple[RestoreSource, frozenset[int]]:
    """The same checkpoint in every process: the chief picks it, the others load the same step.

    With a mirror the chief picks from both, and all read where it did. If `step` is None and the bytes
    are damaged for some process, all of them take an older checkpoint. Returns the checkpoint, and the
    skipped steps that the chief itself can read.
    """
    elsewhere: dict[int, str] = {}

    def pick() -> RestoreSource:
        if mirror is not None:
            return mirror.load(step, wanted, elsewhere)
        if step is not None:
            return RestoreSource(run.load(step, wanted), False, [])
        return RestoreSource(run.load_newest(wanted, elsewhere), False, [])

    if processes.count == 1:
        return pick(), frozenset()
    while True:
        found, error = _load_once(run, processes, pick, wanted, mirror)
        failed = _failures(processes, error)
        if not failed and found is not None:
            return found, frozenset(elsewhere)
        damaged = all(_is_damage(outcome) for outcome in failed.values())
        if step is not None or not damaged:
            _raise_first(processes, failed, error)
        if found is not None and found.loaded is not None:  # always so in the chief
            elsewhere[found.loaded.manifest.step] = "; ".join(
                f"process {number}: {outcome.text}" for number, outcome in failed.items()
            )
        del found  # before the next one takes as much memory


def chief_does(
    processes: Processes, call: str, action: Callable[[], Sequence[int] | None]
) -> list[int]:
    """`action` in the chief, with the same outcome in every process. A collective.

    `call` says what it is: all processes must ask for the same, or nothing is done and each raises
    `StoreError`. Returns the steps that `action` returned.
    """
    if processes.count == 1:
        return list(action() or ())
    InCall(processes, call).barrier()
    if processes.is_chief:
        steps, error = _attempt(action)
        outcome = _outcome(error)
        outcome.steps = tuple(steps or ())
        _tell(processes, outcome)
        if error is not None:
            raise error
    else:
        outcome = _heard(processes)
        _follow(outcome)
    return list(outcome.steps)


def all_do(processes: Processes, action: Callable[[], R]) -> R:
    """`action` in every process; an error in one of them is raised in all. A collective."""
    if processes.count == 1:
        return action()
    result, error = _attempt(action)
    if failed := _failures(processes, error):
        _raise_first(processes, failed, error)
    return result  # type: ignore[return-value]


def require_same(processes: Processes, leaves: Mapping[str, Leaf]) -> None:
    """Raise `StateError` naming leaf and process unless all processes hold one state. A collective."""
    digests = leaf_digests(leaves)
    mine = hash_bytes(msgspec.json.encode(digests)).encode()
    if len(set(processes.gather(mine))) > 1:
        _differ(processes, digests)


def _attempt(action: Callable[[], R]) -> tuple[R | None, BaseException | None]:
    try:
        return action(), None
    except WorkerLostError:
        raise  # there is nobody left to agree with
    except BaseException as error:  # noqa: BLE001 (the other processes are told)
        return None, error


def _load_once(
    run: Run,
    processes: Processes,
    pick: Callable[[], RestoreSource],
    wanted: Callable[[str], bool] | None,
    mirror: Mirror | None,
) -> tuple[RestoreSource | None, BaseException | None]:
    """What this process loads of the step that the chief picks, and why it could not."""
    if processes.is_chief:
        found, error = _attempt(pick)
        outcome = _outcome(error)
        if found is not None:
            outcome.mirrored = found.mirrored
            if found.loaded is not None:
                outcome.step = found.loaded.manifest.step
                outcome.fingerprint = found.loaded.manifest.fingerprint
        _tell(processes, outcome)
        if error is not None:
            raise error
        return found, None
    outcome = _heard(processes)
    _follow(outcome)
    if (step := outcome.step) is None:
        return RestoreSource(None, False, []), None
    storage = mirror.storage if mirror is not None and outcome.mirrored else run.storage

    def follow() -> RestoreSource:
        try:
            loaded = Run(storage).load(step, wanted)
        except NotARunError as error:
            raise StoreError(
                f"it does not see the run directory that the chief restores from; all processes need "
                f"one shared directory. {error}"
            ) from error
        if loaded.manifest.fingerprint != outcome.fingerprint:
            raise StoreError(
                f"{storage.where}: it finds another checkpoint of step {step} (fingerprint "
                f"{loaded.manifest.fingerprint}) than process 0 does ({outcome.fingerprint}); all "
                f"processes need one shared directory. Nothing was restored."
            )
        return RestoreSource(loaded, outcome.mirrored, [])

    return _attempt(follow)


def _gather_own(processes: Processes, own: Own) -> list[OwnRows]:
    """The leaves that each process has alone, by their hashes: the fingerprint covers all of them."""
    rows = processes.gather(msgspec.msgpack.encode(OwnRows.of(own)))
    return [_decode(data, OwnRows) for data in rows]


def _follow_save(
    processes: Processes,
    leaves: Mapping[str, Leaf],
    write: Callable[[], tuple[_Part, BaseException | None]],
) -> None:
    error = None
    if processes.broadcast(None) == _WRITE:
        part, error = write()
        try:
            _agreed(processes, leaves, part)
        except WorkerLostError:
            raise
        except PerdureError:
            pass  # the chief finds the same, and tells it below
    try:
        _follow(_heard(processes))
    except PerdureError as told:
        _raise_own(error, told)


def _raise_own(error: BaseException | None, told: PerdureError) -> NoReturn:
    """Raise what the group agreed on, or an interrupt of this process, which only it has."""
    if error is not None and not isinstance(error, Exception):
        raise error
    raise told from (None if error is told else error)


def _write_part(
    run: Run,
    processes: Processes,
    step: int,
    leaves: Mapping[str, Leaf],
    held: Mapping[str, Held] | Catalog,
    own: Own,
) -> tuple[_Part, BaseException | None]:
    def write() -> PackPart:
        known = held.held() if isinstance(held, Catalog) else held
        index, count = processes.index, processes.count
        return write_pack_part(run.storage, step, leaves, known, index, count, run.encode, own)

    share, error = _attempt(write)
    if error is not None:
        return _failed(processes, step, error), error
    return _Part(step, share), None


def _failed(processes: Processes, step: int, error: BaseException) -> _Part:
    text = str(error) if isinstance(error, (OSError, PerdureError)) else repr(error)
    kind = type(error).__name__ if isinstance(error, (ArgumentError, StateError)) else ""
    return _Part(step, error=f"process {processes.index}: {text}", kind=kind)


def _agreed(processes: Processes, leaves: Mapping[str, Leaf], part: _Part) -> list[PackPart]:
    """The shares of all processes, once none failed and all hold the same state. A collective."""
    parts = [_decode(data, _Part) for data in processes.gather(msgspec.msgpack.encode(part))]
    if failed := [part for part in parts if part.error]:
        kinds = {part.kind for part in failed}
        kind = getattr(errors, kinds.pop()) if len(kinds) == 1 and all(kinds) else SaveError
        texts = "; ".join(part.error.rstrip(".") for part in failed)
        raise kind(f"{texts}. Every earlier checkpoint is still there.")
    if len({part.step for part in parts}) > 1:
        steps = ", ".join(f"process {number}: {part.step}" for number, part in enumerate(parts))
        raise StateError(
            f"the processes of the group save different steps ({steps}). Nothing was saved. All "
            f"processes must call `save` at the same steps, from one thread."
        )
    shares = [part.share for part in parts if part.share is not None]
    if len({share.state for share in shares}) > 1:
        _differ(processes, leaf_digests(leaves))
    return shares


def _require_visible(run: Run, shares: Sequence[PackPart], held: AbstractSet[str]) -> None:
    """Raise `SaveError` unless the chief sees every pack that another process names, in full.

    On hosts with a directory of their own under one path, the packs of the others are not there. The
    chief knows those in `held` already.
    """
    seen = {*held, *shares[0].packs}
    for number, share in enumerate(shares):
        for name, size in share.packs.items():
            if name in seen:
                continue
            seen.add(name)
            try:
                actual = f"{run.storage.size(PACKS + name)} bytes"
            except FileNotFoundError:
                actual = "no such file"
            if actual != f"{size} bytes":
                raise SaveError(
                    f"{run.where}: process {number} says that {PACKS}{name} has {size} bytes, and "
                    f"process 0 finds {actual}. All processes need one shared directory: a path on a "
                    f"file system that all hosts mount, or a bucket. Nothing was committed; every "
                    f"earlier checkpoint is still there."
                )


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
        "and restore in all of them. What each process has for itself (the buffers of BatchNorm under "
        "DistributedDataParallel, the position in its shard of the data) must be made equal before the "
        "save (buffers: dist.broadcast from rank 0) or be wrapped: perdure.checkpoint.PerRank(member)."
    )


def _failures(processes: Processes, error: BaseException | None) -> dict[int, _Outcome]:
    """The errors of all processes, by process. A collective."""
    sent = processes.gather(msgspec.msgpack.encode(_outcome(error)))
    outcomes = [_decode(data, _Outcome) for data in sent]
    return {number: each for number, each in enumerate(outcomes) if each.kind is not None}


def _raise_first(
    processes: Processes, failed: Mapping[int, _Outcome], error: BaseException | None
) -> NoReturn:
    """Raise the error of the first process that has one; an interrupt stays what it is here."""
    first = min(failed)
    if error is not None and (first == processes.index or not isinstance(error, Exception)):
        raise error
    raise _rebuilt(f"process {first}", failed[first]) from error


def _outcome(error: BaseException | None) -> _Outcome:
    if error is None:
        return _Outcome()
    # A class that is private to a module is told as the public one that it derives from.
    public = (
        kind for kind in type(error).__mro__ if kind.__module__ in ("builtins", errors.__name__)
    )
    return _Outcome(next(public).__name__, str(error))


def _tell(processes: Processes, outcome: _Outcome) -> None:
    processes.broadcast(msgspec.msgpack.encode(outcome))


def _heard(processes: Processes) -> _Outcome:
    return _decode(processes.broadcast(None), _Outcome)


def _follow(outcome: _Outcome) -> None:
    if outcome.kind is not None:
        raise _rebuilt("the chief process", outcome)


def _is_damage(outcome: _Outcome) -> bool:
    kind = getattr(errors, outcome.kind or "", None)
    return isinstance(kind, type) and issubclass(kind, CorruptionError)


def _rebuilt(who: str, outcome: _Outcome) -> Exception:
    """The error of another process, as the same class where that can be made from a text."""
    name = outcome.kind or ""
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(Exception):
            return kind(f"{who}: {outcome.text}")
    return StoreError(f"{who}: {name}: {outcome.text}")


def _decode(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)
