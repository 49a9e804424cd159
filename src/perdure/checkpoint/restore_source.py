"""Which checkpoint a restore takes: of a run directory and its mirror, and in a group.

Invariant: a damaged checkpoint is skipped and reported, and every process of a group loads the same
one. A checkpoint that cannot be read now is not damaged, and nothing older takes its place.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from perdure.checkpoint.group_call import (
    SentError,
    caught,
    gather_failures,
    raise_first,
    together,
)
from perdure.checkpoint.mirror import Mirror, disagreement
from perdure.errors import (
    CorruptionError,
    NoGoodCheckpointError,
    NotARunError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.runtime.process_group import Processes, SingleProcess
from perdure.store import Loaded, Run
from perdure.store.loading import EVERYTHING, Needs


class Picked(Struct):
    """The checkpoint that the chief has picked, and whether it is read from the mirror."""

    step: int | None = None
    fingerprint: str = ""
    mirrored: bool = False


class RestoreSource(NamedTuple):
    """The verified checkpoint, None without one, and what to warn about besides skipped steps."""

    loaded: Loaded | None
    notes: list[str]


def load_good(
    run: Run, mirror: Mirror | None = None, step: int | None = None, needs: Needs = EVERYTHING
) -> RestoreSource:
    """Read and verify `step`, or the newest good checkpoint, of `run` or else of its mirror.

    Raises `StepNotFoundError` or `CorruptionError` for `step`; `NoGoodCheckpointError` if there are
    checkpoints and all are damaged (a fresh start would silently throw a run away);
    `UnreachableError` if one cannot be read now, or `run` holds none and the mirror does not answer.
    """
    return load_in_group(run, SingleProcess(), step, needs, mirror)[0]


def load_in_group(
    run: Run,
    processes: Processes,
    step: int | None,
    needs: Needs = EVERYTHING,
    mirror: Mirror | None = None,
) -> tuple[RestoreSource, Collection[int]]:
    """`load_good` of the same checkpoint in every process, and the skipped steps that the chief
    itself can read.

    The chief picks a copy, and all read it at the same time. If its bytes are damaged for some
    process, or the chief cannot read it, the chief picks the next one.
    """
    copies = _Copies(run, mirror, step, processes)
    failure: StoreError | None = None
    while True:
        picked = together(processes, partial(copies.pick, failure), by_chief=Picked)
        if picked.step is None:
            return RestoreSource(None, copies.notes), ()
        loaded, error = caught(partial(copies.load, picked, needs))
        if needs.sharing is not None:
            needs.sharing.close()  # the others may wait for it
            needs = needs._replace(sharing=None)
        failed = gather_failures(processes, error)
        if not failed and loaded is not None:
            loaded = replace(loaded, skipped=tuple(copies.skipped.items()))
            return RestoreSource(loaded, copies.notes), copies.readable
        is_damaged = all(sent.is_a(CorruptionError) for sent in failed.values())
        if not is_damaged and not (0 in failed and failed[0].is_a(StoreError)):
            raise_first(processes, failed, error)
        del loaded  # before the next one takes as much memory
        if processes.is_chief:
            failure = copies.failure_of(picked, needs, error, failed)


class _Copies:
    """The copies of checkpoints that one restore may read, and what it found out about them."""

    def __init__(
        self, run: Run, mirror: Mirror | None, step: int | None, processes: Processes
    ) -> None:
        self.notes: list[str] = []
        """What to warn about."""
        self.skipped: dict[int, str] = {}
        """Why steps of the run directory were not taken, if they are damaged."""
        self.readable: set[int] = set()
        """Those that are damaged for other processes only."""
        self._run, self._mirror, self._step, self._group = run, mirror, step, processes
        self._damaged: list[str] = []
        self._silent: UnreachableError | None = None
        """The error of a mirror that does not answer for a step that only it may have undamaged."""
        self._target: Run | None = None
        self._mirrored: list[int] = []
        self._order = self._in_order()

    def pick(self, failure: StoreError | None) -> Picked:
        """The copy to load, after the one before gave `failure`; without a step if there is none.
        In the chief."""
        while True:
            try:
                step, mirrored = self._order.send(failure) if failure else next(self._order)
            except StopIteration:
                return Picked()
            try:
                if self._group.count == 1:  # nobody compares the fingerprint
                    return Picked(step, mirrored=mirrored)
                return Picked(step, self._source(mirrored).manifest(step).fingerprint, mirrored)
            except StoreError as error:
                failure = error

    def load(self, picked: Picked, needs: Needs) -> Loaded:
        step = picked.step
        assert step is not None
        if self._group.is_chief:
            return self._source(picked.mirrored).load(step, needs)
        storage = self._run.storage
        if picked.mirrored:
            assert self._mirror is not None
            storage = self._mirror.storage
        try:
            loaded = Run(storage).load(step, needs)
        except NotARunError as error:
            raise StoreError(
                f"it does not see the run directory that the chief restores from; all processes need "
                f"one shared directory. {error}"
            ) from error
        if loaded.manifest.fingerprint != picked.fingerprint:
            raise StoreError(
                f"{storage.where}: it finds another checkpoint of step {step} (fingerprint "
                f"{loaded.manifest.fingerprint[:16]}) than process 0 does "
                f"({picked.fingerprint[:16]}); all processes need one shared directory. Nothing was "
                f"restored."
            )
        return loaded

    def failure_of(
        self,
        picked: Picked,
        needs: Needs,
        error: BaseException | None,
        failed: Mapping[int, SentError],
    ) -> StoreError:
        """Why the chief does not take a copy; it looks itself at what only others have read."""
        if error is None and needs.regions is not None:
            _, error = caught(partial(self.load, picked, needs._replace(verifies_all=True)))
        if isinstance(error, StoreError):
            return error
        assert picked.step is not None
        self.readable.add(picked.step)
        texts = (f"process {number}: {sent.text}" for number, sent in failed.items())
        return CorruptionError("; ".join(texts))

    def _source(self, mirrored: bool) -> Run:
        source = self._target if mirrored else self._run
        assert source is not None
        return source

    def _in_order(self) -> Generator[tuple[int, bool], StoreError, None]:
        """Steps, and whether to read them from the mirror. It is sent why a copy was not taken."""
        if self._step is not None:
            if self._mirror is not None:
                self._find()
            error = yield from self._of_step(self._step)
            raise self._silent or error
        tried = set[int]()
        # Steps that a prune deletes meanwhile are not damaged; there are newer ones then.
        while untried := self._find() - tried:
            for step in sorted(untried, reverse=True):
                tried.add(step)
                error = yield from self._of_step(step)
                is_gone = isinstance(error, StepNotFoundError) and step not in self._run.steps()
                if not is_gone and not isinstance(error, CorruptionError):
                    raise error
        if self._silent is not None:
            raise self._silent
        if self._damaged:
            where = self._run.where
            both = where if self._mirror is None else f"{where} and {self._mirror.name}"
            reasons = "\n".join(self._damaged)
            raise NoGoodCheckpointError(
                f"{both}: expected a readable checkpoint, found {len(self._damaged)} damaged:\n"
                f"{reasons}\nNothing was changed. Run `perdure verify {where}`, bring back the files "
                f"from a copy, or start in another run directory."
            )

    def _of_step(self, step: int) -> Generator[tuple[int, bool], StoreError, StoreError]:
        """The copies of one step; returns why none was taken."""
        error = yield step, False
        reason = str(error)
        if isinstance(error, CorruptionError):
            self.skipped[step] = reason
            self._damaged.append(f"  step {step}: {reason}")
            reason = f"it is damaged in {self._run.where}."
        elif isinstance(error, StepNotFoundError):
            reason = f"{self._run.where} does not hold it."
        if (mirror := self._mirror) is None or step not in self._mirrored:
            return error
        self.notes.append(f"step {step} is restored from {mirror.name}: {reason}")
        other = yield step, True
        self.notes.pop()
        if isinstance(other, UnreachableError):
            if isinstance(error, (StepNotFoundError, CorruptionError)):
                self._silent = mirror.holds_neither(step, other)
                self._note(f"{mirror.name} does not answer for step {step}: {other}")
        elif isinstance(other, CorruptionError):
            if step not in self.readable:
                mirror.quarantine(step, str(other))
            self._damaged.append(f"  step {step} of {mirror.name}: {other}")
            self._note(f"step {step} of {mirror.name} is damaged: {other}")
            return other if isinstance(error, StepNotFoundError) else error
        elif not isinstance(other, StepNotFoundError):
            return other
        return error

    def _find(self) -> set[int]:
        """The steps that the run directory and the mirror hold now. A mirror that does not answer is
        an error only if the run directory lacks the step of the restore, or any checkpoint."""
        step, mirror, steps = self._step, self._mirror, self._run.steps()
        if mirror is None:
            return set(steps)
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

    def _note(self, note: str | None) -> None:
        if note and note not in self.notes:
            self.notes.append(note)
