"""What a `fit` holds outside of variables: attributes of its callbacks, of its model and of what that
was compiled with, that changed since training began.

A callback with `state_dict` defines its own. Of others every value that has an exact form and has
changed is saved; a warning names values without a form. They are packed into one text and arrays,
because they grow and have no template. What layers, optimizers, schedules, losses and metrics hold
counts where the step reads it (PyTorch, `run_eagerly`). A compiled step has read it once: a later
change is only warned about. Variables that a step changes are saved in both cases.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import keras
import numpy as np
from keras.callbacks import (
    EarlyStopping,
    LearningRateScheduler,
    ProgbarLogger,
    ReduceLROnPlateau,
    SwapEMAWeights,
)

from perdure.errors import StateError, TrainError, UnsupportedLeafError
from perdure.keras.fit_internals import (
    CALLBACK_ATTRIBUTES,
    compiled_with,
    has_direction,
    layers_of,
    set_direction,
)
from perdure.state import bits
from perdure.state.attribute_values import ValueKind, kind_of, put_value, untracked
from perdure.state.containers import (
    PLAIN_MAPPINGS,
    build_container,
    describe_container,
    record_class,
)
from perdure.state.keras_state import attributes_of
from perdure.state.leaf_spec import type_name
from perdure.state.leaf_values import CONTAINERS
from perdure.state.program_code import (
    changed_cells,
    is_program_module,
    is_user_class,
    names_in,
)
from perdure.state.value_forms import Form, made_value, mapping_like, whole_form
from perdure.store.manifest import OF_TARGET, Container
from perdure.text import few

# Keras's callbacks that change what is trained: their settings belong to the recipe.
_IN_RECIPE = (EarlyStopping, LearningRateScheduler, ReduceLROnPlateau, SwapEMAWeights)

_TAG = "perdure"
_CONTAINERS_AND_BYTES = (*CONTAINERS, bytearray)
_SETS = (set, frozenset)
_MEMBERS = (
    keras.Variable,
    keras.random.SeedGenerator,
    keras.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
)
_COMPILED = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)


class CallbackState:
    """The callbacks of a `fit` except `excluded`, its `model` and what that was compiled with. Made
    after `on_train_begin` of all callbacks."""

    def __init__(self, callbacks: list[Any], excluded: tuple[Any, ...], model: Any) -> None:
        self._named: dict[str, Any] = {}
        self._warned = False
        self._model = model
        self._owners = _owners(model)
        self._is_read = keras.backend.backend() == "torch" or bool(model.run_eagerly)
        self._traced: dict[str, Any] | None = None
        count: Counter[str] = Counter()
        for callback in callbacks:
            if not isinstance(callback, ProgbarLogger) and callback not in excluded:
                kind = type(callback).__name__
                count[kind] += 1
                name = kind if count[kind] == 1 else f"{kind}_{count[kind]}"
                self._named |= {name: callback, **_code_of(name, callback, of_step=False)}
        if self._is_read:
            self._named |= self._owners
        self._before = {
            name: {} if self._is_stateful(name) else _packed(owner)
            for name, owner in (self._named | self._owners).items()
        }
        self._containers_before = {
            name: _containers(callback) for name, callback in self._named.items()
        }

    def stepped(self) -> None:
        """The first step has been computed, and the attributes of the model read."""
        if self._traced is None and not self._is_read:
            self._traced = {name: _packed(owner) for name, owner in self._owners.items()}

    def _is_stateful(self, name: str) -> bool:
        owner = self._owners[name] if name in self._owners else self._named[name]
        is_owner = isinstance(owner, (type, keras.Layer, keras.optimizers.Optimizer))
        return not is_owner and is_stateful(owner)

    def members(self) -> dict[str, Any]:
        """The variables, models, optimizers and seeds that callbacks, losses and schedules hold."""
        model = self._model
        seen = {id(owner) for owner in self._owners.values() if isinstance(owner, _MEMBERS)}
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        variables = [*model.variables, *optimizer, *model.metrics_variables]
        seen |= set(map(id, variables))
        found: dict[str, Any] = {}
        for name, owner in (self._named | self._owners).items():
            is_part = is_user_class(type(owner)) and not isinstance(owner, keras.Layer)
            if is_part and not self._is_stateful(name):
                for attribute, value in _attributes(owner).items():
                    found |= _members_in(value, f"{name}.{attribute}", seen)
        return found

    def state(self) -> dict[str, Any]:
        """Plain values by callback; callbacks that have not changed are left out."""
        states = {}
        for name, callback in self._named.items():
            if self._is_stateful(name):
                own = copy_plain(callback.state_dict(), f"{name}.state_dict()")
                states[name] = {"own": own}
            elif changed := self._changed(name, callback):
                states[name] = {"changed": changed, "operator": has_direction(callback)}
        self._warn_of_lost()
        return states

    def reset(self) -> None:
        """Undo what has changed since training began: building a model calls its losses once more."""
        for name, owner in (self._named | self._owners).items():
            self._put_back(name, owner)

    def _put_back(self, name: str, owner: Any) -> None:
        for attribute, packed in self._before[name].items():
            value = untracked(_attributes(owner).get(attribute))
            if not is_plain(value) or not bits.same(pack(value), packed):
                _set(owner, attribute, put_value(value, unpack(packed)))

    def restore(self, states: dict[str, Any]) -> None:
        """Restore the callbacks, whatever they have done since training began."""
        for name, callback in self._named.items():
            state = states.get(name, {"operator": False, "changed": {}})
            if self._is_stateful(name):
                if "own" in state:
                    callback.load_state_dict(state["own"])
                continue
            if "own" in state:
                continue
            # Unchanged attributes are not stored, and may have changed when the epoch began again.
            self._put_back(name, callback)
            if state["operator"] and not has_direction(callback):
                set_direction(callback)
            for attribute, value in state["changed"].items():
                present = _attributes(callback).get(attribute)
                _set(callback, attribute, put_value(present, value))

    def describe(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, callback in self._named.items():
            if isinstance(callback, _IN_RECIPE):
                for setting, value in sorted(_attributes(callback).items()):
                    if setting == "min_delta":
                        value = abs(value)  # Keras changes its sign at the first epoch
                    if isinstance(value, (bool, int, float, str)):
                        fields[f"{name}.{setting.lstrip('_')}"] = value
        return fields

    def _warn_of_lost(self) -> None:
        lost = [
            f"{name}.{attribute} ({type(getattr(callback, attribute)).__name__})"
            for name, callback in self._named.items()
            for attribute, items in _containers(callback).items()
            if not _same_objects(items, self._containers_before[name].get(attribute))
        ]
        traced = [
            f"{name}.{attribute}"
            for name, before in (self._traced or {}).items()
            for attribute, packed in _packed(self._owners[name]).items()
            if not bits.same(packed, before.get(attribute))
        ]
        if traced and not self._warned:
            self._warned = True
            warnings.warn(
                f"BackupAndRestore: {few(traced)} changed after the step was compiled. This step does "
                f"not see the change, and the step that a resumed `fit` compiles may: its bits then "
                f"differ. Use a variable (`add_weight`), or `run_eagerly=True`.",
                stacklevel=6,
            )
        if lost and not self._warned:
            self._warned = True
            warnings.warn(
                f"BackupAndRestore: not in the backup, because they are no plain values: "
                f"{', '.join(lost)}. Give the callback `state_dict` and `load_state_dict`.",
                stacklevel=6,
            )

    def _changed(self, name: str, callback: Any) -> dict[str, Any]:
        before = self._before[name]
        return {
            attribute: unpack(packed)
            for attribute, packed in _packed(callback).items()
            if attribute not in before or not bits.same(packed, before[attribute])
        }


class _Variables:
    """The variables outside of functions that they use: closure variables, and variables of the
    program's modules. Lists and arrays are logs and data, and left out, unless a function `of_step`
    closes over them and may change them."""

    def __init__(self, functions: list[FunctionType], *, of_step: bool) -> None:
        self._cells: dict[str, CellType] = {}
        self._globals: dict[str, dict[str, Any]] = {}
        self._changed: set[str] = set()
        for number, function in enumerate(functions):
            if of_step:
                self._changed |= {f"{number}.{name}" for name in changed_cells(function)}
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=True):
                if name != "__class__":
                    self._cells[f"{number}.{name}"] = cell
            for name in names_in(function.__code__):
                if name in function.__globals__ and not name.startswith("__"):
                    self._globals[f"{function.__module__}.{name}"] = function.__globals__

    def values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, cell in self._cells.items():
            with suppress(ValueError):  # of a cell without contents
                found[name] = cell.cell_contents
        for name, variables in self._globals.items():
            found[name] = variables.get(name.rpartition(".")[2])
        return {n: v for n, v in found.items() if n in self._changed or _is_counted(v)}

    def set(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name][name.rpartition(".")[2]] = value


def _is_counted(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    has_arrays = isinstance(value, _CONTAINERS_AND_BYTES) and any(map(_is_array, parts))
    is_other = callable(value) or isinstance(value, (list, ModuleType, *_MEMBERS))
    return not (has_arrays or is_other or _is_array(value))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def _code_of(name: str, owner: Any, *, of_step: bool) -> dict[str, Any]:
    """The program's classes of a callback or a part of the model, whose attributes may count for all of
    its objects, and the variables that its functions use; `of_step`: the step calls them."""
    classes = {base.__qualname__: base for base in type(owner).__mro__ if is_user_class(base)}
    held = [
        owner,
        *getattr(owner, "__dict__", {}).values(),
        *(v for base in classes.values() for v in vars(base).values()),
    ]
    functions = [each for each in held if isinstance(each, FunctionType)]
    functions = [each for each in functions if is_program_module(each.__module__)]
    named: dict[str, Any] = {f"class {each}": base for each, base in classes.items()}
    if functions:
        named[f"variables of {name}"] = _Variables(functions, of_step=of_step)
    return named


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, _Variables):
        owner.set(name, value)
    else:
        setattr(owner, name, value)


def _owners(model: Any) -> dict[str, Any]:
    """The model, its layers, its optimizer, and the losses, metrics, schedules and functions of the
    program that it holds or was compiled with, by a name that does not depend on Keras's numbers; with
    the code of each."""
    layers = {f"layer {number}": layer for number, layer in enumerate(layers_of(model))}
    optimizer = {} if model.optimizer is None else {"optimizer": model.optimizer}
    # An outer layer first, because its `trainable` sets that of those inside.
    outer_first = sorted(layers.items(), key=lambda item: -len(layers_of(item[1])))
    owners = {"model": model, **optimizer, **dict(outer_first)}
    seen: set[int] = set()
    for name, value in {**compiled_with(model), **optimizer, **layers, "model": model}.items():
        owners |= {path: part for path, part in _parts(value, name, seen) if path not in owners}
    for name, owner in list(owners.items()):
        owners |= _code_of(name, owner, of_step=True)
    return owners


def _parts(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The parts of the program, by path, that a step of the model calls: losses, metrics, optimizers,
    schedules, functions and other objects that can be called; and regularizers, also Keras's own."""
    value = value.__self__ if isinstance(value, MethodType) else value
    is_users = is_user_class(type(value)) and callable(value)
    is_users = is_users or isinstance(value, keras.regularizers.Regularizer)
    is_part = is_users or isinstance(value, (*_COMPILED, FunctionType, keras.Layer, partial))
    if id(value) in seen or not (is_part or isinstance(value, (dict, list, tuple))):
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        is_users = is_program_module(value.__module__)
    if is_users and not isinstance(value, keras.Layer):
        yield path, value
    for name, child in _children(value).items():
        yield from _parts(child, f"{path}.{name}", seen)


