"""The adapter of TensorFlow: variables, generators, modules and iterators of `tf.data`, restored in
place; and tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import tensorflow as tf

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, Stateful
from perdure.state.extra_members import ExtraMember, Restoring, Saving, json_leaf
from perdure.state.generators import is_generator
from perdure.state.leaf_spec import LeafSpec, PathInErrors
from perdure.state.leaf_values import CONTAINERS, SCALARS, array_leaf, array_spec, leaf_array
from perdure.state.value_forms import encode_forms, form_of
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf

_KERAS_CLASSES = ("Layer", "Variable", "Optimizer", "Metric")


class TensorFlowState(Adapter):
    """Turns modules, iterators and tensors into nodes and leaves. Keras has its own adapter."""

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
    """An iterator of `tf.data`, whose position `Iterators` stores."""

    def read(self) -> dict[str, Any]:
        return {}

    def load(self, state: Any) -> None:
        pass


_numbers = msgspec.json.Decoder(dict[str, int])


class Iterators(ExtraMember):
    """Stores the positions of iterators of `tf.data`, and the contents and seeds of their shuffles.

    They are no part of the fingerprint: TensorFlow writes all elements that it has read ahead,
    so that the bytes at one position differ with the timing. The files of `tf.train.Checkpoint` lose a
    part of some pipelines: the first looks refuse these.
    """

    def observe(self, walk: Walk) -> None:
        for path, iterator in _iterators(walk):
            with PathInErrors(path):
                _looked_at_files(iterator)

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        top = f"process/{saving.process}/iterators"
        found, numbers = dict[str, Leaf](), dict[str, int]()
        for number, (path, iterator) in enumerate(_iterators(saving.walk)):
            numbers[path] = number
            with PathInErrors(path):
                files = _looked_at_files(iterator)
            for name, octets in files.items():
                found[f"{top}/{number}/{name}"] = array_leaf(octets)
        return {**found, f"{top}_index": json_leaf(numbers)} if numbers else {}

    def restore(self, restoring: Restoring, walk: Walk) -> list[str]:
        iterators = dict(_iterators(walk))
        top = restoring.path("iterators_index").removesuffix("_index")
        for path, number in restoring.by_path("iterators_index", _numbers).items():
            start = f"{top}/{number}/"
            files = {
                name.removeprefix(start): leaf_array(leaf)
                for name, leaf in restoring.leaves.items()
                if name.startswith(start)
            }
            if path in iterators:
                _put_files(iterators[path], files)
        return []


def _iterators(walk: Walk) -> Iterator[tuple[str, Any]]:
    for path, node in walk.objects.items():
        if isinstance(node, _IteratorState):
            yield path, node.target


def _looked_at_files(iterator: Any) -> dict[str, Any]:
    files, looks = _files_of(iterator), _looked_at.get(iterator, 0)
    if looks < _LOOKS:
        _looked_at[iterator] = looks + 1
        _require_kept(iterator, files)
    return files


_looked_at: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_LOOKS = 3
"""At the first one no element was drawn yet: what it loses then is not seen."""
_LOST = ("groupbywindow",)
"""Transformations, in lower case, whose contents TensorFlow cannot restore."""
_ADVICE = (
    "Leave the iterator out of the state, and begin the data at the restored step: "
    "`dataset.skip(start)`, with a `seed` for each `shuffle`."
)


def _require_kept(iterator: Any, state: Mapping[str, Any]) -> None:
    """Refuse an iterator of which TensorFlow does not restore all: seen where a second iterator returns
    another state than it was given, and known of a shuffle in a pipeline that is repeated."""
    dataset = getattr(iterator, "_dataset", None)
    dataset = getattr(getattr(iterator, "_iterator", None), "_dataset", dataset)
    if dataset is None:
        return
    if between := _between_shuffle_and_repeat(dataset):
        raise UnsupportedLeafError(
            f"TensorFlow does not restore the order of later epochs of a pipeline with "
            f"`{between}` between `shuffle` and `repeat`. Put `repeat` right after `shuffle`, or "
            f"make an iterator for each epoch. {_ADVICE}"
        )
    is_numpy = isinstance(iterator, tf.data.NumpyIterator)
    second = tf.data.NumpyIterator(dataset) if is_numpy else iter(dataset)
    _put_files(second, state)
    again = _files_of(second)
    if any(not np.array_equal(state[name], again.get(name, ())) for name in state):
        raise UnsupportedLeafError(
            f"TensorFlow does not restore this iterator to the state that it had saved (`window` and "
            f"`unique` are such). {_ADVICE}"
        )


def _between_shuffle_and_repeat(dataset: Any) -> str:
    """What is between a `repeat` and the `shuffle` that it repeats, apart from `batch` and `take`, with
    which TensorFlow keeps the place; empty if all is well."""
    pending = [(dataset, False, "")]
    while pending:
        node, is_repeated, between = pending.pop()
        kind = type(node).__name__.removesuffix("Dataset").strip("_").lower()
        if kind in _LOST:
            raise UnsupportedLeafError(
                f"TensorFlow does not restore an iterator with `{kind}`. {_ADVICE}"
            )
        if "shuffle" in kind and is_repeated and between:
            return between
        if kind == "repeat":
            is_repeated, between = True, ""
        elif is_repeated and not between and kind not in _TRANSPARENT:
            between = kind
        pending += [(each, is_repeated, between) for each in node._inputs()]
    return ""


_TRANSPARENT = ("batch", "parallelbatch", "paddedbatch", "take", "shuffle", "options", "model")


def _files_of(iterator: Any) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        try:
            tf.train.Checkpoint(iterator=iterator).write(f"{folder}/state")
        except tf.errors.FailedPreconditionError as error:
            reason = error.message.partition("}} ")[2].partition(" [Op:")[0] or error.message
            raise UnsupportedLeafError(
                f"TensorFlow cannot save this iterator: {reason} In a pipeline only random operations "
                f"of `tf.random.stateless_*` are kept, and neither variables, Python code nor a "
                f"shuffle in a mapped function. {_ADVICE}"
            ) from None
        files = Path(folder).iterdir()
        return {each.name: np.frombuffer(each.read_bytes(), np.uint8) for each in files}


def _put_files(iterator: Any, state: Mapping[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        for name, octets in state.items():
            Path(folder, Path(name).name).write_bytes(octets.tobytes())
        tf.train.Checkpoint(iterator=iterator).read(f"{folder}/state").assert_consumed()


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
    """The attributes of a module in which TensorFlow finds variables, which are changed in place, and
    those with other values that a checkpoint takes."""
    parts, others = dict[str, Any](), dict[str, Any]()
    for name, part in vars(module).items():
        if _has_state(part):
            parts[name] = _without_others(part)
        elif not name.startswith(_TF_PREFIXES) and _is_value(plain := _unwrapped(part)):
            others[name] = encode_forms(plain)

    def rebuild(new: list[Any]) -> None:
        for name, part in zip(others, new[len(parts) :], strict=True):
            setattr(module, name, part)

    return Node([*parts.items(), *others.items()], rebuild, in_place=True)


_TF_PREFIXES = ("_self_", "_name", "_scope_name", "_tf_", "_setattr", "_unconditional", "_obj_")


def _is_value(value: Any) -> bool:
    if _is_tensor(value) or is_generator(value) or type(value) in SCALARS:
        return True
    if isinstance(value, CONTAINERS):
        return all(map(_is_value, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (np.ndarray, np.generic)) or form_of(value) is not None


def _unwrapped(value: Any) -> Any:
    """A container without the wrapper that TensorFlow puts around one in an attribute."""
    if isinstance(value, Mapping) and type(value).__module__.startswith("tensorflow."):
        return {key: _unwrapped(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)) and type(value).__module__.startswith("tensorflow."):
        parts = [_unwrapped(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "numpy")


def _array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value.numpy())


def _has_state(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_has_state, value.values() if isinstance(value, Mapping) else value))
    keras = sys.modules.get("keras")
    of_keras = [getattr(keras, name) for name in _KERAS_CLASSES if hasattr(keras, name)]
    kinds = (tf.Variable, tf.random.Generator, tf.Module, tf.data.Iterator, tf.data.NumpyIterator)
    return isinstance(value, (*kinds, *of_keras))


def _without_others(value: Any) -> Any:
    """A container with the parts that have a state, by key or number."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {str(key): _without_others(part) for key, part in pairs if _has_state(part)}


ADAPTER = TensorFlowState()
