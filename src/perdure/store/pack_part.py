"""Writing one checkpoint from several processes, each of which holds the state.

Chunk i of the state, in path order, is written by process i mod P. What only one process has
(`OwnLeaves`), leaves or chunks of a sharded array, is written by that one. The chief puts the parts
together. Nothing here commits: the manifest, which the chief writes once all parts are durable, makes
all of it visible, or nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from perdure.errors import CorruptionError
from perdure.store.codec import Encode
from perdure.store.entry_builder import EntryBuilder, Held
from perdure.store.format import chunk_spans, hash_bytes
from perdure.store.leaf import AnyLeaf, Leaf, RemoteLeaf, containers_of
from perdure.store.manifest import Chunk, LeafEntry
from perdure.store.pack_writer import Written, write_pack
from perdure.store.storage import Storage

_SHARD = "%chunk"
"""Follows the path of a sharded array in the names of its chunks. In a path, % is escaped."""


class PackPart(Struct, frozen=True, forbid_unknown_fields=True):
    """What one process wrote.

    Attributes:
        state_hash: The hash of the whole state as this process holds it.
        chunks: Its chunks by number, each as (hash, pack, offset, length).
        packs: The packs that it reads from, with their bytes.
        per_rank: The entries of its own leaves that are part of the state. Their chunks number the
            packs in the order of `packs`.
        process_leaves: The entries of its own leaves that are not part of the state.
    """

    state_hash: str
    chunks: dict[int, tuple[str, str, int, int]]
    packs: dict[str, int]
    per_rank: tuple[LeafEntry, ...] = ()
    process_leaves: tuple[LeafEntry, ...] = ()


@dataclass(frozen=True)
class OwnLeaves:
    """The leaves that only one process has, by path.

    Attributes:
        per_rank: Leaves that are part of the state (members wrapped in `PerRank`), and chunks of
            sharded arrays (`shard_leaves`).
        process_leaves: Leaves that are no part of it, such as the state of its random generators.
    """

    per_rank: Mapping[str, Leaf] = field(default_factory=dict)
    process_leaves: Mapping[str, Leaf] = field(default_factory=dict)


class OwnRows(Struct, frozen=True):
    """The `OwnLeaves` leaves of one process, as the others get them.

    With `ready`, this process is about to gather sharded arrays for the save of that step, and has not
    sent its leaves yet.
    """

    per_rank: dict[str, RemoteLeaf]
    process_leaves: dict[str, RemoteLeaf]
    ready: int | None = None

    @classmethod
    def of(cls, own: OwnLeaves) -> OwnRows:
        def rows(leaves: Mapping[str, Leaf]) -> dict[str, RemoteLeaf]:
            return {
                path: RemoteLeaf(leaf.dtype, leaf.shape, leaf.nbytes, tuple(leaf.hashes()))
                for path, leaf in leaves.items()
            }

        return cls(rows(own.per_rank), rows(own.process_leaves))


def shard_leaves(path: str, leaf: Leaf) -> dict[str, Leaf]:
    """The chunks that this process has of the sharded leaf at `path`, for `OwnLeaves.per_rank`.

    Each is a leaf with the shape of the whole array. `join_shards` and `assemble` put them together.
    """
    return {
        f"{path}{_SHARD}{number:09d}": Leaf(leaf.dtype, leaf.shape, data, frozen=True)
        for number, data in (leaf.chunks or {}).items()
    }


def join_shards(leaves: Mapping[str, AnyLeaf]) -> dict[str, Any]:
    """The leaves of all processes, with each sharded array as one leaf."""
    joined = {path: leaf for path, leaf in leaves.items() if _SHARD not in path}
    for path, names in _shards_by_path(leaves).items():
        parts = [leaves[name] for name in names]
        joined[path] = RemoteLeaf(
            parts[0].dtype,
            parts[0].shape,
            sum(part.nbytes for part in parts),
            tuple(digest for part in parts for digest in part.hashes()),
        )
    return joined


def _shards_by_path(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of `shard_leaves` in the order of their chunks, by the path of the array."""
    by_path: dict[str, list[str]] = {}
    for name in sorted(name for name in names if _SHARD in name):
        by_path.setdefault(name.partition(_SHARD)[0], []).append(name)
    for path, shards in by_path.items():
        numbers = [int(name.partition(_SHARD)[2]) for name in shards]
        if numbers != list(range(len(numbers))):
            missing = min({*range(len(numbers))} - {*numbers})
            raise CorruptionError(f"leaf {path!r}: no process wrote chunk {missing} of this save.")
    return by_path


