"""What the file system of a run directory does with the operations that the store relies on.

Invariant: everything happens in a directory of its own, which is removed; the run directory is not
changed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from perdure.store.file_lock import acquire
from perdure.store.local import absolute_path

MOUNTS = Path("/proc/self/mounts")


class FileSystemCheck(NamedTuple):
    """One operation: whether it did what the store relies on, and what was found."""

    name: str
    is_right: bool
    found: str


def check_file_system(run: str) -> list[FileSystemCheck]:
    """Try the operations of a save where `run` is, or would be made."""
    if "://" in run:
        text = "an object store: `perdure verify` reads what is there; nothing is tried"
        return [FileSystemCheck("place", True, text)]
    place = Path(absolute_path(run))
    while not os.path.isdir(place) and place != place.parent:
        if os.path.lexists(place):
            return [FileSystemCheck("place", False, f"{place} is no directory")]
        place = place.parent
    free = shutil.disk_usage(place).free
    found = [
        FileSystemCheck("place", True, f"{place} ({_type_of(place)})"),
        FileSystemCheck("free space", free > 0, f"{free / 2**30:.1f} GiB"),
    ]
    try:
        directory = tempfile.mkdtemp(prefix=".perdure-doctor-", dir=place)
    except OSError as error:
        return [*found, FileSystemCheck("new files", False, f"{error}")]
    try:
        return found + [_tried(name, try_it, Path(directory)) for name, try_it in _TRIALS.items()]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _tried(name: str, trial: Callable[[Path], tuple[bool, str]], place: Path) -> FileSystemCheck:
    try:
        return FileSystemCheck(name, *trial(place))
    except OSError as error:
        return FileSystemCheck(name, False, f"{error}")


def _fsync(place: Path) -> tuple[bool, str]:
    for path, flags in ((place / "file", os.O_WRONLY | os.O_CREAT), (place, os.O_RDONLY)):
        fd = os.open(path, flags, 0o600)
        try:
            if path != place:
                os.write(fd, b"perdure")
            os.fsync(fd)
        finally:
            os.close(fd)
    return True, "of a file and of its directory"


def _link(place: Path) -> tuple[bool, str]:
    one, other = place / "one", place / "other"
    one.write_bytes(b"1")
    try:
        os.link(one, other)
    except OSError as error:
        # The store renames instead; two writers are then kept apart by the lock alone.
        return True, f"not there ({error.strerror}); files are renamed, and a fork copies its packs"
    try:
        os.link(one, other)
    except FileExistsError:
        return True, "a name that is taken stays"
    return False, "expected a refusal to give a name twice, found none: a commit could be replaced"


def _lock(place: Path) -> tuple[bool, str]:
    path = str(place / "lock")
    held = acquire(path, b"perdure doctor")
    try:
        acquire(path, b"another").release()
    except BlockingIOError:
        return True, "a second writer is refused"
    finally:
        held.release()
    return False, "expected a second writer to be refused, found none: two may write at once"


_TRIALS: dict[str, Callable[[Path], tuple[bool, str]]] = {
    "fsync": _fsync,
    "hard links": _link,
    "lock": _lock,
}


def _type_of(place: Path) -> str:
    """The type of the file system, as the kernel's table of mounts has it."""
    best, kind = "", "unknown type"
    try:
        lines = MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return kind
    text = os.path.realpath(place).rstrip("/") + "/"
    for line in lines:
        _, mount, found, *_ = line.split(" ")
        mount = mount.replace("\\040", " ").rstrip("/") + "/"
        if text.startswith(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind
