"""The adapter of TensorFlow: variables, generators, modules and iterators of `tf.data`, restored in
place; and tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tensorflow as tf

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, Stateful
from perdure.state.leaf_spec import LeafSpec
from perdure.state.leaf_values import SCALARS, array_leaf, array_spec, leaf_array
from perdure.store.leaf import Leaf

_OF_KERAS = ("Layer", "Variable", "Optimizer", "Metric")


class TensorFlowState(Adapter):
    """See `perdure.state.adapter.Adapter`. Keras's objects are taken by its own adapter."""

    def spec(self, value: Any) -> LeafSpec | None:
        return array_spec(_array(value)) if _is_tensor(value) else None

    def leaf(self, value: Any) -> Leaf | None:
        return array_leaf(_array(value)) if _is_tensor(value) else None

    def load(self, like: Any, leaf: Leaf) -> Any:
        with tf.device(like.device):
            return tf.constant(leaf_array(leaf), like.dtype)

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        if isinstance(value, tf.Variable):
            return Node([("", _array(value))], lambda new: value.assign(new[0]), in_place=True)
        if isinstance(value, tf.random.Generator):
            return _generator_node(value)
        if isinstance(value, (tf.data.Iterator, tf.data.NumpyIterator)):
            return _IteratorState(value)
        return _module_node(value) if isinstance(value, tf.Module) else None


class _IteratorState(Stateful):
    """An iterator of `tf.data`: its place, what its shuffles hold, and the seeds of those. TensorFlow
    writes and reads it as files of a `tf.train.Checkpoint`."""

    def read(self) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            try:
                tf.train.Checkpoint(iterator=self.target).write(f"{folder}/state")
            except tf.errors.FailedPreconditionError as error:
                reason = error.message.partition("}} ")[2].partition(" [Op:")[0] or error.message
                raise UnsupportedLeafError(
                    f"TensorFlow cannot save this iterator: {reason} Random operations need "
                    f"`tf.random.stateless_*`, and Python code has to be outside of the pipeline; or "
                    f"leave the iterator out of the state, and begin the data at the restored step: "
                    f"`dataset.skip(start)`, with a `seed` for each `shuffle`."
                ) from None
            files = Path(folder).iterdir()
            return {each.name: np.frombuffer(each.read_bytes(), np.uint8) for each in files}

    def load(self, state: Any) -> None:
        with TemporaryDirectory() as folder:
            for name, octets in state.items():
                Path(folder, Path(name).name).write_bytes(octets.tobytes())
            tf.train.Checkpoint(iterator=self.target).read(f"{folder}/state").assert_consumed()


def _generator_node(generator: Any) -> Node:
    def rebuild(new: list[Any]) -> None:
        if new[0] != int(generator.algorithm):
            raise UnsupportedLeafError(
                f"the checkpoint has a generator of TensorFlow with the algorithm {new[0]}, expected "
                f"{int(generator.algorithm)}. Make it as the program that saved it."
            )
        generator.state.assign(new[1])

    children = [("algorithm", int(generator.algorithm)), ("state", _array(generator.state))]
    return Node(children, rebuild, in_place=True)


def _module_node(module: Any) -> Node:
    """The attributes in which TensorFlow finds variables, and plain values, such as a count."""
    parts = {
        name: _without_others(part)
        for name, part in vars(module).items()
        if _has_state(part) or (type(part) in SCALARS and not name.startswith("_"))
    }

    def rebuild(new: list[Any]) -> None:
        for name, part in zip(parts, new, strict=True):
            if type(part) in SCALARS:
                setattr(module, name, part)

    return Node([*parts.items()], rebuild, in_place=True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "numpy")


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value.numpy())


def _has_state(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_has_state, value.values() if isinstance(value, Mapping) else value))
    keras = sys.modules.get("keras")
    of_keras = [getattr(keras, name) for name in _OF_KERAS if hasattr(keras, name)]
    return isinstance(value, (tf.Variable, tf.random.Generator, tf.Module, *of_keras))


def _without_others(value: Any) -> Any:
    """A container with the parts that have a state, by key or number, without the wrapper that
    TensorFlow puts around one in an attribute."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {str(key): _without_others(part) for key, part in pairs if _has_state(part)}


ADAPTER = TensorFlowState()
