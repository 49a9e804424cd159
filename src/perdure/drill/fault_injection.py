"""Inside a drilled program: watches its run directories and injects faults.

The directory of a drilled run holds `plan.json` (the faults of this attempt), `events.jsonl` (one line
for every operation that changes a run directory and for every step), `manifests/` (a copy of every
manifest as it is committed, so that retention does not remove the evidence), `root/` (the working
directory of this run), `runs/` (links to the run directories in it, and the run directories that the
program names outside of it) and `fired-ATTEMPT-NUMBER` for every fault that happened. Invariants: a
fault happens once, even if several processes reach its place; it is recorded before it happens.

A fault happens at a *point*, a named place that a process reaches:

| point | reached |
|---|---|
| `open` | when the program opens a run directory |
| `read` | before the first bytes of a checkpoint are read, if nothing was changed before |
| `pack.OPERATION`, `manifest.OPERATION` | before an operation on a file in `packs/` or `checkpoints/` |
| `other.OPERATION` | before an operation on any other file of a run directory, such as the marker |
| `pack.sync`, `manifest.sync` | before the directory is synced after the link of such a file |
| `directory.sync` | before a directory is synced otherwise |
| `restoring`, `restored`, `step`, `save`, `end` | at a heartbeat of the loop (`_BEATS`) |
| `recorded` | when a state is saved or recorded, once for each step, under `perdure doctor` |

OPERATION is what `LocalStorage` announces (`open`, `write`, `fsync`, `link`, `rename`, `mkdir`); a
removal is `delete`, and `tidy` for a temporary file (see `_point`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from perdure.drill.jumping_clock import jump
from perdure.drill.scenario import Fault
from perdure.drill.working_directory import ROOT
from perdure.drill.written_files import LineSigns, record
from perdure.runtime import heartbeats
from perdure.state import process_random
from perdure.store.format import MANIFESTS, PACKS, TEMP_SUFFIX, hash_bytes
from perdure.store.local import LocalStorage
from perdure.store.storage import Storage

if TYPE_CHECKING:
    from perdure.drill.resume_probe import ResumeProbe

PLAN, COPIES, RUNS = "plan.json", "manifests", "runs"

_ERRORS = {"full": errno.ENOSPC, "io": errno.EIO}
_SIGNALS = {"term": "SIGTERM", "stop": "SIGSTOP"}  # Windows, where reports are read, lacks one
_LONGEST_NAME = 200  # of the 255 bytes that a file system allows
_MOST_EXITS = 100
_FRAMEWORKS = ("jax", "torch", "keras", "tensorflow")
# The point of the plan for each phase of a heartbeat.
_BEATS = {
    "restore": "restoring",
    "compile": "restored",
    "step": "step",
    "save": "save",
    "end": "end",
}


@cache
def fault_injector(directory: str) -> FaultInjector:
    """The only injector of this process, for the drilled run in `directory`."""
    injector = FaultInjector(Path(directory))
    heartbeats.listeners.append(injector.beat)
    return injector


class FaultInjector:
    """Watches this process for the drilled run in `directory`, and carries out its faults."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        plan = json.loads((directory / PLAN).read_bytes())
        self.attempt: int = plan["attempt"]
        self._faults = [Fault(**fault) for fault in plan["faults"]]
        self._read_only = set(plan.get("read_only", ()))
        self.is_doctor: bool = plan.get("doctor", False)
        self._signs = LineSigns() if plan.get("phases") else None
        self._recorded: set[int] = set()
        self.traced: int | None = plan.get("traced")
        self.finished = -2  # the last step that was reported
        self._states: dict[str, str] = {}  # of the random generators
        self._root = os.path.realpath(directory / ROOT)
        self._names: dict[str, str] = {}  # of the run directories in the working directory
        self._opened: set[str] = set()
        self.worker = int(os.environ.get("RANK") or 0)  # set by the supervisor
        self._guard = threading.RLock()
        self._seen: Counter[str] = Counter()
        self._exits = 0
        self._step: int | None = None
        self._linked: dict[str, str] = {}
        self.probe: ResumeProbe | None = None

    def storage(self, location: str | os.PathLike[str] | Storage) -> Storage:
        """The storage for a run directory that the program names.

        Outside of the run's working directory, and for a URL, it is one below `runs/`: the drill
        tests the program and not the network.
        """
        if isinstance(location, LocalStorage):
            if location.step == self.before:
                return location
            location = location.where
        elif not isinstance(location, (str, os.PathLike)):
            return location
        text = os.fspath(location)
        path = text if "://" in text else os.path.realpath(text)
        if path in self._read_only:
            return LocalStorage(location)
        own = os.path.realpath(self.directory / RUNS) + os.sep
        if path.startswith(own):  # what `manager.directory` names is redirected already
            return _WatchedStorage(path, self)
        # An absolute path leads to the same place as a relative one; the program's own look does not.
        own_view = path.startswith(self._root + os.sep)
        path = path.removeprefix(self._root)
        name, target = redirected(self.directory, path)
        is_inside = target.startswith(self._root + os.sep)
        self._opened.add(path)
        self._reach("open", name=path, redirected=None if own_view and is_inside else True)
        if not is_inside:
            return _WatchedStorage(target, self)
        self._names[target] = name
        link = self.directory / RUNS / name
        link.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(target)
        return _WatchedStorage(target, self)

    def note(self, event: str, where: str, **fields: Any) -> None:
        """Record what the program gives the manager of a run directory."""
        self._record(event, run=self._name_of(where), **fields)

    def read(self) -> None:
        """Called before bytes of a checkpoint are read: a program without a manager restores so."""
        if not any("." in point or point == "read" for point in self._seen):  # before any change
            self._reach("read")

    def recorded(self, where: str, step: int, leaves: Mapping[str, str]) -> None:
        """Record the digests of a state by leaf."""
        self._record("state", run=self._name_of(where), step=step, leaves=dict(leaves))
        if step > 0 and step not in self._recorded:  # a fresh state may be saved as step 0
            self._recorded.add(step)
            self._reach("recorded", step)

    def checked_step(self, results: list[dict[str, Any]]) -> None:
        """Record what was computed for a check of the first step, and end the program."""
        self._record("checked", results=results)
        self._act(Fault("", "exit"), "")

    def _name_of(self, where: str) -> str:
        """The name below `runs/` of the run directory at `where`."""
        return self._names.get(where, os.path.basename(where))

    def trace(self, part: str, number: int | None, digests: Mapping[str, str]) -> None:
        """Record the digests of one part of the traced step, the first time that it is computed."""
        is_after = self.finished + 1 == self.traced
        self._record("trace", part=part, number=number, leaves=dict(digests), is_after=is_after)

    def _trace_generators(self, point: str, step: int | None) -> None:
        """Record the states before and after the traced step, of the generators it drew from."""
        if self.traced is None or step is None or point not in ("step", "restored"):
            return
        self.finished = step
        states: dict[str, str] = {}
        with contextlib.suppress(Exception):  # `fit` on JAX holds the values of Keras itself
            encoded = process_random.capture()
            states = {name: hash_bytes(state)[:32] for name, state in encoded.items()}
        if step == self.traced:
            drawn = {name: s for name, s in states.items() if self._states.get(name) != s}
            before = {name: s for name, s in self._states.items() if name in drawn}
            self.trace("generators", self.worker, before)
            self.trace("draws", self.worker, drawn)
        self._states = states

    def before(self, operation: str, path: str) -> None:
        """Called before every operation that changes a run directory."""
        if self.probe is not None and operation == "fsync_dir":
            self._wait(self.probe, path)
        with self._guard:
            point = _point(operation, path, self._linked)
            if point in ("manifest.link", "pack.link"):
                self._linked[point] = path
            if point == "manifest.sync":
                self._copy(self._linked["manifest.link"])
            self._reach(point, path=path)
            if point == "manifest.sync":
                self._linked.clear()

    def _wait(self, probe: ResumeProbe, path: str) -> None:
        """Let the probe see the program at this commit, if it will be killed right after it."""
        manifest = self._linked.get("manifest.link", "")
        number = self._seen["manifest.sync"] + 1
        due = any(f.point == "manifest.sync" and f.nth == number for f in self._faults)
        if due and os.path.dirname(manifest) == path:
            probe.wait(int(Path(manifest).stem))

    def beat(self, phase: str, step: int | None) -> None:
        """Called at every heartbeat: the loop has finished `step` steps and enters `phase`."""
        if (point := _BEATS.get(phase)) is not None:
            self._reach(point, step)

    def _reach(self, point: str, step: int | None = None, path: str = "", **fields: Any) -> None:
        """Record that the process has reached `point`; a step that is reported twice counts once."""
        with self._guard:
            if point == "step":
                if step == self._step:
                    return
                if self._step is None:
                    fields["modules"] = [name for name in _FRAMEWORKS if name in sys.modules]
                    fields["versions"] = _versions()
                self._step = step
                if self._signs is not None:
                    fields["lines"] = self._signs.take()
            self._seen[point] += 1
            self._record(point, step=step, **fields)
            self._trace_generators(point, step)
            if self.probe is not None:
                self.probe(point, step)
            for number, fault in enumerate(self._faults):
                if not self._is_due(fault, point, step):
                    continue
                if self._mark_fired(number, fault, point, step) or fault.act == "exit":
                    self._act(fault, path)

    def _is_due(self, fault: Fault, point: str, step: int | None) -> bool:
        if fault.point != point or fault.worker not in (None, self.worker):
            return False
        if fault.opened not in {"", *self._opened}:
            return False
        if fault.step is not None:
            return step is not None and step >= fault.step
        reached = self._seen[point]
        return reached >= fault.nth if fault.act == "exit" else reached == fault.nth

    def _mark_fired(self, number: int, fault: Fault, point: str, step: int | None) -> bool:
        """Whether no process carried out this fault before; it is recorded as fired now."""
        try:
            (self.directory / f"fired-{self.attempt}-{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        when = "before the first step" if self._step is None else f"after step {self._step}"
        moment = f"step {step}" if point == "step" else f"{point} {when}"
        if point == "manifest.sync" and fault.act == "kill":
            moment = f"the commit of step {int(Path(self._linked['manifest.link']).stem)}"
        self._record("fired", act=fault.describe_act(), at=moment)
        return True

    def _act(self, fault: Fault, path: str) -> None:
        act = fault.act
        if act in _ERRORS:
            raise OSError(_ERRORS[act], os.strerror(_ERRORS[act]), path)
        if act == "torn":
            # After the link, tear the file that got its name last: the pack if there is one.
            named = self._linked.get(fault.of) or self._linked.get("manifest.link")
            torn = named or path
            os.truncate(torn, int(os.path.getsize(torn) * fault.value))
            _die()
        elif act == "kill":
            _die()
        elif act == "exit":
            self._exits += 1
            if self._exits > _MOST_EXITS:  # the program catches it
                _die()
            raise SystemExit(0)
        elif act in _SIGNALS:
            os.kill(os.getpid(), getattr(signal, _SIGNALS[act]))
        elif act == "clock":
            jump(fault.value)
        else:  # a fault that does nothing must not count as one that fired
            raise ValueError(f"the drill knows no act {act!r}")

    def _copy(self, manifest: str) -> None:
        data, step = Path(manifest).read_bytes(), int(Path(manifest).stem)
        run = self._name_of(str(Path(manifest).parent.parent))
        name = f"{self.attempt:03d}-{self._seen['manifest.sync']:06d}-{os.getpid()}.json"
        (self.directory / COPIES).mkdir(exist_ok=True)
        (self.directory / COPIES / name).write_bytes(data)
        self._record("commit", step=step, run=run, copy=name)

    def _record(self, event: str, **fields: Any) -> None:
        known = {name: value for name, value in fields.items() if value is not None}
        record(str(self.directory), event, a=self.attempt, **known)


def redirected(directory: Path, path: str) -> tuple[str, str]:
    """The name below `runs/` and the path of a run directory, for the drilled run in `directory`.

    `path` is a URL, or a real path outside of the drill, whose copy is in the working directory or
    below `runs/`.
    """
    name = quote(path, safe="")
    if len(name) > _LONGEST_NAME:
        name = f"{name[-_LONGEST_NAME // 2 :]}-{hash_bytes(path.encode())[:16]}"
    root = os.path.realpath(directory / ROOT)
    inside = os.path.realpath(root + path) if "://" not in path else ""
    return name, inside if inside.startswith(root + os.sep) else str(directory / RUNS / name)


class _WatchedStorage(LocalStorage):
    """A run directory of a drilled program, which tells its injector of every change and first read."""

    def __init__(self, root: str | os.PathLike[str], injector: FaultInjector) -> None:
        super().__init__(root, injector.before)
        self._injector = injector

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self._injector.read()
        return super().read_into(name, offset, target)


def _versions() -> dict[str, str]:
    """The releases that the program runs on."""
    names = ("numpy", "perdure", *_FRAMEWORKS)
    known = {name: getattr(sys.modules.get(name), "__version__", "") for name in names}
    return {"python": sys.version.split()[0], **{k: v for k, v in known.items() if v}}


def _point(operation: str, path: str, linked: dict[str, str]) -> str:
    """The point of an operation: `pack.write`, `manifest.link`, `pack.delete`, ..."""
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


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # this thread does nothing more, however late the signal arrives
        time.sleep(1)
