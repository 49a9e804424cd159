"""Iterators with a position: `get_state` and `set_state`, as in Grain.

A position is stored as one string, because its structure belongs to the iterator and may change while
it runs. Invariant: a position is restored equal, with the type of every value in it, or the save is
refused.
"""

from __future__ import annotations

import json
from typing import Any

from perdure.errors import StateError
from perdure.state.grain_order import order_of, require_same_order
from perdure.state.grain_position import hash_texts, restore_texts


def is_positioned(value: Any) -> bool:
    """Whether `value` is an iterator whose position can be restored.

    Random generators have the same two methods, but no `__next__`.
    """
    return (
        hasattr(value, "__next__") and hasattr(value, "set_state") and hasattr(value, "get_state")
    )


def position(iterator: Any) -> str:
    """The position of an iterator as text.

    Raises:
        StateError: the position has a value other than None, booleans, numbers, strings, bytes, lists,
            tuples and dicts.
    """
    state = iterator.get_state()
    if isinstance(state, bytes):
        state = hash_texts(state)
        try:
            return f"b{state.decode()}"
        except UnicodeDecodeError:
            return f"x{state.hex()}"
    order = order_of(iterator)
    try:
        text = json.dumps(_encode(state), sort_keys=True)
        return f"j{text}" if order is None else f"g[{json.dumps(order, sort_keys=True)}, {text}]"
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"the position of a {type(iterator).__qualname__} has no exact form in a checkpoint: "
            f"expected from `get_state` bytes, or dicts, lists, tuples, numbers, strings, bytes and "
            f"None; found {error}."
        ) from None


def reposition(iterator: Any, text: str) -> Any:
    """Set an iterator to the position that `position` returned, and return the iterator.

    Raises:
        StateError: a `grain.DataLoader` has another sampler or data source than the saved one, or the
            datasets of another iterator of Grain have other seeds or lengths.
    """
    kind, rest = text[:1], text[1:]
    if kind == "g":
        order, state = json.loads(rest, object_hook=_decode)
        require_same_order(order, iterator)
        iterator.set_state(state)
    elif kind == "j":  # also an iterator of Grain in older checkpoints
        iterator.set_state(json.loads(rest, object_hook=_decode))
    else:
        state = rest.encode() if kind == "b" else bytes.fromhex(rest)
        iterator.set_state(restore_texts(state, iterator))
    return iterator


# A value that JSON has no type for is an object with one of these keys and no other.
_TUPLE, _BYTES, _DICT = "!tuple", "!bytes", "!dict"


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in (type(None), bool, int, float, str):
        return value
    if kind is list:
        return [_encode(part) for part in value]
    if kind is tuple:
        return {_TUPLE: [_encode(part) for part in value]}
    if kind is bytes:
        return {_BYTES: value.hex()}
    if kind is dict:
        if all(type(key) is str for key in value) and not value.keys() & {_TUPLE, _BYTES, _DICT}:
            return {key: _encode(part) for key, part in value.items()}
        pairs = [[_encode(key), _encode(part)] for key, part in value.items()]
        return {_DICT: sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))}
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def _decode(value: dict[str, Any]) -> Any:
    if value.keys() == {_TUPLE}:
        return tuple(value[_TUPLE])
    if value.keys() == {_BYTES}:
        return bytes.fromhex(value[_BYTES])
    if value.keys() == {_DICT}:
        return dict(value[_DICT])
    return value
