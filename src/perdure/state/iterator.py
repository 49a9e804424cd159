"""Iterators with a position: `get_state` and `set_state`, as in Grain.

A position is stored as one string, because its structure may change while the iterator runs. Invariant:
it is restored equal, with all types, or the save is refused. That of Grain also says what decides the
order of the elements.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from perdure.errors import StateError
from perdure.store.format import hash_bytes

_PARENTS = ("_map_parent", "_iter_parent", "_maybe_nonnative_parent")
_SEEDS = ("_seed_rng_seed", "_seed")
_COMPARED = ("sampler", "data_source")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Order = dict[str, list[int]]
"""The seeds and the lengths of the datasets below an iterator."""


def is_positioned(value: Any) -> bool:
    """Whether `value` is an iterator whose position can be restored. (Generators have no `next`.)"""
    return (
        hasattr(value, "__next__") and hasattr(value, "set_state") and hasattr(value, "get_state")
    )


def position(iterator: Any) -> str:
    """The position of an iterator as text; raises `StateError` for a value without an exact form."""
    state = iterator.get_state()
    if isinstance(state, bytes):
        state = _hash_texts(state)
        try:
            return f"b{state.decode()}"
        except UnicodeDecodeError:
            return f"x{state.hex()}"
    order = _order_of(iterator)
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
    """Set an iterator to a position and return it; `StateError` if Grain would give other elements."""
    kind, rest = text[:1], text[1:]
    if kind == "g":
        order, state = json.loads(rest, object_hook=_decode)
        _require_same_order(order, iterator)
        iterator.set_state(state)
    elif kind == "j":
        iterator.set_state(json.loads(rest, object_hook=_decode))
    else:
        state = rest.encode() if kind == "b" else bytes.fromhex(rest)
        iterator.set_state(_restore_texts(state, iterator))
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


def _order_of(iterator: Any) -> Order | None:
    """The seeds and lengths below an iterator of Grain; None for any other.

    Grain has no public names for them. What a release does not have under these names is left out.
    """
    grain = sys.modules.get("grain")
    if grain is None or not isinstance(iterator, getattr(grain, "DatasetIterator", ())):
        return None
    order: Order = {"seeds": [], "lengths": []}
    pending, seen = [iterator], set[int]()
    while pending:
        node = pending.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        seeds: list[Any] = [getattr(node, name, None) for name in _SEEDS]
        order["seeds"] += [int(seed) for seed in seeds if hasattr(seed, "__index__")]
        if isinstance(node, grain.MapDataset) and [len(node)] != order["lengths"][-1:]:
            order["lengths"].append(len(node))  # a transformation that keeps the length adds none
        pending += getattr(node, "_parents", ())
        pending += [getattr(node, name) for name in _PARENTS if hasattr(node, name)]
    return order


def _require_same_order(saved: Order, iterator: Any) -> None:
    present = _order_of(iterator) or {}
    for name, expected in saved.items():
        found = present.get(name)
        if expected and found and found != expected:
            raise StateError(
                f"the {name} of the Grain datasets are not those that this iterator was saved with: "
                f"expected {expected}, found {found}, from the iterator to its source. Its position "
                f"would be that of other elements. Create it with the same source, seed, batch size "
                f"and other transformations, or restore the other members only (`leaves`)."
            )


def _hash_texts(state: bytes) -> bytes:
    """The position of a `grain.DataLoader` with hashes in place of two texts, which Grain compares
    in `set_state` and may be as long as the data; any other unchanged."""
    position = _loader_position(state)
    if position is None or not all(isinstance(position[name], str) for name in _COMPARED):
        return state
    hashes = {name: {"blake3": _text_hash(position[name])} for name in _COMPARED}
    return json.dumps({**position, **hashes}, sort_keys=True).encode()


def _restore_texts(state: bytes, iterator: Any) -> bytes:
    """A position of `_hash_texts` with the texts of `iterator`, which must have the same hashes."""
    position = _loader_position(state)
    if position is None or not all(isinstance(position[name], dict) for name in _COMPARED):
        return state
    present = _loader_position(iterator.get_state()) or {}
    for name in _COMPARED:
        text = present.get(name)
        if not isinstance(text, str) or _text_hash(text) != position[name].get("blake3"):
            raise StateError(
                f"the {name.replace('_', ' ')} of this grain.DataLoader is not the one that it was "
                f"saved with. Grain compares the `repr`, which is {str(text)[:200]!r} here. Create it "
                f"with the same arguments and shard options."
            )
        position[name] = text
    return json.dumps(position).encode()


def _loader_position(state: bytes) -> dict[str, Any] | None:
    try:
        position = json.loads(state)
    except ValueError:
        return None
    fits = isinstance(position, dict) and position.keys() >= {"last_seen_indices", *_COMPARED}
    return position if fits else None


def _text_hash(text: str) -> str:
    # The default `repr` of an object has its address, which is no property of the data.
    return hash_bytes(_ADDRESS.sub("", text).encode(errors="backslashreplace"))
