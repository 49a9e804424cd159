"""Writing the chunks of a save into one pack.

Invariants: the pack is durable before a manifest that reads from it is visible. The bytes that are
hashed are the bytes that are written: both come from a private copy, so that a checkpoint is
readable even if the program changes an array during the save.
"""

from __future__ import annotations

import mmap
import secrets
from bisect import bisect_left
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import accumulate, compress, repeat
from operator import attrgetter
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

from msgspec import Struct

from perdure.store.aligned_buffers import STAGING_BYTES, copy_bytes, give_buffer, take_buffer
from perdure.store.codec import ENCODE_FROM, ENCODE_THREADS, Encode
from perdure.store.entry_builder import EntryBuilder, PlacedChunk, StoredChunk
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
from perdure.store.json_blocks import blocks
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


class NewLeaf(Struct, frozen=True, gc=False):
    """A leaf to write, whose bytes may be one chunk that is put together when it is written."""

    dtype: str
    shape: tuple[int, ...]
    data: ChunkBytes

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return len(self.data)

    @property
    def text(self) -> str:
        """The text of a scalar."""
        return bytes(whole(self.data)).decode()

    def chunks(self) -> list[ChunkBytes]:
        """The bytes of each chunk."""
        if isinstance(self.data, AssembledChunk):
            return [self.data]
        return [self.data[start:stop] for start, stop in chunk_spans(len(self.data))]


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
    located: dict[str, StoredChunk]
    process_leaves: list[LeafEntry]


