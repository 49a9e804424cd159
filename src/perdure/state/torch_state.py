"""PyTorch: tensors, parameters, modules, optimizers, schedulers, generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.adapter import Check, Difference, Names, Node, Spec, Stateful
from perdure.state.objects import copied, named, same
from perdure.store.leaf import Leaf

_LAZY = (UninitializedParameter, UninitializedBuffer)
_WRAPPERS = {
    torch.nn.DataParallel: "module",
    torch.nn.parallel.DistributedDataParallel: "module",
}
_MODULE_VERBS = (
    "state_dict",
    "load_state_dict",
    "get_extra_state",
    "set_extra_state",
    "_save_to_state_dict",
    "_load_from_state_dict",
)
_MODULE_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class TorchState:
    """See `perdure.state.adapter.Adapter`."""

    def spec(self, value: Any) -> Spec | None:
        if not isinstance(value, torch.Tensor):
            return None
        if isinstance(value, _LAZY):
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
        if type(value) not in _EXACT and not _is_plain_tensor(value):
            raise UnsupportedLeafError(
                f"a tensor of the class {type(value).__module__}.{type(value).__qualname__} has more "
                f"than its elements. Save a plain tensor, and what it needs beside it."
            )
        return Spec(_name(value.dtype), tuple(value.shape))

    def leaf(self, value: Any) -> Leaf | None:
        spec = self.spec(value)
        if spec is None:
            return None
        if value.is_meta:
            raise UnsupportedLeafError("a tensor on the meta device has no data.")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        octets = plain.reshape(-1).view(torch.uint8).numpy()
        data = octets.data if octets.size else memoryview(b"")
        return Leaf(spec.dtype, spec.shape, data, frozen=plain.data_ptr() != value.data_ptr())

    @torch.inference_mode(mode=False)  # or the tensor could not be trained after a restore in there
    def load(self, like: Any, leaf: Leaf) -> Any:
        """A tensor of the class and memory format of `like`; it requires a gradient if `like` does."""
        dtype = getattr(torch, leaf.dtype)
        target = torch.empty(leaf.shape, dtype=dtype)
        if leaf.data.nbytes:
            target.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(leaf.data, np.uint8)
        target = target.to("cpu" if like.is_meta else like.device)
        if like.shape == target.shape and like.stride() != target.stride():
            # The order in which sums are taken, and so their bits, depends on the order in memory.
            target = torch.empty_like(like, device=target.device, requires_grad=False).copy_(target)
        if isinstance(like, torch.nn.Parameter):
            target = torch.nn.Parameter(target, requires_grad=like.requires_grad)
        elif like.requires_grad:
            target.requires_grad_()
        return target if type(target) is type(like) else target.as_subclass(type(like))

    def variable(self, value: Any) -> Stateful | None:
        """Parameters and other trained tensors: an optimizer steps the very object that it holds."""
        if not isinstance(value, torch.Tensor) or not value.is_leaf:
            return None
        if not (value.requires_grad or isinstance(value, torch.nn.Parameter)):
            return None
        return (
            None if value.is_meta or value.is_inference() or _overlaps(value) else _Variable(value)
        )

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | Stateful | None:
        if isinstance(value, torch.nn.Module):
            return _ModuleState(value)
        if isinstance(value, torch.optim.Optimizer):
            return _Optimizer(value)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            return _Scheduler(value)
        if isinstance(value, torch.Generator):
            return Node(
                [("", value.get_state())], lambda new: value.set_state(new[0]), in_place=True
            )
        return None


_EXACT = (torch.Tensor, torch.nn.Parameter)
_NO_DISPATCH = (
    torch.Tensor.__torch_dispatch__,  # type: ignore[attr-defined]
    torch._C._disabled_torch_dispatch_impl,
)


def _is_plain_tensor(value: torch.Tensor) -> bool:
    """Whether a subclass adds only methods: its elements and its class are all there is of it."""
    return getattr(type(value), "__torch_dispatch__", None) in _NO_DISPATCH and not vars(value)


class _Variable(Stateful):
    """A parameter outside of a module, which is changed in place."""

    arrays = "torch"
    can_fail = False

    def read(self) -> Any:
        return self.target.detach()

    def load(self, state: Any) -> None:
        _copy_into(self.target, state)


def _overlaps(value: Any) -> bool:
    """Whether a tensor has elements that share memory (`expand`): PyTorch copies nothing into it."""
    if not isinstance(value, torch.Tensor) or isinstance(value, _LAZY):
        return False
    if value.layout != torch.strided or value.is_nested:
        return False
    return any(n > 1 and step == 0 for n, step in zip(value.shape, value.stride(), strict=True))


def _copy_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value, of which only one of the elements that share memory is needed."""
    if _overlaps(tensor):
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
        tensor, value = tensor.detach()[once], value[once]
    with torch.no_grad():
        tensor.copy_(value)


