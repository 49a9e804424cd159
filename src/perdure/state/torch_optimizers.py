"""Optimizers and schedulers of PyTorch. `load_state_dict` compares only the sizes of the groups, so
a checkpoint names the class, and the shapes of the state are compared with those of the parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Stateful, leaf_of
from perdure.state.leaf_spec import Check, Difference, LeafSpec
from perdure.state.leaf_values import plain_value
from perdure.state.torch_tensors import LAZY, is_dtensor, shard_of, sharded_parts
from perdure.store.format import unescape
from perdure.store.leaf import Leaf, containers_of

_EXACT = (torch.Tensor, torch.nn.Parameter)
_WRAPPER = re.compile(r"module\.|_orig_mod\.")
_OTHER_SHAPES = (torch.optim.Adafactor, torch.optim.LBFGS)
_WRAPPING = ("lightning.fabric.", "lightning_fabric.", "accelerate.optimizer.")
Shape = tuple[int, ...]


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a wrapper of Fabric or Accelerate, which has all state; else itself."""
    kinds = type(optimizer).__mro__
    is_wrapper = any(f"{kind.__module__}.".startswith(_WRAPPING) for kind in kinds)
    return optimizer.optimizer if is_wrapper else optimizer


class OptimizerState(Stateful):
    """An optimizer. Its class and the sizes of its groups are strict; its state is what was stored."""

    arrays = "torch"

    @property
    def class_name(self) -> str:  # type: ignore[override]
        return _class_of_torch(self.target)

    def read(self) -> Any:
        state = self.target.state_dict()
        is_own = type(self.target).state_dict is not torch.optim.Optimizer.state_dict
        parameters = {id(each) for each in self.depends_on()} if is_own else set()
        for name, part in state.items() if is_own and isinstance(state, dict) else ():
            keys = part if isinstance(part, dict) else ()
            if any(type(key) is int and key in parameters for key in keys):
                raise UnsupportedLeafError(
                    f"its `state_dict` has `id()`s of parameters as the keys of {name!r}, which mean "
                    f"nothing in another process. Number the parameters there, as PyTorch does."
                )
        return state

    def check(self) -> Check:
        return _optimizer_check(self) if self._has_groups else super().check()

    def depends_on(self) -> Iterable[Any]:
        # One that wraps another may have no groups.
        return _parameters(getattr(self.target, "param_groups", ()))

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
        """Load a state into the dict of states and the list and the dicts of groups that the optimizer
        has: other optimizers and schedulers may have the same ones."""
        optimizer, groups = self.target, getattr(self.target, "param_groups", None)
        present = [*groups] if isinstance(groups, list) else []
        states: Any = getattr(optimizer, "state", None)
        self._load(state)
        if self._is_standard and states is not (loaded := optimizer.state):
            states.clear()
            states.update(loaded)
            optimizer.state = states
        if not isinstance(groups, list) or (new := optimizer.param_groups) is groups:
            return
        for group, loaded in zip(present, new, strict=True):
            if group is not loaded:
                for name, value in group.items():  # `lr=torch.tensor(0.1)`, which others may have
                    new_value = loaded.get(name)
                    if _is_alike(value, new_value):
                        loaded[name] = value.copy_(new_value)
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
        numbers = _parameters(state["param_groups"])
        for number, parameter in zip(numbers, self.depends_on(), strict=True):
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
        states = dict(state)
        tensors = [
            value for _, values in before for value in values.values() if torch.is_tensor(value)
        ]
        copies = [value.clone() for value in tensors]

        def undo() -> None:
            optimizer.state, optimizer.param_groups = state, groups
            state.clear()
            state.update(states)
            groups[:] = [group for group, _ in before]
            for group, values in before:
                group.clear()
                group.update(values)
            for value, copy in zip(tensors, copies, strict=True):
                value.copy_(copy)

        return undo

    @property
    def _has_groups(self) -> bool:
        """Whether `state_dict` returns what PyTorch's does, perhaps with more."""
        if type(self.target).state_dict is torch.optim.Optimizer.state_dict:
            return True
        if not hasattr(self.target, "param_groups"):
            return False
        state = self.read()
        if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
            return False
        groups = state.get("param_groups")
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


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return (one.shape, one.dtype) == (other.shape, other.dtype)


class SchedulerState(Stateful):
    """A scheduler. Its class is strict."""

    @property
    def class_name(self) -> str:  # type: ignore[override]
        return _class_of_torch(self.target)

    def check(self) -> Check:
        return partial(_other_class, self.class_name)

    def depends_on(self) -> Iterable[Any]:
        return [self.target.optimizer] if hasattr(self.target, "optimizer") else ()

    def may_add(self, path: str) -> bool:
        return "/" not in path  # a setting of a newer torch


def _tensor_states(state: Any) -> dict[int, dict[Any, Any]]:
    return {
        index: dict(values)
        for index, number in enumerate(_parameters(state["param_groups"]))
        if isinstance(values := state["state"].get(number), dict)
    }


