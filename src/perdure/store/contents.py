"""What a run directory holds, as plans and deduplication need it; no chunk is read for it.

The writer remembers the manifests that it read or wrote. Invariant: nothing is deleted because of what
is remembered. A fresh snapshot compares each remembered manifest with the digest in its file, and reads
those that differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from perdure.errors import CorruptionError
from perdure.store.failures import DamagedChunk, is_gone
from perdure.store.format import (
    MANIFESTS,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    manifest_name,
    step_of,
)
from perdure.store.manifest import Manifest, PackRecord
from perdure.store.manifest_json import HEAD_BYTES, decode_manifest, encode_manifest
from perdure.store.storage import Storage, VersionedStorage
from perdure.store.writer import Held

REASON_SUFFIX = ".reason.json"


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

    head: bytes
    version: str
    manifest: Manifest


class Catalog:
    """Reads a run directory's manifests, each of them again only when it has changed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, _Known] = {}
        self._unread: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        self._unknown: dict[int, str] = {}
        self._held: dict[str, Held] | None = None
        self._notes_read = False
        self.noted: set[str] = set()
        """Damaged packs for which there is a note in quarantine."""
        self.damaged: dict[str, str] = {}
        """Packs in which damage was found, with the reason: by this process, or by an earlier writer
        that left a note. No save depends on a chunk in them."""
        self.suspects: set[str] = set()
        """Those of them whose chunks were not all looked at since."""
        self.bad: dict[tuple[str, int], str] = {}
        """(pack, offset) of chunks that this process found damaged, with the reason."""

    def forget(self) -> None:
        """Read everything again: another writer was there, or an operation stopped in the middle."""
        self._held = None
        self._notes_read = False
        self._known = {}
        self._unread = {}
        self._unknown = {}
        self._sizes = {}

    def distrust(self, error: DamagedChunk) -> None:
        """A chunk is damaged: whatever lies in its pack is written again by the saves that need it."""
        if error.offset >= 0:
            self.bad[error.pack, error.offset] = str(error)
        self.distrust_pack(error.pack, str(error))

    def distrust_pack(self, pack: str, reason: str) -> None:
        """Something in a pack is damaged."""
        if pack in self.damaged:
            return
        self.damaged[pack] = reason
        self.suspects.add(pack)
        if self._held is not None:
            self._held = {digest: at for digest, at in self._held.items() if at.pack != pack}

    def add(self, manifest: Manifest, head: bytes, located: Mapping[str, Held]) -> None:
        """A checkpoint was committed by a manifest that begins with `head`, and its new chunks lie
        there."""
        self.held().update(located)
        self._sizes.update((pack.name, pack.size) for pack in manifest.packs)
        self._known[manifest_name(manifest.step)] = _Known(head, "", manifest)

    def replace(self, manifests: Mapping[int, Manifest]) -> None:
        """Manifests were replaced by others of the same checkpoints."""
        for step, manifest in manifests.items():
            head = encode_manifest(manifest)[:HEAD_BYTES]
            self._known[manifest_name(step)] = _Known(head, "", manifest)
            self._held = None

    def remove(self, step: int) -> None:
        """The manifest of a step is gone."""
        self._known.pop(manifest_name(step), None)
        self._unread.pop(step, None)
        self._unknown.pop(step, None)
        self._held = None

    def held(self) -> dict[str, Held]:
        """Chunks of readable checkpoints whose packs were there in full when they were last looked at,
        and are not known as damaged.

        `agrees` says afterwards whether those that were used still are.
        """
        if self._held is None:
            manifests = self._read(fresh=False)
            self._read_notes()
            self._held = dict(self._chunks(manifests.values()))
        return self._held

    def agrees(self, packs: Iterable[PackRecord]) -> bool:
        """Whether packs, with the sizes that they have now, are what `held` took them for."""
        return all(self._sizes.get(pack.name, pack.size) == pack.size for pack in packs)

    def contents(self, *, fresh: bool) -> Contents:
        """A snapshot of everything. With `fresh`, manifests that are remembered are compared with the
        files first; without, only the names and what is new are read."""
        manifests = self._read(fresh)
        whole: dict[str, Manifest] = {}
        lost = []
        unknown = list(self._unknown.values())
        versions = self._versions(QUARANTINE)
        for name, version in versions.items():
            if name.endswith(".json") and _is_set_aside(name):
                try:  # compared in any case: a name there may be removed, and given again
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
        for name in self._storage.list(PACKS):
            if not name.endswith(TEMP_SUFFIX):
                with suppress(FileNotFoundError):
                    packs[name.removeprefix(PACKS)] = self._size(name.removeprefix(PACKS))
        return Contents(
            manifests=manifests,
            unreadable=dict(self._unread),
            quarantined=dict(sorted(whole.items())),
            lost=tuple(sorted(lost)),
            packs=packs,
            pinned=pinned_steps(self._storage),
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
            where = f"{self._storage.where}/{name}"
            try:
                manifests[step] = self._manifest(name, versions[name], step, fresh)
            except FileNotFoundError:
                continue
            except ConnectionError:
                # Nobody answers: the next manifest would not be there either.
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
            head = bytearray(HEAD_BYTES)
            if self._storage.read_into(name, 0, memoryview(head)) and head == known.head:
                self._known[name] = known._replace(version=version)
                return known.manifest
            del self._known[name]
            self._held = None
        data = self._storage.read(name)
        manifest = decode_manifest(data, f"{self._storage.where}/{name}", step)
        # The version was listed before the read, so it may be that of older bytes: it is not kept.
        self._known[name] = _Known(data[:HEAD_BYTES], "", manifest)
        return manifest

    def _versions(self, prefix: str) -> Mapping[str, str]:
        if isinstance(self._storage, VersionedStorage):
            return self._storage.versions(prefix)
        return dict.fromkeys(self._storage.list(prefix), "")

    def _size(self, pack: str) -> int:
        """Bytes of a pack that is listed; packs never change."""
        if pack not in self._sizes:
            self._sizes[pack] = self._storage.size(PACKS + pack)
        return self._sizes[pack]

    def _read_notes(self) -> None:
        """Which packs an earlier writer found damaged."""
        if self._notes_read:
            return
        for name in self._storage.list(QUARANTINE):
            if name.endswith(REASON_SUFFIX):
                with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                    note = json.loads(self._storage.read(name))
                    if note["name"].startswith(PACKS):
                        pack = note["name"].removeprefix(PACKS)
                        self.noted.add(pack)
                        self.distrust_pack(pack, str(note["reason"]))
        self._notes_read = True

    def _chunks(self, manifests: Iterable[Manifest]) -> Iterator[tuple[str, Held]]:
        sizes: dict[str, int | None] = {}
        for manifest in manifests:
            for pack in manifest.packs:
                if pack.name not in sizes:
                    try:
                        sizes[pack.name] = self._storage.size(PACKS + pack.name)
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


def pinned_steps(storage: Storage) -> frozenset[int]:
    """Steps that no deletion may touch."""
    names = (name.removeprefix(PINS) for name in storage.list(PINS))
    return frozenset(int(name) for name in names if name.isdecimal())


def quarantined(storage: Storage) -> list[str]:
    """Names of what is in quarantine: manifests, and packs that a repair set aside."""
    return sorted(filter(_is_set_aside, storage.list(QUARANTINE)))


def _is_set_aside(name: str) -> bool:
    return not name.endswith((REASON_SUFFIX, TEMP_SUFFIX))


def set_aside(storage: Storage, name: str, stem: str, suffix: str, note: Mapping[str, Any]) -> str:
    """Move `name` to a free place in quarantine, with `note` beside it; returns its new name."""
    taken = set(storage.list(QUARANTINE))
    number = next(
        n for n in range(len(taken) + 1) if f"{QUARANTINE}{stem}-{n}{suffix}" not in taken
    )
    place = f"{QUARANTINE}{stem}-{number}"
    storage.replace(reason_name(place + suffix), json.dumps(note).encode() + b"\n")
    storage.move(name, place + suffix)
    return place + suffix


class Removed(NamedTuple):
    """A checkpoint that was removed for good while another copy of the run may still hold it."""

    name: str
    """Of the note that says so."""
    step: int
    fingerprint: str


_REMOVED = re.compile(re.escape(QUARANTINE) + r"\d{12}-[0-9a-f]{8}" + re.escape(REASON_SUFFIX))


def note_removed(storage: Storage, manifest: Manifest) -> None:
    """Leave word that a checkpoint is removed on purpose, so that a mirror does not bring it back."""
    note = {
        "name": manifest_name(manifest.step),
        "reason": "removed",
        "removed": [manifest.step, manifest.fingerprint],
    }
    stem = f"{QUARANTINE}{manifest.step:012d}-{manifest.fingerprint[:8]}"
    storage.replace(stem + REASON_SUFFIX, json.dumps(note).encode() + b"\n")


def removed(storage: Storage) -> list[Removed]:
    """The checkpoints of which `note_removed` left word."""
    found = []
    for name in sorted(filter(_REMOVED.fullmatch, storage.list(QUARANTINE))):
        try:
            step, fingerprint = json.loads(storage.read(name))["removed"]
        except ConnectionError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged note says nothing
        if isinstance(step, int) and isinstance(fingerprint, str):
            found.append(Removed(name, step, fingerprint))
    return found


def reason_name(name: str) -> str:
    """Where the note on an object in quarantine lies."""
    return f"{name.rpartition('.')[0]}{REASON_SUFFIX}"


def note_damage(storage: Storage, pack: str, note: Mapping[str, str]) -> None:
    """Leave word in quarantine that a pack is damaged; the pack stays where it is."""
    stem = f"{QUARANTINE}{pack.removesuffix('.pack')}"
    storage.replace(f"{stem}-0{REASON_SUFFIX}", json.dumps(note).encode() + b"\n")
