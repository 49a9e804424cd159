"""The values of a drill: what is planned for a run of the program, and what happened in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perdure.store.format import hash_bytes
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.manifest_json import decode_manifest


@dataclass(frozen=True)
class Fault:
    """A fault inside of the program, carried out by `fault_injection.FaultInjector`.

    The `nth` time that a process reaches `point`, or at the first whose step is at least `step`, `act`
    happens: "kill", "term", "stop" (a signal to itself), "full", "io" (the operation fails),
    "torn" (the file written last loses its end, and the process is killed), "clock" (the clock jumps).
    "exit", the end of a replay, happens at each such point from the first on: `SystemExit` in the
    program, so that a save under way is finished.

    Attributes:
        worker: The process to which it happens; None for any.
        value: Seconds of a "clock"; the share of the file that stays of a "torn".
        of: Of a "torn": the point whose file loses its end.
        opened: It happens only once the program has named this run directory.
    """

    point: str
    act: str
    nth: int = 1
    step: int | None = None
    worker: int | None = None
    value: float = 0.0
    of: str = ""
    opened: str = ""

    def describe(self) -> str:
        """`kill at pack.write 3`, `stop at step 7 of worker 1`."""
        place = f"step {self.step}" if self.step is not None else f"{self.point} {self.nth}"
        of = "" if self.worker is None else f" of worker {self.worker}"
        return f"{self.act} at {place}{of}"

    def describe_act(self) -> str:
        """`kill`, `clock +40 days`."""
        if self.act != "clock":
            return self.act
        for name, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
            if abs(self.value) >= size:
                return f"clock {self.value / size:+.3g} {name}"
        return f"clock {self.value:+g} s"


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

    def moves(self) -> list[str]:
        """What is otherwise from the start on, because the program runs elsewhere."""
        devices = [] if self.devices is None else [f"on {self.devices} devices"]
        workers = [] if self.workers is None else [f"on {self.workers} workers"]
        return [*devices, *workers, *["as on another machine"] * bool(self.plants)]

    def planned(self) -> list[str]:
        """Each fault that has to fire, in words."""
        damage = {"flip": ["a bit flipped"], "delete": ["pack deleted"]}.get(self.damage, [])
        signals = [f"{self.signal} after {self.after_s:.2f} s"] * bool(self.signal)
        return [*damage, *self.moves(), *[f.describe() for f in self.injected], *signals]


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
    def planned(self) -> list[str]:
        """Each fault that has to fire, in the order of the attempts."""
        return [text for launch in self.attempts for text in launch.planned()]


@dataclass(frozen=True)
class Commit:
    """A checkpoint as it was committed; `run` is the directory that the program named.

    `copy` is the path of a copy of its manifest, because retention may delete the checkpoint.
    """

    run: str
    step: int
    attempt: int
    copy: str
    fingerprint: str

    def manifest(self) -> Manifest:
        """Its manifest as it was committed."""
        return decode_manifest(Path(self.copy).read_bytes(), self.copy, self.step)

    def leaves(self) -> dict[str, LeafEntry]:
        """Its leaves by path."""
        return {leaf.path: leaf for leaf in self.manifest().leaves}


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
