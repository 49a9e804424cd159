"""`Run`: one run directory, its checkpoints, and the one writer that it may have.

Owns the order of operations of a save, a restore, a quarantine, a rollback and a delete. Readers take
no lock and never change anything; the first change takes the writer's lock and keeps it until `close`.
Invariant: committed checkpoints are one line of steps, and a save only adds to its end.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

import msgspec

from perdure.errors import (
    CorruptionError,
    HistoryError,
    LockedError,
    NoGoodCheckpointError,
    PruneError,
    SaveError,
    StepExistsError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store.codec import encoder
from perdure.store.compact import compact, rewrite
from perdure.store.contents import (
    Catalog,
    Contents,
    Removed,
    committed_steps,
    note_damage,
    note_removed,
    pinned_steps,
    quarantined,
    removed,
    set_aside,
)
from perdure.store.drill_hook import drilled_clock
from perdure.store.failures import DamagedChunk, read_error
from perdure.store.format import (
    HEAD_BYTES,
    LOCK,
    MANIFESTS,
    MARKER,
    MAX_STEP,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    Manifest,
    RecipeValue,
    check_encoded,
    checked_fingerprint,
    chunk_spans,
    decode_manifest,
    encode_manifest,
    encode_marker,
    fingerprint,
    format_of,
    manifest_name,
    pin_name,
    plain_metrics,
    time_text,
)
from perdure.store.free_space import ensure_free_space
from perdure.store.garbage_collection import (
    Collected,
    CollectPlan,
    PruneRequest,
    execute_collect,
    plan_collect,
)
from perdure.store.gc_pause import SHORT_BYTES, gc_paused
from perdure.store.leaf import Leaf, Leaves, containers_of
from perdure.store.reread import Cursor
from perdure.store.rollback import (
    RolledBack,
    finish_moves,
    put_aside,
    put_back,
    returning,
    rolled_back,
)
from perdure.store.run_marker import is_run_directory
from perdure.store.storage import LostLock, Storage, create_whole
from perdure.store.urls import open_storage
from perdure.store.writer import Held, Written, write_pack


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: its manifest, its leaves, and the newer ones that were not readable.

    `local` are the leaves of each process that are no part of the state; empty in a partial load.
    """

    manifest: Manifest
    leaves: Leaves
    skipped: tuple[tuple[int, str], ...] = ()
    local: Mapping[str, Leaf] = field(default_factory=dict)


