"""What the adapter of PyTorch has to know about single tensors, and the shards of `DTensor`s."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from perdure.errors import UnsupportedLeafError
from perdure.runtime.memory_limit import MemoryLimit
from perdure.state.leaf_spec import LeafSpec
from perdure.state.leaf_values import cut, memory_axes
from perdure.state.per_rank import current_rank_context
from perdure.store.leaf import Leaf
from perdure.store.shard_plan import Region

LAZY = UninitializedTensorMixin
"""The base class of tensors that have no shape yet."""
PINNED_FROM = 1024 * 1024
"""Bytes of a tensor of a GPU from which its copy on the host is in pinned memory."""
_UNKNOWN = 2**62


def tensor_spec(tensor: torch.Tensor) -> LeafSpec:
    """dtype and shape of a tensor that is not lazy."""
    return LeafSpec(_dtype_name(tensor.dtype), tuple(tensor.shape))


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_shared_elements(value: Any) -> bool:
    """Whether elements of a tensor share memory (`expand`), so that PyTorch cannot copy into it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, LAZY):
        return False
    if value.layout != torch.strided or value.is_nested:
        return False
    steps = value.stride()
    return 0 in steps and any(
        n > 1 and step == 0 for n, step in zip(value.shape, steps, strict=True)
    )


def copy_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the elements of `value` into `tensor`; of elements that share memory only the first."""
    if has_shared_elements(tensor):
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
        tensor, value = tensor.detach()[once], value[once]
    with torch.no_grad():
        if has_other_order(tensor, value):
            tensor.data = torch.empty_like(value, dtype=tensor.dtype, device=tensor.device)
        tensor.copy_(value)


def axes_of(value: Any) -> tuple[int, ...] | None:
    """The `memory_axes` of a tensor; None for one that has no memory of its own."""
    if not isinstance(value, torch.Tensor) or isinstance(value, LAZY) or is_dtensor(value):
        return None
    if value.layout != torch.strided or value.is_nested or value.is_meta or value.is_contiguous():
        return None
    return memory_axes(value.shape, value.stride())


def has_other_order(tensor: Any, value: Any) -> bool:
    """Whether a tensor has its elements in another order in memory than the value to be copied."""
    return tensor is not value and axes_of(tensor) != axes_of(value) and tensor.shape == value.shape


def in_axes(tensor: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The same elements with these axes from the largest stride down."""
    return tensor.permute(*axes).contiguous().permute([*map(axes.index, range(len(axes)))])


ALIGNMENT = 64
"""The memory of PyTorch's tensors begins at a multiple of this."""


def is_dtensor(value: Any) -> bool:
    """Whether `value` is a `torch.distributed.tensor.DTensor`. Imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(value: Any) -> torch.Tensor:
    """The elements of a tensor that this process has, in the same memory."""
    if not is_dtensor(value):
        return value
    with torch.no_grad():
        return value.to_local()


def require_restorable(value: Any) -> None:
    """Raise `UnsupportedLeafError` for a `DTensor` whose elements are not known, or not here."""
    if any(placement.is_partial() for placement in value.placements):
        raise UnsupportedLeafError(
            f"a DTensor with the placements {_shown(value)}: the sum over the processes has not been "
            f"taken yet, so that its elements are not known. Call "
            f"`x.redistribute(placements=[Replicate()])` or shard it before the save."
        )
    if value.device_mesh.get_coordinate() is None:
        raise UnsupportedLeafError(
            f"a DTensor over the processes {value.device_mesh.mesh.flatten().tolist()}, to which this "
            f"one does not belong. Every process of the group that saves needs the same leaves."
        )


def has_all_elements(value: Any) -> bool:
    """Whether this process has all elements of a `DTensor`."""
    return not any(_shards(value))


def sharded_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors in `values` of which this process has only some elements."""
    return {
        path: value.detach()
        for path, value in values.items()
        if is_dtensor(value) and not has_all_elements(value)
    }


def require_group(value: Any) -> None:
    """Raise `UnsupportedLeafError` for a sharded `DTensor` if this process saves alone."""
    if current_rank_context().count == 1:
        raise UnsupportedLeafError(
            f"a DTensor with the placements {_shown(value)} over {value.device_mesh.size()} processes, "
            f"and this process saves alone, so that it does not have all elements. Make the manager in "
            f"every process as CheckpointManager(..., processes=perdure.torch.process_group())."
        )


