"""Saving: leaves -> chunks -> one pack -> the manifest, whose commit is the commit.

Invariants: the pack is durable before the manifest that reads from it can be seen. The bytes that are
hashed are the bytes that are written: both are a copy that nobody else can reach, so that a checkpoint
is readable even if the program changes an array during the save.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

from perdure.store.aligned_buffers import STAGING_BYTES, give_buffer, take_buffer
from perdure.store.codec import ENCODE_FROM, ENCODE_THREADS, Encode
from perdure.store.direct import copy_bytes
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
from perdure.store.manifest import LeafRecord, PackRecord
from perdure.store.pack_index import encode_pack_tail
from perdure.store.pools import map_ahead, pool
from perdure.store.record_builder import Held, RecordBuilder
from perdure.store.storage import AdoptingSink, Sink, Storage

HASH_THREADS = 2
# Few, so that the bytes of a chunk are still in the processor's cache when they are copied.
HASH_AHEAD = 4
WRITING = 4
"""So many copies of chunks may be on their way to the disk besides."""

LARGE_BYTES = 256 * 1024
"""From here on a chunk is hashed on another core, and placed so that it can be read by itself."""

ALONE_BYTES = 1024 * 1024
"""Up to here starting other threads takes longer than it saves."""

ENCODE_ALONE_BYTES = 1024 * 1024
"""The same where chunks are encoded, which takes ten times as long as hashing them."""

BLOCK = 4096
"""Large chunks of whole blocks come first in a pack, so that each of them begins on a block."""

GATHER_BYTES = 256 * 1024
"""So much of small chunks is handed to the storage at once."""


class Written(NamedTuple):
    """What a save wrote: a manifest's records, the packs that they read from, and where the new
    chunks lie."""

    leaves: list[LeafRecord]
    packs: list[PackRecord]
    located: dict[str, Held]
    local: list[LeafRecord]


@dataclass
class WrittenPack:
    """What one process wrote for one save."""

    name: str
    size: int = 0


def write_pack(
    storage: Storage,
    step: int,
    process: int,
    leaves: Mapping[str, Leaf],
    known: Mapping[str, Held],
    encode: Encode | None = None,
    local: Mapping[str, Leaf] = MappingProxyType({}),
) -> Written:
    """Write the chunks of `leaves` that `known` lacks, as one durable pack.

    `encode` makes what is stored of a chunk smaller where it can. `local` leaves are small and are
    stored as they are. No pack is written when every chunk is known already. On an error nothing
    stays but a temporary file that the next writer clears. Raises `DamagedChunk` if a pack with known
    chunks is gone.
    """
    pack = _Pack(storage, WrittenPack(pack_name(step, process, secrets.token_hex(4))))
    ordered = sorted(leaves.items())
    hashes: list[list[str]] = [[] for _ in ordered]
    located = pack.located
    buffers: list[mmap.mmap] = []
    left = sum(len(leaf.data) for leaf in (*leaves.values(), *local.values()))
    try:
        with gc_paused(len(leaves)):
            large, small = _in_pack_order(ordered, hashes, ENCODE_FROM if encode else LARGE_BYTES)
        jobs = (
            _hashed(large, buffers)
            if encode is None
            else _encoded(large, encode, (known, located), buffers)
        )
        with closing(jobs):
            for (slots, at, data, _), digest, stored, release in jobs:
                slots[at] = digest
                if digest not in known and digest not in located:
                    pack.add(digest, stored, left, len(data), release)
                else:
                    release()
                left -= len(data)
        with gc_paused(len(leaves)):
            pack.add_small(small, known, left)
        # A local leaf that did not change would keep the pack of the first save alive for ever, for
        # a few kilobytes. So it is written again, unless there would be no pack without it.
        beside, own = sorted(local.items()), known if pack.is_empty else {}
        beside_hashes: list[list[str]] = [[] for _ in beside]
        if beside:
            pack.add_small(_in_pack_order(beside, beside_hashes, CHUNK_BYTES + 1)[1], own, left)
        pack.commit()
    except BaseException:
        pack.abort()
        raise
    finally:  # once the pack is written or given up, nobody reads from them
        while buffers:
            give_buffer(buffers.pop())
    with gc_paused(len(leaves)):
        ordered, hashes = ordered + beside, hashes + beside_hashes
        records, packs = _records(ordered, hashes, known, located, storage, pack.written)
    return Written(records[: len(leaves)], packs, located, records[len(leaves) :])


class _Pack:
    """The pack under way: made at its first chunk. `located` holds its chunks in their order."""

    def __init__(self, storage: Storage, written: WrittenPack) -> None:
        self.written = written
        self.located: dict[str, Held] = {}
        self._encoded: dict[str, int] = {}
        self._storage = storage
        self._sink: Sink | None = None

    @property
    def is_empty(self) -> bool:
        return self._sink is None

    def add(
        self, digest: str, data: memoryview, left: int, size: int, release: Callable[[], None]
    ) -> None:
        """Append a chunk of `size` bytes, stored as `data`; `release` is called once that is written.

        `left` bounds the bytes of chunks still to come, this one included.
        """
        if self._sink is None:
            self._sink = self._storage.create(PACKS + self.written.name, left)
        self.located[digest] = Held(self.written.name, self.written.size, len(data))
        self.written.size += len(data)
        if len(data) != size:
            self._encoded[digest] = size
        if release is not _nothing and len(data) == size and isinstance(self._sink, AdoptingSink):
            self._sink.write_from(data, release)
        else:
            self._sink.write(data)
            release()

    def add_small(self, jobs: Sequence[_Small], known: Mapping[str, Held], left: int) -> None:
        """Append those that are not there yet, and the hash of each to those of its leaf.

        They are handed to the storage together, so that the disk writes while the next ones are
        hashed: a call for each would cost more than its copy. For the same reason nothing is called
        for each of them here.
        """
        gathered: list[_Small] = []
        waiting = 0
        for job in jobs:
            gathered.append(job)
            waiting += len(job[1])
            if waiting >= GATHER_BYTES:
                self._add_gathered(gathered, known, left)
                gathered, waiting = [], 0
        self._add_gathered(gathered, known, left)

    def _add_gathered(self, jobs: Sequence[_Small], known: Mapping[str, Held], left: int) -> None:
        name, at, located = self.written.name, self.written.size, self.located
        together = memoryview(b"".join([job[1] for job in jobs]))
        ends = list(accumulate([len(job[1]) for job in jobs]))
        copies = list(map(together.__getitem__, map(slice, [0, *ends], ends)))
        parts: list[memoryview] = []
        for (slots, _), data, digest in zip(jobs, copies, hash_each(copies), strict=True):
            slots.append(digest)
            if digest in located or digest in known:
                continue
            size = len(data)
            located[digest] = Held(name, at, size)
            at += size
            parts.append(data)
        if parts:
            self.written.size = at
            if self._sink is None:
                self._sink = self._storage.create(PACKS + name, left)
            self._sink.write(together if len(parts) == len(copies) else memoryview(b"".join(parts)))

    def commit(self) -> None:
        """Make the pack durable, if there is one."""
        if self._sink is None:
            return
        chunks = [(digest, at.length) for digest, at in self.located.items()]
        tail = encode_pack_tail(chunks, self._encoded)
        self._sink.write(memoryview(tail))
        self.written.size += len(tail)
        self._sink.commit()

    def abort(self) -> None:
        if self._sink is not None:
            self._sink.abort()


# Where the hash of a chunk goes, the chunk, its dtype.
_Job = tuple[list[str], int, memoryview, str]
# The same of a chunk that is the last of its leaf and small. A plain tuple: there may be very many.
_Small = tuple[list[str], memoryview]
_Done = tuple[_Job, str, memoryview, Callable[[], None]]
"""A chunk, its hash, its bytes as they are stored, and what to call when they were written."""


def _in_pack_order(
    ordered: Sequence[tuple[str, Leaf]], hashes: Sequence[list[str]], large_from: int
) -> tuple[list[_Job], list[_Small]]:
    """(large chunks, small chunks) in the order of the pack: those of whole blocks before others."""
    whole: list[_Job] = []
    uneven: list[_Job] = []
    small: list[_Small] = []
    for (_, leaf), slots in zip(ordered, hashes, strict=True):
        data = leaf.data
        size = len(data)
        if not size or leaf.dtype.startswith(SCALAR_PREFIX):
            continue
        if size < large_from:
            small.append((slots, data))
            continue
        for at, (start, stop) in enumerate(chunk_spans(size)):
            length = stop - start
            if length < large_from:
                small.append((slots, data[start:stop]))
                continue
            slots.append("")
            into = uneven if length % BLOCK else whole
            into.append((slots, at, data[start:stop], leaf.dtype))
    return whole + uneven, small


def _hashed(chunks: Sequence[_Job], buffers: list[mmap.mmap]) -> Generator[_Done, None, None]:
    """A copy of each large chunk with its hash, in order, made ahead on other cores if there are many.

    The copies lie in buffers that are added to `buffers`.
    """

    def work(job: _Job, copy: memoryview, release: Callable[[], None]) -> _Done:
        return job, hash_bytes(copy), copy, release

    if sum(len(data) for _, _, data, _ in chunks) <= ALONE_BYTES:
        return (work(job, memoryview(bytes(job[2])), _nothing) for job in chunks)
    return _on_copies(pool("hash", HASH_THREADS), work, chunks, HASH_AHEAD, buffers)


def _nothing() -> None:
    """Releases memory of the allocator, which is not page-aligned."""


def _on_copies(
    executor: ThreadPoolExecutor,
    work: Callable[[_Job, memoryview, Callable[[], None]], _Done],
    chunks: Sequence[_Job],
    ahead: int,
    buffers: list[mmap.mmap],
) -> Generator[_Done, None, None]:
    """`map_ahead` with a copy of each chunk and with what releases it; close it in any case."""
    free: SimpleQueue[memoryview | None] = SimpleQueue()
    while len(buffers) * STAGING_BYTES < min(ahead + WRITING, len(chunks)) * CHUNK_BYTES:
        buffers.append(take_buffer())
        for at in range(0, STAGING_BYTES, CHUNK_BYTES):
            free.put(memoryview(buffers[-1])[at : at + CHUNK_BYTES])

    def copied(job: _Job) -> _Done:
        slot = free.get()
        if slot is None:
            raise RuntimeError("the save was given up")
        copy = slot[: len(job[2])]
        copy_bytes(copy, job[2])
        return work(job, copy, lambda: free.put(slot))

    done = map_ahead(executor, copied, chunks, ahead)
    try:
        yield from done
    finally:
        for _ in range(ahead):  # whoever waits for memory that nobody releases any more
            free.put(None)
        done.close()


def _encoded(
    chunks: Sequence[_Job],
    encode: Encode,
    there: tuple[Mapping[str, Held], ...],
    buffers: list[mmap.mmap],
) -> Generator[_Done, None, None]:
    """As `_hashed`, with the bytes as they are stored; chunks that are there are not encoded."""

    def work(job: _Job, copy: memoryview, release: Callable[[], None]) -> _Done:
        digest = hash_bytes(copy)
        if any(digest in held for held in there):
            return job, digest, copy, release
        return job, digest, encode(copy, job[3], digest), release

    if sum(len(data) for _, _, data, _ in chunks) <= ENCODE_ALONE_BYTES:
        return (work(job, memoryview(bytes(job[2])), _nothing) for job in chunks)
    executor = pool("encode", ENCODE_THREADS)
    return _on_copies(executor, work, chunks, 2 * ENCODE_THREADS, buffers)


def _records(
    ordered: Sequence[tuple[str, Leaf]],
    hashes: Sequence[list[str]],
    known: Mapping[str, Held],
    located: Mapping[str, Held],
    storage: Storage,
    written: WrittenPack,
) -> tuple[list[LeafRecord], list[PackRecord]]:
    builder = RecordBuilder()
    records = []
    for (path, leaf), digests in zip(ordered, hashes, strict=True):
        if leaf.dtype.startswith(SCALAR_PREFIX):
            records.append(LeafRecord(path=path, dtype=leaf.dtype, text=leaf.text))
            continue
        places = [located.get(digest) or known[digest] for digest in digests]
        size = len(leaf.data)
        records.append(builder.array(path, leaf.dtype, leaf.shape, size, digests, places))

    def pack_size(name: str) -> int:
        try:
            return written.size if name == written.name else storage.size(PACKS + name)
        except FileNotFoundError as error:
            raise DamagedChunk(f"{storage.where}/{PACKS}{name} is gone.", name, -1) from error

    return records, builder.packs(pack_size)