def _children(value: Any) -> dict[Any, Any]:
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return dict(value if isinstance(value, dict) else getattr(value, "__dict__", {}))


@cache
def _member_kinds() -> tuple[type, ...]:
    if keras.backend.backend() != "tensorflow":
        return _MEMBERS
    tensorflow = sys.modules["tensorflow"]
    return (*_MEMBERS, tensorflow.Variable, tensorflow.random.Generator)


def _members_in(value: Any, path: str, seen: set[int]) -> dict[str, Any]:
    """The members that a value is or holds, by path, without those in `seen`."""
    is_member = isinstance(value, _member_kinds())
    is_holder = isinstance(value, (dict, list, tuple)) or _is_object(value)
    if id(value) in seen or not (is_holder or is_member):
        return {}
    seen.add(id(value))
    if is_member:
        return {path: value} if getattr(value, "built", True) else {}
    found: dict[str, Any] = {}
    for name, child in _children(value).items():
        found |= _members_in(child, f"{path}.{name}", seen)
    return found


def _attributes(owner: Any) -> dict[str, Any]:
    if isinstance(owner, _Variables):
        return owner.values()
    if isinstance(owner, type):
        return {n: v for n, v in vars(owner).items() if not n.startswith("__") and _is_counted(v)}
    if isinstance(owner, keras.Layer):  # a policy is an object that layers share
        return {**attributes_of(owner), "dtype_policy": owner.dtype_policy.name}
    if isinstance(owner, _COMPILED):
        return attributes_of(owner)
    held = getattr(owner, "__dict__", {})
    return {n: v for n, v in held.items() if n not in CALLBACK_ATTRIBUTES}


