"""States whose digests stand in golden.json, from integer formulas that no library can change.

Run as a program, it prints what the file should have; only a new `VERSION` is a reason to do so.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ml_dtypes
import numpy as np

from perdure.digests import VERSION, digest, leaf_digests


def octets(count: int, seed: int) -> np.ndarray:
    """The top bytes of the numbers of a linear congruence."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(6364136223846793005 + 2 * seed)
    return ((numbers ^ (numbers >> np.uint64(29))) >> np.uint64(17)).astype(np.uint8)


def array(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    dtype = np.dtype(dtype)
    data = octets(int(np.prod(shape)) * dtype.itemsize, seed)
    if dtype == np.bool_:
        data &= 1
    elif dtype.name.endswith(("int4", "e2m1fn")):
        data &= 15
    return data.view(dtype).reshape(shape)


ARRAYS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "bool": (np.bool_, (5, 7)),
    "int8": (np.int8, (13,)),
    "uint16": (np.uint16, (3, 5)),
    "int32": (np.int32, (2, 3, 4)),
    "float16": (np.float16, (40_001,)),
    "bfloat16": (ml_dtypes.bfloat16, (7,)),
    "float32": (np.float32, (33, 1001)),
    "complex64": (np.complex64, (3, 3)),
    "float8": (ml_dtypes.float8_e4m3fn, (131_075,)),
    "float4": (ml_dtypes.float4_e2m1fn, (9,)),
    "int4": (ml_dtypes.int4, (9,)),
    "no axis": (np.float32, ()),
    "empty": (np.float32, (0, 3)),
    "one row": (np.float32, (32_768,)),
    "rows": (np.uint32, (3, 32_768)),
}
WIDE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "int64": (np.int64, (5,)),
    "uint64": (np.uint64, (20_001,)),
    "float64": (np.float64, (3, 3)),
    "complex128": (np.complex128, (5,)),
}


def arrays(*, wide: bool = True) -> dict[str, np.ndarray]:
    chosen = ARRAYS | WIDE if wide else ARRAYS
    return {name: array(*kind, seed=len(name)) for name, kind in chosen.items()}


def golden_state() -> dict[str, Any]:
    scalars = {"int": 7, "negative": -(10**30), "float": -0.0, "text": "a\0ü", "none": None}
    return {"arrays": arrays(), "scalars": {**scalars, "bytes": b"\0\1", "yes": True, "z": 1 - 2j}}


def found() -> dict[str, Any]:
    state = golden_state()
    leaves = {path: str(value) for path, value in leaf_digests(state).items()}
    return {"version": VERSION, "state": str(digest(state)), "leaves": leaves}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(found(), indent=1) + "\n")
