"""The rules of retention in a run directory (`retention.json`).

They are for `perdure ls`, for `RUN@best`, and for a manager that is given none.

What is read there can only keep more: without the file, the newest `max_to_keep` of the program stay.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import msgspec

from perdure.checkpoint.retention import Retention
from perdure.errors import StoreError
from perdure.store import Storage
from perdure.store.format import RETENTION


@dataclass(frozen=True)
class RecordedRetention:
    """What the last writer of a run kept: `max_to_keep` (None for all) and its other rules."""

    max_to_keep: int | None = None
    retention: Retention = field(default_factory=Retention)


def record_retention(storage: Storage, rules: RecordedRetention) -> None:
    """Write the rules, unless they are there already; durable on return. For the writer.

    Raises `OSError` if the storage fails.
    """
    data = msgspec.json.encode({"max_to_keep": rules.max_to_keep, **asdict(rules.retention)})
    try:
        if storage.read(RETENTION) == data + b"\n":
            return
    except FileNotFoundError:
        pass
    storage.replace(RETENTION, data + b"\n")


def recorded_retention(storage: Storage) -> RecordedRetention | None:
    """The rules of the last writer; None if none are recorded, or none that can be read."""
    try:
        return read_retention(storage)
    except OSError:
        return None


def read_retention(storage: Storage) -> RecordedRetention | None:
    """The rules of the last writer; None if none are recorded, or none that this version knows.

    Raises `OSError` if the file cannot be read now.
    """
    try:
        fields = msgspec.json.decode(storage.read(RETENTION), type=dict)
        max_to_keep = fields.pop("max_to_keep")
        return RecordedRetention(
            msgspec.convert(max_to_keep, int | None), msgspec.convert(fields, Retention)
        )
    except (FileNotFoundError, msgspec.MsgspecError, StoreError, KeyError):
        return None
