"""The bytes of leaves in the order in which a writer asks for them, read ahead across leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from perdure.checkpoint.address import StoredCheckpoint, with_advice
from perdure.errors import CorruptionError
from perdure.store.manifest import LeafEntry
from perdure.store.streamed_save import StreamedLeaf

ChunksOf = Callable[[LeafEntry], Iterator[memoryview]]
"""Yields the verified bytes of a leaf in parts of 4 MiB."""


def chunks_in_order(checkpoint: StoredCheckpoint, entries: Sequence[LeafEntry]) -> ChunksOf:
    """A function that yields the chunks of a leaf; it must be called in the order of `entries`.

    Its iterator raises as `read_elements` does, and reads leaves of any dtype.
    """
    from perdure.store.chunk_stream import stream_chunks  # brings numpy

    numbered = [(entry, number) for entry in entries for number in range(len(entry.chunks))]
    stream = stream_chunks(checkpoint.run.storage, checkpoint.manifest, numbered)

    def chunks_of(entry: LeafEntry) -> Iterator[memoryview]:
        for _ in entry.chunks:
            try:
                yield next(stream)
            except CorruptionError as error:
                raise CorruptionError(with_advice(error, checkpoint.run)) from error

    return chunks_of


def streamed(entry: LeafEntry, chunks_of: ChunksOf) -> StreamedLeaf:
    """A leaf of a checkpoint as one of a checkpoint that is being written."""
    nbytes = 0 if entry.text is not None else entry.nbytes
    return StreamedLeaf(
        entry.path, entry.dtype, entry.shape, nbytes, lambda: chunks_of(entry), entry.text
    )
