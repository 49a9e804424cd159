"""The adapter of Keras 3: layers, models, optimizers, metrics, seeds and variables, restored in
place.

Invariant: leaf paths depend on how an object is built, not on what was built before, and are the
same on every backend. So they lack the object's name and Keras's numbers (`dense_7`); siblings with
one name are numbered from the start.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import keras
import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Node
from perdure.state.attribute_values import ValueKind, kind_of
from perdure.state.leaf_spec import LeafSpec
from perdure.state.paths import flatten_dict, join_part, unflatten_dict
from perdure.state.program_code import is_user_class

# The name of a variable that Keras keeps as uint32 on JAX, with the same bits as int32 on PyTorch, and
# with the same numbers as int64 on TensorFlow. A checkpoint has uint32.
SEED = "seed_generator_state"

SET_BY_KERAS = frozenset(
    {"built", "training", "stop_training", "stop_evaluating", "stop_predicting"}
)
"""Attributes that Keras sets while it trains."""

_PROPERTIES = ("trainable", "supports_masking")
"""Of every layer, with the values in private attributes."""

_TENSORFLOW_CHILDREN = "_self_unconditional_dependency_names"
"""Where TensorFlow lists attributes of an object once more."""


class KerasState(Adapter):
    """Turns Keras objects into nodes. The adapter of the backend takes their arrays."""

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | None:
        if isinstance(value, keras.Variable):
            return _variable_node(value)
        if isinstance(value, keras.random.SeedGenerator):
            return _variable_node(value.state)
        if isinstance(value, (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
            variables = variables_by_path(value)
            values = {path: read_variable(variable) for path, variable in variables.items()}
            return Node(
                [("", unflatten_dict(values))],
                lambda new: write_variables(variables, flatten_dict(new[0])),
                in_place=True,
            )
        return None


def variables_by_path(owner: Any) -> dict[str, Any]:
    """The variables of a layer, model, optimizer or metric by path, in Keras' order. One that is
    not built, or has values that Keras does not count as variables, is refused."""
    if not getattr(owner, "built", True):
        how = (
            "`optimizer.build(model.trainable_variables)`"
            if isinstance(owner, keras.optimizers.Optimizer)
            else "call it once, or give it a `keras.Input`"
        )
        raise UnsupportedLeafError(
            f"the Keras object {owner.name!r} is not built, so its variables do not exist yet: {how}."
        )
    # On PyTorch a layer is a torch module, and every variable that Keras makes is a parameter of it.
    if buffers := [name for name, _ in getattr(owner, "named_buffers", tuple)()]:
        raise UnsupportedLeafError(
            f"the Keras object {owner.name!r} wraps a torch module with buffers ({buffers[0]}), which "
            "Keras does not count among its variables: they would be lost. Use Keras' own layer."
        )
    if keras.backend.backend() == "tensorflow" and (found := _tensorflow_value(owner)):
        path, value = found
        raise UnsupportedLeafError(
            f"the Keras object {owner.name!r} has a {type(value).__name__} of TensorFlow ({path[1:]}), "
            f"which Keras does not count among its variables: it would be lost. Make it with "
            f"`self.add_weight(shape=..., initializer=..., trainable=False)`, and a generator as a "
            f"`keras.random.SeedGenerator`."
        )
    if isinstance(owner, keras.optimizers.Optimizer):
        return _unique((_slot_path(owner, variable), variable) for variable in owner.variables)
    variables = [*owner.variables, *_recurrent_states(owner)]
    return _unique(
        (variable.path.removeprefix(f"{owner.name}/"), variable) for variable in variables
    )


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of a layer or an optimizer that are the program's, or settings of Keras's own.

    `trainable` of a layer sets that of the layers inside: restore the outer layers first."""
    names = _PROPERTIES if isinstance(owner, keras.Layer) else ()
    settings = {name: getattr(owner, name) for name in names}
    if is_user_class(type(owner)):
        of_keras = _names_of_keras()
        return settings | {n: v for n, v in vars(owner).items() if n not in of_keras}
    own = {n: v for n, v in vars(owner).items() if n[0] != "_" and n not in SET_BY_KERAS}
    return settings | own


@cache
def _names_of_keras() -> frozenset[str]:
    """What Keras keeps in every model, layer and optimizer, without what a program sets."""
    names = {*vars(keras.Model()), *vars(keras.layers.Layer())} - {"activity_regularizer"}
    return frozenset(names | SET_BY_KERAS)


def static_attributes(value: Any, path: str) -> Iterator[tuple[str, Any, list[str]]]:
    """A layer, the layers inside and an optimizer, with the names of their plain attributes, where
    each step reads them: the compiled step of another backend has read them once."""
    is_layer = isinstance(value, keras.Layer)
    if keras.backend.backend() != "torch":
        return
    if not is_layer and not isinstance(value, keras.optimizers.Optimizer):
        return
    layers = value._flatten_layers(include_self=False) if is_layer else []
    for number, owner in enumerate([value, *layers]):
        found = attributes_of(owner).items()
        names = [name for name, part in found if kind_of(part) is ValueKind.PLAIN]
        # The numbers sort, because the `trainable` of a layer sets that of those inside.
        inside = join_part(path, f"layer {number:05}") if number else path
        yield inside, owner, names


