"""Attributes of PyTorch's modules and optimizers that are in no `state_dict`, saved with their owner.

Invariant: a value is stored if and only if it differs from the fresh value, which the first look at
its owner has recorded (or if a restore has set it). A value that a run never changes costs nothing and
stays code, and what is stored does not depend on when saves happen.
"""

from __future__ import annotations

import operator
import sys
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, cached_property, partial
from types import FunctionType, MethodType
from typing import Any

import msgspec
import numpy as np

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.adapter import Stateful, loaded_adapters
from perdure.state.attribute_values import (
    ValueKind,
    has_others,
    is_container_of_program,
    is_position,
    is_value_of_library,
    items_of,
    kind_of,
    mark_of,
    parts_inside,
    put_value,
    static_mark,
    static_owners,
    stored_form,
    untracked,
)
from perdure.state.extra_members import ExtraMember, Restoring, Saving, json_leaf
from perdure.state.leaf_spec import PathInErrors, type_name
from perdure.state.leaf_values import CONTAINERS, SCALAR_TYPES
from perdure.state.object_restore import ObjectStates
from perdure.state.paths import join_dotted, join_part
from perdure.state.program_code import is_computed, is_owner, is_program_module
from perdure.state.snapshots import ObjectFlattener, described
from perdure.state.structure import (
    ALL_HOOKS,
    HOOKED,
    HOOKS,
    TENSOR_HOOKS,
    Key,
    Owner,
    StateIdentities,
    by_identity,
    code_of,
    fresh_marks,
    memory_of,
    parameters_by_key,
    path_of,
    refuse_addresses,
    require_same_code,
    require_same_names,
    require_same_parameters,
    require_same_slots,
    structure_of,
)
from perdure.state.value_forms import (
    attributes_of,
    class_named,
    refuse_pending,
    whole_form,
)
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import Container

_OPTIMIZER_STATE = frozenset(["state", "param_groups", "defaults", "_opt_called", "_step_count"])
"""Attributes that an optimizer saves, or that a learning rate scheduler sets in it."""
_MODE, _TRAINED = "training", "requires_grad"
_NOT_PERSISTENT = "_non_persistent_buffers_set"
"""The names of the buffers of a module that its `state_dict` leaves out."""
_SHAPE = "!shape"
"""The key of the shape of a container or an object: class, length, keys. While the shape is equal, its
parts are stored one by one; otherwise the whole is stored."""
_NAMES = "!names"
"""The key of the names of the attributes of an object of a library, which restores in place."""
_VIEW = "!view"
"""The key of the elements that an attribute, which is a view of a tensor of the state, shows."""
_LOCAL = "local"
"""The key of the local part of a sharded tensor in this process."""
_SCALARS_KEY = "!scalars"  # of all values of a module that has nothing but scalars
_INNER_MODULES = "!held"  # of the modules in attributes and containers
_LAMBDAS, _SCHEDULES = "lr_lambdas", "_schedulers"
_COMPUTED = ("_orig", "_v")
"""The suffixes of the names of parameters from which a parametrization computes an attribute."""


class _Stored(msgspec.Struct, frozen=True):
    """The leaf `process/<n>/attributes_index`, which describes the leaves `process/<n>/attributes`."""

    keys: dict[str, tuple[str | int, ...]]
    """By the path of a value, the path of its owner and the names that lead from there to it."""
    containers: dict[str, Container]
    same: dict[str, str]
    """Paths of values that are one object with the value at another path."""
    arrays: list[list[str]] = []
    """The paths of each array that is in several places, also in containers."""
    deleted: list[tuple[str, str]] = []
    """The path of an owner, and an attribute that it no longer has."""


_decoder = msgspec.json.Decoder(_Stored)
_Arrays = dict[int, tuple[Any, list[str]]]
"""Arrays by `id`, and the paths at which each one is."""


_RESTORED = object()
"""The mark of a value that a restore has set: it equals no other mark, so every later save stores the
value again."""