class Run:
    """A run directory at a path, at the URL of an object store, or on any `Storage`.

    With `create`, an empty or missing directory becomes a run directory at the first save; without
    it, a path that holds none raises `NotARunError`. With `repair`, a directory with checkpoints whose
    marker is missing or damaged is opened, and its first writer writes the marker again; otherwise
    `CorruptionError` says so. Raises `FormatVersionError` for a newer format.

    `codec` ("shuffle-zstd") is for the chunks that this object will write; whoever reads finds out by
    itself. Raises `StoreError` where its library is missing.

    It belongs to the process that made it: in a forked child every change raises `LockedError`. A
    closed `Run` may be used again; its next change takes the lock again.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Storage,
        *,
        create: bool = False,
        repair: bool = False,
        codec: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.encode = encoder(codec)
        self.storage: Storage = open_storage(where)
        self._clock = drilled_clock(clock)
        self._catalog = Catalog(self.storage)
        self._pid = os.getpid()
        # Steps that this writer made durable since it took the lock.
        self._durable: set[int] = set()
        self._cursor = Cursor()
        self._left: list[int] = []
        self._deferred: set[int] = set()
        # Steps of which a note in quarantine says that they were removed on purpose.
        self._removed: set[int] = set()
        self.notes: list[str] = []
        """What saves found that the user should know; whoever passes it on empties it."""
        self._lock = ExitStack()
        self._writing = self._ready = False
        self._marked = is_run_directory(self.storage, create=create, repair=repair)

    @property
    def is_run_directory(self) -> bool:
        """Whether the directory has its marker; without it, the first writer writes it."""
        return self._marked

    @property
    def is_writer(self) -> bool:
        """Whether this object holds the writer's lock."""
        return self._writing

    @property
    def where(self) -> str:
        """Path or URL of the run directory."""
        return self.storage.where

    def steps(self) -> list[int]:
        """Committed steps, oldest first. Lists names and reads nothing."""
        try:
            return committed_steps(self.storage)
        except OSError as error:
            raise read_error(error, f"{self.where}: the list of its checkpoints") from error

    def manifest(self, step: int) -> Manifest:
        """The checked manifest of `step`.

        Raises `StepNotFoundError`, `CorruptionError` if its bytes are damaged, and
        `UnreachableError` if they cannot be read.
        """
        name = manifest_name(step)
        try:
            data = self.storage.read(name)
        except FileNotFoundError:
            raise StepNotFoundError(self._no_such_step(step)) from None
        except (OSError, MemoryError) as error:
            raise read_error(error, f"{self.where}: step {step}: {name}") from error
        return decode_manifest(data, f"{self.where}/{name}", step)

    def load(self, step: int, wanted: Callable[[str], bool] | None = None) -> Loaded:
        """Read one checkpoint, or only the leaves whose path `wanted` accepts; all verified.

        Raises as `manifest` does. Later saves of this object write the chunks of a pack again in
        which this finds damage.
        """
        # numpy: not needed to list a run
        from perdure.store.reader import load_leaves, load_records

        manifest = self.manifest(step)
        while True:
            try:
                leaves = load_leaves(self.storage, manifest, wanted)
                local = () if wanted else manifest.local
                return Loaded(manifest, leaves, local=load_records(self.storage, manifest, local))
            except CorruptionError as error:
                # A prune may have moved the chunks since the manifest was read; then it says so.
                again = self.manifest(step)
                if again == manifest:
                    self._distrust(error)
                    raise
                manifest = again

    def load_newest(
        self,
        wanted: Callable[[str], bool] | None = None,
        unreadable: Mapping[int, str] | None = None,
    ) -> Loaded | None:
        """The newest checkpoint that is whole, and why newer ones were skipped: they are damaged.

        `unreadable` holds steps that are not to be tried, with the reasons.

        None if there is no checkpoint at all. Raises `NoGoodCheckpointError` if there are some and
        all are damaged, because a fresh start would then throw a run away silently, and
        `UnreachableError` if the newest one that is not damaged cannot be read.
        """
        skipped = dict(unreadable or {})
        # Steps that a prune takes away while this reads are not damaged; newer ones are there then.
        while untried := [step for step in self.steps() if step not in skipped]:
            for step in reversed(untried):
                try:
                    loaded = self.load(step, wanted)
                except CorruptionError as error:
                    skipped[step] = str(error)
                    continue
                except StepNotFoundError:
                    if step in self.steps():
                        raise
                    continue
                return replace(loaded, skipped=tuple(skipped.items()))
        if not skipped:
            return None
        reasons = "\n".join(f"  step {step}: {why}" for step, why in skipped.items())
        raise NoGoodCheckpointError(
            f"{self.where}: expected a readable checkpoint, found {len(skipped)} damaged:\n{reasons}\n"
            f"Nothing was changed. Run `perdure verify {self.where}`, bring back the files from a "
            f"copy, or start in another run directory."
        )

    def begin_writing(self) -> None:
        """Become the writer, which a save does by itself; raises `LockedError` at once if there is one.

        The first writer makes the directory a run directory; each one clears what a crashed writer
        left half written. May be called often.
        """
        self.check_process()
        if self._ready:
            return
        self.claim()
        try:
            if not self._marked:
                self.storage.replace(MARKER, encode_marker(time_text(self._clock())))
                self._marked = True
            for name in self.leftovers():
                self.storage.delete(name)
            finish_moves(self.storage)
            self._removed = {note.step for note in removed(self.storage)}
        except OSError as error:
            self.close()
            raise SaveError(f"{self.where}: cannot be written to: {error}.") from error
        self._ready = True
        for step in self._removed & set(self.steps()):
            self._returned(step)
        self._quarantine_deferred()

    def claim(self) -> None:
        """Take the writer's lock and nothing more, or raise `LockedError` at once.

        What takes time is left to `begin_writing`, so that a training loop can ask for the lock
        itself and leave the rest to the background. May be called often.
        """
        self.check_process()
        if self._writing:
            return
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time_text(self._clock()),
            "process": _process_token(),
        }
        text = json.dumps(owner).encode() + b"\n"
        try:
            try:
                self._lock.enter_context(self.storage.lock(LOCK, text))
            except BlockingIOError as error:
                if _own_lock(error) is None:
                    raise
                # One that nothing refers to any more, such as that of a notebook cell that ran before,
                # is released when the collector finds it. A save under way refers to its own.
                gc.collect()
                self._lock.enter_context(self.storage.lock(LOCK, text))
        except BlockingIOError as error:
            raise LockedError(self._locked(error)) from None
        except OSError as error:
            raise SaveError(f"{self.where}: cannot be written to: {error}.") from error
        self._writing = True
        # What was read before may have been changed by the writer in between.
        self._catalog.forget()
        self._durable.clear()

    def check_process(self) -> None:
        """Raise `LockedError` in a process that was forked from the one that made this object."""
        if os.getpid() != self._pid:
            raise LockedError(
                f"{self.where}: opened in process {self._pid}, and used in process {os.getpid()}, "
                f"which was forked from it. Nothing was changed. Save in the process that opened it, "
                f"or open another run directory in this one."
            )

    def save(
        self,
        step: int,
        leaves: Mapping[str, Leaf],
        recipe: Mapping[str, RecipeValue] | None = None,
        metrics: Mapping[str, float] | None = None,
        write: Callable[[Mapping[str, Held]], Written] | None = None,
        local: Mapping[str, Leaf] | None = None,
    ) -> Manifest:
        """Commit one checkpoint; it survives power loss on return.

        Chunks that a readable checkpoint holds already are not written again. Saving a step again
        with equal bits returns the manifest that is there, made durable, with those `metrics` added
        that it lacks and with these `local` leaves; with other bits it raises `StepExistsError`. A
        step below the newest one that is not there raises `HistoryError`. Any failure raises
        `SaveError` and leaves every earlier checkpoint as it was.

        `write`, given the chunks that are held, makes the others durable in place of this process: a
        group shares them out. It is called at most once, and not at all for a step that is there with
        the same `local` leaves, which belong to one process each and are no part of the fingerprint.
        """
        if not 0 <= step <= MAX_STEP:
            raise StoreError(
                f"{self.where}: a step is an integer from 0 to {MAX_STEP}, found {step}."
            )
        size = sum(len(leaf.data) for leaf in leaves.values())
        with gc_paused(len(leaves) if size <= SHORT_BYTES else 0):
            numbers = plain_metrics(metrics or {})
            manifest, is_new = self._save(
                step, leaves, dict(recipe or {}), numbers, write, local or {}
            )
            if is_new:
                self._check_shared(manifest, leaves, size)
        return manifest

    def _save(
        self,
        step: int,
        leaves: Mapping[str, Leaf],
        recipe: dict[str, RecipeValue],
        metrics: dict[str, float | None],
        write: Callable[[Mapping[str, Held]], Written] | None,
        local: Mapping[str, Leaf],
    ) -> tuple[Manifest, bool]:
        """The checkpoint, and whether it was not there before."""
        try:
            self.begin_writing()
            present = self._same_step(step, leaves)
            if present is not None and (not local or _same_local(present, local)):
                return self._with_metrics(present, metrics), False
            ensure_free_space(self.storage, leaves, self._catalog.held())
            written = self._write(step, leaves, write, local)
            containers = containers_of(leaves)
            version = format_of(written.leaves, containers, written.local)
            new = f"{self.where}: the manifest of this save"
            manifest = Manifest(
                format=version,
                step=step,
                created=time_text(self._clock()),
                fingerprint=checked_fingerprint(version, written.packs, written.leaves, new),
                recipe=recipe,
                metrics=metrics,
                packs=tuple(written.packs),
                leaves=tuple(written.leaves),
                containers=containers,
                local=tuple(written.local),
            )
            if present is None:
                data = self._encoded(manifest)
                create_whole(self.storage, manifest_name(step), data)
            else:
                manifest = _as_present(present, manifest)
                data = self._encoded(manifest)
                self.storage.replace(manifest_name(step), data)
        except FileExistsError as error:
            self._catalog.forget()
            raise LockedError(
                f"{self.where}: step {step} was committed by another writer while this one was "
                f"saving it ({error}). Nothing was overwritten; stop one of the two."
            ) from error
        except SaveError:
            self._catalog.forget()  # a group failed, perhaps because a pack is gone
            raise
        except (OSError, UnreachableError) as error:
            self._catalog.forget()
            raise SaveError(self._save_failed(step, leaves, error)) from error
        self._catalog.add(manifest, data[:HEAD_BYTES], written.located)
        self._durable.add(step)
        self._returned(step)
        return manifest, present is None

    def _write(
        self,
        step: int,
        leaves: Mapping[str, Leaf],
        write: Callable[[Mapping[str, Held]], Written] | None,
        local: Mapping[str, Leaf],
    ) -> Written:
        """Write the chunks that are not held; check that the packs of the others are still there."""
        if write is not None:
            written = write(self._catalog.held())
            if not self._catalog.agrees(written.packs):
                raise OSError("a pack has another size than its checkpoints say")
            return written
        while True:
            try:
                held = self._catalog.held()
                written = write_pack(self.storage, step, 0, leaves, held, self.encode, local)
            except DamagedChunk as error:  # a pack is gone: its chunks are written again
                self._catalog.distrust(error)
                continue
            if self._catalog.agrees(written.packs):
                return written
            # A pack has another size than when it was last looked at.
            self._catalog.forget()

    def held(self) -> Mapping[str, Held]:
        """The chunks that a manifest may name without writing them again, for the writer."""
        return self._catalog.held()

    def commit(
        self, manifest: Manifest, located: Mapping[str, Held], replace: bool = False
    ) -> None:
        """Make a checkpoint visible whose chunks are all durable; it survives power loss on return.

        Args:
            manifest: The checkpoint.
            located: Places of the chunks that were written for it.
            replace: Replace the manifest of that step, which must have the same fingerprint.

        Raises:
            FileExistsError: The step is taken, without `replace`.
            OSError: The storage failed.
        """
        if replace:
            self.storage.replace(manifest_name(manifest.step), self._encoded(manifest))
            self._catalog.replace({manifest.step: manifest})
        else:
            data = self._encoded(manifest)
            create_whole(self.storage, manifest_name(manifest.step), data)
            self._catalog.add(manifest, data[:HEAD_BYTES], located)
            self._returned(manifest.step)

    def delete(self, steps: Iterable[int], *, leave_word: bool = False) -> list[int]:
        """Delete checkpoints and the packs that only they needed; returns the steps deleted.

        With `leave_word`, `removed` names them from then on where the disk has room for a note, so that
        a mirror that holds them still does not bring them back.

        Raises `StoreError` for a pinned one, `PruneError` where deleting stopped in the middle.
        """
        self.begin_writing()
        plan = self.plan(PruneRequest(frozenset(steps)))
        for step in plan.steps if leave_word else ():
            with suppress(CorruptionError, StepNotFoundError):
                self._note_removed(self.manifest(step))
        self.execute(plan)
        return list(plan.steps)

    def removed(self) -> list[Removed]:
        """The checkpoints that were removed on purpose, until `forget_removed`."""
        try:
            return removed(self.storage)
        except OSError as error:
            raise read_error(error, f"{self.where}: the notes in quarantine") from error

    def forget_removed(self, note: Removed) -> None:
        """No other copy of the run holds this checkpoint any more. One that stays harms nobody."""
        with suppress(OSError):
            self.storage.delete(note.name)

    def _returned(self, step: int) -> None:
        """`step` is committed: a note that the same bits were removed is not true any more."""
        if step not in self._removed:
            return
        with suppress(StoreError):
            fingerprint = self.manifest(step).fingerprint
            for note in self.removed():
                if (note.step, note.fingerprint) == (step, fingerprint):
                    self.forget_removed(note)

    def _note_removed(self, manifest: Manifest) -> None:
        with suppress(OSError):  # a full disk must not keep what would give room back
            note_removed(self.storage, manifest)
            self._removed.add(manifest.step)

    def contents(self, *, fresh: bool = True) -> Contents:
        """What is held now: every manifest that changed is read, and no pack.

        Without `fresh` the writer takes a manifest that it read or wrote before for unchanged, which is
        good enough for a plan; `execute` looks again.
        """
        if not self._writing:
            self._catalog.forget()
        try:
            return self._catalog.contents(fresh=fresh)
        except OSError as error:
            raise PruneError(
                f"{self.where}: cannot be listed: {error}. Nothing was changed; try again."
            ) from error

    def plan(self, request: PruneRequest) -> CollectPlan:
        """What a request would delete and move. Changes nothing and takes no lock."""
        return plan_collect(self.contents(), request)

    def execute(self, plan: CollectPlan) -> Collected:
        """Carry out a plan; every checkpoint that stays is readable at any instant.

        What goes is decided again from the manifests as they are now, under the lock. Raises
        `StoreError` when the run directory changed since the plan was made (nothing is deleted then),
        and `PruneError` when an operation failed in the middle: plan again then.
        """
        self.begin_writing()
        held = self.contents()
        if plan_collect(held, plan.request) != plan:
            raise StoreError(
                f"{self.where}: changed since the plan was made; nothing was deleted. Plan again."
            )
        try:
            done = execute_collect(self.storage, held, plan)
        except OSError as error:
            self._catalog.forget()
            advice = (
                "Open the run directory again."
                if isinstance(error, LostLock)
                else "Repair the cause, then run `perdure prune` or continue training."
            )
            raise PruneError(
                f"{self.where}: deleting stopped in the middle: {error}. Every checkpoint that stays "
                f"is readable. {advice}"
            ) from error
        for step in plan.steps:
            self._catalog.remove(step)
            self._durable.discard(step)
        self._catalog.replace(done.replaced)
        for error in done.damaged:
            self._catalog.distrust(error)
        return done

    def pin(self, step: int) -> None:
        """Protect a checkpoint from every deletion until `unpin`. May be called twice."""
        self.begin_writing()
        self.manifest(step)
        if step not in self.pinned():
            self.storage.create(pin_name(step), 0).commit()

    def unpin(self, step: int) -> None:
        """Let a checkpoint be deleted again. May be called twice."""
        self.begin_writing()
        self.storage.delete(pin_name(step))

    def pinned(self) -> frozenset[int]:
        """The pinned steps."""
        try:
            return pinned_steps(self.storage)
        except OSError as error:
            raise read_error(error, f"{self.where}: the list of its pins") from error

    def rollback(self, step: int, *, dry_run: bool = False) -> list[int]:
        """Go back to the checkpoint of `step`: every newer one is set aside, the newest first.

        They move to quarantine, where `undo_rollback` finds them and no prune touches them unless it is
        asked to. After a crash at any point the newest checkpoint is one of the same line, and the call
        can be repeated. Everything is durable on return.

        Args:
            step: A committed step. Its checkpoint is read and verified first.
            dry_run: Check everything, take no lock and change nothing.

        Returns:
            The steps that were (or, in a dry run, would be) set aside, oldest first.

        Raises:
            StepNotFoundError: `step` is not committed.
            CorruptionError: the checkpoint of `step` is damaged. Nothing was moved.
            HistoryError: a newer step is pinned. Nothing was moved.
            LockedError: another writer is at work.
            SaveError: an operation failed in the middle; repeat the call.
        """
        with self._moving("the rollback", dry_run=dry_run):
            steps = self.steps()
            newer = [at for at in steps if at > step]
            self._require_whole(step)
            if pinned := sorted(self.pinned() & set(newer)):
                raise HistoryError(
                    f"{self.where}: steps {_shorten(pinned)} are newer than {step} and pinned; nothing "
                    f"was moved. Unpin them first (`manager.unpin`)."
                )
            if newer and not dry_run:
                line = {at: self._readable(at) for at in steps}
                put_aside(self.storage, line, step, time_text(self._clock()))
        return newer

    def undo_rollback(self, *, dry_run: bool = False) -> list[int]:
        """Bring back the checkpoints that rollbacks set aside, as long as nothing newer was saved.

        A checkpoint returns only behind the one that it followed. So two rollbacks in a row are both
        undone, and a line that was left for another one stays where it is. After a crash at any point
        the call can be repeated. Everything is durable on return.

        Returns:
            The steps that were (or, in a dry run, would be) brought back, oldest first; empty if
            nothing is set aside.

        Raises:
            HistoryError: what is set aside does not continue the newest checkpoint.
            LockedError: another writer is at work.
            SaveError: an operation failed in the middle; repeat the call.
        """
        with self._moving("undoing the rollback", dry_run=dry_run):
            steps = self.steps()
            candidates = self.rolled_back()
            newest = self.manifest(steps[-1]) if steps else None
            place = (newest.step, newest.fingerprint) if newest else None
            line = returning(candidates, place)
            if candidates and not line:
                raise HistoryError(
                    f"{self.where}: nothing was brought back: the newest checkpoint is "
                    f"{f'step {newest.step}' if newest else 'gone'}, and what rollbacks set aside "
                    f"continues {_follows(candidates)}. Go back there first (`perdure rollback "
                    f"{self.where} STEP`)."
                )
            if not dry_run:
                put_back(self.storage, line)
        return [each.manifest.step for each in line]

    def rolled_back(self) -> list[RolledBack]:
        """The checkpoints that rollbacks set aside, by their names in quarantine."""
        try:
            return rolled_back(self.storage)
        except ConnectionError as error:
            raise UnreachableError(f"{self.where}: {error}.") from error

    @contextmanager
    def _moving(self, what: str, *, dry_run: bool) -> Iterator[None]:
        """Hold the lock, end what an earlier move began, and forget afterwards what was known.

        A dry run does none of this. An operation that fails raises the error of `_stopped`.
        """
        if not dry_run:
            self.begin_writing()
        try:
            if not dry_run:
                finish_moves(self.storage)
            yield
        except OSError as error:
            raise self._stopped(what, error) from error
        finally:
            if not dry_run:
                self._catalog.forget()
                self._durable.clear()

    def _require_whole(self, step: int) -> None:
        from perdure.store.reader import verify_leaves  # numpy: not needed to list a run

        try:
            verify_leaves(self.storage, self.manifest(step))
        except CorruptionError as error:
            raise CorruptionError(f"{error} Nothing was moved; go back to another step.") from error

    def _readable(self, step: int) -> Manifest | None:
        try:
            return self.manifest(step)
        except CorruptionError:
            return None

    def _stopped(self, what: str, error: OSError) -> StoreError:
        if isinstance(error, ConnectionError):
            return UnreachableError(f"{self.where}: {what} stopped: {error}. Repeat it.")
        return SaveError(
            f"{self.where}: {what} stopped in the middle: {error}. No checkpoint is lost; repeat it "
            f"once the cause is repaired."
        )

    def quarantine(self, step: int, reason: str) -> str:
        """Move a bad manifest out of the way, with the reason beside it; returns its new name.

        Its packs stay: parts of them may be good, and other checkpoints may read from them.
        """
        target = self._set_aside(manifest_name(step), f"{step:012d}", ".json", reason)
        self._catalog.remove(step)
        self._durable.discard(step)
        self._note_damage()
        return target

    def defer_quarantine(self, step: int) -> None:
        """Quarantine a step that was found damaged as soon as this object becomes the writer.

        It is read again then, because another writer may have repaired it. A process that only reads
        never becomes the writer, and changes nothing.
        """
        self._deferred.add(step)

    def quarantine_pack(self, pack: str, reason: str) -> str:
        """Move a pack that no checkpoint needs out of the way; returns its new name."""
        return self._set_aside(PACKS + pack, pack.removesuffix(".pack"), ".pack", reason)

    def evacuate(self, packs: Collection[str]) -> tuple[dict[int, Manifest], dict[str, str]]:
        """Copy the chunks that checkpoints read from `packs` into a new pack, and read from there.

        Returns the manifests that were replaced, and the packs that could not be left because a
        chunk that is needed is damaged, with the reason. The old packs stay where they are.
        """
        self.begin_writing()
        needed = {
            pack.name: f"step {each.manifest.step}, which was rolled back, reads from it"
            for each in self.rolled_back()
            for pack in each.manifest.packs
        }
        stay = {name: needed[name] for name in packs if name in needed}
        movable = [name for name in packs if name not in stay]
        replaced, left = compact(self.storage, self.contents().manifests, movable)
        self._catalog.replace(replaced)
        return replaced, {**{name: str(error) for name, error in left.items()}, **stay}

    def quarantined(self) -> list[str]:
        """Names of what is in quarantine: manifests, and packs that were set aside by a repair."""
        return quarantined(self.storage)

    def leftovers(self) -> list[str]:
        """Temporary files of writers that did not finish."""
        places = (MANIFESTS, PACKS, PINS, QUARANTINE)
        return sorted(
            name for at in places for name in self.storage.list(at) if name.endswith(TEMP_SUFFIX)
        )

    def close(self) -> None:
        """Give the writer's lock back."""
        self._writing = self._ready = False
        if os.getpid() != self._pid:
            return  # the lock, and what waits for it to end, are the parent's
        try:
            self._lock.close()
        except OSError as error:
            raise SaveError(f"{self.where}: {error}.") from error

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _set_aside(self, name: str, stem: str, suffix: str, reason: str) -> str:
        self.begin_writing()
        note = {"name": name, "found": time_text(self._clock()), "reason": reason}
        try:
            return set_aside(self.storage, name, stem, suffix, note)
        except OSError as error:
            raise SaveError(f"{self.where}: {name} cannot be moved aside: {error}.") from error

    def _same_step(self, step: int, leaves: Mapping[str, Leaf]) -> Manifest | None:
        """The manifest of `step` if these bits are committed, None if the step continues the run.

        Raises `HistoryError` for everything else.
        """
        steps = committed_steps(self.storage)
        if step not in steps:
            if steps and step < steps[-1]:
                why = f"step {step} cannot be saved: the newest checkpoint is step {steps[-1]}"
                raise HistoryError(self._refused(step, why, steps))
            return None
        name = manifest_name(step)
        try:
            present = self.manifest(step)
        except CorruptionError as error:
            if step < steps[-1]:
                why = f"step {step} is older than step {steps[-1]}, and damaged ({error})"
                raise HistoryError(self._refused(step, why, steps)) from error
            self.quarantine(step, str(error))
            return None
        rows = [(path, leaf.dtype, leaf.shape, leaf.hashes()) for path, leaf in leaves.items()]
        found = fingerprint(rows)
        if found != present.fingerprint:
            why = (
                f"step {step} is committed with fingerprint {present.fingerprint[:16]}, this save has "
                f"{found[:16]}. A run that resumes exactly gives equal bits, so the recipe or the code "
                f"changed, or this run started elsewhere"
            )
            raise StepExistsError(self._refused(step, why, steps))
        if step in self._durable:
            return present
        from perdure.store.reader import verify_leaves  # numpy: not needed to list a run

        try:  # the manifest says what should be there; "saved" means that it is
            verify_leaves(self.storage, present)
        except CorruptionError as error:
            self._distrust(error)
            self.quarantine(step, str(error))
            return None
        # Its writer may have been killed, or failed, before the name was durable.
        self.storage.replace(name, self.storage.read(name))
        self._durable.add(step)
        return present

    def _refused(self, step: int, why: str, steps: list[int]) -> str:
        """Why a save of `step` is refused, and the ways out."""
        older = [at for at in steps if at < step]
        ways = "save into another run directory"
        if older:
            ways = (
                f"either set the newer checkpoints aside: `manager.rollback({older[-1]})` or `perdure "
                f"rollback {self.where} {older[-1]}`; or continue from step {older[-1]} in another run "
                f"directory: `perdure fork {self.where}@{older[-1]} NEW`"
            )
        return (
            f"{self.where}: {why}. The checkpoints of a run are one line of steps; nothing was "
            f"changed. To continue, {ways}."
        )

    def _with_metrics(self, present: Manifest, metrics: Mapping[str, float | None]) -> Manifest:
        """What an evaluation gave that came to its end after the state was saved."""
        both = {**metrics, **present.metrics}
        if both == present.metrics:
            return present
        manifest = msgspec.structs.replace(present, metrics=both)
        self.storage.replace(manifest_name(manifest.step), self._encoded(manifest))
        self._catalog.replace({manifest.step: manifest})
        return manifest

    def _encoded(self, manifest: Manifest) -> bytes:
        with gc_paused(len(manifest.leaves)):
            data = encode_manifest(manifest)
            # Constructors check nothing: what cannot be read back must never be committed.
            check_encoded(data, manifest, f"{self.where}: the manifest of this save")
        return data

    def _locked(self, error: BlockingIOError) -> str:
        if (since := _own_lock(error)) is not None:
            return (
                f"{self.where}: this process already has a manager (or a `Run`) open there, opened at "
                f"{since}. Nothing was changed. Close it, or use it."
            )
        return (
            f"{self.where}: another process writes here: {(error.strerror or '').strip()}. "
            f"Nothing was changed. Stop that process, or use another run directory; the "
            f"processes of one group share a writer when the manager is given "
            f"`processes=strategy.processes`."
        )

    def _quarantine_deferred(self) -> None:
        from perdure.store.reader import verify_leaves  # numpy: not needed to list a run

        while self._deferred:
            step = self._deferred.pop()
            try:
                verify_leaves(self.storage, self.manifest(step))
            except CorruptionError as error:
                self._distrust(error)
                self.quarantine(step, str(error))
            except (StepNotFoundError, UnreachableError):
                continue

    def _check_shared(self, manifest: Manifest, leaves: Mapping[str, Leaf], nbytes: int) -> None:
        """After a commit: read a part of the shared chunks again, and repair what is damaged.

        Nothing here makes a save fail, because its checkpoint is committed already.
        """
        from perdure.store.reader import damaged_chunks  # numpy: not needed to list a run

        try:
            if due := self._cursor.advance(manifest, nbytes):
                found = damaged_chunks(self.storage, manifest, due)
                for error in found:
                    self._catalog.distrust(error)
                if found:
                    self._examine_suspects()
                    self._write_again(manifest, leaves)
            self._examine_suspects()
            if self._catalog.bad:
                self._rewrite()
        except (OSError, StoreError) as error:
            why = f"a chunk that it shares could not be checked or repaired: {error}"
            self.notes = [f"{self.where}: step {manifest.step} is committed, but {why}"]

    def _examine_suspects(self) -> None:
        """Find every damaged chunk that checkpoints need in packs in which one was found."""
        if not self._catalog.suspects:
            return
        from perdure.store.reader import damaged_chunks  # numpy: not needed to list a run

        self._note_damage()
        manifests = self.contents().manifests
        suspects, seen = self._catalog.suspects, set(self._catalog.bad)
        for manifest in manifests.values():
            due = []
            for leaf in manifest.every_leaf():
                for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                    place = manifest.packs[chunk.pack].name, chunk.offset
                    if place[0] in suspects and place not in seen:
                        seen.add(place)
                        due.append((leaf, chunk, size))
            for error in damaged_chunks(self.storage, manifest, due):
                self._catalog.distrust(error)
        suspects.clear()

    def _write_again(self, manifest: Manifest, leaves: Mapping[str, Leaf]) -> None:
        """Write the damaged chunks of a checkpoint again, from the state that was just saved."""
        again: dict[str, Leaf] = {}
        for record in manifest.leaves:
            leaf = leaves.get(record.path)
            if leaf is None or record.text is not None:
                continue
            spans = chunk_spans(len(leaf.data))
            for chunk, (start, stop) in zip(record.chunks, spans, strict=True):
                if (manifest.packs[chunk.pack].name, chunk.offset) in self._catalog.bad:
                    data = leaf.data[start:stop]
                    again[f"{len(again):012d}"] = Leaf(leaf.dtype, (len(data),), data, frozen=True)
        written = write_pack(self.storage, manifest.step, 0, again, {}, self.encode)
        self._catalog.held().update(written.located)

    def _rewrite(self) -> None:
        """Let manifests read what was damaged from where it was written again."""
        bad, held = self._catalog.bad, self._catalog.held()
        renewed, left = rewrite(self.storage, self.contents().manifests, bad, held)
        self._catalog.replace(renewed)
        if renewed:
            self.notes.append(
                f"{self.where}: chunks were damaged that steps {_shorten(sorted(renewed))} need: "
                f"{next(iter(bad.values()))} They were written again from the state in memory"
                + (f"; steps {_shorten(left)} still lack others." if left else ".")
            )
        elif left and self._left != left:
            self.notes.append(
                f"{self.where}: steps {_shorten(left)} cannot be restored: "
                f"{next(iter(bad.values()))} A save that holds the same bytes repairs them."
            )
        self._left = left
        if not left:
            bad.clear()

    def _note_damage(self) -> None:
        """Leave word of damaged packs for the next writer, which has not seen the damage itself."""
        for pack, reason in self._catalog.damaged.items():
            if pack not in self._catalog.noted:
                note = {"name": PACKS + pack, "found": time_text(self._clock()), "reason": reason}
                with suppress(OSError):  # this process knows it anyway
                    note_damage(self.storage, pack, note)
                    self._catalog.noted.add(pack)

    def distrust_pack(self, pack: str, reason: str) -> None:
        """A pack is damaged: no later save of this object depends on a chunk in it."""
        self._catalog.distrust_pack(pack, reason)

    def _distrust(self, error: CorruptionError) -> None:
        if isinstance(error, DamagedChunk):
            self._catalog.distrust(error)

    def _no_such_step(self, step: int) -> str:
        steps = self.steps()
        held = f"steps {_shorten(steps)}" if steps else "no checkpoint"
        aside = any(each.manifest.step == step for each in self.rolled_back())
        return f"{self.where}: expected a checkpoint of step {step}, found {held}. " + (
            f"Step {step} was set aside by a rollback; `perdure rollback {self.where} --undo` brings "
            f"it back."
            if aside
            else "Ask for one of those."
        )

    def _save_failed(self, step: int, leaves: Mapping[str, Leaf], error: Exception) -> str:
        if isinstance(error, LostLock):
            return f"{self.where}: saving step {step} failed: {error}. It was not committed."
        try:
            steps = [at for at in self.steps() if at != step]
            free = self.storage.free_bytes()
        except (OSError, UnreachableError):
            return (
                f"{self.where}: saving step {step} failed: {error}. Every earlier checkpoint is as it "
                f"was. Save again once the storage answers."
            )
        size = sum(len(leaf.data) for leaf in leaves.values())
        room = "" if free is None else f", free there: {free} bytes"
        last = (
            f"the last good checkpoint is step {steps[-1]}"
            if steps
            else "no checkpoint is there yet"
        )
        return (
            f"{self.where}: saving step {step} failed: {error}. State: {size} bytes{room}; {last}. "
            f"Free space or mend the permissions, then save again."
        )


