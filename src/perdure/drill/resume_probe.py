"""Inside a program that is being diagnosed: what it holds at a checkpoint is put back after a resume.

The first attempt records everything that the process holds when its loop comes back to its head after
a save, that is after everything that a step does. A resumed attempt is stopped when it reaches the same
line for the first time: after everything that it does to begin, and before its first new step. There
the values that differ are listed, and those that were asked for are put back. Nothing is changed after
that, so a generator that the loop itself makes from a seed stays as the program made it. A program
without a loop of its own (Trainer, Keras fit) is recorded and changed when it reports the step or the
restore. Files of the working directory are put back before a resumed attempt begins.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from perdure.drill.frozen import describe, freeze, have_one_seed, kind_of, put_back
from perdure.drill.loop_readers import Head, loop_around, readers
from perdure.drill.working_directory import LARGEST_COPY, MOST_ENTRIES
from perdure.drill.written_files import EVENTS
from perdure.state import bits
from perdure.state.held import frames_of_threads, held_values, program_frames
from perdure.store.format import MARKER

HELD = "held"
ITERATORS = "iterators"
FILE = "file "
_WAIT_S = 5.0


class ResumeProbe:
    """A listener of the fault injector; see the module.

    Args:
        directory: The directory of the drilled run.
        attempt: The number of this attempt.
        worker: The number of this process in its group.
        put: Names of the values to put back; `iterators` advances all that the loop reads from,
            `iterators NAME` one of it, and `file NAME` is a file of the working directory.
    """

    def __init__(self, directory: Path, attempt: int, worker: int, put: Sequence[str]) -> None:
        self._directory = directory / HELD
        self._directory.mkdir(exist_ok=True)
        self._first = attempt == 1
        self._worker = worker
        self._put = set(put)
        self._recorded: dict[int, threading.Event] = {}
        self._armed: tuple[FrameType, int, int] | None = None
        self._target: tuple[Head, int] | None = None
        self._listed: list[dict[str, Any]] = []
        self._files = _Files(os.getcwd(), self._directory / "files.pickle")
        self._sorts: dict[str, str] = {}
        if not self._first:
            self._put_files(directory)

    def __call__(self, point: str, step: int | None) -> None:
        """Is called at every point that the process reaches."""
        if step is None or threading.current_thread() is not threading.main_thread():
            return
        if point == "step" and self._first:
            self._begin_record(step)
        elif point == "restored" and self._first:
            self._record(step, program_frames(sys._getframe(2)), None)
        elif point == "restored" and self._path(step).exists():
            self._begin_resume(step)

    def wait(self, step: int) -> None:
        """Wait in the thread that commits `step` until the loop has come back to its head."""
        if self._first and threading.current_thread() is not threading.main_thread():
            self._recorded.setdefault(step, threading.Event()).wait(_WAIT_S)

    # ---------------------------------------------------------------- the first attempt

    def _begin_record(self, step: int) -> None:
        frames = program_frames(sys._getframe(3))
        loop = loop_around(frames)
        self._record(step, frames, None if loop is None else loop[1])
        if loop is None:
            self._recorded.setdefault(step, threading.Event()).set()
            return
        frame, (_, _, line) = loop
        self._armed = (frame, line, step)
        frame.f_trace = self._at_head
        sys.settrace(_nothing)

    def _at_head(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._armed is not None and event == "line":
            armed, line, step = self._armed
            if frame is armed and frame.f_lineno == line:
                sys.settrace(None)
                self._armed = None
                code = frame.f_code
                self._record(step, program_frames(frame), (code.co_filename, code.co_name, line))
                self._recorded.setdefault(step, threading.Event()).set()
                return None
        return self._at_head

    def _record(self, step: int, frames: Sequence[FrameType], head: Head | None) -> None:
        parts: dict[str, bytes] = {}
        for name, held in held_values([*frames, *frames_of_threads()]).items():
            if (frozen := freeze(held.get())) is not None:
                try:
                    parts[name] = pickle.dumps(frozen)
                except (pickle.PicklingError, TypeError, AttributeError):
                    continue
        _write(self._path(step), pickle.dumps((head, parts, self._files.changed())))

    def _path(self, step: int) -> Path:
        return self._directory / f"{self._worker}-{step:012d}.pickle"

    # ---------------------------------------------------------------- a resumed attempt

    def _put_files(self, directory: Path) -> None:
        """List the files that differ from those at the checkpoint, and put back what was asked for."""
        lines = (directory / EVENTS).read_bytes().splitlines()
        commits = [event for event in map(json.loads, lines) if event["e"] == "commit"]
        path = self._path(commits[-1]["step"]) if commits else self._directory / "none"
        if not path.exists():
            return
        _, _, then = pickle.loads(path.read_bytes())  # noqa: S301 (written by the first attempt)
        now = self._files.changed()
        for name in sorted(then.keys() | now.keys()):
            if then.get(name) == now.get(name):
                continue
            sizes = [len(each.get(name, b"")) for each in (then, now)]
            what = f"{sizes[0]} bytes at the checkpoint, {sizes[1]} when the program began again"
            self._listed.append({"name": FILE + name, "kind": "file", "what": what})
            if FILE + name in self._put:
                self._files.put(name, then.get(name))

    def _begin_resume(self, step: int) -> None:
        # Written by the first attempt of the same program, under the same directory.
        head, parts, _ = pickle.loads(self._path(step).read_bytes())  # noqa: S301
        self._parts: dict[str, bytes] = parts
        frame = sys._getframe(2)
        if head is None:
            self._resume(step, program_frames(frame), None)
            return
        self._target = (head, step)
        for each in program_frames(frame):
            each.f_trace = self._seek
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._target is None:
            return None
        (file, function, _line), _step = self._target
        code = frame.f_code
        return self._seek if (code.co_filename, code.co_name) == (file, function) else None

    def _seek(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._target is None:
            return None
        head, step = self._target
        code = frame.f_code
        if event == "line" and (code.co_filename, code.co_name, frame.f_lineno) == head:
            self._target = None
            sys.settrace(None)
            self._resume(step, program_frames(frame), head)
            return None
        return self._seek

    def _resume(self, step: int, frames: Sequence[FrameType], head: Head | None) -> None:
        held = held_values([*frames, *frames_of_threads()])
        early = self._early()
        for name, data in self._parts.items():
            if name not in held:
                continue  # assigned before it is read, or the program would fail
            then = pickle.loads(data)  # noqa: S301
            now = freeze(value := held[name].get())
            if bits.same(now, then) or (type(value) is int and value == step):
                continue  # the step that was restored is where the loop begins, and differs rightly
            unit = {"name": name, "kind": kind_of(then), "what": describe(then)}
            if unit["kind"] == "generator" and now is not None and now[0] == "generator":
                seeds = [have_one_seed(now[1], other[name][1]) for other in early if name in other]
                unit["seed"] = "same" if True in seeds else "other" if False in seeds else "unknown"
            self._listed.append(unit)
            if name in self._put:
                held[name].bind(put_back(value, then))
        _write_locals(frames)
        found = readers(held, frames, head)
        for reader in found:
            if self._put & {ITERATORS, f"{ITERATORS} {reader.name}"}:
                reader.advance(step, self._note)
        _write_locals(frames)
        listed = {"units": self._listed, "iterators": [each.name for each in found]}
        _write(
            self._directory / f"differing-{self._worker}.json",
            json.dumps({"step": step, **listed}).encode(),
        )

    def _early(self) -> list[dict[str, Any]]:
        """The generators as the first attempt recorded them first: before its loop and after a step."""
        found = []
        for path in sorted(self._directory.glob(f"{self._worker}-*.pickle"))[:2]:
            parts = pickle.loads(path.read_bytes())[1]  # noqa: S301
            frozen = {name: pickle.loads(data) for name, data in parts.items()}  # noqa: S301
            found.append({name: each for name, each in frozen.items() if each[0] == "generator"})
        return found

    def _note(self, name: str, sort: str) -> None:
        """Record of an iterator that was advanced whether it gives numbers or data."""
        if self._sorts.get(name) not in (sort, "data"):
            self._sorts[name] = sort
            sorts = json.dumps(self._sorts).encode()
            _write(self._directory / f"items-{self._worker}.json", sorts)


class _Files:
    """The small files of the working directory that differ from those at the first start."""

    def __init__(self, directory: str, first: Path) -> None:
        self._directory = directory
        self._listing: dict[str, tuple[int, int]] = {}
        if not first.exists():
            _write(first, pickle.dumps(self._list()))
        self._listing = pickle.loads(first.read_bytes())  # noqa: S301

    def changed(self) -> dict[str, bytes]:
        """Their bytes by path."""
        return {
            path: Path(self._directory, path).read_bytes()
            for path, listed in self._list().items()
            if self._listing.get(path) != listed
        }

    def put(self, path: str, data: bytes | None) -> None:
        """Give a file its earlier bytes; None removes it."""
        target = Path(self._directory, path)
        if data is None:
            target.unlink(missing_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def _list(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for parent, directories, files in os.walk(self._directory):
            if MARKER in files:
                directories.clear()
                continue
            directories[:] = [name for name in directories if name != "__pycache__"]
            for name in files:
                path = os.path.join(parent, name)
                status = os.lstat(path)
                if status.st_size <= LARGEST_COPY and os.path.isfile(path):
                    relative = os.path.relpath(path, self._directory)
                    found[relative] = (status.st_size, status.st_mtime_ns)
            if len(found) > MOST_ENTRIES:
                return {}
        return found


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def _nothing(*_: Any) -> None:
    """A tracer that only makes the local tracers run."""


def _write_locals(frames: Sequence[FrameType]) -> None:
    """Give the variables of functions the values in `f_locals`; from Python 3.13 on they have them."""
    if sys.version_info >= (3, 13):
        return
    for frame in frames:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            write = ctypes.pythonapi.PyFrame_LocalsToFast
            write(ctypes.py_object(frame), ctypes.c_int(0))
