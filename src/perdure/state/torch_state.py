"""The adapter of PyTorch: tensors, parameters, modules, optimizers, schedulers, generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Node, OneByOne
from perdure.state.leaf_errors import type_name
from perdure.state.leaf_spec import Check, LeafSpec
from perdure.state.leaf_values import BUFFER_DTYPES
from perdure.state.shards import compares_shards
from perdure.state.stateful import Stateful
from perdure.state.torch_module import ModuleState
from perdure.state.torch_settings import optimizer_check, scheduler_check
from perdure.state.torch_shards import (
    ALIGNMENT,
    has_all_elements,
    is_dtensor,
    local_tensor,
    region,
    require_group,
    require_restorable,
    shard_of,
    sharded_parts,
)
from perdure.state.torch_tensors import LAZY, copy_into, has_shared_elements, tensor_spec
from perdure.store.leaf import Leaf
from perdure.store.shard_plan import Region, Shards

_EXACT = (torch.Tensor, torch.nn.Parameter)
_BUFFER_DTYPES = {
    dtype
    for name in BUFFER_DTYPES.values()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_NO_DISPATCH = (
    torch.Tensor.__torch_dispatch__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_dispatch_impl,
)


class TorchState(OneByOne):
    """See `perdure.state.adapter.Adapter`."""

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
        elif not _is_plain_tensor(value):
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
        part = None
        if is_dtensor(value):
            if not has_all_elements(value):
                part = region(value)
                if not compares_shards():
                    require_group(value)
            value = local_tensor(value)
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if plain.dtype in _BUFFER_DTYPES and plain.numel():  # nearly every leaf, so in line
            data = plain.numpy().data.cast("B")
        elif plain.numel():
            # One element counts as contiguous with any stride; `reshape` keeps it, and `view` refuses.
            data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
        else:  # `numpy` would fix its size, and observers of quantization give it one later
            data = memoryview(b"")
        is_copy = plain.data_ptr() != value.data_ptr()
        if part is None or compares_shards():
            return Leaf(spec.dtype, spec.shape, data, is_copy, part)
        shards = Shards(spec.shape, plain.element_size(), (part,), (data,))
        return Leaf(spec.dtype, spec.shape, memoryview(b""), is_copy, shards=shards)

    def regions(self, like: Any) -> tuple[Region, ...] | None:
        """The elements that this process needs of a target; None for all, and for other values."""
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
        if like.shape == target.shape and like.stride() != target.stride():
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
        is_contiguous = like.is_contiguous() or like.shape != leaf.shape
        if is_plain and is_contiguous and leaf.nbytes and not memoryview(leaf.data).readonly:
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

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        if isinstance(value, torch.nn.Module):
            return ModuleState(value)
        if isinstance(value, torch.optim.Optimizer):
            return _Optimizer(value)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return _Scheduler(value)
        if isinstance(value, torch.Generator):
            return Node(
                [("", value.get_state())], lambda new: value.set_state(new[0]), in_place=True
            )
        if isinstance(value, torch.utils.data.DataLoader) and not hasattr(value, "state_dict"):
            raise UnsupportedLeafError(
                "a DataLoader has no position. Save `perdure.torch.ResumableLoader(loader)`, and "
                "iterate that instead of the loader."
            )
        return None


def _is_plain_tensor(value: torch.Tensor) -> bool:
    """Whether a tensor of a subclass has no attributes and no dispatch of its own."""
    return getattr(type(value), "__torch_dispatch__", None) in _NO_DISPATCH and not vars(value)


class _TrainedTensor(Stateful):
    """A parameter outside of a module, which is changed in place."""

    arrays = "torch"
    can_fail = False

    def read(self) -> Any:
        return self.target.detach()

    def load(self, state: Any) -> None:
        copy_into(self.target, state)


class _Optimizer(Stateful):
    """An optimizer. The sizes and settings of its groups are strict; its state is what was stored."""

    arrays = "torch"

    def check(self) -> Check:
        return optimizer_check(self.target) if self._has_groups else super().check()

    def depends_on(self) -> Iterable[Any]:
        groups = getattr(self.target, "param_groups", ())  # one that wraps another may have none
        return [param for group in groups for param in group["params"]]

    def sharded_values(self, stored: Mapping[str, LeafSpec]) -> Mapping[str, Any]:
        """A moment of a sharded parameter is sharded as the parameter is."""
        if not self._is_standard or not self._has_groups:
            return {}
        parameters = {f"{number}": value for number, value in enumerate(self.depends_on())}
        values = {}
        for path, spec in stored.items():
            first, number, *_ = f"{path}//".split("/")
            parameter = parameters.get(number) if first == "state" else None
            if parameter is not None and spec.shape == tuple(parameter.shape):
                values[path] = parameter
        return sharded_parts(values)

    def may_add(self, path: str) -> bool:
        return path.startswith("param_groups/") and path.count("/") == 2

    @property
    def changes_no_array(self) -> bool:  # type: ignore[override]
        return self._is_standard

    @torch.inference_mode(mode=False)
    def load(self, state: Any) -> None:
        """Load a state into the list and the dicts of groups that the optimizer has: other optimizers
        and schedulers may have the same ones."""
        optimizer, groups = self.target, getattr(self.target, "param_groups", None)
        present = [*groups] if isinstance(groups, list) else []
        self._load(state)
        if not isinstance(groups, list) or (new := optimizer.param_groups) is groups:
            return
        for group, loaded in zip(present, new, strict=True):
            if group is not loaded:
                group.clear()
                group.update(loaded)
        if self._is_standard:
            groups[:] = present
            optimizer.param_groups = groups
        else:  # its own code may have given the new list to others
            new[:] = present

    def _load(self, state: Any) -> None:
        optimizer = self.target
        if not self._is_standard:
            stored = _tensor_states(state) if self._has_groups else {}
            optimizer.load_state_dict(state)
            if stored:
                _put_exact(optimizer, stored)
            return
        optimizer.load_state_dict(state)
        # PyTorch casts the values to the dtype of the parameter. Replace them by the exact ones.
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state["state"]:
                stored, loaded = state["state"][number], optimizer.state[parameter]
                optimizer.state[parameter] = _exact_state(stored, loaded, parameter)

    def backup(self) -> Callable[[], object]:
        optimizer = self.target
        if not self._is_standard:
            return super().backup()
        # A load makes new dicts and new tensors, so that the old ones need no copy.
        state, groups = optimizer.state, optimizer.param_groups
        before = [(group, dict(group)) for group in groups]

        def undo() -> None:
            optimizer.state, optimizer.param_groups = state, groups
            groups[:] = [group for group, _ in before]
            for group, values in before:
                group.clear()
                group.update(values)

        return undo

    @property
    def _has_groups(self) -> bool:
        """Whether `state_dict` returns what PyTorch's does, perhaps with more."""
        if type(self.target).state_dict is torch.optim.Optimizer.state_dict:
            return True
        if not hasattr(self.target, "param_groups"):
            return False
        state = self.read()
        groups = state.get("param_groups") if isinstance(state, dict) else None
        return isinstance(groups, list) and all(
            isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
        )

    @property
    def _is_standard(self) -> bool:
        optimizer = self.target
        return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not (
            optimizer._optimizer_load_state_dict_pre_hooks
            or optimizer._optimizer_load_state_dict_post_hooks
        )