def _packed(callback: Any) -> dict[str, Any]:
    values = _attributes(callback)
    values = {name: untracked(value) for name, value in values.items()}
    return {name: pack(value) for name, value in values.items() if is_plain(value)}


def _containers(callback: Any) -> dict[str, list[Any]]:
    """The items of containers, and attributes of objects of the program, that are not plain. Keras's
    callbacks keep caches and files in such."""
    is_code = isinstance(callback, (type, _Variables))
    is_of_keras = is_code or type(callback).__module__.startswith("keras.")
    if is_of_keras or is_stateful(callback) or isinstance(callback, _MEMBERS):
        return {}
    found: dict[str, list[Any]] = {}
    for name, value in _attributes(callback).items():
        if isinstance(value, _CONTAINERS_AND_BYTES) and not is_plain(value):
            found[name] = [*value.items()] if isinstance(value, dict) else [*value]
        elif _is_object(value) and not is_plain(value):  # of a class in a function, say
            found[name] = [*vars(value).items()]
    return found


def _is_object(value: Any) -> bool:
    is_member = isinstance(value, _MEMBERS)
    return is_user_class(type(value)) and hasattr(value, "__dict__") and not is_member


def _same_objects(items: list[Any], before: list[Any] | None) -> bool:
    return before is not None and [*map(_identity, items)] == [*map(_identity, before)]


