"""`CallGuard`: one call at a time changes an object, in the process that made it, until `close`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from perdure.errors import StoreError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="CallGuard")


class CallGuard:
    """Base of an object that threads may share; `exclusive` marks the methods that change something."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._turn = threading.RLock()
        self._pid = os.getpid()
        self._closed = False

    @property
    def in_forked_child(self) -> bool:
        """Whether another process made this object."""
        return os.getpid() != self._pid

    def require_process(self, call: str) -> None:
        """Raise `StoreError` if another process made the object."""
        if self.in_forked_child:
            raise StoreError(
                f"{self._where}: {call} was called in a forked child (pid {os.getpid()}) of the "
                f"process that made this manager (pid {self._pid}), which alone may change the run. "
                f"Nothing was changed. Call it there; to read here, use `perdure.load_checkpoint`."
            )

    def require_open(self, call: str) -> None:
        """Raise `StoreError` if another process made the object, or it is closed."""
        self.require_process(call)
        if self._closed:
            raise StoreError(
                f"{self._where}: {call} was called on a manager that is closed. Nothing was changed. "
                f"Make a new CheckpointManager for this directory."
            )

    def require_no_call(self, call: str) -> None:
        """Raise `StoreError` in the middle of another exclusive call of the same thread, which it
        would wait for."""
        if self._turn._is_owned():  # type: ignore[attr-defined]
            raise StoreError(
                f"{self._where}: {call} was called by a signal handler or a callback in the middle of "
                f"another call of this manager in the same thread. Nothing was changed. Set a flag "
                f"there, and call {call} in the loop."
            )


def exclusive(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method that changes something: see `CallGuard`."""
    return _in_turn(method, CallGuard.require_open)


def exclusive_also_closed(
    method: Callable[Concatenate[T, P], R],
) -> Callable[Concatenate[T, P], R]:
    """`exclusive`, for a method that a closed object still has."""
    return _in_turn(method, CallGuard.require_process)


def _in_turn(
    method: Callable[Concatenate[T, P], R], require: Callable[[CallGuard, str], None]
) -> Callable[Concatenate[T, P], R]:
    name = method.__name__.lstrip("_")

    @wraps(method)
    def in_turn(self: T, *args: P.args, **kwargs: P.kwargs) -> R:
        require(self, name)
        self.require_no_call(name)
        with self._turn:
            require(self, name)  # another thread may have closed it meanwhile
            return method(self, *args, **kwargs)

    return in_turn