def _recurrent_states(owner: Any) -> Iterator[Any]:
    """The states of stateful recurrent layers, which Keras does not count among the variables."""
    counted = {id(variable) for variable in owner.variables}
    for layer in owner._flatten_layers() if isinstance(owner, keras.Layer) else ():
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.states is not None:
            states = keras.tree.flatten(layer.states)
            yield from (state for state in states if id(state) not in counted)


def _tensorflow_value(owner: Any) -> tuple[str, Any] | None:
    """A `tf.Variable` or a generator in the attributes of `owner` or of its layers, and its path."""
    layers = owner._flatten_layers() if isinstance(owner, keras.Layer) else [owner]
    held = [(layer.name, vars(layer).items()) for layer in layers]
    own = [(name, {k: v for k, v in each if k != _TENSORFLOW_CHILDREN}) for name, each in held]
    return _first_value(own, depth=4)


def _first_value(children: Iterable[tuple[Any, Any]], depth: int) -> tuple[str, Any] | None:
    for key, value in children:
        kind = _tensorflow_kind(type(value))
        if kind == "plain":
            continue
        found = None
        if kind == "value":
            found = "", value
        elif kind == "module":
            found = next(((f": {inner.name}", inner) for inner in value.variables), None)
        elif depth:
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            found = _first_value(inside, depth - 1)
        if found:
            return f".{key}{found[0]}", found[1]
    return None


@cache
def _tensorflow_kind(kind: type) -> str:
    tensorflow = import_module("tensorflow")
    if issubclass(kind, (tensorflow.Variable, tensorflow.random.Generator)):
        return "value"
    if issubclass(kind, tensorflow.Module) and not issubclass(kind, keras.Layer):
        return "module"
    # TensorFlow wraps a dict that is an attribute in a class of its own.
    is_container = issubclass(kind, (dict, list, tuple)) or kind.__name__ == "_DictWrapper"
    return "container" if is_container else "plain"


def read_variable(variable: Any) -> Any:
    """The value as an array of the backend, on TensorFlow of NumPy; of a seed a uint32[2]."""
    if variable.name != SEED:
        is_tensorflow = keras.backend.backend() == "tensorflow"
        return variable.value.numpy() if is_tensorflow else variable.value
    words = seed_words(variable)
    if (words >> np.uint64(32)).any():
        raise UnsupportedLeafError(
            f"the seed {words.tolist()} has more than 32 bits, which only TensorFlow supports. "
            f"Choose one below 2**32."
        )
    return words.astype(np.uint32)


def seed_words(variable: Any) -> np.ndarray[Any, Any]:
    """The two words of a seed as uint64. Only on TensorFlow do they have more than 32 bits."""
    value = variable.value
    words = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return (words if words.dtype == np.int64 else words.view(np.uint32)).astype(np.uint64)


def write_variables(variables: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Assign values, which may be arrays of any framework, to the variables with the same paths."""
    for path, variable in variables.items():
        value = values[path]
        if variable.name == SEED:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            words = np.asarray(value)
            value = words.astype(dtype) if dtype == "int64" else words.view(dtype)
        variable.assign(value)


def _variable_node(variable: Any) -> Node:
    return Node(
        [("", read_variable(variable))],
        lambda new: write_variables({"": variable}, {"": new[0]}),
        in_place=True,
    )


def _slot_path(optimizer: Any, variable: Any) -> str:
    """`momentum/dense/kernel` for Keras' `adam/sequential_dense_kernel_momentum`."""
    name = variable.path.removeprefix(f"{optimizer.name}/")
    trained = [  # a variable of TensorFlow has no path
        getattr(each, "path", None) or each.name.partition(":")[0]
        for each in getattr(optimizer, "_trainable_variables", ())
    ]
    owners = [path for path in trained if name.startswith(path.replace("/", "_") + "_")]
    if not owners:
        return name
    owner = max(owners, key=len)
    # All paths start with the model's name if it built its layers itself.
    models = {path.split("/")[0] if path.count("/") > 1 else "" for path in trained}
    variable_path = owner.removeprefix(f"{models.pop()}/") if len(models) == 1 else owner
    return f"{name[len(owner) + 1 :]}/{variable_path}"


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The variables by path, with the names below each parent numbered from the start."""
    counts: Counter[tuple[str, str]] = Counter()
    new_paths: dict[str, str] = {"": ""}

    def number(parent: str, name: str) -> str:
        base = re.sub(r"_\d+$", "", name)
        count = counts[parent, base]
        counts[parent, base] += 1
        return join_part(parent, base if count == 0 else f"{base}_{count}")

    variables: dict[str, Any] = {}
    for path, variable in pairs:
        *parents, last = path.split("/")
        new_parent = keras_parent = ""
        for part in parents:
            keras_parent = f"{keras_parent}/{part}"
            if keras_parent not in new_paths:
                new_paths[keras_parent] = number(new_parent, part)
            new_parent = new_paths[keras_parent]
        variables[number(new_parent, last)] = variable
    return variables


ADAPTER = KerasState()
