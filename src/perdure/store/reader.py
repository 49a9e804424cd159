"""Reading chunks: every byte is hashed before a caller gets it.

All that reads chunks (a load, a stream, a check, a copy, a compaction) names them as `Wanted`, and gets
them by `Read`s. Bytes that are not what they should be are read once more, not from the page cache,
before a chunk counts as damaged: a bit that flipped on its way from the disk costs no checkpoint.

In a load, several threads read large chunks directly into the memory of their leaf, which is
page-aligned so that reads can bypass the page cache. Other threads hash, so that the disk never idles:
if each thread did both, a load would reach three quarters of the speed of the disk.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter

from msgspec import Struct

from perdure.errors import StoreError
from perdure.store.aligned_buffers import SMALL_BYTES, leaf_memory
from perdure.store.codec import decode, is_intact
from perdure.store.failures import DamagedChunk, UnreadChunk, is_gone, read_error, reading
from perdure.store.format import CHUNK_BYTES, PACKS, batches, hash_bytes, hash_each
from perdure.store.leaf import Leaf
from perdure.store.manifest import Chunk, LeafEntry, Manifest
from perdure.store.pack_index import PackedChunk
from perdure.store.pools import finish, map_ahead, pool, submit
from perdure.store.storage import Storage

READ_THREADS = 4
HASH_THREADS = max(2, min(8, os.cpu_count() or 2))
STREAM_BYTES = 256 * 1024 * 1024
"""The most that one request to an object store reads, because a request has a time limit."""

BUFFERED_BYTES = 32 * 1024 * 1024
"""The most of it that is not read in place, because such bytes take extra memory until the end."""

VERIFY_BYTES = 64 * 1024 * 1024
"""`verify_leaves` has leaves of about this size in memory at a time."""

INLINE_READ_BYTES = 1024 * 1024


class Wanted(Struct, frozen=True, gc=False):
    """A chunk to read: its place, hash, stored `length` and decoded `size`.

    Without `target` it is only checked. Errors name the leaf `path`.
    """

    pack: str
    offset: int
    hash: str
    length: int
    size: int
    target: memoryview | None = None
    path: str = ""


class Read(Struct, frozen=True, gc=False):
    """One read: a chunk, or neighbours in a pack, of `nbytes` stored bytes; errors call it `where`."""

    where: str
    chunks: list[Wanted]
    nbytes: int

    @property
    def object(self) -> str:
        """The name of the pack in the storage."""
        return PACKS + self.chunks[0].pack

    @property
    def in_place(self) -> bool:
        """Whether the bytes are read into their target: one chunk that is stored as it is."""
        chunk = self.chunks[0]
        return len(self.chunks) == 1 and chunk.target is not None and chunk.length == chunk.size

    def memory(self) -> memoryview:
        """The memory to read into."""
        target = self.chunks[0].target
        if self.in_place and target is not None:
            return target
        # Whole blocks can be read past the page cache into aligned memory.
        return leaf_memory(self.nbytes) if len(self.chunks) == 1 else new_bytes(self.nbytes)

    def place(self, chunk: Wanted) -> str:
        """What errors call the place of a chunk."""
        leaf = f", leaf {chunk.path!r}, " if chunk.path else "/"
        return f"{self.where}{leaf}{PACKS}{chunk.pack} at offset {chunk.offset}"

    def failed(self, error: OSError) -> DamagedChunk | UnreadChunk:
        """The error to raise for a failed read: a pack that is gone is damage."""
        chunk = self.chunks[0]
        place = self.place(chunk)
        if not is_gone(error):
            return UnreadChunk(str(read_error(error, place)), chunk.pack)
        return DamagedChunk(
            f"{place}: expected a pack, found no such file.", chunk.pack, chunk.offset
        )


def grouped(where: str, wanted: Iterable[Wanted]) -> Iterator[Read]:
    """A read for each large chunk, and for small ones that follow each other, up to CHUNK_BYTES
    once they are decoded. `where` is what errors call the checkpoint or the run."""
    group: list[Wanted] = []
    pack, end, nbytes, decoded = "", -1, 0, 0
    for chunk in wanted:
        length, size = chunk.length, chunk.size
        if group and (
            size >= SMALL_BYTES
            or chunk.offset != end
            or chunk.pack != pack
            or decoded + size > CHUNK_BYTES
        ):
            yield Read(where, group, nbytes)
            group, nbytes, decoded = [], 0, 0
        if size >= SMALL_BYTES:
            yield Read(where, [chunk], length)
            continue
        group.append(chunk)
        pack, end = chunk.pack, chunk.offset + length
        nbytes, decoded = nbytes + length, decoded + size
    if group:
        yield Read(where, group, nbytes)


def verified(storage: Storage, read: Read) -> memoryview:
    """Read and check chunks, and put them into their targets; returns them as they are stored.

    Raises `DamagedChunk`, or `UnreadChunk` if nothing is known about the contents of the pack.
    """
    (check,) = _fetched(storage, [read])
    return check()


def check_each(
    storage: Storage, reads: Iterable[Read]
) -> Iterator[tuple[Wanted, DamagedChunk | UnreadChunk | None]]:
    """Each chunk of the reads, and what is wrong with it. One read is in memory at a time."""
    for read in reads:
        try:
            verified(storage, read)
        except (DamagedChunk, UnreadChunk) as error:
            if len(read.chunks) == 1:
                yield read.chunks[0], error
            else:  # one by one, to find out which
                alone = [Read(read.where, [chunk], chunk.length) for chunk in read.chunks]
                yield from check_each(storage, alone)
        else:
            for chunk in read.chunks:
                yield chunk, None


def packed(pack: str, offset: int, chunks: Iterable[PackedChunk]) -> Iterator[Wanted]:
    """Chunks that follow each other from `offset`, to be checked as in a restore."""
    for digest, length, size in chunks:
        target = new_bytes(size) if length != size else None
        yield Wanted(pack, offset, digest, length, size, target)
        offset += length


def load_entries(
    storage: Storage, manifest: Manifest, entries: Sequence[LeafEntry]
) -> dict[str, Leaf]:
    """Read and verify some leaves of `manifest`, local ones too; raises as `loading.load_leaves`."""
    leaves: dict[str, Leaf] = {}
    wanted: list[Wanted] = []
    packs = [pack.name for pack in manifest.packs]
    require_packs(storage, manifest, entries)
    for entry in entries:
        path, chunks = entry.path, entry.chunks
        if entry.text is not None:
            leaves[path] = Leaf(entry.dtype, (), memoryview(entry.text.encode()), True)
            continue
        try:
            target = leaf_memory(entry.nbytes)
        except (MemoryError, OSError) as error:
            raise no_memory(storage, manifest, entry, error) from error
        leaves[path] = Leaf(entry.dtype, entry.shape, target, True)
        if len(chunks) == 1:  # nearly all of them, where there are very many
            (chunk,) = chunks
            name, size = packs[chunk.pack], len(target)
            wanted.append(Wanted(name, chunk.offset, chunk.hash, chunk.length, size, target, path))
            continue
        start = 0
        for chunk, size in zip(chunks, entry.sizes(), strict=True):
            part = target[start : start + size]
            wanted.append(wanted_chunk(manifest, entry, chunk, part))
            start += size
    load_chunks(storage, manifest, wanted)
    return leaves


def no_memory(
    storage: Storage, manifest: Manifest, entry: LeafEntry, error: MemoryError | OSError
) -> StoreError:
    """The error to raise if there is no memory for a leaf."""
    what = f"{step_text(storage, manifest)}, leaf {entry.path!r} of {entry.nbytes} bytes"
    return read_error(error, what)


def load_chunks(storage: Storage, manifest: Manifest, wanted: list[Wanted]) -> None:
    """Read and verify chunks, each into the memory given; raises as `loading.load_leaves`."""
    # Sorted by offset, so that neighbours meet and the disk is read from front to back.
    wanted.sort(key=attrgetter("pack", "offset"))
    requests = _requests(storage, list(grouped(step_text(storage, manifest), wanted)))
    if sum(read.nbytes for request in requests for read in request) < INLINE_READ_BYTES:
        for request in requests:
            for check in _fetched(storage, request):
                check()
        return
    hashers = pool("verify", HASH_THREADS)
    pending: list[Future[memoryview]] = []
    failed = threading.Event()

    def fetch(request: Sequence[Read]) -> list[Future[memoryview]]:
        checks: list[Future[memoryview]] = []
        for read, check in zip(request, _fetched(storage, request), strict=True):
            if failed.is_set():
                break
            if read.in_place:
                checks.append(submit(hashers, check))
            else:  # at once, because its extra memory is freed by that
                check()
        pending.extend(checks)
        return checks

    readers = pool("read", storage.streams or READ_THREADS)
    with closing(map_ahead(readers, fetch, requests, len(requests))) as fetched:
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
    """Read and verify all wanted leaves, a part at a time; raises as `loading.load_leaves`."""
    entries = [leaf for leaf in manifest.every_leaf() if wanted is None or wanted(leaf.path)]
    for part in batches(entries, lambda leaf: leaf.nbytes, VERIFY_BYTES):
        load_entries(storage, manifest, part)


def damaged_chunks(
    storage: Storage, manifest: Manifest, chunks: Iterable[tuple[LeafEntry, Chunk, int]]
) -> list[DamagedChunk]:
    """An error for each damaged one of `chunks` (leaf, chunk, bytes), or UnreachableError."""
    in_order = sorted(chunks, key=lambda row: (row[1].pack, row[1].offset))
    wanted = (
        wanted_chunk(manifest, entry, chunk, None if chunk.length == size else new_bytes(size))
        for entry, chunk, size in in_order
    )
    errors: list[DamagedChunk] = []
    for _, error in check_each(storage, grouped(step_text(storage, manifest), wanted)):
        if isinstance(error, UnreadChunk):
            raise error
        if error is not None:
            errors.append(error)
    return errors


def chunk_size(entry: LeafEntry, number: int) -> int:
    """Bytes of one decoded chunk."""
    if entry.size is None:
        return entry.chunks[number].length
    return min(CHUNK_BYTES, entry.size - number * CHUNK_BYTES)


def wanted_chunk(
    manifest: Manifest, entry: LeafEntry, chunk: Chunk, target: memoryview | None
) -> Wanted:
    """A chunk of a leaf; without a target one that is stored as it is, to be checked."""
    size = chunk.length if target is None else len(target)
    pack = manifest.packs[chunk.pack].name
    return Wanted(pack, chunk.offset, chunk.hash, chunk.length, size, target, entry.path)


def new_bytes(size: int) -> memoryview:
    """Memory that need not be page-aligned."""
    return memoryview(bytearray(size))


def step_text(storage: Storage, manifest: Manifest) -> str:
    """What errors call a checkpoint."""
    return f"{storage.where}: step {manifest.step}"


def require_packs(storage: Storage, manifest: Manifest, entries: Sequence[LeafEntry]) -> None:
    """Raise unless the packs are long enough, before memory of any stated size is taken."""
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
        what = f"{step_text(storage, manifest)}: {PACKS}{name}"
        with reading(what):
            size = storage.size(PACKS + name)
        if size < end:
            raise DamagedChunk(
                f"{what}: expected at least {end} bytes, found {size}; the pack is cut short.",
                name,
                -1,
            )


def _requests(storage: Storage, reads: Sequence[Read]) -> list[list[Read]]:
    """The reads of each request: one, or from an object store all that lie side by side.

    To an object store a request costs more than its bytes, so every stream gets one contiguous
    share.
    """
    if not storage.streams:
        return [[read] for read in reads]
    share = -(-sum(read.nbytes for read in reads) // storage.streams)
    most = min(max(share, CHUNK_BYTES), STREAM_BYTES)
    requests: list[list[Read]] = []
    room = buffered = 0
    place = ("", -1)
    for read in reads:
        chunk = read.chunks[0]
        if place != (chunk.pack, chunk.offset) or room <= 0 or buffered <= 0:
            requests.append([])
            room, buffered = most, BUFFERED_BYTES
        requests[-1].append(read)
        room -= read.nbytes
        buffered -= 0 if read.in_place else read.nbytes
        place = (chunk.pack, chunk.offset + read.nbytes)
    return requests


def _fetched(storage: Storage, request: Sequence[Read]) -> Iterator[Callable[[], memoryview]]:
    """Fill the memory of one read after the other; yields a function that checks it."""
    read = request[0]
    memory = [read.memory() for read in request]
    try:
        filled = storage.read_each(read.object, read.chunks[0].offset, memory)
        for read, data in zip(request, memory, strict=True):
            yield partial(_checked, storage, read, data, next(filled))
    except OSError as error:
        raise read.failed(error) from error


def _checked(storage: Storage, read: Read, data: memoryview, got: int) -> memoryview:
    """`data`, of which `got` bytes were read, after every chunk in it is verified."""
    if (found := first_fault(read, data, got)) is None:
        return data
    try:
        storage.drop_cached(read.object)
        again = storage.read_into(read.object, read.chunks[0].offset, data)
    except OSError as error:
        raise read.failed(error) from error
    if (confirmed := first_fault(read, data, again)) is not None:
        chunk, fault = confirmed
        raise DamagedChunk(f"{read.place(chunk)}: {fault}.", chunk.pack, chunk.offset)
    logging.getLogger(__name__).warning(
        "%s: %s; read again, the bytes are right and are used. If this comes again, check the memory, "
        "the disk and the network of this machine.",
        read.place(found[0]),
        found[1],
    )
    return data


def first_fault(read: Read, data: memoryview, available: int) -> tuple[Wanted, str] | None:
    """The first damaged chunk and what is wrong with it; None if all are in their targets."""
    chunks = read.chunks
    ends = list(accumulate([chunk.length for chunk in chunks], initial=0))
    stored = [data[start:stop] for start, stop in pairwise(ends)]
    # There may be very many small chunks, so all are hashed by one call. Only if that finds a
    # difference, or if some are encoded, are they checked one by one.
    plain = ends[-1] <= available and all(chunk.length == chunk.size for chunk in chunks)
    if plain and len(chunks) > 1 and hash_each(stored) == [chunk.hash for chunk in chunks]:
        for chunk, part in zip(chunks, stored, strict=True):
            if chunk.target is not None:
                chunk.target[:] = part
        return None
    for chunk, part, start in zip(chunks, stored, ends, strict=False):
        target = None if read.in_place else chunk.target
        if fault := _fault(chunk, part, available - start, target):
            return chunk, fault
    return None


def _fault(
    chunk: Wanted, stored: memoryview, present: int, target: memoryview | None
) -> str | None:
    """What is wrong with a chunk, of which `present` bytes were read; None if it is good."""
    if present < chunk.length:
        return f"expected {chunk.length} bytes, found {max(0, present)}; the pack is cut short"
    if chunk.length != chunk.size:
        if target is not None:
            return decode(stored, chunk.hash, target)
        intact = is_intact(stored, chunk.hash, chunk.size)
        return None if intact else f"its {chunk.length} encoded bytes do not match their seal"
    if (actual := hash_bytes(stored)) != chunk.hash:
        return f"expected hash {chunk.hash[:16]}, found {actual[:16]}"
    if target is not None:
        target[:] = stored
    return None
