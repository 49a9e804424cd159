"""Which values a state stores already (no attribute stores these again), and the structure of modules
and optimizers: classes, inner modules, hooks, functions, the parameters of an optimizer. Structure is
code, which a resumed program builds as at first: a save refuses a changed structure.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from types import FunctionType
from typing import Any, NamedTuple

from perdure.errors import UnsupportedLeafError
from perdure.state.attribute_values import ValueKind, kind_of
from perdure.state.paths import join_dotted, join_key
from perdure.state.program_code import is_made, is_program_module
from perdure.state.walk import Walk

_NAMED = "!of:"
"""Begins the name of a parameter or a module that is a key of a dict, or part of an object."""

Key = tuple[str | int, ...]

_KIND, HOOKED, _NAMES = "!class", "!hooks", "!names"
_SLOTS = "!slots"
"""The key of the parameters and modules of a module by name, each with its class."""
_STEPPED = "!stepped"
"""The key of the parameters of an optimizer that are also parameters of the state."""
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
"""The hooks of a module or an optimizer by number in the process, and here by their order."""
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
ALL_HOOKS = frozenset([*HOOKS, *TENSOR_HOOKS])


class StateIdentities:
    """The identities (`id`) of the values in a state, and the memory of its tensors."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        targets: list[Any] = [node.target for node in walk.objects.values()]
        modules = [module for _, module in walk.torch_objects("nn.Module")]
        optimizers = [optimizer for _, optimizer in walk.torch_objects("optim.Optimizer")]
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
        stepped = (each for part in optimizers for _, each in parameters_by_key(part))
        self.has_stepped = any(map(self.has, stepped))
        """Whether an optimizer steps a tensor of the state. Else the model is saved elsewhere."""

    def add(self, module: Any) -> None:
        """Add the tensors in the `state_dict` of a module that is an attribute of a member."""
        tensor = sys.modules["torch"].Tensor
        values = module.state_dict(keep_vars=True).values()
        self._tensors += [each for each in values if isinstance(each, tensor)]
        self._ids.update(map(id, self._tensors))
        vars(self).pop("_memory", None)

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
        """Whether `value` is another tensor in the memory of a tensor of the state."""
        return hasattr(value, "storage_offset") and id(value) not in self._ids and self.has(value)

    def has_id(self, number: int) -> bool:
        """Whether a number is the `id` of a parameter or a module of the state."""
        return number in self._ids

    def name_of(self, value: Any) -> str | None:
        """The name of a parameter or a module that is a key of a dict; None for anything else."""
        return self._names.get(id(value))

    def resolve(self, key: Key) -> Key:
        """The key with each name of a parameter or a module replaced by that object."""
        if not any(str(name).startswith(_NAMED) for name in key):
            return key
        return tuple(self._named.get(str(name), name) for name in key)

    @cached_property
    def _named(self) -> dict[str, Any]:
        torch, named = sys.modules["torch"], dict[str, Any]()
        for path, module in self._walk.torch_objects("nn.Module"):
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
    """Whether an optimizer keeps values in `state` that its `state_dict` does not return: a wrapper
    around another optimizer often returns only the state of the inner one."""
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


def parameters_by_key(optimizer: Any) -> Iterator[tuple[Key, Any]]:
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for index, parameter in enumerate(group["params"]):
            yield ("param_groups", number, "params", index), parameter


class Owner(NamedTuple):
    path: str
    value: Any
    root: Any
    """The module of the state in which a module lies."""
    is_whole: bool = True
    """Whether all its attributes are saved, or only its mode and which parameters are trained."""


def structure_of(value: Any, known: StateIdentities) -> dict[Key, Any]:
    """The structure of a module, an optimizer or a schedule, among its marks."""
    return {
        (_SLOTS,): _slots(value, known),
        (_STEPPED,): {key: id(each) for key, each in parameters_by_key(value) if known.has(each)},
        (_NAMES,): [known.name_of(each) for _, each in parameters_by_key(value)],
        (_KIND,): _class_name(_unwrapped(value)),
        (HOOKED,): code_of(value),
    }


