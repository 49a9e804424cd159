"""Notes on checkpoints that were removed on purpose, so that a mirror does not bring them back."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import NamedTuple

from perdure.errors import StoreError
from perdure.store.failures import read_error
from perdure.store.format import QUARANTINE, manifest_name
from perdure.store.loading import read_manifest
from perdure.store.manifest import Manifest
from perdure.store.quarantine import REASON_SUFFIX, write_note
from perdure.store.storage import Storage

_REMOVED = re.compile(re.escape(QUARANTINE) + r"\d{12}-[0-9a-f]{8}" + re.escape(REASON_SUFFIX))


class Removed(NamedTuple):
    """A checkpoint that was removed for good while another copy of the run may still hold it."""

    name: str
    """Name of the note that says so."""
    step: int
    fingerprint: str


def note_removed(storage: Storage, manifest: Manifest) -> None:
    """Write a note that a checkpoint is removed on purpose; durable on return."""
    note = {
        "name": manifest_name(manifest.step),
        "reason": "removed",
        "removed": [manifest.step, manifest.fingerprint],
    }
    stem = f"{QUARANTINE}{manifest.step:012d}-{manifest.fingerprint[:8]}"
    write_note(storage, stem + REASON_SUFFIX, note)


def read_removed(storage: Storage) -> list[Removed]:
    """The checkpoints for which `note_removed` wrote a note. A damaged note is ignored."""
    removed = []
    for name in sorted(filter(_REMOVED.fullmatch, storage.list(QUARANTINE))):
        try:
            step, fingerprint = json.loads(storage.read(name))["removed"]
        except ConnectionError:
            raise
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(step, int) and isinstance(fingerprint, str):
            removed.append(Removed(name, step, fingerprint))
    return removed


class RemovalNotes:
    """The removal notes of one run directory, as its writer keeps them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.steps: set[int] = set()
        """Steps that have a note, as far as this writer knows."""

    def load(self) -> None:
        """Read which steps have a note."""
        self.steps = {removed.step for removed in read_removed(self._storage)}

    def list(self) -> list[Removed]:
        """Read the notes. Raises `UnreachableError` if the storage cannot be read."""
        try:
            return read_removed(self._storage)
        except OSError as error:
            where = f"{self._storage.where}: the notes in quarantine"
            raise read_error(error, where) from error

    def add(self, manifest: Manifest) -> None:
        """Write a note on a checkpoint that is about to be removed, if the disk has room for it."""
        with suppress(OSError):  # a full disk must not prevent the deletion that frees space
            note_removed(self._storage, manifest)
            self.steps.add(manifest.step)

    def remove(self, note: Removed) -> None:
        """Delete one note. A note that stays does no harm, so errors of the storage are ignored."""
        with suppress(OSError):
            self._storage.delete(note.name)

    def committed_again(self, step: int) -> None:
        """Delete the note on a checkpoint that has been committed again with the same bits."""
        if step not in self.steps:
            return
        with suppress(StoreError):
            fingerprint = read_manifest(self._storage, step).fingerprint
            for note in self.list():
                if (note.step, note.fingerprint) == (step, fingerprint):
                    self.remove(note)