def write_pack_part(
    storage: Storage,
    step: int,
    leaves: Mapping[str, Leaf],
    known: Mapping[str, Held],
    process: int,
    count: int,
    encode: Encode | None = None,
    own: OwnLeaves | None = None,
) -> PackPart:
    """Write the chunks of this process that `known` lacks; durable on return.

    `process` is the number of this process, `count` that of all processes.
    """
    own = own or OwnLeaves()
    mine = {
        # Names that sort as the numbers do, and before all others.
        f"{number:012d}": Leaf(leaves[path].dtype, (len(data),), data, frozen=True)
        for number, (path, data) in enumerate(_chunks(leaves))
        if number % count == process
    }
    everything = mine | {f"r{path}": leaf for path, leaf in own.per_rank.items()}
    written = write_pack(storage, step, process, everything, known, encode, own.process_leaves)
    packs = written.packs
    chunks = {
        int(entry.path): (chunk.hash, packs[chunk.pack].name, chunk.offset, chunk.length)
        for entry in written.leaves[: len(mine)]
        for chunk in entry.chunks
    }
    hashed = {number: placed[0] for number, placed in chunks.items()}
    return PackPart(
        state_hash=hash_bytes(msgspec.json.encode(leaf_digests(leaves, hashed))),
        chunks=chunks,
        packs={pack.name: pack.size for pack in packs},
        per_rank=tuple(
            msgspec.structs.replace(entry, path=entry.path[1:])
            for entry in written.leaves[len(mine) :]
        ),
        process_leaves=tuple(written.process_leaves),
    )


def assemble(leaves: Mapping[str, Leaf], parts: Sequence[PackPart]) -> Written:
    """What the manifest lists, from the parts of all processes."""
    placed = {number: chunk for part in parts for number, chunk in part.chunks.items()}
    sizes = {name: size for part in parts for name, size in part.packs.items()}
    located: dict[str, Held] = {}
    builder = EntryBuilder()
    numbers = itertools.count()
    state: list[LeafEntry] = []
    for path, leaf in sorted(leaves.items()):
        if leaf.is_scalar:
            state.append(LeafEntry(path=path, dtype=leaf.dtype, text=leaf.text))
            continue
        chunks = [_placed(placed, path, next(numbers), len(data)) for data in _cut(leaf)]
        located.update(chunks)
        digests = [digest for digest, _ in chunks]
        state.append(
            builder.array(path, leaf.dtype, leaf.shape, leaf.nbytes, digests, dict(chunks))
        )
    per_rank: list[LeafEntry] = []
    process_leaves: list[LeafEntry] = []
    for part in parts:
        packs = list(part.packs)

        def place(chunk: Chunk, packs: Sequence[str] = packs) -> Held:
            held = Held(packs[chunk.pack], chunk.offset, chunk.length)
            located[chunk.hash] = held
            return held

        per_rank += [builder.moved(entry, place) for entry in part.per_rank]
        process_leaves += [builder.moved(entry, place) for entry in part.process_leaves]
    state += _joined(per_rank)
    for entries in (state, process_leaves):
        entries.sort(key=lambda entry: entry.path)
    return Written(state, builder.packs(sizes.__getitem__), located, process_leaves)


def _joined(entries: Sequence[LeafEntry]) -> Iterator[LeafEntry]:
    """The entries, with those of the chunks of a sharded array as one."""
    by_name = {entry.path: entry for entry in entries}
    yield from (entry for entry in entries if _SHARD not in entry.path)
    for path, names in _shards_by_path(by_name).items():
        parts = [by_name[name] for name in names]
        chunks = tuple(chunk for part in parts for chunk in part.chunks)
        nbytes = sum(part.nbytes for part in parts)
        is_encoded = nbytes != sum(chunk.length for chunk in chunks)
        yield msgspec.structs.replace(
            parts[0], path=path, chunks=chunks, size=nbytes if is_encoded else None
        )


def _placed(
    placed: Mapping[int, tuple[str, str, int, int]], path: str, number: int, nbytes: int
) -> tuple[str, Held]:
    """Hash and place of a chunk of `nbytes` bytes, by its number."""
    if number not in placed:
        raise CorruptionError(f"leaf {path!r}: no process wrote chunk {number} of this save.")
    digest, pack, offset, length = placed[number]
    if length > nbytes:
        raise CorruptionError(
            f"leaf {path!r}: chunk {number} has {nbytes} bytes here and {length} in the process that "
            f"wrote it."
        )
    return digest, Held(pack, offset, length)


def leaf_digests(
    leaves: Mapping[str, Leaf], hashed: Mapping[int, str] | None = None
) -> dict[str, str]:
    """One hash for each leaf, by which processes find out whether they hold the same one.

    Dtype and shape are included. `hashed` has the hashes of chunks that are known already, by number.
    """
    hashed = hashed or {}
    digests: dict[str, str] = {}
    number = 0
    for path, leaf in sorted(leaves.items()):
        if leaf.is_scalar:
            digests[path] = hash_bytes(f"{leaf.dtype}{hash_bytes(leaf.data)}".encode())
            continue
        parts = [leaf.describe()]
        for data in _cut(leaf):
            parts.append(hashed.get(number) or hash_bytes(data))
            number += 1
        digests[path] = hash_bytes("".join(parts).encode())
    for path, container in containers_of(leaves).items():
        digests[f"{path} (structure)"] = hash_bytes(msgspec.json.encode(container))
    return digests


def _chunks(leaves: Mapping[str, Leaf]) -> Iterator[tuple[str, memoryview]]:
    for path, leaf in sorted(leaves.items()):
        if not leaf.is_scalar:
            for data in _cut(leaf):
                yield path, data


def _cut(leaf: Leaf) -> Iterator[memoryview]:
    for start, stop in chunk_spans(len(leaf.data)):
        yield leaf.data[start:stop]
