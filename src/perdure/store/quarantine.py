"""The folder `quarantine/`: manifests and packs that were set aside, and notes that say why.

A note is a small JSON file beside what it is about. A damaged pack that checkpoints still read from
stays in `packs/` and has only a note here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from perdure.store.format import PACKS, QUARANTINE, TEMP_SUFFIX
from perdure.store.storage import Storage

REASON_SUFFIX = ".reason.json"


def quarantined(storage: Storage) -> list[str]:
    """Names of what is in quarantine: manifests, and packs that a repair set aside."""
    return sorted(filter(is_quarantined, storage.list(QUARANTINE)))


def is_quarantined(name: str) -> bool:
    """Whether a name in quarantine is that of a manifest or a pack, and not of a note."""
    return not name.endswith((REASON_SUFFIX, TEMP_SUFFIX))


def move_to_quarantine(
    storage: Storage, name: str, stem: str, suffix: str, note: Mapping[str, Any]
) -> str:
    """Move `name` to a free place in quarantine, with `note` beside it.

    Returns:
        The new name, `quarantine/STEM-NUMBER` and `suffix`. It is durable.
    """
    taken = set(storage.list(QUARANTINE))
    number = next(
        n for n in range(len(taken) + 1) if f"{QUARANTINE}{stem}-{n}{suffix}" not in taken
    )
    target = f"{QUARANTINE}{stem}-{number}{suffix}"
    write_note(storage, reason_name(target), note)
    storage.move(name, target)
    return target


def reason_name(name: str) -> str:
    """Name of the note on an object in quarantine."""
    return f"{name.rpartition('.')[0]}{REASON_SUFFIX}"


def write_note(storage: Storage, name: str, note: Mapping[str, Any]) -> None:
    """Write a note; durable on return."""
    storage.replace(name, json.dumps(note).encode() + b"\n")


def note_damage(storage: Storage, pack: str, note: Mapping[str, str]) -> None:
    """Write a note that a pack is damaged; the pack stays where it is."""
    write_note(storage, f"{QUARANTINE}{pack.removesuffix('.pack')}-0{REASON_SUFFIX}", note)


def damage_notes(storage: Storage) -> Iterator[tuple[str, str]]:
    """(pack, reason) of every pack on which an earlier writer left a note."""
    for name in storage.list(QUARANTINE):
        if name.endswith(REASON_SUFFIX):
            # A damaged note is ignored.
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                note = json.loads(storage.read(name))
                if note["name"].startswith(PACKS):
                    yield note["name"].removeprefix(PACKS), str(note["reason"])