class Attributes(ExtraMember):
    """Stores attributes that the run has changed since the first look at the state. Refuses a changed
    structure (classes, modules, hooks, parameters) and changed values that have no exact form."""

    def __init__(self) -> None:
        self._static: dict[Key, Any] | None = None
        self._at: dict[str, MutableMapping[Key, Any]] = {}
        """The fresh marks of the first owner at each path."""
        self._owners: dict[str, int] = {}
        """The `id` of the owner at each path when `observe` was last called."""

    @cached_property
    def _marks(self) -> Any:
        """The fresh marks by owner, of this manager: see `_fresh_of`."""
        return by_identity()

    def observe(self, walk: Walk) -> None:
        if self._static is None:  # by path, because these modules are made again in each step
            self._static = {
                (path, name): static_mark(getattr(value, name))
                for path, value, names in static_owners(walk)
                for name in names
            }
        owners, known = _owners(walk)
        if known is not None:
            for owner in owners:
                fresh = self._at[owner.path] = self._fresh_of(owner, known)
                self._owners[owner.path] = id(owner.value)
                # As of the first call of `save`: many programs register hooks after the restore.
                if owner.is_whole:
                    fresh[HOOKED,] = code_of(owner.value)

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        if self._static is None:
            self.observe(saving.walk)
        leaves, top = Leaves(), f"process/{saving.process}/attributes"
        keys: dict[str, Key] = {}
        same: dict[str, str] = {}
        deleted: list[tuple[str, str]] = []
        # Keeps the values alive, so that no `id` is used again.
        first: dict[int, tuple[str, Any]] = {}
        arrays = _Arrays()
        unchanged: list[tuple[Owner, Key, Any]] = []
        owners, known = _owners(saving.walk)
        wholes = [owner for owner in owners if owner.is_whole]
        has_moved = any(
            self._owners.get(path, id(value)) != id(value) for path, value, *_ in wholes
        )
        for owner in owners:
            assert known is not None
            fresh = self._fresh_of(owner, known)
            if owner.is_whole:
                if has_moved:
                    require_same_names(owner, self._at.get(owner.path, {}), known)
                require_same_slots(owner, self._marks, wholes, known)
            before, now = fresh.get((_SCALARS_KEY,)), _scalars(owner, known)
            if before and now and len(before) == len(now) and all(map(operator.is_, now, before)):
                continue  # nearly every one, in every save
            if owner.is_whole:
                require_same_code(owner, fresh)
                require_same_parameters(owner, fresh, known)
            values, others = deque(_values(owner, known)), dict[int, bool]()
            whole: set[Key] = set()
            count = len(keys)
            names = {str(key[0]) for key in fresh if str(key[0]).isidentifier()}.difference(HOOKS)
            deleted += [(owner.path, name) for name in names if not _has(owner.value, name)]
            while values:
                key, value = values.popleft()
                if key in fresh and fresh[key] == mark_of(value, is_fresh=False):
                    unchanged.append((owner, key, value))
                    continue
                if whole and any(key[:length] in whole for length in range(1, len(key))):
                    continue
                if key[-1] == _VIEW:
                    if key in fresh:
                        raise UnsupportedLeafError(
                            f"{path_of(owner.path, key[:-1])}: is a view of a tensor of the state, and "
                            f"showed other elements of it when the program gave the state to the "
                            f"restore or first saved it. A resumed program would show those again. "
                            f"Keep the number of the row, and make the view where it is used."
                        )
                    continue
                hook = next((n for n, part in enumerate(key[:2]) if part in ALL_HOOKS), None)
                if hook is not None and (*key[: hook + 2], _SHAPE) not in fresh:
                    continue  # a resumed program may register it only after the restore
                form, is_whole = None, key[-1] == _SHAPE
                if is_whole:
                    key = key[:-1]
                    value = _get(owner, known.resolve(key))
                    if (*key, _SHAPE) not in fresh and is_value_of_library(value):
                        whole.add(key)  # of this step; nothing may make an object of any class
                        continue
                    if (form := _form_of_whole(value, known, path_of(owner.path, key))) is None:
                        continue
                elif key not in fresh and _is_beside_others(owner, known.resolve(key), others):
                    continue
                if key[-1] == _LOCAL and key not in fresh:
                    raise UnsupportedLeafError(
                        f"{path_of(owner.path, key[:-1])}: a sharded tensor that the run has put "
                        f"there, which a resumed program could not make. Make it where its owner "
                        f"is made."
                    )
                path = path_of(join_part(top, owner.path), key)
                is_plain = kind_of(value) is ValueKind.PLAIN
                refuse_addresses(value, path_of(owner.path, key), known)
                if not is_plain:
                    _require_present(value, fresh.get(key), path_of(owner.path, key))
                    with PathInErrors(path_of(owner.path, key)):
                        for part in parts_inside(value):
                            if kind_of(part) is ValueKind.ARRAY and hasattr(part, "grad_fn"):
                                refuse_pending(part)
                if not is_plain and id(value) in first:
                    same[path] = first[id(value)][0]
                elif not _add(leaves, value, path, form or _form_by_names(value, known), arrays):
                    if isinstance(value, dict) and len(key) <= _DEEPEST and not is_whole:
                        parts = [*items_of(value, known.name_of)]
                        values.extendleft(((*key, name), part) for name, part in reversed(parts))
                    else:
                        _require_form(value, path_of(owner.path, key))
                    continue
                elif not is_plain:
                    first[id(value)] = path, value
                keys[path] = (owner.path, *key)
                if is_whole:
                    whole.add(key)
            if len(keys) > count and (loader := _loader_of(owner.root)) is not None:
                loader.require_sampler_as_begun(owner.root, owner.path)
        # Store these with a stored array that they share: else a restore would make two arrays.
        for owner, key, value in unchanged if arrays else ():
            path = path_of(join_part(top, owner.path), key)
            if key[-1] == _SHAPE or kind_of(value) is ValueKind.PLAIN:
                continue
            if any(id(part) in arrays for part in parts_inside(value)):
                if id(value) in first:
                    same[path] = first[id(value)][0]
                elif not _add(leaves, value, path, None, arrays):
                    continue
                first.setdefault(id(value), (path, value))
                keys[path] = (owner.path, *key)
        for path, value, names in static_owners(saving.walk):
            for name in names:
                part = getattr(value, name)
                mark, before = static_mark(part), (self._static or {}).get((path, name))
                inside = path_of(join_part(top, path), (name,))
                if before != mark:
                    _add_static(leaves, untracked(part), inside, before)
                    keys[inside] = (path, name)
        if not keys and not deleted:
            return {}
        copies = {path: leaf if leaf.frozen else leaf.copy() for path, leaf in leaves.items()}
        groups = [paths for _, paths in arrays.values() if len(paths) > 1]
        return {
            **copies,
            f"{top}_index": json_leaf(_Stored(keys, leaves.containers, same, groups, deleted)),
        }

    def _fresh_of(self, owner: Owner, known: StateIdentities) -> MutableMapping[Key, Any]:
        """The fresh marks of an owner: those of the one in whose place the run has put it, or those of
        now if there was none. Values that the first manager of the program has seen count as fresh
        for a later one, too; code (the structure, hooks, objects) is as the later one first sees it.
        """
        if (fresh := self._marks.get(owner.value)) is not None:
            return fresh
        if (first := fresh_marks().get(owner.value)) is not None:
            fresh = ChainMap(_code_since(owner, first, known), first)
            first.pop((_INNER_MODULES,), None)
        elif owner.path in self._at:
            fresh = dict(self._at[owner.path])
        else:
            fresh = {key: mark_of(value) for key, value in _values(owner, known)}
            fresh[_SCALARS_KEY,] = _scalars(owner, known)
            if owner.is_whole:
                fresh |= structure_of(owner.value, known)
        fresh_marks().setdefault(owner.value, fresh)
        self._marks[owner.value] = fresh
        return fresh

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        if (stored := restoring.stored("attributes_index", _decoder)) is None:
            return []
        top = restoring.path("attributes_index").removesuffix("_index")
        found, known = _owners(walk)
        owners, known = {owner.path: owner for owner in found}, known or StateIdentities(walk)
        states = _WithSharedArrays(
            Leaves(restoring.leaves, stored.containers),
            stored.arrays,
            lambda name: known.resolve((name,))[0],
        )
        states.ids |= _shared_only_in_target(owners.values(), known, top, stored.arrays)
        static = {path: value for path, value, _ in static_owners(walk)}
        put: dict[str, Any] = {}
        for path, name in stored.deleted:
            if (owner := owners.get(restoring.renamed(path))) is not None:
                vars(owner.value).pop(name, None)
        # The names of buffers come first: a value with such a name becomes a buffer. Names of
        # attributes come last: an attribute may be computed from a deleted one. A value comes before
        # its other paths; an array, which is restored in place, before containers that have it too.
        in_order = sorted(
            stored.keys.items(),
            key=lambda item: (
                item[1][-1] == _NAMES,
                item[1][-1] != _NOT_PERSISTENT,
                item[0] in stored.same,
                item[0] not in states.numbers,
            ),
        )
        for path, (first, *key) in in_order:
            owner_path = restoring.renamed(str(first))
            if (owner := owners.get(owner_path)) is None:
                if (value := static.get(owner_path)) is not None:
                    _set_static(value, str(key[0]), states.value(path, None))
                continue
            try:
                target_key = known.resolve(tuple(key))
                if path in stored.same:
                    if stored.same[path] in put:
                        same = put[stored.same[path]]
                        _set(owner, target_key, same, {id(same)})
                else:
                    if known.has(present := _get(owner, target_key)):
                        states.ids.add(id(present))  # the run has put another value there
                    value = states.value(path, present)
                    put[path] = _set(owner, target_key, value, states.ids)
                    states.note(path, put[path])
            except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
                raise StateError(
                    f"{restoring.where}: {path.removeprefix(top + '/')}: this attribute of a "
                    f"{type(owner.value).__name__} cannot take the stored value: {error}. The rest of "
                    f"the state is restored. Build the target with the code that saved it."
                ) from error
            fresh = self._marks.get(owner.value, fresh_marks().get(owner.value))
            if fresh is not None:
                fresh[tuple(key)] = _RESTORED
                fresh[_SCALARS_KEY,] = None
        return []


