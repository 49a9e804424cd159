"""Which values of a target are never restored in part, although each of their leaves has a path."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

_CLASSES = (
    random.Random,
    np.random.RandomState,
    np.random.Generator,
    np.random.BitGenerator,
    np.ma.MaskedArray,
)


def is_whole(value: Any) -> bool:
    """Whether `value` is the state of an optimizer (optax, Flax, Keras), a random generator or a masked
    array: half of it would be a state that no run ever had."""
    return isinstance(value, _CLASSES) or _is_optax(value) or _is_optimizer(type(value))


def _is_optax(value: Any) -> bool:
    if type(value) is tuple:  # what `optax.chain` makes
        return bool(value) and all(map(_is_optax, value))
    return type(value).__module__.partition(".")[0] == "optax"


def _is_optimizer(kind: type) -> bool:
    """By name, because a framework may not be imported."""
    return any(
        base.__name__ in ("Optimizer", "BaseOptimizer")
        and base.__module__.partition(".")[0] in ("flax", "keras")
        for base in kind.__mro__
    )
