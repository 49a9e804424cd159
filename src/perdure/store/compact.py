"""Moving live chunks out of packs: copied, made durable, then named by the manifests that need them.

Invariant: a manifest is replaced only after its chunks are durable in the new pack, by one that has
the same fingerprint. The old packs are not touched here; the caller removes them afterwards.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from perdure.store.codec import is_intact
from perdure.store.failures import DamagedChunk, is_gone
from perdure.store.format import (
    PACKS,
    Chunk,
    LeafRecord,
    Manifest,
    PackedChunk,
    PackRecord,
    array_record,
    decode_manifest,
    encode_manifest,
    encode_pack_tail,
    format_of,
    manifest_name,
    pack_name,
)
from perdure.store.storage import Storage
from perdure.store.writer import Held

LiveChunks = dict[int, PackedChunk]
"""By offset, the chunks of one pack that are needed."""


def live_chunks(manifests: Iterable[Manifest], packs: Collection[str]) -> dict[str, LiveChunks]:
    """For each of `packs`, the chunks that the manifests read from it."""
    live: dict[str, LiveChunks] = {name: {} for name in packs}
    for manifest in manifests:
        here = [live.get(pack.name) for pack in manifest.packs]
        if all(found is None for found in here):
            continue
        for leaf in manifest.every_leaf():
            for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                if (found := here[chunk.pack]) is not None:
                    found[chunk.offset] = (chunk.hash, chunk.length, size)
    return live


def relocated_size(live: Mapping[str, LiveChunks]) -> int:
    """Bytes of one new pack that holds these chunks, each once; 0 for none."""
    chunks = _smallest(live)
    if not chunks:
        return 0
    return sum(length for _, length, _ in chunks) + len(_tail(chunks))


def compact(
    storage: Storage, manifests: Mapping[int, Manifest], packs: Iterable[str]
) -> tuple[dict[int, Manifest], dict[str, DamagedChunk | UnreadChunk]]:
    """Move what `manifests` read from `packs` into one new pack, and replace those manifests.

    `manifests` must be every manifest that reads from them. Returns the new manifests by step, and
    the packs that were left as they are because a chunk in them is damaged or cannot be read, with
    the error. On return the new pack and the manifests are durable.
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
            moved = _copy(storage, max(users), live)
        except (DamagedChunk, UnreadChunk) as error:
            left[error.pack] = error
            chosen.remove(error.pack)
            continue
        sizes = {moved.name: moved.size}

        def place(
            name: str, chunk: Chunk, live: Collection[str] = live, moved: _Moved = moved
        ) -> Held | None:
            return moved.at[chunk.hash] if name in live else None

        return {step: _replace(storage, users[step], place, sizes) for step in sorted(users)}, left
    return {}, left


def _smallest(live: Mapping[str, LiveChunks]) -> list[PackedChunk]:
    """Each chunk once, as it takes the least room: it may lie encoded here and as it is there."""
    chunks: dict[str, PackedChunk] = {}
    for name in live:
        for chunk in live[name].values():
            if chunk[0] not in chunks or chunk[1] < chunks[chunk[0]][1]:
                chunks[chunk[0]] = chunk
    return list(chunks.values())


def _tail(chunks: Sequence[PackedChunk]) -> bytes:
    return encode_pack_tail(
        [(digest, length) for digest, length, _ in chunks],
        {digest: size for digest, length, size in chunks if length < size},
    )


class UnreadChunk(Exception):
    """A chunk that should be copied cannot be read; it may well be good."""

    def __init__(self, message: str, pack: str) -> None:
        super().__init__(message)
        self.pack = pack


