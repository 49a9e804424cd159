"""The working directory as each run of a drill sees it: small files copied, the others linked.

Run directories are left out, so that each run begins from the first step. The copy lies below a root
that has the same parents as the original, so that a program finds `../data`, or a repository above it.
Invariant: what a program does to a path of the copy changes nothing outside of it, except below a link.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from perdure.store.format import MARKER

ROOT = "root"
"""The name of the root in the directory of a drilled run."""
COPY = ".perdure-copy"
"""A file beside a root; a copy that was kept is in no other copy."""

LARGEST_COPY = 2**20
COPIED_BYTES = 64 * 2**20
MOST_ENTRIES = 2000
_MOST_BESIDE = 1000
_MOST_LOOKED_AT = 200
_SYSTEM = ("/dev", "/proc", "/sys")  # reading a file there may never end
_LINKED = {".git", ".hg", ".svn", "__pycache__", "node_modules"}


class WorkingDirectory:
    """The working directory when the drill began; `make` writes a copy without `left_out`."""

    def __init__(
        self, source: Path, left_out: Iterable[Path] = (), read_only: Iterable[str] = ()
    ) -> None:
        self.source = os.path.realpath(source)
        self._left_out = {os.path.realpath(path) for path in left_out}
        self._read_only = set(read_only)
        self._directories: list[str] = []
        self._copies: list[str] = []
        self._links: list[tuple[str, str]] = []  # the name, and what it links to
        self._entries_left = MOST_ENTRIES
        self._bytes_left = COPIED_BYTES
        self._list_parents()
        self._list_contents()

    def make(self, directory: Path) -> Path:
        """Write a copy below `directory`; returns the directory that takes the place of `/`."""
        root = os.path.join(os.path.realpath(directory), ROOT)
        os.mkdir(root)
        Path(directory, COPY).touch()
        for name in self._directories:
            os.mkdir(root + name)
        for name, target in self._links:
            os.symlink(target, root + name)
        for name in self._copies:
            try:
                shutil.copy2(name, root + name)
            except OSError:  # unreadable for the drill, or gone meanwhile
                Path(root + name).unlink(missing_ok=True)
                os.symlink(name, root + name)
        return Path(root)

    def command(self, root: Path, command: Sequence[str]) -> tuple[str, ...]:
        """`command`, begun in the copy below `root`; arguments that name a path in it are changed."""
        moved = [
            argument if number == 0 else self._moved(root, argument)
            for number, argument in enumerate(command)
        ]
        return ("/bin/sh", "-c", 'cd "$0" && exec "$@"', str(root) + self.source, *moved)

    def _moved(self, root: Path, argument: str) -> str:
        parent, name = os.path.split(argument)
        real = os.path.join(os.path.realpath(parent), name)
        is_inside = os.path.isabs(argument) and real.startswith(self.source + os.sep)
        return str(root) + real if is_inside and os.path.lexists(str(root) + real) else argument

    def _list_parents(self) -> None:
        parents = [str(path) for path in reversed(Path(self.source).parents)]
        for parent, child in pairwise([*parents, self.source]):
            if child != os.sep:
                self._directories.append(child)
            beside = _entries(parent, _MOST_BESIDE + 1) or []
            for entry in beside if len(beside) <= _MOST_BESIDE else ():
                if entry.path != child and os.path.realpath(entry.path) not in self._left_out:
                    self._links.append((entry.path, entry.path))

    def _list_contents(self) -> None:
        """Go through the directory level by level, the smallest entries of a level first.

        A directory with a run directory in it is never a link: the program may remove what it
        finds.
        """
        level = [self.source]
        while level:
            most = max(self._entries_left, _MOST_LOOKED_AT) + 1
            listed = [(path, _entries(path, most)) for path in level]
            level = []
            for path, entries in sorted(listed, key=lambda pair: len(pair[1] or ())):
                first = (entries or [])[:_MOST_LOOKED_AT]
                is_real = path == self.source or any(map(_is_run_directory, first))
                if is_real:
                    entries = _entries(path, None)
                if entries is None or (len(entries) > self._entries_left and not is_real):
                    self._links.append((path, path))
                    continue
                self._entries_left = max(0, self._entries_left - len(entries))
                if path != self.source:
                    self._directories.append(path)
                level += [entry.path for entry in entries if self._is_entered(entry)]

    def _is_entered(self, entry: os.DirEntry[str]) -> bool:
        """Whether `entry` is a directory to go through; otherwise it is dealt with here."""
        real = os.path.realpath(entry.path)
        if real in self._left_out or os.path.exists(os.path.join(entry.path, COPY)):
            return False
        target = entry.path
        if entry.is_symlink() and (real + os.sep).startswith(self.source + os.sep):
            target = os.path.relpath(real, os.path.dirname(entry.path))  # to the one in the copy
        elif os.path.isdir(entry.path):
            if _is_run_directory(entry):
                if real not in self._read_only:
                    return False
            elif not self._is_linked(entry, real):
                return True
        elif self._is_copied(entry):
            self._copies.append(entry.path)
            return False
        self._links.append((entry.path, target))
        return False

    def _is_linked(self, entry: os.DirEntry[str], real: str) -> bool:
        is_environment = os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
        is_parent = (self.source + os.sep).startswith(real.rstrip(os.sep) + os.sep)
        is_system = real.startswith(tuple(f"{path}{os.sep}" for path in _SYSTEM)) or real in _SYSTEM
        return entry.name in _LINKED or is_environment or is_parent or is_system

    def _is_copied(self, entry: os.DirEntry[str]) -> bool:
        """Whether `entry` is a regular file that is small enough, as long as there is space for it."""
        if not os.path.isfile(entry.path):
            return False
        size = entry.stat().st_size
        if size > min(LARGEST_COPY, self._bytes_left):
            return False
        self._bytes_left -= size
        return True


def files_below(directory: str) -> Iterator[str]:
    """The files of a directory, without files of run directories and compiled files."""
    for folder, folders, names in os.walk(directory):
        if MARKER in names:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.join(folder, name) for name in names)


def _is_run_directory(entry: os.DirEntry[str]) -> bool:
    return os.path.exists(os.path.join(entry.path, MARKER))


def _entries(directory: str, most: int | None) -> list[os.DirEntry[str]] | None:
    """The entries of a directory, or `most` of them; None if it cannot be read."""
    try:
        with os.scandir(directory) as found:
            return sorted(itertools.islice(found, most), key=lambda entry: entry.name)
    except OSError:
        return None
