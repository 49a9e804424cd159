"""The position of a `grain.DataLoader`, without the text of the data in it.

Grain compares `repr(sampler)` and `repr(data_source)` when a position is put back, and so has both in
every position; that of a list is all that it holds. Here their hashes take their place.
"""

from __future__ import annotations

import json
import re
from typing import Any

from perdure.errors import StateError
from perdure.store.format import hash_bytes

_COMPARED = ("sampler", "data_source")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def shortened(state: bytes) -> bytes:
    """`state` with hashes in place of the texts; any other position as it is."""
    position = _position(state)
    if position is None or not all(isinstance(position[name], str) for name in _COMPARED):
        return state
    hashes = {name: {"blake3": _hash(position[name])} for name in _COMPARED}
    return json.dumps({**position, **hashes}, sort_keys=True).encode()


def completed(state: bytes, iterator: Any) -> bytes:
    """What `shortened` gave, with the texts of `iterator` where they have the hashes of `state`.

    Raises `StateError` where the sampler or the data source is another one.
    """
    position = _position(state)
    if position is None or not all(isinstance(position[name], dict) for name in _COMPARED):
        return state
    own = _position(iterator.get_state()) or {}
    for name in _COMPARED:
        text = own.get(name)
        if not isinstance(text, str) or _hash(text) != position[name].get("blake3"):
            raise StateError(
                f"the {name.replace('_', ' ')} of this grain.DataLoader is not the one that it was "
                f"saved with: Grain tells them apart by `repr`, which gives {str(text)[:200]!r} here. "
                f"Make it with the same arguments, shard options included."
            )
        position[name] = text
    return json.dumps(position).encode()


def _position(state: bytes) -> dict[str, Any] | None:
    """The position of a `grain.DataLoader`; None for another one."""
    try:
        position = json.loads(state)
    except ValueError:
        return None
    fits = isinstance(position, dict) and position.keys() >= {"last_seen_indices", *_COMPARED}
    return position if fits else None


def _hash(text: str) -> str:
    # An object without a `repr` of its own says where it lies, which is no property of the data.
    return hash_bytes(_ADDRESS.sub("", text).encode(errors="backslashreplace"))
