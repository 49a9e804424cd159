"""The notes that a rollback leaves in quarantine, and the checkpoints that they bring back.

The note of a checkpoint names its predecessor, so that it returns only after that one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from perdure.errors import CorruptionError, FormatVersionError, UnreachableError
from perdure.store.format import MANIFESTS
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
from perdure.store.quarantine import quarantined, reason_name
from perdure.store.storage import Storage


class Note(Struct, frozen=True):
    """The note beside an object in quarantine.

    Only a rollback writes the last three: the step that it went back to, step and fingerprint of the
    readable checkpoint before this one, and a number that grows with every rollback of the run.
    """

    name: str
    found: str
    reason: str
    rolled_back_to: int | None = None
    after: tuple[int, str] | None = None
    rollback: int = 0


@dataclass(frozen=True)
class RolledBack:
    """A checkpoint that a rollback set aside: its name in quarantine, its manifest and its note."""

    name: str
    manifest: Manifest
    note: Note

    @property
    def place(self) -> tuple[int, str]:
        """Step and fingerprint."""
        return self.manifest.step, self.manifest.fingerprint


def rolled_back(storage: Storage) -> list[RolledBack]:
    """The readable checkpoints in quarantine that a rollback put there, by name.

    Raises `UnreachableError` if the storage does not answer.
    """
    try:
        return [
            RolledBack(name, manifest, note)
            for name in quarantined(storage)
            if name.endswith(".json") and (note := rollback_note(storage, name)) is not None
            if (manifest := _manifest(storage, name)) is not None
        ]
    except ConnectionError as error:
        raise UnreachableError(f"{storage.where}: {error}.") from error


def rollback_note(storage: Storage, name: str) -> Note | None:
    """The note of a rollback on an object in quarantine; None for any other object there."""
    try:
        note = msgspec.json.decode(storage.read(reason_name(name)), type=Note)
    except ConnectionError:
        raise
    except (OSError, ValueError):
        return None
    return None if note.rolled_back_to is None or not note.name.startswith(MANIFESTS) else note


def returning(candidates: Iterable[RolledBack], newest: tuple[int, str] | None) -> list[RolledBack]:
    """The checkpoints that continue `newest` (step and fingerprint), the oldest first.

    If several continue the same one, the one that was set aside last returns.
    """
    following: dict[tuple[int, str] | None, RolledBack] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.note.rollback):
        following[candidate.note.after] = candidate
    line = []
    while newest is not None and (successor := following.get(newest)) is not None:
        if successor.manifest.step <= newest[0]:
            break  # a note that was changed by hand
        line.append(successor)
        newest = successor.place
    return line


def _manifest(storage: Storage, name: str) -> Manifest | None:
    try:
        return decode_manifest(storage.read(name), f"{storage.where}/{name}")
    except ConnectionError:
        raise
    except (OSError, CorruptionError, FormatVersionError):
        return None