def _same_local(present: Manifest, local: Mapping[str, Leaf]) -> bool:
    rows = [(leaf.path, leaf.dtype, leaf.shape, leaf.hashes()) for leaf in present.local]
    return rows == [
        (path, leaf.dtype, leaf.shape, leaf.hashes()) for path, leaf in sorted(local.items())
    ]


def _shorten(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))} ... {', '.join(map(str, steps[-3:]))} ({len(steps)})"


def _follows(candidates: Iterable[RolledBack]) -> str:
    starts = {each.note.after for each in candidates} - {each.place for each in candidates}
    steps = sorted({after[0] for after in starts if after is not None})
    return f"step {_shorten(steps)}" if steps else "a checkpoint that is not there"


_token: tuple[int, str] = (0, "")


def _process_token() -> str:
    """A random text that no other process has, forked children included."""
    global _token
    if _token[0] != os.getpid():
        _token = os.getpid(), secrets.token_hex(8)
    return _token[1]


def _own_lock(error: BlockingIOError) -> str | None:
    """Since when this process holds the lock that refused it; None if another one does."""
    try:
        owner = json.loads(error.strerror or "")
        return str(owner["since"]) if owner["process"] == _process_token() else None
    except (ValueError, TypeError, KeyError):
        return None


def _as_present(present: Manifest, again: Manifest) -> Manifest:
    """A checkpoint that is saved again with other local leaves, as after an evaluation that drew random
    numbers: everything else stays what it was."""
    return msgspec.structs.replace(
        again,
        created=present.created,
        recipe=present.recipe,
        metrics={**again.metrics, **present.metrics},
    )
