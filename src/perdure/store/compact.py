"""Copying verified chunks into a new pack, for compactions and copies of checkpoints.

Invariant: a manifest is replaced only after its chunks are durable in the new pack, by one that has
the same fingerprint. The caller deletes the old packs afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache

import msgspec

from perdure.store.entry_builder import EntryBuilder, StoredChunk
from perdure.store.failures import DamagedChunk, UnreadChunk
from perdure.store.format import PACKS, manifest_name
from perdure.store.manifest import Chunk, Manifest
from perdure.store.manifest_json import decode_manifest, encode_manifest
from perdure.store.pack_index import PackedChunk, encode_pack_tail
from perdure.store.pack_writer import BLOCK, LARGE_BYTES, new_pack
from perdure.store.pools import map_ahead, pool
from perdure.store.reader import Read, Wanted, grouped, verified
from perdure.store.storage import Storage

READ_THREADS = 2
READ_AHEAD = 4
"""Reads in progress while a pack is written; each takes at most CHUNK_BYTES of memory."""

LiveChunks = dict[int, PackedChunk]
"""By offset, the chunks of one pack that are needed."""


def live_chunks(manifests: Iterable[Manifest], packs: Collection[str]) -> dict[str, LiveChunks]:
    """For each of `packs`, the chunks that the manifests read from it."""
    live: dict[str, LiveChunks] = {name: {} for name in packs}
    for manifest in manifests:
        by_number = [live.get(pack.name) for pack in manifest.packs]
        if all(chunks is None for chunks in by_number):
            continue
        for leaf in manifest.every_leaf():
            for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                if (chunks := by_number[chunk.pack]) is not None:
                    chunks[chunk.offset] = (chunk.hash, chunk.length, size)
    return live


def relocated_size(live: Mapping[str, LiveChunks]) -> int:
    """Bytes of one new pack that holds these chunks, each once; 0 for none."""
    chunks = _smallest(live)
    if not chunks:
        return 0
    return sum(length for _, length, _ in chunks) + len(encode_pack_tail(chunks))


def compact(
    storage: Storage, manifests: Mapping[int, Manifest], packs: Iterable[str]
) -> tuple[dict[int, Manifest], dict[str, DamagedChunk | UnreadChunk]]:
    """Move what `manifests` read from `packs` into one new pack, and replace those manifests.

    `manifests` must be all that read from them. Returns the new manifests by step, and the packs
    that stay, with the error. On return the new pack and the manifests are durable.
    """
    chosen = sorted(packs)
    left: dict[str, DamagedChunk | UnreadChunk] = {}
    while chosen:
        live = live_chunks(manifests.values(), chosen)
        users = {
            step: manifest
            for step, manifest in manifests.items()
            if any(live.get(pack.name) for pack in manifest.packs)
        }
        if not users:
            break
        try:
            places = copy_chunks(storage, storage, max(users), live)
        except (DamagedChunk, UnreadChunk) as error:
            if isinstance(error.__cause__, ConnectionError):
                raise error.__cause__ from None  # the caller stops, and may come back
            left[error.pack] = error
            chosen.remove(error.pack)
            continue
        old = {(name, offset) for name, chunks in live.items() for offset in chunks}
        return rewrite(storage, users, old, places)[0], left
    return {}, left


def _smallest(live: Mapping[str, LiveChunks]) -> list[PackedChunk]:
    """Each chunk once, in its smallest form: one pack may have it encoded and another one plain."""
    chunks: dict[str, PackedChunk] = {}
    for name in live:
        for chunk in live[name].values():
            if chunk[0] not in chunks or chunk[1] < chunks[chunk[0]][1]:
                chunks[chunk[0]] = chunk
    return list(chunks.values())


def copy_chunks(
    source: Storage,
    target: Storage,
    step: int,
    live: Mapping[str, LiveChunks],
    find_again: Callable[[DamagedChunk], Mapping[str, LiveChunks]] | None = None,
    before: Callable[[], None] = lambda: None,
) -> dict[str, StoredChunk]:
    """Copy each of the `live` chunks once, verified and as it is stored, into one durable new pack.

    `find_again` returns where all chunks are after a prune moved one; `before` is called before
    each read, and what it raises ends the copy. Returns the places by hash.
    """
    with new_pack(target, step, 0, {}, relocated_size(live)) as pack:
        while True:
            try:
                for read, data in _each_read(source, _in_order(live, pack.located), before):
                    pack.copy(read.chunks, data)
                return pack.located
            except DamagedChunk as error:
                if find_again is None:
                    raise
                live = find_again(error)


def check_chunks(source: Storage, live: Mapping[str, LiveChunks]) -> None:
    """Read and hash chunks; raises `DamagedChunk` for the first that is not what it should be, and
    `UnreadChunk` for one that cannot be read."""
    for _ in _each_read(source, _in_order(live, ())):
        pass


def relocated(
    manifest: Manifest, place: Callable[[str, Chunk], StoredChunk], size: Callable[[str], int]
) -> Manifest:
    """`manifest` with its chunks at other places; the fingerprint and all other fields are equal."""
    builder = EntryBuilder()

    def moved(chunk: Chunk) -> StoredChunk:
        return place(manifest.packs[chunk.pack].name, chunk)

    leaves = tuple(builder.moved(leaf, moved) for leaf in manifest.leaves)
    process_leaves = tuple(builder.moved(leaf, moved) for leaf in manifest.process_leaves)
    return msgspec.structs.replace(
        manifest,
        packs=tuple(builder.packs(size)),
        leaves=leaves,
        process_leaves=process_leaves,
    )


def _in_order(live: Mapping[str, LiveChunks], done: Collection[str]) -> list[Wanted]:
    """The chunks that are not `done`, each once, large ones first, as a save has them."""
    smallest = {chunk: None for chunk in _smallest(live) if chunk[0] not in done}
    rows: list[tuple[bool, str, int, PackedChunk]] = []
    for name, chunks in live.items():
        for offset, chunk in chunks.items():
            if chunk in smallest:
                del smallest[chunk]
                rows.append((chunk[1] < LARGE_BYTES or chunk[1] % BLOCK > 0, name, offset, chunk))
    rows.sort(key=lambda row: row[:3])
    return [Wanted(name, offset, *chunk) for _, name, offset, chunk in rows]


def _each_read(
    source: Storage, wanted: Iterable[Wanted], before: Callable[[], None] = lambda: None
) -> Iterator[tuple[Read, memoryview]]:
    """Each read and its verified bytes, in order; some are read ahead by other threads."""

    def work(read: Read) -> tuple[Read, memoryview]:
        before()
        return read, verified(source, read)

    return map_ahead(pool("copy", READ_THREADS), work, grouped(source.where, wanted), READ_AHEAD)


def rewrite(
    storage: Storage,
    manifests: Mapping[int, Manifest],
    bad: Collection[tuple[str, int]],
    known: Mapping[str, StoredChunk],
) -> tuple[dict[int, Manifest], list[int]]:
    """Let manifests read the chunks at the `bad` places, (pack, offset), from `known` places
    instead.

    Returns the new, durable manifests by step, and the steps that still need a bad place.
    """
    renewed: dict[int, Manifest] = {}
    left: list[int] = []
    size = cache(lambda pack: storage.size(PACKS + pack))
    for step, manifest in sorted(manifests.items()):
        needed = {
            place: chunk.hash
            for leaf in manifest.every_leaf()
            for chunk in leaf.chunks
            if (place := (manifest.packs[chunk.pack].name, chunk.offset)) in bad
        }
        moved = {place: known[digest] for place, digest in needed.items() if digest in known}
        if moved:
            renewed[step] = _replace(storage, manifest, moved, size)
        if len(moved) < len(needed):
            left.append(step)
    return renewed, left


def _replace(
    storage: Storage,
    manifest: Manifest,
    moved: Mapping[tuple[str, int], StoredChunk],
    size: Callable[[str], int],
) -> Manifest:
    """Replace a manifest by one with chunks at `moved` places; durable on return."""
    known = {pack.name: pack.size for pack in manifest.packs}

    def place(pack: str, chunk: Chunk) -> StoredChunk:
        stays = StoredChunk(pack, chunk.offset, chunk.length)
        return moved.get((pack, chunk.offset), stays)

    renewed = relocated(manifest, place, lambda pack: known.get(pack) or size(pack))
    data = encode_manifest(renewed)
    name = manifest_name(manifest.step)
    decode_manifest(data, f"{storage.where}/{name}: its replacement", manifest.step)
    storage.replace(name, data)
    return renewed
