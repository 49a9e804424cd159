"""Loading: manifest -> chunks -> leaves. Every byte is hashed before anybody sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from perdure.errors import CorruptionError, StepNotFoundError
from perdure.store.format import PACKS, Chunk, LeafRecord, Manifest, hash_bytes
from perdure.store.leaf import Leaf
from perdure.store.storage import Storage

READ_THREADS = max(2, min(8, os.cpu_count() or 2))
INLINE_READ_BYTES = 1024 * 1024


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
    reads: list[tuple[LeafRecord, Chunk, memoryview]] = []
    for record in records:
        if record.text is not None:
            leaves[record.path] = Leaf(record.dtype, (), memoryview(record.text.encode()), True)
            continue
        target = np.empty(record.nbytes, np.uint8).data if record.nbytes else memoryview(b"")
        leaves[record.path] = Leaf(record.dtype, record.shape, target, frozen=True)
        at = 0
        for chunk in record.chunks:
            reads.append((record, chunk, target[at : at + chunk.length]))
            at += chunk.length

    def read(job: tuple[LeafRecord, Chunk, memoryview]) -> None:
        read_chunk(storage, manifest, *job)

    if sum(len(target) for _, _, target in reads) < INLINE_READ_BYTES:
        _run(map(read, reads))
    else:
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="perdure-read") as pool:
            _run(pool.map(read, reads))
    return leaves


def read_chunk(
    storage: Storage, manifest: Manifest, record: LeafRecord, chunk: Chunk, target: memoryview
) -> None:
    """Fill `target` with a chunk and check its hash; raises `CorruptionError`."""
    name = manifest.packs[chunk.pack].name
    place = (
        f"{storage.where}: step {manifest.step}, leaf {record.path!r}, {PACKS}{name} "
        f"at offset {chunk.offset}"
    )
    try:
        got = storage.read_into(PACKS + name, chunk.offset, target)
    except FileNotFoundError:
        raise CorruptionError(f"{place}: expected a pack, found no such file.") from None
    except OSError as error:
        raise CorruptionError(f"{place}: cannot be read: {error}.") from error
    if got != len(target):
        raise CorruptionError(
            f"{place}: expected {len(target)} bytes, found {got}; the pack is cut short."
        )
    found = hash_bytes(target)
    if found != chunk.hash:
        raise CorruptionError(f"{place}: expected hash {chunk.hash}, found {found}.")


def _run(results: Iterable[None]) -> None:
    for _ in results:
        pass
