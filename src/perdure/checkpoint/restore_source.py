"""Which checkpoint a restore takes: of a run directory and its mirror, and in a group.

Invariant: a damaged checkpoint is skipped and reported, and every process of a group loads the same
one. A checkpoint that cannot be read now is not damaged, and nothing older takes its place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from perdure.checkpoint.group_call import caught, gather_failures, raise_first, together
from perdure.checkpoint.mirror import Mirror, disagreement
from perdure.errors import (
    CorruptionError,
    NoGoodCheckpointError,
    NotARunError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.runtime.process_group import Processes
from perdure.store import Loaded, Run, Storage
from perdure.store.loading import EVERYTHING, Needs


class Picked(Struct):
    """Step and fingerprint of the checkpoint that the chief has picked, and whether it is read from
    the mirror."""

    step: int | None = None
    fingerprint: str = ""
    mirrored: bool = False


class RestoreSource(NamedTuple):
    """The verified checkpoint that a restore takes, None without one; whether it came from the
    mirror; and what to warn about besides skipped steps."""

    loaded: Loaded | None
    mirrored: bool
    notes: list[str]


def load_in_group(
    run: Run,
    processes: Processes,
    step: int | None,
    needs: Needs = EVERYTHING,
    mirror: Mirror | None = None,
) -> tuple[RestoreSource, Collection[int]]:
    """The same checkpoint in every process, and the skipped steps that the chief itself can read.

    The chief picks (from the run directory or its mirror), and if `step` is None and the bytes are
    damaged for some process, all take an older one. Without a mirror all read the newest at the
    same time; only if it is damaged does the chief read first, and verify all bytes.
    """
    unreadable: dict[int, str] = {}
    if processes.count == 1:
        return load_good(run, mirror, step, needs), ()
    if mirror is None:
        source = _load_at_once(run, processes, step, needs)
        if source is not None:
            return source, ()
        needs = needs._replace(verifies_all=True, sharing=None)
    while True:
        source, error = _load_picked_by_chief(run, mirror, processes, step, needs, unreadable)
        failed = gather_failures(processes, error)
        if not failed and source is not None:
            return source, unreadable.keys()
        damaged = all(sent.is_damage for sent in failed.values())
        if step is not None or not damaged:
            raise_first(processes, failed, error)
        if source is not None and source.loaded is not None:  # always so in the chief
            unreadable[source.loaded.manifest.step] = "; ".join(
                f"process {number}: {sent.text}" for number, sent in failed.items()
            )
        del source  # before the next one takes as much memory


def load_good(
    run: Run,
    mirror: Mirror | None = None,
    step: int | None = None,
    needs: Needs = EVERYTHING,
    unreadable: Mapping[int, str] = MappingProxyType({}),
) -> RestoreSource:
    """Read and verify `step`, or the newest good checkpoint, of `run` or else of its mirror.

    Steps in `unreadable` are not tried if `step` is None. Raises `StepNotFoundError` or
    `CorruptionError` for `step`; `NoGoodCheckpointError` if there are checkpoints and all are
    damaged (a fresh start would silently throw a run away); `UnreachableError` if one cannot be
    read now, or `run` holds none and the mirror does not answer.
    """
    copies = _Copies(run, mirror, needs, unreadable)
    if step is not None:
        try:
            copies.find(step)
            return copies.load(step)
        except StoreError:
            if copies.failure is not None:
                raise copies.failure from None
            raise
    tried = set(unreadable)
    # Steps that a prune deletes meanwhile are not damaged; there are newer ones then.
    while untried := copies.find(None) - tried:
        for candidate in sorted(untried, reverse=True):
            tried.add(candidate)
            try:
                return copies.load(candidate)
            except CorruptionError:
                continue
            except StepNotFoundError:
                if candidate in run.steps():
                    raise
    if copies.failure is not None:
        raise copies.failure
    if not copies.damaged:
        return RestoreSource(None, False, copies.notes)
    reasons = "\n".join(copies.damaged)
    raise NoGoodCheckpointError(
        f"{copies.where}: expected a readable checkpoint, found {len(copies.damaged)} damaged:\n"
        f"{reasons}\nNothing was changed. Run `perdure verify {run.where}`, bring back the files from "
        f"a copy, or start in another run directory."
    )


class _Copies:
    """The copies of each checkpoint that one restore may read, and what it found out about them."""

    def __init__(
        self, run: Run, mirror: Mirror | None, needs: Needs, damaged: Mapping[int, str]
    ) -> None:
        self.where = run.where if mirror is None else f"{run.where} and {mirror.name}"
        self.notes: list[str] = []
        """What to warn about."""
        self.damaged = [f"  step {step}: {reason}" for step, reason in damaged.items()]
        """A line for each damaged copy."""
        self.failure: UnreachableError | None = None
        """The error of a mirror that does not answer for a step that only it may have undamaged."""
        self._run, self._mirror, self._needs = run, mirror, needs
        self._target: Run | None = None
        self._mirrored: list[int] = []
        self._skipped = dict(damaged)

    def find(self, step: int | None) -> set[int]:
        """The steps that the run directory and the mirror hold now, for a restore of `step`. A
        mirror that does not answer is an error only if the run directory lacks `step`, or any
        checkpoint."""
        if (mirror := self._mirror) is None:
            return set(self._run.steps()) if step is None else {step}
        steps = self._run.steps()
        try:
            self._target, self._mirrored, note = mirror.readable_steps()
        except UnreachableError as error:
            if not (steps if step is None else step in steps):
                raise mirror.holds_neither(step, error) from error
            note = f"{mirror.name} does not answer, so only {self._run.where} is used: {error}"
        self._note(note)
        shared = set(steps) & set(self._mirrored)
        if step is None and shared and self._target is not None:
            self._note(disagreement(self._run, self._target, max(shared)))
        return {*steps, *self._mirrored}

    def load(self, step: int) -> RestoreSource:
        """`step` from the run directory, or else from the mirror; raises the error of the first
        that has it."""
        try:
            loaded, mirrored = self._run.load(step, self._needs), False
        except StoreError as error:
            if isinstance(error, CorruptionError):
                self._skipped[step] = str(error)
                self.damaged.append(f"  step {step}: {error}")
            copy = self._from_mirror(step, error) if step in self._mirrored else None
            if copy is None:
                raise
            loaded, mirrored = copy, True
        skipped = tuple(self._skipped.items())
        return RestoreSource(replace(loaded, skipped=skipped), mirrored, self.notes)

    def _from_mirror(self, step: int, error: StoreError) -> Loaded | None:
        """`step` from the mirror, because of an error of the run directory; None without success."""
        mirror, target = self._mirror, self._target
        assert mirror is not None
        assert target is not None
        try:
            loaded = target.load(step, self._needs)
        except StepNotFoundError:
            return None
        except UnreachableError as silent:
            if isinstance(error, (StepNotFoundError, CorruptionError)):
                self.failure = mirror.holds_neither(step, silent)
                self._note(f"{mirror.name} does not answer for step {step}: {silent}")
            return None
        except CorruptionError as damage:
            mirror.quarantine(step, str(damage))
            self.damaged.append(f"  step {step} of {mirror.name}: {damage}")
            self._note(f"step {step} of {mirror.name} is damaged: {damage}")
            if isinstance(error, StepNotFoundError):
                raise
            return None
        reason = str(error)
        if isinstance(error, StepNotFoundError):
            reason = f"{self._run.where} does not hold it."
        elif isinstance(error, CorruptionError):
            reason = f"it is damaged in {self._run.where}."
        self._note(f"step {step} is restored from {mirror.name}: {reason}")
        return loaded

    def _note(self, note: str | None) -> None:
        if note and note not in self.notes:
            self.notes.append(note)


def _load_picked_by_chief(
    run: Run,
    mirror: Mirror | None,
    processes: Processes,
    step: int | None,
    needs: Needs,
    unreadable: Mapping[int, str],
) -> tuple[RestoreSource | None, BaseException | None]:
    """The checkpoint that the chief picks and verifies first, or why this process cannot load it."""
    found: list[RestoreSource] = []

    def pick() -> Picked:
        found.append(source := load_good(run, mirror, step, needs, unreadable))
        if source.loaded is None:
            return Picked()
        manifest = source.loaded.manifest
        return Picked(manifest.step, manifest.fingerprint, source.mirrored)

    picked = together(processes, pick, by_chief=Picked)
    if found:
        return found[0], None
    if picked.step is None:
        return RestoreSource(None, False, []), None
    storage = mirror.storage if mirror is not None and picked.mirrored else run.storage
    return caught(lambda: _load_picked(storage, picked, needs._replace(verifies_all=False)))


def _load_at_once(
    run: Run, processes: Processes, step: int | None, needs: Needs
) -> RestoreSource | None:
    """The newest checkpoint, or `step`, read by all processes at the same time; None in all of them
    if there is none, or it is damaged. A collective."""

    def pick() -> Picked:
        try:
            found = max(run.steps()) if step is None else step
            return Picked(found, run.manifest(found).fingerprint)
        except Exception:  # noqa: BLE001 (the chief reads again, alone)
            return Picked()

    picked = together(processes, pick, by_chief=Picked)
    if picked.step is None:
        return None
    source, error = caught(lambda: _load_picked(run.storage, picked, needs))
    if needs.sharing is not None:
        needs.sharing.close()  # the others may wait for it
    failed = gather_failures(processes, error)
    if not all(sent.is_damage for sent in failed.values()):
        raise_first(processes, failed, error)
    return None if failed else source


def _load_picked(storage: Storage, picked: Picked, needs: Needs) -> RestoreSource:
    """The checkpoint that the chief has picked."""
    step = picked.step
    assert step is not None
    try:
        loaded = Run(storage).load(step, needs)
    except NotARunError as error:
        raise StoreError(
            f"it does not see the run directory that the chief restores from; all processes need one "
            f"shared directory. {error}"
        ) from error
    if loaded.manifest.fingerprint != picked.fingerprint:
        raise StoreError(
            f"{storage.where}: it finds another checkpoint of step {step} (fingerprint "
            f"{loaded.manifest.fingerprint[:16]}) than process 0 does ({picked.fingerprint[:16]}); all "
            f"processes need one shared directory. Nothing was restored."
        )
    return RestoreSource(loaded, picked.mirrored, [])
