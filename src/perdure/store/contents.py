"""What a run directory holds, as plans and deduplication need it; no chunk is read for it.

Only the writer may remember what it read: nobody else changes anything while it holds the lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from perdure.errors import CorruptionError
from perdure.store.failures import DamagedChunk, is_gone
from perdure.store.format import (
    MANIFESTS,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    Manifest,
    decode_manifest,
    manifest_name,
    step_of,
)
from perdure.store.storage import Storage
from perdure.store.writer import Held

REASON_SUFFIX = ".reason.json"


@dataclass(frozen=True)
class Contents:
    """A snapshot of names, manifests and sizes.

    `manifests` are the readable ones by step, `unreadable` the others with the reason;
    `quarantined` the readable manifests in quarantine, `lost` the names there that are damaged;
    `packs` the packs present with their sizes. `unknown` says which manifests, of checkpoints and in
    quarantine, could not be read for a reason other than damage: they may need any pack.
    """

    manifests: Mapping[int, Manifest]
    unreadable: Mapping[int, str]
    quarantined: tuple[Manifest, ...]
    lost: tuple[str, ...]
    packs: Mapping[str, int]
    pinned: frozenset[int]
    unknown: tuple[str, ...] = ()


class Catalog:
    """Reads a run directory's manifests, each of them once until `forget`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._manifests: dict[int, Manifest] = {}
        self._unread: dict[int, str] = {}
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
        self._manifests = {}
        self._unread = {}
        self._unknown = {}

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

    def add(self, manifest: Manifest, located: Mapping[str, Held]) -> None:
        """A checkpoint was committed, and its new chunks lie there."""
        self.held().update(located)
        self._manifests[manifest.step] = manifest

    def replace(self, manifests: Mapping[int, Manifest]) -> None:
        """Manifests were replaced by others of the same checkpoints."""
        if manifests:
            self._manifests.update(manifests)
            self._held = None

    def remove(self, step: int) -> None:
        """The manifest of a step is gone."""
        self._manifests.pop(step, None)
        self._unread.pop(step, None)
        self._unknown.pop(step, None)
        self._held = None

    def held(self) -> dict[str, Held]:
        """Chunks of readable checkpoints whose packs are there in full and not known as damaged."""
        if self._held is None:
            self._read()
            self._read_notes()
            self._held = dict(self._chunks())
        return self._held

    def contents(self) -> Contents:
        """A snapshot of everything."""
        self._read()
        whole, lost = [], []
        unknown = list(self._unknown.values())
        for name in quarantined(self._storage):
            if name.endswith(".json"):
                try:
                    whole.append(decode_manifest(self._storage.read(name), name))
                except ConnectionError:
                    raise
                except CorruptionError:
                    lost.append(name)
                except OSError as error:
                    if not is_gone(error):
                        unknown.append(f"{name}: {error}")
        packs = {}
        for name in self._storage.list(PACKS):
            if not name.endswith(TEMP_SUFFIX):
                with suppress(FileNotFoundError):
                    packs[name.removeprefix(PACKS)] = self._storage.size(name)
        return Contents(
            manifests=dict(self._manifests),
            unreadable=dict(self._unread),
            quarantined=tuple(whole),
            lost=tuple(lost),
            packs=packs,
            pinned=pinned_steps(self._storage),
            unknown=tuple(unknown),
        )

    def _read(self) -> None:
        steps = committed_steps(self._storage)
        for step in steps:
            if step in self._manifests:
                continue
            name = manifest_name(step)
            where = f"{self._storage.where}/{name}"
            try:
                self._manifests[step] = decode_manifest(self._storage.read(name), where, step)
                self._unread.pop(step, None)
                self._unknown.pop(step, None)
            except FileNotFoundError:
                continue
            except ConnectionError:
                # Nobody answers: the next manifest would not be there either.
                raise
            except OSError as error:
                self._unread[step] = self._unknown[step] = f"{where}: cannot be read: {error}."
            except CorruptionError as error:
                self._unread[step] = str(error)

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

    def _chunks(self) -> Iterator[tuple[str, Held]]:
        sizes: dict[str, int | None] = {}
        for manifest in self._manifests.values():
            for pack in manifest.packs:
                if pack.name not in sizes:
                    try:
                        sizes[pack.name] = self._storage.size(PACKS + pack.name)
                    except OSError:
                        sizes[pack.name] = None
                    if pack.name in self.damaged:
                        sizes[pack.name] = None
            for leaf in manifest.leaves:
                for chunk in leaf.chunks:
                    pack = manifest.packs[chunk.pack]
                    if sizes[pack.name] == pack.size:
                        yield chunk.hash, Held(pack.name, chunk.offset, chunk.length)


def committed_steps(storage: Storage) -> list[int]:
    """Steps that have a manifest, oldest first."""
    return sorted(step for name in storage.list(MANIFESTS) if (step := step_of(name)) is not None)


def pinned_steps(storage: Storage) -> frozenset[int]:
    """Steps that no deletion may touch."""
    names = (name.removeprefix(PINS) for name in storage.list(PINS))
    return frozenset(int(name) for name in names if name.isdecimal())


def quarantined(storage: Storage) -> list[str]:
    """Names of what is in quarantine: manifests, and packs that a repair set aside."""
    return sorted(
        name for name in storage.list(QUARANTINE) if not name.endswith((REASON_SUFFIX, TEMP_SUFFIX))
    )


def set_aside(storage: Storage, name: str, stem: str, suffix: str, note: Mapping[str, str]) -> str:
    """Move `name` to a free place in quarantine, with `note` beside it; returns its new name."""
    taken = set(storage.list(QUARANTINE))
    number = next(
        n for n in range(len(taken) + 1) if f"{QUARANTINE}{stem}-{n}{suffix}" not in taken
    )
    place = f"{QUARANTINE}{stem}-{number}"
    storage.replace(place + REASON_SUFFIX, json.dumps(note).encode() + b"\n")
    storage.move(name, place + suffix)
    return place + suffix


def note_damage(storage: Storage, pack: str, note: Mapping[str, str]) -> None:
    """Leave word in quarantine that a pack is damaged; the pack stays where it is."""
    stem = f"{QUARANTINE}{pack.removesuffix('.pack')}"
    storage.replace(f"{stem}-0{REASON_SUFFIX}", json.dumps(note).encode() + b"\n")