def _has(owner: Any, name: str) -> bool:
    """Whether an object has an attribute. A property is not read: that of a parametrized weight may
    compute, as `spectral_norm`'s does a power iteration."""
    return isinstance(getattr(type(owner), name, None), property) or hasattr(owner, name)


def _code_since(
    owner: Owner, first: MutableMapping[Key, Any], known: StateIdentities
) -> dict[Key, Any]:
    """The marks of an owner that are not those of the `first` manager that has seen it: the program
    may change code between two managers, such as a layer after a first phase of training."""
    marks = structure_of(owner.value, known) if owner.is_whole else {}
    for key, value in _values(owner, known):
        is_made = key[-1] == _LOCAL or kind_of(value) is ValueKind.OBJECT
        is_code = key[-1] == _VIEW or any(name in ALL_HOOKS for name in key[:2])
        if is_code or (is_made and first.get(key) != mark_of(value)):
            marks[key] = mark_of(value) if key[-1] in (_SHAPE, _VIEW) else _RESTORED
    return marks


def _set_static(owner: Any, name: str, stored: Any) -> None:
    present = getattr(owner, name, None)
    if any(kind.__module__.startswith("keras.") for kind in type(owner).__mro__):
        setattr(owner, name, put_value(present, stored))  # Keras keeps it elsewhere, too
    else:  # what the restore has made: nothing else has it yet
        object.__setattr__(owner, name, stored)


