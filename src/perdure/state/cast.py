"""Converts a leaf to another dtype, for `cast=True`. The bits are the same on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.errors import StateError
from perdure.state.leaf_spec import LeafSpec
from perdure.state.leaf_values import array_bytes, leaf_array, plain_value
from perdure.store.format import SCALAR_PREFIX, WEAK_PREFIX
from perdure.store.leaf import Leaf, numpy_dtype


def cast_leaf(leaf: Leaf, spec: LeafSpec) -> Leaf:
    """`leaf` with the dtype of `spec`, which has its shape.

    Floats are rounded to the nearest value, to even in a tie. Integers keep their values.

    Raises:
        StateError: the conversion would lose more than precision; the text is the reason.
    """
    kind = _kind(leaf.dtype)
    refused = f"cast=True does not convert {leaf.dtype} to {spec.dtype}"
    if not is_cast(leaf.dtype, spec.dtype):
        raise StateError(f"{refused}; it converts floats to floats and integers to integers")
    source: Any = np.asarray(plain_value(leaf)) if leaf.is_scalar else leaf_array(leaf)
    dtype = numpy_dtype(spec.dtype)
    if kind == "int":
        least, most = _int_limits(dtype)
        values = (int(source.min()), int(source.max())) if source.size else (0, 0)
        if values[0] < least or values[1] > most:
            raise StateError(f"{refused}: it has values from {values[0]} to {values[1]}")
    with np.errstate(all="ignore"):
        result = source.astype(dtype)
        if kind != "int" and (np.isfinite(source) & ~np.isfinite(result)).any():
            raise StateError(f"{refused}: a finite value would become infinite or NaN")
    return Leaf(spec.dtype, leaf.shape, array_bytes(result)[0], frozen=True)


def is_cast(stored: str, expected: str) -> bool:
    """Whether leaves of these dtypes are converted, if the values allow it."""
    return _kind(stored) is not None and _kind(stored) == _kind(expected)


def _kind(dtype: str) -> str | None:
    name = dtype.removeprefix(WEAK_PREFIX).removeprefix(SCALAR_PREFIX)
    kinds = {"float": "float", "bfloat": "float", "int": "int", "uint": "int", "complex": "complex"}
    return kinds.get(name.partition("_")[0].rstrip("0123456789"))


def _int_limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
    else:
        import ml_dtypes

        limits = ml_dtypes.iinfo(dtype)
    return int(limits.min), int(limits.max)
