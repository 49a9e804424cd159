"""The messages of a save by a group: what each process begins with, the chief's orders, the
answers.

The chief collects the layouts of sharded arrays once, and again only if a shard has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from perdure.checkpoint.group_call import SentError
from perdure.checkpoint.slice_exchange import PeerAddress
from perdure.errors import SaveError
from perdure.store import Leaf
from perdure.store.format import hash_bytes
from perdure.store.leaf import RemoteLeaf
from perdure.store.manifest import Container
from perdure.store.pack_part import PackPart, ShardCopy
from perdure.store.shard_plan import Region, ShardLayout

BEGIN, LAYOUT, HASH = "begin", "layout", "hash"
WRITE, COMPARE, END = "write", "compare", "end"
"""What an order asks for."""


class LocalRegions(Struct, frozen=True, array_like=True):
    """The shards of one array that one process has, and the array's dtype and shape as text."""

    text: str
    shape: tuple[int, ...]
    itemsize: int
    regions: tuple[Region, ...]


class GroupLayouts(Struct, frozen=True):
    """The layouts of all sharded arrays of a state, each once; the number of the layout of each
    array; and the `digest_of` of the shards of each process."""

    layouts: tuple[ShardLayout, ...] = ()
    numbers: dict[str, int] = {}
    digests: tuple[str, ...] = ()

    def by_path(self) -> dict[str, ShardLayout]:
        """The layout of each array."""
        return {path: self.layouts[number] for path, number in self.numbers.items()}

    def digest(self) -> str:
        """Equal for processes that know the same layouts."""
        return hash_bytes(msgspec.msgpack.encode(self.digests))


def local_regions(leaves: Mapping[str, Leaf]) -> dict[str, LocalRegions]:
    """The shards of this process, by the path of their array."""
    return {
        path: LocalRegions(
            leaf.describe(), leaf.shards.shape, leaf.shards.itemsize, leaf.shards.regions
        )
        for path, leaf in sorted(leaves.items())
        if leaf.shards is not None
    }


def digest_of(regions: Mapping[str, LocalRegions]) -> str:
    """Changes if one of the shards has other elements; "" without any."""
    return hash_bytes(msgspec.msgpack.encode(regions)) if regions else ""


def merge_layouts(
    rows: Sequence[Mapping[str, LocalRegions]], digests: Sequence[str]
) -> GroupLayouts:
    """The layouts of all processes, from the shards of each; `SaveError` if they have other arrays."""
    texts = [{path: own.text for path, own in row.items()} for row in rows]
    for process, other in enumerate(texts):
        for path in sorted(texts[0].keys() | other.keys()):
            first, found = texts[0].get(path), other.get(path)
            if first != found:
                raise SaveError(
                    f"the processes of the group do not save the same sharded arrays: {path} is "
                    f"{first or 'no sharded array'} in process 0 and {found or 'none'} in process "
                    f"{process}. Nothing was saved. In a group every process saves a state of one "
                    f"structure."
                )
    numbers: dict[ShardLayout, int] = {}
    by_path: dict[str, int] = {}
    for path, own in rows[0].items():
        layout = ShardLayout(own.shape, own.itemsize, tuple(row[path].regions for row in rows))
        by_path[path] = numbers.setdefault(layout, len(numbers))
    return GroupLayouts(tuple(numbers), by_path, tuple(digests))


class SaveOrder(Struct):
    """What the chief asks all processes to do next. `layouts` are None if every process knows them,
    and `error` is why the save failed, for END."""

    what: str
    layouts: GroupLayouts | None = None
    addresses: list[PeerAddress | None] = []
    error: SentError | None = None


class SaveAnswer(Struct):
    """What one process answers to an order for a step, or why it cannot.

    For BEGIN, which needs no order: its own leaves by hashes, the `digest_of` its shards and the digest
    of the layouts that it knows, and the address for requests for slices. For LAYOUT its shards; for
    HASH hashes of the chunks that it would write; for WRITE the part that it has written; for COMPARE
    hashes.
    """

    step: int
    per_rank: dict[str, RemoteLeaf] = {}
    containers: dict[str, Container] = {}
    process_leaves: dict[str, RemoteLeaf] = {}
    shards: str = ""
    known: str = ""
    address: PeerAddress | None = None
    regions: dict[str, LocalRegions] = {}
    hashes: dict[int, str] = {}
    part: PackPart | None = None
    digests: dict[str, str] = {}
    copies: dict[str, ShardCopy] = {}
    error: SentError | None = None
