"""What a state has already, so that no attribute of a module or an optimizer stores it again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from perdure.state.walk import Walk

_NAMED = "!of:"
"""Begins the name of a parameter or a module that is a key of a dict, or part of an object."""

Key = tuple[str | int, ...]


class Known:
    """The values that a state has, by identity, and the memory of its tensors."""

    def __init__(self, walk: Walk) -> None:
        torch = sys.modules.get("torch")
        self._walk = walk
        targets: list[Any] = [node.target for node in walk.objects.values()]
        of_torch = targets if torch is not None else []
        modules = [each for each in of_torch if isinstance(each, torch.nn.Module)]  # type: ignore[union-attr]
        optimizers = [each for each in of_torch if isinstance(each, torch.optim.Optimizer)]  # type: ignore[union-attr]
        saved = {id(module): _saved_memory(module) for module in modules}
        self._filtered = {number for number, memory in saved.items() if memory is not None}
        parts = [(part, saved[id(module)]) for module in modules for part in module.modules()]
        each_once = {id(part): part for part, _ in parts}.values()
        self._uses = Counter(id(each) for part in each_once for each in part._parameters.values())
        self._tensors: list[Any] = []
        for part, memory in parts:
            lost = part._non_persistent_buffers_set
            held = [each for name, each in part._buffers.items() if name not in lost]
            held += part._parameters.values()
            self._tensors += [each for each in held if memory is None or memory_of(each) in memory]
        found = [*targets, *(part for part, _ in parts), *self._tensors, *walk.values]
        self._ids = {*map(id, found), *(id(branch.value) for branch in walk.branches)}
        self._ids -= {id(None), id(True), id(False)}
        self._without_state = {id(each) for each in optimizers if _leaves_out_state(each)}
        for optimizer in optimizers:
            states = {} if self.leaves_out_state(optimizer) else getattr(optimizer, "state", {})
            for values in states.values():
                self._tensors += values.values() if isinstance(values, dict) else ()
        self.has_stepped = any(self.has(each) for part in optimizers for _, each in stepped(part))
        """Whether the state has a tensor of an optimizer. Without any, the program saves its model
        elsewhere."""

    def leaves_out(self, module: Any) -> bool:
        """Whether the `state_dict` of a module of the state may leave some of its tensors out."""
        return id(module) in self._filtered

    def leaves_out_state(self, optimizer: Any) -> bool:
        """Whether the `state_dict` of an optimizer does not return all that it keeps in `state`."""
        return id(optimizer) in self._without_state

    def is_tied(self, parameter: Any) -> bool:
        """Whether two modules, or one module under two names, have this parameter."""
        return parameter is not None and self._uses[id(parameter)] > 1

    def has(self, value: Any) -> bool:
        """Whether the state has `value`, or the memory of this tensor."""
        if id(value) in self._ids:
            return True
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(value, torch.Tensor)
        return is_tensor and memory_of(value) in self._memory

    def is_view(self, value: Any) -> bool:
        """Whether `value` is a tensor in the memory of one of the state, and not that one."""
        return hasattr(value, "storage_offset") and id(value) not in self._ids and self.has(value)

    def has_id(self, number: int) -> bool:
        """Whether a number is the `id` of a parameter or a module of the state."""
        return number in self._ids

    def name_of(self, value: Any) -> str | None:
        """The name of a parameter or a module that is a key of a dict; None for anything else."""
        return self._names.get(id(value))

    def real(self, key: Key) -> Key:
        """A key with the parameters and modules in place of their names."""
        if not any(str(name).startswith(_NAMED) for name in key):
            return key
        return tuple(self._named.get(str(name), name) for name in key)

    @cached_property
    def _named(self) -> dict[str, Any]:
        torch, named = sys.modules["torch"], dict[str, Any]()
        for path, node in self._walk.objects.items():
            if isinstance(module := node.target, torch.nn.Module):
                parts = [*module.named_modules(), *module.named_parameters()]
                named.update((f"{_NAMED}{path}:{name}", part) for name, part in parts)
        tensors = [(path, each) for path, each in self._walk.pairs() if torch.is_tensor(each)]
        return {**named, **{f"{_NAMED}{path}": each for path, each in tensors}}

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(part): name for name, part in self._named.items()}

    @cached_property
    def _memory(self) -> set[int]:
        torch = sys.modules["torch"]
        tensors = [*self._tensors, *self._walk.values]
        for state in self._walk.states.values():
            tensors += state.values() if isinstance(state, dict) else ()
        return {memory_of(each) for each in tensors if isinstance(each, torch.Tensor)} - {0}


def _leaves_out_state(optimizer: Any) -> bool:
    """Whether an optimizer of a program keeps values in `state` that its `state_dict` does not return:
    one that wraps another often returns only that one's."""
    torch = sys.modules["torch"]
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return False
    saved = optimizer.state_dict()
    entries = saved.get("state") if isinstance(saved, dict) else None
    return not _names_in(getattr(optimizer, "state", None)) <= _names_in(entries)


def _names_in(states: Any) -> set[Any]:
    parts = states.values() if isinstance(states, dict) else ()
    return {name for part in parts if isinstance(part, dict) for name in part}


def _saved_memory(module: Any) -> set[int] | None:
    """The memory of the tensors in a `state_dict` that may leave some out; None for PyTorch's own."""
    torch = sys.modules["torch"]
    plain = torch.nn.Module.state_dict
    if all(type(p).state_dict is plain and not p._state_dict_hooks for p in module.modules()):
        return None
    values = module.state_dict(keep_vars=True).values()
    return {memory_of(each) for each in values if isinstance(each, torch.Tensor)}


def memory_of(tensor: Any) -> int:
    """Where the elements of a tensor begin; 0 if they are in no memory of this process."""
    if tensor is None:
        return 0
    try:
        return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # of a subclass, or sparse
        return 0


def stepped(optimizer: Any) -> Iterator[tuple[Key, Any]]:
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for place, parameter in enumerate(group["params"]):
            yield ("param_groups", number, "params", place), parameter
