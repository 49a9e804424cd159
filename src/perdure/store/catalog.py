"""What a run directory holds, as the process knows that reads or writes it.

The writer remembers the manifests that it read or wrote. Invariant: nothing is deleted because of a
remembered manifest. A fresh snapshot compares each one with the digest in its file, and reads those
that differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from perdure.errors import CorruptionError, PruneError
from perdure.store.contents import (
    Contents,
    Manifests,
    ManifestSummary,
    PackSizes,
    pinned_steps,
    step_aside,
    summarize,
)
from perdure.store.entry_builder import StoredChunk
from perdure.store.failures import DamagedChunk, is_gone
from perdure.store.format import MANIFESTS, PACKS, QUARANTINE, manifest_name, pack_step, step_of
from perdure.store.gc_pause import gc_paused
from perdure.store.manifest import Manifest, PackEntry
from perdure.store.manifest_index import INDEX_FROM, IndexedPlaces, ManifestIndex
from perdure.store.manifest_json import HEAD_BYTES, decode_manifest, encode_manifest
from perdure.store.run_log import RunLog, line_references
from perdure.store.run_marker import folder_problem
from perdure.store.storage import Storage

READ_NEWEST = 8
"""So many of the newest manifests are read whatever the index says: retention counts on them."""


class _Names(NamedTuple):
    """What the last listing showed beside manifests, kept up to date by the writer."""

    packs: set[str]
    pinned: frozenset[int]
    quarantined: dict[str, Manifest]


class Catalog:
    """The manifests of a run directory; each is read again only if it has changed."""

    def __init__(self, storage: Storage, log: RunLog | None = None) -> None:
        self.storage = storage
        self.log = RunLog(storage) if log is None else log
        self.forget()
        self._misled: set[int] = set()
        self.indexed = False
        """Whether the index is used, as the writer does. It saves reading most of the manifests."""
        self.durable: set[int] = set()
        """Steps that this writer made durable since it took the lock."""
        self.loaded: set[int] = set()
        """Steps that were read, as by a restore."""
        self.noted: set[str] = set()
        """Damaged packs for which the log has a line."""
        self.damaged: dict[str, str] = {}
        """Packs in which damage was found, with the reason: by this process, or by an earlier writer
        that wrote a line. No save depends on a chunk in them."""
        self.suspects: set[str] = set()
        """Damaged packs whose other chunks have not been checked since."""
        self.bad: dict[tuple[str, int], str] = {}
        """(pack, offset) of chunks that this process found damaged, with the reason."""

    def forget(self) -> None:
        """Forget everything, after another writer or an operation that stopped in the middle."""
        self._summaries: dict[int, ManifestSummary] = {}
        self._decoded: dict[int, Manifest] = {}
        self._aside: dict[str, tuple[ManifestSummary, Manifest]] = {}
        self._unread: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        self._unknown: dict[int, str] = {}
        self._stored_chunks: dict[str, StoredChunk] | None = None
        self._names: _Names | None = None
        self._notes_read = False
        self._index = ManifestIndex(self.storage)
        self._rows: dict[int, ManifestSummary] = {}
        self._unindexed: set[int] = set()

    def list_again(self) -> None:
        """Note that pins, or names in quarantine, changed."""
        self._names = None

    def distrust(self, error: CorruptionError) -> None:
        """Note a damaged chunk: saves that need chunks of its pack write them again.

        Other damage, such as that of a manifest, changes nothing here.
        """
        if not isinstance(error, DamagedChunk):
            return
        if error.offset >= 0:
            self.bad[error.pack, error.offset] = str(error)
        self.distrust_pack(error.pack, str(error))

    def distrust_pack(self, pack: str, reason: str) -> None:
        """Note a damaged pack: no later save depends on a chunk in it."""
        if pack in self.damaged:
            return
        self.damaged[pack] = reason
        self.suspects.add(pack)
        self._drop_places({pack})

    def add(self, manifest: Manifest, head: bytes, located: Mapping[str, StoredChunk]) -> None:
        """Note a new checkpoint: its manifest, the first bytes of its file, and its new chunks."""
        self.stored_chunks().update(located)
        self._sizes.update((pack.name, pack.size) for pack in manifest.packs)
        self._remember(manifest, head)
        if self._names is not None:
            self._names.packs.update(pack.name for pack in manifest.packs)

    def replace(self, manifest: Manifest, head: bytes = b"") -> None:
        """Note that a manifest was replaced by this one, of the same checkpoint.

        `head` are the first bytes of its file; without it they are computed once they are needed.
        """
        self._remember(manifest, head)
        self._stored_chunks = self._names = None

    def remove(self, step: int) -> None:
        """Note that the manifest of a step is gone, and what it needs may be gone, too."""
        self.durable.discard(step)
        self._forget_step(step)
        self._unread.pop(step, None)
        self._unknown.pop(step, None)
        self._stored_chunks = self._names = None

    def pruned(
        self,
        manifests: Iterable[int | str],
        packs: Collection[str],
        replaced: Iterable[Manifest],
    ) -> None:
        """Note that a plan was carried out.

        Args:
            manifests: The steps whose manifests are gone, and names of such in quarantine.
            packs: The packs that are gone; nothing else is.
            replaced: The manifests that were replaced.
        """
        for step in manifests:
            if isinstance(step, str):
                self._names = None
                continue
            self.durable.discard(step)
            self._forget_step(step)
            self._unread.pop(step, None)
            self._unknown.pop(step, None)
        self._drop_places(packs)
        for pack in packs:
            self._sizes.pop(pack, None)
        if self._names is not None:
            self._names.packs.difference_update(packs)
        for manifest in replaced:
            self.replace(manifest)

    def stored_chunks(self, *, fresh: bool = False) -> dict[str, StoredChunk]:
        """Places of the chunks of readable checkpoints, by hash.

        Their packs had their full size when they were last looked at, and are not known to be damaged.
        `agrees` tells afterwards whether the packs that were used still have that size. A process
        beside the one writer asks for `fresh` ones: only manifests that did not change are remembered.
        """
        if fresh:
            self._stored_chunks, self._sizes, self._notes_read = None, {}, False
        if self._stored_chunks is None:
            summaries = self._read(fresh)
            self._read_notes()
            stored: dict[str, StoredChunk] = {}
            if self.indexed and self._index.segments:
                stored = IndexedPlaces(self._index, self._places_of)
            for step in summaries:
                if (manifest := self._decoded.get(step)) is not None:
                    stored.update(self._places(manifest))
            self._stored_chunks = stored
        return self._stored_chunks

    def write_index(self) -> None:
        """Write what the index lacks, once that is much, and give the memory of manifests back.

        The index can do without it, so an error of the storage is ignored.
        """
        if not self.indexed or len(self._unindexed) < INDEX_FROM:
            return
        with suppress(OSError, MemoryError):
            steps = sorted(self._unindexed & self._summaries.keys())
            # Nobody else writes, from the read of a manifest to the write below, which checks the lock.
            # So the versions that are listed in between are those of what was read.
            entries = self.storage.entries(MANIFESTS)
            for step in steps:
                summary = self._with_head(step, self._summaries[step])
                entry = entries.get(manifest_name(step))
                if entry is not None and entry.version != summary.version:
                    self._summaries[step] = msgspec.structs.replace(summary, version=entry.version)
            fresh = {step: self._decoded.get(step) for step in steps}
            self._index.write(self._summaries, fresh)
            self._unindexed = set()
            for step in sorted(self._decoded)[:-INDEX_FROM]:
                del self._decoded[step]

    def agrees(self, packs: Iterable[PackEntry]) -> bool:
        """Whether packs have the sizes that `stored_chunks` relied on."""
        return all(self._sizes.get(pack.name, pack.size) == pack.size for pack in packs)

    def contents(self, *, fresh: bool, complete: bool) -> Contents:
        """A snapshot of everything; raises `PruneError` if the storage fails.

        Args:
            fresh: Compare manifests that are remembered with their files. Without it the one writer
                does not look at the storage again.
            complete: Read every manifest and list every pack with its size, as for a reader. Without it
                manifests and sizes are read when they are needed, and no pack is looked for that the
                one writer has not seen.
        """
        try:
            if self._names is not None and not (fresh or complete):
                return self._snapshot(self._summaries, self._names)
            return self._contents(fresh, complete)
        except OSError as error:
            raise PruneError(
                f"{self.storage.where}: cannot be listed: {error}. Nothing was changed; try again."
            ) from error

    def _contents(self, fresh: bool, complete: bool) -> Contents:
        summaries = self._read(fresh, complete)
        unknown = list(self._unknown.values())
        aside, lost = self._read_aside(unknown)
        if self._names is not None and not complete:
            packs = self._names.packs
        else:
            packs = self._read_packs()
            if complete:
                packs = self._sized(packs, unknown)
        is_empty = not summaries and not self._unread
        if is_empty and (why := self.log.view.lost_manifests(self.storage, for_deletion=True)):
            unknown.append(why)
        names = _Names(packs, pinned_steps(self.storage), aside)
        broken = {
            step: f"{self.storage.where}: step {step} needs {pack}, which is missing."
            for step, summary in summaries.items()
            for pack in summary.packs
            if pack not in packs
        }
        if broken and not fresh:
            return self._contents(True, complete)  # a compaction may have moved the chunks
        self._names = None if unknown or lost or self._unread or broken else names
        snapshot = self._snapshot(summaries, names, lost, unknown, broken)
        if complete:
            return replace(snapshot, packs={pack: self._size(pack) for pack in packs})
        return snapshot

    def _snapshot(
        self,
        summaries: Mapping[int, ManifestSummary],
        names: _Names,
        lost: Iterable[str] = (),
        unknown: Iterable[str] = (),
        broken: Mapping[int, str] = MappingProxyType({}),
    ) -> Contents:
        return Contents(
            manifests=Manifests(summaries, self._decoded, self._manifest),
            summaries={step: each for step, each in summaries.items() if step not in broken},
            unreadable=dict(self._unread),
            broken={**self._unread, **broken},
            quarantined=dict(sorted(names.quarantined.items())),
            lost=tuple(sorted(lost)),
            packs=PackSizes(names.packs, self._size),
            pinned=names.pinned,
            unknown=tuple(unknown),
            frozen=self._why_frozen(),
        )

    def _why_frozen(self) -> str | None:
        """Why nothing may be deleted: the log lacks lines, or a folder is that of another run."""
        problem = self.log.view.problem_with(line_references(self._decoded.values()))
        return problem or folder_problem(self.storage, self.log.run)

    def _read(self, fresh: bool, complete: bool = False) -> dict[int, ManifestSummary]:
        """Summaries of the readable manifests by step, oldest first; `_unread` has the others.

        With `complete`, the manifests themselves are in memory afterwards.
        """
        self._unread = {}
        self._unknown = {}
        entries = self.storage.entries(MANIFESTS)
        # Names of manifests sort as their steps do.
        steps = {step: name for name in sorted(entries) if (step := step_of(name)) is not None}
        summaries: dict[int, ManifestSummary] = {}
        if self.indexed:
            self._use_index([*steps][:-READ_NEWEST])
        for step, name in steps.items():
            if complete and step not in self._decoded:
                self._summaries.pop(step, None)
            if not fresh and step in self._summaries:
                summaries[step] = self._summaries[step]
                continue
            where = f"{self.storage.where}/{name}"
            try:
                summaries[step] = self._summary(name, entries[name].version, step)
            except FileNotFoundError:
                continue
            except ConnectionError:
                # There is no answer, so the next manifest could not be read either.
                raise
            except OSError as error:
                self._unread[step] = self._unknown[step] = f"{where}: cannot be read: {error}."
            except CorruptionError as error:
                self._unread[step] = str(error)
        for step in self._summaries.keys() - summaries.keys():
            self._forget_step(step)
            self._stored_chunks = None
        self._summaries = dict(summaries)
        return summaries

    def _use_index(self, steps: Sequence[int]) -> None:
        """Take the summaries of these steps from the index, where they are not known."""
        missing = [step for step in steps if step not in self._summaries]
        with gc_paused(len(missing)):
            if missing:
                self._rows = self._index.summaries()
            for step in missing:
                if step in self._rows and step not in self._misled:
                    self._summaries[step] = self._rows[step]

    def _summary(self, name: str, version: str, step: int) -> ManifestSummary:
        """The summary of a manifest, which is read unless its file has the digest remembered."""
        summary = self._summaries.get(step)
        if summary is not None:
            summary = self._with_head(step, summary)
            if self._is_same(name, version, summary):
                if version != summary.version:
                    summary = msgspec.structs.replace(summary, version=version)
                    self._summaries[step] = summary
                    self._unindexed.add(step)
                return summary
            self._forget_step(step)
            self._misled.add(step)
            self._stored_chunks = None
        data = self.storage.read(name)
        manifest = decode_manifest(data, f"{self.storage.where}/{name}", step)
        # The version was listed before the read, so it may be that of older bytes: it is not kept.
        summary = self._remember(manifest, data)
        row = self._rows.get(step)
        if row is not None and row.head == summary.head:  # with the version of these bytes
            summary = self._summaries[step] = row
            self._unindexed.discard(step)
        return summary

    def _with_head(self, step: int, summary: ManifestSummary) -> ManifestSummary:
        """The summary of a step, with the first bytes of its file if they were not known yet."""
        if not summary.head and (manifest := self._decoded.get(step)) is not None:
            summary = summarize(manifest, encode_manifest(manifest)[:HEAD_BYTES])
            self._summaries[step] = summary
        return summary

    def _remember(self, manifest: Manifest, data: bytes) -> ManifestSummary:
        """Remember a manifest that was read or written; `data` are the first bytes of its file."""
        summary = self._summaries[manifest.step] = summarize(manifest, data)
        self._decoded[manifest.step] = manifest
        self._unindexed.add(manifest.step)
        return summary

    def _is_same(self, name: str, version: str, summary: ManifestSummary) -> bool:
        """Whether a file still has the digest that is remembered."""
        if version and version == summary.version:
            return True
        head = bytearray(HEAD_BYTES)
        self.storage.read_into(name, 0, memoryview(head))
        return head == summary.head.encode()

    def _manifest(self, step: int) -> Manifest:
        """Read a manifest whose summary is remembered; raises `CorruptionError` if it has changed."""
        name = manifest_name(step)
        try:
            data = self.storage.read(name)
            manifest = decode_manifest(data, f"{self.storage.where}/{name}", step)
        except ConnectionError:
            raise
        except (OSError, CorruptionError):
            self._lose(step)
            raise
        known = self._summaries.get(step)
        if known is None or data[:HEAD_BYTES] != known.head.encode():
            self._lose(step)
            raise CorruptionError(f"{self.storage.where}/{name}: has changed since it was read.")
        self._decoded[step] = manifest
        return manifest

    def _lose(self, step: int) -> None:
        """Note that the manifest of a step is not what is remembered: it is read again."""
        self._forget_step(step)
        self._misled.add(step)
        self._names = None

    def _read_aside(self, unknown: list[str]) -> tuple[dict[str, Manifest], list[str]]:
        """The readable manifests in quarantine by name, and the names of those that are damaged.

        They are always compared: a name there may be removed and used again.
        """
        lost = []
        aside: dict[str, tuple[ManifestSummary, Manifest]] = {}
        for name, entry in self.storage.entries(QUARANTINE).items():
            version = entry.version
            if not name.endswith(".json"):
                continue
            try:
                known = self._aside.get(name)
                if known is not None and self._is_same(name, version, known[0]):
                    summary = msgspec.structs.replace(known[0], version=version)
                    aside[name] = summary, known[1]
                    continue
                data = self.storage.read(name)
                place = f"{self.storage.where}/{name}"
                manifest = decode_manifest(data, place, step_aside(name))
                if self.log.view.is_foreign(name, manifest):
                    lost.append(name)
                else:
                    aside[name] = summarize(manifest, data), manifest
            except ConnectionError:
                raise
            except FileNotFoundError:
                continue
            except CorruptionError:
                lost.append(name)
            except OSError as error:
                if is_gone(error):
                    lost.append(name)  # a pipe or a device
                else:
                    unknown.append(f"{name}: {error}")
        self._aside = aside
        return {name: manifest for name, (_, manifest) in aside.items()}, lost

    def _read_packs(self) -> set[str]:
        """The names of the packs that are there. Their sizes are remembered if the listing has them."""
        packs = set()
        for name, entry in self.storage.entries(PACKS).items():
            pack = name.removeprefix(PACKS)
            if pack_step(pack) >= 0:
                packs.add(pack)
                if entry.size is not None:
                    self._sizes.setdefault(pack, entry.size)
        return packs

    def _sized(self, packs: set[str], unknown: list[str]) -> set[str]:
        """Those of `packs` that have a size; why others have none is added to `unknown`."""
        sized = set()
        for pack in packs:
            try:
                self._size(pack)
                sized.add(pack)
            except FileNotFoundError:
                continue
            except ConnectionError:
                raise
            except OSError as error:
                unknown.append(f"{PACKS}{pack}: {error}")
        return sized

    def _forget_step(self, step: int) -> None:
        self._summaries.pop(step, None)
        self._decoded.pop(step, None)
        self._unindexed.discard(step)

    def _drop_places(self, packs: Collection[str]) -> None:
        if self._stored_chunks is not None and packs:
            stored = self._stored_chunks
            for digest in [key for key, place in stored.items() if place.pack in packs]:
                del stored[digest]

    def _size(self, pack: str) -> int:
        """Bytes of a pack that is listed. They are remembered, because packs never change."""
        if pack not in self._sizes:
            self._sizes[pack] = self.storage.size(PACKS + pack)
        return self._sizes[pack]

    def _read_notes(self) -> None:
        """Read which packs an earlier writer found damaged."""
        if not self._notes_read:
            for pack, reason in self.log.view.damaged.items():
                self.noted.add(pack)
                self.distrust_pack(pack, reason)
            self._notes_read = True

    def _places_of(self, step: int) -> Iterable[tuple[str, StoredChunk]]:
        """`_places` of a step to which the index points; none if there is no such checkpoint."""
        if step not in self._summaries:
            return ()
        manifest = self._decoded.get(step)
        return self._places(self._manifest(step) if manifest is None else manifest)

    def _places(self, manifest: Manifest) -> Iterator[tuple[str, StoredChunk]]:
        """(hash, place) of the chunks of a manifest that a save may depend on."""
        packs = manifest.packs
        usable = [pack.name not in self.damaged and self._is_whole(pack) for pack in packs]
        for leaf in manifest.every_leaf():
            for chunk in leaf.chunks:
                if usable[chunk.pack]:
                    name = packs[chunk.pack].name
                    yield chunk.hash, StoredChunk(name, chunk.offset, chunk.length)

    def _is_whole(self, pack: PackEntry) -> bool:
        """Whether a pack has the size that a manifest states."""
        if not self._sizes and self.storage.lists_versions:
            self._read_packs()
        try:
            return self._size(pack.name) == pack.size
        except OSError:
            return False
