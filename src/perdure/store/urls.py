"""Where a run directory is: a path, a URL of an object store, or a storage of one's own."""

from __future__ import annotations

import os
import re

from perdure.errors import StoreError
from perdure.store.drill_hook import drill_hook
from perdure.store.local import LocalStorage, absolute_path
from perdure.store.storage import Storage

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")


def name_at_step(where: str, step: int) -> str:
    """The name of one checkpoint, `RUN@STEP`; `split_step` takes it apart."""
    return f"{where}@{step}"


def split_step(where: str) -> tuple[str, int | None]:
    """`RUN@STEP` as its run directory and step; a name without a step, or of a directory, as it is."""
    run, at, step = where.rpartition("@")
    if not run or not at or not (step.isascii() and step.isdigit()) or os.path.isdir(where):
        return where, None
    return run, int(step)


def open_storage(where: str | os.PathLike[str] | Storage) -> Storage:
    """The storage of a run directory. obstore is loaded for a URL, and for nothing else.

    Paths are made absolute. Raises `StoreError` for an empty path, a scheme that is not known, and a
    URL that went through `pathlib.Path`, which drops one of its slashes.
    """
    if not isinstance(where, (str, os.PathLike)):
        if not hasattr(where, "read_into"):
            raise StoreError(
                f"expected the path or URL of a run directory, or a Storage, found {where!r}."
            )
        return where if (hook := drill_hook()) is None else hook.storage(where)
    text = os.fsdecode(os.fspath(where))
    if (hook := drill_hook()) is not None:
        return hook.storage(text if "://" in text else absolute_path(text))
    scheme, colon, _ = text.partition(":/")
    if not colon or not re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme):
        return LocalStorage(where)
    if not text.startswith(f"{scheme}://"):
        if scheme in SCHEMES:
            raise StoreError(
                f"{text}: expected a URL such as {scheme}://..., found one slash; pathlib.Path "
                f"drops the other. Pass the URL as a string."
            )
        return LocalStorage(where)
    if scheme not in SCHEMES:
        raise StoreError(
            f"{text}: expected a path or a URL with one of {', '.join(SCHEMES)}, found {scheme!r}."
        )
    from perdure.store.cloud import CloudStorage  # only a URL needs it

    return CloudStorage(text)
