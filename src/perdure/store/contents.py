"""What a run directory holds, as plans and deduplication need it; no chunk is read for it.

The writer remembers the manifests that it read or wrote. Invariant: nothing is deleted because of what
is remembered. A fresh snapshot compares each remembered manifest with the digest in its file, and reads
those that differ.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from perdure.errors import CorruptionError
from perdure.store.format import (
    HEAD_BYTES,
    MANIFESTS,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    Manifest,
    PackRecord,
    decode_manifest,
    encode_manifest,
    manifest_name,
    step_of,
)
from perdure.store.storage import Storage, VersionedStorage
from perdure.store.writer import Held


@dataclass(frozen=True)
class Contents:
    """A snapshot of names, manifests and sizes.

    `manifests` are the readable ones by step, `unreadable` the others with the reason;
    `quarantined` the readable manifests in quarantine by name, `lost` the names there that are not;
    `packs` the packs present with their sizes.
    """

    manifests: Mapping[int, Manifest]
    unreadable: Mapping[int, str]
    quarantined: Mapping[str, Manifest]
    lost: tuple[str, ...]
    packs: Mapping[str, int]
    pinned: frozenset[int]


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
        self._held: dict[str, Held] | None = None

    def forget(self) -> None:
        """Read everything again: another writer was there, or an operation stopped in the middle."""
        self._held = None
        self._known = {}
        self._unread = {}
        self._sizes = {}

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
        self._held = None

    def held(self) -> dict[str, Held]:
        """Chunks of readable checkpoints whose packs were there in full when they were last looked at.

        `agrees` says afterwards whether those that were used still are.
        """
        if self._held is None:
            manifests = self._read(fresh=False)
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
        versions = self._versions(QUARANTINE)
        for name, version in versions.items():
            if name.endswith(".json") and _is_set_aside(name):
                try:  # compared in any case: a name there may be removed, and given again
                    whole[name] = self._manifest(name, version, None, fresh=True)
                except ConnectionError:
                    raise
                except (CorruptionError, OSError):
                    lost.append(name)
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
        )

    def _read(self, fresh: bool) -> dict[int, Manifest]:
        """The readable manifests by step, oldest first; `_unread` has the others."""
        manifests: dict[int, Manifest] = {}
        self._unread = {}
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
                # An outage is no damage, and says nothing about what is there.
                raise
            except OSError as error:
                self._unread[step] = f"{where}: cannot be read: {error}."
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

    def _chunks(self, manifests: Iterable[Manifest]) -> Iterator[tuple[str, Held]]:
        sizes: dict[str, int | None] = {}
        for manifest in manifests:
            for pack in manifest.packs:
                if pack.name not in sizes:
                    try:
                        sizes[pack.name] = self._storage.size(PACKS + pack.name)
                    except OSError:
                        sizes[pack.name] = None
            for leaf in manifest.leaves:
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
    return not name.endswith((".reason.json", TEMP_SUFFIX))


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


def reason_name(name: str) -> str:
    """Where the note on an object in quarantine lies."""
    return f"{name.rpartition('.')[0]}.reason.json"
