"""The position of a `grain.DataLoader`, with hashes instead of the text of its data.

Grain stores `repr(sampler)` and `repr(data_source)` in every position and compares them in
`set_state`. The `repr` of a list is the text of all its elements, so hashes are stored instead.
"""

from __future__ import annotations

import json
import re
from typing import Any

from perdure.errors import StateError
from perdure.store.format import hash_bytes

_COMPARED = ("sampler", "data_source")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def hash_texts(state: bytes) -> bytes:
    """The position with hashes in place of the two texts; any other position unchanged."""
    position = _position(state)
    if position is None or not all(isinstance(position[name], str) for name in _COMPARED):
        return state
    hashes = {name: {"blake3": _hash(position[name])} for name in _COMPARED}
    return json.dumps({**position, **hashes}, sort_keys=True).encode()


def restore_texts(state: bytes, iterator: Any) -> bytes:
    """A position of `hash_texts` with the texts of `iterator`, which must have the same hashes.

    Raises:
        StateError: the sampler or the data source differs from the saved one.
    """
    position = _position(state)
    if position is None or not all(isinstance(position[name], dict) for name in _COMPARED):
        return state
    present = _position(iterator.get_state()) or {}
    for name in _COMPARED:
        text = present.get(name)
        if not isinstance(text, str) or _hash(text) != position[name].get("blake3"):
            raise StateError(
                f"the {name.replace('_', ' ')} of this grain.DataLoader is not the one that it was "
                f"saved with. Grain compares the `repr`, which is {str(text)[:200]!r} here. Create it "
                f"with the same arguments and shard options."
            )
        position[name] = text
    return json.dumps(position).encode()


def _position(state: bytes) -> dict[str, Any] | None:
    """The fields of a `grain.DataLoader`'s position; None for the position of another iterator."""
    try:
        position = json.loads(state)
    except ValueError:
        return None
    fits = isinstance(position, dict) and position.keys() >= {"last_seen_indices", *_COMPARED}
    return position if fits else None


def _hash(text: str) -> str:
    # The default `repr` of an object has its address, which is no property of the data.
    return hash_bytes(_ADDRESS.sub("", text).encode(errors="backslashreplace"))
