"""What the writer of a run does about damage: quarantine, and chunks that are written again.

A save does not read the chunks of earlier saves. So after each commit the writer reads 1/PASS_SAVES
of the state's bytes, and writes damaged chunks once more from the state in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from perdure.errors import (
    CorruptionError,
    SaveError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store.codec import Encode
from perdure.store.compact import compact, rewrite
from perdure.store.directory import Directory
from perdure.store.format import manifest_name, pack_step, steps_text
from perdure.store.leaf import AnyLeaf, Leaf
from perdure.store.loading import read_manifest
from perdure.store.manifest import Chunk, LeafEntry, Manifest
from perdure.store.pack_writer import write_pack
from perdure.store.reader import damaged_chunks, verify_leaves
from perdure.store.rollback import rolled_back
from perdure.store.run_events import Damaged
from perdure.store.run_marker import require_folders
from perdure.store.shard_plan import whole
from perdure.store.view import View

PASS_SAVES = 512
"""Within so many saves of a process every shared chunk is read again."""

# Multiples of it, modulo 1, are spread evenly: the steps of restarts leave no part of the state out.
_SPREAD = (5**0.5 - 1) / 2


class DamageHandler:
    """Sets aside and repairs what `directory` knows to be damaged. Only the writer may call it.

    `now` returns the time as the log has it.
    """

    def __init__(self, directory: Directory, encode: Encode | None, now: Callable[[], str]) -> None:
        self.notes: list[str] = []
        """What the user should know about damage. Whoever shows these texts empties the list."""
        self.deferred: set[int] = set()
        """Steps that were found damaged: the writer reads them again, because another writer may
        have repaired them, and quarantines steps that are still damaged."""
        self._storage = directory.storage
        self._directory = directory
        self._log = directory.log
        self._encode = encode
        self._now = now
        self._cursor = Cursor()
        self._unrepaired: list[int] = []

    def quarantine(self, step: int, reason: str) -> str:
        """Move the manifest of a step to quarantine, with the reason; returns its new name."""
        target = self.set_aside(manifest_name(step), reason)
        self._directory.durable.discard(step)
        self._record_damage()
        return target

    def quarantine_deferred(self) -> None:
        """Look at the `deferred` steps."""
        while self.deferred:
            step = self.deferred.pop()
            try:
                verify_leaves(self._storage, read_manifest(self._storage, step, self._log.run))
            except CorruptionError as error:
                self._directory.distrust(error)
                self.quarantine(step, str(error))
            except (StepNotFoundError, UnreachableError):
                continue

    def evacuate(self, packs: Collection[str]) -> tuple[dict[int, Manifest], dict[str, str]]:
        """Copy the chunks that checkpoints read from `packs` into a new pack, and read from there.

        Returns the replaced, durable manifests by step, and the packs still needed, with the
        reason.
        """
        needed = {
            pack.name: f"step {aside.manifest.step}, which was rolled back, reads from it"
            for aside in rolled_back(View(self._storage, self._log))
            for pack in aside.manifest.packs
        }
        stay = {name: needed[name] for name in packs if name in needed}
        movable = [name for name in packs if name not in stay]
        replaced, left = compact(self._storage, self._directory.contents().manifests, movable)
        self._directory.changed()
        return replaced, {**{name: str(error) for name, error in left.items()}, **stay}

    def check_shared(self, manifest: Manifest, leaves: Mapping[str, AnyLeaf], nbytes: int) -> None:
        """After a commit: read a part of the shared chunks again, and repair what is damaged.

        Errors become notes, because the checkpoint is committed already.
        """
        try:
            if due := self._cursor.advance(manifest, nbytes):
                errors = damaged_chunks(self._storage, manifest, due)
                for error in errors:
                    self._directory.distrust(error)
                if errors:
                    self._examine_suspects()
                    self._write_again(manifest, leaves)
            self._examine_suspects()
            if self._directory.bad:
                self._rewrite()
        except (OSError, StoreError) as error:
            reason = f"a chunk that it shares could not be checked or repaired: {error}"
            self.notes[:] = [
                f"{self._storage.where}: step {manifest.step} is committed, but {reason}"
            ]

    def set_aside(self, name: str, reason: str) -> str:
        """Move a manifest, or a pack that no checkpoint needs, to quarantine; returns its new name."""
        self._directory.changed()
        try:
            require_folders(self._storage, self._log.run)
            return self._log.set_aside(name, reason, self._now())
        except (OSError, CorruptionError) as error:
            raise SaveError(
                f"{self._storage.where}: {name} cannot be moved aside: {error}"
            ) from error

    def _record_damage(self) -> None:
        """Tell the next writer of damaged packs, which has not seen the damage itself."""
        for pack, reason in self._directory.damaged.items():
            if pack not in self._log.view.damaged:
                with suppress(OSError, CorruptionError):  # this process knows it anyway
                    self._log.append(Damaged(pack=pack, reason=reason, time=self._now()))

    def _examine_suspects(self) -> None:
        """Read every chunk that checkpoints need from packs in which a damaged one was found."""
        if not self._directory.suspects:
            return
        self._record_damage()
        manifests = self._directory.contents().manifests
        suspects, seen = self._directory.suspects, set(self._directory.bad)
        for manifest in manifests.values():
            due = []
            for leaf in manifest.every_leaf():
                for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                    place = manifest.packs[chunk.pack].name, chunk.offset
                    if place[0] in suspects and place not in seen:
                        seen.add(place)
                        due.append((leaf, chunk, size))
            for error in damaged_chunks(self._storage, manifest, due):
                self._directory.distrust(error)
        suspects.clear()

    def _write_again(self, manifest: Manifest, leaves: Mapping[str, AnyLeaf]) -> None:
        """Write the damaged chunks of a checkpoint again, from the state that was just saved."""
        again: dict[str, Leaf] = {}
        for entry in manifest.leaves:
            leaf = leaves.get(entry.path)
            if not isinstance(leaf, Leaf) or entry.text is not None:
                continue
            for chunk, data in zip(entry.chunks, map(whole, leaf.chunks()), strict=True):
                if (manifest.packs[chunk.pack].name, chunk.offset) in self._directory.bad:
                    again[f"{len(again):012d}"] = Leaf(leaf.dtype, (len(data),), data, frozen=True)
        written = write_pack(self._storage, manifest.step, again, {}, self._encode)
        self._directory.stored_chunks().update(written.located)

    def _rewrite(self) -> None:
        """Let manifests read damaged chunks from where they were written again."""
        bad, held = self._directory.bad, self._directory.stored_chunks()
        renewed, left = rewrite(self._storage, self._directory.contents().manifests, bad, held)
        if renewed:
            self._directory.changed()
            self.notes.append(
                f"{self._storage.where}: chunks were damaged that steps "
                f"{steps_text(sorted(renewed))} need: {next(iter(bad.values()))} They were written "
                f"again from the state in memory"
                + (f"; steps {steps_text(left)} still lack others." if left else ".")
            )
        elif left and self._unrepaired != left:
            self.notes.append(
                f"{self._storage.where}: steps {steps_text(left)} cannot be restored: "
                f"{next(iter(bad.values()))} A save that holds the same bytes repairs them."
            )
        self._unrepaired = left
        if not left:
            bad.clear()


class Cursor:
    """The place in the state up to which shared chunks have been read again.

    The first save of a process begins at a place that its step decides, so that runs which are
    restarted often do not read the same leaves over and over.
    """

    def __init__(self) -> None:
        self._path: str | None = None
        self._chunk = 0
        self._credit = 0

    def advance(self, manifest: Manifest, nbytes: int) -> list[tuple[LeafEntry, Chunk, int]]:
        """Move on by the share of a save; returns the passed chunks: (leaf, chunk, bytes)."""
        shared = [pack_step(pack.name) != manifest.step for pack in manifest.packs]
        leaves = manifest.leaves
        if not leaves or not any(shared):
            return []
        self._credit += -(-nbytes // PASS_SAVES)
        if self._path is None:
            self._path, self._chunk = _place(leaves, manifest.step * _SPREAD % 1)
        passed: list[tuple[LeafEntry, Chunk, int]] = []
        begin = bisect_left(leaves, self._path, key=lambda leaf: leaf.path)
        for number in range(begin, begin + len(leaves) + 1):
            leaf = leaves[number % len(leaves)]
            first = self._chunk if leaf.path == self._path else 0
            sizes = leaf.sizes()
            for index in range(first, len(sizes)):
                if self._credit <= 0:
                    self._path, self._chunk = leaf.path, index
                    return passed
                chunk = leaf.chunks[index]
                self._credit -= sizes[index]
                if shared[chunk.pack]:
                    passed.append((leaf, chunk, sizes[index]))
            self._chunk = 0
        # All leaves were passed, which happens if the state shrank: the rest of the credit is dropped.
        self._credit = 0
        return passed


def _place(leaves: Sequence[LeafEntry], share: float) -> tuple[str, int]:
    """The leaf and the number of its chunk at this share of the bytes of a state."""
    left = share * sum(sum(leaf.sizes()) for leaf in leaves)
    for leaf in leaves:
        for index, size in enumerate(leaf.sizes()):
            if left < size:
                return leaf.path, index
            left -= size
    return "", 0