def _put_exact(optimizer: torch.optim.Optimizer, stored: Mapping[int, Mapping[Any, Any]]) -> None:
    """Give tensors the dtype that they were stored with, if the optimizer's own code for loading has
    called PyTorch's, which casts to the dtype of the parameter, and what it saves is what it holds."""
    saved = _tensor_states(optimizer.state_dict())
    for index, parameter in enumerate(_parameters(optimizer.param_groups)):
        held = optimizer.state.get(parameter)
        before, present = stored.get(index), saved.get(index)
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
    """The stored value with its dtype, on the device that PyTorch chose for the loaded one, and sharded
    as the parameter if it has its shape."""
    if isinstance(stored, torch.Tensor):
        is_alike = stored.shape == parameter.shape and not stored.requires_grad
        if not is_alike or not is_dtensor(parameter):
            return stored.to(loaded.device)
        if is_dtensor(stored):
            return stored
        leaf = leaf_of(stored)
        assert leaf is not None
        return shard_of(parameter, leaf)
    if isinstance(stored, dict):
        values = {key: _exact_state(stored[key], loaded[key], parameter) for key in stored}
        return values if type(stored) is dict else stored
    if type(stored) in (list, tuple):
        return type(stored)(
            _exact_state(value, other, parameter)
            for value, other in zip(stored, loaded, strict=True)
        )
    return stored


def _parameters(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The parameters in groups, in order; for the groups of a `state_dict` their numbers."""
    return [parameter for group in groups for parameter in group["params"]]


def _class_of_torch(value: Any) -> str:
    """The class of PyTorch from which the class of an optimizer or a scheduler derives."""
    inner = getattr(value, "optimizer", None)  # of one that wraps another
    kind = type(inner if isinstance(value, torch.optim.Optimizer) and inner else value)
    names = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
    return next(name for name in names if name.startswith("torch.optim."))


def _other_class(expected: str, stored: Mapping[str, Leaf]) -> list[Difference]:
    entry = containers_of(stored).get("")
    if entry is None or entry.type in (None, expected):
        return []
    return [Difference("", reason=f"the checkpoint has a {entry.type}, expected a {expected}")]


def _optimizer_check(state: OptimizerState) -> Check:
    """Compares class, groups, and the shapes of state and parameters. Keeps no tensor."""
    class_name, kind, groups = state.class_name, type(state.target), state.target.param_groups
    expected = [len(group["params"]) for group in groups]
    names = [name for group in groups for name in group.get("param_names", ())]
    parameters = _parameters(groups)
    shapes = [None if isinstance(each, LAZY) else tuple(each.shape) for each in parameters]
    has_their_shapes = kind.__module__.startswith("torch.optim") and kind not in _OTHER_SHAPES
    del state, groups, parameters

    def check(stored: Mapping[str, Leaf]) -> list[Difference]:
        sizes: dict[int, int] = defaultdict(int)
        before: list[str] = []
        for path, leaf in stored.items():
            first, number, name, *_ = f"{path}///".split("/")
            if first == "param_groups" and number.isdigit():
                sizes[int(number)] += unescape(name) == "params"
                before += [str(plain_value(leaf))] if unescape(name) == "param_names" else []
        found = [sizes[number] for number in sorted(sizes)]
        if found != expected:
            reason = (
                f"expected groups of {expected} parameters, the checkpoint has groups of {found}. If "
                f"the loop calls `add_param_group` while it trains, add the group before the restore"
            )
            return [Difference("param_groups", reason=reason)]
        return (
            _other_class(class_name, stored)
            or _order_differences(names, before)
            or _shape_differences(shapes, stored, has_their_shapes)
        )

    return check


def _order_differences(now: list[str], before: list[str]) -> list[Difference]:
    """The same names in another order: every parameter would get the state of another one."""
    if sorted(before) != sorted(now):  # one of them was taken from a wrapped module
        before, now = ([_WRAPPER.sub("", name) for name in names] for names in (before, now))
    if before == now or sorted(before) != sorted(now):
        return []
    number = next(n for n, (old, new) in enumerate(zip(before, now, strict=True)) if old != new)
    reason = f"expected {now[number]} as parameter {number}, the checkpoint has {before[number]}"
    return [Difference("param_groups", reason=reason)]


def _shape_differences(
    expected_shapes: Sequence[Shape | None], stored: Mapping[str, Leaf], has_their_shapes: bool
) -> list[Difference]:
    """State that has the shape of another parameter. In a user's optimizer state may have any shape,
    unless the shapes are the shapes of all parameters in another order."""
    found: dict[str, dict[int, Shape]] = defaultdict(dict)
    for path, leaf in stored.items():
        parts = path.split("/")
        if parts[0] == "state" and len(parts) == 3 and parts[1].isdigit() and leaf.shape:
            number = int(parts[1])
            if number < len(expected_shapes) and expected_shapes[number] is not None:
                found[parts[2]][number] = leaf.shape
    lines = []
    for key, shapes in found.items():
        expected = {number: expected_shapes[number] or () for number in shapes}
        if not has_their_shapes and sorted(shapes.values()) != sorted(expected.values()):
            continue
        lines += [
            Difference(
                f"state/{number}/{key}",
                reason=f"expected the shape {list(expected[number])} of parameter {number}, the "
                f"checkpoint has {list(shape)}; give the optimizer its parameters in the order in "
                f"which they were saved",
            )
            for number, shape in shapes.items()
            if shape != expected[number]
        ]
    return lines
