"""Reads the shards of one process: only the chunks in which they have elements, each verified.

A chunk that lies in one shard is read into it; others pass through the memory of a few chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from perdure.store.chunk_stream import ChunkNumber, stream_chunks
from perdure.store.failures import read_error
from perdure.store.format import chunk_spans
from perdure.store.leaf import Leaf, Region, Shards
from perdure.store.manifest import Chunk, LeafEntry, Manifest
from perdure.store.reader import new_memory, read_parts, require_packs
from perdure.store.shard_chunks import place_elements
from perdure.store.shard_plan import Overlap, RegionIndex, first_element, volume
from perdure.store.storage import Storage

Regions = Mapping[str, tuple[Region, ...]]
"""The regions that this process needs, by the path of the array."""


def load_shards(
    storage: Storage, manifest: Manifest, entries: Sequence[LeafEntry], regions: Regions
) -> dict[str, Leaf]:
    """Read and verify parts of some arrays of `manifest`; raises as `load_leaves` does."""
    leaves: dict[str, Leaf] = {}
    in_place: list[tuple[LeafEntry, Chunk, memoryview]] = []
    passing: list[tuple[ChunkNumber, Shards, Sequence[Overlap]]] = []
    require_packs(storage, manifest, entries)
    for entry in entries:
        wanted = tuple(dict.fromkeys(regions[entry.path]))
        itemsize = entry.nbytes // max(1, math.prod(entry.shape))
        try:
            parts = tuple(new_memory(volume(region) * itemsize) for region in wanted)
        except (MemoryError, OSError) as error:
            what = f"{storage.where}: step {manifest.step}, leaf {entry.path!r}"
            raise read_error(error, f"a part of {what} of {entry.nbytes} bytes") from error
        shards = Shards(entry.shape, itemsize, wanted, parts)
        leaves[entry.path] = Leaf(
            entry.dtype, entry.shape, memoryview(b""), frozen=True, shards=shards
        )
        index = RegionIndex(shards.shape, itemsize, wanted)
        for number, (start, stop) in enumerate(chunk_spans(entry.nbytes)):
            if not (overlaps := index.overlaps(start, stop)):
                continue
            if (target := _memory_inside(shards, overlaps, start, stop)) is not None:
                in_place.append((entry, entry.chunks[number], target))
            else:
                passing.append(((entry, number), shards, overlaps))
    read_parts(storage, manifest, in_place)
    stream = stream_chunks(storage, manifest, [chunk for chunk, _, _ in passing])
    for (_, shards, overlaps), data in zip(passing, stream, strict=True):
        place_elements(data, shards, overlaps)
    return leaves


def _memory_inside(
    shards: Shards, overlaps: Sequence[Overlap], start: int, stop: int
) -> memoryview | None:
    """The memory of the chunk from `start` to `stop` if all of it lies in one shard."""
    region = overlaps[0].region
    count = sum(volume(overlap.part) for overlap in overlaps if overlap.region == region)
    first = first_element(shards.shape, region)
    if first is None or count * shards.itemsize != stop - start:
        return None
    offset = start - first * shards.itemsize
    return shards.parts[shards.regions.index(region)][offset : offset + stop - start]