def _add_static(leaves: Leaves, value: Any, path: str, before: Any) -> None:
    form = None
    with suppress(StateError):
        form = whole_form(value, lambda _: None)
    if not _add(leaves, value, path, form, {}) and before is not None:
        raise UnsupportedLeafError(
            f"{path.partition('/attributes/')[2]}: the run has changed this static value, of which a "
            f"{type_name(value)} has no exact form in a checkpoint, so that a resumed program would "
            f"have the first one. Choose between values by a number or a text, or make it an array."
        )


def _scalars(owner: Owner, known: StateIdentities) -> list[Any] | None:
    """All values of a module other than tensors and modules; None if one of them is no scalar (or no
    tuple of scalars)."""
    held = vars(part := owner.value)
    if "_parameters" not in held or known.leaves_out(owner.root):
        return None
    if not owner.is_whole:
        trained = (each.requires_grad for each in held["_parameters"].values() if each is not None)
        return [type(part), owner.root.training, part.training, *trained]
    if any(vars(buffer) for buffer in held["_buffers"].values() if buffer is not None):
        return None
    if held["_non_persistent_buffers_set"] or any(map(held.get, HOOKS)):
        return None
    found = [type(part), owner.root.training, part.training]
    library_names = _library_attributes(type(part))
    for name, value in held.items():
        if name not in library_names:
            if type(value) not in SCALAR_TYPES and not (
                type(value) is tuple and all(type(part) in SCALAR_TYPES for part in value)
            ):
                return None
            found += name, value
    for parameter in held["_parameters"].values():
        if parameter is not None:
            if vars(parameter) or any(getattr(parameter, name, None) for name in TENSOR_HOOKS):
                return None
            found.append(parameter.requires_grad)
    return found


def _require_present(value: Any, mark: Any, path: str) -> None:
    """Refuse a `state_dict` of an object that the target lacks: only an object can load it."""
    if kind_of(value) is not ValueKind.OBJECT or mark is _RESTORED:
        return
    if not isinstance(mark, tuple) or mark[0] is not type(value):
        raise UnsupportedLeafError(
            f"{path}: this {type_name(value)} was not there when the program gave the state to the "
            f"restore or first saved it, and only an object of its class can load its state. Make it "
            f"where its owner is made."
        )


def _form_of_whole(value: Any, known: StateIdentities, path: str) -> Any:
    """The form of a container or an object that training has made or given other parts; None for a
    container with values that have no form: its other values are stored one by one."""
    try:
        form = whole_form(value, known.name_of)
        described(form, path)
    except StateError as error:
        if isinstance(value, CONTAINERS):
            _require_classes(value, path)
            return None
        raise UnsupportedLeafError(
            f"{path}: this {type_name(value)} was not there when the program gave the state to the "
            f"restore or first saved it, and cannot be stored as a whole: {error} Make it where its "
            f"owner is made, or give it `state_dict` and `load_state_dict`."
        ) from error
    return form


