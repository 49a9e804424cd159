"""Packs plain values of any structure into leaves: one text, and arrays.

The state of callbacks grows while they run (a history), so there is no template to restore it into.
Floats come back with their bits.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from perdure.errors import TrainError

_TAG = "perdure"


def pack(value: Any) -> dict[str, Any]:
    """Pack a plain value as `{"json": uint8 text, "arrays": {"0": ...}}`.

    Plain values are None, booleans, numbers, strings, arrays, and lists, tuples and dicts of them.

    Raises:
        TypeError: The value is not plain.
    """
    arrays: dict[str, Any] = {}
    text = json.dumps(_encode(value, arrays), separators=(",", ":"))
    packed: dict[str, Any] = {"json": np.frombuffer(text.encode(), np.uint8)}
    return packed | ({"arrays": arrays} if arrays else {})


def unpack(packed: dict[str, Any]) -> Any:
    """The inverse of `pack`."""
    text = bytes(np.asarray(packed["json"])).decode()
    return _decode(json.loads(text), packed.get("arrays", {}))


def is_plain(value: Any) -> bool:
    """Whether `pack` takes it."""
    try:
        _encode(value, {})
    except TypeError:
        return False
    return True


def copy_plain(value: Any, what: str) -> Any:
    """A copy of a plain value. Raises `TrainError`, which begins with `what`, if it is not plain."""
    try:
        return unpack(pack(value))
    except TypeError as error:
        raise TrainError(
            f"{what}: expected numbers, strings, arrays, and lists, tuples and dicts of them with keys "
            f"that are strings, found a value of type {error}, which a backup cannot hold. Turn it "
            f"into such values there, and back in `load_state_dict`."
        ) from None


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two packed values have the same bits."""
    left, right = _flat(one), _flat(other)
    return left.keys() == right.keys() and all(
        array.dtype == right[name].dtype
        and array.shape == right[name].shape
        and array.tobytes() == right[name].tobytes()
        for name, array in left.items()
    )


def _flat(packed: dict[str, Any]) -> dict[str, Any]:
    return {"json": packed["json"], **packed.get("arrays", {})}


def _encode(value: Any, arrays: dict[str, Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses are other types (np.float64 is a float).
        if type(value) in (type(None), bool, int, float, str):
            return value
        if not isinstance(value, np.generic):
            raise TypeError(type(value).__name__)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.array(value)  # a copy, because the original may change in place
        if array.dtype.kind not in "biufc" and array.dtype.num < 256:
            raise TypeError(str(array.dtype))
        name = str(len(arrays))
        arrays[name] = array
        return {_TAG: "scalar" if isinstance(value, np.generic) else "array", "at": name}
    if isinstance(value, list):
        return [_encode(item, arrays) for item in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "of": [_encode(item, arrays) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, arrays) for key, item in value.items()}
    raise TypeError(type(value).__name__)


def _decode(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case "array":
            return np.array(arrays[value["at"]])
        case "scalar":
            return np.asarray(arrays[value["at"]])[()]
        case "tuple":
            return tuple(_decode(item, arrays) for item in value["of"])
    return {key: _decode(item, arrays) for key, item in value.items()}
