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

    The `nth` time that a process (`worker`; None for any) reaches `point`, or at the first with at
    least `step`, `act` happens: "kill", "term", "stop" (a signal), "full", "io" (the operation
    fails), "torn" (the file written last keeps the share `value`, and the process is killed),
    "clock" (jumps by `value` seconds). "exit", the end of a replay, happens at each such point:
    `SystemExit`, so that a save under way is finished. Of a "torn", `of` is the point whose file
    loses its end. `opened`: once the program has named this run directory.
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

    `signal` is sent from outside `after_s` seconds, to `victim` (None: all). `damage` ("flip" or
    "delete") hits the newest checkpoint before the start, at `place` from 0 to 1. `plants` are
    names of `probes.PLANTS`.
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
    """One faulted run: its planned attempts; further ones run without faults until it finishes."""

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
    """A checkpoint as it was committed; `copy` is of its manifest, because retention may delete it."""

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
    """A file that a run has left; an export was made after the last step, and not appended to."""

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
    """How one attempt ended, the step it continued from (None: nothing), and what hit it, in order."""

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
    """How one run ended: faults that happened, why it failed ("" if not), its log and its files."""

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
