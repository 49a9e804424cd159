"""The chunks of a checkpoint that one run directory takes over from another: by links, or copied."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import cache

import msgspec

from perdure.errors import CorruptionError, StepNotFoundError, StoreError
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


def never() -> bool:
    """Nobody asks to stop."""
    return False


class CopyStoppedError(StoreError):
    """A copy was asked to stop; nothing of the checkpoint was committed."""


class ChunksToCopy:
    """The chunks of one checkpoint in the source, also if a compaction moves them meanwhile.

    `held` are the places of chunks that the target has; they are not copied.
    """

    def __init__(
        self,
        source: Run,
        manifest: Manifest,
        held: Mapping[str, StoredChunk],
        stopped: Callable[[], bool] = never,
    ) -> None:
        self.where = source.where
        self.manifest = manifest
        needed = {chunk.hash for leaf in manifest.every_leaf() for chunk in leaf.chunks}
        self.stored = {digest: held[digest] for digest in needed if digest in held}
        self._source = source
        self._stopped = stopped

    def live(self) -> dict[str, LiveChunks]:
        """The places of the chunks that the target lacks."""
        lacking = {
            name: {offset: chunk for offset, chunk in chunks.items() if chunk[0] not in self.stored}
            for name, chunks in _live(self.manifest).items()
        }
        return {name: chunks for name, chunks in lacking.items() if chunks}

    def find_again(self, error: DamagedChunk) -> dict[str, LiveChunks]:
        """The new places after a chunk was not found; raises if the manifest did not change."""
        again = self._source.manifest(self.manifest.step)
        if again == self.manifest:
            raise CorruptionError(str(error)) from error
        if again.fingerprint != self.manifest.fingerprint:
            raise StepNotFoundError(
                f"{self.where}: step {again.step} was deleted and saved again during the copy. Copy it "
                f"again."
            )
        self.manifest = again
        return self.live()

    def raise_if_stopped(self) -> None:
        """Called before each read."""
        if self._stopped():
            raise CopyStoppedError(
                f"{self.where}: the copy of step {self.manifest.step} was stopped."
            )


def transfer(chunks: ChunksToCopy, source: Run, target: Run, *, link: bool, replace: bool) -> int:
    """Link or copy the chunks that the target lacks, then commit; returns the bytes written."""
    step = chunks.manifest.step
    new = _link(source, target, step, chunks.live()) if link else {}
    chunks.stored |= new
    live = chunks.live()
    written = 0
    if live:
        ensure_free_bytes(target.storage, relocated_size(live) + BYTES_PER_SAVE)
        _, copied = copy_chunks(
            source.storage, target.storage, step, live, chunks.find_again, chunks.raise_if_stopped
        )
        written = sum(place.length for place in copied.values())
        new |= copied
    places = chunks.stored | new
    manifest = relocated(
        chunks.manifest,
        lambda _, chunk: places[chunk.hash],
        cache(lambda pack: target.storage.size(PACKS + pack)),
    )
    # The log of the target is another chain.
    new_manifest = msgspec.structs.replace(manifest, log=None)
    target.committer.commit_manifest(new_manifest, new, replace=replace)
    return written


def _live(manifest: Manifest) -> dict[str, LiveChunks]:
    return live_chunks([manifest], {pack.name for pack in manifest.packs})


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
