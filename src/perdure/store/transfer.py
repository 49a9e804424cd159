"""The chunks of a checkpoint that one run directory takes over from another: by links, or copied."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Mapping
from functools import cache

import msgspec

from perdure.errors import CorruptionError, StepNotFoundError
from perdure.store.committer import BYTES_PER_SAVE, ensure_free_bytes
from perdure.store.compact import (
    LiveChunks,
    check_chunks,
    copy_chunks,
    live_chunks,
    relocated,
    relocated_size,
)
from perdure.store.entry_builder import StoredChunk
from perdure.store.failures import DamagedChunk
from perdure.store.format import PACKS, pack_name
from perdure.store.local import LocalStorage
from perdure.store.manifest import Manifest
from perdure.store.run import Run

LINK_SHARE = 0.5
"""A fork links a pack when it needs at least this share of its bytes, and copies chunks otherwise."""


def lacking(manifest: Manifest, held: Container[str]) -> dict[str, LiveChunks]:
    """The places of the chunks of a checkpoint whose hashes are not `held`."""
    live = live_chunks([manifest], {pack.name for pack in manifest.packs})
    left = {
        name: {offset: chunk for offset, chunk in chunks.items() if chunk[0] not in held}
        for name, chunks in live.items()
    }
    return {name: chunks for name, chunks in left.items() if chunks}


def transfer(
    source: Run,
    manifest: Manifest,
    target: Run,
    held: Mapping[str, StoredChunk],
    *,
    link: bool,
    replace: bool,
    before: Callable[[], None],
) -> int:
    """Link or copy the chunks that `held` lacks, then commit; returns the bytes written.

    A compaction may move the chunks of the source meanwhile.
    """
    step = manifest.step

    def find_again(error: DamagedChunk) -> dict[str, LiveChunks]:
        nonlocal manifest
        again = source.manifest(step)
        if again == manifest:
            raise CorruptionError(str(error)) from error
        if again.fingerprint != manifest.fingerprint:
            raise StepNotFoundError(
                f"{source.where}: step {step} was deleted and saved again during the copy. Copy it "
                f"again."
            )
        manifest = again
        return lacking(manifest, places)

    new = _link(source, target, step, lacking(manifest, held)) if link else {}
    needed = {chunk.hash for leaf in manifest.every_leaf() for chunk in leaf.chunks}
    places = {digest: held[digest] for digest in needed if digest in held} | new
    copied: dict[str, StoredChunk] = {}
    if live := lacking(manifest, places):
        ensure_free_bytes(target.storage, relocated_size(live) + BYTES_PER_SAVE)
        copied = copy_chunks(source.storage, target.storage, step, live, find_again, before)
        places |= copied
    moved = relocated(
        manifest,
        lambda _, chunk: places[chunk.hash],
        cache(lambda pack: target.storage.size(PACKS + pack)),
    )
    # The log of the target is another chain, and a fork another run.
    moved = msgspec.structs.replace(moved, log=None, run=target.log.run)
    target.committer.commit_manifest(moved, new | copied, replace=replace)
    return sum(place.length for place in copied.values())


def _link(
    source: Run, target: Run, step: int, live: Mapping[str, LiveChunks]
) -> dict[str, StoredChunk]:
    """Make hard links of packs that are mostly needed; returns the places of their chunks."""
    places: dict[str, StoredChunk] = {}
    origin, storage = source.storage, target.storage
    if not (isinstance(origin, LocalStorage) and isinstance(storage, LocalStorage)):
        return places
    for pack, chunks in live.items():
        name = pack_name(step, 0, secrets.token_hex(4))
        try:
            size = origin.size(PACKS + pack)
            needed = sum(length for _, length, _ in chunks.values())
            linked = needed >= LINK_SHARE * size and storage.link_from(
                origin, PACKS + pack, PACKS + name
            )
        except FileNotFoundError:
            linked = False  # compacted meanwhile; its chunks are copied from their new places
        if linked:
            try:
                check_chunks(storage, {name: chunks})
            except DamagedChunk as error:
                raise CorruptionError(
                    f"{source.where}: step {step} cannot be forked, {PACKS}{pack} is damaged: {error} "
                    f"`perdure verify {source.where}` lists what is damaged."
                ) from error
            places |= {
                digest: StoredChunk(name, offset, length)
                for offset, (digest, length, _) in chunks.items()
            }
    return places