def require_same_names(owner: Owner, at_first: Mapping[Key, Any], known: StateIdentities) -> None:
    """Refuse an optimizer whose parameters the program has moved to other paths: a resumed program
    makes the optimizer with the parameters that were at the first paths."""
    before = at_first.get((_NAMES,), [])
    now = [known.name_of(each) for _, each in parameters_by_key(owner.value)]
    for old, new in zip(before, now, strict=False):
        if None not in (old, new) and old != new:
            one, other = (str(name)[len(_NAMED) :].replace(":", "/") for name in (old, new))
            raise UnsupportedLeafError(
                f"{owner.path}: steps {other}, and stepped {one} when the program gave the state to "
                f"the restore or first saved it: members have changed places. A resumed program has "
                f"them as at first. Copy the values (`load_state_dict`), or let the optimizers change "
                f"places with their models."
            )


def refuse_addresses(value: Any, path: str, known: StateIdentities) -> None:
    """Refuse a dict with `id(parameter)` as keys, which are other numbers in another process."""
    if isinstance(value, dict) and any(type(key) is int and known.has_id(key) for key in value):
        raise UnsupportedLeafError(
            f"{path}: has the `id` of a parameter or a module as a key, which is another number in a "
            f"resumed program. Use its name or its number, or the parameter itself in an attribute of "
            f"a module or an optimizer."
        )


def _slots(module: Any, known: StateIdentities) -> dict[str, tuple[Any, str]]:
    """The modules in a module by name, without wrappers (DDP), as weak references with their classes,
    and the parameters that it shares with another module; nothing for an optimizer."""
    parts = getattr(module, "_modules", {})
    found = {name: _unwrapped(part) for name, part in parts.items() if part is not None}
    slots = {name: (weakref.ref(part), _class_name(part)) for name, part in found.items()}
    tied = (
        name for name, each in getattr(module, "_parameters", {}).items() if known.is_tied(each)
    )
    return {**slots, **dict.fromkeys(tied, (_nothing, ""))}


def _unwrapped(value: Any) -> Any:
    from perdure.state.torch_module import unwrapped

    return unwrapped(value)


def _nothing() -> None:
    """In place of a weak reference to a parameter, with which PyTorch could not exchange its memory."""


def _class_name(value: Any) -> str:
    """The name of the class of a module: of a class that a library derives (`fully_shard`) the base,
    of a lazy module the class that it will have."""
    kind = getattr(type(value), "cls_to_become", None) or type(value)
    kind = next(base for base in kind.__mro__ if not is_made(base))
    return f"{kind.__module__}.{kind.__qualname__}"


def code_of(value: Any) -> list[str]:
    """The hooks that the program has registered on a module or an optimizer and on its parameters, and
    the functions in its attributes."""
    places = [(f"hook {name[1:]}", getattr(value, name, None)) for name in HOOKS]
    for name, parameter in getattr(value, "_parameters", {}).items():
        for kind in TENSOR_HOOKS if parameter is not None else ():
            places.append((f"hook {name}.{kind[1:]}", getattr(parameter, kind, None)))
    for name, part in vars(value).items():  # one with a public name is stored
        if isinstance(part, FunctionType) and kind_of(part) is ValueKind.OTHER:
            places.append((f"function {name}", {name: part}))
    return sorted(
        f"{place} ({_hook_name(hook)})"
        for place, hooks in places
        for hook in (hooks or {}).values()
        if is_program_module(str(getattr(getattr(hook, "func", hook), "__module__", "")))
    )


def _hook_name(hook: Any) -> str:
    hook = getattr(hook, "func", hook)
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name if code is None else f"{name}, line {code.co_firstlineno}"


