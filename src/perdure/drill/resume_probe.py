"""Inside a program that is being diagnosed: what it holds at a checkpoint is put back after a
resume.

The first attempt records what the process holds when its loop comes back to its head after a save.
A resumed one is stopped at the same line for the first time, before its first new step: there the
differing values are listed, and the requested ones are put back. A program without a loop of
its own (Trainer, Keras fit) is recorded and changed when it reports the step or the restore.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import itertools
import json
import linecache
import numbers
import os
import pickle
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from perdure.drill.frozen import describe, freeze, have_one_seed, kind_of, put_back
from perdure.drill.working_directory import LARGEST_COPY, MOST_ENTRIES, files_below
from perdure.drill.written_files import EVENTS
from perdure.state import bits
from perdure.state.program_code import is_program_file
from perdure.state.reachable import Reachable, frames_of_threads, program_frames, reachable_values

HELD = "held"
ITERATORS = "iterators"
FILE = "file "
Head = tuple[str, str, int]
"""File, function and line of the head of a loop."""
Note = Callable[[str, str], None]
"""Is called with the name of an iterator and the sort of its items: "number" or "data"."""
Advance = Callable[[int, Note], None]
"""Lets an iterator skip so many items, or what the head of a loop makes one from."""
_WAIT_S = 5.0


class ResumeProbe:
    """What the fault injector asks at every point; see the module.

    `put` has names of values; `iterators` advances all that the loop reads from, `iterators NAME`
    one of it, and `file NAME` is a file of the working directory.
    """

    def __init__(self, directory: Path, attempt: int, worker: int, put: Sequence[str]) -> None:
        self._directory = directory / HELD
        self._directory.mkdir(exist_ok=True)
        self._first = attempt == 1
        self._worker = worker
        self._put = set(put)
        self._recorded = defaultdict[int, threading.Event](threading.Event)
        self._listed: list[dict[str, Any]] = []
        self._home = os.getcwd()
        self._sorts: dict[str, str] = {}
        if not self._first:
            self._put_files(directory)

    def __call__(self, point: str, step: int | None) -> None:
        """Is called at every point that the process reaches."""
        if step is None or threading.current_thread() is not threading.main_thread():
            return
        frames = program_frames(sys._getframe(2))
        if point == "step" and self._first:
            loop = loop_around(frames)
            self._record(step, frames, None if loop is None else loop[1])
            if loop is None:
                self._recorded[step].set()
                return
            frame, head = loop

            def record(frames: Sequence[FrameType]) -> None:
                self._record(step, frames, head)
                self._recorded[step].set()

            _at_line([frame], head, record)
        elif point == "restored" and self._first:
            self._record(step, frames, None)
        elif point == "restored" and self._path(step).exists():
            head, parts, _ = _loaded(self._path(step))
            if head is None:
                self._resume(step, frames, None, parts)
            else:
                _at_line(frames, head, lambda frames: self._resume(step, frames, head, parts))

    def wait(self, step: int) -> None:
        """Wait in the thread that commits `step` until the loop has come back to its head."""
        if self._first and threading.current_thread() is not threading.main_thread():
            self._recorded[step].wait(_WAIT_S)

    def _path(self, step: int) -> Path:
        return self._directory / f"{self._worker}-{step:012d}.pickle"

    def _record(self, step: int, frames: Sequence[FrameType], head: Head | None) -> None:
        parts: dict[str, bytes] = {}
        for name, reached in reachable_values([*frames, *frames_of_threads()]).items():
            if (frozen := freeze(reached.get())) is not None:
                with suppress(pickle.PicklingError, TypeError, AttributeError):
                    parts[name] = pickle.dumps(frozen)
        _write(self._path(step), pickle.dumps((head, parts, self._changed_files())))

    def _changed_files(self) -> dict[str, bytes]:
        """The small files of the working directory that differ from those at the first start."""
        first, now = self._directory / "files.pickle", _small_files(self._home)
        if not first.exists():
            _write(first, pickle.dumps(now))
        then = _loaded(first)
        changed = (name for name, status in now.items() if then.get(name) != status)
        return {name: Path(self._home, name).read_bytes() for name in changed}

    # ---------------------------------------------------------------- a resumed attempt

    def _put_files(self, directory: Path) -> None:
        """List the files that differ from those at the checkpoint, and put back what was asked for."""
        lines = (directory / EVENTS).read_bytes().splitlines()
        commits = [event for event in map(json.loads, lines) if event["e"] == "commit"]
        path = self._path(commits[-1]["step"]) if commits else self._directory / "none"
        if not path.exists():
            return
        then, now = _loaded(path)[2], self._changed_files()
        for name in sorted(then.keys() | now.keys()):
            if (data := then.get(name)) == now.get(name):
                continue
            sizes = [len(each.get(name, b"")) for each in (then, now)]
            what = f"{sizes[0]} bytes at the checkpoint, {sizes[1]} when the program began again"
            self._listed.append({"name": FILE + name, "kind": "file", "what": what})
            target = Path(self._home, name)
            if FILE + name not in self._put:
                continue
            if data is None:
                target.unlink(missing_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)

    def _resume(
        self,
        step: int,
        frames: Sequence[FrameType],
        head: Head | None,
        parts: Mapping[str, bytes],
    ) -> None:
        reached = reachable_values([*frames, *frames_of_threads()])
        early = self._early()
        for name, data in parts.items():
            if name not in reached:
                continue  # assigned before it is read, or the program would fail
            then = pickle.loads(data)  # noqa: S301
            now = freeze(value := reached[name].get())
            if bits.same(now, then) or (type(value) is int and value == step):
                continue  # the step that was restored is where the loop begins, and differs rightly
            unit = {"name": name, "kind": kind_of(then), "what": describe(then)}
            if unit["kind"] == "generator" and now is not None and now[0] == "generator":
                seeds = [have_one_seed(now[1], other[name][1]) for other in early if name in other]
                unit["seed"] = "same" if True in seeds else "other" if False in seeds else "unknown"
            self._listed.append(unit)
            if name in self._put:
                reached[name].bind(put_back(value, then))
        _write_locals(frames)
        found = readers(reached, frames, head)
        for name, advance in found.items():
            if self._put & {ITERATORS, f"{ITERATORS} {name}"}:
                advance(step, self._note)
        _write_locals(frames)
        listed = {"step": step, "units": self._listed, "iterators": [*found]}
        path = self._directory / f"differing-{self._worker}.json"
        _write(path, json.dumps(listed).encode())

    def _early(self) -> list[dict[str, Any]]:
        """The generators as the first attempt recorded them first: before its loop and after a step."""
        found = []
        for path in sorted(self._directory.glob(f"{self._worker}-*.pickle"))[:2]:
            frozen = {name: pickle.loads(data) for name, data in _loaded(path)[1].items()}  # noqa: S301
            found.append({name: each for name, each in frozen.items() if each[0] == "generator"})
        return found

    def _note(self, name: str, sort: str) -> None:
        """Record of an iterator that was advanced whether it gives numbers or data."""
        if self._sorts.get(name) not in (sort, "data"):
            self._sorts[name] = sort
            sorts = json.dumps(self._sorts).encode()
            _write(self._directory / f"items-{self._worker}.json", sorts)


def _small_files(directory: str) -> dict[str, tuple[int, int]]:
    """Size and time of each small file below a directory; empty if there are very many."""
    found: dict[str, tuple[int, int]] = {}
    for path in files_below(directory):
        status = os.lstat(path)
        if status.st_size <= LARGEST_COPY and os.path.isfile(path):
            relative = os.path.relpath(path, directory)
            found[relative] = (status.st_size, status.st_mtime_ns)
        if len(found) > MOST_ENTRIES:
            return {}
    return found


def _loaded(path: Path) -> Any:
    """What the first attempt of the same program has written, under the same directory."""
    return pickle.loads(path.read_bytes())  # noqa: S301


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def _write_locals(frames: Sequence[FrameType]) -> None:
    """Give the variables of functions the values in `f_locals`; from Python 3.13 on they have them."""
    if sys.version_info >= (3, 13):
        return
    for frame in frames:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            write = ctypes.pythonapi.PyFrame_LocalsToFast
            write(ctypes.py_object(frame), ctypes.c_int(0))


# ---------------------------------------------------------------- the loop that trains


def _at_line(
    frames: Sequence[FrameType], head: Head, then: Callable[[Sequence[FrameType]], None]
) -> None:
    """Call `then` with the frames of the program once it reaches the line `head`."""
    is_over = False

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal is_over
        code = frame.f_code
        if is_over or event != "line":
            return None if is_over else line
        if (code.co_filename, code.co_name, frame.f_lineno) != head:
            return line
        is_over = True
        sys.settrace(None)
        then(program_frames(frame))
        return None

    def call(frame: FrameType, *_: Any) -> Any:
        return line if (frame.f_code.co_filename, frame.f_code.co_name) == head[:2] else None

    for frame in frames:
        frame.f_trace = line
    sys.settrace(call)


def loop_around(frames: Sequence[FrameType]) -> tuple[FrameType, Head] | None:
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


def readers(
    reached: Mapping[str, Reachable], frames: Sequence[FrameType], head: Head | None
) -> dict[str, Advance]:
    """All that the program holds, or the head of its loop names, and that may give it items."""
    found: dict[str, Advance] = {}
    for name, each in reached.items():
        value = each.get()
        if hasattr(type(value), "__next__") and not hasattr(value, "fileno"):
            found[name] = partial(_advance, name, value)
    for name in sorted(_names_of_head(head[0], head[2])) if head is not None and frames else ():
        for space in (frames[0].f_locals, frames[0].f_globals):
            if name in space and _gives_items(value := space[name]):
                found[name] = partial(_replace, space, name, value)
                break
    return found


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


def _advance(name: str, value: Any, steps: int, note: Note) -> None:
    for item in itertools.islice(value, steps):
        note(name, _sort_of(item))


def _replace(space: dict[str, Any], name: str, value: Any, steps: int, note: Note) -> None:
    space[name] = _Advanced(value, steps, lambda item: note(name, _sort_of(item)))


def _sort_of(item: Any) -> str:
    is_number = isinstance(item, numbers.Number) or getattr(item, "shape", None) == ()
    return "number" if is_number else "data"


class _Advanced:
    """Stands for an iterable whose first iterator begins after the first items."""

    def __init__(self, source: Any, steps: int, note: Callable[[Any], None]) -> None:
        self._source = source
        self._steps = steps
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        return self._skipped(lambda: iter(self._source))

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
            first = [result]
            return self._skipped(
                lambda: iter(first.pop() if first else function(*arguments, **named))
            )

        return wrapped

    def _skipped(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """An iterator after the first items; if it has fewer, a second one after the rest."""
        steps, self._steps = self._steps, 0
        items = make()
        for done in range(steps):
            try:
                self._note(next(items))
            except StopIteration:
                if done == 0:
                    return iter(())
                items = make()
                for _ in itertools.islice(items, steps % done):
                    pass
                return items
        return items
