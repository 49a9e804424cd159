"""Errors about a state, each with the path of the leaf or object that it is about."""

from __future__ import annotations

import sys
from typing import Any

from perdure.errors import MismatchError, StateError, UnsupportedLeafError


def type_name(value: Any) -> str:
    """The full name of a value's class, such as `torch.nn.modules.linear.Linear`."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def add_path(error: StateError, path: str) -> None:
    """Put `path` in front of the message of `error`, unless it has a path already."""
    if not hasattr(error, "path"):
        error.path = path  # type: ignore[attr-defined]
        if not isinstance(error, MismatchError):
            error.args = (f"{path or '(the state itself)'}: {error}",)


class PathInErrors:
    """A context that adds `path` to every `StateError` raised inside.

    With `reason`, any other exception becomes a `StateError` that starts with it.
    """

    def __init__(self, path: str, reason: str | None = None) -> None:
        self._path = path
        self._reason = reason

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StateError):
            add_path(error, self._path)
        elif self._reason is not None and isinstance(error, Exception):
            failure = StateError(f"{self._reason}: {type(error).__name__}: {error}")
            add_path(failure, self._path)
            raise failure from error


def nested_too_deeply() -> UnsupportedLeafError:
    """The error for a state that exceeds Python's recursion limit."""
    return UnsupportedLeafError(
        f"the state contains itself, or is nested deeper than Python's recursion limit "
        f"({sys.getrecursionlimit()}). Save a tree of containers without such a loop."
    )


def duplicate_path(path: str) -> UnsupportedLeafError:
    """The error for two values with the same path."""
    return UnsupportedLeafError(f"two leaves have the path {path!r}; rename one of the keys.")
