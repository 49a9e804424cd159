"""`has_type`: whether a value from a JSON document has the type that the code expects."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

MOST = 2**63
"""Numbers are smaller than this, so that sums and products of them are finite."""


def has_type(value: object, hint: Any) -> bool:
    """Whether `value` is a `hint`, such as `int | None`, `dict[str, float]`; a list is a tuple, too."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(has_type(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments if isinstance(value, str) else False
    if origin in (list, tuple):
        return isinstance(value, list) and all(has_type(v, arguments[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(has_type(v, arguments[1]) for v in value.values())
    if hint in (int, float):
        is_number = type(value) is int or (hint is float and type(value) is float)
        return is_number and -MOST < value < MOST  # pyright: ignore[reportOperatorIssue]
    return isinstance(value, NoneType if hint is None else hint)
