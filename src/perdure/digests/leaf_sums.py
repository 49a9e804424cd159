"""The sums of every leaf of a state, each computed where its array is."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from perdure.digests.memory_sums import Sums, byte_sums
from perdure.state.adapter import ADAPTERS, Adapter, Node, adapter
from perdure.state.leaf_spec import LeafSpec
from perdure.state.stateful import Stateful
from perdure.state.tree_flatten import flatten
from perdure.store.leaf import Leaf

_FRAMEWORKS = {"jax": "perdure.digests.jax_arrays", "torch": "perdure.digests.torch_arrays"}
"""The modules whose `TAKER` takes arrays that are not in the memory of this process as a whole."""

_RECORD = struct.Struct("<QQQ")


class LeafSums(NamedTuple):
    """What the digest of a leaf is made of, besides its path."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sums: tuple[int, int]


class LaterSums(NamedTuple):
    """The sums of an array that a device, or another process, has still to deliver."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    receive: Callable[[], Sums]


class ArrayTaker:
    """Takes the arrays of one framework whose bytes are not all in the memory of this process."""

    def take(self, value: Any) -> LeafSums | LaterSums | None:
        """The sums of an array; None for a value whose adapter returns its bytes without a copy."""
        return None

    def finish(self) -> None:
        """Bring all sums here. Called once, after the last `take`, before any `receive`."""


class _SummingAdapter:
    """An adapter whose leaves have 24 bytes: the number of bytes of the array and its two sums."""

    def __init__(self, inner: Adapter, taker: ArrayTaker) -> None:
        self._inner = inner
        self._taker = taker
        self._later: list[tuple[bytearray, LaterSums]] = []

    def leaf(self, value: Any) -> Leaf | None:
        taken = self._taker.take(value)
        if taken is None:
            leaf = self._inner.leaf(value)
            if leaf is None:
                return None
            taken = sums_of_leaf(leaf)
        record = bytearray(_RECORD.size)
        if isinstance(taken, LaterSums):
            self._later.append((record, taken))
        else:
            _RECORD.pack_into(record, 0, taken.nbytes, *taken.sums)
        return Leaf(taken.dtype, taken.shape, memoryview(record), frozen=True)

    def finish(self) -> None:
        self._taker.finish()
        for record, later in self._later:
            _RECORD.pack_into(record, 0, later.nbytes, *map(int, later.receive()))

    def spec(self, value: Any) -> LeafSpec | None:
        return self._inner.spec(value)

    def load(self, like: Any, leaf: Leaf) -> Any:
        return self._inner.load(like, leaf)

    def variable(self, value: Any) -> Stateful | None:
        return self._inner.variable(value)

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        return self._inner.node(value, stored)


def sums_of_leaf(leaf: Leaf) -> LeafSums:
    """The sums of a leaf whose bytes are in memory."""
    sums = byte_sums(np.frombuffer(leaf.data, np.uint8))
    return LeafSums(leaf.dtype, leaf.shape, leaf.nbytes, (int(sums[0]), int(sums[1])))


def sums_by_path(tree: Any) -> dict[str, LeafSums]:
    """The sums of the leaves that a snapshot of `tree` has, by path."""
    adapters = _summing_adapters()
    leaves = flatten(tree, adapters=adapters)
    for summing in adapters:
        summing.finish()
    sums = {}
    for path, leaf in leaves.items():
        nbytes, *both = _RECORD.unpack(leaf.data)
        sums[path] = LeafSums(leaf.dtype, leaf.shape, nbytes, (both[0], both[1]))
    return sums


def _summing_adapters() -> list[_SummingAdapter]:
    adapters = []
    for framework in ADAPTERS:
        if framework in sys.modules:
            module = _FRAMEWORKS.get(framework)
            taker = import_module(module).TAKER() if module else ArrayTaker()
            adapters.append(_SummingAdapter(adapter(framework), taker))
    return adapters
