"""`Writer`: saves of DCP as checkpoints of a run directory."""

from __future__ import annotations

import dataclasses
import io
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from perdure.checkpoint import retention as retention_rules
from perdure.checkpoint.arguments import integer, metric_numbers, step_number
from perdure.checkpoint.group_save import require_visible
from perdure.checkpoint.manager_options import ManagerOptions
from perdure.errors import ArgumentError, StateError, warn_caller
from perdure.plugins.dcp import storage_reader
from perdure.runtime.heartbeats import beat
from perdure.state import process_random
from perdure.state.leaf_spec import add_path
from perdure.state.leaf_values import SCALARS, scalar_leaf
from perdure.state.torch_state import ADAPTER
from perdure.store import Run, Storage
from perdure.store.directory import Directory
from perdure.store.format import DCP_LAYOUT
from perdure.store.leaf import Leaf, RemoteLeaf
from perdure.store.manifest import LeafEntry
from perdure.store.pack_part import GroupState, PackPart, WriterShare, assemble, write_pack_part


class Writer(StorageWriter):
    """Writes one checkpoint of DCP into a run directory: `dcp.save`, `dcp.async_save`.

    Make one for each save, in the thread that trains: it captures the random generators of the process,
    which each rank saves beside the state. The checkpoint is committed once every rank has written its
    part, or not at all. A tensor is a leaf, under the path that a manager gives it; each shard of a
    `DTensor` is a leaf of its own, `PATH/[0:2,0:4]`; a number, string, bool, None or bytes is a scalar;
    any other object is the bytes that `torch.save` makes of it.

    Args:
        directory: Path, URL or `Storage` of the run directory, the same for all ranks.
        step: The step, above the newest committed one, the same for all ranks.
        metrics: Numbers that are recorded with it.
        max_to_keep: How many of the newest checkpoints stay after the commit; None keeps all.
        retention: Which others stay; None for the rules that a manager recorded in the run.
        save_random_state: As in `ManagerOptions`.

    Raises:
        ArgumentError: `step`, a metric or `max_to_keep` cannot be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        step: int,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        max_to_keep: int | None = None,
        retention: retention_rules.Retention | None = None,
        save_random_state: bool = ManagerOptions.save_random_state,
    ) -> None:
        super().__init__()
        self._directory = directory
        self._step = step_number(step)
        self._metrics = metric_numbers({} if metrics is None else metrics)
        self._max_to_keep = None if max_to_keep is None else integer("max_to_keep", max_to_keep)
        self._retention = retention
        self._captured = process_random.capture() if save_random_state else None
        self._run: Run | None = None
        self._rank = storage_reader.DcpRank(0, 1)
        beat("step", self._step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: DCP cannot choose this storage by a path, because a step is needed too."""
        return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        storage_reader.refuse_id(checkpoint_id, f"Writer(directory, step={self._step})")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ArgumentError(
                "use_collectives: expected True, found False. Without collectives no rank knows "
                "whether the others have written their parts, so that nothing could be committed."
            )
        self._rank = storage_reader.DcpRank.of(kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return dataclasses.replace(plan, storage_data=self._step)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Become the writer, before any rank writes; StateError, LockedError or SaveError."""
        if self._run is not None:  # an earlier try failed
            self._run.close()
        self._run = run = Run(self._directory, create=True)
        # A rank may fail before `finish`, which is then not called. Nothing else keeps the lock.
        weakref.finalize(self, run.close).atexit = False
        # A planner that keeps plans for later saves gives them back here, with their old steps; one may
        # make plans without any. `finish` compares the steps in all cases.
        steps = [plan.storage_data for plan in plans]
        if not getattr(SavePlanner, "_cached_all_plans", None) and None not in steps:
            self._require_one_step(run, steps)
        run.begin_writing()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the part of this rank; durable, and not yet committed, once the future is done."""
        leaves: dict[str, Leaf] = {}
        for item in plan.items:
            data = item.tensor_data
            if data is not None and storage_reader.is_nothing(data.chunk.sizes, data.size):
                continue
            path = storage_reader.leaf_path(item)
            try:
                leaves[path] = _leaf(item, planner)
            except StateError as error:
                add_path(error, path)
                raise
        index = self._rank.index
        local = (
            {}
            if self._captured is None
            else storage_reader.generators.leaves(self._captured, index)
        )
        run = self._run or Run(self._directory, create=True)
        stored = Directory(run.storage).stored_chunks()
        state = GroupState(self._step, per_rank=leaves, process_leaves=local)
        part = write_pack_part(run.storage, state, stored, WriterShare(index, 1))
        size = sum(leaf.nbytes for leaf in leaves.values())
        # The results alone are never those of an earlier save: DCP's planner may reuse its plans.
        return storage_reader.done([WriteResult(MetadataIndex(str(self._step)), size, part)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written, and apply the retention. The chief calls this.

        Raises StateError, HistoryError or SaveError, with nothing committed.
        """
        run = self._run
        assert run is not None, "DCP calls finish after prepare_global_plan"
        self._require_one_step(run, [rank[0].index.fqn for rank in results])
        parts = list(_without_doubles([rank[0].storage_data for rank in results]))
        layout = storage_reader.layout_of(
            metadata, [leaf for part in parts for leaf in part.per_rank]
        )
        text = msgspec.json.encode(layout).decode()
        chief = parts[0]
        parts[0] = msgspec.structs.replace(
            chief,
            process_leaves=(LeafEntry(DCP_LAYOUT, "py:str", text=text), *chief.process_leaves),
        )
        written = assemble({}, parts)
        leaves = {entry.path: _remote(entry) for entry in written.leaves}
        process_leaves = {entry.path: _remote(entry) for entry in written.process_leaves}
        try:
            with run.committer.prepare(self._step, leaves, process_leaves) as save:
                require_visible(run, parts, {place.pack for place in save.stored_chunks.values()})
                is_new = None if save.is_committed else written
                run.committer.commit(save, is_new, None, self._metrics)
            self._prune(run)
            for note in run.notes:
                warn_caller(note)
        finally:
            run.close()
            self._run = None

    def _require_one_step(self, run: Run, steps: Sequence[Any]) -> None:
        if len(set(steps)) == 1:
            return
        run.close()
        self._run = None
        listed = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
        raise StateError(
            f"{run.where}: expected a Writer with the same step in every rank, found {listed}. "
            f"Nothing was committed; every earlier checkpoint is unchanged."
        )

    def _prune(self, run: Run) -> None:
        if self._max_to_keep is None:
            return
        rules = self._retention
        if rules is None:
            if why := retention_rules.lost_rules(run.log.view):
                warn_caller(f"{why} Nothing is deleted.")
                return
            recorded = retention_rules.recorded_retention(run)
            rules = retention_rules.Retention() if recorded is None else recorded.retention
        plan = retention_rules.plan_prune(run, self._max_to_keep, rules, saved=self._step)
        if not plan.store.empty:
            run.execute(plan.store, plan.view)


def _leaf(item: WriteItem, planner: SavePlanner) -> Leaf:
    """The leaf of an item; raises `UnsupportedLeafError` for a tensor without an exact form."""
    data = planner.resolve_data(item)
    if item.type != WriteItemType.BYTE_IO:
        assert isinstance(data, torch.Tensor), "the item of a tensor"
        leaf = ADAPTER.leaf(data.detach())
        assert leaf is not None, "every tensor is a leaf"
        return leaf
    assert isinstance(data, io.BytesIO), "the item of an object"
    text = data.getvalue()
    lookup = getattr(planner, "lookup_object", None)
    value = None if lookup is None else lookup(item.index)
    # A planner may write another thing than the object; then its bytes are kept as they are.
    if lookup is not None and type(value) in SCALARS and storage_reader.saved_bytes(value) == text:
        return scalar_leaf(value)
    return Leaf("uint8", (len(text),), memoryview(text), frozen=True)


def _without_doubles(parts: Sequence[PackPart]) -> Iterator[PackPart]:
    """The parts without leaves that an earlier rank has written too (a planner may allow that)."""
    seen: set[str] = set()
    for part in parts:
        own = tuple(leaf for leaf in part.per_rank if leaf.path not in seen)
        seen.update(leaf.path for leaf in own)
        yield msgspec.structs.replace(part, per_rank=own)


def _remote(entry: LeafEntry) -> RemoteLeaf:
    return RemoteLeaf(entry.dtype, entry.shape, entry.nbytes, tuple(entry.hashes()))
