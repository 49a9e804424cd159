"""Leaves as one message between the processes of a group."""

from __future__ import annotations

import json
from collections.abc import Mapping

from perdure.store.leaf import Leaf

_LENGTH = 8  # bytes of the number that says how long the header is


def pack_leaves(leaves: Mapping[str, Leaf]) -> bytes:
    """Path, dtype, shape and bytes of each leaf."""
    rows = [[path, leaf.dtype, leaf.shape, leaf.nbytes] for path, leaf in leaves.items()]
    header = json.dumps(rows).encode()
    parts = [len(header).to_bytes(_LENGTH), header, *(leaf.data for leaf in leaves.values())]
    return b"".join(parts)


def unpack_leaves(message: bytes) -> dict[str, Leaf]:
    """The leaves of a message of `pack_leaves`, over its memory."""
    data = memoryview(message)
    at = _LENGTH + int.from_bytes(data[:_LENGTH])
    leaves = {}
    for path, dtype, shape, nbytes in json.loads(bytes(data[_LENGTH:at])):
        leaves[path] = Leaf(dtype, tuple(shape), data[at : at + nbytes])
        at += nbytes
    return leaves