class _ModuleState(Stateful):
    """A module: names, dtypes and shapes are strict, and it is changed in place."""

    arrays = "torch"

    def read(self) -> Names:
        state = self.target.state_dict()
        return Names({name: state[full] for name, full in _real_names(self.target, state).items()})

    def load(self, state: Mapping[str, Any]) -> None:
        present = self.target.state_dict()
        real = _real_names(self.target, present)
        if self.can_fail and any(isinstance(value, _LAZY) for value in present.values()):
            raise StateError(
                "a lazy module that has extra state or its own way to load cannot be put back if the "
                "restore fails later: run one forward pass before the restore."
            )
        full = type(present)({real.get(name, name): value for name, value in state.items()})
        # Of this code and not of the checkpoint's: an older version would convert the values.
        if (versions := getattr(present, "_metadata", None)) is not None:
            full._metadata = versions  # type: ignore[attr-defined]
        for name, tensor in self.target.state_dict(keep_vars=True).items():
            if name in full and _overlaps(tensor):
                _copy_into(tensor, full[name])
                full[name] = tensor  # PyTorch cannot copy into it, and skips the copy onto itself
        self.target.load_state_dict(full)

    def check(self) -> Check:
        return _check_module(self.read(), whole=not self.can_fail)

    def backup(self) -> Callable[[], object]:
        before, undo = copied(self.read()), super().backup()

        def put_back() -> None:
            try:
                undo()
            finally:  # what the module's own code does with a value need not be what it did before
                present = self.target.state_dict(keep_vars=True)
                for name, full in _real_names(self.target, present).items():
                    if isinstance(old := before.get(name), torch.Tensor):
                        _copy_into(present[full], old)

        return put_back

    @property
    def can_fail(self) -> bool:  # type: ignore[override]
        """Not if only code of PyTorch takes part, which then copies tensors and nothing else."""
        return not _has_standard_load(self.target) or not _are_separate(self.target.state_dict())


def _real_names(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, str]:
    """The names of a module's state without those of wrappers (DDP, torch.compile) -> as they are."""
    cuts: list[tuple[str, str]] = []
    for name, part in module.named_modules(remove_duplicate=False):
        if (inner := _inner_name(part)) is not None:
            cuts.append((f"{name}." if name else "", f"{inner}."))
    if not cuts:
        return {name: name for name in state}
    real = {}
    for full in state:
        name = full
        for prefix, inner in sorted(cuts, reverse=True):  # the innermost first
            if name.startswith(prefix + inner):
                name = prefix + name[len(prefix + inner) :]
        real[name] = full
    return real


def _inner_name(module: torch.nn.Module) -> str | None:
    for wrapper, inner in _WRAPPERS.items():
        if isinstance(module, wrapper):
            return inner
    kind = type(module)  # what `torch.compile` returns, without the import of its machinery
    compiled = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return "_orig_mod" if compiled else None


def _has_standard_load(module: torch.nn.Module) -> bool:
    """Whether only code of PyTorch takes part in a load: then it copies tensors and nothing else."""
    for part in module.modules():
        for verb in _MODULE_VERBS:
            if not _is_torchs(getattr(type(part), verb)) or verb in vars(part):
                return False
        for hooks in _MODULE_HOOKS:
            if not all(_is_torchs(hook) for hook in getattr(part, hooks, {}).values()):
                return False
    return True


def _is_torchs(function: Any) -> bool:
    function = getattr(function, "hook", function)
    return str(getattr(function, "__module__", "")).startswith("torch.")


def _are_separate(state: Mapping[str, Any]) -> bool:
    """Whether all values are tensors, of which each two are the same or share no memory."""
    places: dict[int, tuple[Any, ...]] = {}
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            return False
        if isinstance(value, _LAZY) or value.is_meta or not value.numel():
            continue
        place = (value.data_ptr(), value.shape, value.stride())
        if places.setdefault(value.untyped_storage().data_ptr(), place) != place:
            return False
    return True


