"""Rounding float64 values to the dtype of a leaf, once and to nearest even."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


def is_inexact(dtype: np.dtype[Any]) -> bool:
    """Whether the values of a dtype are floating-point numbers, real or complex."""
    return dtype.kind in "fc" or dtype.name.startswith(("float", "bfloat"))


def round_once(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """`values` (float64) in a real floating-point dtype; every NaN becomes the positive quiet one.

    ml_dtypes converts float64 by way of float32 and so rounds twice. Here the first conversion rounds
    to odd (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008): the last bit of
    the float32 is 1 if it is not exact, which cannot end in a wrong tie.
    """
    import numpy as np

    values = np.where(np.isnan(values), np.nan, values)  # processors differ in the sign of new NaNs
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype.type.__module__ == "numpy":
            return values.astype(dtype)
        near = values.astype(np.float32)
        back = near.astype(np.float64)
        inexact = (back != values) & np.isfinite(near)
        bits = near.view(np.uint32)
        # Beyond the exact value: one step back towards zero, then the last bit is set.
        bits -= (inexact & (np.abs(back) > np.abs(values))).astype(np.uint32)
        bits |= inexact.astype(np.uint32)
        return near.astype(dtype)
