"""What an undisturbed run shows of a program."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from perdure.drill.execution import DEVICES, STOPPED_S, DrilledProgram
from perdure.drill.scenario import Outcome
from perdure.supervise.options import Limits


@dataclass(frozen=True)
class Observed:
    """What an undisturbed run showed; the plan of a drill is a function of this and of the seed.

    `points` count how often worker 0 reached each, `early` up to its first step and `before_commit`
    up to its first commit. `sequence`, `runs` and `phases` have the step, run directory and phase
    of each commit. `may_devices` and `may_workers` are other numbers that worked.
    """

    seconds: float = 0.0
    first_step_s: float = 0.0
    steps: tuple[int, ...] = ()
    points: Mapping[str, int] = field(default_factory=dict)
    early: Mapping[str, int] = field(default_factory=dict)
    silence_s: float = 0.0
    workers: int = 1
    replicas: int | None = None
    devices: int = 1
    modules: tuple[str, ...] = ()
    may_devices: tuple[int, ...] = ()
    may_workers: tuple[int, ...] = ()
    sequence: tuple[int, ...] = ()
    first_commit_s: float = 0.0
    before_commit: Mapping[str, int] = field(default_factory=dict)
    runs: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    phases: tuple[object, ...] = ()

    @property
    def limits(self) -> Limits:
        """When a silent program counts as hung."""
        start = max(60.0, 10 * self.first_step_s)
        step = max(20.0, 10 * self.silence_s)
        return Limits(start, start, start, step, step, step, step + start, STOPPED_S)

    @property
    def commits(self) -> set[int]:
        """The steps of its checkpoints."""
        return set(self.sequence)

    def phase(self, number: int) -> object:
        """The phase of a commit, counted from 1."""
        return self.phases[number - 1] if self.phases else None

    @property
    def restorable(self) -> list[int]:
        """The commits, counted from 1, above step 0, after which their run has later steps."""
        runs = self.runs or ("",) * len(self.sequence)
        last = {runs[0]: max(self.steps, default=0)} if len(set(runs)) == 1 else {}
        for run, step in zip(runs, self.sequence, strict=True):
            last[run] = max(step, last.get(run, 0))
        saved = enumerate(zip(runs, self.sequence, strict=True), 1)
        return [number for number, (run, step) in saved if 0 < step < last[run]]

    @property
    def last_commits(self) -> list[int]:
        """The last commit of each run directory, counted from 1, if it is above step 0."""
        runs = self.runs or ("",) * len(self.sequence)
        numbers = {run: number for number, run in enumerate(runs, 1)}
        return sorted(number for number in numbers.values() if self.sequence[number - 1] > 0)


def observe(program: DrilledProgram, outcome: Outcome) -> Observed:
    """Summarize an undisturbed run."""
    chief = [event for event in outcome.events if event["w"] == 0]
    steps = [event for event in chief if event["e"] == "step"]
    end = outcome.began + outcome.seconds
    first = steps[0]["t"] if steps else end
    times = [*sorted(event["t"] for event in outcome.events if event["t"] >= first), end]
    recipe = outcome.commits[-1].manifest().recipe if outcome.commits else {}
    replicas = recipe.get("replicas")
    committed = [event for event in chief if event["e"] == "commit"]
    synced = next((i for i, event in enumerate(chief) if event["e"] == "manifest.sync"), -1)
    return Observed(
        seconds=outcome.seconds,
        first_step_s=first - outcome.began,
        steps=tuple(event["step"] for event in steps),
        points=Counter(event["e"] for event in chief),
        early=Counter(event["e"] for event in chief if event["t"] <= first),
        silence_s=max((b - a for a, b in pairwise(times)), default=0.0),
        workers=program.workers,
        replicas=replicas if isinstance(replicas, int) else None,
        devices=int(program.environment.get(DEVICES) or os.environ.get(DEVICES) or 1),
        modules=tuple(steps[0].get("modules", ())) if steps else (),
        sequence=tuple(event["step"] for event in committed),
        runs=tuple(event["run"] for event in committed),
        first_commit_s=committed[0]["t"] - outcome.began if committed else 0.0,
        before_commit=Counter(event["e"] for event in chief[: synced + 1]),
        versions=steps[0].get("versions", {}) if steps else {},
        recipe=dict(recipe),
    )


def phases_of(outcome: Outcome) -> dict[tuple[str, int], object]:
    """The phase of each checkpoint: the same lines of the program ran before and after it, and the
    same leaves changed.
    """
    chief = [event for event in outcome.events if event["w"] == 0]
    lines = [(event["step"], event["lines"]) for event in chief if event.get("lines")]
    found: dict[tuple[str, int], object] = {}
    for run in dict.fromkeys(commit.run for commit in outcome.commits):
        commits = sorted((c for c in outcome.commits if c.run == run), key=lambda c: c.step)
        contents: list[dict[str, object]] = [{}]
        for manifest in (commit.manifest() for commit in commits):
            leaves = {leaf.path: (leaf.text, *leaf.hashes()) for leaf in manifest.leaves}
            # The metric is that of Keras `fit`.
            contents.append({"metric epoch": manifest.metrics.get("epoch"), **leaves})
        borders = pairwise([-1, *(commit.step for commit in commits), math.inf])
        around = [
            (
                frozenset(sign for step, sign in lines if first < step <= last),
                frozenset(path for path, known in new.items() if old.get(path, known) != known),
            )
            for (first, last), (old, new) in zip(borders, pairwise([*contents, {}]), strict=True)
        ]
        for number, commit in enumerate(commits):
            found[run, commit.step] = (around[number], around[number + 1])
    return found


def other_topologies(observed: Observed) -> dict[str, list[int]]:
    """Other numbers of devices and of workers to try the program on."""
    workers, replicas = observed.workers, observed.replicas
    devices = min(4, (replicas or 4) // workers) if "jax" in observed.modules else 0
    most = min(workers + 1, replicas or workers) if workers > 1 else 0
    return {
        "devices": [count for count in range(1, devices + 1) if count != observed.devices],
        "workers": [count for count in range(1, most + 1) if count != workers],
    }
