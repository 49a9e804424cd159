"""Random generators of Python, NumPy and PyTorch: their states as plain values, and back."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np

from perdure.errors import StateError, UnsupportedLeafError

SEED_SEQUENCE = "seed_sequence"
"""The key of the values on which `spawn` depends: the seed, and how often `spawn` was called."""

# Older releases of NumPy cannot restore the seed sequence of a generator.
_RESTORES_SEED = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
_KINDS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator of Python, NumPy or PyTorch."""
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(value, getattr(torch, "Generator", ()))
    return is_torch or isinstance(value, _KINDS)


def generator_name(value: Any) -> str:
    """What `new_generator` makes a generator of the same kind from."""
    if isinstance(value, np.random.Generator):
        return f"numpy.random.{type(value.bit_generator).__name__}"
    name = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    device = getattr(value, "device", None)
    return name if device is None or device.type == "cpu" else f"{name} {device.type}"


def new_generator(name: str) -> Any:
    """A generator of the kind that `generator_name` has named; raises `StateError` for others."""
    if name.startswith("torch.Generator"):
        return sys.modules["torch"].Generator(name.partition(" ")[2] or "cpu")
    if name == "random.Random":
        return random.Random()
    if name == "numpy.RandomState":
        return np.random.RandomState()
    bits = getattr(np.random, name.rpartition(".")[2], None)
    if isinstance(bits, type) and issubclass(bits, np.random.BitGenerator):
        return np.random.Generator(bits()) if name.startswith("numpy.random.") else bits()
    raise StateError(f"the program has no generator there, and a {name} cannot be made")


def read_generator(value: Any, *, has_seed: bool = True) -> Any:
    """The state of a generator; `has_seed` includes the seed sequence of one of NumPy."""
    if isinstance(value, random.Random):
        plain = type(value).getstate is random.Random.getstate
        if not plain or not vars(value).keys() <= {"gauss_next"}:
            raise UnsupportedLeafError(
                f"a {type(value).__qualname__} has no state that can be restored exactly; expected a "
                f"random.Random. Use one, or leave it out of the state."
            )
        version, words, gauss = value.getstate()
        # `gauss` is the second of two normal numbers that are drawn together, or None. It is stored
        # as a float in both cases, so that the structure of the state does not change.
        return {
            "version": version,
            "words": np.array(words, np.uint32),
            "has_gauss": gauss is not None,
            "gauss": 0.0 if gauss is None else gauss,
        }
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if not isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        return value.get_state()
    bits: Any = getattr(value, "bit_generator", value)
    state, seed = dict(bits.state), bits.seed_seq
    if _RESTORES_SEED and has_seed and isinstance(seed, np.random.SeedSequence):
        state[SEED_SEQUENCE] = seed_text(seed)
    return state


def write_generator(value: Any, state: Any) -> None:
    """Give a generator a state of its kind, which is not changed."""
    if isinstance(value, random.Random):
        gauss = state["gauss"] if state["has_gauss"] else None
        value.setstate((state["version"], tuple(np.asarray(state["words"]).tolist()), gauss))
    elif not isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        value.set_state(state)
    else:
        bits: Any = getattr(value, "bit_generator", value)
        state = dict(state)
        if (seed := state.pop(SEED_SEQUENCE, None)) is None:
            bits.state = state
            return
        bits.__setstate__((state, seed_from(seed)))


def split_off(value: Any) -> Any:
    """The state of a new generator of the same kind. Its seed is drawn from this one, so that the two
    have other numbers."""
    if isinstance(value, random.Random):
        return read_generator(random.Random(value.getrandbits(64)))
    if isinstance(value, np.random.RandomState):
        return np.random.RandomState(value.randint(2**32, dtype=np.uint32)).get_state(legacy=False)
    if not isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        torch = sys.modules["torch"]
        seed = torch.empty((), dtype=torch.int64, device=value.device).random_(generator=value)
        return torch.Generator(value.device).manual_seed(int(seed)).get_state()
    bits: Any = getattr(value, "bit_generator", value)
    return read_generator(type(bits)(int(bits.random_raw())))


def seed_text(seed: np.random.SeedSequence) -> str:
    """What a seed sequence spawns next, as JSON."""
    entropy = seed.entropy
    if entropy is not None and not isinstance(entropy, int):
        entropy = [int(word) for word in np.asarray(entropy).reshape(-1)]
    key = [int(part) for part in seed.spawn_key]
    return json.dumps([entropy, key, int(seed.pool_size), int(seed.n_children_spawned)])


def seed_from(text: str) -> np.random.SeedSequence:
    """The seed sequence of a `seed_text`."""
    entropy, key, pool_size, spawned = json.loads(text)
    return np.random.SeedSequence(
        entropy, spawn_key=tuple(key), pool_size=pool_size, n_children_spawned=spawned
    )
