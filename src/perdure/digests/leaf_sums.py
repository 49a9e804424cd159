"""The sums of every leaf of a state, each computed where its array is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from perdure.digests.memory_sums import SMALL_BYTES, Sums, byte_sums, small_sums
from perdure.state.adapter import ADAPTERS, Adapter, Node, OneByOne, adapter
from perdure.state.leaf_spec import LeafSpec
from perdure.state.stateful import Stateful
from perdure.state.tree_flatten import flatten
from perdure.store.leaf import Leaf

_FRAMEWORKS = {"jax": "perdure.digests.jax_arrays", "torch": "perdure.digests.torch_arrays"}
"""The modules whose `TAKER` takes arrays that are not in the memory of this process as a whole."""

_NOTHING = memoryview(b"")


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


class _SummedLeaf(Leaf, frozen=True, gc=False, kw_only=True):
    """A leaf whose bytes were summed already, and are not kept."""

    sums: LeafSums | LaterSums


class _SummingAdapter(OneByOne):
    """An adapter that keeps the bytes of small leaves only; the others are summed one by one."""

    def __init__(self, inner: Adapter, taker: ArrayTaker) -> None:
        self._inner = inner
        self._take = taker.take
        self.finish = taker.finish

    def leaf(self, value: Any) -> Leaf | None:
        taken = self._take(value)
        if taken is None:
            leaf = self._inner.leaf(value)
            if leaf is None or len(leaf.data) <= SMALL_BYTES:
                return leaf
            taken = _sums_of_leaf(leaf)
        return _SummedLeaf(taken.dtype, taken.shape, _NOTHING, sums=taken)

    def spec(self, value: Any) -> LeafSpec | None:
        return self._inner.spec(value)

    def load(self, like: Any, leaf: Leaf) -> Any:
        return self._inner.load(like, leaf)

    def variable(self, value: Any) -> Stateful | None:
        return self._inner.variable(value)

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        return self._inner.node(value, stored)


def sums_of_leaves(leaves: Mapping[str, Leaf]) -> dict[str, LeafSums]:
    """The sums of leaves whose bytes are in memory, by path."""
    sums, small = {}, []
    for path, leaf in leaves.items():
        if type(leaf) is _SummedLeaf:
            taken = leaf.sums
            if isinstance(taken, LaterSums):
                first, second = taken.receive().tolist()
                taken = LeafSums(taken.dtype, taken.shape, taken.nbytes, (first, second))
            sums[path] = taken
        elif len(leaf.data) <= SMALL_BYTES:
            small.append(path)
        else:
            sums[path] = _sums_of_leaf(leaf)
    both = small_sums([leaves[path].data for path in small])
    for path, pair in zip(small, both, strict=True):
        leaf = leaves[path]
        sums[path] = LeafSums(leaf.dtype, leaf.shape, len(leaf.data), pair)
    return sums


def sums_by_path(tree: Any) -> dict[str, LeafSums]:
    """The sums of the leaves that a snapshot of `tree` has, by path."""
    adapters = _summing_adapters()
    leaves = flatten(tree, adapters=adapters)
    for summing in adapters:
        summing.finish()
    return sums_of_leaves(leaves)


def _sums_of_leaf(leaf: Leaf) -> LeafSums:
    first, second = byte_sums(np.frombuffer(leaf.data, np.uint8)).tolist()
    return LeafSums(leaf.dtype, leaf.shape, leaf.nbytes, (first, second))


def _summing_adapters() -> list[_SummingAdapter]:
    adapters = []
    for framework in ADAPTERS:
        if framework in sys.modules:
            module = _FRAMEWORKS.get(framework)
            taker = import_module(module).TAKER() if module else ArrayTaker()
            adapters.append(_SummingAdapter(adapter(framework), taker))
    return adapters