def require_same_code(owner: Owner, fresh: Mapping[Key, Any]) -> None:
    """Refuse a member whose class has changed, and hooks that the run has added or removed: classes and
    hooks are code, which a resumed program has as at first."""
    kind, hooks = _class_name(_unwrapped(owner.value)), code_of(owner.value)
    if kind != fresh.get((_KIND,), kind):
        raise UnsupportedLeafError(
            f"{owner.path}: is a {kind}, and was a {fresh[_KIND,]} when the program gave the state "
            f"to the restore or first saved it. A resumed program builds the first one again. Keep "
            f"both in the state, and choose between them by a number."
        )
    now, before = Counter(hooks), Counter(fresh.get((HOOKED,), hooks))
    removed = [each for each in before - now if each.startswith("hook")]
    if changed := [*(now - before), *removed]:
        verb = "added" if now - before else "removed"
        raise UnsupportedLeafError(
            f"{owner.path}: the run has {verb} the {changed[0]}, which is code, so that a "
            f"resumed program would have the functions and hooks that it had at first. Give it or "
            f"register it where the model is made, and let it do nothing until a number that is in the "
            f"state says so."
        )


def require_same_slots(
    owner: Owner, marks: Mapping[Any, Any], owners: list[Owner], known: StateIdentities
) -> None:
    """Refuse a module that training has moved, or replaced by a module of another class: a resumed
    program builds the first module, and no `state_dict` names classes. `marks` are the fresh marks by
    owner."""
    before = marks[owner.value].get((_SLOTS,), {})
    for name, (reference, kind) in _slots(owner.value, known).items():
        was, old_kind = before.get(name, (_nothing, "nothing"))
        part = reference()
        if was() is part and kind == old_kind:
            continue
        reason = f"is a {kind}, and was {old_kind}" if kind != old_kind else None
        if part is None:
            reason = "is one parameter with that of another module, and was not"
        for other in owners:
            slots = marks.get(other.value, {}).get((_SLOTS,), {})
            if places := [
                slot for slot, (held, _) in slots.items() if part is not None and held() is part
            ]:
                reason = f"is what was {join_dotted(other.path, places[0])}"
        if reason is not None:
            raise UnsupportedLeafError(
                f"{join_dotted(owner.path, name)}: {reason} when the program gave the state to the "
                f"restore or first saved it. A resumed program builds the first one again. Change the "
                f"module before that, or keep both and choose between them by an attribute."
            )


def require_same_parameters(owner: Owner, fresh: Mapping[Key, Any], known: StateIdentities) -> None:
    """Refuse an optimizer that keeps a parameter that its model no longer has, or has its parameters
    in another order: a resumed program makes it with the first parameters in the first order."""
    held, before = dict(parameters_by_key(owner.value)), fresh.get((_STEPPED,), {})
    now = {key: id(held[key]) for key in before if key in held}
    if now != before and sorted(now.values()) == sorted(before.values()):
        moved = next(key for key, number in before.items() if now[key] != number)
        raise UnsupportedLeafError(
            f"{path_of(owner.path, moved)}: the run has given the parameters of the optimizer another "
            f"order, and a resumed program has the first one, so that each would get the state of "
            f"another one. Exchange the settings of the groups (`lr`), or make another optimizer."
        )
    for key in before if known.has_stepped else ():
        if key in held and not known.has(held[key]):
            raise UnsupportedLeafError(
                f"{path_of(owner.path, key)}: the optimizer steps a parameter of shape "
                f"{list(held[key].shape)} that the state no longer has: a layer or a parameter was "
                f"replaced, and the optimizer kept the old one. Give the optimizer the new one, or "
                f"copy the new values into the old one (`with torch.no_grad(): old.copy_(new)`)."
            )


@cache
def fresh_marks() -> Any:
    """The fresh marks by owner that the first manager of the program has seen."""
    return by_identity()


def by_identity() -> Any:
    """A dict with weak keys that are compared by identity: a class may hash by its values."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def path_of(path: str, key: Key) -> str:
    for part in key:
        path = join_key(path, str(part) or "''")
    return path