def _identity(item: Any) -> Any:
    return (id(item[0]), id(item[1])) if type(item) is tuple and len(item) == 2 else id(item)


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def pack(value: Any) -> dict[str, Any]:
    """Pack a plain value as `{"json": uint8 text, "arrays": {"0": ...}}`, or raise TypeError."""
    arrays: dict[str, Any] = {}
    text = json.dumps(_encode(value, arrays), separators=(",", ":"))
    packed: dict[str, Any] = {"json": np.frombuffer(text.encode(), np.uint8)}
    return packed | ({"arrays": arrays} if arrays else {})


def unpack(packed: dict[str, Any]) -> Any:
    text = bytes(np.asarray(packed["json"])).decode()
    return _decode(json.loads(text), packed.get("arrays", {}))


def is_plain(value: Any) -> bool:
    try:
        _encode(value, {})
    except (TypeError, RecursionError):
        return False
    return True


def copy_plain(value: Any, what: str) -> Any:
    """A copy of a plain value. Raises `TrainError`, which begins with `what`, if it is not plain."""
    try:
        return unpack(pack(value))
    except TypeError as error:
        raise TrainError(
            f"{what}: expected numbers, strings, arrays, and lists, tuples and dicts of them, found a "
            f"value of type {error}, which a backup cannot hold."
        ) from None


