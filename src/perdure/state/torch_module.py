"""Torch modules as objects with a state: strict in names, dtypes and shapes, restored in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from perdure.errors import StateError
from perdure.state.adapter import ModuleValues, Stateful
from perdure.state.leaf_spec import Check, Difference, LeafSpec
from perdure.state.leaf_values import same_bits
from perdure.state.paths import join_dotted
from perdure.state.program_code import is_user_class
from perdure.state.torch_tensors import (
    LAZY,
    copy_into,
    has_other_order,
    has_shared_elements,
    local_tensor,
    sharded_parts,
    tensor_spec,
)
from perdure.store.leaf import Leaf, containers_of

_WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_MODULE_VERBS = (
    "state_dict",
    "load_state_dict",
    "get_extra_state",
    "set_extra_state",
    "_save_to_state_dict",
    "_load_from_state_dict",
)
_COPYING_CODE = (
    # These add what a state of an old version lacks, and then call the method of `Module`.
    torch.nn.modules.batchnorm._NormBase._load_from_state_dict,
    torch.nn.modules.instancenorm._InstanceNorm._load_from_state_dict,
)
_MODULE_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class ModuleState(Stateful):
    """A torch module. Its tied weights stay tied."""

    arrays = "torch"

    def read(self) -> ModuleValues:
        return ModuleValues(_named(self.target, self.target.state_dict()))

    def parts(self) -> Mapping[str, LeafSpec | None]:
        return {
            path: tensor_spec(value)
            if isinstance(value, torch.Tensor) and not isinstance(value, LAZY)
            else None
            for path, value in self.part_values().items()
        }

    def part_values(self) -> Mapping[str, Any]:
        named = _named(self.target, self.target.state_dict(keep_vars=True))
        return {join_dotted("", name): value for name, value in named.items()}

    def sharded_values(self, stored: Mapping[str, LeafSpec]) -> Mapping[str, Any]:
        return {} if self.can_fail else sharded_parts(self.part_values())

    def load(self, state: Mapping[str, Any]) -> None:
        for path, (part, name, _) in _unset_buffers(self.target).items():
            if path in state:
                part._buffers[name] = torch.empty_like(state[path])
        live = self.target.state_dict(keep_vars=True)
        full_names = _named(self.target, {name: name for name in live})
        if any(isinstance(value, LAZY) for value in live.values()) and self.can_fail:
            raise StateError(
                "a lazy module with extra state or code of its own for loading cannot get its earlier "
                "state back if the restore fails later. Run one forward pass before the restore."
            )
        values = type(live)({full_names.get(name, name): state[name] for name in state})
        for name, tensor in live.items():
            if name in values and (
                has_shared_elements(tensor) or has_other_order(tensor, values[name])
            ):
                copy_into(tensor, values[name])
                values[name] = tensor  # PyTorch skips the copy of a tensor onto itself
            elif name in values and _is_meta(tensor) and not _is_meta(values[name]):
                _give_memory(tensor, values[name])
        if values.keys() == live.keys() and _only_copies(self.target):
            with torch.no_grad():
                for name, tensor in live.items():
                    tensor.copy_(values[name])
            return
        # The versions of the module's code. With older ones, the code would convert the values.
        if (versions := getattr(live, "_metadata", None)) is not None:
            values._metadata = versions  # type: ignore[attr-defined]
        self.target.load_state_dict(values)

    def check(self) -> Check:
        whole, expected = not self.can_fail, dict(self.parts())
        reasons = _meta_reasons(self.target)
        if whole:
            reasons = [line for line in reasons if line.path not in expected]
        for inside, part in parts_by_name(self.target):
            if type(part)._load_from_state_dict not in (*_MODULE_CODE, *_COPYING_CODE):
                for name in part._buffers:  # may get another shape (observers of quantization)
                    path = join_dotted(join_dotted("", inside), name)
                    expected |= {path: None} if path in expected else {}
        tied: dict[tuple[Any, ...], list[str]] = {}
        for path, value in self.part_values().items():
            if isinstance(value, torch.Tensor) and not isinstance(value, LAZY):
                local = local_tensor(value)
                if local.numel() and not value.is_meta:
                    tied.setdefault(_view(local), []).append(path)
        groups = [paths for paths in tied.values() if len(paths) > 1]
        unset = {join_dotted("", path) for path in _unset_buffers(self.target)}

        def differences(stored: Mapping[str, Leaf]) -> list[Difference]:
            set_since = dict.fromkeys(unset & stored.keys())
            return [*reasons, *_differences(expected | set_since, groups, stored, whole=whole)]

        return differences

    @property
    def comes_first(self) -> bool:  # type: ignore[override]
        """An optimizer needs the device and the shapes of its parameters, which lazy ones get here."""
        return any(_is_meta(value) or isinstance(value, LAZY) for value in self._live_values())

    def _live_values(self) -> Iterable[Any]:
        return self.target.state_dict(keep_vars=True).values()

    def backup(self) -> Callable[[], object]:
        tensors = [value for value in self._live_values() if isinstance(value, torch.Tensor)]
        undo_each = [_undo_of(tensor) for tensor in {id(each): each for each in tensors}.values()]
        load_before = None if self.comes_first else super().backup()
        unset = _unset_buffers(self.target).values()

        def undo() -> None:
            for part, name, before in unset:
                part._buffers[name] = before
            try:
                if load_before is not None:
                    load_before()
            finally:  # the module's own code may have converted the values
                for undo_one in undo_each:
                    undo_one()

        return undo

    @property
    def changes_no_array(self) -> bool:  # type: ignore[override]
        return not self.can_fail

    @property
    def can_fail(self) -> bool:  # type: ignore[override]
        """False if only code of PyTorch takes part in a load, and copies nothing but tensors."""
        return not all(
            map(_is_from_torch, _special_code(self.target))
        ) or not _have_separate_memory(self.target.state_dict(keep_vars=True))


def _unset_buffers(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str, Any]]:
    """The buffers of the program's modules that are None or without elements so far
    (`register_buffer("bank", torch.zeros(0, 4))`), and that a run may set, by name: the module that has
    it, its name there, and the buffer."""
    found: dict[str, tuple[torch.nn.Module, str, Any]] = {}
    for path, part in parts_by_name(module):
        for name, buffer in part._buffers.items() if is_user_class(type(part)) else ():
            is_unset = buffer is None or (not isinstance(buffer, LAZY) and buffer.numel() == 0)
            if is_unset and name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = part, name, buffer
    return found


def _named(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The values in a module's state by their names without the parts of wrappers (DDP)."""
    cuts = _cuts(module)
    return {_without(cuts, full): value for full, value in state.items()}


