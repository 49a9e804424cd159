"""Inside a program that is being diagnosed: the loop that trains, and what it reads its items from."""

from __future__ import annotations

import ast
import itertools
import linecache
import numbers
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any

from perdure.state.held import Held
from perdure.state.program_code import is_program_file

Head = tuple[str, str, int]
"""File, function and line of the head of a loop."""
Note = Callable[[str, str], None]
"""Is called with the name of an iterator and the sort of its items: "number" or "data"."""


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


class Reader:
    """Something that gives items: an iterator, or what the head of the loop makes one from."""

    def __init__(self, name: str, advance: Callable[[int, Note], None]) -> None:
        self.name = name
        self.advance = advance


def readers(
    held: Mapping[str, Held], frames: Sequence[FrameType], head: Head | None
) -> list[Reader]:
    """All that the program holds, or the head of its loop names, and that may give it items."""
    found = []
    for name, each in held.items():
        value = each.get()
        if hasattr(type(value), "__next__") and not hasattr(value, "fileno"):
            found.append(Reader(name, _advance(name, value)))
    if head is None or not frames:
        return found
    frame, (file, _, line) = frames[0], head
    for name in sorted(_names_of_head(file, line)):
        for space in (frame.f_locals, frame.f_globals):
            if name in space and _gives_items(value := space[name]):
                found.append(Reader(name, _replace(space, name, value)))
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


def _advance(name: str, value: Any) -> Callable[[int, Note], None]:
    def advance(steps: int, note: Note) -> None:
        for item in itertools.islice(value, steps):
            note(name, _sort_of(item))

    return advance


def _replace(space: dict[str, Any], name: str, value: Any) -> Callable[[int, Note], None]:
    def advance(steps: int, note: Note) -> None:
        space[name] = _Advanced(value, steps, lambda item: note(name, _sort_of(item)))

    return advance


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
        """An iterator after the first items; if it has fewer, another one after those that are left."""
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
