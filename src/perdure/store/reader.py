"""Loading: manifest -> chunks -> leaves. Every byte is hashed before anybody sees it.

Large chunks are read by several threads straight into the memory of their leaf, page-aligned so
that they can go past the page cache. Small ones that lie side by side in a pack are read together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from perdure.errors import CorruptionError, StepNotFoundError
from perdure.store.format import CHUNK_BYTES, PACKS, Chunk, LeafRecord, Manifest, hash_bytes
from perdure.store.leaf import Leaf
from perdure.store.staging import pages
from perdure.store.storage import Storage

# More than cores: a thread that hashes leaves the disk without work.
READ_THREADS = 2 + max(2, min(8, os.cpu_count() or 2))
INLINE_READ_BYTES = 1024 * 1024
SMALL_BYTES = 256 * 1024


@dataclass(slots=True)
class _Read:
    """One read: the chunk, its memory and its leaf; several for neighbours in one pack."""

    parts: list[tuple[LeafRecord, Chunk, memoryview]] = field(default_factory=list)
    nbytes: int = 0


def load_leaves(
    storage: Storage, manifest: Manifest, wanted: Callable[[str], bool] | None = None
) -> dict[str, Leaf]:
    """Read and verify the leaves of `manifest` (those whose path `wanted` accepts).

    Touches only the chunks of those leaves. Raises `CorruptionError` naming leaf, pack, offset,
    expected and found; nothing unverified is returned.
    """
    records = [leaf for leaf in manifest.leaves if wanted is None or wanted(leaf.path)]
    if wanted is not None and not records:
        held = ", ".join(leaf.path for leaf in manifest.leaves[:10])
        raise StepNotFoundError(
            f"{storage.where}: step {manifest.step} has no leaf that was asked for; it has {held}..."
        )
    leaves: dict[str, Leaf] = {}
    parts: list[tuple[LeafRecord, Chunk, memoryview]] = []
    for record in records:
        if record.text is not None:
            leaves[record.path] = Leaf(record.dtype, (), memoryview(record.text.encode()), True)
            continue
        target = _memory(record.nbytes)
        leaves[record.path] = Leaf(record.dtype, record.shape, target, frozen=True)
        if len(record.chunks) == 1:
            parts.append((record, record.chunks[0], target))
            continue
        at = 0
        for chunk in record.chunks:
            parts.append((record, chunk, target[at : at + chunk.length]))
            at += chunk.length

    def read(job: _Read) -> None:
        _read(storage, manifest, job)

    reads = list(_grouped(parts))
    if sum(job.nbytes for job in reads) < INLINE_READ_BYTES:
        _run(map(read, reads))
    else:
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="perdure-read") as pool:
            try:
                _run(pool.map(read, reads))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return leaves


def _memory(nbytes: int) -> memoryview:
    """Writable memory; page-aligned when it is large."""
    return memoryview(bytearray(nbytes) if nbytes < SMALL_BYTES else pages(nbytes))


def _grouped(parts: list[tuple[LeafRecord, Chunk, memoryview]]) -> Iterator[_Read]:
    """Large chunks alone; small ones that follow each other in a pack together, up to a chunk."""
    under_way = _Read()
    pack, end = -1, -1
    # By place: neighbours meet, and the disk is read from front to back.
    for part in sorted(parts, key=lambda part: (part[1].pack, part[1].offset)):
        chunk = part[1]
        if chunk.length >= SMALL_BYTES:
            yield _Read([part], chunk.length)
            continue
        follows = chunk.pack == pack and chunk.offset == end
        if under_way.parts and (not follows or under_way.nbytes + chunk.length > CHUNK_BYTES):
            yield under_way
            under_way = _Read()
        under_way.parts.append(part)
        under_way.nbytes += chunk.length
        pack, end = chunk.pack, chunk.offset + chunk.length
    if under_way.parts:
        yield under_way


def _read(storage: Storage, manifest: Manifest, job: _Read) -> None:
    """Fill the memory of every chunk of a read and check its hash; raises `CorruptionError`."""
    record, first, target = job.parts[0]
    alone = len(job.parts) == 1
    data = target if alone else memoryview(bytearray(job.nbytes))
    name = PACKS + manifest.packs[first.pack].name
    try:
        got = storage.read_into(name, first.offset, data)
    except FileNotFoundError:
        raise CorruptionError(
            f"{_place(storage, manifest, record, first)}: expected a pack, found no such file."
        ) from None
    except OSError as error:
        raise CorruptionError(
            f"{_place(storage, manifest, record, first)}: cannot be read: {error}."
        ) from error
    at = 0
    for record, chunk, target in job.parts:
        part = data if alone else data[at : at + chunk.length]
        if at + chunk.length > got:
            raise CorruptionError(
                f"{_place(storage, manifest, record, chunk)}: expected {chunk.length} bytes, found "
                f"{max(0, got - at)}; the pack is cut short."
            )
        if (found := hash_bytes(part)) != chunk.hash:
            raise CorruptionError(
                f"{_place(storage, manifest, record, chunk)}: expected hash {chunk.hash}, "
                f"found {found}."
            )
        if not alone:
            target[:] = part
        at += chunk.length


def _place(storage: Storage, manifest: Manifest, record: LeafRecord, chunk: Chunk) -> str:
    return (
        f"{storage.where}: step {manifest.step}, leaf {record.path!r}, "
        f"{PACKS}{manifest.packs[chunk.pack].name} at offset {chunk.offset}"
    )


def _run(results: Iterable[None]) -> None:
    for _ in results:
        pass
