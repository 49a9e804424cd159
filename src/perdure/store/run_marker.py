"""The marker file, by which a run directory is told from any other place, and from another run.

Invariant: a directory that is not empty and has no marker is never written to. Nothing is deleted or
moved in a folder of another run.
"""

from __future__ import annotations

import itertools
import os

import msgspec
from msgspec import Struct

from perdure.errors import CorruptionError, NotARunError
from perdure.store.failures import is_gone, read_error
from perdure.store.format import (
    FORMAT,
    LOCK,
    MANIFESTS,
    MARKER,
    PACKS,
    TEMP_SUFFIX,
    Natural,
    check_version,
    decode_json,
    hash_bytes,
)
from perdure.store.local import LocalStorage
from perdure.store.manifest import Manifest, ManifestHead
from perdure.store.names import committed_steps
from perdure.store.run_log import newest_manifest
from perdure.store.storage import Storage
from perdure.text import counted, quoted

FOLDERS = (PACKS, MANIFESTS)
FOLDER_MARK = ".run"
"""The file in one of these that is a link; it says whose it is. It sorts before manifests."""


class Marker(Struct, frozen=True, omit_defaults=True):
    """Says that a directory is a run directory, which run it is, and which reader it needs.

    `made_from` is what a command makes the run from, until it has ended.
    """

    format: Natural
    created: str
    run: str
    made_from: str | None = None
    digest: str = ""

    def sealed(self) -> Marker:
        """The marker with the hash of its other fields."""
        origin = "" if self.made_from is None else f" {self.made_from}"
        text = f"{self.format} {self.created} {self.run}{origin}"
        return msgspec.structs.replace(self, digest=hash_bytes(text.encode()))


class FolderMark(Struct, frozen=True):
    """Says whose a folder of a run directory is: the run's id, and where its directory was."""

    run: str
    where: str


def new_marker(created: str, run: str | None, made_from: str | None) -> Marker:
    """The marker of a new run, or of one whose id is known."""
    return Marker(FORMAT, created, run or os.urandom(8).hex(), made_from)


def write_marker(storage: Storage, marker: Marker) -> None:
    """Write a marker with its digest; durable on return."""
    storage.replace(MARKER, msgspec.json.encode(marker.sealed()) + b"\n")


def claim_folders(storage: Storage, run: str) -> None:
    """Mark the folders of a run that lie outside of its directory and have no mark."""
    for folder in _outside(storage):
        if _read_mark(storage, folder) is None:
            mark = FolderMark(run, os.path.realpath(storage.where))
            storage.replace(f"{folder}{FOLDER_MARK}", msgspec.json.encode(mark) + b"\n")


def require_folders(storage: Storage, run: str | None) -> None:
    """Raise `CorruptionError` if a folder of checkpoints or packs belongs to another run."""
    if problem := folder_problem(storage, run):
        raise CorruptionError(f"{problem} Nothing was changed.")


def folder_problem(storage: Storage, run: str | None) -> str | None:
    """Why a folder of checkpoints or packs belongs to another run; None if both are the run's.

    A folder may be a link to a larger disk. A file there says by which path a run uses it, so that
    a copy of the run directory, or the link of a stranger, does not take it for its own.
    """
    where = os.path.realpath(storage.where)
    for folder in _outside(storage):
        real = os.path.realpath(f"{storage.where}/{folder}")
        mark = _read_mark(storage, folder)
        owner = os.path.dirname(real) if mark is None else mark.where
        if mark is None and not os.path.exists(os.path.join(owner, MARKER)):
            continue  # nobody's: the next writer marks it
        if mark is None or (mark.run, mark.where) != (run, where):
            return (
                f"{storage.where}/{folder}: leads to {real}, which is of the run at {owner}. Give this "
                f"one a folder of its own; `perdure copy` makes a copy that shares nothing. If that "
                f"run was moved here, and nothing else uses the folder, remove {real}/{FOLDER_MARK}."
            )
    return None


def lacks_manifests(storage: Storage) -> bool:
    """Whether the folder of the checkpoints, which each writer makes, is gone."""
    return isinstance(storage, LocalStorage) and not os.path.isdir(storage.path(MANIFESTS))


