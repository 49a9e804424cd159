"""Arrays of which each process has a shard: what each writes, and what each compares.

A save gathers such an array, so that a checkpoint does not depend on how it was sharded, and each
process keeps the chunks that it writes. A restore gathers nothing: an error in one process would leave
the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from perdure.state.per_rank import current_rank_context
from perdure.store.format import chunk_spans
from perdure.store.leaf import Leaf, Region

_own_only: ContextVar[bool] = ContextVar("own_shards_only", default=False)


@contextmanager
def own_shards_only() -> Iterator[None]:
    """Leaves of sharded arrays have only the elements of this process inside (`Leaf.region`)."""
    token = _own_only.set(True)
    try:
        yield
    finally:
        _own_only.reset(token)


def gathers_shards() -> bool:
    """Whether the leaf of a sharded array has the elements of all processes."""
    return not _own_only.get()


def own_chunks(
    dtype: str, shape: tuple[int, ...], nbytes: int, read: Callable[[int, int], memoryview]
) -> Leaf:
    """The leaf of a gathered array of `nbytes` bytes, in a save by a group.

    Chunks are dealt out in turn, over all arrays of the state. `read` returns a copy of the bytes from
    a start to a stop.
    """
    context = current_rank_context()
    spans = chunk_spans(nbytes)
    first, context.dealt = context.dealt, context.dealt + len(spans)
    chunks = {
        number: read(start, stop)
        for number, (start, stop) in enumerate(spans)
        if (first + number) % context.count == context.index
    }
    return Leaf(dtype, shape, memoryview(b""), frozen=True, chunks=chunks if spans else None)


def cut(leaf: Leaf, region: Region) -> Leaf:
    """The part of a whole leaf that has the elements in `region`."""
    if not leaf.nbytes:
        return leaf
    element = leaf.nbytes // int(np.prod(leaf.shape))
    array = np.frombuffer(leaf.data, f"V{element}").reshape(leaf.shape)
    part = np.ascontiguousarray(array[tuple(slice(*span) for span in region)])
    data = part.reshape(-1).view(np.uint8).data if part.size else memoryview(b"")
    return Leaf(leaf.dtype, leaf.shape, data, region=region)
