"""What a run directory holds, as plans and deduplication need it; no chunk is read for it.

Only the writer may remember what it read: nobody else changes anything while it holds the lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from perdure.errors import CorruptionError
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


@dataclass(frozen=True)
class Contents:
    """A snapshot of names, manifests and sizes.

    `manifests` are the readable ones by step, `unreadable` the others with the reason;
    `quarantined` the readable manifests in quarantine, `lost` the names there that are not readable;
    `packs` the packs present with their sizes.
    """

    manifests: Mapping[int, Manifest]
    unreadable: Mapping[int, str]
    quarantined: tuple[Manifest, ...]
    lost: tuple[str, ...]
    packs: Mapping[str, int]
    pinned: frozenset[int]


class Catalog:
    """Reads a run directory's manifests, each of them once until `forget`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._manifests: dict[int, Manifest] = {}
        self._unread: dict[int, str] = {}
        self._held: dict[str, Held] | None = None

    def forget(self) -> None:
        """Read everything again: another writer was there, or an operation stopped in the middle."""
        self._held = None
        self._manifests = {}
        self._unread = {}

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
        self._held = None

    def held(self) -> dict[str, Held]:
        """Chunks of readable checkpoints whose packs are there in full."""
        if self._held is None:
            self._read()
            self._held = dict(self._chunks())
        return self._held

    def contents(self) -> Contents:
        """A snapshot of everything."""
        self._read()
        whole, lost = [], []
        for name in quarantined(self._storage):
            if name.endswith(".json"):
                try:
                    whole.append(decode_manifest(self._storage.read(name), name))
                except ConnectionError:
                    raise
                except (CorruptionError, OSError):
                    lost.append(name)
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
            except FileNotFoundError:
                continue
            except ConnectionError:
                # An outage is no damage, and says nothing about what is there.
                raise
            except OSError as error:
                self._unread[step] = f"{where}: cannot be read: {error}."
            except CorruptionError as error:
                self._unread[step] = str(error)

    def _chunks(self) -> Iterator[tuple[str, Held]]:
        sizes: dict[str, int | None] = {}
        for manifest in self._manifests.values():
            for pack in manifest.packs:
                if pack.name not in sizes:
                    try:
                        sizes[pack.name] = self._storage.size(PACKS + pack.name)
                    except OSError:
                        sizes[pack.name] = None
            for leaf in manifest.every_leaf():
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
        name
        for name in storage.list(QUARANTINE)
        if not name.endswith((".reason.json", TEMP_SUFFIX))
    )


def set_aside(storage: Storage, name: str, stem: str, suffix: str, note: Mapping[str, str]) -> str:
    """Move `name` to a free place in quarantine, with `note` beside it; returns its new name."""
    taken = set(storage.list(QUARANTINE))
    number = next(
        n for n in range(len(taken) + 1) if f"{QUARANTINE}{stem}-{n}{suffix}" not in taken
    )
    place = f"{QUARANTINE}{stem}-{number}"
    storage.replace(f"{place}.reason.json", json.dumps(note).encode() + b"\n")
    storage.move(name, place + suffix)
    return place + suffix
