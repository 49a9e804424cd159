"""Keras 3 on JAX, TensorFlow or PyTorch: layers, models, optimizers, metrics, seeds, variables.

All are restored in place. Owns their leaf paths: those of Keras, without the name of the object itself
and without the numbers by which Keras tells apart all that a process has made (`dense_7`); siblings of
one name are counted from the first (`dense`, `dense_1`). Invariant: the paths follow from how the
object is built, not from what else was built before it, and are the same on every backend.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import ContainersOnly, Node, Spec
from perdure.state.nested import flat, nest

# uint32 on JAX, the same bits as int32 on PyTorch, and the same numbers as int64 on TensorFlow. A
# checkpoint has one form.
SEED = "seed_generator_state"


class KerasState(ContainersOnly):
    """See `perdure.state.adapter.Adapter`. Arrays inside are those of the backend."""

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
        if isinstance(value, keras.Variable):
            return Node(
                [("", read(value))],
                lambda new: write({"": value}, {"": new[0]}),
                in_place=True,
            )
        if isinstance(value, keras.random.SeedGenerator):
            inner = value.state
            return Node(
                [("", read(inner))],
                lambda new: write({"": inner}, {"": new[0]}),
                in_place=True,
            )
        if isinstance(value, (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)):
            variables = named(value)
            values = {path: read(variable) for path, variable in variables.items()}
            return Node(
                [("", nest(values))],
                lambda new: write(variables, flat(new[0])),
                in_place=True,
            )
        return None


def named(owner: Any) -> dict[str, Any]:
    """The variables of a layer, model, optimizer or metric by path, in Keras' order.

    Raises UnsupportedLeafError where they do not exist yet.
    """
    if not getattr(owner, "built", True):
        how = (
            "`optimizer.build(model.trainable_variables)`"
            if isinstance(owner, keras.optimizers.Optimizer)
            else "call it once, or give it a `keras.Input`"
        )
        raise UnsupportedLeafError(
            f"the Keras object {owner.name!r} is not built, so its variables do not exist yet: {how}."
        )
    # On PyTorch a layer is a torch module. What Keras itself makes is a parameter there.
    if buffers := [name for name, _ in getattr(owner, "named_buffers", tuple)()]:
        raise UnsupportedLeafError(
            f"the Keras object {owner.name!r} wraps a torch module with buffers ({buffers[0]}), which "
            "Keras does not count among its variables: they would be lost. Use Keras' own layer."
        )
    if isinstance(owner, keras.optimizers.Optimizer):
        return _unique((_slot(owner, variable), variable) for variable in owner.variables)
    return _unique((_below(variable.path, owner.name), variable) for variable in owner.variables)


def read(variable: Any) -> Any:
    """The value of a variable, as an array of the backend (of NumPy on TensorFlow); a seed as two
    words of uint32."""
    value = variable.value
    if keras.backend.backend() == "tensorflow":
        value = value.numpy()
    if variable.name != SEED:
        return value
    words = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    if words.dtype == np.int64:
        if (words >> 32).any():
            raise UnsupportedLeafError(
                f"the seed {words.tolist()} has more than 32 bits, which only TensorFlow takes: choose "
                f"one below 2**32."
            )
        return words.astype(np.uint32)
    return words.view(np.uint32)


def write(variables: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Assign values by path; arrays of any framework."""
    for path, variable in variables.items():
        value = values[path]
        if variable.name == SEED:
            dtype = keras.backend.standardize_dtype(variable.dtype)
            words = np.asarray(value)
            value = words.astype(dtype) if dtype == "int64" else words.view(dtype)
        variable.assign(value)


def _below(path: str, name: str) -> str:
    return path.removeprefix(f"{name}/")


def _slot(optimizer: Any, variable: Any) -> str:
    """`momentum/dense/kernel` of what Keras calls `adam/sequential_dense_kernel_momentum`."""
    name = _below(variable.path, optimizer.name)
    trained = [v.path for v in getattr(optimizer, "_trainable_variables", ())]
    owners = [path for path in trained if name.startswith(path.replace("/", "_") + "_")]
    if not owners:
        return name
    owner = max(owners, key=len)
    # The model is what all of them start with, where it built its layers itself.
    models = {path.split("/")[0] if path.count("/") > 1 else "" for path in trained}
    below = _below(owner, models.pop()) if len(models) == 1 else owner
    return f"{name[len(owner) + 1 :]}/{below}"


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    taken: Counter[tuple[str, str]] = Counter()
    given: dict[str, str] = {"": ""}

    def fresh(parent: str, name: str) -> str:
        base = re.sub(r"_\d+$", "", name)
        number = taken[parent, base]
        taken[parent, base] += 1
        own = base if number == 0 else f"{base}_{number}"
        return f"{parent}/{own}" if parent else own

    found: dict[str, Any] = {}
    for path, variable in pairs:
        *parents, last = path.split("/")
        at = whole = ""
        for part in parents:
            whole = f"{whole}/{part}"
            if whole not in given:
                given[whole] = fresh(at, part)
            at = given[whole]
        found[fresh(at, last)] = variable
    return found


ADAPTER = KerasState()
