"""`digest`: 128 bits that tell two states apart, from the sums of each leaf where its array is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from perdure.digests.memory_sums import SMALL_BYTES, Sums, byte_sums, small_sums
from perdure.errors import StateError
from perdure.state.adapter import Adapter, Node, Stateful, adapter, loaded_frameworks
from perdure.state.leaf_spec import LeafSpec
from perdure.state.snapshots import flatten
from perdure.store.leaf import Leaf

VERSION = 1
"""The number of the construction. Digests of different versions are never equal."""

_FRAMEWORKS = {"jax": "perdure.digests.jax_arrays", "torch": "perdure.digests.torch_arrays"}
"""The modules whose `TAKER` takes arrays that are not in the memory of this process as a whole."""

_NOTHING = memoryview(b"")

_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, order=True, slots=True)
class Digest:
    """128 bits as 32 lower-case hexadecimal digits, which `str` returns.

    Raises:
        StateError: `hex` is anything else.
    """

    hex: str

    def __post_init__(self) -> None:
        if not isinstance(self.hex, str) or not _DIGEST.fullmatch(self.hex):
            raise StateError(
                f"a digest has 32 lower-case hexadecimal digits; found {self.hex!r}. Make one with "
                f"`digest(tree)`, or from the text that `str(digest)` returned."
            )

    def __str__(self) -> str:
        return self.hex


def digest(tree: Any) -> Digest:
    """The digest of a state: equal for equal bits, and with near certainty only for these.

    It is a function of the path, dtype, shape and bits (in row-major order) of every leaf that a save
    of `tree` would store, and of nothing else: not of the framework, the device, the memory layout or
    the sharding. Only sums of 16 bytes leave an accelerator. docs/JOURNAL.md has the construction, its
    source and its collision bound. It finds faults; it does not withstand an adversary.

    Args:
        tree: what `CheckpointManager.save` takes: containers, arrays and scalars, modules, optimizers.

    If an array has shards in several processes, all of them have to call this with the same tree.

    Raises:
        UnsupportedLeafError: a value cannot be stored exactly. The message starts with its path.
    """
    return combined(leaf_digests(tree))


def leaf_digests(tree: Any) -> dict[str, Digest]:
    """The digest of each leaf of `tree` by its path, in the order of the paths; see `digest`.

    That of a leaf depends on its path too. `combined` makes the digest of the state of them.
    """
    return {path: _leaf_digest(path, sums) for path, sums in sorted(_sums_by_path(tree).items())}


def leaf_digests_of_each(trees: Sequence[Any]) -> list[dict[str, Digest]]:
    """`leaf_digests` of several trees, whose small leaves are summed together."""
    digests: list[dict[str, Digest]] = [{} for _ in trees]
    for path, sums in sorted(_sums_by_path(list(trees)).items()):
        number, _, inside = path.partition("/")
        digests[int(number)][inside] = _leaf_digest(inside, sums)
    return digests


def digests_of_leaves(leaves: Mapping[str, Leaf]) -> dict[str, Digest]:
    """The same of leaves that are in memory, such as those of a checkpoint."""
    found = sorted(_sums_of_leaves(leaves).items())
    return {path: _leaf_digest(path, sums) for path, sums in found}


def combined(leaves: Mapping[str, Digest]) -> Digest:
    """The digest of the state whose leaves have these digests.

    Raises:
        StateError: `leaves` is no mapping from paths to digests, as `leaf_digests` returns.
    """
    if not isinstance(leaves, Mapping):
        raise StateError(
            f"combined: expected a mapping from paths to digests, as `leaf_digests` returns; found a "
            f"{type(leaves).__name__}."
        )
    for path, leaf in leaves.items():
        if not isinstance(path, str) or not isinstance(leaf, Digest):
            raise StateError(
                f"combined: expected a `Digest` for each path, found {leaf!r} for {path!r}."
            )
    return _hashed(["state", VERSION, [leaves[path].hex for path in sorted(leaves)]])


def _leaf_digest(path: str, leaf: LeafSums) -> Digest:
    assert not callable(leaf.sums), "they have come"
    fields = [path, leaf.dtype, leaf.shape, leaf.nbytes, *leaf.sums]
    return _hashed(["leaf", VERSION, *fields])


def _hashed(fields: list[Any]) -> Digest:
    made = object.__new__(Digest)  # without a check of the text that is made here
    object.__setattr__(made, "hex", blake3(msgspec.json.encode(fields)).hexdigest(16))
    return made


class LeafSums(NamedTuple):
    """The digest of a leaf but for its path; a function gives sums that are still to come."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sums: tuple[int, int] | Callable[[], Sums]


class ArrayTaker:
    """Takes the arrays of one framework whose bytes are not all in the memory of this process."""

    def take(self, value: Any) -> LeafSums | None:
        """The sums of an array; None for a value whose adapter returns its bytes without a copy."""
        return None

    def finish(self) -> None:
        """Bring all sums here. Called once, after the last `take`, before any of them is used."""


class _SummedLeaf(Leaf, frozen=True, gc=False, kw_only=True):
    """A leaf whose bytes were summed already, and are not kept."""

    sums: LeafSums


class _SummingAdapter(Adapter):
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
            taken = _leaf_sums(leaf)
        return _SummedLeaf(taken.dtype, taken.shape, _NOTHING, sums=taken)

    def spec(self, value: Any) -> LeafSpec | None:
        return self._inner.spec(value)

    def load(self, like: Any, leaf: Leaf) -> Any:
        return self._inner.load(like, leaf)

    def variable(self, value: Any) -> Stateful | None:
        return self._inner.variable(value)

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        return self._inner.node(value, stored)


def _sums_of_leaves(leaves: Mapping[str, Leaf]) -> dict[str, LeafSums]:
    """The sums of leaves whose bytes are in memory, by path."""
    sums, small = {}, []
    for path, leaf in leaves.items():
        if type(leaf) is _SummedLeaf:
            taken = leaf.sums
            received = tuple(taken.sums().tolist()) if callable(taken.sums) else taken.sums
            sums[path] = taken._replace(sums=received)
        elif len(leaf.data) <= SMALL_BYTES:
            small.append(path)
        else:
            sums[path] = _leaf_sums(leaf)
    both = small_sums([leaves[path].data for path in small])
    for path, pair in zip(small, both, strict=True):
        leaf = leaves[path]
        sums[path] = LeafSums(leaf.dtype, leaf.shape, len(leaf.data), pair)
    return sums


def _sums_by_path(tree: Any) -> dict[str, LeafSums]:
    """The sums of the leaves that a snapshot of `tree` has, by path."""
    adapters = _summing_adapters()
    leaves = flatten(tree, adapters=adapters)
    for summing in adapters:
        summing.finish()
    return _sums_of_leaves(leaves)


def _leaf_sums(leaf: Leaf) -> LeafSums:
    first, second = byte_sums(np.frombuffer(leaf.data, np.uint8)).tolist()
    return LeafSums(leaf.dtype, leaf.shape, leaf.nbytes, (first, second))


def _summing_adapters() -> list[_SummingAdapter]:
    adapters = []
    for framework in loaded_frameworks():
        module = _FRAMEWORKS.get(framework)
        taker = import_module(module).TAKER() if module else ArrayTaker()
        adapters.append(_SummingAdapter(adapter(framework), taker))
    return adapters
