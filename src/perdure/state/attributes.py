"""What modules and optimizers of PyTorch hold outside of their `state_dict`, saved with their
owner.

Invariant: a value is stored exactly if it is not the fresh one, which the first look at its owner
has seen (or if a restore has put it there). So what a run never changes costs nothing and stays
code, and what is stored does not depend on when saves happen.
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
    CONTAINERS,
    Kind,
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
    Known,
    Owner,
    by_identity,
    code_of,
    fresh_marks,
    memory_of,
    path_of,
    refuse_addresses,
    require_same_code,
    require_same_names,
    require_same_parameters,
    require_same_slots,
    stepped,
    structure_of,
)
from perdure.state.value_forms import (
    SCALARS,
    attributes_of,
    class_named,
    refuse_pending,
    whole_form,
)
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import Container

_OF_OPTIMIZERS = frozenset(["state", "param_groups", "defaults", "_opt_called", "_step_count"])
"""What an optimizer saves, and what a learning rate scheduler sets in it."""
_MODE, _TRAINED = "training", "requires_grad"
_NOT_PERSISTENT = "_non_persistent_buffers_set"
"""The names of the buffers of a module that its `state_dict` leaves out."""
_SHAPE = "!shape"
"""The key of what has to be equal so that the parts of a container or an object are stored one by
one: class, length, keys. Else the whole is stored."""
_NAMES = "!names"
"""The key of the names of the attributes of an object of a library, which restores in place."""
_VIEW = "!view"
"""The key of which elements of a tensor of the state an attribute shows."""
_LOCAL = "local"
"""The key of what this process has of a sharded tensor."""
_SCALARS = "!scalars"
_HELD = "!held"
_LAMBDAS, _SCHEDULES = "lr_lambdas", "_schedulers"
_COMPUTED = ("_orig", "_v")
"""The ends of the names of parameters from which a parametrization computes an attribute."""


class _Stored(msgspec.Struct, frozen=True):
    """What `process/<n>/attributes_index` says of the leaves of `process/<n>/attributes`."""

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
"""In place of the mark of a value that a restore has put: it equals no mark, so that every later save
stores the value again."""


class Attributes(ExtraMember):
    """See `perdure.state.extra_members.ExtraMember`."""

    def __init__(self) -> None:
        self._static: dict[Key, Any] | None = None
        self._at: dict[str, MutableMapping[Key, Any]] = {}
        """The fresh marks of the owner that a path had at first."""
        self._owners: dict[str, int] = {}
        """The `id` of that owner, as long as no run has put another one there."""

    @cached_property
    def _marks(self) -> Any:
        """The fresh marks by owner, of this manager: see `_fresh_of`."""
        return by_identity()

    def see(self, walk: Walk) -> None:
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

    def take(self, saving: Saving) -> dict[str, Leaf]:
        if self._static is None:
            self.see(saving.walk)
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
            before, now = fresh.get((_SCALARS,)), _scalars(owner, known)
            if before and now and len(before) == len(now) and all(map(operator.is_, now, before)):
                continue  # nearly every one, in every save
            if owner.is_whole:
                require_same_code(owner, fresh)
                require_same_parameters(owner, fresh, known)
            values, others = deque(_values(owner, known)), dict[int, bool]()
            whole: set[Key] = set()
            count = len(keys)
            names = {str(key[0]) for key in fresh if str(key[0]).isidentifier()}.difference(HOOKS)
            deleted += [(owner.path, name) for name in names if not hasattr(owner.value, name)]
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
                    value = _get(owner, known.real(key))
                    if (*key, _SHAPE) not in fresh and is_value_of_library(value):
                        whole.add(key)  # of this step; nothing may make an object of any class
                        continue
                    if (form := _form_of_whole(value, known, path_of(owner.path, key))) is None:
                        continue
                elif key not in fresh and _is_beside_others(owner, known.real(key), others):
                    continue
                if key[-1] == _LOCAL and key not in fresh:
                    raise UnsupportedLeafError(
                        f"{path_of(owner.path, key[:-1])}: a sharded tensor that the run has put "
                        f"there, which a resumed program could not make. Make it where its owner "
                        f"is made."
                    )
                path = path_of(join_part(top, owner.path), key)
                is_plain = kind_of(value) is Kind.PLAIN
                refuse_addresses(value, path_of(owner.path, key), known)
                if not is_plain:
                    _require_present(value, fresh.get(key), path_of(owner.path, key))
                    with PathInErrors(path_of(owner.path, key)):
                        for part in parts_inside(value):
                            if kind_of(part) is Kind.ARRAY and hasattr(part, "grad_fn"):
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
            if len(keys) > count and (loader := _loader_of(owner)) is not None:
                loader.require_sampler_as_begun(owner.root, owner.path)
        # Where a stored array is too, or its places would not be one after the restore.
        for owner, key, value in unchanged if arrays else ():
            path = path_of(join_part(top, owner.path), key)
            if key[-1] == _SHAPE or kind_of(value) is Kind.PLAIN:
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

    def _fresh_of(self, owner: Owner, known: Known) -> MutableMapping[Key, Any]:
        """The fresh marks of an owner: those of the one in whose place the run has put it, or those of
        now if there was none. Values that the first manager of the program has seen count as fresh
        for a later one, too; code (the structure, hooks, objects) is as the later one first sees it.
        """
        if (fresh := self._marks.get(owner.value)) is not None:
            return fresh
        if (first := fresh_marks().get(owner.value)) is not None:
            fresh = ChainMap(_code_since(owner, first, known), first)
            first.pop((_HELD,), None)
        elif owner.path in self._at:
            fresh = dict(self._at[owner.path])
        else:
            fresh = {key: mark_of(value) for key, value in _values(owner, known)}
            fresh[_SCALARS,] = _scalars(owner, known)
            if owner.is_whole:
                fresh |= structure_of(owner.value, known)
        fresh_marks().setdefault(owner.value, fresh)
        self._marks[owner.value] = fresh
        return fresh

    def put(self, restoring: Restoring, walk: Walk) -> list[str]:
        if (stored := restoring.stored("attributes_index", _decoder)) is None:
            return []
        top = restoring.path("attributes_index").removesuffix("_index")
        found, known = _owners(walk)
        owners, known = {owner.path: owner for owner in found}, known or Known(walk)
        states = _WithSharedArrays(
            Leaves(restoring.leaves, stored.containers),
            stored.arrays,
            lambda name: known.real((name,))[0],
        )
        states.ids |= _apart(owners.values(), known, top, stored.arrays)
        static = {path: value for path, value, _ in static_owners(walk)}
        put: dict[str, Any] = {}
        for path, name in stored.deleted:
            if (owner := owners.get(restoring.renamed(path))) is not None:
                vars(owner.value).pop(name, None)
        # The names of buffers first: a value with such a name becomes a buffer. Names of attributes
        # last: an attribute may be computed from one that has gone. A value comes before the
        # other places that have it. An array comes before the containers that have it too, because it
        # is restored in place.
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
                place = known.real(tuple(key))
                if path in stored.same:
                    if stored.same[path] in put:
                        same = put[stored.same[path]]
                        _set(owner, place, same, {id(same)})
                else:
                    if known.has(present := _get(owner, place)):
                        states.ids.add(id(present))  # the run has put another one there
                    value = states.value(path, present)
                    put[path] = _set(owner, place, value, states.ids)
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
                fresh[_SCALARS,] = None
        return []


def _code_since(owner: Owner, first: MutableMapping[Key, Any], known: Known) -> dict[Key, Any]:
    """The marks of an owner that are not those of the `first` manager that has seen it: the program
    may change code between two managers, such as a layer after a first phase of training."""
    marks = structure_of(owner.value, known) if owner.is_whole else {}
    for key, value in _values(owner, known):
        is_made = key[-1] == _LOCAL or kind_of(value) is Kind.OBJECT
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


def _scalars(owner: Owner, known: Known) -> list[Any] | None:
    """Everything that a module has beside its tensors and modules; None for one that has more than
    scalars."""
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
    of_library = _of_library(type(part))
    for name, value in held.items():
        if name not in of_library:
            if type(value) not in SCALARS and not (
                type(value) is tuple and all(type(part) in SCALARS for part in value)
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
    """Refuse an object with `state_dict` that the target has not had: only an object can load it."""
    if kind_of(value) is not Kind.OBJECT or mark is _RESTORED:
        return
    if not isinstance(mark, tuple) or mark[0] is not type(value):
        raise UnsupportedLeafError(
            f"{path}: this {type_name(value)} was not there when the program gave the state to the "
            f"restore or first saved it, and only an object of its class can load its state. Make it "
            f"where its owner is made."
        )


def _form_of_whole(value: Any, known: Known, path: str) -> Any:
    """The form of a container or an object that training has made or given other parts; None for a
    container with values that have no form, of which the others are stored one by one."""
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
    """Refuse a container without an exact form, unless it has what no save stores: a resumed program
    would have the first one."""
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


def _form_by_names(value: Any, known: Known) -> Any:
    """The form of a dict with parameters or modules of the state as keys; None for anything else."""
    if isinstance(value, dict) and any(known.name_of(key) for key in value):
        with suppress(StateError):
            return whole_form(value, known.name_of)
    return None


def _owners(walk: Walk) -> tuple[list[Owner], Known | None]:
    """Those of `_registered`, and the modules that they have in attributes and containers, with what
    the state then has; None without any."""
    owners = [*_registered(walk)]
    known = Known(walk) if owners else None
    seen = {id(owner.value) for owner in owners}
    for owner in owners:  # which grow
        assert known is not None
        for key in _held(owner, known) if _loader_of(owner) is None else ():
            module = _get(owner, known.real(key))
            if kind_of(module) is not Kind.OBJECT or known.has(module):
                continue
            known.add(module)
            path = path_of(owner.path, key)
            for name, part in module.named_modules():
                if id(part) not in seen:
                    seen.add(id(part))
                    is_whole = is_owner(type(part))
                    owners.append(Owner(join_dotted(path, name), part, owner.root, is_whole))
    return owners, known


def _held(owner: Owner, known: Known) -> list[Key]:
    """The keys of the modules that an owner has beside its registered ones. There are none that it has
    not had at first: `_require_present`."""
    fresh = fresh_marks().get(owner.value, {})
    if owner.is_whole and (_HELD,) not in fresh:
        values = _values(owner, known) if _scalars(owner, known) is None else ()
        module = sys.modules["torch"].nn.Module
        fresh[_HELD,] = [key for key, value in values if isinstance(value, module)]
    return fresh.get((_HELD,), [])


def _registered(walk: Walk) -> Iterator[Owner]:
    """The modules and optimizers in a state, and the modules inside, whose attributes are saved, and
    schedulers, of which what their lambdas close over is, and the samplers of loaders. Of a module of
    another library its mode and which of its parameters are trained."""
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
        elif (loader := _loader_of(Owner(path, value, value))) is not None:
            samplers = loader.samplers_of(value).items()
            parts = [(join_dotted(path, name), part, True) for name, part in samplers]
        else:
            continue
        for place, part, is_whole in parts:
            if id(part) not in seen:
                seen.add(id(part))
                yield Owner(place, part, value, is_whole)


def _loader_of(owner: Owner) -> Any:
    """The module of `ResumableLoader` if the owner is a sampler of one; else None."""
    module: Any = sys.modules.get("perdure.state.torch_loader")
    return module if module and isinstance(owner.root, module.ResumableLoader) else None


def _has_tensors(module: Any) -> bool:
    return any(part._parameters or part._buffers for part in module.modules())


def _values(owner: Owner, known: Known) -> Iterator[tuple[Key, Any]]:
    """The values that an owner holds and no member of the state has, with the names that lead there."""
    torch = sys.modules["torch"]
    part, is_module = owner.value, isinstance(owner.value, torch.nn.Module)
    if (loader := _loader_of(owner)) is not None:
        for name, value in loader.sampler_values(owner.root, part) if not known.has(part) else ():
            yield from _inside((name,), value, known, owner)
        return
    if not isinstance(part, (torch.nn.Module, torch.optim.Optimizer)):
        parts = enumerate(getattr(part, _SCHEDULES, ()))
        for key, each in [((), part), *(((_SCHEDULES, place), each) for place, each in parts)]:
            for place, function in enumerate(getattr(each, _LAMBDAS, ())):
                yield from _of_function((*key, _LAMBDAS, place), function, known, owner)
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
                yield from _of_hooks((name,), parameter, TENSOR_HOOKS, known, owner)
                if not known.has(parameter):
                    yield (name,), parameter
        if not owner.is_whole:
            return
        # Left out by PyTorch are buffers that are not persistent, by a program what it likes.
        yield (_NOT_PERSISTENT,), part._non_persistent_buffers_set
        for name, buffer in part._buffers.items():
            if not known.has(buffer):
                yield from _inside((name,), buffer, known, owner)
            for attribute, value in {} if buffer is None else vars(buffer).items():
                yield from _inside((name, attribute), value, known, owner)
    else:
        if known.has_stepped:
            yield from ((key, value) for key, value in stepped(part) if not known.has(value))
    yield from _of_hooks((), part, HOOKS, known, owner)
    if not is_module and not is_owner(type(part)):
        return
    skipped = _of_library(type(part)) if is_module else _OF_OPTIMIZERS
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


def _of_hooks(
    key: Key, value: Any, names: Iterable[str], known: Known, owner: Owner
) -> Iterator[tuple[Key, Any]]:
    """What the hooks of a module, an optimizer or a parameter close over, or what they are."""
    for name in names:
        for place, hook in enumerate((getattr(value, name, None) or {}).values()):
            at = (*key, name, place)
            if isinstance(hook, FunctionType) and is_program_module(hook.__module__):
                yield (*at, _SHAPE), hook.__qualname__
                yield from _of_function(at, hook, known, owner)
            elif not is_value_of_library(hook):  # code, such as that of a pruning
                yield from _inside(at, hook, known, owner)


def _of_function(key: Key, function: Any, known: Known, owner: Owner) -> Iterator[Any]:
    """What a function of the program closes over."""
    if isinstance(function, FunctionType) and is_program_module(function.__module__):
        for cell in function.__code__.co_freevars:
            yield from _inside((*key, cell), _child(function, cell), known, owner)


def _inside(
    key: Key, value: Any, known: Known, owner: Owner, seen: frozenset[int] = frozenset()
) -> Iterator[tuple[Key, Any]]:
    """A value that is stored as a whole, or what is stored of those inside it."""
    its_type = type(value)
    is_method = its_type is MethodType and known.name_of(value.__self__) is not None
    kind = Kind.MIXED if is_method else kind_of(value)
    if kind is Kind.OTHER and is_position(value):
        raise UnsupportedLeafError(
            f"{path_of(owner.path, key)}: a {type_name(value)} has a place that no checkpoint has. "
            f"Keep a list and the number of its next element, or a generator of random numbers; "
            f"delete the attribute if it is used up."
        )
    if kind is Kind.OTHER and its_type is FunctionType and len(key) <= _DEEPEST:
        yield from _of_function(key, value, known, owner)
        return
    if kind is Kind.ARRAY and known.is_view(value):
        shown = value.storage_offset(), value.shape, value.stride()
        yield (*key, _VIEW), (memory_of(value), *shown)
        return
    if kind is Kind.OTHER or (kind is not Kind.PLAIN and known.has(value)):
        return
    if hasattr(its_type, "_local_tensor"):
        yield (*key, _LOCAL), value._local_tensor
        return
    if kind is not Kind.MIXED:
        yield key, value
        return
    if id(value) in seen or value is owner.value or len(key) > _DEEPEST:
        return
    if is_container_of_program(value) or isinstance(value, np.ndarray) or is_method:
        yield from _whole(key, value, known)
        return
    seen = seen | {id(value)}
    parts = list(items_of(value, known.name_of))
    if of_library := is_value_of_library(value):
        parts = [(name, part) for name, part in parts if not is_computed(value, str(name))]
    has_keys = isinstance(value, dict) and all(kind_of(each) is Kind.PLAIN for each in value)
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
    if of_library:
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


def _whole(key: Key, value: Any, known: Known) -> Iterator[tuple[Key, Any]]:
    """A container that is stored whenever a part of it has changed, if it has a form."""
    with suppress(StateError):
        yield (*key, _SHAPE), whole_form(value, known.name_of)


def _shape_of(value: Any, known: Known) -> tuple[Any, ...]:
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
_WHOLE = (Kind.PLAIN, Kind.ARRAY, Kind.MIXED)


def _is_beside_others(owner: Owner, key: Key, others: dict[int, bool]) -> bool:
    """Whether a value lies in a list or a tuple with activations or other values that are not stored,
    so that the list of a new process has no such place."""
    for length in range(1, len(key)):
        above = _get(owner, key[:length])
        if isinstance(above, (list, tuple, deque)):
            if id(above) not in others:
                others[id(above)] = has_others(above)
            if others[id(above)]:
                return True
    return False


@cache
def _of_library(kind: type) -> frozenset[str]:
    """The attributes that `nn.Module` gives a module, and a `LightningModule`, which has the hook that
    runs and addresses of metrics there."""
    modules = "lightning.pytorch.core.module", "pytorch_lightning.core.module"
    base = next((base for base in kind.__mro__ if base.__module__ in modules), None)
    return frozenset(vars(sys.modules["torch"].nn.Module() if base is None else base()))


def _add(leaves: Leaves, value: Any, path: str, form: Any, arrays: _Arrays) -> bool:
    """Add the leaves of a value (of its `form`, if there is one), and its arrays to `arrays`; False if
    it has no exact form."""
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
    for place, part in flattener.inside:
        if place in found:
            arrays.setdefault(id(part), (part, []))[1].append(place)
    return True


def _apart(owners: Iterable[Owner], known: Known, top: str, groups: list[list[str]]) -> set[int]:
    """The arrays of a target, by `id`, that it has in several places, unless they are in all of these
    in the checkpoint: to restore one in place would change the other places."""
    arrays, containers = _Arrays(), set[int]()
    for owner in owners:
        for key, value in _values(owner, known):
            if kind_of(value) is Kind.PLAIN or id(value) in containers:
                continue
            if isinstance(value, CONTAINERS):
                containers.add(id(value))  # in two places itself
            names = key[:-1] if key[-1] == _SHAPE else key
            _add(Leaves(), value, path_of(join_part(top, owner.path), names), None, arrays)
    together = [*map(set, groups)]
    return {
        number
        for number, (_, paths) in arrays.items()
        if len(places := set(paths)) > 1 and not any(places <= group for group in together)
    }


class _WithSharedArrays(ObjectStates):
    """Builds an array that is in several places once. `groups` are its paths."""

    def __init__(
        self, leaves: Leaves, groups: list[list[str]], member: Callable[[str], Any]
    ) -> None:
        super().__init__(leaves, member=member)
        self.numbers = {path: number for number, paths in enumerate(groups) for path in paths}
        self._built: dict[int, Any] = {}
        self.ids = set[int]()
        """The `id` of each array that is not restored in place: one of these that is built already, and
        those of the target in whose place another one comes."""

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
    """The present value that a key leads to; None without one."""
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
    """Give a value to the place that a key leads to, in place if possible; returns what is there. What
    is `shared`, by `id`, stays the object that it is."""
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
