"""`Run`: one run directory, its checkpoints, and the one writer that it may have.

Owns the order of operations of a save, a restore, a quarantine and a delete. Readers take no lock
and never change anything; the first change takes the writer's lock and keeps it until `close`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from perdure.errors import (
    CorruptionError,
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
from perdure.store.collect import (
    Collected,
    CollectPlan,
    Request,
    execute_collect,
    plan_collect,
)
from perdure.store.collector import SHORT_BYTES, collector_paused
from perdure.store.compact import compact
from perdure.store.contents import (
    Catalog,
    Contents,
    committed_steps,
    pinned_steps,
    quarantined,
    set_aside,
)
from perdure.store.drill import drilled_clock
from perdure.store.format import (
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
    decode_manifest,
    encode_manifest,
    encode_marker,
    fingerprint,
    fingerprint_of,
    format_of,
    manifest_name,
    pin_name,
    plain_metrics,
    time_text,
)
from perdure.store.leaf import Leaf
from perdure.store.marker import is_marked
from perdure.store.room import require_room
from perdure.store.storage import Storage, create_whole
from perdure.store.urls import open_storage
from perdure.store.writer import Held, Written, write_pack


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: its manifest, its leaves, and the newer ones that were not readable."""

    manifest: Manifest
    leaves: dict[str, Leaf]
    skipped: tuple[tuple[int, str], ...] = ()


