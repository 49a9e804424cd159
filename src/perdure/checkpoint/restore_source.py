"""Which checkpoint a restore takes: of a run directory and its mirror, and in a group.

Invariant: a damaged checkpoint is skipped and reported, and every process of a group loads the same
one. A checkpoint that cannot be read now is not damaged, and nothing older takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from perdure.checkpoint.group_call import (
    CallOutcome,
    attempt,
    broadcast_outcome,
    follow_chief,
    gather_failures,
    raise_first,
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
from perdure.process_group import Processes
from perdure.store import Loaded, Run

Wanted = Callable[[str], bool]


class RestoreSource(NamedTuple):
    """The checkpoint that a restore takes.

    Attributes:
        loaded: The verified checkpoint; None if there is none.
        mirrored: Whether it was read from the mirror.
        notes: What to warn about, besides the skipped steps in `loaded`.
    """

    loaded: Loaded | None
    mirrored: bool
    notes: list[str]


def load_in_group(
    run: Run,
    processes: Processes,
    step: int | None,
    wanted: Wanted | None = None,
    mirror: Mirror | None = None,
) -> tuple[RestoreSource, Collection[int]]:
    """The same checkpoint in every process: the chief picks it, the others load the same step.

    With a mirror the chief picks from both, and all read where it did. If `step` is None and the bytes
    are damaged for some process, all of them take an older checkpoint. Returns the checkpoint, and the
    skipped steps that the chief itself can read.
    """
    unreadable: dict[int, str] = {}
    if processes.count == 1:
        return load_newest_good(run, mirror, step, wanted, {}), ()
    while True:
        if processes.is_chief:
            source, error = _lead(run, mirror, processes, step, wanted, unreadable), None
        else:
            source, error = _follow(run, mirror, processes, wanted)
        failed = gather_failures(processes, error)
        if not failed and source is not None:
            return source, unreadable.keys()
        damaged = all(outcome.is_damage for outcome in failed.values())
        if step is not None or not damaged:
            raise_first(processes, failed, error)
        if source is not None and source.loaded is not None:  # always so in the chief
            unreadable[source.loaded.manifest.step] = "; ".join(
                f"process {number}: {outcome.text}" for number, outcome in failed.items()
            )
        del source  # before the next one takes as much memory


def load_newest_good(
    run: Run,
    mirror: Mirror | None,
    step: int | None,
    wanted: Wanted | None,
    unreadable: Mapping[int, str],
) -> RestoreSource:
    """`step`, or the newest good checkpoint of `run` and its mirror; all verified.

    Of two good checkpoints with the same step that of `run` is taken.

    Args:
        run: The run directory.
        mirror: Its mirror, if there is one.
        step: The step; None for the newest good one.
        wanted: Only leaves whose path it accepts are read; None for all.
        unreadable: Steps that are not tried if `step` is None, with the reasons.

    Raises:
        StepNotFoundError: There is no checkpoint of `step`.
        CorruptionError: The checkpoint of `step` is damaged.
        NoGoodCheckpointError: There are checkpoints, and all of them are damaged.
        UnreachableError: A checkpoint cannot be read now; or `run` holds none and the mirror does not
            answer, because a start from scratch could throw a run away.
    """
    notes: list[str] = []
    target, mirrored = None, []
    if mirror is not None:
        try:
            target, mirrored, note = mirror.readable_steps()
            notes += [note] if note else []
        except UnreachableError as error:
            if not (run.steps() if step is None else step in run.steps()):
                raise mirror.holds_neither(step, error) from error
            notes.append(f"{mirror.name} does not answer, so only {run.where} is used: {error}")
    if mirror is None or target is None or not mirrored:
        loaded = run.load_newest(wanted, unreadable) if step is None else run.load(step, wanted)
        return RestoreSource(loaded, False, notes)
    if step is not None:
        return _first_good(run, mirror, target, [step], mirrored, notes, wanted, {})
    steps = run.steps()
    if shared := set(steps) & set(mirrored):
        note = disagreement(run, target, max(shared))
        notes += [note] if note else []
    skipped = dict(unreadable)
    order = sorted({*steps, *mirrored} - skipped.keys(), reverse=True)
    try:
        return _first_good(run, mirror, target, order, mirrored, notes, wanted, skipped)
    except StepNotFoundError:
        if run.steps() == steps and set(mirrored) <= set(target.steps()):
            raise
        # A prune deleted them meanwhile, so there are newer ones.
        return load_newest_good(run, mirror, None, wanted, unreadable)


def _first_good(
    run: Run,
    mirror: Mirror,
    target: Run,
    steps: Iterable[int],
    mirrored: Collection[int],
    notes: list[str],
    wanted: Wanted | None,
    skipped: dict[int, str],
) -> RestoreSource:
    """The first of `steps` that one of the two can give; adds the damaged ones to `skipped`."""
    damaged: list[str] = []
    failure: StoreError | None = None
    for step in steps:
        try:
            loaded = run.load(step, wanted)
            return RestoreSource(replace(loaded, skipped=tuple(skipped.items())), False, notes)
        except StepNotFoundError as error:
            failure = failure or error
            reason = f"{run.where} does not hold it."
        except CorruptionError as error:
            skipped[step] = str(error)
            reason = f"it is damaged in {run.where}."
            damaged.append(f"  {error}")
        except StoreError as error:  # no damage, so that an older step would be wrong
            if step not in mirrored:
                raise
            failure, reason = error, str(error)
        if step not in mirrored:
            continue
        try:
            loaded = target.load(step, wanted)
        except StepNotFoundError:
            continue
        except UnreachableError as error:
            failure = mirror.holds_neither(step, error)
            notes.append(f"step {step} is only in {mirror.name}, which does not answer: {error}")
            continue
        except CorruptionError as error:
            mirror.set_aside(step, str(error))
            damaged.append(f"  {error}")
            notes.append(f"step {step} of {mirror.name} is damaged: {error}")
            continue
        notes.append(f"step {step} is restored from {mirror.name}: {reason}")
        return RestoreSource(replace(loaded, skipped=tuple(skipped.items())), True, notes)
    if failure is not None and not (damaged and isinstance(failure, StepNotFoundError)):
        raise failure
    reasons = "\n".join(damaged)
    raise NoGoodCheckpointError(
        f"{run.where} and {mirror.name}: expected a readable checkpoint, found {len(damaged)} "
        f"damaged:\n{reasons}\nNothing was changed. `perdure verify` lists what is damaged in each."
    )


def _lead(
    run: Run,
    mirror: Mirror | None,
    processes: Processes,
    step: int | None,
    wanted: Wanted | None,
    unreadable: Mapping[int, str],
) -> RestoreSource | None:
    """Pick and load a checkpoint in the chief, and tell the others which one."""
    source, error = attempt(lambda: load_newest_good(run, mirror, step, wanted, unreadable))
    outcome = CallOutcome.of(error)
    if source is not None:
        outcome.mirrored = source.mirrored
        if source.loaded is not None:
            outcome.step = source.loaded.manifest.step
            outcome.fingerprint = source.loaded.manifest.fingerprint
    broadcast_outcome(processes, outcome)
    if error is not None:
        raise error
    return source


def _follow(
    run: Run, mirror: Mirror | None, processes: Processes, wanted: Wanted | None
) -> tuple[RestoreSource | None, BaseException | None]:
    """The checkpoint that the chief has picked, or why this process could not load it."""
    outcome = follow_chief(processes)
    if (step := outcome.step) is None:
        return RestoreSource(None, False, []), None
    storage = mirror.storage if mirror is not None and outcome.mirrored else run.storage

    def load() -> RestoreSource:
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

    return attempt(load)
