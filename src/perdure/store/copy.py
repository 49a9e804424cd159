"""Copying checkpoints from one run directory into another: `copy_run`, `fork_run`.

Invariant: all chunks are verified and durable in packs of the target before the manifest is
created. The two run directories share no file name and no lock; the source does not change.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec

from perdure.errors import (
    CorruptionError,
    LockedError,
    SaveError,
    StepExistsError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store.committer import BYTES_PER_SAVE, ensure_free_bytes
from perdure.store.compact import (
    LiveChunks,
    check_chunks,
    copy_chunks,
    live_chunks,
    relocated,
    relocated_size,
)
from perdure.store.entry_builder import StoredChunk
from perdure.store.failures import DamagedChunk, UnreadChunk
from perdure.store.format import MAX_STEP, PACKS, pack_name
from perdure.store.garbage_collection import PruneRequest
from perdure.store.local import LocalStorage
from perdure.store.manifest import Manifest
from perdure.store.run import Run
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import read_journal
from perdure.store.storage import Storage
from perdure.text import quoted

LINK_SHARE = 0.5
"""A fork links a pack when it needs at least this share of its bytes, and copies chunks otherwise."""


@dataclass(frozen=True)
class Copied:
    """What happened to one step in a copy.

    `outcome` is "copied" (or would be, with `dry_run`), "present", "refused", "damaged" or "gone"
    (deleted in the source meanwhile); `reason` says why not and what to do; `nbytes` were written.
    """

    step: int
    outcome: Literal["copied", "present", "refused", "damaged", "gone"]
    nbytes: int = 0
    reason: str = ""


def copy_run(
    source: str | os.PathLike[str] | Storage,
    target: str | os.PathLike[str] | Storage,
    steps: Iterable[int] | None = None,
    *,
    dry_run: bool = False,
    progress: Callable[[Copied], object] | None = None,
) -> list[Copied]:
    """Copy checkpoints of one run directory into another, oldest first.

    If the two have different histories, or one of the steps cannot be added, nothing is copied. Each
    checkpoint keeps its step, fingerprint, recipe, metrics and time. Chunks that the target holds
    already are not written again. Each copy is durable when its outcome is reported, so a copy that was
    interrupted can be repeated. Pins are not copied.

    Args:
        source: The run directory to read: a path, a URL or a `Storage`. Nothing in it changes.
        target: The run directory to write; it is created when it is empty or missing.
        steps: The steps to copy; all of them by default.
        dry_run: Report what would be copied and change nothing.
        progress: Called with each outcome.

    Returns:
        An outcome for each step, in their order.

    Raises:
        StepNotFoundError: A step of `steps` is not in the source; nothing was copied.
        CorruptionError: A line of the journal that the copy needs is damaged; nothing was copied.
        HistoryError: The target is another run, or the source is a copy that did not end and no steps
            are named; nothing was copied.
        LockedError: Another process writes to the target.
        SaveError: The target cannot be written to (disk full, permission, ...).
        UnreachableError: The source did not answer.
    """
    reader = Run(source)
    writer = Run(target, create=True)
    refuse_same_place(reader.storage, writer.storage)
    writer.adopt_run_id(reader)
    writer.log.made_from = reader.where
    reader.require_not_lost()
    if steps is None:
        reader.require_finished()
    wanted = sorted(set(reader.steps() if steps is None else steps))
    for step in () if steps is None else set(wanted) - set(reader.steps()):
        reader.manifest(step)  # raises, and names the steps that are there
    if wanted:
        lines_to_carry(reader, wanted[-1], writer)  # raises before anything is copied
    outcomes: list[Copied] = []
    planned: set[str] = set()
    refusals = _refusals(reader, wanted, writer)
    with writer:
        for step in wanted:
            if step in refusals:
                outcomes.append(Copied(step, "refused", reason=refusals[step]))
            else:
                is_planned = dry_run or refusals
                outcomes.append(_copy(reader, step, writer, planned if is_planned else None))
            if progress is not None:
                progress(outcomes[-1])
        held = [outcome.step for outcome in outcomes if outcome.outcome in ("copied", "present")]
        if held and not (dry_run or refusals):
            _carry_journal(reader, held[-1], writer)
            writer.finish()
    return outcomes


def fork_run(
    source: str | os.PathLike[str] | Storage,
    step: int,
    directory: str | os.PathLike[str] | Storage,
) -> Manifest:
    """Start a new run directory from one checkpoint of another run.

    The new run shares no file name and no lock with its origin, and each of the two can be pruned or
    deleted without harm to the other. Where both are on one local file system, packs that the
    checkpoint mostly needs become hard links, which take no room (a pack never changes in place);
    other chunks are copied. Every chunk is verified before the checkpoint is committed. A fork that
    was interrupted leaves no checkpoint in `directory` and can be repeated.

    Args:
        source: The run directory to fork: a path, a URL or a `Storage`.
        step: The checkpoint to start from.
        directory: The new run directory; it must be empty, missing, or hold the same fork already.

    Returns:
        The manifest of the new run's checkpoint; it is durable on return.

    Raises:
        StepNotFoundError: The source has no such step.
        CorruptionError: The checkpoint, or a line of the journal up to its step, is damaged in the
            source; nothing was committed.
        StepExistsError: `directory` holds other checkpoints.
        SaveError: `directory` cannot be written to.
    """
    origin = Run(source)
    manifest = origin.manifest(step)
    fork = Run(directory, create=True)
    refuse_same_place(origin.storage, fork.storage)
    steps = fork.steps()
    if steps and (steps != [step] or fork.manifest(step).fingerprint != manifest.fingerprint):
        raise StepExistsError(
            f"{fork.where}: expected an empty or missing directory for the fork, found a run with "
            f"other checkpoints, the newest of step {steps[-1]}. Nothing was changed. Use another "
            f"directory."
        )
    lines_to_carry(origin, step, fork)  # raises before anything is created
    fork.log.made_from = f"{origin.where}@{step}"
    with fork:
        fork.begin_writing()
        fork.require_new()
        if not steps:
            # Packs that an interrupted fork left.
            fork.execute(fork.plan(PruneRequest(orphans_to=MAX_STEP)))
        copy_checkpoint(origin, step, fork, link=True)
        _carry_journal(origin, step, fork)
        fork.finish()
        return fork.manifest(step)


def copy_checkpoint(
    source: Run,
    step: int,
    target: Run,
    *,
    link: bool = False,
    before: Callable[[], None] = lambda: None,
) -> int:
    """Copy one checkpoint, durable on return, to `target`, whose writer this process is or becomes.

    A checkpoint that is present gets the metrics that it lacks, and missing packs are written
    again. `link` makes hard links of packs that are mostly needed. `before` is called before every
    read, and what it raises ends the copy. Returns the bytes that were written.

    Raises StepNotFoundError, StepExistsError (other bits, or a newer step), CorruptionError or
    UnreachableError of the source, LockedError or SaveError of the target.
    """
    target.begin_writing()
    manifest = source.manifest(step)
    try:
        if (refusal := _refusal(target, manifest)) is not None:
            raise StepExistsError(refusal)
        if (present := _whole(target, step)) is not None:
            metrics = {**manifest.metrics, **present.metrics}
            if metrics != present.metrics or step == target.steps()[-1]:
                # Also to make sure that it is durable.
                present = msgspec.structs.replace(present, metrics=metrics)
                target.committer.commit_manifest(present, {}, replace=True)
            return 0
        is_there = step in target.steps()
        held = {} if is_there else target.directory.stored_chunks()
        return _transfer(source, manifest, target, held, link=link, replace=is_there, before=before)
    except UnreadChunk as error:
        raise UnreachableError(f"{source.where}: step {step} was not copied: {error}") from error
    except FileExistsError as error:
        raise LockedError(
            f"{target.where}: step {step} was committed by another writer during the copy ({error}). "
            f"Nothing was overwritten; stop one of the two."
        ) from error
    except OSError as error:
        raise SaveError(
            f"{target.where}: step {step} could not be copied from {source.where}: {error}. Every "
            f"checkpoint there is unchanged. Correct the cause (free space, permissions, network), "
            f"then copy again."
        ) from error


def lines_to_carry(source: Run, step: int, target: Run) -> list[JournalEntry]:
    """The journal up to `step` that a copy lacks; none if it has others.

    Damage after it does not count.
    """
    if not isinstance(source.storage, LocalStorage) or not isinstance(target.storage, LocalStorage):
        return []
    view = source.log.view
    if view.problem is not None and view.journal.newest_step < step:
        view.require()
    last = next(iter(deque(read_journal(target.storage), 1)), None)
    missing: list[JournalEntry] = []
    for entry in view.entries(source.storage):
        if last is not None and entry.step == last.step and entry.state != last.state:
            return []
        if entry.step <= step and (last is None or entry.step > last.step):
            missing.append(entry)
    return missing


def _carry_journal(source: Run, step: int, target: Run) -> None:
    try:
        for entry in lines_to_carry(source, step, target):
            target.log.append(entry, durable=False)
        target.log.sync()
    except OSError as error:
        raise SaveError(
            f"{target.where}: its checkpoints were copied from {source.where}, and the journal could "
            f"not be: {error}. Correct the cause, then copy again."
        ) from error


def refuse_same_place(one: Storage, other: Storage) -> None:
    """Raise `StoreError` when two run directories are the same, or one lies inside the other."""
    if isinstance(one, LocalStorage) and isinstance(other, LocalStorage):
        paths = [os.path.realpath(storage.where) for storage in (one, other)]
        nested = os.path.commonpath(paths) in paths
    else:
        urls = [f"{storage.where.rstrip('/')}/" for storage in (one, other)]
        nested = one is other or (
            "://" in one.where and (urls[0].startswith(urls[1]) or urls[1].startswith(urls[0]))
        )
    if nested:
        raise StoreError(
            f"{other.where}: expected a directory apart from {one.where}, found the same one or one "
            f"inside the other. Name another directory."
        )


def _refusals(source: Run, wanted: Iterable[int], target: Run) -> dict[int, str]:
    """Why steps are not copied: all that the target lacks, or none.

    A step that both have with other bits shows two histories, whether it is wanted or not.
    """
    refused: dict[int, str] = {}
    for step in sorted({*wanted, *source.steps()} & {*wanted, *target.steps()}):
        with suppress(StepNotFoundError, CorruptionError):  # the copy of the step reports it
            if (refusal := _refusal(target, source.manifest(step))) is not None:
                refused[step] = refusal
    if not refused:
        return {}
    first = min(refused)
    others = f"nothing is copied, because step {first} cannot be: {refused[first]}"
    lacking = set(wanted) - set(target.steps())
    return refused | dict.fromkeys(lacking - refused.keys(), others)


def _copy(source: Run, step: int, target: Run, planned: set[str] | None) -> Copied:
    """Copy a step; or, if the chunks that are `planned` will be there, say what a copy would do."""
    try:
        present = _whole(target, step)
        if planned is None:
            written = copy_checkpoint(source, step, target)
            return Copied(step, "copied" if written or present is None else "present", written)
        manifest = source.manifest(step)
        if present is not None:
            return Copied(step, "present")
        held = {} if step in target.steps() else target.directory.stored_chunks()
        live = _lacking(manifest, held)
    except StepExistsError as error:
        return Copied(step, "refused", reason=str(error))
    except StepNotFoundError as error:
        if step in source.steps():  # deleted, and saved again with other bits
            return Copied(step, "refused", reason=str(error))
        return Copied(step, "gone", reason=f"{source.where} has deleted it meanwhile")
    except CorruptionError as error:
        advice = f"`perdure verify {quoted(source.where)}` lists what is damaged."
        return Copied(step, "damaged", reason=f"{error} {advice}")
    except OSError as error:
        raise UnreachableError(f"{target.where}: {error}. Nothing was changed.") from error
    new = {chunk[0]: chunk[1] for chunks in live.values() for chunk in chunks.values()}
    nbytes = sum(length for digest, length in new.items() if digest not in planned)
    planned.update(new)
    return Copied(step, "copied", nbytes)


def _refusal(target: Run, manifest: Manifest) -> str | None:
    """Why a checkpoint must not be added to the target; None when it may be."""
    steps = target.steps()
    step = manifest.step
    if step in steps:
        try:
            present = target.manifest(step)
        except CorruptionError as error:
            return (
                f"{target.where}: step {step} is there and its manifest is damaged: {error} "
                f"`perdure verify {quoted(target.where)} --repair` moves it aside; then copy again."
            )
        if present.fingerprint == manifest.fingerprint:
            return None
        return (
            f"{target.where}: step {step} is there with fingerprint {present.fingerprint[:16]}, the "
            f"step to copy has {manifest.fingerprint[:16]}. Nothing was overwritten. The two runs have "
            f"different histories; copy into another directory."
        )
    if steps and step < steps[-1]:
        return (
            f"{target.where}: step {step} is older than its newest step {steps[-1]} and not there. A "
            f"run's checkpoints are one line of steps, so older ones cannot be added. Copy into "
            f"another directory, oldest step first."
        )
    return None


def _whole(target: Run, step: int) -> Manifest | None:
    """The checkpoint of the target if its packs are there, with the sizes that it states."""
    if step not in target.steps():  # its error would read the whole quarantine
        return None
    try:
        manifest = target.manifest(step)
        sizes = [target.storage.size(PACKS + pack.name) for pack in manifest.packs]
    except (StepNotFoundError, CorruptionError, FileNotFoundError):
        return None
    return manifest if sizes == [pack.size for pack in manifest.packs] else None


def _lacking(manifest: Manifest, held: Container[str]) -> dict[str, LiveChunks]:
    """The places of the chunks of a checkpoint whose hashes are not `held`."""
    live = live_chunks([manifest], {pack.name for pack in manifest.packs})
    left = {
        name: {offset: chunk for offset, chunk in chunks.items() if chunk[0] not in held}
        for name, chunks in live.items()
    }
    return {name: chunks for name, chunks in left.items() if chunks}


def _transfer(
    source: Run,
    manifest: Manifest,
    target: Run,
    held: Mapping[str, StoredChunk],
    *,
    link: bool,
    replace: bool,
    before: Callable[[], None],
) -> int:
    """Link or copy the chunks that `held` lacks, then commit; returns the bytes written.

    A compaction may move the chunks of the source meanwhile.
    """
    step = manifest.step

    def find_again(error: DamagedChunk) -> dict[str, LiveChunks]:
        nonlocal manifest
        again = source.manifest(step)
        if again == manifest:
            raise CorruptionError(str(error)) from error
        if again.fingerprint != manifest.fingerprint:
            raise StepNotFoundError(
                f"{source.where}: step {step} was deleted and saved again during the copy. Copy it "
                f"again."
            )
        manifest = again
        return _lacking(manifest, places)

    new = _link(source, target, step, _lacking(manifest, held)) if link else {}
    needed = {chunk.hash for leaf in manifest.every_leaf() for chunk in leaf.chunks}
    places = {digest: held[digest] for digest in needed if digest in held} | new
    copied: dict[str, StoredChunk] = {}
    if live := _lacking(manifest, places):
        ensure_free_bytes(target.storage, relocated_size(live) + BYTES_PER_SAVE)
        copied = copy_chunks(source.storage, target.storage, step, live, find_again, before)
        places |= copied
    moved = relocated(
        manifest,
        lambda _, chunk: places[chunk.hash],
        cache(lambda pack: target.storage.size(PACKS + pack)),
    )
    # The log of the target is another chain, and a fork another run.
    moved = msgspec.structs.replace(moved, log=None, run=target.log.run)
    target.committer.commit_manifest(moved, new | copied, replace=replace)
    return sum(place.length for place in copied.values())


def _link(
    source: Run, target: Run, step: int, live: Mapping[str, LiveChunks]
) -> dict[str, StoredChunk]:
    """Make hard links of packs that are mostly needed; returns the places of their chunks."""
    places: dict[str, StoredChunk] = {}
    origin, storage = source.storage, target.storage
    if not (isinstance(origin, LocalStorage) and isinstance(storage, LocalStorage)):
        return places
    for pack, chunks in live.items():
        name = pack_name(step, 0, os.urandom(4).hex())
        try:
            size = origin.size(PACKS + pack)
            needed = sum(length for _, length, _ in chunks.values())
            linked = needed >= LINK_SHARE * size and storage.link_from(
                origin, PACKS + pack, PACKS + name
            )
        except FileNotFoundError:
            linked = False  # compacted meanwhile; its chunks are copied from their new places
        if linked:
            try:
                check_chunks(storage, {name: chunks})
            except DamagedChunk as error:
                raise CorruptionError(
                    f"{source.where}: step {step} cannot be forked, {PACKS}{pack} is damaged: {error} "
                    f"`perdure verify {quoted(source.where)}` lists what is damaged."
                ) from error
            places |= {
                digest: StoredChunk(name, offset, length)
                for offset, (digest, length, _) in chunks.items()
            }
    return places
