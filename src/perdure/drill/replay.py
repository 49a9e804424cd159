"""`replay_run`: computes steps of a run again with its own program, and compares every one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from perdure.drill.compare import LeafDifference, leaf_differences
from perdure.drill.execution import DrilledProgram
from perdure.drill.stretch import Recomputed, Stretch, allow_other_recipe, recompute
from perdure.errors import ArgumentError, CorruptionError, LaunchError, StepNotFoundError
from perdure.store import Run
from perdure.store.format import span_text
from perdure.store.manifest import Manifest
from perdure.store.run_events import JournalEntry, first_difference
from perdure.store.run_log import line_references, read_journal
from perdure.supervise.options import checked_command

Verdict = Literal["reproduced", "differs", "not comparable"]


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed, and where.

    Attributes:
        first: The replay begins from the checkpoint at or before this step, or from a fresh state if
            there is none. None: from the oldest checkpoint.
        last: The last step; None for the last one that was recorded.
        sample: Replay so many stretches between two checkpoints, drawn at random; None replays all.
        seed: Decides the sample.
        workers: Processes of the group.
        devices: Devices of each; None leaves them to the framework.
        read_only: Run directories that the program only reads, apart from the one that is replayed.
        environment: Variables on top of those of this process.
    """

    first: int | None = None
    last: int | None = None
    sample: int | None = None
    seed: int = 0
    workers: int = 1
    devices: int | None = None
    read_only: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StretchResult:
    """What the replay of one stretch gave.

    Attributes:
        start: The checkpoint that it began from; None for a fresh state.
        stop: The last step.
        verdict: "reproduced"; "differs"; or "not comparable", because the recipe is another one.
        steps: How many lines of the journal were compared.
        checkpoints: How many fingerprints were compared.
        step: The first step that differs.
        what: What differs there: "batch", "total", "state", or "end" if the program ended before it.
        expected, found: The digests, or the fingerprints.
        leaves: The leaves that differ, if both have a checkpoint of that step.
        recipe: The fields of the recipe that differ.
    """

    start: int | None
    stop: int
    verdict: Verdict = "reproduced"
    steps: int = 0
    checkpoints: int = 0
    step: int | None = None
    what: str = ""
    expected: str = ""
    found: str = ""
    leaves: tuple[LeafDifference, ...] = ()
    recipe: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """What a run recorded.

    Attributes:
        start: The checkpoint that the replay begins from; None for a fresh state.
        entries: The lines of its journal after the start.
        checkpoints: Its steps.
        last: The last step that was recorded or saved.
    """

    start: int | None
    entries: Mapping[int, JournalEntry]
    checkpoints: Sequence[int]
    last: int

    @staticmethod
    def of(run: Run, first: int | None) -> Reference:
        """The lines from the checkpoint at or before `first` on; None for the oldest checkpoint.

        All lines are read, because each checkpoint refers to one of them: a replay says nothing about a
        run whose journal was exchanged or has lost lines.
        """
        steps, references = run.steps(), {}
        for step in steps:
            with suppress(StepNotFoundError):  # deleted meanwhile
                references |= line_references([run.manifest(step)])
        wanted = min(steps, default=0) if first is None else first
        start = max((step for step in steps if step <= wanted), default=None)
        entries, last = {}, max(steps, default=0)
        for entry in read_journal(run.storage, references):
            last = max(last, entry.step)
            if start is None or entry.step > start:
                entries[entry.step] = entry
        return Reference(start, entries, steps, last)