def region(value: Any) -> Region:
    """The elements of the whole tensor that this process has: (start, stop) along each axis."""
    spans = [(0, size) for size in value.shape]
    coordinate = value.device_mesh.get_coordinate()
    sharded = [
        (placement, number, count)
        for number, (placement, count) in enumerate(
            zip(value.placements, _shards(value), strict=True)
        )
        if count
    ]
    # FSDP over tensor parallelism: the dimension of the mesh that is listed first cuts last.
    sharded.sort(key=lambda entry: getattr(entry[0], "split_factor", 1) > 1)
    _require_boxes(value, sharded)
    for placement, number, count in sharded:
        axis = placement.dim % len(spans)
        start, stop = spans[axis]
        size = -(-(stop - start) // count)  # as `torch.chunk` cuts
        first = min(start + coordinate[number] * size, stop)
        spans[axis] = first, min(first + size, stop)
    shape = tuple(stop - start for start, stop in spans)
    if shape != (present := tuple(local_tensor(value).shape)):
        raise UnsupportedLeafError(
            f"a DTensor with the placements {_shown(value)}: expected a shard of the shape "
            f"{list(shape)} in this process, found {list(present)}. Save and restore "
            f"its `full_tensor()`."
        )
    return tuple(spans)


def _require_boxes(value: Any, sharded: list[tuple[Any, int, int]]) -> None:
    """Raise `UnsupportedLeafError` for a shard that is not one box of the tensor.

    A strided placement is one if it follows the cuts of the dimensions of the mesh to its right
    (FSDP over tensor parallelism).
    """
    for placement, number, _ in sharded:
        if (factor := getattr(placement, "split_factor", 1)) == 1:
            continue
        others = [(o, at, n) for o, at, n in sharded if o.dim == placement.dim and at != number]
        cuts = math.prod(n for _, at, n in others if at > number)
        strided = [o for o, _, _ in others if getattr(o, "split_factor", 1) > 1]
        if strided or factor != cuts or value.shape[placement.dim] % factor:
            raise UnsupportedLeafError(
                f"a DTensor with the placements {_shown(value)}: its shard in this process is not one "
                f"block of the tensor. Save and restore its `full_tensor()`, or redistribute it before "
                f"(`x.redistribute(placements=[Shard(0)])`)."
            )


def shard_of(like: Any, leaf: Leaf) -> torch.Tensor:
    """A `DTensor` with the mesh and placements of `like` and the bits of a whole leaf."""
    current_rank_context().has_shards = True
    require_restorable(like)
    present = local_tensor(like)
    octets = memoryview(cut(leaf, region(like)).data)
    dtype = getattr(torch, leaf.dtype)
    device = torch.device(like.device_mesh.device_type) if present.is_meta else present.device
    local = None
    if leaf.shards is not None and octets.nbytes and not octets.readonly:
        # Read for this target alone, so that the tensor may lie in the same memory.
        local = torch.frombuffer(octets, dtype=torch.uint8).view(dtype).reshape(present.shape)
    if local is None or local.data_ptr() % ALIGNMENT:
        local = torch.empty(present.shape, dtype=dtype, device="cpu")
        if octets.nbytes:
            local.reshape(-1).view(torch.uint8).numpy()[:] = octets
    if local.device.type != device.type or local.stride() != present.stride():
        made = torch.empty_strided(present.shape, present.stride(), dtype=dtype, device=device)
        local = made.copy_(local)
    return with_local(like, local)


def with_local(like: Any, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is distributed as `like`, with the elements of this process; as `local_tensor`."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _shards(value: Any) -> list[int]:
    """Into how many parts each dimension of the mesh cuts the tensor; 0 for one that does not."""
    sizes = (value.device_mesh.size(number) for number in range(len(value.placements)))
    return [
        size if size > 1 and not (placement.is_replicate() or placement.is_partial()) else 0
        for placement, size in zip(value.placements, sizes, strict=True)
    ]


def _shown(value: Any) -> str:
    return f"({', '.join(map(repr, value.placements))})"


def on_host(value: Any) -> Any:
    """The elements on the CPU.

    Those of a large tensor on a GPU get memory that PyTorch pins once and gives out again when the leaf
    is freed: a copy into fresh memory takes 44 times as long (1 GiB from an H200: 881 and 20 ms).
    """
    if not value.is_cuda or value.nbytes < PINNED_FROM or _pinned() + value.nbytes > _most_pinned():
        return value.cpu()
    try:
        host = torch.empty_like(value, device="cpu", pin_memory=True)
    except RuntimeError:  # the system pins no more
        return value.cpu()
    return host.copy_(value)


def _pinned() -> int:
    """Bytes that PyTorch has pinned, in use or free."""
    stats = getattr(torch.cuda, "host_memory_stats", None)  # older releases do not tell
    return _UNKNOWN if stats is None else stats().get("allocated_bytes.current", _UNKNOWN)


@cache
def _most_pinned() -> int:
    """A quarter of the memory of this machine, or of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory, MemoryLimit(os.getpid()).limit() or memory) // 4
