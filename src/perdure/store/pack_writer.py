"""Writing the chunks of a save into one pack.

Invariants: the pack is durable before a manifest that reads from it is visible. The bytes that are
hashed are the bytes that are written: both come from a private copy, so that a checkpoint is
readable even if the program changes an array during the save.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, chain, repeat
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from perdure.store.aligned_buffers import STAGING_BYTES, give_buffer, take_buffer
from perdure.store.codec import ENCODE_FROM, ENCODE_THREADS, Encode
from perdure.store.direct import copy_bytes
from perdure.store.entry_builder import EntryBuilder, Held, PlacedChunk
from perdure.store.failures import DamagedChunk
from perdure.store.format import (
    CHUNK_BYTES,
    PACKS,
    SCALAR_PREFIX,
    chunk_spans,
    hash_bytes,
    hash_each,
    pack_name,
)
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry, PackEntry
from perdure.store.pack_index import PackedChunk, encode_pack_tail
from perdure.store.pools import map_ahead, pool
from perdure.store.shard_chunks import AssembledChunk, ChunkBytes, copy_chunk
from perdure.store.storage import AdoptingSink, Sink, Storage

HASH_THREADS = 2
# Few, so that the bytes of a chunk are still in the cache of the processor when they are written.
HASH_AHEAD = 4
WRITING = 4
"""Copies of further chunks that may be on their way to the disk."""

LARGE_BYTES = 256 * 1024
"""Chunks of at least this size are hashed on another core and placed so that each is read alone."""

ALONE_BYTES = 1024 * 1024
"""For at most so many bytes of large chunks, using other threads takes longer than it saves."""

BLOCK = 4096
"""Large chunks of whole blocks come first in a pack, so that each of them begins on a block."""

GATHER_BYTES = 256 * 1024
"""Small chunks are given to the storage in pieces of about this size."""

Release = Callable[[], None] | None
"""Gives a buffer of page-aligned memory back; None for memory that Python frees."""


class NewLeaf(Struct, frozen=True, gc=False):
    """A leaf to write, whose bytes may be one chunk that is put together when it is written."""

    dtype: str
    shape: tuple[int, ...]
    data: ChunkBytes

    @property
    def text(self) -> str:
        """The text of a scalar."""
        assert not isinstance(self.data, AssembledChunk)
        return bytes(self.data).decode()


class Written(NamedTuple):
    """What a save wrote.

    Attributes:
        leaves: The entries of the leaves of the state.
        packs: The packs that all entries read from.
        located: The places of the new chunks, by hash.
        process_leaves: The entries of the process leaves.
    """

    leaves: list[LeafEntry]
    packs: list[PackEntry]
    located: dict[str, Held]
    process_leaves: list[LeafEntry]


def write_pack(
    storage: Storage,
    step: int,
    process: int,
    leaves: Mapping[str, Leaf] | Mapping[str, NewLeaf],
    known: Mapping[str, Held],
    encode: Encode | None = None,
    process_leaves: Mapping[str, Leaf] = MappingProxyType({}),
) -> Written:
    """Write the chunks of `leaves` that `known` lacks, as one durable pack.

    No pack is written if every chunk is known. An error leaves at most a temporary file.

    Args:
        storage: The run directory.
        step, process: Parts of the name of the pack.
        leaves: The leaves to write.
        known: The places of chunks that are durable already, by hash.
        encode: Encodes large chunks; None stores all of them as they are.
        process_leaves: Small leaves of this process that are no part of the state, not encoded.

    Raises:
        DamagedChunk: A pack with known chunks is gone.
    """
    pack = NewPack(storage, pack_name(step, process, secrets.token_hex(4)), known)
    ordered = sorted(leaves.items())
    slots: list[list[PlacedChunk]] = [[] for _ in ordered]
    buffers: list[mmap.mmap] = []
    left = sum([len(leaf.data) for leaf in (*leaves.values(), *process_leaves.values())])
    try:
        with gc_paused(len(leaves)):
            large, small = _in_pack_order(ordered, slots, ENCODE_FROM if encode else LARGE_BYTES)
        with closing(_prepared(large, encode, (known, pack.located), buffers)) as prepared:
            for (chunks, index, data, _), digest, stored, release in prepared:
                chunks[index] = pack.add(digest, stored, left, len(data), release)
                left -= len(data)
        with gc_paused(len(leaves)):
            pack.add_small(small, left)
        # A process leaf that never changes would keep the pack of the first save alive for ever, for a
        # few kilobytes. So it is written again, unless there would be no pack without it.
        if not pack.is_empty:
            pack.known = {}
        own = sorted(process_leaves.items())
        own_slots: list[list[PlacedChunk]] = [[] for _ in own]
        pack.add_small(_in_pack_order(own, own_slots, CHUNK_BYTES + 1)[1], left)
        pack.finish()
    except BaseException:
        pack.abort()
        raise
    finally:  # the pack is written or given up, so the buffers are free
        while buffers:
            give_buffer(buffers.pop())
    with gc_paused(len(leaves)):
        entries, packs = _entries(ordered + own, slots + own_slots, pack)
    return Written(entries[: len(leaves)], packs, pack.located, entries[len(leaves) :])


class NewPack:
    """The pack that is being written, created at its first chunk.

    Attributes:
        known: The places of chunks that are not written.
        located: The chunks of this pack, in order.
    """

    def __init__(self, storage: Storage, name: str, known: Mapping[str, Held]) -> None:
        self.storage = storage
        self.name = name
        self.size = 0
        self.known = known
        self.located: dict[str, Held] = {}
        self._encoded: dict[str, int] = {}
        self._sink: Sink | None = None
        self._adopting: AdoptingSink | None = None

    @property
    def is_empty(self) -> bool:
        return self._sink is None

    def add(
        self,
        digest: str,
        data: memoryview,
        left: int,
        size: int,
        release: Release = None,
    ) -> PlacedChunk:
        """Append a chunk of `size` bytes, stored as `data`, unless it is there already.

        Args:
            digest: The hash of the chunk.
            data: Its bytes as they are stored.
            left: An upper bound of the bytes of this chunk and all that follow.
            size: Its bytes once it is decoded.
            release: Called once `data` may be reused; None if no call is needed.
        """
        if (place := self._find(digest)) is None:
            sink = self._open(left)
            place = self._place(digest, len(data), size)
            if release is not None and len(data) == size and self._adopting is not None:
                self._adopting.write_from(data, release)
                return digest, place
            sink.write(data)
        if release is not None:
            release()
        return digest, place

    def copy(self, chunks: Sequence[PackedChunk], data: memoryview, left: int) -> None:
        """Append chunks that are not there yet, as they are stored one after the other in `data`."""
        for digest, length, size in chunks:
            self._place(digest, length, size)
        self._open(left).write(data)

    def add_small(self, jobs: Sequence[_Small], left: int) -> None:
        """Append small chunks that are not there yet, and add each with its place to those of its leaf.

        They are given to the storage in groups, so that the disk writes while the next ones are hashed,
        and because a call for each chunk would take longer than copying it.
        """
        slots: list[list[PlacedChunk]] = []
        parts: list[memoryview | bytes] = []
        waiting = 0
        for chunks, chunk in jobs:
            data = chunk.copy() if isinstance(chunk, AssembledChunk) else chunk
            slots.append(chunks)
            parts.append(data)
            waiting += len(data)
            if waiting >= GATHER_BYTES:
                self._add_gathered(slots, parts, left)
                slots, parts, waiting = [], [], 0
        if parts:
            self._add_gathered(slots, parts, left)

    def _add_gathered(
        self,
        slots: Sequence[list[PlacedChunk]],
        parts: Sequence[memoryview | bytes],
        left: int,
    ) -> None:
        located, known = self.located, self.known
        joined = memoryview(b"".join(parts))
        sizes = list(map(len, parts))
        if set(map(type, parts)) != {bytes}:  # what may change is hashed in the copy
            ends = list(accumulate(sizes))
            parts = list(map(joined.__getitem__, map(slice, [0, *ends], ends)))
        digests = hash_each(parts)
        begins = accumulate(sizes, initial=self.size)
        places = list(map(Held, repeat(self.name), begins, sizes))
        new = dict(zip(digests, places, strict=True))
        is_held = map(located.__contains__, digests), map(known.__contains__, digests)
        if len(new) == len(digests) and not any(chain(*is_held)):  # nearly always: in few calls
            located.update(new)
            self.size += len(joined)
        else:
            rest = []
            for index, (digest, data) in enumerate(zip(digests, parts, strict=True)):
                if (place := self._find(digest)) is None:
                    place = self._place(digest, len(data), len(data))
                    rest.append(data)
                places[index] = place
            joined = memoryview(b"".join(rest))
        for chunks, placed in zip(slots, zip(digests, places, strict=True), strict=True):
            chunks.append(placed)
        if joined:
            self._open(left).write(joined)

    def _find(self, digest: str) -> Held | None:
        """The place of a chunk that is in this pack, or known."""
        return self.located.get(digest) or self.known.get(digest)

    def _place(self, digest: str, length: int, size: int) -> Held:
        """Note that the next `length` bytes of the pack are a chunk of `size` decoded bytes."""
        place = self.located[digest] = Held(self.name, self.size, length)
        self.size += length
        if length != size:
            self._encoded[digest] = size
        return place

    def _open(self, left: int) -> Sink:
        if self._sink is None:
            self._sink = self.storage.create(PACKS + self.name, left)
            # Asked once: for each chunk it would cost more than the rest of `add`.
            self._adopting = self._sink if isinstance(self._sink, AdoptingSink) else None
        return self._sink

    def finish(self) -> None:
        """Make the pack durable, if there is one."""
        if self._sink is None:
            return
        chunks = [(digest, held.length) for digest, held in self.located.items()]
        tail = encode_pack_tail(chunks, self._encoded)
        self._sink.write(memoryview(tail))
        self.size += len(tail)
        self._sink.commit()

    def abort(self) -> None:
        """Discard the pack, if there is one."""
        if self._sink is not None:
            self._sink.abort()


_NOT_YET: PlacedChunk = ("", Held("", 0, 0))
"""Where a large chunk of a leaf will be noted."""
_Job = tuple[list[PlacedChunk], int, ChunkBytes, str]
"""The placed chunks of a leaf, the number of a large chunk in it, the chunk, and its dtype."""
_Small = tuple[list[PlacedChunk], ChunkBytes]
"""The placed chunks of a leaf, and its last chunk, which is small. There may be many."""
_Prepared = tuple[_Job, str, memoryview, Release]
"""A large chunk, its hash, its stored bytes, and what to call once they are written."""


def _in_pack_order(
    ordered: Sequence[tuple[str, Leaf | NewLeaf]],
    every_slot: Sequence[list[PlacedChunk]],
    large_from: int,
) -> tuple[list[_Job], list[_Small]]:
    """(large chunks, small chunks) in the order of the pack: chunks of whole blocks first."""
    whole: list[_Job] = []
    uneven: list[_Job] = []
    small: list[_Small] = []
    for (_, leaf), slots in zip(ordered, every_slot, strict=True):
        data = leaf.data
        size = len(data)
        if not size or leaf.dtype.startswith(SCALAR_PREFIX):
            continue
        if size < large_from:
            small.append((slots, data))
            continue
        for index, (start, stop) in enumerate(chunk_spans(size)):
            length = stop - start
            chunk = data if isinstance(data, AssembledChunk) else data[start:stop]
            if length < large_from:
                small.append((slots, chunk))
                continue
            slots.append(_NOT_YET)
            into = uneven if length % BLOCK else whole
            into.append((slots, index, chunk, leaf.dtype))
    return whole + uneven, small


def _prepared(
    chunks: Sequence[_Job],
    encode: Encode | None,
    known: tuple[Mapping[str, Held], ...],
    buffers: list[mmap.mmap],
) -> Generator[_Prepared, None, None]:
    """Copy, hash and encode large chunks, in order; many of them are prepared ahead on other cores.

    Chunks that are `known` are not encoded. The buffers of the copies are added to `buffers`.
    """

    def work(job: _Job, copy: memoryview, release: Release) -> _Prepared:
        digest = hash_bytes(copy)
        if encode is None or any(digest in places for places in known):
            return job, digest, copy, release
        return job, digest, encode(copy, job[3], digest), release

    if sum(len(data) for _, _, data, _ in chunks) <= ALONE_BYTES:
        return (work(job, _private(job[2]), None) for job in chunks)
    if encode is None:
        return _on_copies(pool("hash", HASH_THREADS), work, chunks, HASH_AHEAD, buffers)
    executor = pool("encode", ENCODE_THREADS)
    return _on_copies(executor, work, chunks, 2 * ENCODE_THREADS, buffers)


def _private(chunk: ChunkBytes) -> memoryview:
    return chunk.copy() if isinstance(chunk, AssembledChunk) else memoryview(bytes(chunk))


def _on_copies(
    executor: ThreadPoolExecutor,
    work: Callable[[_Job, memoryview, Release], _Prepared],
    chunks: Sequence[_Job],
    ahead: int,
    buffers: list[mmap.mmap],
) -> Generator[_Prepared, None, None]:
    """`map_ahead` of `work`, given a copy of each chunk and its release. It must be closed."""
    free: SimpleQueue[memoryview | None] = SimpleQueue()
    while len(buffers) * STAGING_BYTES < min(ahead + WRITING, len(chunks)) * CHUNK_BYTES:
        buffers.append(take_buffer())
        for start in range(0, STAGING_BYTES, CHUNK_BYTES):
            free.put(memoryview(buffers[-1])[start : start + CHUNK_BYTES])

    def copied(job: _Job) -> _Prepared:
        slot = free.get()
        if slot is None:
            raise RuntimeError("the save was given up")
        copy = slot[: len(job[2])]
        copy_chunk(copy, job[2], copy_bytes)
        return work(job, copy, lambda: free.put(slot))

    prepared = map_ahead(executor, copied, chunks, ahead)
    try:
        yield from prepared
    finally:
        for _ in range(ahead):  # wakes threads that wait for memory, which is no longer released
            free.put(None)
        prepared.close()


def _entries(
    ordered: Sequence[tuple[str, Leaf | NewLeaf]],
    slots: Sequence[list[PlacedChunk]],
    pack: NewPack,
) -> tuple[list[LeafEntry], list[PackEntry]]:
    builder = EntryBuilder()
    array = builder.array
    entries = []
    for (path, leaf), chunks in zip(ordered, slots, strict=True):
        dtype = leaf.dtype
        if dtype.startswith(SCALAR_PREFIX):
            entries.append(LeafEntry(path=path, dtype=dtype, text=leaf.text))
            continue
        entries.append(array(path, dtype, leaf.shape, len(leaf.data), chunks))

    def pack_size(name: str) -> int:
        try:
            return pack.size if name == pack.name else pack.storage.size(PACKS + name)
        except FileNotFoundError as error:
            where = f"{pack.storage.where}/{PACKS}{name}"
            raise DamagedChunk(f"{where} is gone.", name, -1) from error

    return entries, builder.packs(pack_size)
