"""Inside a program that is being diagnosed: what it holds at a checkpoint is put back after a resume.

The first attempt records everything that the process holds when its loop comes back to its head after
a save, that is after everything that a step does. A resumed attempt is stopped when it reaches the same
line for the first time: after everything that it does to begin, and before its first new step. There
the units that differ are listed, and those that were asked for are put back. Nothing is changed after
that, so a generator that the loop itself makes from a seed stays as the program made it. A program
without a loop of its own (Trainer, Keras fit) is recorded and changed when it reports the step or the
restore.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import itertools
import json
import linecache
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from perdure.drill.held_state import (
    Frozen,
    equal,
    freeze,
    held_units,
    is_program_file,
    kind_of,
    program_frames,
    put_back,
)

HELD = "held"
ITERATORS = "iterators"
_WAIT_S = 5.0
Head = tuple[str, str, int]
"""File, function and line of the head of a loop."""


class ResumeProbe:
    """A listener of the fault injector; see the module.

    Args:
        directory: The directory of the drilled run.
        attempt: The number of this attempt.
        worker: The number of this process in its group.
        put: Names of the units to put back; `iterators` advances what the loop reads from.
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

    def __call__(self, point: str, step: int | None) -> None:
        """Is called at every point that the process reaches."""
        if step is None or threading.current_thread() is not threading.main_thread():
            return
        if point == "step" and self._first:
            self._begin_record(step)
        elif point == "restored" and not self._first and self._path(step).exists():
            self._begin_resume(step)

    def wait(self, step: int) -> None:
        """Wait in the thread that commits `step` until the loop has come back to its head."""
        if self._first and threading.current_thread() is not threading.main_thread():
            self._recorded.setdefault(step, threading.Event()).wait(_WAIT_S)

    # ---------------------------------------------------------------- the first attempt

    def _begin_record(self, step: int) -> None:
        frames = program_frames(sys._getframe(2))
        loop = _loop(frames)
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
        held = {name: freeze(unit.get()) for name, unit in held_units(frames).items()}
        known = {name: value for name, value in held.items() if value is not None}
        parts: dict[str, bytes] = {}
        for name, value in known.items():
            try:
                parts[name] = pickle.dumps(value)
            except (pickle.PicklingError, TypeError, AttributeError):
                continue
        path = self._path(step)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(pickle.dumps((head, parts)))
        temporary.replace(path)

    def _path(self, step: int) -> Path:
        return self._directory / f"{self._worker}-{step}.pickle"

    # ---------------------------------------------------------------- a resumed attempt

    def _begin_resume(self, step: int) -> None:
        # Written by the first attempt of the same program, under the same directory.
        head, parts = pickle.loads(self._path(step).read_bytes())  # noqa: S301
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
        units = held_units(frames)
        differing: list[dict[str, Any]] = []
        for name, data in self._parts.items():
            if name not in units:
                continue  # assigned before it is read, or the program would fail
            frozen: Frozen = pickle.loads(data)  # noqa: S301
            now = units[name].get()
            if equal(freeze(now), frozen) or (type(now) is int and now == step):
                continue  # the step that was restored is where the loop begins, and differs rightly
            what = _describe(frozen)
            differing.append({"name": name, "kind": kind_of(frozen), "what": what})
            if name in self._put:
                units[name].bind(put_back(units[name].get(), frozen))
        _write_locals(frames)
        readers = _readers(frames, head)
        if ITERATORS in self._put:
            for reader in readers:
                reader.advance(step)
        _write_locals(frames)
        listed = {"step": step, "units": differing, "iterators": [each.name for each in readers]}
        (self._directory / f"differing-{self._worker}.json").write_text(json.dumps(listed))


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


def _describe(frozen: Frozen) -> str:
    tag, data = frozen[0], frozen[1]
    if tag == "scalar":
        return repr(data)[:40]
    if hasattr(data, "shape"):
        return f"{data.dtype}{list(data.shape)}"
    return "state_dict" if tag == "state" else str(tag)


# ---------------------------------------------------------------- the loop


