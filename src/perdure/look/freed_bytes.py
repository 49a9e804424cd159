"""What deleting one checkpoint would free, from the manifests alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from perdure.store.compact import LiveChunks, relocated_size
from perdure.store.garbage_collection import DEAD_SHARE
from perdure.store.manifest import Manifest


@dataclass
class _Pack:
    """A pack: its size, the chunks that are read from it, and by step the offsets of those read."""

    size: int
    chunks: LiveChunks = field(default_factory=dict)
    read: dict[int, set[int]] = field(default_factory=dict)


def freed_bytes(
    manifests: Mapping[int, Manifest], set_aside: Iterable[Manifest] = ()
) -> dict[int, tuple[int, int]]:
    """For each step, the bytes that deleting it alone frees, and those of its chunks that then stay.

    `perdure prune` deletes a pack that no other checkpoint reads, and copies the needed chunks out of
    one that is mostly unneeded. What it would free without a deletion does not count. It copies out of
    several packs into one; here each has its own copy, which is a few bytes more.

    Args:
        manifests: The checkpoints of a run by step.
        set_aside: Manifests in quarantine, whose packs stay as they are.
    """
    held = {pack.name for manifest in set_aside for pack in manifest.packs}
    freed = dict.fromkeys(manifests, 0)
    stays = dict.fromkeys(manifests, 0)
    for name, pack in _packs(manifests).items():
        spared = 0 if name in held else _spared(pack.size, pack.chunks)
        readers = Counter(offset for offsets in pack.read.values() for offset in offsets)
        for step, offsets in pack.read.items():
            alone = {offset for offset in offsets if readers[offset] == 1}
            gain = 0
            if name not in held and len(pack.read) == 1:
                gain = pack.size
            elif name not in held and alone:
                left = {place: chunk for place, chunk in pack.chunks.items() if place not in alone}
                gain = _spared(pack.size, left)
            kept = offsets - alone if gain else offsets
            stays[step] += sum(pack.chunks[offset][1] for offset in kept)
            freed[step] += gain - spared if gain else 0
    return {step: (freed[step], stays[step]) for step in manifests}


def _packs(manifests: Mapping[int, Manifest]) -> dict[str, _Pack]:
    packs: dict[str, _Pack] = {}
    for step, manifest in manifests.items():
        named = [packs.setdefault(pack.name, _Pack(pack.size)) for pack in manifest.packs]
        for pack in named:
            pack.read.setdefault(step, set())
        for leaf in manifest.every_leaf():
            for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                pack = named[chunk.pack]
                pack.read[step].add(chunk.offset)
                pack.chunks[chunk.offset] = (chunk.hash, chunk.length, size)
    return packs


def _spared(size: int, chunks: LiveChunks) -> int:
    """The bytes that copying `chunks` out of a pack frees; 0 if the pack stays as it is."""
    if sum(length for _, length, _ in chunks.values()) >= (1 - DEAD_SHARE) * size:
        return 0  # soon known, without an index for the copy
    spared = size - relocated_size({"": chunks})
    return spared if spared > DEAD_SHARE * size else 0