def _require_form(value: Any, path: str) -> None:
    """Refuse a changed container without an exact form, unless it has values that no save stores: a
    resumed program would have the first container."""
    if isinstance(value, CONTAINERS) and not has_others(value):
        _require_classes(value, path)
        raise UnsupportedLeafError(
            f"{path}: the run has changed this {type_name(value)}, which has no exact form in a "
            f"checkpoint, so that a resumed program would have the first one. Keep plain values, "
            f"arrays and objects of the program in it."
        )


def _require_classes(container: Any, path: str) -> None:
    """Refuse named tuples of a class that no restore finds, because a function has made it."""
    for part in parts_inside(container):
        kind = type(part)
        if hasattr(kind, "_fields") and class_named(type_name(part)) is not kind:
            raise UnsupportedLeafError(
                f"{path}: has a {type_name(part)} that was not there when the program gave the state "
                f"to the restore or first saved it, and cannot be made again: no module has this class "
                f"under its name. Make the class at the top of a module, outside of all functions."
            )


def _form_by_names(value: Any, known: StateIdentities) -> Any:
    """The form of a dict with parameters or modules of the state as keys; None for anything else."""
    if isinstance(value, dict) and any(known.name_of(key) for key in value):
        with suppress(StateError):
            return whole_form(value, known.name_of)
    return None


def _owners(walk: Walk) -> tuple[list[Owner], StateIdentities | None]:
    """The owners in `_registered` and the modules in their attributes and containers, and the
    identities of the state with these modules; None without any owner."""
    owners = [*_registered(walk)]
    known = StateIdentities(walk) if owners else None
    seen = {id(owner.value) for owner in owners}
    for owner in owners:  # the loop extends `owners`
        assert known is not None
        for key in _inner_module_keys(owner, known) if _loader_of(owner.root) is None else ():
            module = _get(owner, known.resolve(key))
            if kind_of(module) is not ValueKind.OBJECT or known.has(module):
                continue
            known.add(module)
            path = path_of(owner.path, key)
            for name, part in module.named_modules():
                if id(part) not in seen:
                    seen.add(id(part))
                    is_whole = is_owner(type(part))
                    owners.append(Owner(join_dotted(path, name), part, owner.root, is_whole))
    return owners, known


def _inner_module_keys(owner: Owner, known: StateIdentities) -> list[Key]:
    """The keys of the modules in the attributes of an owner that it has not registered. The run cannot
    add any: `_require_present` refuses them."""
    fresh = fresh_marks().get(owner.value, {})
    if owner.is_whole and (_INNER_MODULES,) not in fresh:
        values = _values(owner, known) if _scalars(owner, known) is None else ()
        module = sys.modules["torch"].nn.Module
        fresh[_INNER_MODULES,] = [key for key, value in values if isinstance(value, module)]
    return fresh.get((_INNER_MODULES,), [])


def _registered(walk: Walk) -> Iterator[Owner]:
    """The owners in a state: modules, the modules inside them, and optimizers, with their attributes;
    schedulers, with the variables that their lambdas close over; samplers of loaders; and modules of
    other libraries, with their mode and which of their parameters are trained."""
    if (torch := sys.modules.get("torch")) is None:
        return
    from perdure.state.torch_module import parts_by_name

    seen: set[int] = set()
    for path, node in walk.objects.items():
        value = node.target
        if isinstance(value, torch.nn.Module):
            # A member without any state, such as a metric of torchmetrics, is its attributes.
            named = parts_by_name(value)
            inner = dict(named)  # a wrapper has the name of what it wraps
            parts = [
                (join_dotted(path, name), part, is_whole)
                for name, part in named
                if (is_whole := is_owner(type(part)) or (part is value and not _has_tensors(part)))
                or inner[name] is part
            ]
        elif isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
            parts = [(path, value, True)]
        elif (loader := _loader_of(value)) is not None:
            samplers = loader.samplers_of(value).items()
            parts = [(join_dotted(path, name), part, True) for name, part in samplers]
        else:
            continue
        for part_path, part, is_whole in parts:
            if id(part) not in seen:
                seen.add(id(part))
                yield Owner(part_path, part, value, is_whole)


def _loader_of(root: Any) -> Any:
    """The module of `ResumableLoader` if `root` is one, whose samplers are owners; else None."""
    module: Any = sys.modules.get("perdure.state.torch_loader")
    return module if module and isinstance(root, module.ResumableLoader) else None


def _has_tensors(module: Any) -> bool:
    return any(part._parameters or part._buffers for part in module.modules())


