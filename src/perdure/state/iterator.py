"""Iterators that say where they are: `get_state` and `set_state`, as Grain's have them.

The position becomes one string, because its structure is the iterator's own and changes as it runs.
"""

from __future__ import annotations

import json
from typing import Any

from perdure.errors import StateError
from perdure.state.grain_state import completed, shortened


def is_positioned(value: Any) -> bool:
    """Whether this is an iterator that can be put back. Random generators have the same two verbs,
    and no `__next__`."""
    return (
        hasattr(value, "__next__") and hasattr(value, "set_state") and hasattr(value, "get_state")
    )


def position(iterator: Any) -> str:
    """Where the iterator is. Raises `StateError` for a position that is neither bytes nor JSON."""
    state = iterator.get_state()
    if isinstance(state, bytes):
        return f"b{shortened(state).decode()}"
    try:
        return f"j{json.dumps(state, sort_keys=True)}"
    except TypeError as error:
        raise StateError(
            f"the position of a {type(iterator).__qualname__} has no exact form in a checkpoint: "
            f"expected bytes, or what JSON has, from `get_state`; found {state!r} ({error})."
        ) from None


def reposition(iterator: Any, text: str) -> Any:
    """The iterator, put back."""
    if text.startswith("b"):
        iterator.set_state(completed(text[1:].encode(), iterator))
    else:
        iterator.set_state(json.loads(text[1:]))
    return iterator
