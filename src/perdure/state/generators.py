"""Random generators as parts of a state: those of Python's `random` and of NumPy, restored in place."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Node, Spec

_SEEDED_BY = "seed_sequence"
# Before, NumPy could not put the seed sequence of a generator back, nor did its pickles have it.
_SEEDS = np.lib.NumpyVersion(np.__version__) >= "2.0.0"


def generator_node(value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
    """The node of a generator; None for another value."""
    if isinstance(value, random.Random):
        return Node([("", _python_state(value))], lambda new: _put_back_python(value, new[0]), True)
    if isinstance(value, np.random.RandomState):
        children = value.get_state(legacy=False)
        return Node([("", children)], lambda new: value.set_state(new[0]), True)
    if isinstance(value, (np.random.Generator, np.random.BitGenerator)):
        bits = value if isinstance(value, np.random.BitGenerator) else value.bit_generator
        children = dict(bits.state)
        # What `spawn` makes depends on the seed, and on how many were spawned before.
        seed = bits.seed_seq
        seeded = _SEEDS and (stored is None or _SEEDED_BY in stored)
        if seeded and isinstance(seed, np.random.SeedSequence):
            children[_SEEDED_BY] = _seed_text(seed)
        return Node([("", children)], lambda new: _put_back_numpy(bits, new[0]), True)
    return None


def _python_state(value: random.Random) -> dict[str, Any]:
    plain = type(value).getstate is random.Random.getstate
    if not plain or not vars(value).keys() <= {"gauss_next"}:
        raise UnsupportedLeafError(
            f"a {type(value).__qualname__} has no state that can be restored exactly; expected a "
            f"random.Random. Use one, or leave it out of the state."
        )
    version, words, gauss = value.getstate()
    # The second of two normal numbers that are made together: always a float, so that the structure
    # of the state does not depend on it.
    return {
        "version": version,
        "words": np.array(words, np.uint32),
        "has_gauss": gauss is not None,
        "gauss": 0.0 if gauss is None else gauss,
    }


def _put_back_python(target: random.Random, state: Any) -> None:
    gauss = state["gauss"] if state["has_gauss"] else None
    target.setstate((state["version"], tuple(np.asarray(state["words"]).tolist()), gauss))


def _put_back_numpy(bits: np.random.BitGenerator, state: Any) -> None:
    state = dict(state)
    seeded_by = state.pop(_SEEDED_BY, None)
    if seeded_by is not None:
        bits.__setstate__((state, _seed_sequence(seeded_by)))  # pyright: ignore[reportAttributeAccessIssue]
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
