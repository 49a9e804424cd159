"""An XOR of all words, as `torch.hash_tensor` computes it, misses exchanges that the digest finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from perdure.digests import digest
from report import Row, row

STATES = 200


def rows() -> Iterator[Row]:
    """Exchanged elements and exchanged leaves, in float32 and float64."""
    ours: list[bool] = []
    missed: list[bool] = []
    for number in range(STATES):
        chance = np.random.default_rng(number)
        dtype = (np.float32, np.float64)[number % 2]
        state = {name: chance.normal(size=(33, 17)).astype(dtype) for name in ("a", "b")}
        other = {name: value.copy() for name, value in state.items()}
        if number % 4 < 2:
            one, two = chance.choice(state["a"].size, 2, replace=False)
            flat = other["a"].reshape(-1)
            flat[[one, two]] = flat[[two, one]]
        else:
            other["a"], other["b"] = other["b"], other["a"]
        ours.append(digest(state) != digest(other))
        missed.append(_xor(state) == _xor(other))
    yield row("digest: an exchange of two elements or leaves is found", ours)
    yield row("control: an XOR digest misses the same exchanges", missed)


def _xor(state: dict[str, Any]) -> int:
    words = [value.view(f"u{value.itemsize}").reshape(-1) for value in state.values()]
    return int(np.bitwise_xor.reduce(np.concatenate(words)))
