"""Writing the chunks of a save into one pack.

Invariants: the pack is durable before a manifest that reads from it is visible. The bytes that are
hashed are the bytes that are written: both come from a private copy, so that a checkpoint is
readable even if the program changes an array during the save.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import accumulate, compress, repeat
from operator import attrgetter
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

from perdure.store.aligned_buffers import STAGING_BYTES, copy_bytes, give_buffer, take_buffer
from perdure.store.codec import ENCODE_FROM, ENCODE_THREADS, Encode
from perdure.store.entry_builder import EntryBuilder, StoredChunk
from perdure.store.failures import DamagedChunk
from perdure.store.format import (
    CHUNK_BYTES,
    PACKS,
    SCALAR_PREFIX,
    blocks,
    hash_bytes,
    hash_each,
    pack_name,
)
from perdure.store.gc_pause import gc_paused
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry, PackEntry
from perdure.store.pack_index import pack_tail
from perdure.store.pools import map_ahead, pool
from perdure.store.reader import Wanted
from perdure.store.shard_plan import AssembledChunk, ChunkBytes, whole
from perdure.store.storage import Sink, Storage

HASH_THREADS = 2
# Few, so that the bytes of a chunk are still in the cache of the processor when they are written.
HASH_AHEAD = 4
WRITING = 4
"""Copies of further chunks that may be on their way to the disk."""

LARGE_BYTES = 256 * 1024
"""Chunks of at least this size are hashed on another core and placed so that each is read alone."""

ALONE_BYTES = 8 * 1024 * 1024
"""At most so many bytes of large chunks are hashed by the thread that writes: threads would end a
millisecond or two earlier, and take a fifth more of the processors, which the training loop lacks."""
ENCODED_ALONE_BYTES = 1024 * 1024
"""The same for chunks that are encoded, which takes longer."""

BLOCK = 4096
"""Large chunks of whole blocks come first in a pack, so that each of them begins on a block."""

GATHER_BYTES = 256 * 1024
"""Small chunks are given to the storage in pieces of about this size."""
GATHER_CHUNKS = 4096
"""And of at most so many chunks."""

Release = Callable[[], None] | None
"""Gives a buffer of page-aligned memory back; None for memory that Python frees."""


class ChunkRows:
    """Chunks to write, with dtypes; hashes and places once `write_chunks` returned."""

    def __init__(self, chunks: list[ChunkBytes], dtypes: list[str]) -> None:
        self.chunks, self.dtypes = chunks, dtypes
        self.digests: list[str] = []
        self.places: list[StoredChunk] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(map(len, self.chunks))


class LeafRows(ChunkRows):
    """The chunks of leaves, in the order of their paths. There may be very many."""

    def __init__(self, leaves: Mapping[str, Leaf]) -> None:
        chunks: list[ChunkBytes] = []
        dtypes: list[str] = []
        super().__init__(chunks, dtypes)
        self._leaves = sorted(leaves.items())
        self._cut: list[tuple[int, int, int]] = []
        """Of each leaf that is not one chunk: its number, that of its first chunk, and its chunks."""
        for number, (_, leaf) in enumerate(self._leaves):
            data, dtype = leaf.data, leaf.dtype
            if 0 < len(data) <= CHUNK_BYTES and dtype[:3] != SCALAR_PREFIX:
                chunks.append(data)
                dtypes.append(dtype)
                continue
            parts = [] if leaf.is_scalar else leaf.chunks()
            self._cut.append((number, len(chunks), len(parts)))
            chunks += parts
            dtypes += [dtype] * len(parts)

    def entries(self, builder: EntryBuilder) -> list[LeafEntry]:
        """The entries of the leaves, once all chunks have their places."""
        builder.number(dict.fromkeys([place.pack for place in self.places]))
        leaves, digests, places = self._leaves, self.digests, self.places
        if self._cut:
            uncut, alone = [True] * len(leaves), [True] * len(digests)
            for number, first, count in self._cut:
                uncut[number] = False
                alone[first : first + count] = [False] * count
            leaves = list(compress(leaves, uncut))
            digests, places = list(compress(digests, alone)), list(compress(places, alone))
        paths = [path for path, _ in leaves]
        entries = builder.uncut(paths, [leaf for _, leaf in leaves], digests, places)
        for number, first, count in self._cut:
            path, leaf = self._leaves[number]
            if leaf.is_scalar:
                entries.append(LeafEntry(path=path, dtype=leaf.dtype, text=leaf.text))
                continue
            chunks = slice(first, first + count)
            placed = list(zip(self.digests[chunks], self.places[chunks], strict=True))
            entries.append(builder.array(path, leaf.dtype, leaf.shape, leaf.nbytes, placed))
        if self._cut:
            entries.sort(key=attrgetter("path"))
        return entries


class Written(NamedTuple):
    """What a save wrote: the entries of leaves, all packs they need, the new chunks by hash."""

    leaves: list[LeafEntry]
    packs: list[PackEntry]
    located: dict[str, StoredChunk]
    process_leaves: list[LeafEntry]


def write_pack(
    storage: Storage,
    step: int,
    leaves: Mapping[str, Leaf],
    known: Mapping[str, StoredChunk],
    encode: Encode | None = None,
    process_leaves: Mapping[str, Leaf] = MappingProxyType({}),
) -> Written:
    """Write the chunks of leaves, as the only process that saves; see `write_chunks`."""
    with gc_paused(len(leaves)):
        state, own = LeafRows(leaves), LeafRows(process_leaves)
    pack = write_chunks(storage, step, 0, state, own, known, encode)
    with gc_paused(len(leaves)):
        builder = EntryBuilder()
        entries, process_entries = state.entries(builder), own.entries(builder)
        return Written(entries, builder.packs(pack.size_of), pack.located, process_entries)


def write_chunks(
    storage: Storage,
    step: int,
    process: int,
    state: ChunkRows,
    own: ChunkRows,
    known: Mapping[str, StoredChunk],
    encode: Encode | None = None,
) -> NewPack:
    """Write the chunks that `known` lacks, as one durable pack; none if it has all.

    `own` are small chunks of this process that are no part of the state. An error leaves at most a
    temporary file.
    """
    buffers: list[mmap.mmap] = []
    try:
        with new_pack(storage, step, process, known, state.nbytes + own.nbytes) as pack:
            _write_rows(pack, state, encode, buffers)
            # A process leaf that never changes would keep the pack of the first save alive for ever,
            # for a few kilobytes. So it is written again, unless there would be no pack without it.
            if not pack.is_empty:
                pack.known = {}
            own.digests, own.places = pack.add_small(own.chunks)
        return pack
    finally:  # the pack is written or given up, so the buffers are free
        while buffers:
            give_buffer(buffers.pop())


@contextmanager
def new_pack(
    storage: Storage, step: int, process: int, known: Mapping[str, StoredChunk], left: int
) -> Iterator[NewPack]:
    """The pack to fill in the block, at whose end it is durable; see `NewPack`."""
    pack = NewPack(storage, pack_name(step, process, os.urandom(4).hex()), known, left)
    try:
        yield pack
        pack.finish()
    except BaseException:
        pack.abort()
        raise


def _write_rows(
    pack: NewPack, rows: ChunkRows, encode: Encode | None, buffers: list[mmap.mmap]
) -> None:
    """Append chunks to a pack: large ones of whole blocks, other large ones, small ones."""
    chunks = rows.chunks
    large_from = ENCODE_FROM if encode else LARGE_BYTES
    large = [number for number, chunk in enumerate(chunks) if len(chunk) >= large_from]
    if not large:
        with gc_paused(len(chunks)):
            rows.digests, rows.places = pack.add_small(chunks)
        return
    rows.digests, rows.places = [""] * len(chunks), [_NOT_YET] * len(chunks)
    small = [number for number, chunk in enumerate(chunks) if len(chunk) < large_from]
    large.sort(key=lambda number: len(chunks[number]) % BLOCK > 0)
    known = pack.known, pack.located
    with closing(_prepared(rows, large, encode, known, buffers)) as prepared:
        for number, digest, stored, release in prepared:
            rows.digests[number] = digest
            rows.places[number] = pack.add(digest, stored, len(chunks[number]), release)
    with gc_paused(len(chunks)):
        placed = pack.add_small([chunks[number] for number in small])
        for number, digest, place in zip(small, *placed, strict=True):
            rows.digests[number], rows.places[number] = digest, place


class NewPack:
    """The pack that is being written, created at its first chunk.

    `left` is an upper bound of the bytes of all chunks that follow.
    """

    def __init__(
        self, storage: Storage, name: str, known: Mapping[str, StoredChunk], left: int
    ) -> None:
        self.storage = storage
        self.name = name
        self.size = 0
        self.known = known
        self.left = left
        self.located: dict[str, StoredChunk] = {}
        self._encoded: dict[str, int] = {}
        self._sink: Sink | None = None

    @property
    def is_empty(self) -> bool:
        return self._sink is None

    def add(self, digest: str, data: memoryview, size: int, release: Release = None) -> StoredChunk:
        """Append a chunk of `size` decoded bytes, stored as `data`, unless it is known; returns its
        place.

        `release` is called once `data` may be reused.
        """
        if (place := self._find(digest)) is None:
            sink = self._open()
            place = self._place(digest, len(data), size)
            if release is not None and len(data) == size:
                sink.write_from(data, release)
                release = None
            else:
                sink.write(data)
        if release is not None:
            release()
        self.left -= size
        return place

    def copy(self, chunks: Sequence[Wanted], data: memoryview) -> None:
        """Append chunks that are not there yet, as they are stored one after the other in `data`."""
        for chunk in chunks:
            self._place(chunk.hash, chunk.length, chunk.size)
        self._open().write(data)

    def add_small(self, parts: Sequence[ChunkBytes]) -> tuple[list[str], list[StoredChunk]]:
        """Append small chunks that are not there yet; returns the hash and the place of each.

        They go to the storage in groups: the disk writes while the next ones are hashed, and a call
        for each chunk would take longer than copying it.
        """
        digests: list[str] = []
        places: list[StoredChunk] = []
        for block in blocks(parts, GATHER_CHUNKS):
            ends = list(accumulate(map(len, block), initial=0))
            start = 0
            while start < len(block):
                stop = bisect_left(ends, ends[start] + GATHER_BYTES, start + 1, len(block))
                group = list(map(whole, block[start:stop]))
                group_digests, group_places = self._add_gathered(group)
                digests += group_digests
                places += group_places
                start = stop
        return digests, places

    def _add_gathered(
        self, parts: Sequence[memoryview | bytes]
    ) -> tuple[list[str], list[StoredChunk]]:
        located, known = self.located, self.known
        joined = memoryview(b"".join(parts))
        sizes = list(map(len, parts))
        if set(map(type, parts)) != {bytes}:  # what may change is hashed in the copy
            ends = list(accumulate(sizes))
            parts = list(map(joined.__getitem__, map(slice, [0, *ends], ends)))
        digests = hash_each(parts)
        places = list(
            map(StoredChunk, repeat(self.name), accumulate(sizes, initial=self.size), sizes)
        )
        count = len(located)
        # Nearly always all of them are new, so all are placed, in few calls.
        first = list(map(located.setdefault, digests, places))
        all_new = len(located) - count == len(parts)
        if all_new and not any(map(known.__contains__, digests)):
            self.size += len(joined)
        else:
            for digest, place, other in zip(digests, places, first, strict=True):
                if place is other:
                    del located[digest]
            rest = []
            for index, (digest, data) in enumerate(zip(digests, parts, strict=True)):
                if (held := self._find(digest)) is None:
                    held = self._place(digest, len(data), len(data))
                    rest.append(data)
                places[index] = held
            joined = memoryview(b"".join(rest))
        if joined:
            self._open().write(joined)
        self.left -= sum(sizes)
        return digests, places

    def _find(self, digest: str) -> StoredChunk | None:
        """The place of a chunk that is in this pack, or known."""
        return self.located.get(digest) or self.known.get(digest)

    def _place(self, digest: str, length: int, size: int) -> StoredChunk:
        """Note that the next `length` bytes of the pack are a chunk of `size` decoded bytes."""
        place = self.located[digest] = StoredChunk(self.name, self.size, length)
        self.size += length
        if length != size:
            self._encoded[digest] = size
        return place

    def _open(self) -> Sink:
        if self._sink is None:
            self._sink = self.storage.create(PACKS + self.name, self.left)
        return self._sink

    def size_of(self, name: str) -> int:
        """The bytes of this pack, once it is finished, or of another one, which must be there."""
        try:
            return self.size if name == self.name else self.storage.size(PACKS + name)
        except FileNotFoundError as error:
            where = f"{self.storage.where}/{PACKS}{name}"
            raise DamagedChunk(f"{where} is gone.", name, -1) from error

    def finish(self) -> None:
        """Make the pack durable, if there is one."""
        if self._sink is None:
            return
        lengths = [place.length for place in self.located.values()]
        sizes = map(self._encoded.get, self.located, lengths) if self._encoded else lengths
        for part in pack_tail(zip(self.located, lengths, sizes, strict=True)):
            self._sink.write(memoryview(part))
            self.size += len(part)
        self._sink.commit()

    def abort(self) -> None:
        """Discard the pack, if there is one."""
        if self._sink is not None:
            self._sink.abort()


_NOT_YET = StoredChunk("", 0, 0)
"""The place of a chunk that is not written yet."""
_Prepared = tuple[int, str, memoryview, Release]
"""The number of a chunk, its hash, its stored bytes, and what to call once they are written."""


def _prepared(
    rows: ChunkRows,
    numbers: Sequence[int],
    encode: Encode | None,
    known: tuple[Mapping[str, StoredChunk], ...],
    buffers: list[mmap.mmap],
) -> Generator[_Prepared, None, None]:
    """Copy, hash and encode chunks, in order; many of them are prepared ahead on other cores."""

    def work(number: int, memory: memoryview, release: Release) -> _Prepared:
        chunk = rows.chunks[number]
        copy = memory[: len(chunk)]
        if isinstance(chunk, AssembledChunk):
            chunk.fill(copy)
        else:
            copy_bytes(copy, chunk)
        digest = hash_bytes(copy)
        if encode is None or any(digest in places for places in known):
            return number, digest, copy, release
        return number, digest, encode(copy, rows.dtypes[number], digest), release

    alone = ALONE_BYTES if encode is None else ENCODED_ALONE_BYTES
    if sum(len(rows.chunks[number]) for number in numbers) <= alone:
        for number in numbers:  # in one buffer, which the copy of the next one overwrites
            if not buffers:
                buffers.append(take_buffer())
            yield work(number, memoryview(buffers[0]), None)
        return
    threads, ahead = HASH_THREADS, HASH_AHEAD
    if encode is not None:
        threads, ahead = ENCODE_THREADS, 2 * ENCODE_THREADS
    free: SimpleQueue[memoryview | None] = SimpleQueue()
    while len(buffers) * STAGING_BYTES < min(ahead + WRITING, len(numbers)) * CHUNK_BYTES:
        buffers.append(take_buffer())
        for start in range(0, STAGING_BYTES, CHUNK_BYTES):
            free.put(memoryview(buffers[-1])[start : start + CHUNK_BYTES])

    def copied(number: int) -> _Prepared:
        slot = free.get()
        if slot is None:
            raise RuntimeError("the save was given up")
        return work(number, slot, lambda: free.put(slot))

    prepared = map_ahead(pool("hash", threads), copied, numbers, ahead)
    try:
        yield from prepared
    finally:
        for _ in range(ahead):  # wakes threads that wait for memory, which is no longer released
            free.put(None)
        prepared.close()
