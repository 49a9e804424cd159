"""What the writer of a run does about damage: quarantine, and chunks that are written again.

After a save the writer reads a part of the shared chunks again (`reread`). It writes those that are
damaged once more from the state in memory, and lets all manifests that need them read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from perdure.errors import (
    CorruptionError,
    SaveError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store.catalog import Catalog
from perdure.store.codec import Encode
from perdure.store.compact import compact, rewrite
from perdure.store.format import PACKS, manifest_name, steps_text
from perdure.store.leaf import AnyLeaf, Leaf
from perdure.store.loading import read_manifest
from perdure.store.manifest import Manifest
from perdure.store.pack_writer import write_pack
from perdure.store.reader import damaged_chunks, verify_leaves
from perdure.store.reread import Cursor
from perdure.store.rollback import rolled_back
from perdure.store.run_events import Damaged
from perdure.store.run_marker import require_folders
from perdure.store.shard_plan import whole


class DamageHandler:
    """Sets aside and repairs what `catalog` knows to be damaged. Only the writer may call it.

    `now` returns the time as the log has it.
    """

    def __init__(self, catalog: Catalog, encode: Encode | None, now: Callable[[], str]) -> None:
        self.notes: list[str] = []
        """What the user should know about damage. Whoever shows these texts empties the list."""
        self.deferred: set[int] = set()
        """Steps that `quarantine_deferred` looks at."""
        self._storage = catalog.storage
        self._catalog = catalog
        self._log = catalog.log
        self._encode = encode
        self._now = now
        self._cursor = Cursor()
        self._unrepaired: list[int] = []

    def quarantine(self, step: int, reason: str) -> str:
        """Move the manifest of a step to quarantine, with the reason; returns its new name."""
        target = self._quarantine(manifest_name(step), reason)
        self._catalog.remove(step)
        self._record_damage()
        return target

    def quarantine_pack(self, pack: str, reason: str) -> str:
        """Move a pack that no checkpoint needs to quarantine; returns its new name."""
        return self._quarantine(PACKS + pack, reason)

    def quarantine_deferred(self) -> None:
        """Read the `deferred` steps again, and quarantine those that are damaged."""
        while self.deferred:
            step = self.deferred.pop()
            try:
                verify_leaves(self._storage, read_manifest(self._storage, step))
            except CorruptionError as error:
                self._catalog.distrust(error)
                self.quarantine(step, str(error))
            except (StepNotFoundError, UnreachableError):
                continue

    def evacuate(self, packs: Collection[str]) -> tuple[dict[int, Manifest], dict[str, str]]:
        """`Run.evacuate`, which gives the contract."""
        needed = {
            pack.name: f"step {aside.manifest.step}, which was rolled back, reads from it"
            for aside in rolled_back(self._storage, self._log.view)
            for pack in aside.manifest.packs
        }
        stay = {name: needed[name] for name in packs if name in needed}
        movable = [name for name in packs if name not in stay]
        replaced, left = compact(
            self._storage, self._catalog.contents(fresh=True, complete=True).manifests, movable
        )
        for manifest in replaced.values():
            self._catalog.replace(manifest)
        return replaced, {**{name: str(error) for name, error in left.items()}, **stay}

    def check_shared(self, manifest: Manifest, leaves: Mapping[str, AnyLeaf], nbytes: int) -> None:
        """After a commit: read a part of the shared chunks again, and repair what is damaged.

        Errors become notes, because the checkpoint is committed already.

        Args:
            manifest: The checkpoint that was committed.
            leaves: Its leaves, still in memory. Those of other processes cannot be repaired from here.
            nbytes: Bytes of the state; they decide how much is read again.
        """
        try:
            if due := self._cursor.advance(manifest, nbytes):
                errors = damaged_chunks(self._storage, manifest, due)
                for error in errors:
                    self._catalog.distrust(error)
                if errors:
                    self._examine_suspects()
                    self._write_again(manifest, leaves)
            self._examine_suspects()
            if self._catalog.bad:
                self._rewrite()
        except (OSError, StoreError) as error:
            reason = f"a chunk that it shares could not be checked or repaired: {error}"
            self.notes = [f"{self._storage.where}: step {manifest.step} is committed, but {reason}"]

    def _quarantine(self, name: str, reason: str) -> str:
        self._catalog.list_again()
        try:
            require_folders(self._storage, self._log.run)
            return self._log.set_aside(name, reason, self._now())
        except (OSError, CorruptionError) as error:
            raise SaveError(
                f"{self._storage.where}: {name} cannot be moved aside: {error}"
            ) from error

    def _record_damage(self) -> None:
        """Tell the next writer of damaged packs, which has not seen the damage itself."""
        for pack, reason in self._catalog.damaged.items():
            if pack not in self._catalog.noted:
                with suppress(OSError, CorruptionError):  # this process knows it anyway
                    self._log.append(Damaged(pack=pack, reason=reason, time=self._now()))
                    self._catalog.noted.add(pack)

    def _examine_suspects(self) -> None:
        """Read every chunk that checkpoints need from packs in which a damaged one was found."""
        if not self._catalog.suspects:
            return
        self._record_damage()
        manifests = self._catalog.contents(fresh=True, complete=True).manifests
        suspects, seen = self._catalog.suspects, set(self._catalog.bad)
        for manifest in manifests.values():
            due = []
            for leaf in manifest.every_leaf():
                for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                    place = manifest.packs[chunk.pack].name, chunk.offset
                    if place[0] in suspects and place not in seen:
                        seen.add(place)
                        due.append((leaf, chunk, size))
            for error in damaged_chunks(self._storage, manifest, due):
                self._catalog.distrust(error)
        suspects.clear()

    def _write_again(self, manifest: Manifest, leaves: Mapping[str, AnyLeaf]) -> None:
        """Write the damaged chunks of a checkpoint again, from the state that was just saved."""
        again: dict[str, Leaf] = {}
        for entry in manifest.leaves:
            leaf = leaves.get(entry.path)
            if not isinstance(leaf, Leaf) or entry.text is not None:
                continue
            for chunk, data in zip(entry.chunks, map(whole, leaf.chunks()), strict=True):
                if (manifest.packs[chunk.pack].name, chunk.offset) in self._catalog.bad:
                    again[f"{len(again):012d}"] = Leaf(leaf.dtype, (len(data),), data, frozen=True)
        written = write_pack(self._storage, manifest.step, again, {}, self._encode)
        self._catalog.stored_chunks().update(written.located)

    def _rewrite(self) -> None:
        """Let manifests read damaged chunks from where they were written again."""
        bad, held = self._catalog.bad, self._catalog.stored_chunks()
        renewed, left = rewrite(
            self._storage, self._catalog.contents(fresh=True, complete=True).manifests, bad, held
        )
        for manifest in renewed.values():
            self._catalog.replace(manifest)
        if renewed:
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
