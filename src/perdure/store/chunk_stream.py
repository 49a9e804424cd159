"""Reads chunks one after the other in a given order, each verified, in the memory of a few chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial

from perdure.errors import CorruptionError
from perdure.store.format import CHUNK_BYTES
from perdure.store.json_blocks import batches
from perdure.store.loading import read_manifest
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.pools import map_ahead, pool
from perdure.store.reader import READ_THREADS, fetch_reads, grouped_reads
from perdure.store.storage import Storage, StreamingStorage

ChunkNumber = tuple[LeafEntry, int]
"""A leaf, and the number of one of its chunks."""


def stream_chunks(
    storage: Storage,
    manifest: Manifest,
    chunks: Iterable[ChunkNumber],
    *,
    ahead: int | None = None,
) -> Iterator[memoryview]:
    """Yield the decoded bytes of chunks, in the order of `chunks` and a few ahead of the caller.

    Each chunk has memory of its own, which the caller may keep and change. Only the chunks that are
    asked for are read. A prune may run meanwhile: a chunk that it moved is read from its new place.

    Args:
        storage: The run directory.
        manifest: A manifest of it.
        chunks: (leaf of the manifest, number of the chunk in the leaf).
        ahead: How many reads of up to CHUNK_BYTES are under way at a time; by default as many as suit
            the storage.

    Raises:
        CorruptionError: A chunk is damaged; the text names leaf, pack and offset.
        StepNotFoundError: The checkpoint was deleted meanwhile.
        UnreachableError: A pack cannot be read.
    """
    usual = storage.streams if isinstance(storage, StreamingStorage) else READ_THREADS
    threads = ahead or usual
    read = partial(_read, storage, manifest)
    together = batches(chunks, lambda chunk: chunk_size(*chunk), CHUNK_BYTES)
    with closing(map_ahead(pool("read", threads), read, together, threads)) as read_ahead:
        for batch in read_ahead:
            yield from batch


def chunk_size(entry: LeafEntry, number: int) -> int:
    """Bytes of one decoded chunk."""
    if entry.size is None:
        return entry.chunks[number].length
    return min(CHUNK_BYTES, entry.size - number * CHUNK_BYTES)


def _read(storage: Storage, manifest: Manifest, batch: list[ChunkNumber]) -> list[memoryview]:
    """The verified bytes of each chunk of a batch."""
    parts = [
        (entry, entry.chunks[number], memoryview(bytearray(chunk_size(entry, number))))
        for entry, number in batch
    ]
    while True:
        try:
            for read in grouped_reads(parts):
                for check in fetch_reads(storage, manifest, [read]):
                    check()
            return [data for _, _, data in parts]
        except CorruptionError:
            # A prune may have moved the chunks since the manifest was read; then it has changed.
            renewed = read_manifest(storage, manifest.step)
            if renewed == manifest or renewed.fingerprint != manifest.fingerprint:
                raise
            manifest = renewed
            places = {chunk.hash: chunk for leaf in renewed.every_leaf() for chunk in leaf.chunks}
            parts = [(entry, places[chunk.hash], data) for entry, chunk, data in parts]
