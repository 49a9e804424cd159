"""`digest`: 128 bits that tell two states apart, computed where the arrays are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from perdure.digests.leaf_sums import LeafSums, sums_by_path, sums_of_leaves
from perdure.errors import StateError
from perdure.store.leaf import Leaf

VERSION = 1
"""The number of the construction. Digests of different versions are never equal."""

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
            An `ArrayDigest` stands for the array that it was computed from.

    If an array has shards in several processes, all of them have to call this with the same tree.

    Raises:
        UnsupportedLeafError: a value cannot be stored exactly. The message starts with its path.
    """
    return combined(leaf_digests(tree))


def leaf_digests(tree: Any) -> dict[str, Digest]:
    """The digest of each leaf of `tree` by its path, in the order of the paths; see `digest`.

    That of a leaf depends on its path too. `combined` makes the digest of the state of them.
    """
    return {path: _of_leaf(path, sums) for path, sums in sorted(sums_by_path(tree).items())}


def leaf_digests_of_each(trees: Sequence[Any]) -> list[dict[str, Digest]]:
    """`leaf_digests` of several trees, whose small leaves are summed together."""
    digests: list[dict[str, Digest]] = [{} for _ in trees]
    for path, sums in sorted(sums_by_path(list(trees)).items()):
        number, _, inside = path.partition("/")
        digests[int(number)][inside] = _of_leaf(inside, sums)
    return digests


def digests_of_leaves(leaves: Mapping[str, Leaf]) -> dict[str, Digest]:
    """The same of leaves that are in memory, such as those of a checkpoint."""
    return {path: _of_leaf(path, sums) for path, sums in sorted(sums_of_leaves(leaves).items())}


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


def _of_leaf(path: str, leaf: LeafSums) -> Digest:
    fields = [path, leaf.dtype, leaf.shape, leaf.nbytes, *leaf.sums]
    return _hashed(["leaf", VERSION, *fields])


def _hashed(fields: list[Any]) -> Digest:
    made = object.__new__(Digest)  # without a check of the text that is made here
    object.__setattr__(made, "hex", blake3(msgspec.json.encode(fields)).hexdigest(16))
    return made
