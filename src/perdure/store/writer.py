"""Saving: leaves -> chunks -> one pack -> the manifest, whose commit is the commit.

Invariant: the pack is durable before the manifest that reads from it can be seen.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from perdure.store.format import (
    PACKS,
    Chunk,
    LeafRecord,
    PackRecord,
    chunk_spans,
    encode_pack_tail,
    hash_bytes,
    pack_name,
)
from perdure.store.leaf import Leaf
from perdure.store.storage import Sink, Storage

HASH_THREADS = 2
HASH_AHEAD = 16
INLINE_HASH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Held:
    """Where a chunk already lies."""

    pack: str
    offset: int
    length: int


@dataclass
class WrittenPack:
    """What one process wrote for one save."""

    name: str
    size: int = 0
    chunks: list[tuple[str, int]] = field(default_factory=list)


def write_pack(
    storage: Storage,
    step: int,
    process: int,
    leaves: Mapping[str, Leaf],
    known: Mapping[str, Held],
) -> tuple[list[LeafRecord], list[PackRecord], dict[str, Held]]:
    """Write the chunks of `leaves` that `known` lacks, as one durable pack.

    Returns the manifest's leaf records, the packs they read from, and where the new chunks lie. No
    pack is written when every chunk is known already. On an error nothing stays but a temporary
    file that the next writer clears.
    """
    pack = WrittenPack(pack_name(step, process, secrets.token_hex(4)))
    located: dict[str, Held] = {}
    hashes: dict[str, list[str]] = {}
    sink: Sink | None = None
    remaining = sum(len(leaf.data) for leaf in leaves.values())
    try:
        for path, data, digest in _hashed(leaves):
            hashes.setdefault(path, []).append(digest)
            if digest not in known and digest not in located:
                if sink is None:
                    sink = storage.create(PACKS + pack.name, remaining)
                sink.write(data)
                located[digest] = Held(pack.name, pack.size, len(data))
                pack.chunks.append((digest, len(data)))
                pack.size += len(data)
            remaining -= len(data)
        if sink is not None:
            tail = encode_pack_tail(pack.chunks)
            sink.write(memoryview(tail))
            pack.size += len(tail)
            sink.commit()
    except BaseException:
        if sink is not None:
            sink.abort()
        raise
    records, packs = _records(leaves, hashes, {**known, **located}, storage, pack)
    return records, packs, located


def _hashed(leaves: Mapping[str, Leaf]) -> Iterator[tuple[str, memoryview, str]]:
    """(path, chunk, hash) in path order; large chunks are hashed ahead on other cores."""
    chunks = (
        (path, leaf.data[start:stop])
        for path, leaf in sorted(leaves.items())
        if not leaf.is_scalar
        for start, stop in chunk_spans(len(leaf.data))
    )
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="perdure-hash") as pool:
        ahead: deque[tuple[str, memoryview, Future[str] | str]] = deque()

        def fill() -> None:
            for path, data in itertools.islice(chunks, HASH_AHEAD - len(ahead)):
                small = len(data) < INLINE_HASH_BYTES
                ahead.append(
                    (path, data, hash_bytes(data) if small else pool.submit(hash_bytes, data))
                )

        fill()
        while ahead:
            path, data, digest = ahead.popleft()
            yield path, data, digest if isinstance(digest, str) else digest.result()
            fill()


def _records(
    leaves: Mapping[str, Leaf],
    hashes: Mapping[str, list[str]],
    held: Mapping[str, Held],
    storage: Storage,
    written: WrittenPack,
) -> tuple[list[LeafRecord], list[PackRecord]]:
    names: dict[str, int] = {}
    records = []
    for path, leaf in sorted(leaves.items()):
        if leaf.is_scalar:
            records.append(LeafRecord(path=path, dtype=leaf.dtype, text=leaf.text))
            continue
        chunks = []
        for digest in hashes.get(path, ()):
            at = held[digest]
            number = names.setdefault(at.pack, len(names))
            chunks.append(Chunk(hash=digest, pack=number, offset=at.offset, length=at.length))
        records.append(
            LeafRecord(path=path, dtype=leaf.dtype, shape=leaf.shape, chunks=tuple(chunks))
        )
    packs = [
        PackRecord(
            name=name, size=written.size if name == written.name else storage.size(PACKS + name)
        )
        for name in names
    ]
    return records, packs
