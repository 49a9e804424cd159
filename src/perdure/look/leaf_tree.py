"""`tree`: what one checkpoint holds, from its manifest alone."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

from perdure.checkpoint.address import StoredCheckpoint, Where, open_checkpoint
from perdure.errors import ArgumentError, StepNotFoundError, StoreError
from perdure.look.leaf_reader import select_leaves, value_text
from perdure.look.tables import Shown, Table, printable, share_text, size_text
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.reader import chunk_size
from perdure.text import counted

VALUE_CHARACTERS = 40
"""The text of a scalar is cut after so many characters in a tree."""


@dataclass(frozen=True)
class LeafTreeNode:
    """A leaf, or a branch ("" is the state) with everything below it.

    `shared_nbytes`: those that the step before has too; None without one.
    """

    path: str
    depth: int
    leaf_count: int
    nbytes: int
    shared_nbytes: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    value: str | None = None

    def describe(self) -> str:
        """`float32[3,4]`, `int 7`, or the number of leaves of a branch."""
        if self.dtype is None:
            return counted(self.leaf_count, "leaf", "leaves")
        return value_text(self.dtype, self.shape, self.value, VALUE_CHARACTERS)


@dataclass(frozen=True, repr=False)
class LeafTree(Shown):
    """The leaves of a checkpoint as a tree, each branch before what is below it.

    `before` is the step before it; `unread_before` says why that cannot be read.
    """

    name: str
    before: int | None
    nodes: tuple[LeafTreeNode, ...]
    unread_before: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The tree for JSON."""
        return {
            "checkpoint": self.name,
            "before": self.before,
            "unread_before": self.unread_before,
            "nodes": [asdict(node) for node in self.nodes],
        }

    def _blocks(self) -> list[str | Table]:
        whole = self.nodes[0].nbytes if self.nodes else 0
        header = ["leaf", "value", "size", "share"]
        if self.before is not None:
            header.append(f"as in step {self.before}")
        rows = []
        for node in self.nodes:
            name = printable(node.path.rpartition("/")[2]) if node.path else "(state)"
            row = ["  " * node.depth + name, node.describe(), size_text(node.nbytes)]
            row.append(share_text(node.nbytes, whole))
            if node.shared_nbytes is not None:
                row.append(share_text(node.shared_nbytes, node.nbytes))
            rows.append(row)
        blocks: list[str | Table] = [self.name, Table(header, rows, ["share", *header[4:], "size"])]
        if self.unread_before:
            blocks.append(f"what the step before has too is not known: {self.unread_before}")
        return blocks


def tree(
    where: Where, *, leaves: str | Iterable[str] | None = None, depth: int | None = None
) -> LeafTree:
    """The leaves of a checkpoint as a tree; reads manifests and no chunk.

    Args:
        where: The checkpoint, as for `open_checkpoint`.
        leaves: Only the leaves that these patterns select; shares are those of the selection.
        depth: Show branches of so many parts and nothing below them.

    Raises:
        ArgumentError: A pattern selects nothing, or `depth` is negative.
        StoreError: As `open_checkpoint`.
    """
    check_depth(depth)
    checkpoint = open_checkpoint(where)
    entries = select_leaves(checkpoint, leaves)
    before, unread = _manifest_before(checkpoint)
    held = None if before is None else _contents_of(before)
    return LeafTree(
        checkpoint.name,
        None if before is None else before.step,
        tuple(_nodes(entries, held, depth)),
        unread,
    )


def check_depth(depth: object) -> None:
    """Raise `ArgumentError` unless `depth` is None or an integer of at least 0."""
    if depth is not None and (not isinstance(depth, SupportsIndex) or operator.index(depth) < 0):
        raise ArgumentError(f"depth: expected an integer of at least 0, found {depth!r}.")


def _manifest_before(checkpoint: StoredCheckpoint) -> tuple[Manifest | None, str]:
    """The manifest of the step before a checkpoint in its run, or why it cannot be read."""
    earlier = [step for step in checkpoint.run.steps() if step < checkpoint.step]
    try:
        return (checkpoint.run.manifest(earlier[-1]) if earlier else None), ""
    except StepNotFoundError:  # deleted since it was listed
        return None, ""
    except StoreError as error:
        return None, str(error)


def _contents_of(manifest: Manifest) -> set[object]:
    """The hashes of all chunks of a state, and path and text of each scalar."""
    hashes: set[object] = {chunk.hash for leaf in manifest.leaves for chunk in leaf.chunks}
    return hashes | {(leaf.path, leaf.text) for leaf in manifest.leaves if leaf.text is not None}


def _shared_bytes(entry: LeafEntry, held: set[object]) -> int:
    """Bytes of a leaf in chunks that `held` has; of a scalar, if the leaf has the same text there."""
    if entry.text is not None:
        return entry.nbytes if (entry.path, entry.text) in held else 0
    return sum(chunk_size(entry, n) for n, chunk in enumerate(entry.chunks) if chunk.hash in held)


def _nodes(
    entries: list[LeafEntry], held: set[object] | None, depth: int | None
) -> list[LeafTreeNode]:
    """A node for each leaf and each branch above it of at most `depth` parts, branches first."""
    totals: dict[str, list[int]] = {}
    for entry in entries:
        shared = 0 if held is None else _shared_bytes(entry, held)
        parts = entry.path.split("/") if entry.path else []
        for level in range(len(parts) + 1):
            if depth is None or level <= depth:
                total = totals.setdefault("/".join(parts[:level]), [0, 0, 0])
                for place, number in enumerate((1, entry.nbytes, shared)):
                    total[place] += number
    kinds: dict[str, Any] = {e.path: (e.dtype, e.shape, e.text) for e in entries}
    return [
        LeafTreeNode(
            path,
            path.count("/") + 1 if path else 0,
            count,
            nbytes,
            None if held is None else shared,
            *kinds.get(path, ()),
        )
        for path, (count, nbytes, shared) in totals.items()
    ]
