"""The marker file, by which a run directory is told from any other place.

Invariant: a place that is not empty and has no marker is never written to.
"""

from __future__ import annotations

import itertools
import os

import msgspec
from msgspec import Struct

from perdure.errors import CorruptionError, NotARunError
from perdure.store.contents import committed_steps
from perdure.store.failures import is_gone, read_error
from perdure.store.format import (
    FORMAT,
    LOCK,
    MARKER,
    TEMP_SUFFIX,
    Natural,
    check_version,
    decode_json,
    manifest_name,
)
from perdure.store.local import LocalStorage
from perdure.store.manifest_json import decode_manifest
from perdure.store.storage import Storage
from perdure.text import counted


class Marker(Struct, frozen=True):
    """Says that a directory is a run directory, and which reader it needs."""

    format: Natural
    created: str


def encode_marker(created: str) -> bytes:
    """Contents of `perdure.json`."""
    return msgspec.json.encode(Marker(format=FORMAT, created=created)) + b"\n"


def decode_marker(data: bytes, where: str) -> Marker:
    """The marker in `data`; raises `FormatVersionError` or `CorruptionError`."""
    check_version(data, where)
    return decode_json(data, Marker, where)


def is_run_directory(
    storage: Storage, *, create: bool, repair: bool = False, again: bool = False
) -> bool:
    """Whether the marker is there; False if the first writer may write it.

    Args:
        storage: The place.
        create: Accept an empty or missing place.
        repair: Accept a place with a readable manifest, beside a marker that is missing or damaged.
        again: Whether the marker was listed and not there when this was tried before.

    Raises:
        NotARunError: The place is not a run directory, and not accepted as one.
        CorruptionError: The marker is damaged, or missing beside checkpoints.
        FormatVersionError: A newer perdure wrote it.
        UnreachableError: The storage cannot be read.
    """
    where = f"{storage.where}/{MARKER}"
    try:
        decode_marker(storage.read(MARKER), where)
        return True
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise NotARunError(f"{storage.where}: expected a directory, found a file.") from None
    except OSError as error:
        if not is_gone(error):
            raise read_error(error, where) from error
    except CorruptionError as error:
        return _is_repairable(storage, repair, str(error).rstrip("."))
    try:
        entries = _entries(storage)
    except OSError as error:
        if not is_gone(error):
            raise read_error(error, storage.where) from error
        raise NotARunError(f"{storage.where}: {error}.") from error
    if create and not entries:
        return False
    if entries and MARKER in entries and not again:
        # Another process wrote it just now. Tried once only, because a dangling link is listed too.
        return is_run_directory(storage, create=create, repair=repair, again=True)
    if steps := committed_steps(storage):
        fault = f"{where}: missing beside {counted(len(steps), 'checkpoint')}"
        return _is_repairable(storage, repair, fault)
    if entries is None:
        content = "nothing there; check the path"
    else:
        content = f"{', '.join(entries[:5]) or 'an empty directory'}; name another directory"
    raise NotARunError(
        f"{storage.where}: expected a run directory (with {MARKER}), found {content}."
    )


def _is_repairable(storage: Storage, repair: bool, fault: str) -> bool:
    """False if a repair may write the marker again; raises `CorruptionError` otherwise."""
    reason = "there is no checkpoint beside it. Name another directory, or remove that file"
    for step in reversed(committed_steps(storage)):
        name = manifest_name(step)
        try:
            decode_manifest(storage.read(name), f"{storage.where}/{name}", step)
        except (CorruptionError, OSError) as error:
            reason = f"no manifest beside it can be read either: {error}"
            continue
        if repair:
            return False
        raise CorruptionError(
            f"{fault}. Its checkpoints are there: `perdure verify {storage.where} --repair` writes the "
            f"file again. Nothing was changed."
        )
    raise CorruptionError(f"{fault}, and {reason}. Nothing was changed.")


def _entries(storage: Storage) -> list[str] | None:
    """Names in a directory that is not a run directory yet; None if there is no directory."""
    if isinstance(storage, LocalStorage):
        try:
            return sorted(name for name in os.listdir(storage.where) if not _is_leftover(name))
        except FileNotFoundError:
            return None
    return list(itertools.islice((n for n in storage.list("") if not _is_leftover(n)), 5)) or None


def _is_leftover(name: str) -> bool:
    """Whether a crash before the marker leaves this name. A directory with only such names is empty."""
    return name == LOCK or (name.startswith((LOCK, MARKER)) and name.endswith(TEMP_SUFFIX))
