"""Inside a program that is being diagnosed: values as plain data that another process can put back.

Values that have no such form are left out.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np

from perdure.state.reachable import PLAIN_TYPES, generator_state, set_generator_state

Frozen = tuple[Any, ...]
"""A tag and the data of a value; see `freeze`."""

_DEEPEST = 6
_MOST_ITEMS = 10_000
_SMALL = 64  # numbers; more count as an array
_WORDS = 624
_BLOCKS = 2000  # of draws from the Mersenne Twister


def freeze(value: Any, depth: int = 0) -> Frozen | None:
    """Copy `value` into plain data; None if it has no such form, or cannot be read now."""
    if depth > _DEEPEST:
        return None
    try:
        return _frozen(value, depth)
    except Exception:  # noqa: BLE001 (objects of any library, read where they do not expect it)
        return None


def _frozen(value: Any, depth: int) -> Frozen | None:
    if isinstance(value, PLAIN_TYPES):
        return ("scalar", value)
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else ("numpy", value.copy())
    if (generator := generator_state(value)) is not None:
        return ("generator", generator)
    kind = type(value).__module__.partition(".")[0]
    if kind == "torch" and hasattr(value, "detach") and hasattr(value, "untyped_storage"):
        return ("torch", value.detach().clone())
    if kind in ("jax", "jaxlib") and hasattr(value, "addressable_shards"):
        return _frozen_jax(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return ("state", copy.deepcopy(value.state_dict()))
    if kind == "keras" and hasattr(value, "variables"):
        return ("variables", [np.array(each) for each in value.variables])
    return _frozen_container(value, depth)


def _frozen_jax(value: Any) -> Frozen:
    import jax

    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("jax", np.asarray(jax.random.key_data(value)), "key")
    return ("jax", np.asarray(value), "weak" if value.weak_type else "")


def _frozen_container(value: Any, depth: int) -> Frozen | None:
    if isinstance(value, dict):
        kinds = (*PLAIN_TYPES, tuple)
        if len(value) > _MOST_ITEMS or not all(isinstance(key, kinds) for key in value):
            return None
        return ("dict", {key: freeze(item, depth + 1) for key, item in value.items()})
    if isinstance(value, (list, deque, tuple)) and len(value) <= _MOST_ITEMS:
        parts = [freeze(item, depth + 1) for item in value]
        tag = "tuple" if isinstance(value, tuple) else "list"
        return None if any(part is None for part in parts) else (tag, parts)
    if isinstance(value, (set, frozenset)) and all(isinstance(item, PLAIN_TYPES) for item in value):
        return ("set", sorted(value, key=repr))
    return None


def kind_of(frozen: Frozen) -> str:
    """ "generator", "number" (a few numbers, a schedule) or "array"."""
    if frozen[0] == "generator":
        return "generator"
    return "number" if _size(frozen) <= _SMALL else "array"


def _size(value: Any) -> int:
    """How many numbers there are in plain data."""
    if isinstance(value, np.ndarray):
        return int(value.size)
    if hasattr(value, "untyped_storage"):
        return int(value.numel())
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return 1


def describe(frozen: Frozen) -> str:
    """A value in a few words: `0.1`, `float64[40]`."""
    tag, data = frozen[0], frozen[1]
    if tag == "scalar":
        return repr(data)[:40]
    if hasattr(data, "shape"):
        return f"{data.dtype}{list(data.shape)}"
    return "state_dict" if tag == "state" else str(tag)


def put_back(current: Any, frozen: Frozen) -> Any:
    """Give `current` the frozen value, in place if that is possible; returns what to bind."""
    tag, data = frozen[0], frozen[1]
    if tag == "scalar":
        return data
    if tag == "numpy":
        same = isinstance(current, np.ndarray) and current.shape == data.shape
        if same and current.dtype == data.dtype and current.flags.writeable:
            np.copyto(current, data)
            return current
        return data.copy()
    if tag == "torch":
        if hasattr(current, "detach") and current.shape == data.shape:
            current.detach().copy_(data)
            return current
        return data.clone()
    if tag == "jax":
        return _put_jax(data, frozen[2])
    if tag == "generator":
        set_generator_state(current, data)
    elif tag == "state":
        current.load_state_dict(copy.deepcopy(data))
    elif tag == "variables":
        for variable, value in zip(current.variables, data, strict=True):
            variable.assign(value)
    else:
        return _put_container(current, tag, data)
    return current


def _put_jax(data: Any, form: str) -> Any:
    import jax

    if form == "key":
        return jax.random.wrap_key_data(data)
    return jax.numpy.asarray(data[()].item() if form == "weak" else data)


def _put_container(current: Any, tag: str, data: Any) -> Any:
    if tag == "dict" and isinstance(current, dict):
        for key in [key for key in current if key not in data]:
            del current[key]
        for key, item in data.items():
            if item is not None:
                current[key] = put_back(current.get(key), item)
        return current
    if tag in ("list", "tuple"):
        old = [*(current if isinstance(current, (list, deque, tuple)) else ()), *[None] * len(data)]
        new = [put_back(item, part) for item, part in zip(old, data, strict=False)]
        if tag == "tuple":
            return type(current)(*new) if hasattr(current, "_fields") else tuple(new)
        if isinstance(current, (list, deque)):
            current.clear()
            current.extend(new)
            return current
    if tag == "set" and isinstance(current, set):
        current.clear()
        current.update(data)
        return current
    raise TypeError(f"a {tag} cannot be put in place of a {type(current).__name__}")


def have_one_seed(one: tuple[str, Any], other: tuple[str, Any]) -> bool | None:
    """Whether two states of a generator come from one seed; None if they do not show that."""
    (kind, a), (other_kind, b) = one, other
    if kind != other_kind:
        return None
    if kind in ("keras", "torch", "torch.Generator"):  # all begin with the seed
        return bytes(a[:8]) == bytes(b[:8])
    if kind != "random.Random" and "inc" in (state := a["state"]):  # PCG64: the stream
        return state["inc"] == b.get("state", {}).get("inc")
    if kind != "random.Random" and a["bit_generator"] != "MT19937":
        return None
    return _follows(_words(a), _words(b)) or _follows(_words(b), _words(a))


def _words(state: Any) -> np.ndarray[Any, Any]:
    """The words of a state of the Mersenne Twister."""
    return state["words"][:-1] if "words" in state else state["state"]["key"]


def _follows(first: np.ndarray[Any, Any], later: np.ndarray[Any, Any]) -> bool:
    """Whether the Mersenne Twister comes from the words `first` to `later` before many draws."""
    bits = np.random.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": {"key": first, "pos": _WORDS}}
    for _ in range(_BLOCKS):
        if np.array_equal(bits.state["state"]["key"], later):
            return True
        bits.random_raw(_WORDS, output=False)
    return False
