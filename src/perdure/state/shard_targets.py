"""Which elements of a checkpoint this process needs for a target whose arrays are sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from perdure.errors import StateError
from perdure.state.adapter import loaded_adapters
from perdure.state.adapter_choice import SpecsBelow
from perdure.state.leaf_spec import Difference, LeafSpec
from perdure.state.paths import join_part
from perdure.state.per_rank import current_rank_context, rank_context
from perdure.state.restore_request import RestoreRequest
from perdure.state.walk import Walk
from perdure.store.shard_plan import Region


class ShardTarget(NamedTuple):
    """A sharded array of a target, and the elements of it that this process has."""

    like: Any
    regions: tuple[Region, ...]


def needed_regions(
    like: Any, request: RestoreRequest, stored: Mapping[str, LeafSpec]
) -> dict[str, tuple[Region, ...]]:
    """The elements that this process needs, by the path of an array in the checkpoint.

    Arrays of which it needs all elements are left out. If the target does not fit the checkpoint, all
    are: the restore then says why.
    """
    renaming = request.renaming
    specs = renaming.rename(stored)
    context = current_rank_context()
    try:
        with rank_context(context.index, context.count):
            walk = Walk(like, specs, selection=request.selection)
        targets = shard_targets(walk, specs)
    except StateError:
        return {}
    found = {}
    for path, spec in stored.items():
        target = targets.get(renaming(path))
        if target is not None and tuple(target.like.shape) == spec.shape:
            found[path] = target.regions
    return found


def misplaced(values: Mapping[str, Any]) -> Iterator[Difference]:
    """The arrays of a target whose sharding does not fit their shape."""
    adapters = [adapter for adapter in loaded_adapters() if hasattr(adapter, "misplaced")]
    for adapter in adapters:
        for path, value in values.items():
            if reason := adapter.misplaced(value):  # type: ignore[attr-defined]
                yield Difference(path, reason=reason)


def shard_targets(walk: Walk, specs: Mapping[str, LeafSpec]) -> dict[str, ShardTarget]:
    """The sharded arrays of a target by path; `specs` has the stored leaves by their paths there."""
    adapters = [adapter for adapter in loaded_adapters() if hasattr(adapter, "regions")]
    if not adapters:
        return {}
    values = dict(walk.by_path)
    for path, node in walk.objects.items():
        below = SpecsBelow(specs, path)
        for part, value in node.sharded_values(below).items():
            values[join_part(path, part)] = value
    targets = {}
    for path, value in values.items():
        for adapter in adapters:
            if (regions := adapter.regions(value)) is not None:  # type: ignore[attr-defined]
                targets[path] = ShardTarget(value, regions)
                break
    return targets
