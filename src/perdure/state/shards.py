"""Arrays of which each process has a shard: what each saves, and what each compares.

Invariant: nothing is gathered, neither by a save nor by a restore: an error in one process would leave
the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import numpy as np

from perdure.store.leaf import Leaf
from perdure.store.shard_plan import Region

_own_only: ContextVar[bool] = ContextVar("own_shards_only", default=False)
_copies_too: ContextVar[bool] = ContextVar("copies_compared", default=False)


@contextmanager
def _inside(variable: ContextVar[bool], value: bool) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def own_shards_only() -> AbstractContextManager[None]:
    """Leaves of sharded arrays have only the elements of this process inside (`Leaf.region`)."""
    return _inside(_own_only, True)


def compares_shards() -> bool:
    """Whether the leaf of a sharded array has the elements of this process alone, to be compared."""
    return _own_only.get()


def copies_compared(on: bool) -> AbstractContextManager[None]:
    """With `on`, an array of which devices of this process have different copies has no leaf."""
    return _inside(_copies_too, on)


def compares_copies() -> bool:
    """Whether the copies of replicated arrays on the devices of this process are to be compared."""
    return _copies_too.get()


def cut(leaf: Leaf, region: Region) -> Leaf:
    """The part of a leaf that has the elements in `region`: of a whole one, or one of its shards."""
    if leaf.shards is not None:
        data = leaf.shards.parts[leaf.shards.regions.index(region)]
        return Leaf(leaf.dtype, leaf.shape, data, region=region)
    if not leaf.nbytes:
        return leaf
    element = leaf.nbytes // int(np.prod(leaf.shape))
    array = np.frombuffer(leaf.data, f"V{element}").reshape(leaf.shape)
    part = np.ascontiguousarray(array[tuple(slice(*span) for span in region)])
    data = part.reshape(-1).view(np.uint8).data if part.size else memoryview(b"")
    return Leaf(leaf.dtype, leaf.shape, data, region=region)
