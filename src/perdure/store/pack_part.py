"""Writing one checkpoint from several processes, each of which holds the state or a part of it.

The chunks of the state are numbered in path order. Chunk i is written by process i mod P, one of an
array whose shards lie in several processes by the process that its plan names. Each process writes
the leaves that it alone has. The chief puts the parts together. Nothing here commits: the
manifest, which the chief writes once all parts are durable, makes all of it visible, or nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from perdure.store.codec import Encode
from perdure.store.entry_builder import EntryBuilder, PlacedChunk, StoredChunk
from perdure.store.format import chunk_spans, hash_bytes
from perdure.store.leaf import Leaf, containers_of
from perdure.store.manifest import Chunk, LeafEntry
from perdure.store.pack_writer import ChunkRows, LeafRows, Written, write_chunks
from perdure.store.shard_plan import ChunkBytes, Fetch, ShardPlan, own_chunks, whole
from perdure.store.storage import Storage


class PackPart(Struct, frozen=True, forbid_unknown_fields=True):
    """What one process wrote: chunks by number, and its packs.

    `state_hash` is the hash of the state of this process, `copies` are the hashes of shards of which
    several processes have copies. The entries of its own leaves number the packs in the order of
    `packs`.
    """

    state_hash: str
    chunks: dict[int, PlacedChunk]
    packs: dict[str, int]
    per_rank: tuple[LeafEntry, ...] = ()
    process_leaves: tuple[LeafEntry, ...] = ()
    copies: dict[str, str] = {}


@dataclass(frozen=True)
class GroupState:
    """What one process brings to a save: its copy of the shared state, and what it alone has, which
    are `PerRank` members and process leaves."""

    step: int
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    per_rank: Mapping[str, Leaf] = field(default_factory=dict)
    process_leaves: Mapping[str, Leaf] = field(default_factory=dict)


@dataclass(frozen=True)
class WriterShare:
    """Which chunks a process writes; `fetch` gets slices of them from other processes."""

    process: int
    count: int
    plans: Mapping[str, ShardPlan] = field(default_factory=dict)
    fetch: Callable[[str], Fetch] | None = None

    def chunks(self, leaves: Mapping[str, Leaf]) -> Iterator[tuple[int, str, ChunkBytes]]:
        """Number, dtype and bytes of each chunk that this process writes."""
        first = 0
        for path, leaf in sorted(leaves.items()):
            if leaf.is_scalar:
                continue
            if leaf.shards is None:
                own = (
                    (number, chunk)
                    for number, chunk in enumerate(leaf.chunks())
                    if (first + number) % self.count == self.process
                )
            else:
                assert self.fetch is not None
                own = own_chunks(self.plans[path], leaf.shards, self.process, self.fetch(path))
            for number, data in own:
                yield first + number, leaf.dtype, data
            first += len(chunk_spans(leaf.nbytes))

    def hashes(self, leaves: Mapping[str, Leaf]) -> dict[int, str]:
        """The hash of each chunk of a sharded array that this process writes, by number."""
        sharded = {path: leaf for path, leaf in leaves.items() if leaf.shards is not None}
        return {number: hash_bytes(whole(data)) for number, _, data in self.chunks(sharded)}


def write_pack_part(
    storage: Storage,
    state: GroupState,
    known: Mapping[str, StoredChunk],
    share: WriterShare,
    encode: Encode | None = None,
) -> PackPart:
    """Write the chunks of this process that `known` lacks; durable on return."""
    leaves = state.leaves
    mine = list(share.chunks(leaves))
    numbers = [number for number, _, _ in mine]
    per_rank, process_leaves = LeafRows(state.per_rank), LeafRows(state.process_leaves)
    rows = ChunkRows(
        [*(data for _, _, data in mine), *per_rank.chunks],
        [*(dtype for _, dtype, _ in mine), *per_rank.dtypes],
    )
    pack = write_chunks(storage, state.step, share.process, rows, process_leaves, known, encode)
    count = len(numbers)
    per_rank.digests, per_rank.places = rows.digests[count:], rows.places[count:]
    hashed = dict(zip(numbers, rows.digests, strict=False))
    placed = zip(rows.digests, rows.places, strict=True)
    builder = EntryBuilder()
    builder.number(place.pack for place in rows.places)
    return PackPart(
        state_hash=hash_bytes(msgspec.json.encode(leaf_digests(leaves, hashed))),
        chunks=dict(zip(numbers, placed, strict=False)),
        per_rank=tuple(per_rank.entries(builder)),
        process_leaves=tuple(process_leaves.entries(builder)),
        packs={entry.name: entry.size for entry in builder.packs(pack.size_of)},
        copies=_hash_by_holders(copy_digests(leaves, share.plans)),
    )


def assemble(leaves: Mapping[str, Leaf], parts: Sequence[PackPart]) -> Written:
    """What the manifest lists, from the parts of all processes, which have one `state_hash`."""
    placed = {number: chunk for part in parts for number, chunk in part.chunks.items()}
    sizes = {name: size for part in parts for name, size in part.packs.items()}
    located: dict[str, StoredChunk] = {}
    builder = EntryBuilder()
    numbers = itertools.count()
    state: list[LeafEntry] = []
    for path, leaf in sorted(leaves.items()):
        if leaf.is_scalar:
            state.append(LeafEntry(path=path, dtype=leaf.dtype, text=leaf.text))
            continue
        chunks = [placed[next(numbers)] for _ in chunk_spans(leaf.nbytes)]
        located.update(chunks)
        state.append(builder.array(path, leaf.dtype, leaf.shape, leaf.nbytes, chunks))
    per_rank: list[LeafEntry] = []
    process_leaves: list[LeafEntry] = []
    for part in parts:
        packs = list(part.packs)

        def place(chunk: Chunk, packs: Sequence[str] = packs) -> StoredChunk:
            held = StoredChunk(packs[chunk.pack], chunk.offset, chunk.length)
            located[chunk.hash] = held
            return held

        per_rank += [builder.moved(entry, place) for entry in part.per_rank]
        process_leaves += [builder.moved(entry, place) for entry in part.process_leaves]
    state += per_rank
    for entries in (state, process_leaves):
        entries.sort(key=lambda entry: entry.path)
    return Written(state, builder.packs(sizes.__getitem__), located, process_leaves)


def leaf_digests(
    leaves: Mapping[str, Leaf], hashed: Mapping[int, str] | None = None
) -> dict[str, str]:
    """One hash for each leaf, by which processes find out whether they hold the same one.

    Dtype and shape are included, the elements of sharded arrays are not. `hashed` has the hashes of
    chunks that are known already, by number.
    """
    hashed = hashed or {}
    digests: dict[str, str] = {}
    number = 0
    for path, leaf in sorted(leaves.items()):
        if leaf.is_scalar:
            digests[path] = hash_bytes(f"{leaf.dtype}{hash_bytes(leaf.data)}".encode())
            continue
        parts = [leaf.describe()]
        if leaf.shards is None:
            for chunk in leaf.chunks():
                parts.append(hashed.get(number) or hash_bytes(whole(chunk)))
                number += 1
        else:  # each process has other elements, and `copy_digests` compares copies
            number += len(chunk_spans(leaf.nbytes))
        digests[path] = hash_bytes("".join(parts).encode())
    for path, container in containers_of(leaves).items():
        digests[f"{path} (structure)"] = hash_bytes(msgspec.json.encode(container))
    return digests


class ShardCopy(Struct, frozen=True, array_like=True):
    """A shard that several processes hold: the path of its leaf, these processes, and its hash."""

    path: str
    holders: list[int]
    digest: str


def copy_digests(
    leaves: Mapping[str, Leaf], plans: Mapping[str, ShardPlan]
) -> dict[str, ShardCopy]:
    """The shards of this process that other processes have, too, by a name that all use."""
    copies: dict[str, ShardCopy] = {}
    for path, leaf in sorted(leaves.items()):
        if leaf.shards is not None:
            for region, data in zip(leaf.shards.regions, leaf.shards.parts, strict=True):
                holders = plans[path].holders.get(region, ())
                if len(holders) > 1:
                    copies[f"{path} {region}"] = ShardCopy(path, [*holders], hash_bytes(data))
    return copies


def _hash_by_holders(copies: Mapping[str, ShardCopy]) -> dict[str, str]:
    by_holders: dict[str, list[str]] = {}
    for name, copy in sorted(copies.items()):
        holders = hash_bytes(msgspec.json.encode(copy.holders))
        by_holders.setdefault(holders, []).append(f"{name} {copy.digest}")
    return {holders: hash_bytes("\n".join(lines).encode()) for holders, lines in by_holders.items()}
