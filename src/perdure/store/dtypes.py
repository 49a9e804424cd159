"""The NumPy form of the dtypes of leaves."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from perdure.errors import UnsupportedLeafError
from perdure.store.format import WEAK_PREFIX
from perdure.store.manifest_check import item_bytes

if TYPE_CHECKING:
    import numpy as np


@lru_cache(256)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a leaf's dtype name, including those of ml_dtypes (bfloat16, float8).

    Raises:
        UnsupportedLeafError: NumPy has no such dtype.
    """
    import numpy as np  # not needed to list a run

    name = name.removeprefix(WEAK_PREFIX)
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError):
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name, object))
    # A name such as `U8` or `f4,i4` means something to NumPy that no leaf has, and the width of
    # `float128` (g, G) is that of the machine.
    is_known = dtype.kind in "biuV" or (dtype.kind in "fc" and dtype.char not in "gG")
    if dtype.name != name or not is_known or dtype.itemsize != item_bytes(name):
        raise UnsupportedLeafError(
            f"dtype {name!r} has no NumPy form here; restore into a template of the framework that "
            f"wrote it."
        )
    return dtype
