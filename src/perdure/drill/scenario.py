"""The values of a drill: what was observed of a program, what is planned, and what happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.store.format import hash_bytes


@dataclass(frozen=True)
class Fault:
    """A fault that is injected from inside the program; see `fault_injection.FaultInjector`."""

    point: str
    act: str
    nth: int = 1
    step: int | None = None
    worker: int | None = None
    value: float = 0.0
    """Seconds of a "clock"; the share of the file that stays of a "torn"."""
    of: str = ""
    """Of a "torn": the point whose file loses its end."""

    def describe(self) -> str:
        """`pack.write 3`, `step 7`."""
        place = f"step {self.step}" if self.step is not None else f"{self.point} {self.nth}"
        return place if self.worker is None else f"{place} of worker {self.worker}"


@dataclass(frozen=True)
class Launch:
    """One start of the program: its topology and its faults.

    Attributes:
        injected: Faults that happen inside the program.
        signal: Name of a signal that is sent from outside; empty for none.
        after_s: Seconds from the start to the signal.
        victim: The worker that gets the signal; None for all workers.
        damage: What happens to the newest checkpoint before the start: "flip" a bit of it, "delete"
            its pack, or nothing.
        place: Where in the checkpoint the damage is, from 0 to 1.
        devices: Another number of devices; None for the same as before.
        workers: Another number of workers; None for the same as before.
        plants: What another machine does otherwise; names of `probes.PLANTS`.
    """

    injected: tuple[Fault, ...] = ()
    signal: str = ""
    after_s: float = 0.0
    victim: int | None = None
    damage: str = ""
    place: float = 0.0
    devices: int | None = None
    workers: int | None = None
    plants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One faulted run: its planned attempts. Further attempts run without faults until it finishes.

    Attributes:
        number: Counts from 1.
        kind: A name of `fault_plan.KINDS`.
        attempts: What happens to each attempt.
        place: For a restore that every drill tries: which place it is; empty for a drawn place.
    """

    number: int
    kind: str
    attempts: tuple[Launch, ...]
    place: str = ""

    @property
    def faults(self) -> int:
        """How many faults must fire."""
        return sum(
            len(launch.injected) + bool(launch.signal) + bool(launch.damage) + _moves(launch)
            for launch in self.attempts
        )

    def describe(self) -> str:
        """What is planned, in the order of the attempts."""
        parts = []
        for launch in self.attempts:
            if launch.damage:
                parts.append({"flip": "a bit flipped", "delete": "pack deleted"}[launch.damage])
            if launch.devices is not None:
                parts.append(f"on {launch.devices} devices")
            if launch.workers is not None:
                parts.append(f"on {launch.workers} workers")
            if launch.plants:
                parts.append("as on another machine")
            parts += [f"{fault.act} at {fault.describe()}" for fault in launch.injected]
            if launch.signal:
                parts.append(f"{launch.signal} after {launch.after_s:.2f} s")
        return ", ".join(parts)


def _moves(launch: Launch) -> int:
    moves = (launch.devices is not None, launch.workers is not None, bool(launch.plants))
    return sum(moves)


@dataclass(frozen=True)
class Commit:
    """A checkpoint as it was committed; `run` is the directory that the program named."""

    run: str
    step: int
    attempt: int
    copy: str
    fingerprint: str


@dataclass(frozen=True)
class Observed:
    """What an undisturbed run showed; the plan is a function of this and of the seed.

    Attributes:
        seconds: Duration of the run.
        first_step_s: Seconds from its start to its first step.
        steps: The steps that worker 0 reported.
        commits: The steps of its checkpoints.
        points: How often worker 0 reached each point.
        early: The same up to its first step.
        silence_s: The longest time between two events after the first step, in seconds.
        may_devices: Other numbers of devices on which the program was tried successfully.
        may_workers: Other numbers of workers on which the program was tried successfully.
        sequence: The step of each commit of worker 0, in their order.
        first_commit_s: Seconds from the start to the first commit.
        before_commit: How often worker 0 had reached each point once its first commit was made.
        runs: The run directory of each commit of `sequence`; empty if there is only one.
        versions: The releases that the program ran on.
        recipe: The recipe of its last checkpoint.
        phases: The phase of each commit of `sequence`; empty if they are not known.
    """

    seconds: float
    first_step_s: float
    steps: tuple[int, ...]
    commits: tuple[int, ...]
    points: Mapping[str, int]
    early: Mapping[str, int]
    silence_s: float
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

    def phase(self, number: int) -> object:
        """The phase of a commit, counted from 1."""
        return self.phases[number - 1] if self.phases else None

    @property
    def restorable(self) -> list[int]:
        """The commits, counted from 1, above step 0 and with something left to do after them.

        That is a later step of the same run directory: one phase of a program may end where the next
        one begins.
        """
        return [
            number for number, step in enumerate(self.sequence, 1) if 0 < step < self._last(number)
        ]

    @property
    def last_commits(self) -> list[int]:
        """The last commit of each run directory, counted from 1, if it is above step 0."""
        numbers = {run: number for number, run in enumerate(self._runs, 1)}
        return sorted(number for number in numbers.values() if self.sequence[number - 1] > 0)

    @property
    def _runs(self) -> tuple[str, ...]:
        return self.runs or ("",) * len(self.sequence)

    def _last(self, number: int) -> int:
        """The last step in the run directory of a commit."""
        run = self._runs[number - 1]
        steps = (step for step, of in zip(self.sequence, self._runs, strict=True) if of == run)
        return max(*steps, *(self.steps if len(set(self._runs)) == 1 else ()), 0)