class Run:
    """A run directory at a path, at the URL of an object store, or on any `Storage`.

    With `create`, an empty or missing directory becomes a run directory at the first save; without
    it, a path that holds none raises `NotARunError`. Raises `FormatVersionError` for a newer format.

    `codec` ("shuffle-zstd") is for the chunks that this object will write; whoever reads finds out by
    itself. Raises `StoreError` where its library is missing.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Storage,
        *,
        create: bool = False,
        codec: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.encode = encoder(codec)
        self.storage: Storage = open_storage(where)
        self._clock = drilled_clock(clock)
        self._catalog = Catalog(self.storage)
        self._unsure: set[int] = set()
        self._lock = ExitStack()
        self._writing = self._ready = False
        self._marked = is_marked(self.storage, create=create)

    @property
    def where(self) -> str:
        """Path or URL of the run directory."""
        return self.storage.where

    def steps(self) -> list[int]:
        """Committed steps, oldest first. Lists names and reads nothing."""
        try:
            return committed_steps(self.storage)
        except ConnectionError as error:
            raise UnreachableError(f"{self.where}: {error}.") from error

    def manifest(self, step: int) -> Manifest:
        """The checked manifest of `step`; raises `StepNotFoundError` or `CorruptionError`."""
        name = manifest_name(step)
        try:
            data = self.storage.read(name)
        except FileNotFoundError:
            raise StepNotFoundError(self._no_such_step(step)) from None
        except ConnectionError as error:
            raise UnreachableError(f"{self.where}: step {step}: {error}.") from error
        except OSError as error:
            raise CorruptionError(f"{self.where}/{name}: cannot be read: {error}.") from error
        return decode_manifest(data, f"{self.where}/{name}", step)

    def load(self, step: int, wanted: Callable[[str], bool] | None = None) -> Loaded:
        """Read one checkpoint, or only the leaves whose path `wanted` accepts; all verified."""
        from perdure.store.reader import load_leaves  # numpy: not needed to list a run

        manifest = self.manifest(step)
        while True:
            try:
                return Loaded(manifest, load_leaves(self.storage, manifest, wanted))
            except CorruptionError as error:
                # An outage is no damage: nothing may be passed over or set aside because of it.
                if isinstance(error.__cause__, ConnectionError):
                    raise UnreachableError(str(error)) from error
                # A prune may have moved the chunks since the manifest was read; then it says so.
                again = self.manifest(step)
                if again == manifest:
                    raise
                manifest = again

    def load_newest(self, wanted: Callable[[str], bool] | None = None) -> Loaded | None:
        """The newest checkpoint that is whole, and why newer ones were passed over.

        None where there is no checkpoint at all; `NoGoodCheckpointError` where there are some and
        none is readable, because starting afresh then would throw a run away silently.
        """
        skipped: dict[int, str] = {}
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
                return Loaded(loaded.manifest, loaded.leaves, tuple(skipped.items()))
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
        if self._ready:
            return
        self.claim()
        try:
            if not self._marked:
                self.storage.replace(MARKER, encode_marker(time_text(self._clock())))
                self._marked = True
            for name in self.leftovers():
                self.storage.delete(name)
        except OSError as error:
            self.close()
            raise SaveError(f"{self.where}: cannot be written to: {error}.") from error
        self._ready = True

    def claim(self) -> None:
        """Take the writer's lock and nothing more, or raise `LockedError` at once.

        What takes time is left to `begin_writing`, so that a training loop can ask for the lock
        itself and leave the rest to the background. May be called often.
        """
        if self._writing:
            return
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time_text(self._clock()),
        }
        try:
            self._lock.enter_context(self.storage.lock(LOCK, json.dumps(owner).encode() + b"\n"))
        except BlockingIOError as error:
            raise LockedError(
                f"{self.where}: another process writes here: {(error.strerror or '').strip()}. "
                f"Nothing was changed. Stop that process, or use another run directory; the "
                f"processes of one group share a writer when the manager is given "
                f"`processes=strategy.processes`."
            ) from None
        except OSError as error:
            raise SaveError(f"{self.where}: cannot be written to: {error}.") from error
        self._writing = True
        # What was read before may have been changed by the writer in between.
        self._catalog.forget()

    def save(
        self,
        step: int,
        leaves: Mapping[str, Leaf],
        recipe: Mapping[str, RecipeValue] | None = None,
        metrics: Mapping[str, float] | None = None,
        write: Callable[[Mapping[str, Held]], Written] | None = None,
    ) -> Manifest:
        """Commit one checkpoint; it survives power loss on return.

        Chunks that a readable checkpoint holds already are not written again. Saving a step again
        with equal bits returns the manifest that is there, with those `metrics` added that it lacks;
        with other bits it raises `StepExistsError`. Any failure raises `SaveError` and leaves every
        earlier checkpoint as it was.

        `write`, given the chunks that are held, makes the others durable in place of this process: a
        group shares them out. It is called at most once, and not at all for a step that is there.
        """
        if not 0 <= step <= MAX_STEP:
            raise StoreError(
                f"{self.where}: a step is an integer from 0 to {MAX_STEP}, found {step}."
            )
        short = sum(len(leaf.data) for leaf in leaves.values()) <= SHORT_BYTES
        with collector_paused(len(leaves) if short else 0):
            return self._save(step, leaves, dict(recipe or {}), plain_metrics(metrics or {}), write)

    def _save(
        self,
        step: int,
        leaves: Mapping[str, Leaf],
        recipe: dict[str, RecipeValue],
        metrics: dict[str, float | None],
        write: Callable[[Mapping[str, Held]], Written] | None,
    ) -> Manifest:
        try:
            self.begin_writing()
            if (present := self._same_step(step, leaves)) is not None:
                return self._with_metrics(present, metrics)
            require_room(self.storage, leaves, self._catalog.held())
            held = self._catalog.held()
            records, packs, located = (
                write(held)
                if write
                else write_pack(self.storage, step, 0, leaves, held, self.encode)
            )
            manifest = Manifest(
                format=format_of(records),
                step=step,
                created=time_text(self._clock()),
                fingerprint=fingerprint_of(records),
                recipe=recipe,
                metrics=metrics,
                packs=tuple(packs),
                leaves=tuple(records),
            )
            self._commit(manifest)
        except FileExistsError as error:
            raise LockedError(
                f"{self.where}: step {step} was committed by another writer while this one was "
                f"saving it ({error}). Nothing was overwritten; stop one of the two."
            ) from error
        except (OSError, UnreachableError) as error:
            self._unsure.add(step)
            raise SaveError(self._save_failed(step, leaves, error)) from error
        self._catalog.add(manifest, located)
        return manifest

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
            name = manifest_name(manifest.step)
            create_whole(self.storage, name, self._encoded(manifest))
            self._catalog.add(manifest, located)

    def delete(self, steps: Iterable[int]) -> list[int]:
        """Delete checkpoints and the packs that only they needed; returns the steps deleted.

        Raises `StoreError` for a pinned one, `PruneError` where deleting stopped in the middle.
        """
        self.begin_writing()
        plan = self.plan(Request(frozenset(steps)))
        self.execute(plan)
        return list(plan.steps)

    def contents(self) -> Contents:
        """What is held now: every manifest is read (once, while this is the writer), and no pack."""
        if not self._writing:
            self._catalog.forget()
        try:
            return self._catalog.contents()
        except OSError as error:
            raise PruneError(
                f"{self.where}: cannot be listed: {error}. Nothing was changed; try again."
            ) from error

    def plan(self, request: Request) -> CollectPlan:
        """What a request would delete and move. Changes nothing and takes no lock."""
        return plan_collect(self.contents(), request)

    def execute(self, plan: CollectPlan) -> Collected:
        """Carry out a plan; every checkpoint that stays is readable at any instant.

        Raises `StoreError` when the run directory changed since the plan was made (nothing is
        deleted then), and `PruneError` when an operation failed in the middle: plan again then.
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
            raise PruneError(
                f"{self.where}: deleting stopped in the middle: {error}. Every checkpoint that stays "
                f"is readable. Mend the cause, then run `perdure prune` or go on training."
            ) from error
        for step in plan.steps:
            self._catalog.remove(step)
        self._catalog.replace(done.replaced)
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
        return pinned_steps(self.storage)

    def quarantine(self, step: int, reason: str) -> str:
        """Move a bad manifest out of the way, with the reason beside it; returns its new name.

        Its packs stay: parts of them may be good, and other checkpoints may read from them.
        """
        target = self._set_aside(manifest_name(step), f"{step:012d}", ".json", reason)
        self._catalog.remove(step)
        return target

    def quarantine_pack(self, pack: str, reason: str) -> str:
        """Move a pack that no checkpoint needs out of the way; returns its new name."""
        return self._set_aside(PACKS + pack, pack.removesuffix(".pack"), ".pack", reason)

    def evacuate(self, packs: Collection[str]) -> tuple[dict[int, Manifest], dict[str, str]]:
        """Copy the chunks that checkpoints read from `packs` into a new pack, and read from there.

        Returns the manifests that were replaced, and the packs that could not be left because a
        chunk that is needed is damaged, with the reason. The old packs stay where they are.
        """
        self.begin_writing()
        done = compact(self.storage, self.contents().manifests, packs)
        self._catalog.replace(done[0])
        return done

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
        try:
            self.storage.size(manifest_name(step))
        except FileNotFoundError:
            return None
        try:
            present = self.manifest(step)
        except CorruptionError as error:
            self.quarantine(step, str(error))
            return None
        rows = [(path, leaf.dtype, leaf.shape, leaf.hashes()) for path, leaf in leaves.items()]
        found = fingerprint(rows)
        if found == present.fingerprint:
            from perdure.store.reader import verify_leaves  # numpy: not needed to list a run

            try:  # the manifest says what should be there; "saved" means that it is
                verify_leaves(self.storage, present)
            except CorruptionError as error:
                self.quarantine(step, str(error))
                return None
            if step in self._unsure:
                # The name is there, and the sync after it failed: nothing says that it is durable.
                self.storage.replace(manifest_name(step), encode_manifest(present))
                self._unsure.discard(step)
            return present
        raise StepExistsError(
            f"{self.where}: step {step} is committed with fingerprint {present.fingerprint[:16]}, this "
            f"save has {found[:16]}. A run that resumes exactly gives equal bits, so the recipe or the "
            f"code changed, or this run started elsewhere. Nothing was overwritten. Use another run "
            f"directory, or delete that step first."
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

    def _commit(self, manifest: Manifest) -> None:
        create_whole(self.storage, manifest_name(manifest.step), self._encoded(manifest))

    def _encoded(self, manifest: Manifest) -> bytes:
        with collector_paused(len(manifest.leaves)):
            data = encode_manifest(manifest)
            # Constructors check nothing: what cannot be read back must never be committed.
            check_encoded(data, manifest, f"{self.where}: the manifest of this save")
        return data

    def _no_such_step(self, step: int) -> str:
        steps = self.steps()
        held = f"steps {_shorten(steps)}" if steps else "no checkpoint"
        return (
            f"{self.where}: expected a checkpoint of step {step}, found {held}. Ask for one there."
        )

    def _save_failed(self, step: int, leaves: Mapping[str, Leaf], error: Exception) -> str:
        try:
            steps = [at for at in self.steps() if at != step]
        except (OSError, UnreachableError):
            return (
                f"{self.where}: saving step {step} failed: {error}. Every earlier checkpoint is as it "
                f"was. Save again once the storage answers."
            )
        size = sum(len(leaf.data) for leaf in leaves.values())
        free = self.storage.free_bytes()
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


def _shorten(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))} ... {', '.join(map(str, steps[-3:]))} ({len(steps)})"
