"""Wraps methods of a framework's classes, for calls by a logical replica. Names no framework."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the method that `owner` itself defines as `name` by `make(method)`, at most once."""
    old = vars(owner).get(name)
    if callable(old) and not getattr(old, "_knows_replicas", False):
        new: Any = functools.wraps(old)(make(old))
        new._knows_replicas = True
        setattr(owner, name, new)


def with_subclasses(cls: type) -> Iterator[type]:
    """A class and all classes that are derived from it so far."""
    yield cls
    for child in cls.__subclasses__():
        yield from with_subclasses(child)