def _encode(value: Any, arrays: dict[str, Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses are other types (np.float64 is a float).
        if type(value) in (type(None), bool, int, float, str):
            return value
        if not isinstance(value, np.generic):
            raise TypeError(type(value).__name__)
    if type(value) is bytes:
        return {_TAG: "bytes", "of": value.hex()}
    if type(value) is complex:
        return {_TAG: "complex", "of": [value.real, value.imag]}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.array(value)  # a copy, because the original may change in place
        if array.dtype.kind not in "biufc" and array.dtype.num < 256:
            raise TypeError(str(array.dtype))
        name = str(len(arrays))
        arrays[name] = array
        return {_TAG: "scalar" if isinstance(value, np.generic) else "array", "at": name}
    if isinstance(value, list):
        return [_encode(item, arrays) for item in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "of": [_encode(item, arrays) for item in value]}
    if type(value) is Form:
        return {_TAG: "form", "of": {key: _encode(item, arrays) for key, item in value.items()}}
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(item, arrays) for key, item in value.items()}
    if type(value) in PLAIN_MAPPINGS:
        described = describe_container(mapping_like(value, {}))
        assert described is not None
        kind, factory = described[0].kind, described[0].factory
        if factory == OF_TARGET:
            raise TypeError(f"{kind} with a factory of the program")
        pairs = [[_encode(part, arrays) for part in item] for item in value.items()]
        return {_TAG: kind, "of": pairs, "factory": factory}
    if isinstance(value, tuple) and record_class(type_name(value)) is type(value):
        return {_TAG: "record", "type": type_name(value), "of": [_encode(v, arrays) for v in value]}
    if type(value) in _SETS:
        return {_TAG: type(value).__name__, "of": [_encode(item, arrays) for item in value]}
    if type(value) is deque:
        items = [_encode(item, arrays) for item in value]
        return {_TAG: "deque", "of": items, "most": value.maxlen}
    if f"{type(value).__module__}.{type(value).__name__}" == "torch.Tensor":
        return _encode_tensor(value, arrays)
    try:
        form = whole_form(value, lambda _: None)
    except (StateError, RecursionError) as error:  # it may contain itself
        raise TypeError(type(value).__name__) from error
    if form is value:
        raise TypeError(type(value).__name__)
    return _encode(form, arrays)


def _encode_tensor(tensor: Any, arrays: dict[str, Any]) -> Any:
    if kind_of(tensor) is not ValueKind.ARRAY:
        raise TypeError("torch.Tensor")
    name = str(len(arrays))
    arrays[name] = np.frombuffer(bits.octets(tensor), np.uint8).copy()
    dtype, device = str(tensor.dtype).rpartition(".")[2], str(tensor.device)
    is_leaf = tensor.is_leaf and tensor.requires_grad
    return {_TAG: "tensor", "at": name, "is": [dtype, [*tensor.shape], device, is_leaf]}


def _decode_tensor(octets: Any, dtype: str, shape: list[int], device: str, is_leaf: bool) -> Any:
    import torch

    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if made.numel():
        made.reshape(-1).view(torch.uint8)[:] = torch.from_numpy(np.array(octets))
    return made.to(device).requires_grad_(is_leaf)


def _decode(value: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case "array":
            return np.array(arrays[value["at"]])
        case "tensor":
            return _decode_tensor(arrays[value["at"]], *value["is"])
        case "scalar":
            return np.asarray(arrays[value["at"]])[()]
        case "tuple":
            return tuple(_decode(item, arrays) for item in value["of"])
        case "set" | "frozenset" as name:
            return _SETS[name == "frozenset"](_decode(item, arrays) for item in value["of"])
        case "deque":
            return deque((_decode(item, arrays) for item in value["of"]), value["most"])
        case "bytes":
            return bytes.fromhex(value["of"])
        case "complex":
            return complex(*value["of"])
        case "dict" | "OrderedDict" | "defaultdict" | "Counter" as kind:
            items = {_decode(key, arrays): _decode(part, arrays) for key, part in value["of"]}
            entry = Container(kind, keys=tuple(items), factory=value["factory"])
            return build_container(entry, (), lambda key, _: items[key])
        case "record":
            if (record := record_class(value["type"])) is None:
                text = f"the program has no {value['type']}, of which the backup has a value"
                raise UnsupportedLeafError(text)
            return tuple.__new__(record, (_decode(item, arrays) for item in value["of"]))
        case "form":
            return made_value(_decode(value["of"], arrays))
    return {key: _decode(item, arrays) for key, item in value.items()}
