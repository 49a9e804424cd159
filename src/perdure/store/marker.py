"""Telling a run directory from any other place.

Invariant: a place that is not empty and has no marker is never written to.
"""

from __future__ import annotations

import itertools
import os

from perdure.errors import NotARunError, UnreachableError
from perdure.store.contents import committed_steps
from perdure.store.format import LOCK, MARKER, TEMP_SUFFIX, decode_marker
from perdure.store.local import LocalStorage
from perdure.store.storage import Storage


def is_marked(storage: Storage, *, create: bool, again: bool = False) -> bool:
    """Whether the marker is there; False for an empty place that may become a run directory.

    Raises `NotARunError` for any other place, `FormatVersionError` for a newer run directory, and
    `UnreachableError` where the storage does not answer.
    """
    where = f"{storage.where}/{MARKER}"
    try:
        decode_marker(storage.read(MARKER), where)
        return True
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise NotARunError(f"{storage.where}: expected a directory, found a file.") from None
    except ConnectionError as error:
        raise UnreachableError(f"{where}: {error}.") from error
    except OSError as error:
        raise NotARunError(f"{where}: cannot be read: {error}.") from error
    try:
        found = _entries(storage)
    except ConnectionError as error:
        raise UnreachableError(f"{storage.where}: {error}.") from error
    except OSError as error:
        raise NotARunError(f"{storage.where}: {error}.") from error
    if create and not found:
        return False
    if found and MARKER in found and not again:
        # Another process made it one in between. Once only: a dangling link is listed and not there.
        return is_marked(storage, create=create, again=True)
    if steps := committed_steps(storage):
        what = f"{len(steps)} checkpoints, but {MARKER} is gone; bring it back"
    elif found is None:
        what = "nothing there; check the path"
    else:
        what = f"{', '.join(found[:5]) or 'an empty directory'}; name another directory"
    raise NotARunError(f"{storage.where}: expected a run directory (with {MARKER}), found {what}.")


def _entries(storage: Storage) -> list[str] | None:
    """What lies in a directory that is not a run yet; None where there is no directory."""
    if isinstance(storage, LocalStorage):
        try:
            return sorted(name for name in os.listdir(storage.where) if not _ours(name))
        except FileNotFoundError:
            return None
    return list(itertools.islice((n for n in storage.list("") if not _ours(n)), 5)) or None


def _ours(name: str) -> bool:
    """What a crash before the marker leaves; a directory that holds nothing else is empty."""
    return name == LOCK or (name.startswith((LOCK, MARKER)) and name.endswith(TEMP_SUFFIX))
