"""The contents of a run directory, for plans and deduplication: manifests and names, but no chunks.

The writer remembers the manifests that it read or wrote. Invariant: nothing is deleted because of a
remembered manifest. A fresh snapshot compares each one with the digest in its file, and reads those
that differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from perdure.errors import CorruptionError, PruneError
from perdure.store.entry_builder import Held
from perdure.store.failures import DamagedChunk, is_gone
from perdure.store.format import (
    MANIFESTS,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    manifest_name,
    pack_step,
    step_of,
)
from perdure.store.manifest import Manifest, PackEntry
from perdure.store.manifest_json import HEAD_BYTES, decode_manifest, encode_manifest
from perdure.store.quarantine import damage_notes, is_quarantined
from perdure.store.storage import FolderStorage, Storage, VersionedStorage


@dataclass(frozen=True)
class Contents:
    """A snapshot of names, manifests and sizes.

    `manifests` are the readable ones by step, `unreadable` the others with the reason;
    `quarantined` the readable manifests in quarantine by name, `lost` the names there that are
    damaged; `packs` the packs present with their sizes. `unknown` says which manifests, of checkpoints
    and in quarantine, could not be read for a reason other than damage: they may need any pack.
    """

    manifests: Mapping[int, Manifest]
    unreadable: Mapping[int, str]
    quarantined: Mapping[str, Manifest]
    lost: tuple[str, ...]
    packs: Mapping[str, int]
    pinned: frozenset[int]
    unknown: tuple[str, ...] = ()


class _Known(NamedTuple):
    """A manifest that was read or written: the head of its file, and its version where known."""

    head: bytes | None
    version: str
    manifest: Manifest


class Catalog:
    """The manifests of a run directory; each is read again only if it has changed."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._known: dict[str, _Known] = {}
        self._unread: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        self._unknown: dict[int, str] = {}
        self._held: dict[str, Held] | None = None
        self._notes_read = False
        self.durable: set[int] = set()
        """Steps that this writer made durable since it took the lock."""
        self.noted: set[str] = set()
        """Damaged packs for which there is a note in quarantine."""
        self.damaged: dict[str, str] = {}
        """Packs in which damage was found, with the reason: by this process, or by an earlier writer
        that left a note. No save depends on a chunk in them."""
        self.suspects: set[str] = set()
        """Damaged packs whose other chunks have not been checked since."""
        self.bad: dict[tuple[str, int], str] = {}
        """(pack, offset) of chunks that this process found damaged, with the reason."""

    def forget(self) -> None:
        """Forget everything, after another writer or an operation that stopped in the middle."""
        self._held = None
        self._notes_read = False
        self._known = {}
        self._unread = {}
        self._unknown = {}
        self._sizes = {}

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
        if self._held is not None:
            self._held = {digest: held for digest, held in self._held.items() if held.pack != pack}

    def add(self, manifest: Manifest, head: bytes, located: Mapping[str, Held]) -> None:
        """Note a new checkpoint: its manifest, the first bytes of its file, and its new chunks."""
        self.held().update(located)
        self._sizes.update((pack.name, pack.size) for pack in manifest.packs)
        self._known[manifest_name(manifest.step)] = _Known(head, "", manifest)

    def replace(self, manifest: Manifest, head: bytes | None = None) -> None:
        """Note that a manifest was replaced by this one, of the same checkpoint.

        `head` are the first bytes of its file; without it they are computed once they are needed.
        """
        self._known[manifest_name(manifest.step)] = _Known(head, "", manifest)
        self._held = None

    def remove(self, step: int) -> None:
        """Note that the manifest of a step is gone."""
        self.durable.discard(step)
        self._known.pop(manifest_name(step), None)
        self._unread.pop(step, None)
        self._unknown.pop(step, None)
        self._held = None

    def held(self) -> dict[str, Held]:
        """Places of the chunks of readable checkpoints, by hash.

        Their packs had their full size when they were last looked at, and are not known to be damaged.
        `agrees` tells afterwards whether the packs that were used still have that size.
        """
        if self._held is None:
            manifests = self._read(fresh=False)
            self._read_notes()
            self._held = dict(self._chunks(manifests.values()))
        return self._held

    def agrees(self, packs: Iterable[PackEntry]) -> bool:
        """Whether packs have the sizes that `held` relied on."""
        return all(self._sizes.get(pack.name, pack.size) == pack.size for pack in packs)

    def contents(self, *, fresh: bool) -> Contents:
        """A snapshot of everything.

        With `fresh`, manifests that are remembered are compared with their files first; without it,
        only names and new manifests are read. Raises `PruneError` if the storage fails.
        """
        try:
            return self._contents(fresh)
        except OSError as error:
            raise PruneError(
                f"{self.storage.where}: cannot be listed: {error}. Nothing was changed; try again."
            ) from error

    def _contents(self, fresh: bool) -> Contents:
        manifests = self._read(fresh)
        whole: dict[str, Manifest] = {}
        lost = []
        unknown = list(self._unknown.values())
        versions = self._versions(QUARANTINE)
        for name, version in versions.items():
            if name.endswith(".json") and is_quarantined(name):
                try:  # always compared: a name there may be removed and used again
                    whole[name] = self._manifest(name, version, None, fresh=True)
                except ConnectionError:
                    raise
                except CorruptionError:
                    lost.append(name)
                except OSError as error:
                    if not is_gone(error):
                        unknown.append(f"{name}: {error}")
        self._drop(QUARANTINE, versions)
        packs = {}
        for name in self.storage.list(PACKS):
            if name.endswith(TEMP_SUFFIX):
                continue
            try:
                packs[name.removeprefix(PACKS)] = self._size(name.removeprefix(PACKS))
            except FileNotFoundError:
                continue
            except ConnectionError:
                raise
            except OSError as error:
                unknown.append(f"{name}: {error}")
        if why := lost_manifests(self.storage):
            unknown.append(why)
        return Contents(
            manifests=manifests,
            unreadable=dict(self._unread),
            quarantined=dict(sorted(whole.items())),
            lost=tuple(sorted(lost)),
            packs=packs,
            pinned=pinned_steps(self.storage),
            unknown=tuple(unknown),
        )

    def _read(self, fresh: bool) -> dict[int, Manifest]:
        """The readable manifests by step, oldest first; `_unread` has the others."""
        manifests: dict[int, Manifest] = {}
        self._unread = {}
        self._unknown = {}
        versions = self._versions(MANIFESTS)
        for name, step in sorted((name, step_of(name)) for name in versions):
            if step is None:
                continue
            where = f"{self.storage.where}/{name}"
            try:
                manifests[step] = self._manifest(name, versions[name], step, fresh)
            except FileNotFoundError:
                continue
            except ConnectionError:
                # There is no answer, so the next manifest could not be read either.
                raise
            except OSError as error:
                self._unread[step] = self._unknown[step] = f"{where}: cannot be read: {error}."
            except CorruptionError as error:
                self._unread[step] = str(error)
        self._drop(MANIFESTS, versions)
        return manifests

    def _drop(self, prefix: str, present: Collection[str]) -> None:
        for name in [name for name in self._known if name.startswith(prefix)]:
            if name not in present:
                del self._known[name]
                self._held = None

    def _manifest(self, name: str, version: str, step: int | None, fresh: bool) -> Manifest:
        known = self._known.get(name)
        if known is not None:
            if not fresh or (version and version == known.version):
                return known.manifest
            expected = known.head or encode_manifest(known.manifest)[:HEAD_BYTES]
            head = bytearray(HEAD_BYTES)
            if self.storage.read_into(name, 0, memoryview(head)) and head == expected:
                self._known[name] = known._replace(head=expected, version=version)
                return known.manifest
            del self._known[name]
            self._held = None
        data = self.storage.read(name)
        manifest = decode_manifest(data, f"{self.storage.where}/{name}", step)
        # The version was listed before the read, so it may be that of older bytes: it is not kept.
        self._known[name] = _Known(data[:HEAD_BYTES], "", manifest)
        return manifest

    def _versions(self, prefix: str) -> Mapping[str, str]:
        if isinstance(self.storage, VersionedStorage):
            return self.storage.versions(prefix)
        return dict.fromkeys(self.storage.list(prefix), "")

    def _size(self, pack: str) -> int:
        """Bytes of a pack that is listed. They are remembered, because packs never change."""
        if pack not in self._sizes:
            self._sizes[pack] = self.storage.size(PACKS + pack)
        return self._sizes[pack]

    def _read_notes(self) -> None:
        """Read which packs an earlier writer found damaged."""
        if not self._notes_read:
            for pack, reason in damage_notes(self.storage):
                self.noted.add(pack)
                self.distrust_pack(pack, reason)
            self._notes_read = True

    def _chunks(self, manifests: Iterable[Manifest]) -> Iterator[tuple[str, Held]]:
        sizes: dict[str, int | None] = {}
        for manifest in manifests:
            for pack in manifest.packs:
                if pack.name not in sizes:
                    try:
                        sizes[pack.name] = self.storage.size(PACKS + pack.name)
                    except OSError:
                        sizes[pack.name] = None
                    if pack.name in self.damaged:
                        sizes[pack.name] = None
            for leaf in manifest.every_leaf():
                for chunk in leaf.chunks:
                    pack = manifest.packs[chunk.pack]
                    if sizes[pack.name] == pack.size:
                        yield chunk.hash, Held(pack.name, chunk.offset, chunk.length)
        self._sizes.update((name, size) for name, size in sizes.items() if size is not None)


def committed_steps(storage: Storage) -> list[int]:
    """Steps that have a manifest, oldest first."""
    return sorted(step for name in storage.list(MANIFESTS) if (step := step_of(name)) is not None)


def lost_manifests(storage: Storage) -> str | None:
    """Why packs without any manifest are not leftovers; None if they are.

    A writer makes the directory of manifests before the first pack, and nothing removes it. Runs of
    earlier versions may lack it after a crash of the first save, which left packs of one step.
    """
    if not isinstance(storage, FolderStorage) or storage.has_folder(MANIFESTS):
        return None
    names = (name.removeprefix(PACKS) for name in storage.list(PACKS))
    steps = {step for name in names if (step := pack_step(name)) >= 0}
    if len(steps) < 2:
        return None
    return (
        f"{storage.where}: the directory {MANIFESTS} is gone, and {PACKS} holds data of {len(steps)} "
        f"saves. Bring it back; to begin anew, use another run directory or remove {PACKS} by hand"
    )


def pinned_steps(storage: Storage) -> frozenset[int]:
    """Steps that no deletion may touch."""
    names = (name.removeprefix(PINS) for name in storage.list(PINS))
    return frozenset(int(name) for name in names if name.isdecimal())