def write_pack(
    storage: Storage,
    step: int,
    process: int,
    leaves: Mapping[str, Leaf] | Mapping[str, NewLeaf],
    known: Mapping[str, StoredChunk],
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
    buffers: list[mmap.mmap] = []
    try:
        with gc_paused(len(leaves)):
            state = _Chunks(leaves, ENCODE_FROM if encode else LARGE_BYTES)
            own = _Chunks(process_leaves, CHUNK_BYTES + 1)
            left = state.nbytes + own.nbytes
        with closing(_prepared(state.large, encode, (known, pack.located), buffers)) as prepared:
            for (chunks, index, data, _), digest, stored, release in prepared:
                chunks[index] = pack.add(digest, stored, left, len(data), release)
                left -= len(data)
        with gc_paused(len(leaves)):
            state.place_small(*pack.add_small(state.small, left))
        # A process leaf that never changes would keep the pack of the first save alive for ever, for a
        # few kilobytes. So it is written again, unless there would be no pack without it.
        if not pack.is_empty:
            pack.known = {}
        own.place_small(*pack.add_small(own.small, left))
        pack.finish()
    except BaseException:
        pack.abort()
        raise
    finally:  # the pack is written or given up, so the buffers are free
        while buffers:
            give_buffer(buffers.pop())
    with gc_paused(len(leaves)):
        builder = EntryBuilder()
        entries, process_entries = state.entries(builder), own.entries(builder)
        return Written(entries, builder.packs(pack.size_of), pack.located, process_entries)


class NewPack:
    """The pack that is being written, created at its first chunk.

    Attributes:
        known: The places of chunks that are not written.
        located: The chunks of this pack, in order.
    """

    def __init__(self, storage: Storage, name: str, known: Mapping[str, StoredChunk]) -> None:
        self.storage = storage
        self.name = name
        self.size = 0
        self.known = known
        self.located: dict[str, StoredChunk] = {}
        self._encoded: dict[str, int] = {}
        self._sink: Sink | None = None

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
            if release is not None and len(data) == size:
                sink.write_from(data, release)
                return digest, place
            sink.write(data)
        if release is not None:
            release()
        return digest, place

    def copy(self, chunks: Sequence[Wanted], data: memoryview, left: int) -> None:
        """Append chunks that are not there yet, as they are stored one after the other in `data`."""
        for chunk in chunks:
            self._place(chunk.hash, chunk.length, chunk.size)
        self._open(left).write(data)

    def add_small(
        self, parts: Sequence[ChunkBytes], left: int
    ) -> tuple[list[str], list[StoredChunk]]:
        """Append small chunks that are not there yet; returns the hash and the place of each.

        They are given to the storage in groups, so that the disk writes while the next ones are hashed,
        and because a call for each chunk would take longer than copying it.
        """
        digests: list[str] = []
        places: list[StoredChunk] = []
        for block in blocks(parts, GATHER_CHUNKS):
            ends = list(accumulate(map(len, block), initial=0))
            start = 0
            while start < len(block):
                stop = bisect_left(ends, ends[start] + GATHER_BYTES, start + 1, len(block))
                group = list(map(whole, block[start:stop]))
                group_digests, group_places = self._add_gathered(group, left)
                digests += group_digests
                places += group_places
                start = stop
        return digests, places

    def _add_gathered(
        self, parts: Sequence[memoryview | bytes], left: int
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
            self._open(left).write(joined)
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

    def _open(self, left: int) -> Sink:
        if self._sink is None:
            self._sink = self.storage.create(PACKS + self.name, left)
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


_NOT_YET: PlacedChunk = ("", StoredChunk("", 0, 0))
"""Where a large chunk of a leaf will be noted."""
_Job = tuple[list[PlacedChunk], int, ChunkBytes, str]
"""The placed chunks of a leaf, the number of a large chunk in it, the chunk, and its dtype."""
_Prepared = tuple[_Job, str, memoryview, Release]
"""A large chunk, its hash, its stored bytes, and what to call once they are written."""


class _Chunks:
    """The chunks of leaves, in the order of their paths.

    Attributes:
        large: The large chunks in the order of the pack: those of whole blocks first.
        small: The other chunks, in the order of their leaves. There may be very many.
    """

    def __init__(self, leaves: Mapping[str, Leaf] | Mapping[str, NewLeaf], large_from: int) -> None:
        self.small: list[ChunkBytes] = []
        self._uncut_paths: list[str] = []
        self._uncut: list[Leaf | NewLeaf] = []
        """Leaves that are one small chunk each."""
        self._others: list[tuple[str, Leaf | NewLeaf, list[PlacedChunk]]] = []
        self._parts: dict[int, tuple[list[PlacedChunk], int]] = {}
        """By the number of a small chunk of one of the others, where its place is noted."""
        self._digests: list[str] = []
        self._places: list[StoredChunk] = []
        even: list[_Job] = []
        uneven: list[_Job] = []
        add_path, add_leaf, add_small = (
            self._uncut_paths.append,
            self._uncut.append,
            self.small.append,
        )
        for path, leaf in sorted(leaves.items()):
            data = leaf.data
            if 0 < len(data) < large_from and leaf.dtype[:3] != SCALAR_PREFIX:
                add_path(path)
                add_leaf(leaf)
                add_small(data)
                continue
            slots: list[PlacedChunk] = []
            self._others.append((path, leaf, slots))
            if leaf.dtype.startswith(SCALAR_PREFIX):
                continue
            for index, chunk in enumerate(leaf.chunks()):
                slots.append(_NOT_YET)
                if len(chunk) < large_from:
                    self._parts[len(self.small)] = slots, index
                    self.small.append(chunk)
                    continue
                into = uneven if len(chunk) % BLOCK else even
                into.append((slots, index, chunk, leaf.dtype))
        self.large = even + uneven

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(map(len, self.small)) + sum([len(job[2]) for job in self.large])

    def place_small(self, digests: list[str], places: list[StoredChunk]) -> None:
        """Note the hashes and the places of the small chunks."""
        for number, (slots, index) in self._parts.items():
            slots[index] = digests[number], places[number]
        if self._parts:
            uncut = [number not in self._parts for number in range(len(digests))]
            digests, places = list(compress(digests, uncut)), list(compress(places, uncut))
        self._digests, self._places = digests, places

    def entries(self, builder: EntryBuilder) -> list[LeafEntry]:
        """The entries of the leaves, once all chunks have their places."""
        if self._others:
            builder.number(self._packs_by_path())
        entries = builder.uncut(self._uncut_paths, self._uncut, self._digests, self._places)
        for path, leaf, chunks in self._others:
            if leaf.dtype.startswith(SCALAR_PREFIX):
                entries.append(LeafEntry(path=path, dtype=leaf.dtype, text=leaf.text))
            else:
                entries.append(builder.array(path, leaf.dtype, leaf.shape, leaf.nbytes, chunks))
        if self._others:
            entries.sort(key=attrgetter("path"))
        return entries

    def _packs_by_path(self) -> list[str]:
        """The packs with these chunks, in the order in which the sorted leaves need them."""
        uncut = zip(reversed(self._uncut_paths), reversed(self._places), strict=True)
        first = {place.pack: (path, 0) for path, place in uncut}
        for path, _, chunks in self._others:
            for index, (_, place) in enumerate(chunks):
                first[place.pack] = min(first.get(place.pack, (path, index)), (path, index))
        return sorted(first, key=first.__getitem__)


def _prepared(
    chunks: Sequence[_Job],
    encode: Encode | None,
    known: tuple[Mapping[str, StoredChunk], ...],
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

    alone = ALONE_BYTES if encode is None else ENCODED_ALONE_BYTES
    if sum(len(data) for _, _, data, _ in chunks) <= alone:
        return _in_turn(work, chunks, buffers)
    if encode is None:
        return _on_copies(pool("hash", HASH_THREADS), work, chunks, HASH_AHEAD, buffers)
    executor = pool("encode", ENCODE_THREADS)
    return _on_copies(executor, work, chunks, 2 * ENCODE_THREADS, buffers)


def _copy(target: memoryview, chunk: ChunkBytes) -> None:
    if isinstance(chunk, AssembledChunk):
        chunk.fill(target)
    else:
        copy_bytes(target, chunk)


def _in_turn(
    work: Callable[[_Job, memoryview, Release], _Prepared],
    chunks: Sequence[_Job],
    buffers: list[mmap.mmap],
) -> Generator[_Prepared, None, None]:
    """`work` on a copy of each chunk, which the copy of the next one overwrites."""
    for job in chunks:
        if not buffers:
            buffers.append(take_buffer())
        copy = memoryview(buffers[0])[: len(job[2])]
        _copy(copy, job[2])
        yield work(job, copy, None)


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
        _copy(copy, job[2])
        return work(job, copy, lambda: free.put(slot))

    prepared = map_ahead(executor, copied, chunks, ahead)
    try:
        yield from prepared
    finally:
        for _ in range(ahead):  # wakes threads that wait for memory, which is no longer released
            free.put(None)
        prepared.close()
