"""Digests of states: 128 bits that are equal for equal bits, computed where the arrays are."""

from perdure.digests.digest import (
    VERSION,
    Digest,
    combined,
    digest,
    digests_of_leaves,
    leaf_digests,
)

__all__ = ["digest", "leaf_digests"]