def _loop(frames: Sequence[FrameType]) -> tuple[FrameType, Head] | None:
    """The innermost frame of the program that is inside of a loop, and the head of this loop."""
    for frame in frames:
        head = _head(frame.f_code.co_filename, frame.f_lineno)
        if head is not None:
            return frame, (frame.f_code.co_filename, frame.f_code.co_name, head.lineno)
    return None


@cache
def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.parse("")


def _names_of_head(file: str, line: int) -> set[str]:
    """The variables that the `for` in `line` reads its items from."""
    return {
        node.id
        for loop in ast.walk(_parsed(file))
        if isinstance(loop, ast.For) and loop.lineno == line
        for node in ast.walk(loop.iter)
        if isinstance(node, ast.Name)
    }


def _head(file: str, line: int) -> ast.For | ast.While | None:
    """The innermost loop around `line`, in the same function."""
    found: ast.For | ast.While | None = None
    inside: list[ast.AST] = [_parsed(file)]
    while inside:
        node = inside.pop()
        for child in ast.iter_child_nodes(node):
            start, end = getattr(child, "lineno", 0), getattr(child, "end_lineno", 0)
            if hasattr(child, "lineno") and not start <= line <= end:
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                found = None  # a loop around the definition is not in its frame
            if isinstance(child, (ast.For, ast.While)) and child.body[0].lineno <= line:
                found = child
            inside.append(child)
    return found


# ---------------------------------------------------------------- what the loop reads from


class _Reader:
    """Something that gives items: an iterator, or what the head of the loop makes one from."""

    def __init__(self, name: str, advance: Callable[[int], None]) -> None:
        self.name = name
        self.advance = advance


class _Advanced:
    """Stands for an iterable whose first iterator begins after the first items."""

    def __init__(self, source: Any, steps: int) -> None:
        self._source = source
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        steps, self._steps = self._steps, 0
        return _skipped(lambda: iter(self._source), steps)

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._source, name)
        return self._wrap(value) if callable(value) else value

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._wrap(self._source)(*arguments, **named)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            if not (hasattr(result, "__next__") or hasattr(result, "__iter__")):
                return result
            if isinstance(result, (range, str, bytes, tuple, dict)) or hasattr(result, "dtype"):
                return result
            steps, self._steps = self._steps, 0
            return _skipped(
                lambda: iter(result), steps, lambda: iter(function(*arguments, **named))
            )

        return wrapped


def _skipped(
    make: Callable[[], Iterator[Any]],
    steps: int,
    again: Callable[[], Iterator[Any]] | None = None,
) -> Iterator[Any]:
    """An iterator after `steps` items; if it has fewer, another one after those that are left."""
    items = make()
    for done in range(steps):
        try:
            next(items)
        except StopIteration:
            if done == 0:
                return iter(())
            items = (again or make)()
            for _ in itertools.islice(items, steps % done):
                pass
            return items
    return items


def _readers(frames: Sequence[FrameType], head: Head | None) -> list[_Reader]:
    readers = []
    for name, unit in held_units(frames).items():
        value = unit.get()
        if hasattr(type(value), "__next__") and not hasattr(value, "fileno"):
            readers.append(_Reader(name, _advance(value)))
    if head is None or not frames:
        return readers
    frame, (file, _, line) = frames[0], head
    names = _names_of_head(file, line)
    spaces = (frame.f_locals, frame.f_globals)
    for name in sorted(names):
        for space in spaces:
            if name in space and _gives_items(value := space[name]):
                readers.append(_Reader(name, _replace(space, name, value)))
                break
    return readers


def _gives_items(value: Any) -> bool:
    """Whether the loop may get its data from `value`."""
    if isinstance(value, types.FunctionType):
        return is_program_file(value.__code__.co_filename)
    kind = type(value)
    if isinstance(value, (range, str, bytes, type, types.ModuleType)) or hasattr(kind, "__next__"):
        return False
    if hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"):
        return True
    return not callable(value) and hasattr(value, "__dict__")


def _advance(value: Any) -> Callable[[int], None]:
    def advance(steps: int) -> None:
        for _ in itertools.islice(value, steps):
            pass

    return advance


def _replace(space: dict[str, Any], name: str, value: Any) -> Callable[[int], None]:
    return lambda steps: space.__setitem__(name, _Advanced(value, steps))