class _Scheduler(Stateful):
    """A scheduler. Its settings are strict."""

    def check(self) -> Check:
        return scheduler_check(self.target)

    def depends_on(self) -> Iterable[Any]:
        return [self.target.optimizer] if hasattr(self.target, "optimizer") else ()

    def may_add(self, path: str) -> bool:
        return "/" not in path  # a setting of a newer torch


def _tensor_states(state: Any) -> dict[int, dict[Any, Any]]:
    """The state of each parameter of an optimizer by its place, as `load_state_dict` gets it."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return {
        place: dict(values)
        for place, number in enumerate(numbers)
        if isinstance(values := state["state"].get(number), dict)
    }


def _put_exact(optimizer: torch.optim.Optimizer, stored: Mapping[int, Mapping[Any, Any]]) -> None:
    """Give tensors the dtype that they were stored with, if the optimizer's own code for loading has
    called PyTorch's, which casts to the dtype of the parameter, and what it saves is what it holds."""
    saved = _tensor_states(optimizer.state_dict())
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    for place, parameter in enumerate(parameters):
        held = optimizer.state.get(parameter)
        before, present = stored.get(place), saved.get(place)
        if before is None or present is None or not isinstance(held, dict):
            continue
        if not before.keys() == present.keys() == held.keys():
            continue
        for key, value in before.items():
            other = held[key]
            if type(value) not in _EXACT or type(other) not in _EXACT or present[key] is not other:
                continue
            if value.dtype != other.dtype and value.shape == other.shape:
                held[key] = _exact_state(value, other, parameter)


def _exact_state(stored: Any, loaded: Any, parameter: torch.Tensor) -> Any:
    """The stored value with its dtype, on the device that PyTorch chose for the loaded one.

    A tensor of the parameter's shape gets the parameter's memory format.
    """
    if isinstance(stored, torch.Tensor):
        if stored.shape != parameter.shape or stored.requires_grad:
            return stored.to(loaded.device)
        if is_dtensor(parameter):
            if is_dtensor(stored):
                return stored
            leaf = ADAPTER.leaf(stored)
            assert leaf is not None
            return shard_of(parameter, leaf)
        exact = torch.empty_like(parameter, dtype=stored.dtype, device="meta", requires_grad=False)
        if stored.device == loaded.device and stored.stride() == exact.stride():
            return stored
        return torch.empty_like(exact, device=loaded.device).copy_(stored)
    if isinstance(stored, dict):
        values = {key: _exact_state(stored[key], loaded[key], parameter) for key in stored}
        return values if type(stored) is dict else stored
    if type(stored) in (list, tuple):
        return type(stored)(
            _exact_state(value, other, parameter)
            for value, other in zip(stored, loaded, strict=True)
        )
    return stored


ADAPTER = TorchState()