def _check_module(state: Mapping[str, Any], *, whole: bool) -> Check:
    """Names, dtypes and shapes of the tensors; with `whole`, all names have to be the same."""
    wanted: dict[str, Spec | None] = {}
    tied: dict[int, list[str]] = {}
    meta = []
    for name, value in state.items():
        path = named("", name)
        if isinstance(value, torch.Tensor) and not isinstance(value, _LAZY):
            wanted[path] = Spec(_name(value.dtype), tuple(value.shape))
            if value.is_meta:
                meta.append(path)
            elif value.numel():
                tied.setdefault(value.data_ptr(), []).append(path)
        elif isinstance(value, torch.Tensor):
            wanted[path] = None
    groups = [paths for paths in tied.values() if len(paths) > 1]

    def check(stored: Mapping[str, Leaf]) -> list[Difference]:
        lines = [
            Difference(
                path, reason="is on the meta device; call `module.to_empty(device=...)` first"
            )
            for path in meta
        ]
        for path, spec in wanted.items():
            leaf = stored.get(path)
            if leaf is None:
                if whole:
                    text = "a tensor" if spec is None else spec.describe()
                    lines.append(Difference(path, text, None))
            elif spec is not None and spec != Spec.of(leaf):
                lines.append(Difference(path, spec.describe(), leaf.describe()))
        if whole:
            lines += [
                Difference(path, None, leaf.describe())
                for path, leaf in stored.items()
                if path not in wanted
            ]
        for first, *others in groups:
            for path in others:
                if first in stored and path in stored and not same(stored[first], stored[path]):
                    reason = f"is one tensor with {first} in the target, the checkpoint has two"
                    lines.append(Difference(path, reason=reason))
        return lines

    return check


class _Optimizer(Stateful):
    """An optimizer: the sizes of its groups are strict, its state is as it was stored."""

    arrays = "torch"

    def check(self) -> Check:
        return partial(_check_groups, [len(g["params"]) for g in self.target.param_groups])

    def adds(self, path: str) -> bool:
        return path.startswith("param_groups/") and path.count("/") == 2

    @torch.inference_mode(mode=False)
    def load(self, state: Any) -> None:
        optimizer = self.target
        optimizer.load_state_dict(state)
        if not self._is_standard:
            return
        # PyTorch casts what it takes to the dtype of the parameter. Put the exact values in place.
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state["state"]:
                given, taken = state["state"][number], optimizer.state[parameter]
                optimizer.state[parameter] = _exact(given, taken, parameter)

    def backup(self) -> Callable[[], object]:
        optimizer = self.target
        if not self._is_standard:
            return super().backup()
        # A load makes new dicts and new tensors, so that the old ones are a copy that costs nothing.
        state, groups = optimizer.state, optimizer.param_groups

        def undo() -> None:
            optimizer.state, optimizer.param_groups = state, groups

        return undo

    @property
    def _is_standard(self) -> bool:
        optimizer = self.target
        return type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not (
            optimizer._optimizer_load_state_dict_pre_hooks
            or optimizer._optimizer_load_state_dict_post_hooks
        )


class _Scheduler(Stateful):
    def adds(self, path: str) -> bool:
        return "/" not in path  # a setting of a newer torch


def _check_groups(sizes: Sequence[int], stored: Mapping[str, Leaf]) -> list[Difference]:
    counts: dict[int, int] = {}
    for path in stored:
        parts = path.split("/")
        if parts[0] == "param_groups" and parts[1].isdigit():
            is_parameter = len(parts) == 4 and parts[2] == "params"
            counts[int(parts[1])] = counts.get(int(parts[1]), 0) + is_parameter
    found = [counts[i] for i in sorted(counts)]
    if sizes == found:
        return []
    reason = f"expected groups of {list(sizes)} parameters, the checkpoint has groups of {found}"
    return [Difference("param_groups", reason=reason)]


def _exact(given: Any, taken: Any, parameter: torch.Tensor) -> Any:
    """What was stored, on the device that PyTorch chose and in the memory format of the parameter."""
    if isinstance(given, torch.Tensor):
        if given.shape != parameter.shape or given.requires_grad:
            return given.to(taken.device)
        exact = torch.empty_like(
            parameter, dtype=given.dtype, device=taken.device, requires_grad=False
        )
        return exact.copy_(given)
    if isinstance(given, dict):
        pairs = {key: _exact(value, taken[key], parameter) for key, value in given.items()}
        return pairs if type(given) is dict else given
    if type(given) in (list, tuple):
        return type(given)(
            _exact(value, other, parameter) for value, other in zip(given, taken, strict=True)
        )
    return given


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


ADAPTER = TorchState()
