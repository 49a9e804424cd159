"""What DCP knows of a checkpoint, and how it becomes the leaves of a run directory, and back."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.futures import Future

from perdure.errors import ArgumentError, StateError
from perdure.state.paths import join_dotted, split_path
from perdure.state.process_random import ProcessRandom
from perdure.store.format import SCALAR_PREFIX, WEAK_PREFIX
from perdure.store.manifest import LeafEntry

Place = tuple[str, tuple[int, ...] | None]
"""A name of DCP, and the offsets of a box of the tensor; None for an object."""

generators = ProcessRandom()  # of the process: drawn from counts since this import


class DcpLayout(Struct, omit_defaults=True):
    """What DCP knows of a checkpoint beyond its leaves.

    `sizes` and `boxes` (tensor, offsets) are of tensors stored as boxes; `objects` of `torch.save`;
    `keys` of names that are not split at dots; a `flat` state has none.
    """

    sizes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, tuple[str, tuple[int, ...]]] = {}
    objects: list[str] = []
    keys: dict[str, tuple[str | int, ...]] = {}
    flat: bool = False


@dataclass(frozen=True)
class DcpRank:
    """This process in the group of DCP."""

    index: int
    count: int

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> DcpRank:
        """From the keyword arguments of `set_up_storage_writer`, which older releases leave out."""
        is_group = dist.is_available() and dist.is_initialized()
        rank = kwargs.get("rank")
        own = dist.get_rank() if is_group else 0
        return cls(own if rank is None else rank, dist.get_world_size() if is_group else 1)


def refuse_id(checkpoint_id: str | os.PathLike[str] | None, instead: str) -> None:
    if checkpoint_id is not None:
        raise ArgumentError(
            f"checkpoint_id: expected none, found {checkpoint_id!r}. A checkpoint of a run directory "
            f"is named by its step: {instead}."
        )


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def saved_bytes(value: Any) -> bytes:
    """What `torch.save` writes for a value, as DCP's planners do for every object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def leaf_path(item: WriteItem) -> str:
    """The path of the leaf for an item: that of the whole value, or of one box of a tensor."""
    path = join_dotted("", item.index.fqn)
    data = item.tensor_data
    if data is None or data.chunk.sizes == data.size:
        return path
    return box_path(path, data.chunk)


def box_path(path: str, chunk: ChunkStorageMetadata) -> str:
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{path}/[{','.join(f'{start}:{start + size}' for start, size in ends)}]"


def layout_of(metadata: Metadata, entries: Sequence[LeafEntry]) -> DcpLayout:
    """What the leaves do not say of a checkpoint."""
    layout = DcpLayout(flat=metadata.planner_data is None)
    dtypes = {entry.path: entry.dtype for entry in entries}
    for name, entry in metadata.state_dict_metadata.items():
        path = join_dotted("", name)
        if ".".join(split_path(path)) != name:
            raise StateError(f"{name!r}: a name of a state has an empty part; rename it.")
        if isinstance(entry, BytesStorageMetadata):
            if not dtypes[path].startswith(SCALAR_PREFIX):
                layout.objects.append(name)
        elif [chunk.sizes for chunk in entry.chunks] != [entry.size]:
            layout.sizes[name] = tuple(entry.size)
            for chunk in entry.chunks:
                layout.boxes[box_path(path, chunk)] = (name, tuple(chunk.offsets))
    for name, keys in (metadata.planner_data or {}).items():
        if tuple(keys) != tuple(name.split(".")):
            layout.keys[name] = tuple(keys)
    return layout


def named_leaves(
    leaves: Iterable[LeafEntry], layout: DcpLayout
) -> Iterator[tuple[Place, LeafEntry]]:
    """Each leaf that DCP can hold, by its name and its offsets (None for an object)."""
    objects = set(layout.objects)
    for leaf in leaves:
        name, offsets = layout.boxes.get(leaf.path, (".".join(split_path(leaf.path)), None))
        if leaf.text is not None or name in objects:
            yield (name, None), leaf
        elif isinstance(getattr(torch, leaf.dtype.removeprefix(WEAK_PREFIX), None), torch.dtype):
            yield (name, (0,) * len(leaf.shape) if offsets is None else offsets), leaf
