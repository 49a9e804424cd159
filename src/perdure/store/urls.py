"""Opening the storage of a run directory from a path or a URL, and the name `RUN@STEP`."""

from __future__ import annotations

import os
import re

from perdure.errors import StoreError
from perdure.store.drill_hook import drill_hook
from perdure.store.local import LocalStorage, absolute_path
from perdure.store.storage import Storage

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")


def name_at_step(where: str, step: int) -> str:
    """The name of one checkpoint, `RUN@STEP`."""
    return f"{where}@{step}"


def open_storage(where: str | os.PathLike[str] | Storage) -> Storage:
    """The storage of a run directory: a path, a URL (obstore is imported), or a storage itself.

    Raises StoreError for an empty path, an unknown scheme, and a URL that went through `Path`.
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
