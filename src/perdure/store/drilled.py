"""Inside a program that `perdure drill` runs: its run directories are led elsewhere, watched, failed.

The directory of the drill's run holds `plan.json` (what shall happen in this attempt), `events.jsonl`
(a line for every operation that changes a run directory, and for every step), `manifests/` (a copy of
every manifest as it is committed, so that retention does not take the evidence away), `runs/` (the
run directories themselves) and `fired-ID.json` for every fault that happened. Invariants: a fault
happens once, also where several processes come to it; it is on the disk before it happens.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from perdure import heartbeats
from perdure.store.format import MANIFESTS, PACKS, TEMP_SUFFIX, hash_bytes
from perdure.store.local import LocalStorage
from perdure.store.storage import Storage

PLAN, EVENTS, COPIES, RUNS = "plan.json", "events.jsonl", "manifests", "runs"

Listener = Callable[[str, "int | None"], None]

_ERRORS = {"full": errno.ENOSPC, "io": errno.EIO}
_LONGEST_NAME = 200  # of 255 bytes that a file system takes
_FRAMEWORKS = ("jax", "torch", "keras", "tensorflow")


_BEATS = {
    "restore": "restoring",
    "compile": "restored",
    "step": "step",
    "save": "save",
    "end": "end",
}


@cache
def attached(where: str) -> Drilled:
    """The one drill of this process."""
    drilled = Drilled(Path(where))
    heartbeats.listeners.append(drilled.beat)
    return drilled


class Drilled:
    """Watches this process for the drill whose run lies in `where`, and does what its plan says.

    A fault of the plan is `{id, point, act, nth, step, worker, value, of}`: at the `nth` time that this
    process comes to `point` (or at the first `point` with a step not below `step`), `act` happens:
    "kill", "term", "stop" (signals to itself), "full", "io" (the operation fails), "torn" (what was
    written last loses its end, and the process is killed), "clock" (it jumps by `value` seconds).
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        plan = json.loads((where / PLAN).read_bytes())
        self.attempt: int = plan["attempt"]
        self._faults: list[dict[str, Any]] = plan["faults"]
        self._leave = {os.path.realpath(path) for path in plan.get("leave", ())}
        self.worker = _worker()
        self._events = os.open(where / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._guard = threading.RLock()
        self._seen: Counter[str] = Counter()
        self._step: int | None = None
        self._linked: dict[str, str] = {}
        self._time = time.time
        self._offset = 0.0
        self.listeners: list[Listener] = []

    def storage(self, where: str | os.PathLike[str] | Storage) -> Storage:
        """The storage for a run directory that the program names: one of its own below `runs/`.

        URLs are led there too: what is tried is the program, and not the network. A storage that is
        neither comes back as it is.
        """
        if isinstance(where, LocalStorage):
            if where.announces(self.before):
                return where
            where = where.where
        elif not isinstance(where, (str, os.PathLike)):
            return where
        text = os.fspath(where)
        path = text if "://" in text else os.path.realpath(text)
        if path in self._leave:
            return LocalStorage(where)
        self.at("open", name=path)
        name = quote(path, safe="")
        if len(name) > _LONGEST_NAME:
            name = f"{name[-_LONGEST_NAME // 2 :]}-{hash_bytes(path.encode())[:16]}"
        return LocalStorage(self.where / RUNS / name, self.before)

    def clock(self, clock: Callable[[], float]) -> Callable[[], float]:
        """`clock`, which jumps where the plan says so. One that is not Python's own asks `time.time`
        itself, if it is a clock of that kind, and finds the jump there."""
        return (lambda: clock() + self._offset) if clock is self._time else clock

    def before(self, operation: str, path: str) -> None:
        """Called ahead of every operation that changes a run directory."""
        with self._guard:
            point = _point(operation, path, self._linked)
            if point in ("manifest.link", "pack.link"):
                self._linked[point] = path
            if point == "manifest.sync":
                self._copy(self._linked["manifest.link"])
            self.at(point, path=path)
            if point == "manifest.sync":
                self._linked.clear()

    def beat(self, phase: str, step: int | None) -> None:
        """Called at every heartbeat: the loop is `phase`, behind `step`."""
        if (point := _BEATS.get(phase)) is not None:
            self.at(point, step)

    def at(self, point: str, step: int | None = None, path: str = "", **fields: Any) -> None:
        """The process has come to `point`. A step counts once, by whomever it is told."""
        with self._guard:
            if point == "step":
                if step == self._step:
                    return
                if self._step is None:
                    fields["modules"] = [name for name in _FRAMEWORKS if name in sys.modules]
                self._step = step
            self._seen[point] += 1
            self._tell(point, step=step, **fields)
            for listener in self.listeners:
                listener(point, step)
            for fault in self._faults:
                if self._due(fault, point, step) and self._first(fault, point, step):
                    self._act(fault, path)

    def _due(self, fault: dict[str, Any], point: str, step: int | None) -> bool:
        if fault["point"] != point or fault.get("worker", self.worker) != self.worker:
            return False
        if (wanted := fault.get("step")) is not None:
            return step is not None and step >= wanted
        return self._seen[point] == fault.get("nth", 1)

    def _first(self, fault: dict[str, Any], point: str, step: int | None) -> bool:
        """Whether nobody did this fault before; from now on somebody has."""
        target = self.where / f"fired-{fault['id']}.json"
        said = {"attempt": self.attempt, "worker": self.worker, "point": point}
        said |= {"step": step if step is not None else self._step, "time": time.time()}
        try:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(fd, json.dumps(said).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        behind = "before the first step" if self._step is None else f"behind step {self._step}"
        at = f"step {step}" if point == "step" else f"{point} {behind}"
        self._tell("fired", id=fault["id"], act=fault["act"], at=at)
        return True

    def _act(self, fault: dict[str, Any], path: str) -> None:
        act = fault["act"]
        if act in _ERRORS:
            raise OSError(_ERRORS[act], os.strerror(_ERRORS[act]), path)
        if act == "torn":
            # Behind the link: the last of the pack, where there is one, or of the manifest.
            made = self._linked.get(fault.get("of", "")) or self._linked.get("manifest.link")
            _tear(made or path, fault["value"])
            _die()
        elif act == "kill":
            _die()
        elif act == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif act == "clock":
            self._jump(fault["value"])

    def _jump(self, seconds: float) -> None:
        """The clock of the store jumps, and the one that the program itself reads."""
        self._offset += seconds
        real, real_ns = time.time, time.time_ns
        time.time = lambda: real() + seconds
        time.time_ns = lambda: real_ns() + int(seconds * 1e9)

    def _copy(self, manifest: str) -> None:
        data = Path(manifest).read_bytes()
        step = int(Path(manifest).stem)
        run = Path(manifest).parent.parent.name
        name = f"{self.attempt:03d}-{self._seen['manifest.sync']:06d}-{os.getpid()}.json"
        (self.where / COPIES).mkdir(exist_ok=True)
        (self.where / COPIES / name).write_bytes(data)
        self._tell("commit", step=step, run=run, copy=name)

    def _tell(self, event: str, **fields: Any) -> None:
        said = {name: value for name, value in fields.items() if value is not None}
        line = {"e": event, "t": time.monotonic(), "a": self.attempt, "w": self.worker, **said}
        # One write to a file opened for appending: lines of several processes do not mix.
        os.write(self._events, json.dumps(line).encode() + b"\n")


def _point(operation: str, path: str, linked: dict[str, str]) -> str:
    """What an operation is to the run directory: `pack.write`, `manifest.link`, `pack.delete`, ..."""
    if operation == "fsync_dir":
        for kind in ("manifest", "pack"):
            if os.path.dirname(linked.get(f"{kind}.link", "")) == path:
                return f"{kind}.sync"
        return "directory.sync"
    parent = os.path.basename(os.path.dirname(path)) + "/"
    kind = {MANIFESTS: "manifest", PACKS: "pack"}.get(parent, "other")
    if operation == "unlink":
        operation = "tidy" if path.endswith(TEMP_SUFFIX) else "delete"
    return f"{kind}.{operation}"


def _tear(path: str, share: float) -> None:
    os.truncate(path, int(os.path.getsize(path) * share))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # nothing more happens in this thread, however late the signal comes
        time.sleep(1)


def _worker() -> int:
    """Number of this process in its group, as the supervisor has said it."""
    return int(os.environ.get("RANK") or 0)
