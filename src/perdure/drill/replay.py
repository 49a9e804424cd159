"""Computes steps of a run again with its own program, and compares them with what the run recorded.

Invariant: the run that is replayed is only read. The program sees a copy of its working directory, with
a fork of the run in the place where it looks for it.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from perdure.checkpoint.recipe import ALLOW, NamedRecipe
from perdure.checkpoint.recipe import differences as recipe_differences
from perdure.drill.compare import LeafDifference, leaf_differences
from perdure.drill.execution import DrilledProgram, execute
from perdure.drill.fault_injection import redirected
from perdure.drill.scenario import Fault, Launch, Outcome
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    LaunchError,
    SaveError,
    StepNotFoundError,
)
from perdure.store import LocalStorage, Run, fork_run
from perdure.store.format import span_text, time_text
from perdure.store.log import LogWriter, log_place
from perdure.store.manifest import Manifest
from perdure.store.run_events import JournalEntry, first_difference
from perdure.store.run_log import line_references, read_journal
from perdure.store.storage import Storage
from perdure.supervise.options import checked_command

Verdict = Literal["reproduced", "differs", "not comparable"]
Parts = Mapping[tuple[str, int | None], Mapping[str, str]]
"""Digests of the leaves of each part of one step (`step_bisect.PARTS`), by the name of the part and the
number of its logical replica (for generators, of the process)."""

REPLAYS = "replays/"
_STARTS = 100  # of a program that asks to be started again before the last step


# ---------------------------------------------------------------- one stretch, computed again


@dataclass(frozen=True)
class Stretch:
    """The steps after `start` (None: a fresh state) up to `stop`; parts of `traced`."""

    start: int | None
    stop: int
    traced: int | None = None

    @property
    def after(self) -> int:
        """The step after which it begins; -1 for a fresh state, which may be saved as step 0."""
        return -1 if self.start is None else self.start

    def describe(self) -> str:
        """`steps 9 to 12, from the checkpoint of step 8`."""
        begin = (
            f"the checkpoint of step {self.start}" if self.start is not None else "a fresh state"
        )
        return f"{span_text((self.start or 0) + 1, self.stop)}, from {begin}"


@dataclass
class Recomputed:
    """What a program recorded and committed when it computed a stretch again."""

    entries: dict[int, JournalEntry] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    last: int | None = None
    parts: Parts = field(default_factory=dict)


def recompute(
    program: DrilledProgram,
    run: Run,
    stretch: Stretch,
    directory: Path,
    devices: int | None = None,
    named: str | None = None,
) -> Recomputed:
    """Run `program` from the checkpoint of the start until it has computed the last step.

    It may continue from a checkpoint of another recipe: whether that gives the same bits is what
    the replay finds out. The program opens `named` (by default `run`), where a fork of `run` is.
    Raises LaunchError if it fails before, or does not open the run; StoreError if a checkpoint
    cannot be read.
    """
    named = named or run.where
    named = named if "://" in named else os.path.realpath(named)
    fields = run.manifest(stretch.start).recipe.keys() if stretch.start is not None else ()
    allowed = ",".join([*filter(None, [os.environ.get(ALLOW, "")]), *fields])
    program = replace(program, environment={**program.environment, ALLOW: allowed})

    def fork() -> None:
        if stretch.start is not None:
            fork_run(run.storage, stretch.start, redirected(directory, named)[1])

    # The step itself is complete when the next one is reported. Only the chief writes the journal.
    end = Fault("step", "exit", step=stretch.stop + 1, worker=0, opened=named)
    outcome = execute(
        program,
        directory,
        [Launch((end,))] * _STARTS,
        devices=devices,
        restarts=0,
        asked={"traced": stretch.traced},
        prepare=fork,
    )
    if outcome.problem and not outcome.fired:
        raise LaunchError(
            f"the program failed in the replay of {stretch.describe()}: {outcome.problem}. The end of "
            f"its log:\n{outcome.log or '(nothing)'}"
        )
    opened = dict.fromkeys(event["name"] for event in outcome.events if event["e"] == "open")
    if named not in opened:
        raise LaunchError(
            f"the program opened {', '.join(opened) or 'no run directory'}, and not {named}, so that "
            f"nothing was replayed. Start it in the same directory and with the same arguments as the "
            f"run, and name the run directory that it uses."
        )
    return _recomputed(*redirected(directory, named), outcome, stretch)


def _recomputed(name: str, place: str, outcome: Outcome, stretch: Stretch) -> Recomputed:
    found = Recomputed()
    wanted = range(stretch.after + 1, stretch.stop + 1)
    found.entries = {e.step: e for e in read_journal(LocalStorage(place)) if e.step in wanted}
    for commit in outcome.commits:
        if commit.run == name and commit.step in wanted:
            found.manifests[commit.step] = commit.manifest()
    for event in outcome.events:
        if event["e"] == "recipe" and event["run"] == name:
            found.recipe = event["recipe"]
        elif event["e"] == "step":
            found.last = max(event["step"], found.last or 0)
    # Of what belongs to no replica, the part of the chief counts.
    parts: dict[tuple[str, int | None], Mapping[str, str]] = {}
    traced = [event for event in outcome.events if event["e"] == "trace"]
    for event in sorted(traced, key=lambda event: not event["is_after"]):
        if event["w"] == 0 or "number" in event:
            parts.setdefault((event["part"], event.get("number")), event["leaves"])
    found.parts = parts
    return found


# ---------------------------------------------------------------- the replay of a run


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed, and where.

    From the checkpoint at or before `first` (None: the oldest) to `last` (None: the last recorded
    step); `sample` draws so many stretches between two checkpoints. `read_only` are other run
    directories.
    """

    first: int | None = None
    last: int | None = None
    sample: int | None = None
    seed: int = 0
    workers: int = 1
    devices: int | None = None
    read_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class StretchResult:
    """What the replay of one stretch gave: "reproduced", "differs", or "not comparable" (the
    recipe).

    `what` differs first at `step`: "batch", "total", "state", or "end" if the program ended before
    it. `seen` tells the history of the run that was replayed from another one with the same steps,
    which a rollback may begin: step, fingerprint, and digest in the journal of states of the run.
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
    seen: tuple[tuple[int, str | None, str | None], ...] = ()


@dataclass(frozen=True)
class Reference:
    """What a run recorded: the start of a replay, and the lines and checkpoints after it."""

    start: int | None
    entries: Mapping[int, JournalEntry]
    checkpoints: Sequence[int]
    last: int

    @staticmethod
    def of(run: Run, first: int | None) -> Reference:
        """The lines from the checkpoint at or before `first` on; None for the oldest checkpoint.

        All are read, because each checkpoint refers to one: a journal that was exchanged proves
        nothing.
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

    The run is only read. The replay ends at the first stretch that is not reproduced. Raises
    ArgumentError (nothing to replay), NotARunError, CorruptionError (journal or checkpoint),
    LaunchError.
    """
    checked_command(command, "perdure replay RUN --")
    source = Run(run)
    reference = Reference.of(source, options.first)
    directory = directory.absolute()
    program = DrilledProgram.here(command, directory, options.workers, options.read_only)
    results: list[StretchResult] = []
    for number, stretch in enumerate(_stretches(source.where, reference, options), 1):
        progress(stretch.describe())
        place = directory / f"replay-{number}"
        recomputed = recompute(program, source, stretch, place, options.devices)
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


def differences(
    entries: Mapping[int, JournalEntry], manifests: Mapping[int, Manifest], found: Recomputed
) -> list[tuple[int, str, str, str]]:
    """What differs of the steps that are known on both sides: the step, what it is, both values."""
    lines = [
        (step, *difference)
        for step in sorted(entries.keys() & found.entries.keys())
        if (difference := first_difference(entries[step], found.entries[step]))
    ]
    states = [
        (step, "state", manifests[step].fingerprint, found.manifests[step].fingerprint)
        for step in sorted(manifests.keys() & found.manifests.keys())
    ]
    return [*lines, *(state for state in states if state[2] != state[3])]


def compare_stretch(
    run: Run, reference: Reference, stretch: Stretch, found: Recomputed
) -> StretchResult:
    """The first difference, in the order of the steps and of the computation in a step."""
    inside = range(stretch.after + 1, stretch.stop + 1)
    recorded = [step for step in sorted(reference.entries) if step in inside]
    both = {step: reference.entries[step] for step in recorded if step in found.entries}
    manifests: dict[int, Manifest] = {}
    for step in found.manifests.keys() & reference.checkpoints:
        # Deleted meanwhile, or damaged: `perdure verify` reports that.
        with suppress(CorruptionError, StepNotFoundError):
            manifests[step] = run.manifest(step)
    parted = differences(both, manifests, found)
    known = [*recorded, *(step for step in reference.checkpoints if step in inside)]
    ends = [step for step in known if found.last is not None and step > found.last]
    if ends:
        parted.append((min(ends), "end", "", f"the program ended after step {found.last}"))
    if not both and not manifests and not parted:
        raise LaunchError(
            f"{run.where}: nothing of {stretch.describe()} could be compared: the program recorded no "
            f"step and committed no checkpoint that the run has. Expected the same `journal_every` or "
            f"the same interval of saves as in the run."
        )
    result = StretchResult(
        stretch.start,
        stretch.stop,
        steps=len(both),
        checkpoints=len(manifests),
        recipe=_other_fields(run, reference, found),
    )
    compared = {*both, *manifests}
    seen = {*compared.intersection(reference.checkpoints), *filter(None, [stretch.start])}
    if not parted:
        stop = max(compared)
        return replace(result, stop=stop, seen=_seen(run, reference, {*seen, stop}))
    step, what, expected, digest = min(parted, key=lambda difference: difference[0])
    leaves: tuple[LeafDifference, ...] = ()
    if what != "end" and step in manifests:
        both_leaves = (manifests[step].leaves, found.manifests[step].leaves)
        leaves = leaf_differences(*({leaf.path: leaf for leaf in each} for each in both_leaves))
    return replace(
        result,
        verdict="not comparable" if result.recipe else "differs",
        step=step,
        what=what,
        expected=expected,
        found=digest,
        leaves=leaves,
        seen=_seen(run, reference, {*seen, step}),
    )


def _seen(
    run: Run, reference: Reference, steps: Iterable[int]
) -> tuple[tuple[int, str | None, str | None], ...]:
    """The states of the run at these steps, as `StretchResult.seen` has them."""
    seen = []
    for step in sorted(steps):
        fingerprint, entry = None, reference.entries.get(step)
        with suppress(CorruptionError, StepNotFoundError):
            fingerprint = run.manifest(step).fingerprint
        seen.append((step, fingerprint, entry.state if entry else None))
    return tuple(seen)


def _other_fields(run: Run, reference: Reference, found: Recomputed) -> tuple[str, ...]:
    """The fields of the recipe that the program has otherwise, or that only one side has."""
    known, recipe = reference.start, {}
    known = min(reference.checkpoints, default=None) if known is None else known
    with suppress(CorruptionError, StepNotFoundError):
        recipe = run.manifest(known).recipe if known is not None else {}
    sides = NamedRecipe("the run", recipe), NamedRecipe("the program", found.recipe)
    return tuple(recipe_differences(*sides)) if recipe else ()


# ---------------------------------------------------------------- the record of a replay


def replay_document(
    where: str, command: Sequence[str], options: ReplayOptions, results: Sequence[StretchResult]
) -> dict[str, Any]:
    """What `--json` prints and the record holds; the first stretch that is not reproduced decides."""
    from perdure import __version__

    others = [each.verdict for each in results if each.verdict != "reproduced"]
    return {
        "kind": "replayed",
        "run": where,
        "created": time_text(time.time()),
        "host": socket.gethostname(),
        "version": __version__,
        "command": list(command),
        "workers": options.workers,
        "devices": options.devices,
        "sample": options.sample,
        "seed": options.seed,
        "verdict": [*others, "reproduced"][0],
        "stretches": [asdict(result) for result in results],
    }


def write_record(storage: Storage, document: Mapping[str, Any]) -> str:
    """Write the record into a run directory, beside a writer that may be at work; returns its name."""
    name = f"{REPLAYS}{document['created'].replace(':', '')}-{secrets.token_hex(4)}"
    place = log_place(storage, name)
    try:
        storage.make_folder(REPLAYS)
        log = LogWriter(storage, name)
        try:
            log.append(document)
            log.sync()
        finally:
            log.close()
    except OSError as error:
        raise SaveError(
            f"{storage.where}/{place}: the record of the replay cannot be written: {error}. Make it "
            f"writable, or keep the output of `--json`."
        ) from error
    return place