def _outside(storage: Storage) -> list[str]:
    """The folders of checkpoints and packs that do not lie in the run directory itself."""
    if not isinstance(storage, LocalStorage):
        return []
    return [folder for folder in FOLDERS if os.path.islink(storage.path(folder).rstrip("/"))]


def _read_mark(storage: Storage, folder: str) -> FolderMark | None:
    name = f"{folder}{FOLDER_MARK}"
    where = f"{storage.where}/{name}"
    try:
        return decode_json(storage.read(name), FolderMark, where)
    except FileNotFoundError:
        return None
    except (CorruptionError, IsADirectoryError) as error:
        raise CorruptionError(
            f"{where}: says which run uses that folder, and cannot be read: {error}. Nothing was "
            f"changed. If no other run uses it, remove the file: the next writer makes it again."
        ) from None


def other_run(manifest: Manifest | ManifestHead, run: str | None, where: str) -> str | None:
    """Why a manifest at `where` is not one of the run with the id `run`; None if it is, or for any."""
    if run in (None, manifest.run):
        return None
    return (
        f"{where}: is a checkpoint of run {manifest.run}, and {MARKER} says that this is run {run}. "
        f"One of the two does not belong here: bring back what was in its place."
    )


def read_marker(
    storage: Storage, *, create: bool, repair: bool = False, again: bool = False
) -> Marker | None:
    """The marker of a run directory; None if the first writer may write it.

    `create` accepts an empty or missing place, `repair` a readable manifest beside a missing or
    damaged marker, `again` that the marker was listed and is gone. Raises NotARunError,
    CorruptionError, FormatVersionError, UnreachableError.
    """
    where = f"{storage.where}/{MARKER}"
    try:
        return _decode_marker(storage.read(MARKER), where)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise NotARunError(f"{storage.where}: expected a directory, found a file.") from None
    except IsADirectoryError as error:
        raise CorruptionError(
            f"{where}: {error.strerror}. Nothing was changed. Move it away; if there are checkpoints, "
            f"`perdure verify {quoted(storage.where)} --repair` writes the file again."
        ) from error
    except OSError as error:
        raise read_error(error, where) from error
    except CorruptionError as error:
        return _require_repairable(storage, repair, str(error).rstrip("."))
    try:
        entries = _entries(storage)
    except OSError as error:
        if not is_gone(error):
            raise read_error(error, storage.where) from error
        raise NotARunError(f"{storage.where}: {error}.") from error
    if create and not entries:
        return None
    if entries and MARKER in entries and not again:
        # Another process wrote it just now. Tried once only, because a dangling link is listed too.
        return read_marker(storage, create=create, repair=repair, again=True)
    if steps := committed_steps(storage):
        fault = f"{where}: missing beside {counted(len(steps), 'checkpoint')}"
        return _require_repairable(storage, repair, fault)
    if entries is None:
        content = "nothing there; check the path"
    else:
        content = f"{', '.join(entries[:5]) or 'an empty directory'}; name another directory"
    raise NotARunError(
        f"{storage.where}: expected a run directory (with {MARKER}), found {content}."
    )


def _decode_marker(data: bytes, where: str) -> Marker:
    try:
        marker = decode_json(data, Marker, where)
    except CorruptionError:
        check_version(data, where)
        raise
    # With a flipped bit in the format alone, the rest has the hash. A newer format may seal otherwise.
    if msgspec.structs.replace(marker, format=FORMAT).sealed().digest != marker.digest:
        check_version(data, where)
    elif marker.format == FORMAT:
        return marker
    raise CorruptionError(f"{where}: its fields do not have the hash that it states")


def _require_repairable(storage: Storage, repair: bool, fault: str) -> None:
    """Raise `CorruptionError` unless a repair may write the marker again."""
    if newest_manifest(storage) is None:
        raise CorruptionError(
            f"{fault}, and no checkpoint beside it can be read. Nothing was changed. Name another "
            f"directory, or remove that file."
        )
    if not repair:
        raise CorruptionError(
            f"{fault}. Its checkpoints are there: `perdure verify {quoted(storage.where)} --repair` "
            f"writes the file again. Nothing was changed."
        )


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
