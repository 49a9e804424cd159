"""Compares a manifest of Kubernetes with a description of its fields, and one description with another.

A description is the part of OpenAPI that the CRDs of Kubernetes use: `jobset_fields.yaml`, which is
ours, or the schema in a published CRD.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
_ANYTHING: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


def errors(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """What of `value` is not as `schema` has it; an unknown field is an error, as for kubectl."""
    text_or_number = schema.get("x-kubernetes-int-or-string", False)
    expected = (int, str) if text_or_number else _TYPES.get(schema.get("type", ""), object)
    # For Python a bool is an int too.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        kind = "integer or string" if text_or_number else schema.get("type")
        yield f"{path}: expected {kind}, found {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: expected one of {schema['enum']}, found {value!r}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{path}: expected {schema['pattern']}, found {value!r}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from errors(schema.get("items", {}), item, f"{path}[{number}]")
    if not isinstance(value, dict):
        return
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: missing"
    fields = schema.get("properties", {})
    free = "properties" not in schema or _ANYTHING.items() <= schema.items()
    others = schema.get("additionalProperties", {} if free else None)
    for name, item in value.items():
        field = fields.get(name, others)
        if field is None:
            yield f"{path}.{name}: unknown"
        else:
            yield from errors(field, item, f"{path}.{name}")


def differences(ours: dict[str, Any], published: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where `ours` allows what `published` does not: fields, types, values, missing fields."""
    for key in ("type", "x-kubernetes-int-or-string"):
        if ours.get(key) != published.get(key):
            yield f"{path}: {key} is {published.get(key)!r}, and {ours.get(key)!r} in ours"
    if "enum" in published and "enum" in ours and not set(ours["enum"]) <= set(published["enum"]):
        yield f"{path}: the values are {published['enum']}, and {ours['enum']} in ours"
    for name in published.get("required", ()):
        if name not in ours.get("required", ()):
            yield f"{path}.{name}: required, and not in ours"
    for name, field in ours.get("properties", {}).items():
        other = published.get("properties", {}).get(name)
        if other is not None:
            yield from differences(field, other, f"{path}.{name}")
        elif "properties" in published:
            yield f"{path}.{name}: only in ours"
    for key in ("items", "additionalProperties"):
        if key in ours:
            yield from differences(ours[key], published.get(key, {}), f"{path}[]")
