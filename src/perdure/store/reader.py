"""Reading the leaves of a manifest. Every byte is hashed before the caller gets it.

Several threads read large chunks directly into the memory of their leaf, which is page-aligned so that
reads can bypass the page cache. Small chunks that lie side by side in a pack are read together. Other
threads hash, so that the disk is never idle: if each thread did both, a load would reach three quarters
of the speed of the disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from perdure.errors import StoreError
from perdure.store.aligned_buffers import SMALL_BYTES, give_buffer, leaf_memory, take_buffer
from perdure.store.chunk_read import first_fault
from perdure.store.failures import DamagedChunk, is_gone, read_error
from perdure.store.format import CHUNK_BYTES, PACKS
from perdure.store.json_blocks import batches
from perdure.store.leaf import Leaf
from perdure.store.manifest import Chunk, LeafEntry, Manifest
from perdure.store.pools import finish, map_ahead, pool, submit
from perdure.store.storage import Storage, StreamingStorage, read_again

READ_THREADS = 4
HASH_THREADS = max(2, min(8, os.cpu_count() or 2))
STREAM_BYTES = 256 * 1024 * 1024
"""The most that one request to an object store reads, because a request has a time limit."""

BUFFERED_BYTES = 32 * 1024 * 1024
"""The most of it that is not read in place, because such bytes take extra memory until the end."""

VERIFY_BYTES = 64 * 1024 * 1024
"""`verify_leaves` has leaves of about this size in memory at a time."""

INLINE_READ_BYTES = 1024 * 1024


@dataclass(slots=True)
class PackRead:
    """One read: (leaf, chunk, memory of the chunk) of one chunk, or of neighbours in a pack."""

    parts: list[tuple[LeafEntry, Chunk, memoryview]] = field(default_factory=list)
    nbytes: int = 0

    def in_place(self) -> bool:
        """Whether the bytes are read into their leaf: one chunk that is stored as it is."""
        _, chunk, target = self.parts[0]
        return len(self.parts) == 1 and chunk.length == len(target)


def load_entries(
    storage: Storage, manifest: Manifest, entries: Sequence[LeafEntry]
) -> dict[str, Leaf]:
    """Read and verify some leaves of `manifest`, local ones too.

    Raises as `loading.load_leaves` does.
    """
    leaves: dict[str, Leaf] = {}
    parts: list[tuple[LeafEntry, Chunk, memoryview]] = []
    require_packs(storage, manifest, entries)
    for entry in entries:
        if entry.text is not None:
            leaves[entry.path] = Leaf(entry.dtype, (), memoryview(entry.text.encode()), True)
            continue
        try:
            target = leaf_memory(entry.nbytes)
        except (MemoryError, OSError) as error:
            what = f"{storage.where}: step {manifest.step}, leaf {entry.path!r}"
            raise read_error(error, f"{what} of {entry.nbytes} bytes") from error
        leaves[entry.path] = Leaf(entry.dtype, entry.shape, target, frozen=True)
        if len(entry.chunks) == 1:
            parts.append((entry, entry.chunks[0], target))
            continue
        start = 0
        for chunk, size in zip(entry.chunks, entry.sizes(), strict=True):
            parts.append((entry, chunk, target[start : start + size]))
            start += size
    read_parts(storage, manifest, parts)
    return leaves


def read_parts(
    storage: Storage, manifest: Manifest, parts: list[tuple[LeafEntry, Chunk, memoryview]]
) -> None:
    """Read and verify chunks, each into the memory that is given.

    Raises as `loading.load_leaves` does.
    """
    spans = _spans(storage, list(grouped_reads(parts)))
    if sum(read.nbytes for span in spans for read in span) < INLINE_READ_BYTES:
        for span in spans:
            for check in fetch_reads(storage, manifest, span):
                check()
        return
    threads = storage.streams if isinstance(storage, StreamingStorage) else READ_THREADS
    hashers = pool("verify", HASH_THREADS)
    pending: list[Future[None]] = []
    failed = threading.Event()

    def fetch(span: Sequence[PackRead]) -> list[Future[None]]:
        checks: list[Future[None]] = []
        for read, check in zip(span, fetch_reads(storage, manifest, span), strict=True):
            if failed.is_set():
                break
            if read.in_place():
                checks.append(submit(hashers, check))
            else:  # at once, because its extra memory is freed by that
                check()
        pending.extend(checks)
        return checks

    with closing(map_ahead(pool("read", threads), fetch, spans, len(spans))) as fetched:
        try:
            for checks in fetched:
                for check in checks:
                    check.result()
        except BaseException:
            failed.set()
            fetched.close()
            finish(pending)
            raise


def verify_leaves(
    storage: Storage, manifest: Manifest, wanted: Callable[[str], bool] | None = None
) -> None:
    """Read and verify every leaf, or all that are wanted, a part of them at a time.

    Raises as `loading.load_leaves` does.
    """
    entries = [leaf for leaf in manifest.every_leaf() if wanted is None or wanted(leaf.path)]
    for part in batches(entries, lambda leaf: leaf.nbytes, VERIFY_BYTES):
        load_entries(storage, manifest, part)


def damaged_chunks(
    storage: Storage, manifest: Manifest, chunks: Sequence[tuple[LeafEntry, Chunk, int]]
) -> list[DamagedChunk]:
    """Read chunks one after the other, in the memory of one chunk.

    Args:
        storage: The run directory.
        manifest: A manifest of it.
        chunks: (leaf, chunk, bytes of the decoded chunk).

    Returns:
        An error for each damaged chunk.

    Raises:
        UnreachableError: A chunk cannot be read.
    """
    buffer = take_buffer()
    errors: list[DamagedChunk] = []
    try:
        parts = [
            (entry, chunk, memoryview(buffer)[:size])  # used for one chunk after the other
            for entry, chunk, size in chunks
        ]
        reads = list(grouped_reads(parts))
        while reads:
            read = reads.pop(0)
            try:
                for check in fetch_reads(storage, manifest, [read]):
                    check()
            except DamagedChunk as error:
                if len(read.parts) == 1:
                    errors.append(error)
                else:  # read them one by one to find the damaged ones
                    reads[:0] = [PackRead([part], part[1].length) for part in read.parts]
    finally:
        give_buffer(buffer)
    return errors


def require_packs(storage: Storage, manifest: Manifest, entries: Sequence[LeafEntry]) -> None:
    """Raise unless the packs are long enough for the chunks of `entries`.

    This comes before memory is allocated, because a manifest may state any size. It is left out for
    entries of few bytes.
    """
    if sum(entry.nbytes for entry in entries) < INLINE_READ_BYTES:
        return
    ends = dict.fromkeys(range(len(manifest.packs)), 0)
    for entry in entries:
        for chunk in entry.chunks:
            ends[chunk.pack] = max(ends[chunk.pack], chunk.offset + chunk.length)
    for number, end in ends.items():
        if not end:
            continue
        name = manifest.packs[number].name
        what = f"{storage.where}: step {manifest.step}: {PACKS}{name}"
        try:
            size = storage.size(PACKS + name)
        except OSError as error:
            raise read_error(error, what) from error
        if size < end:
            raise DamagedChunk(
                f"{what}: expected at least {end} bytes, found {size}; the pack is cut short.",
                name,
                -1,
            )


def grouped_reads(parts: list[tuple[LeafEntry, Chunk, memoryview]]) -> Iterator[PackRead]:
    """A read for each large chunk, and for small ones that follow each other, up to CHUNK_BYTES."""
    under_way = PackRead()
    pack, end = -1, -1
    # Sorted by place, so that neighbours meet and the disk is read from front to back.
    for part in sorted(parts, key=lambda part: (part[1].pack, part[1].offset)):
        chunk = part[1]
        if len(part[2]) >= SMALL_BYTES:
            yield PackRead([part], chunk.length)
            continue
        follows = chunk.pack == pack and chunk.offset == end
        if under_way.parts and (not follows or under_way.nbytes + chunk.length > CHUNK_BYTES):
            yield under_way
            under_way = PackRead()
        under_way.parts.append(part)
        under_way.nbytes += chunk.length
        pack, end = chunk.pack, chunk.offset + chunk.length
    if under_way.parts:
        yield under_way


def _spans(storage: Storage, reads: Sequence[PackRead]) -> list[list[PackRead]]:
    """The reads of each request: one read, or from an object store all that lie side by side.

    To an object store a request costs more than its bytes (some servers look at the whole object for
    each), so every stream gets one contiguous share.
    """
    if not isinstance(storage, StreamingStorage):
        return [[read] for read in reads]
    share = -(-sum(read.nbytes for read in reads) // storage.streams)
    most = min(max(share, CHUNK_BYTES), STREAM_BYTES)
    spans: list[list[PackRead]] = []
    room = buffered = 0
    place = (-1, -1)
    for read in reads:
        chunk = read.parts[0][1]
        if place != (chunk.pack, chunk.offset) or room <= 0 or buffered <= 0:
            spans.append([])
            room, buffered = most, BUFFERED_BYTES
        spans[-1].append(read)
        room -= read.nbytes
        buffered -= 0 if read.in_place() else read.nbytes
        place = (chunk.pack, chunk.offset + read.nbytes)
    return spans


def fetch_reads(
    storage: Storage, manifest: Manifest, span: Sequence[PackRead]
) -> Iterator[Callable[[], None]]:
    """Fill the memory of one read after the other; yields a function that checks it."""
    entry, first, _ = span[0].parts[0]
    name = PACKS + manifest.packs[first.pack].name
    memory = [
        read.parts[0][2] if read.in_place() else memoryview(bytearray(read.nbytes)) for read in span
    ]
    try:
        if isinstance(storage, StreamingStorage):
            filled = storage.read_each(name, first.offset, memory)
        else:
            filled = iter([storage.read_into(name, first.offset, data) for data in memory])
        for read, data in zip(span, memory, strict=True):
            entry, first, _ = read.parts[0]
            yield partial(_check, storage, manifest, read, data, next(filled))
    except OSError as error:
        raise _failed(storage, manifest, entry, first, error) from error


def _check(
    storage: Storage, manifest: Manifest, read: PackRead, data: memoryview, got: int
) -> None:
    """Compare every chunk of a read with its hash; raises `DamagedChunk`."""
    entry, first, _ = read.parts[0]
    in_place = read.in_place()
    place = _place(storage, manifest, entry, first)
    again = partial(
        read_again, storage, PACKS + manifest.packs[first.pack].name, first.offset, data
    )
    chunks = [(chunk.hash, chunk.length, len(target)) for _, chunk, target in read.parts]
    targets = [None if in_place else target for _, _, target in read.parts]
    try:
        found = first_fault(data, got, chunks, targets, place, again)
    except OSError as error:
        raise _failed(storage, manifest, entry, first, error) from error
    if found:
        entry, chunk, _ = read.parts[found[0]]
        place, pack = _place(storage, manifest, entry, chunk), manifest.packs[chunk.pack].name
        raise DamagedChunk(f"{place}: {found[1]}.", pack, chunk.offset)


def _failed(
    storage: Storage, manifest: Manifest, entry: LeafEntry, chunk: Chunk, error: OSError
) -> StoreError:
    """The error of a failed read of a chunk."""
    place = _place(storage, manifest, entry, chunk)
    if not is_gone(error):
        return read_error(error, place)
    name = manifest.packs[chunk.pack].name
    return DamagedChunk(f"{place}: expected a pack, found no such file.", name, chunk.offset)


def _place(storage: Storage, manifest: Manifest, entry: LeafEntry, chunk: Chunk) -> str:
    return (
        f"{storage.where}: step {manifest.step}, leaf {entry.path!r}, "
        f"{PACKS}{manifest.packs[chunk.pack].name} at offset {chunk.offset}"
    )