def _values(owner: Owner, known: StateIdentities) -> Iterator[tuple[Key, Any]]:
    """The values of an owner that no member of the state has, each with the key that leads to it."""
    torch = sys.modules["torch"]
    part, is_module = owner.value, isinstance(owner.value, torch.nn.Module)
    if (loader := _loader_of(owner.root)) is not None:
        for name, value in loader.sampler_values(owner.root, part) if not known.has(part) else ():
            yield from _inside((name,), value, known, owner)
        return
    if not isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
        parts = enumerate(getattr(part, _SCHEDULES, ()))
        for key, each in [((), part), *(((_SCHEDULES, number), each) for number, each in parts)]:
            for number, function in enumerate(getattr(each, _LAMBDAS, ())):
                yield from _closure_values((*key, _LAMBDAS, number), function, known, owner)
        return
    if is_module:
        if part is not owner.root:
            yield (_MODE,), (owner.root.training, part.training)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield (name, _TRAINED), parameter.requires_grad
                if not owner.is_whole:
                    continue
                for attribute, value in vars(parameter).items():
                    yield from _inside((name, attribute), value, known, owner)
                yield from _hook_values((name,), parameter, TENSOR_HOOKS, known, owner)
                if not known.has(parameter):
                    yield (name,), parameter
        if not owner.is_whole:
            return
        # PyTorch leaves out buffers that are not persistent; a program may leave out any tensor.
        yield (_NOT_PERSISTENT,), part._non_persistent_buffers_set
        for name, buffer in part._buffers.items():
            if not known.has(buffer):
                yield from _inside((name,), buffer, known, owner)
            for attribute, value in {} if buffer is None else vars(buffer).items():
                yield from _inside((name, attribute), value, known, owner)
    else:
        if known.has_stepped:
            yield from (pair for pair in parameters_by_key(part) if not known.has(pair[1]))
    yield from _hook_values((), part, HOOKS, known, owner)
    if not is_module and not is_owner(type(part)):
        return
    skipped = _library_attributes(type(part)) if is_module else _OPTIMIZER_STATE
    if not is_module and known.leaves_out_state(part):
        skipped -= {"state"}
    for name, value in list(vars(part).items()):
        if name in skipped or name.startswith("_optimizer_"):
            continue
        if is_module and any(name + end in part._parameters for end in _COMPUTED):
            hooks = part._forward_pre_hooks.values()
            if not any(getattr(hook, "_tensor_name", None) == name for hook in hooks):
                continue
            # The next pruning ranks what the last forward pass has computed.
            value = value.detach() if value is not None else None
        yield from _inside((name,), value, known, owner)


def _hook_values(
    key: Key, value: Any, names: Iterable[str], known: StateIdentities, owner: Owner
) -> Iterator[tuple[Key, Any]]:
    """The hooks of a module, an optimizer or a parameter; of a function, its closure variables."""
    for name in names:
        for number, hook in enumerate((getattr(value, name, None) or {}).values()):
            at = (*key, name, number)
            if isinstance(hook, FunctionType) and is_program_module(hook.__module__):
                yield (*at, _SHAPE), hook.__qualname__
                yield from _closure_values(at, hook, known, owner)
            elif not is_value_of_library(hook):  # code, such as that of a pruning
                yield from _inside(at, hook, known, owner)


def _closure_values(key: Key, function: Any, known: StateIdentities, owner: Owner) -> Iterator[Any]:
    """The variables that a function of the program closes over."""
    if isinstance(function, FunctionType) and is_program_module(function.__module__):
        for cell in function.__code__.co_freevars:
            yield from _inside((*key, cell), _child(function, cell), known, owner)


