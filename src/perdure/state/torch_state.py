"""The adapter of PyTorch: tensors, parameters, modules, optimizers, schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Stateful
from perdure.state.leaf_spec import LeafSpec, type_name
from perdure.state.leaf_values import BUFFER_DTYPES
from perdure.state.per_rank import current_rank_context
from perdure.state.torch_module import ModuleState
from perdure.state.torch_optimizers import (
    OptimizerState,
    SchedulerState,
    unwrapped_optimizer,
)
from perdure.state.torch_tensors import (
    ALIGNMENT,
    LAZY,
    axes_of,
    copy_into,
    has_all_elements,
    has_shared_elements,
    in_axes,
    is_dtensor,
    local_tensor,
    on_host,
    region,
    require_group,
    require_restorable,
    shard_of,
    tensor_spec,
)
from perdure.state.value_forms import refuse_pending
from perdure.store.leaf import Leaf
from perdure.store.shard_plan import Region, Shards

_EXACT = (torch.Tensor, torch.nn.Parameter)
_BUFFER_DTYPES = {
    dtype
    for name in BUFFER_DTYPES.values()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_COMMUNICATION = "torch.distributed.algorithms."
_NO_DISPATCH = (
    torch.Tensor.__torch_dispatch__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_dispatch_impl,
)


class TorchState(Adapter):
    """Turns tensors, modules, optimizers and schedulers into leaves and nodes, and back."""

    def spec(self, value: Any) -> LeafSpec | None:
        if not isinstance(value, torch.Tensor):
            return None
        is_exact = type(value) in _EXACT
        if not is_exact and isinstance(value, LAZY):
            raise UnsupportedLeafError(
                "a lazy parameter without a shape. Run one forward pass before the first save, and "
                "before a restore outside of its module."
            )
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            also = ", quantized" * value.is_quantized + ", nested" * value.is_nested
            raise UnsupportedLeafError(
                f"a tensor of layout {value.layout}{also}; expected a dense one. Convert it with "
                f"`.to_dense()`, `.dequantize()` or `.to_padded_tensor()`."
            )
        if is_exact:
            return tensor_spec(value)
        if is_dtensor(value):
            require_restorable(value)
        elif getattr(type(value), "__torch_dispatch__", None) not in _NO_DISPATCH or vars(value):
            raise UnsupportedLeafError(
                f"a tensor of the class {type_name(value)} has more than its elements. Save a plain "
                f"tensor and the other attributes."
            )
        return tensor_spec(value)

    def leaf(self, value: Any) -> Leaf | None:
        spec = self.spec(value)
        if spec is None:
            return None
        if value.is_meta:
            raise UnsupportedLeafError("a tensor on the meta device has no data.")
        refuse_pending(value)
        part, compares_shards = None, False
        if is_dtensor(value):
            compares_shards = current_rank_context().compares_shards
            if not has_all_elements(value):
                part = region(value)
                if not compares_shards:
                    require_group(value)
            value = local_tensor(value)
        axes = None if part is not None or value.is_contiguous() else axes_of(value)
        plain = on_host(value.detach().resolve_conj().resolve_neg()).contiguous()
        if plain.dtype in _BUFFER_DTYPES and plain.numel():  # nearly every leaf, so in line
            data = plain.numpy().data.cast("B")
        elif plain.numel():
            # One element counts as contiguous with any stride; `reshape` keeps it, and `view` refuses.
            data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
        else:  # `numpy` would fix its size, and observers of quantization give it one later
            data = memoryview(b"")
        is_copy = plain.data_ptr() != value.data_ptr()
        if part is None or compares_shards:
            return Leaf(spec.dtype, spec.shape, data, is_copy, part, axes=axes)
        shards = Shards(spec.shape, plain.element_size(), (part,), (data,))
        return Leaf(spec.dtype, spec.shape, memoryview(b""), is_copy, shards=shards)

    def regions(self, like: Any) -> tuple[Region, ...] | None:
        if not is_dtensor(like) or has_all_elements(like):
            return None
        require_restorable(like)
        return (region(like),)

    def load(self, like: Any, leaf: Leaf) -> Any:
        """A tensor of the class and memory format of `like`; it requires a gradient if `like` does."""
        if torch.is_inference_mode_enabled():  # an inference tensor could not be trained later
            with torch.inference_mode(mode=False):
                return self.load(like, leaf)
        if is_dtensor(like):
            shard = shard_of(like, leaf)
            if isinstance(like, torch.nn.Parameter):
                return torch.nn.Parameter(shard, requires_grad=like.requires_grad)
            return shard.requires_grad_(like.requires_grad)
        dtype = getattr(torch, leaf.dtype)
        target = torch.empty(leaf.shape, dtype=dtype, device="cpu")
        if len(leaf.data):
            target.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(leaf.data, np.uint8)
        target = target.to("cpu" if like.is_meta else like.device)
        if leaf.axes is not None:
            target = in_axes(target, leaf.axes)
        elif like.shape == target.shape and like.stride() != target.stride():
            # The order in memory decides the order in which sums are taken, and so their bits.
            target = torch.empty_like(like, device=target.device, requires_grad=False).copy_(target)
        if isinstance(like, torch.nn.Parameter):
            target = torch.nn.Parameter(target, requires_grad=like.requires_grad)
        elif like.requires_grad:
            target.requires_grad_()
        return target if type(target) is type(like) else target.as_subclass(type(like))

    @torch.inference_mode(mode=False)
    def take(self, like: Any, leaf: Leaf) -> Any:
        """As `load`, but in the memory of the leaf if it is aligned as PyTorch aligns its own."""
        is_plain = type(like) is torch.Tensor and like.is_cpu and not like.requires_grad
        is_row_major = like.is_contiguous() or like.shape != leaf.shape
        if leaf.axes is not None:
            is_row_major = leaf.axes == tuple(range(len(leaf.axes)))
        if is_plain and is_row_major and leaf.nbytes and not memoryview(leaf.data).readonly:
            octets = torch.frombuffer(leaf.data, dtype=torch.uint8)
            if not octets.data_ptr() % ALIGNMENT:
                return octets.view(getattr(torch, leaf.dtype)).reshape(leaf.shape)
        return self.load(like, leaf)

    def variable(self, value: Any) -> Stateful | None:
        """A parameter or other trained tensor: the optimizer that steps it refers to this object."""
        if not isinstance(value, torch.Tensor) or not value.is_leaf:
            return None
        if not (value.requires_grad or isinstance(value, torch.nn.Parameter)):
            return None
        if value.is_meta or value.is_inference() or has_shared_elements(value):
            return None
        return _TrainedTensor(value)

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Stateful | None:
        if isinstance(value, torch.nn.Module):
            refuse_hook_state(value)
            return ModuleState(value)
        if isinstance(value, torch.optim.Optimizer):
            value = unwrapped_optimizer(value)
            if type(value).__name__ == "ZeroRedundancyOptimizer":
                raise UnsupportedLeafError(
                    "a ZeroRedundancyOptimizer has the state of its own parameters only, and no "
                    "`state_dict` of all. Shard the model with `fully_shard`, which is saved by "
                    "shards, or use the optimizer that it wraps."
                )
            return OptimizerState(value)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return SchedulerState(value)
        if isinstance(value, torch.utils.data.DataLoader) and not hasattr(value, "state_dict"):
            raise UnsupportedLeafError(
                "a DataLoader has no position. Save `perdure.torch.ResumableLoader(loader)`, and "
                "iterate that instead of the loader. One for an evaluation needs none: keep it out of "
                "the object, and make or pass it where it is used."
            )
        return None


def refuse_hook_state(module: Any) -> None:
    """Refuse a DDP module whose communication hook keeps a state."""
    for _, held in getattr(module, "_comm_hooks", ()):
        if type(held).__module__.startswith(_COMMUNICATION):
            raise UnsupportedLeafError(
                f"the communication hook of this module has a {type_name(held)}, which "
                f"keeps errors and a step count that no checkpoint gets. Use a hook "
                f"without a state, such as `bf16_compress_hook`."
            )


class _TrainedTensor(Stateful):
    arrays = "torch"
    can_fail = False

    def read(self) -> Any:
        return self.target.detach()

    def load(self, state: Any) -> None:
        copy_into(self.target, state)


ADAPTER = TorchState()
