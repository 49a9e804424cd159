"""Going back to an older checkpoint: newer ones move to quarantine, with a note that brings them back.

Invariant: after a crash at any operation the newest committed checkpoint is one of the line that was
rolled back, every other one of that line is either committed or in quarantine, and the same call can be
repeated. The note of a checkpoint names its predecessor, so that it returns only after that one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from perdure.errors import CorruptionError, FormatVersionError
from perdure.store.contents import committed_steps, quarantined, reason_name, set_aside
from perdure.store.format import MANIFESTS, QUARANTINE, manifest_name
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import decode_manifest
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
    """The readable checkpoints in quarantine that a rollback put there, by name."""
    return [
        RolledBack(name, manifest, note)
        for name in quarantined(storage)
        if name.endswith(".json") and (note := _note(storage, name)) is not None
        if (manifest := _manifest(storage, name)) is not None
    ]


def finish_moves(storage: Storage) -> None:
    """Clear what a crash in the middle of a move leaves: a checkpoint that is in both places.

    It stays committed: its manifest is made durable, then the copy in quarantine goes.
    """
    aside = [name for name in quarantined(storage) if name.endswith(".json")]
    committed = set(committed_steps(storage)) if aside else set()
    for name in aside:
        step = int(digits) if (digits := name.removeprefix(QUARANTINE)[:12]).isdecimal() else -1
        if step in committed and _note(storage, name) is not None:
            try:
                data = storage.read(manifest_name(step))
                twin = storage.read(name)
            except ConnectionError:
                raise
            except OSError:
                continue  # what cannot be read stays where it is
            if data == twin:
                storage.replace(manifest_name(step), data)
                storage.delete(name)
                storage.delete(reason_name(name))


def put_aside(
    storage: Storage, line: Mapping[int, Manifest | None], target: int, when: str
) -> None:
    """Move the manifests of all steps of `line` above `target` to quarantine, the newest first.

    `line` has every committed step, and its manifest if that is readable. Each move is durable before
    the next one.
    """
    number = 1 + max((each.note.rollback for each in rolled_back(storage)), default=0)
    predecessor: tuple[int, str] | None = None
    notes: dict[int, Note] = {}
    for step, manifest in sorted(line.items()):
        if step > target:
            notes[step] = Note(
                name=manifest_name(step),
                found=when,
                reason=f"rolled back to step {target}",
                rolled_back_to=target,
                after=predecessor,
                rollback=number,
            )
        if manifest is not None:
            predecessor = step, manifest.fingerprint
    for step in sorted(notes, reverse=True):
        note = msgspec.to_builtins(notes[step])
        set_aside(storage, manifest_name(step), f"{step:012d}", ".json", note)


def returning(candidates: Iterable[RolledBack], newest: tuple[int, str] | None) -> list[RolledBack]:
    """The checkpoints that continue `newest` (step and fingerprint), the oldest first.

    Of several that continue the same one, the one that was set aside last.
    """
    following: dict[tuple[int, str] | None, RolledBack] = {}
    for each in sorted(candidates, key=lambda each: each.note.rollback):
        following[each.note.after] = each
    line = []
    while newest is not None and (each := following.get(newest)) is not None:
        if each.manifest.step <= newest[0]:
            break  # a note that was changed by hand
        line.append(each)
        newest = each.place
    return line


def put_back(storage: Storage, line: Iterable[RolledBack]) -> None:
    """Move the manifests of `line` out of quarantine, the oldest first, each durable at once."""
    for each in line:
        storage.move(each.name, manifest_name(each.manifest.step))
        storage.delete(reason_name(each.name))


def _note(storage: Storage, name: str) -> Note | None:
    """The note of a rollback; None for any other object in quarantine."""
    try:
        note = msgspec.json.decode(storage.read(reason_name(name)), type=Note)
    except ConnectionError:
        raise
    except (OSError, ValueError):
        return None
    return None if note.rolled_back_to is None or not note.name.startswith(MANIFESTS) else note


def _manifest(storage: Storage, name: str) -> Manifest | None:
    try:
        return decode_manifest(storage.read(name), f"{storage.where}/{name}")
    except ConnectionError:
        raise
    except (OSError, CorruptionError, FormatVersionError):
        return None
