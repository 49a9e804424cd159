"""Iterators with a position: `get_state` and `set_state`, as in Grain.

A position is stored as any plain value is, with all types. A position of Grain also has the values that
decide the order of the elements.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from typing import Any

from perdure.errors import StateError
from perdure.state.adapter import Stateful, copy_state
from perdure.state.value_forms import encode_forms
from perdure.store.format import hash_bytes

_PARENTS = ("_map_parent", "_iter_parent", "_maybe_nonnative_parent")
_SEEDS = ("_seed_rng_seed", "_seed")
_COMPARED = ("sampler", "data_source")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_ORDER, _STATE = "!order", "state"
"""The keys of the position of an iterator of Grain."""

Order = dict[str, list[int]]
"""The seeds and the lengths of the datasets below an iterator."""


def is_positioned(value: Any) -> bool:
    """Whether `value` is an iterator whose position can be restored. (Generators have no `next`.)"""
    return (
        hasattr(value, "__next__") and hasattr(value, "set_state") and hasattr(value, "get_state")
    )


class PositionedIterator(Stateful):
    """An iterator with `get_state` and `set_state`."""

    def read(self) -> Any:
        """The position as plain values, which later steps of the iterator do not change."""
        state = self.target.get_state()
        if isinstance(state, bytes):
            return _hash_texts(state)
        plain, order = encode_forms(copy.deepcopy(state)), _order_of(self.target)
        return plain if order is None else {_ORDER: order, _STATE: plain}

    def load(self, state: Any) -> None:
        """Set the iterator to a position; `StateError` if Grain would give other elements."""
        if isinstance(state, dict) and state.keys() == {_ORDER, _STATE}:
            _require_same_order(state[_ORDER], self.target)
            state = state[_STATE]
        if isinstance(state, bytes):
            state = _restore_texts(state, self.target)
        self.target.set_state(copy_state(state))


def _order_of(iterator: Any) -> Order | None:
    """The seeds and lengths below an iterator of Grain (private names); None for any other."""
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
    if (position := _loader_position(state, str)) is None:
        return state
    hashes = {name: {"blake3": _text_hash(position[name])} for name in _COMPARED}
    return json.dumps({**position, **hashes}, sort_keys=True).encode()


def _restore_texts(state: bytes, iterator: Any) -> bytes:
    """A position of `_hash_texts` with the texts of `iterator`, which must have the same hashes."""
    if (position := _loader_position(state, dict)) is None:
        return state
    present = _loader_position(iterator.get_state(), str) or {}
    for name in _COMPARED:
        text = present.get(name)
        if text is None or _text_hash(text) != position[name].get("blake3"):
            raise StateError(
                f"the {name.replace('_', ' ')} of this grain.DataLoader is not the one that it was "
                f"saved with. Grain compares the `repr`, which is {str(text)[:200]!r} here. Create it "
                f"with the same arguments and shard options."
            )
        position[name] = text
    return json.dumps(position).encode()


def _loader_position(state: bytes, kind: type) -> dict[str, Any] | None:
    """The position of a `grain.DataLoader` whose two texts are of a class; None for any other."""
    try:
        position = json.loads(state)
    except ValueError:
        return None
    fits = isinstance(position, dict) and position.keys() >= {"last_seen_indices", *_COMPARED}
    return (
        position if fits and all(isinstance(position[name], kind) for name in _COMPARED) else None
    )


def _text_hash(text: str) -> str:
    # The default `repr` of an object has its address, which is no property of the data.
    return hash_bytes(_ADDRESS.sub("", text).encode(errors="backslashreplace"))