def _inside(
    key: Key, value: Any, known: StateIdentities, owner: Owner, seen: frozenset[int] = frozenset()
) -> Iterator[tuple[Key, Any]]:
    """A value that is stored as a whole, or the stored values inside it."""
    its_type = type(value)
    is_method = its_type is MethodType and known.name_of(value.__self__) is not None
    kind = ValueKind.MIXED if is_method else kind_of(value)
    if kind is ValueKind.OTHER and is_position(value):
        raise UnsupportedLeafError(
            f"{path_of(owner.path, key)}: a {type_name(value)} has a place that no checkpoint has. "
            f"Keep a list and the number of its next element, or a generator of random numbers; "
            f"delete the attribute if it is used up."
        )
    if kind is ValueKind.OTHER and its_type is FunctionType and len(key) <= _DEEPEST:
        yield from _closure_values(key, value, known, owner)
        return
    if kind is ValueKind.ARRAY and known.is_view(value):
        shown = value.storage_offset(), value.shape, value.stride()
        yield (*key, _VIEW), (memory_of(value), *shown)
        return
    if kind is ValueKind.OTHER or (kind is not ValueKind.PLAIN and known.has(value)):
        return
    if hasattr(its_type, "_local_tensor"):
        yield (*key, _LOCAL), value._local_tensor
        return
    if kind is not ValueKind.MIXED:
        yield key, value
        return
    if id(value) in seen or value is owner.value or len(key) > _DEEPEST:
        return
    if is_container_of_program(value) or isinstance(value, np.ndarray) or is_method:
        yield from _whole(key, value, known)
        return
    seen = seen | {id(value)}
    parts = list(items_of(value, known.name_of))
    if is_library_value := is_value_of_library(value):
        parts = [(name, part) for name, part in parts if not is_computed(value, str(name))]
    has_keys = isinstance(value, dict) and all(kind_of(each) is ValueKind.PLAIN for each in value)
    if has_keys and len(parts) < len(value):  # keys without a name in a path, such as tuples
        parts = list(enumerate(value.values()))
    inside = [
        pair for name, child in parts for pair in _inside((*key, name), child, known, owner, seen)
    ]
    # A container whose elements are all stored, each as a whole, is stored as a whole, so that it may
    # grow.
    is_whole = has_keys or (isinstance(value, CONTAINERS) and not isinstance(value, dict))
    is_whole = is_whole and len(parts) == len(value)
    is_whole = is_whole and [name for name, _ in inside] == [(*key, name) for name, _ in parts]
    if is_library_value:
        yield (*key, _SHAPE), _shape_of(value, known)
        yield from inside
        yield (*key, _NAMES), [name for name, _ in parts]
    elif is_whole and all(kind_of(each) in _WHOLE for _, each in inside):
        yield key, value
    elif not has_keys or all(type(each) in (str, int) for each in value):
        yield (*key, _SHAPE), _shape_of(value, known)
        yield from inside
    else:
        yield from _whole(key, value, known)


def _whole(key: Key, value: Any, known: StateIdentities) -> Iterator[tuple[Key, Any]]:
    """A container that has a form, and is stored again whenever a part of it has changed."""
    with suppress(StateError):
        yield (*key, _SHAPE), whole_form(value, known.name_of)


def _shape_of(value: Any, known: StateIdentities) -> tuple[Any, ...]:
    """Class, length or keys, and the names of the modules and parameters of the state in a list."""
    if isinstance(value, dict):
        return type_name(value), *map(str, value)
    if not isinstance(value, CONTAINERS):
        return type_name(value), None
    is_list = isinstance(value, (list, tuple, deque)) and len(value) <= _LONGEST
    names = map(known.name_of, value) if is_list else ()
    return type_name(value), len(value), *(name for name in names if name is not None)


_LONGEST = 10_000
_DEEPEST = 6
_WHOLE = (ValueKind.PLAIN, ValueKind.ARRAY, ValueKind.MIXED)


def _is_beside_others(owner: Owner, key: Key, others: dict[int, bool]) -> bool:
    """Whether a value lies in a list or a tuple with activations or other values that are not stored:
    the list of a new process is shorter."""
    for length in range(1, len(key)):
        above = _get(owner, key[:length])
        if isinstance(above, (list, tuple, deque)):
            if id(above) not in others:
                others[id(above)] = has_others(above)
            if others[id(above)]:
                return True
    return False


@cache
def _library_attributes(kind: type) -> frozenset[str]:
    """The attributes that `nn.Module` gives a module, or `LightningModule`, which keeps the hook that
    runs now and addresses of metrics in its own."""
    modules = "lightning.pytorch.core.module", "pytorch_lightning.core.module"
    base = next((base for base in kind.__mro__ if base.__module__ in modules), None)
    return frozenset(vars(sys.modules["torch"].nn.Module() if base is None else base()))


def _add(leaves: Leaves, value: Any, path: str, form: Any, arrays: _Arrays) -> bool:
    """Add the leaves of a value (of its `form`, if given) to `leaves` and its arrays to `arrays`; False
    if the value has no exact form."""
    flattener = ObjectFlattener(found := Leaves(), loaded_adapters())
    try:
        form = stored_form(value) if form is None else form
        flattener.add(Stateful(form), path, form)
    except StateError:
        return False
    if flattener.live_paths or any(leaf.shards is not None for leaf in found.values()):
        return False
    leaves.update(found)
    leaves.containers.update(found.containers)
    for inside, part in flattener.inside:
        if inside in found:
            arrays.setdefault(id(part), (part, []))[1].append(inside)
    return True