@dataclass(frozen=True)
class WrittenFile:
    """A file that a run has written and left.

    Attributes:
        path: Where it is.
        is_export: It was made after the last step, and not appended to.
        is_outside: It is outside of the copy of the working directory.
    """

    path: str
    is_export: bool
    is_outside: bool


@dataclass(frozen=True)
class FiredFault:
    """A fault that happened: what, and when in seconds after the start of the run."""

    what: str
    at_s: float


@dataclass
class LaunchOutcome:
    """How one attempt ended, and the steps that it reported.

    Attributes:
        restored: The step of the checkpoint that it continued from; None if it began from nothing.
        began_s: When it began, in seconds after the start of the run.
        faults: What hit it, in order.
        planted: Which plants of another machine changed something that the program read.
    """

    ended: str
    seconds: float
    workers: int
    devices: int | None
    first: int | None = None
    last: int | None = None
    restored: int | None = None
    began_s: float = 0.0
    faults: list[FiredFault] = field(default_factory=list)
    planted: list[str] = field(default_factory=list)

    @property
    def continued(self) -> bool:
        """Whether it restored a checkpoint and then did at least one new step."""
        return bool(self.restored) and self.last is not None and self.last > (self.restored or 0)


@dataclass
class Outcome:
    """How one run ended.

    Attributes:
        began: When it began, on the monotonic clock.
        fired: The faults that happened.
        problem: Why it did not end as it should; empty if it did.
        log: The end of its log if there is a problem.
        files: What it has written and left, by name.
        exports: The hashes of the files that are compared at the end, by name.
    """

    began: float = 0.0
    seconds: float = 0.0
    attempts: list[LaunchOutcome] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    problem: str = ""
    log: str = ""
    files: dict[str, WrittenFile] = field(default_factory=dict)
    exports: dict[str, str] = field(default_factory=dict)

    def hash_exports(self, names: Iterable[str]) -> None:
        """Read the files of these names, which are compared at the end."""
        self.exports = {
            name: hash_bytes(Path(self.files[name].path).read_bytes()) if name in self.files else ""
            for name in names
        }

    def all_fired(self, scenario: Scenario) -> bool:
        """Whether every planned fault has happened, however the run ended."""
        return len(self.fired) >= scenario.faults

    @property
    def recomputed(self) -> list[tuple[int, int] | None]:
        """For each attempt, the first and last step that an earlier attempt had done already."""
        spans: list[tuple[int, int] | None] = []
        reached = None
        for attempt in self.attempts:
            start = attempt.restored if attempt.restored is not None else (attempt.first or 1) - 1
            again = reached is not None and attempt.first is not None and reached > start
            spans.append((start + 1, reached) if again and reached is not None else None)
            if attempt.last is not None:
                reached = attempt.last
        return spans

    @property
    def repeated(self) -> int:
        """Steps that were done more than once."""
        return sum(last - first + 1 for first, last in filter(None, self.recomputed))

    @property
    def restored_steps(self) -> list[int]:
        """The steps above 0 that were restored and continued from."""
        return [attempt.restored or 0 for attempt in self.attempts if attempt.continued]

    def end(self) -> dict[str, Commit]:
        """The last checkpoint of each run directory."""
        ends: dict[str, Commit] = {}
        for commit in self.commits:
            if commit.run not in ends or commit.step >= ends[commit.run].step:
                ends[commit.run] = commit
        return ends