def parts_by_name(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """A module and those in it by name, without the parts of wrappers in the names."""
    cuts = _cuts(module)
    return [
        (_without(cuts, f"{name}.")[:-1] if name else "", part)
        for name, part in module.named_modules(remove_duplicate=False)
    ]


def _cuts(module: torch.nn.Module) -> list[tuple[str, str]]:
    """The dotted names of each wrapper and of the module that it wraps, the innermost wrapper first."""
    if not any(map(_inner_name, {type(part) for part in module.modules()})):
        return []
    cuts = [
        (f"{name}." if name else "", f"{inner}.")
        for name, part in module.named_modules(remove_duplicate=False)
        if (inner := _inner_name(type(part))) is not None
    ]
    return sorted(cuts, reverse=True)


def _without(cuts: list[tuple[str, str]], name: str) -> str:
    for prefix, inner in cuts:
        if name.startswith(prefix + inner):
            name = prefix + name[len(prefix + inner) :]
    return name


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside a wrapper (DDP, `torch.compile`); any other module itself."""
    while (inner := _inner_name(type(module))) is not None:
        module = getattr(module, inner)
    return module


def _inner_name(kind: type[torch.nn.Module]) -> str | None:
    if issubclass(kind, _WRAPPERS):
        return "module"
    # Compared by name, because the import of `torch._dynamo` is slow.
    compiled = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return "_orig_mod" if compiled else None


def _only_copies(module: torch.nn.Module) -> bool:
    """Whether a load does no more than copy values into the tensors that `state_dict` returns.
    Without `load_state_dict` the time does not grow with the square of the number of modules."""
    return not torch.__future__.get_swap_module_params_on_conversion() and all(
        code in _COPYING_CODE for code in _special_code(module)
    )


def _special_code(module: torch.nn.Module) -> Iterator[Any]:
    """The code in a save or a load beside that of all modules; None if replaced on one object."""
    parts = list(module.modules())
    for kind in {type(part) for part in parts}:
        methods = [getattr(kind, verb) for verb in _MODULE_VERBS]
        yield from (method for method in methods if method not in _MODULE_CODE)
    for part in parts:
        if not vars(part).keys().isdisjoint(_MODULE_VERBS):
            yield None
        for hooks in _MODULE_HOOKS:
            yield from getattr(part, hooks, {}).values()


def _is_from_torch(function: Any) -> bool:
    function = getattr(function, "hook", function)
    return str(getattr(function, "__module__", "")).startswith("torch.")


# Without those that a program had replaced before this module was imported.
_MODULE_CODE = tuple(
    filter(_is_from_torch, (getattr(torch.nn.Module, verb) for verb in _MODULE_VERBS))
)


def _have_separate_memory(state: Mapping[str, Any]) -> bool:
    """Whether all values are tensors, and two of them are equal views or share no memory."""
    views: dict[int, tuple[Any, ...]] = {}
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            return False
        if isinstance(value, LAZY) or value.is_meta:
            continue
        local = local_tensor(value)
        memory = local.untyped_storage().data_ptr() if local.numel() else 0
        if memory and views.setdefault(memory, _view(local)) != _view(local):
            return False
    return True


def _view(value: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that have the same elements of the same memory in the same order."""
    flags = value.is_conj(), value.is_neg()
    return value.data_ptr(), value.dtype, value.shape, value.stride(), *flags


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _undo_of(tensor: torch.Tensor) -> Callable[[], None]:
    """Returns what gives a tensor its present elements again, or makes it lazy or abstract again."""
    if isinstance(tensor, LAZY):
        kind, empty = type(tensor), torch.empty(0, dtype=tensor.dtype, device=tensor.device)

        def undo() -> None:
            if not isinstance(tensor, LAZY):
                tensor.data = empty
                tensor.__class__ = kind

        return undo
    if tensor.is_meta:
        return lambda: _give_memory(tensor, torch.empty_like(tensor, device="meta"))
    return partial(copy_into, tensor, tensor.detach().clone())


def _meta_reasons(module: torch.nn.Module) -> list[Difference]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [(name, tensor) for name, tensor in tensors if tensor.is_meta]
    if not on_meta:
        return []
    saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
    lines = []
    for name, tensor in on_meta:
        why, how = " and never saved (persistent=False)", ", and compute it"
        if id(tensor) in saved:
            why, how = ", and the module has code of its own for loading", ""
        reason = (
            f"is on the meta device{why}. Call `module.to_empty(device=...)`{how} before the "
            f"restore"
        )
        lines.append(Difference(join_dotted("", name), reason=reason))
    return lines


def _give_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Turn a tensor on the meta device into `value`; modules and optimizers keep the same object."""
    new = value.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new.detach(), requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)


def _differences(
    expected: Mapping[str, LeafSpec | None],
    tied: Iterable[list[str]],
    stored: Mapping[str, Leaf],
    *,
    whole: bool,
) -> list[Difference]:
    """Compares dtypes and shapes (None for any) and, with `whole`, the names; and tied tensors."""
    lines = []
    for path, spec in expected.items():
        if (leaf := stored.get(path)) is None:
            if whole:
                lines.append(Difference(path, "a tensor" if spec is None else spec.describe()))
        elif spec is not None and spec != LeafSpec.of(leaf):
            lines.append(Difference(path, spec.describe(), leaf.describe()))
    if whole:
        unknown = {path: leaf.describe() for path, leaf in stored.items()}
        unknown |= {
            path: f"a {entry.kind}" for path, entry in containers_of(stored).items() if path
        }
        lines += [Difference(p, None, text) for p, text in unknown.items() if p not in expected]
    for first, *others in tied:
        for path in others:
            are_stored = first in stored and path in stored
            if are_stored and not same_bits(stored[first], stored[path]):
                reason = (
                    f"is one tensor with {first} in the target, the checkpoint has two that "
                    f"differ; name with `leaves` what to restore, and only one of these two"
                )
                lines.append(Difference(path, reason=reason))
    return lines