def _shared_only_in_target(
    owners: Iterable[Owner], known: StateIdentities, top: str, groups: list[list[str]]
) -> set[int]:
    """The arrays, by `id`, that are shared by several paths of the target and not by the same paths of
    the checkpoint: to restore such an array in place would change the other paths."""
    arrays, containers = _Arrays(), set[int]()
    for owner in owners:
        for key, value in _values(owner, known):
            if kind_of(value) is ValueKind.PLAIN or id(value) in containers:
                continue
            if isinstance(value, CONTAINERS):
                containers.add(id(value))  # it may be at two paths itself
            names = key[:-1] if key[-1] == _SHAPE else key
            _add(Leaves(), value, path_of(join_part(top, owner.path), names), None, arrays)
    together = [*map(set, groups)]
    return {
        number
        for number, (_, paths) in arrays.items()
        if len(shared := set(paths)) > 1 and not any(shared <= group for group in together)
    }


class _WithSharedArrays(ObjectStates):
    """Builds an array that is at several paths only once. `groups` are the paths of each such array."""

    def __init__(
        self, leaves: Leaves, groups: list[list[str]], member: Callable[[str], Any]
    ) -> None:
        super().__init__(leaves, member=member)
        self.numbers = {path: number for number, paths in enumerate(groups) for path in paths}
        self._built: dict[int, Any] = {}
        self.ids = set[int]()
        """The `id` of each array that must not be restored in place: shared arrays that are built
        already, and arrays of the target that another array replaces."""

    def shared(self, path: str, build: Callable[[], Any]) -> Any:
        number = self.numbers.get(path)
        if number is None:
            return build()
        if number not in self._built:
            self.note(path, build())
        return self._built[number]

    def note(self, path: str, value: Any) -> None:
        """The array at `path` is `value`, perhaps that of the target."""
        if (number := self.numbers.get(path)) is not None:
            self._built[number] = value
            self.ids.add(id(value))


def _get(owner: Owner, key: Key) -> Any:
    """The present value at a key of an owner; None without one."""
    value = owner.value
    for name in key:
        try:
            value = _child(value, name)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None
    return value


def _child(value: Any, name: str | int) -> Any:
    if name in ALL_HOOKS and isinstance(hooks := getattr(value, str(name), None), dict):
        return [*hooks.values()]
    if isinstance(value, FunctionType):  # what it keeps between calls
        with suppress(ValueError):  # of a cell without contents
            return _cell_of(value, name).cell_contents
        return None
    if isinstance(value, (dict, list, tuple, deque)) and not hasattr(type(value), "_fields"):
        return value[name]  # type: ignore[index]
    if name == _LOCAL and hasattr(type(value), "_local_tensor"):
        return value._local_tensor  # type: ignore[union-attr]
    return getattr(value, str(name))


def _cell_of(function: FunctionType, name: str | int) -> Any:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(str(name))]


def _set(owner: Owner, key: Key, value: Any, shared: AbstractSet[int]) -> Any:
    """Set the value at a key of an owner, in place if possible; returns the value that is there then.
    An object whose `id` is in `shared` is not changed."""
    *above, last = key
    if last == _MODE and not above:
        root, is_training = value
        if owner.root.training == root:  # else one of the two is in an evaluation
            owner.value.training = is_training
        return value
    if last == _TRAINED and len(above) == 1:
        parameter = owner.value._parameters.get(above[0])
        if parameter is not None and parameter.is_leaf:
            parameter.requires_grad_(value)
        return value
    parent = _get(owner, tuple(above))
    if parent is None:
        raise KeyError(".".join(map(str, above)))
    if last == _NAMES:
        for name in attributes_of(parent).keys() - set(value):
            object.__delattr__(parent, name)
        return value
    try:
        present = _child(parent, last)
    except (KeyError, IndexError, AttributeError):
        present = None
    result = put_value(present, value, shared)
    if result is present:
        return result
    if last == _LOCAL:
        raise ValueError("a shard of another shape or dtype, or no sharded tensor, is there")
    if isinstance(parent, (dict, list, deque)):
        parent[last] = result  # type: ignore[index]
    elif last in getattr(parent, "_buffers", ()) or last in getattr(parent, _NOT_PERSISTENT, ()):
        parent._buffers[last] = result
    elif isinstance(parent, FunctionType):
        _cell_of(parent, last).cell_contents = result
    elif isinstance(parent, partial):
        parts = {name: getattr(parent, name) for name in ("func", "args", "keywords")}
        parent.__setstate__((*(parts | {last: result}).values(), vars(parent)))  # type: ignore[attr-defined]
    else:
        object.__setattr__(parent, str(last), result)
    return result
