"""Names with separators as nested dicts, so that leaf paths read alike in every framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def nest(values: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """`{"dense/kernel": v}` as `{"dense": {"kernel": v}}`."""
    root: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(separator)
        at = root
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return root


def flat(nested: Mapping[str, Any], separator: str = "/", prefix: str = "") -> dict[str, Any]:
    """The inverse of `nest`."""
    values: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            values.update(flat(value, separator, f"{prefix}{key}{separator}"))
        else:
            values[prefix + key] = value
    return values
