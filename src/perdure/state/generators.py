"""Random generators of Python's `random` and of NumPy as members of a state, restored in place."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Node
from perdure.state.leaf_spec import LeafSpec

_SEED_SEQUENCE = "seed_sequence"
# Older releases of NumPy cannot restore the seed sequence of a generator.
_RESTORES_SEED = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def generator_node(value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | None:
    """The node of a generator; None for a value that is no generator."""
    if isinstance(value, random.Random):
        return Node([("", _python_state(value))], lambda new: _restore_python(value, new[0]), True)
    if isinstance(value, np.random.RandomState):
        children = value.get_state(legacy=False)
        return Node([("", children)], lambda new: value.set_state(new[0]), True)
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        bits = value if isinstance(value, np.random.BitGenerator) else value.bit_generator
        children = dict(bits.state)
        # What `spawn` returns depends on the seed, and on how often it was called.
        seed = bits.seed_seq
        has_seed = _RESTORES_SEED and (stored is None or _SEED_SEQUENCE in stored)
        if has_seed and isinstance(seed, np.random.SeedSequence):
            children[_SEED_SEQUENCE] = _seed_text(seed)
        return Node([("", children)], lambda new: _restore_numpy(bits, new[0]), True)
    return None


def _python_state(value: random.Random) -> dict[str, Any]:
    plain = type(value).getstate is random.Random.getstate
    if not plain or not vars(value).keys() <= {"gauss_next"}:
        raise UnsupportedLeafError(
            f"a {type(value).__qualname__} has no state that can be restored exactly; expected a "
            f"random.Random. Use one, or leave it out of the state."
        )
    version, words, gauss = value.getstate()
    # `gauss` is the second of two normal numbers that are drawn together, or None. It is stored as a
    # float in both cases, so that the structure of the state does not change.
    return {
        "version": version,
        "words": np.array(words, np.uint32),
        "has_gauss": gauss is not None,
        "gauss": 0.0 if gauss is None else gauss,
    }


def _restore_python(target: random.Random, state: Any) -> None:
    gauss = state["gauss"] if state["has_gauss"] else None
    target.setstate((state["version"], tuple(np.asarray(state["words"]).tolist()), gauss))


def _restore_numpy(bits: np.random.BitGenerator, state: Any) -> None:
    state = dict(state)
    seed = state.pop(_SEED_SEQUENCE, None)
    if seed is not None:
        bits.__setstate__((state, _seed_sequence(seed)))  # pyright: ignore[reportAttributeAccessIssue]
    else:
        bits.state = state


def _seed_text(seed: np.random.SeedSequence) -> str:
    entropy = seed.entropy
    if entropy is not None and not isinstance(entropy, int):
        entropy = [int(word) for word in np.asarray(entropy).reshape(-1)]
    key = [int(part) for part in seed.spawn_key]
    return json.dumps([entropy, key, int(seed.pool_size), int(seed.n_children_spawned)])


def _seed_sequence(text: str) -> np.random.SeedSequence:
    entropy, key, pool_size, spawned = json.loads(text)
    return np.random.SeedSequence(
        entropy, spawn_key=tuple(key), pool_size=pool_size, n_children_spawned=spawned
    )
