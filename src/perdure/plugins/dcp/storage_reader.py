"""What DCP knows of a checkpoint, its form in a run directory, and `Reader`, which loads it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import planner as planners
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from perdure import errors
from perdure.checkpoint.address import find_step
from perdure.checkpoint.chunk_sharing import ChunkSharing
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.runtime.heartbeats import beat
from perdure.state.leaf_values import plain_value
from perdure.state.paths import join_dotted, split_path
from perdure.state.process_random import ProcessRandom
from perdure.store import Storage
from perdure.store.format import DCP_LAYOUT, SCALAR_PREFIX, WEAK_PREFIX, decode_json, steps_text
from perdure.store.leaf import Leaf
from perdure.store.loading import ReadRequest
from perdure.store.manifest import LeafEntry, Manifest
from perdure.store.reader import load_entries

Place = tuple[str, tuple[int, ...] | None]  # a name of DCP, and offsets in the tensor or None

generators = ProcessRandom()  # of the process: drawn from counts since this import


class DcpLayout(Struct, omit_defaults=True):
    """What DCP knows of a checkpoint beyond its leaves; `boxes` have (tensor, offsets).

    `objects` are of `torch.save`; `keys` of names that are not split at dots; a `flat` state has none.
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
        raise errors.ArgumentError(
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


def leaf_path(item: planners.WriteItem) -> str:
    """The path of the leaf for an item, which is a whole value or one box of a tensor."""
    path = join_dotted("", item.index.fqn)
    data = item.tensor_data
    if data is None or data.chunk.sizes == data.size:
        return path
    return box_path(path, data.chunk)


def is_nothing(sizes: Sequence[int], of: Sequence[int]) -> bool:
    """Whether a chunk is an empty one of a tensor that is not, as the last processes have of a small
    tensor. It is no leaf: nothing is ever read from it."""
    return 0 in sizes and 0 not in of


def box_path(path: str, chunk: dcp_metadata.ChunkStorageMetadata) -> str:
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{path}/[{','.join(f'{start}:{start + size}' for start, size in ends)}]"


def layout_of(metadata: dcp_metadata.Metadata, entries: Sequence[LeafEntry]) -> DcpLayout:
    layout = DcpLayout(flat=metadata.planner_data is None)
    dtypes = {entry.path: entry.dtype for entry in entries}
    for name, entry in metadata.state_dict_metadata.items():
        path = join_dotted("", name)
        if ".".join(split_path(path)) != name:
            raise errors.StateError(f"{name!r}: a name of a state has an empty part; rename it.")
        if isinstance(entry, dcp_metadata.BytesStorageMetadata):
            if not dtypes[path].startswith(SCALAR_PREFIX):
                layout.objects.append(name)
            continue
        chunks = [chunk for chunk in entry.chunks if not is_nothing(chunk.sizes, entry.size)]
        if [chunk.sizes for chunk in chunks] != [entry.size]:
            layout.sizes[name] = tuple(entry.size)
            for chunk in chunks:
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


class Reader(StorageReader):
    """Loads a checkpoint of a run directory with `dcp.load`, into any sharding.

    Also one that a `CheckpointManager` has saved: its tensors have the names of DCP. Every chunk is
    verified before it is used, and a tensor of another dtype is refused and not converted. Each rank
    reads only the leaves that it needs. At the end the random generators of each rank are restored, if
    as many ranks load as have saved.

    Args:
        directory: Path, URL or `Storage` of the run directory, or one checkpoint of it, as for
            `perdure.load_checkpoint`.
        step: The step; None for the newest whose manifest is readable, with a warning for each newer
            one that is damaged.
        save_random_state: False leaves the generators alone.

    Attributes:
        step: The step that is loaded, once DCP has read its metadata.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        step: int | None = None,
        *,
        save_random_state: bool = ManagerOptions.save_random_state,
    ) -> None:
        super().__init__()
        self._run, self.step = find_step(directory, step)
        self._random = save_random_state
        self._manifest: Manifest | None = None
        self._entries: dict[Place, LeafEntry] = {}
        self._rank = DcpRank(0, 1)
        self._sharing: ChunkSharing | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP chooses its own storage for a path."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        refuse_id(checkpoint_id, "Reader(directory, step)")

    def read_metadata(self, *args: Any) -> dcp_metadata.Metadata:
        """What the checkpoint holds; StepNotFoundError, CorruptionError if the manifest is damaged."""
        beat("restore")
        run = self._run
        self._manifest = manifest = self._newest() if self.step is None else run.manifest(self.step)
        self.step = manifest.step
        layout = DcpLayout()
        for leaf in manifest.process_leaves:
            if leaf.path == DCP_LAYOUT and leaf.text:
                what = f"{run.where}: {DCP_LAYOUT} of step {self.step}"
                layout = decode_json(leaf.text.encode(), DcpLayout, what)
        self._entries = dict(named_leaves(manifest.leaves, layout))
        found: dict[str, Any] = {}
        for (name, offsets), leaf in self._entries.items():
            if offsets is None:
                found[name] = dcp_metadata.BytesStorageMetadata()
                continue
            chunk = dcp_metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(leaf.shape))
            if name not in found:
                size = torch.Size(layout.sizes.get(name, leaf.shape))
                dtype = getattr(torch, leaf.dtype.removeprefix(WEAK_PREFIX))
                found[name] = dcp_metadata.TensorStorageMetadata(
                    dcp_metadata.TensorProperties(dtype), size, []
                )
            found[name].chunks.append(chunk)
        keys = None
        if not layout.flat:
            keys = {name: layout.keys.get(name, tuple(name.split("."))) for name in found}
        return dcp_metadata.Metadata(found, planner_data=keys)

    def set_up_storage_reader(
        self, metadata: dcp_metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._rank = DcpRank.of(kwargs)

    def prepare_local_plan(self, plan: planners.LoadPlan) -> planners.LoadPlan:
        """Add which checkpoint this rank has found, and where ranks of its machine reach it, for
        `prepare_global_plan`."""
        assert self._manifest is not None, "DCP reads the metadata first"
        name = ""
        if self._rank.count > 1:
            self._close_sharing()
            self._sharing = ChunkSharing()
            name = self._sharing.listen()
        plan.storage_data = (self._manifest.step, self._manifest.fingerprint, name)
        return plan

    def prepare_global_plan(self, plans: list[planners.LoadPlan]) -> list[planners.LoadPlan]:
        """Raise `StateError` unless all ranks have found the same checkpoint."""
        found = [plan.storage_data for plan in plans]
        if len({checkpoint[:2] for checkpoint in found}) > 1:
            steps = ", ".join(f"rank {rank}: {step}" for rank, (step, *_) in enumerate(found))
            raise errors.StateError(
                f"{self._run.where}: the ranks found different checkpoints to load ({steps}); nothing "
                f"was changed. Name the step, and use a directory that all ranks see."
            )
        names = [name for *_, name in found]
        for plan in plans:
            plan.storage_data = names
        return plans

    def read_data(self, plan: planners.LoadPlan, planner: planners.LoadPlanner) -> Future[None]:
        """Fill the state with verified bytes; CorruptionError or MismatchError before that."""
        if self._sharing is not None:
            self._sharing.meet(plan.storage_data)
        try:
            wanted = [
                (item, self._record(item), self._target(item, planner)) for item in plan.items
            ]
            loaded, generators_of_ranks = self._load({leaf.path for _, leaf, _ in wanted})
        finally:
            self._close_sharing()  # other ranks may wait for this one
        for item, entry, target in wanted:
            leaf = loaded[entry.path]
            if target is None:
                data = saved_bytes(plain_value(leaf)) if leaf.is_scalar else bytes(leaf.data)
                planner.load_bytes(item, io.BytesIO(data))
                continue
            target.copy_(_part_of(leaf, item))
            planner.commit_tensor(item, target)
        if generators_of_ranks:  # last, because the other parts of a load may draw random numbers
            where = f"{self._run.where}: step {self.step}"
            for note in generators.put_back(generators_of_ranks, self._rank, where):
                errors.warn_caller(note)
        beat("compile", self.step)
        return done(None)

    def _close_sharing(self) -> None:
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = None

    def _newest(self) -> Manifest:
        damaged: list[str] = []
        for step in reversed(self._run.steps()):
            try:
                manifest = self._run.manifest(step)
            except errors.CorruptionError as error:
                damaged.append(f"{self._run.where}: step {step} is damaged: {error}")
                continue
            for line in damaged:
                errors.warn_caller(f"{line} Step {step} is loaded instead.")
            return manifest
        if damaged:
            raise errors.NoGoodCheckpointError("\n".join(damaged))
        raise errors.StepNotFoundError(
            f"{self._run.where}: expected a checkpoint, found none. Save one first."
        )

    def _record(self, item: planners.ReadItem) -> LeafEntry:
        index = item.storage_index
        return self._entries[index.fqn, None if index.offset is None else tuple(index.offset)]

    def _target(
        self, item: planners.ReadItem, planner: planners.LoadPlanner
    ) -> torch.Tensor | None:
        """The tensor that an item fills; None for an object. Raises `MismatchError`."""
        if item.type == planners.LoadItemType.BYTE_IO:
            return None
        target = planner.resolve_tensor(item).detach()
        entry = self._record(item)
        expected = str(target.dtype).removeprefix("torch.")
        stored = entry.dtype.removeprefix(WEAK_PREFIX)
        if stored != expected or target.size() != item.lengths:
            raise errors.MismatchError(
                f"{self._run.where}: step {self.step}, leaf {entry.path!r}: expected "
                f"{expected}{list(target.size())}, found {stored}{list(item.lengths)} in the "
                f"checkpoint; nothing was changed. Load it into a tensor of its own dtype."
            )
        return target

    def _load(self, paths: Set[str]) -> tuple[Mapping[str, Leaf], Mapping[str, Leaf]]:
        """The leaves at `paths`, and the random generators of all ranks; everything is verified."""
        assert self.step is not None, "DCP reads the metadata first"
        assert self._manifest is not None
        entries = [leaf for leaf in self._manifest.process_leaves if leaf.path != DCP_LAYOUT]
        try:
            needs = ReadRequest(paths.__contains__, sharing=self._sharing)
            leaves = self._run.load(self.step, needs).leaves if paths else {}
            wanted = entries if self._random else []
            return leaves, load_entries(self._run.storage, self._manifest, wanted)
        except errors.CorruptionError as error:
            older = [step for step in self._run.steps() if step < self.step]
            advice = f"load an older one ({steps_text(older)})" if older else "it is the oldest one"
            raise errors.CorruptionError(f"{error} Nothing of it was loaded; {advice}.") from error


def _part_of(leaf: Leaf, item: planners.ReadItem) -> torch.Tensor:
    dtype = getattr(torch, leaf.strong().dtype)
    if not leaf.nbytes:
        tensor = torch.empty(leaf.shape, dtype=dtype, device="cpu")
    else:
        tensor = torch.frombuffer(leaf.data, dtype=torch.uint8).view(dtype).reshape(leaf.shape)
    spans = zip(item.storage_offsets, item.lengths, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in spans)]