class _Moved:
    """The new pack: its record, and the place of every chunk in it by hash."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        self.at: dict[str, Held] = {}


def _copy(storage: Storage, step: int, live: Mapping[str, LiveChunks]) -> _Moved:
    moved = _Moved(pack_name(step, 0, secrets.token_hex(4)))
    wanted = set(_smallest(live))
    order: list[PackedChunk] = []
    sink = storage.create(PACKS + moved.name, relocated_size(live))
    try:
        for name in sorted(live):
            for offset, chunk in sorted(live[name].items()):
                digest, length, _ = chunk
                if digest in moved.at or chunk not in wanted:
                    continue
                sink.write(memoryview(_read(storage, name, offset, chunk)))
                moved.at[digest] = Held(moved.name, moved.size, length)
                moved.size += length
                order.append(chunk)
        tail = _tail(order)
        sink.write(memoryview(tail))
        moved.size += len(tail)
        sink.commit()
    except BaseException:
        sink.abort()
        raise
    return moved


def _read(storage: Storage, name: str, offset: int, chunk: PackedChunk) -> bytearray:
    digest, length, size = chunk
    where = f"{storage.where}/{PACKS}{name} at offset {offset}"
    data = bytearray(length)
    try:
        got = storage.read_into(PACKS + name, offset, memoryview(data))
    except ConnectionError:
        # An outage is no damage; the caller stops, and may come back.
        raise
    except OSError as error:
        if is_gone(error):
            raise DamagedChunk(f"{where}: no such file.", name, offset) from error
        raise UnreadChunk(f"{where}: cannot be read: {error}.", name) from error
    if got != length:
        raise DamagedChunk(f"{where}: expected {length} bytes, found {got}.", name, offset)
    if not is_intact(data, digest, size):
        raise DamagedChunk(f"{where}: expected hash {digest}, found other bytes.", name, offset)
    return data


def rewrite(
    storage: Storage,
    manifests: Mapping[int, Manifest],
    bad: Collection[tuple[str, int]],
    known: Mapping[str, Held],
) -> tuple[dict[int, Manifest], list[int]]:
    """Let manifests read the chunks at `bad` places, (pack, offset), from where `known` has them.

    Returns the new manifests by step, durable, and the steps that still need a chunk at such a place.
    """
    renewed: dict[int, Manifest] = {}
    left: list[int] = []
    for step, manifest in sorted(manifests.items()):
        needed = {
            chunk.hash
            for leaf in manifest.every_leaf()
            for chunk in leaf.chunks
            if (manifest.packs[chunk.pack].name, chunk.offset) in bad
        }
        places = {digest: known[digest] for digest in needed if digest in known}
        if places:
            sizes = {at.pack: storage.size(PACKS + at.pack) for at in places.values()}

            def moved(name: str, chunk: Chunk, places: Mapping[str, Held] = places) -> Held | None:
                return places.get(chunk.hash) if (name, chunk.offset) in bad else None

            renewed[step] = _replace(storage, manifest, moved, sizes)
        if len(places) < len(needed):
            left.append(step)
    return renewed, left


def _replace(
    storage: Storage,
    manifest: Manifest,
    moved: Callable[[str, Chunk], Held | None],
    sizes: Mapping[str, int],
) -> Manifest:
    """Replace a manifest by one that reads chunks from where `moved` says that they lie now.

    `sizes` has the bytes of each pack that it may name.
    """
    there = {pack.name: pack for pack in manifest.packs}
    there |= {name: PackRecord(name=name, size=size) for name, size in sizes.items()}
    numbers: dict[str, int] = {}
    records: list[LeafRecord] = []
    for leaf in manifest.every_leaf():
        chunks = []
        for chunk in leaf.chunks:
            name = manifest.packs[chunk.pack].name
            at = moved(name, chunk) or Held(name, chunk.offset, chunk.length)
            number = numbers.setdefault(at.pack, len(numbers))
            chunks.append(Chunk(chunk.hash, number, at.offset, at.length))
        records.append(
            leaf
            if leaf.text is not None
            else array_record(leaf.path, leaf.dtype, leaf.shape, chunks, leaf.nbytes)
        )
    packs = tuple(there[name] for name in numbers)
    leaves = tuple(records[: len(manifest.leaves)])
    local = tuple(records[len(manifest.leaves) :])
    renewed = msgspec.structs.replace(
        manifest,
        format=format_of(leaves, manifest.containers, local),
        packs=packs,
        leaves=leaves,
        local=local,
    )
    data = encode_manifest(renewed)
    name = manifest_name(manifest.step)
    decode_manifest(data, f"{storage.where}/{name}: its replacement", manifest.step)
    storage.replace(name, data)
    return renewed