def replay_run(
    command: Sequence[str],
    run: str | os.PathLike[str],
    options: ReplayOptions,
    directory: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> list[StretchResult]:
    """Compute steps of a run again, and compare them with its journal and its checkpoints.

    The run directory is only read, also while it is trained in. The replay ends at the first stretch
    that is not reproduced.

    Args:
        command: The program and its arguments, as the run was started.
        run: The run directory, as the program names it.
        options: Which steps, and on what.
        directory: Holds the replays.
        progress: Is called at the beginning of each stretch.

    Returns:
        A result for each stretch.

    Raises:
        ArgumentError: There is nothing to replay in these steps.
        NotARunError: `run` is no run directory.
        CorruptionError: The journal of the run was changed, or a checkpoint is damaged.
        LaunchError: The program cannot be started, fails, or does not open the run.
    """
    checked_command(command, "perdure replay RUN --")
    source = Run(run)
    reference = Reference.of(source, options.first)
    directory = directory.absolute()
    program = DrilledProgram.here(command, directory, options.workers, options.read_only)
    results: list[StretchResult] = []
    for number, stretch in enumerate(_stretches(source.where, reference, options), 1):
        begin = (
            "a fresh state" if stretch.start is None else f"the checkpoint of step {stretch.start}"
        )
        progress(f"{span_text((stretch.start or 0) + 1, stretch.stop)}, from {begin}")
        allowed = allow_other_recipe(source, stretch.start)
        recomputed = recompute(
            replace(program, environment={**options.environment, **allowed}),
            source,
            stretch,
            directory / f"replay-{number}",
            options.devices,
        )
        results.append(compare_stretch(source, reference, stretch, recomputed))
        if results[-1].verdict != "reproduced":
            break
    return results


def _stretches(where: str, reference: Reference, options: ReplayOptions) -> list[Stretch]:
    first, start = options.first or 0, reference.start
    last = reference.last if options.last is None else options.last
    if first > last or last > reference.last:
        raise ArgumentError(
            f"--steps: expected steps up to {reference.last}, the last that {where} has recorded, "
            f"found {first}:{last}."
        )
    after = -1 if start is None else start
    saved = [step for step in reference.checkpoints if after < step <= last]
    stop = max([*saved, *(step for step in reference.entries if step <= last)], default=None)
    if stop is None:
        raise ArgumentError(
            f"{where}: expected a step after {first if start is None else start} that is recorded in "
            f"its journal or saved, found none. `--steps 0:` replays the run from its beginning, "
            f"once there is a later step."
        )
    if options.sample is None:
        return [Stretch(start, stop)]
    inner = [step for step in saved if step < stop]
    begins: list[int | None] = [start, *inner]
    parts = [Stretch(a, b) for a, b in zip(begins, [*inner, stop], strict=True)]
    chosen = random.Random(options.seed).sample(range(len(parts)), min(options.sample, len(parts)))
    return [parts[number] for number in sorted(chosen)]


def compare_stretch(
    run: Run, reference: Reference, stretch: Stretch, found: Recomputed
) -> StretchResult:
    """The first difference, in the order of the steps and of the computation in a step."""
    result = StretchResult(stretch.start, stretch.stop)
    after = -1 if stretch.start is None else stretch.start
    steps = sorted(step for step in reference.entries if after < step <= stretch.stop)
    both = [step for step in steps if step in found.entries]
    manifests: dict[int, Manifest] = {}
    for step in reference.checkpoints:
        if step in found.manifests:
            try:
                manifests[step] = run.manifest(step)
            except (CorruptionError, StepNotFoundError):
                continue  # deleted meanwhile, or damaged: `perdure verify` reports that
    result = replace(result, steps=len(both), checkpoints=len(manifests))
    differences = [
        (step, *difference)
        for step in both
        if (difference := first_difference(reference.entries[step], found.entries[step]))
    ]
    differences += [
        (step, "state", manifest.fingerprint, found.manifests[step].fingerprint)
        for step, manifest in sorted(manifests.items())
        if manifest.fingerprint != found.manifests[step].fingerprint
    ]
    saved = [step for step in reference.checkpoints if after < step <= stretch.stop]
    ends = [step for step in (*steps, *saved) if found.last is not None and step > found.last]
    if ends:
        differences.append((min(ends), "end", "", f"the program ended after step {found.last}"))
    if not both and not manifests and not differences:
        raise LaunchError(
            f"{run.where}: nothing of {span_text(max(after, 0) + 1, stretch.stop)} could be compared: "
            f"the program recorded no step and committed no checkpoint that the run has. Expected the "
            f"same `journal_every` or the same interval of saves as in the run."
        )
    recipe = _other_fields(run, reference, found)
    if not differences:
        return replace(result, stop=max([*both, *manifests]), recipe=recipe)
    step, what, expected, digest = min(differences, key=lambda difference: difference[0])
    leaves: tuple[LeafDifference, ...] = ()
    if what != "end" and step in manifests:
        old, new = manifests[step], found.manifests[step]
        leaves = leaf_differences(
            {leaf.path: leaf for leaf in old.leaves}, {leaf.path: leaf for leaf in new.leaves}
        )
    return replace(
        result,
        verdict="not comparable" if recipe else "differs",
        step=step,
        what=what,
        expected=expected,
        found=digest,
        leaves=leaves,
        recipe=recipe,
    )


def _other_fields(run: Run, reference: Reference, found: Recomputed) -> tuple[str, ...]:
    """The fields of the recipe that the program has otherwise, or that only one side has."""
    known = (
        reference.start if reference.start is not None else min(reference.checkpoints, default=None)
    )
    recipe: Mapping[str, Any] = {}
    with suppress(CorruptionError, StepNotFoundError):
        recipe = run.manifest(known).recipe if known is not None else {}
    if not recipe:
        return ()
    missing = object()
    return tuple(
        f"{name}: the run has {recipe.get(name)!r}, the program {found.recipe.get(name)!r}"
        for name in sorted(recipe.keys() | found.recipe.keys())
        if repr(recipe.get(name, missing)) != repr(found.recipe.get(name, missing))
    )
