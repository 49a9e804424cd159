"""The words of a drill: what was seen of a program, what shall happen to it, and what then did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault that the program under test does to itself; see `perdure.store.drilled.Drilled`."""

    point: str
    act: str
    nth: int = 1
    step: int | None = None
    worker: int | None = None
    value: float = 0.0
    of: str = ""

    def describe(self) -> str:
        """`pack.write 3`, `step 7`."""
        at = f"step {self.step}" if self.step is not None else f"{self.point} {self.nth}"
        return at if self.worker is None else f"{at} of worker {self.worker}"


@dataclass(frozen=True)
class Launch:
    """One start of the program: on what, and what happens to it.

    `signal` is sent `after_s` seconds behind the start, to `victim` or to all workers. `damage` is
    done to the newest checkpoint before the start: "flip" a bit, "delete" its pack; `place`, from 0
    to 1, says where in it.
    """

    inside: tuple[Fault, ...] = ()
    signal: str = ""
    after_s: float = 0.0
    victim: int | None = None
    damage: str = ""
    place: float = 0.0
    devices: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Scenario:
    """One faulted run: its attempts; it is started again without faults until it is finished."""

    number: int
    kind: str
    attempts: tuple[Launch, ...]

    @property
    def faults(self) -> int:
        """How many faults must fire."""
        return sum(
            len(each.inside) + bool(each.signal) + bool(each.damage) + _moves(each)
            for each in self.attempts
        )

    def describe(self) -> str:
        """What is meant to happen, in the order of the attempts."""
        said = []
        for each in self.attempts:
            if each.damage:
                said.append({"flip": "a bit flipped", "delete": "pack deleted"}[each.damage])
            if each.devices is not None:
                said.append(f"on {each.devices} devices")
            if each.workers is not None:
                said.append(f"on {each.workers} workers")
            said += [f"{fault.act} at {fault.describe()}" for fault in each.inside]
            if each.signal:
                said.append(f"{each.signal} after {each.after_s:.2f} s")
        return ", ".join(said)


def _moves(attempt: Launch) -> int:
    return (attempt.devices is not None) + (attempt.workers is not None)


@dataclass(frozen=True)
class Commit:
    """A checkpoint as it was committed: `run` is the directory that the program named."""

    run: str
    step: int
    attempt: int
    copy: str
    fingerprint: str


@dataclass(frozen=True)
class Observed:
    """What an undisturbed run shows; the plan is a function of this and of the seed.

    `points` counts the operations of worker 0, `early` those up to its first step; `silence_s`
    is the longest time between two signs of life behind the first step. `may_devices` and
    `may_workers` are other numbers of them that the program was tried on.
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


@dataclass
class Started:
    """What became of one attempt."""

    ended: str
    seconds: float
    workers: int
    devices: int | None
    first: int | None = None
    last: int | None = None
    restored: int | None = None
    note: str = ""


@dataclass
class Outcome:
    """What became of one run, which began at `began` on the monotonic clock.

    `fired` has the faults that happened; `problem` says why it did not come to its end as it should,
    and `log` is what it said last then.
    """

    began: float = 0.0
    seconds: float = 0.0
    attempts: list[Started] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    problem: str = ""
    log: str = ""

    def all_fired(self, scenario: Scenario) -> bool:
        """Whether every fault that was planned has happened, whatever became of the run."""
        return len(self.fired) >= scenario.faults

    @property
    def repeated(self) -> int:
        """Steps that were done more than once."""
        again, reached = 0, None
        for each in self.attempts:
            start = each.restored if each.restored is not None else (each.first or 1) - 1
            if reached is not None and each.first is not None:
                again += max(0, reached - start)
            if each.last is not None:
                reached = each.last
        return again

    def end(self) -> dict[str, Commit]:
        """The last checkpoint of each run directory."""
        ends: dict[str, Commit] = {}
        for commit in self.commits:
            if commit.run not in ends or commit.step >= ends[commit.run].step:
                ends[commit.run] = commit
        return ends
