"""Adapters: how the values of a framework become leaves and nodes, and come back.

A new framework is a module that ends in `ADAPTER = ThatClass()`, and a line in `ADAPTERS`. It is
asked only if the framework is imported already: otherwise no value of it can exist.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from perdure.state.containers import build_container, describe_container
from perdure.state.leaf_spec import Check, LeafSpec
from perdure.state.paths import join_key
from perdure.state.value_forms import made_value
from perdure.store.leaf import Leaf
from perdure.store.shard_plan import Region


class Node(NamedTuple):
    """An interior value: its children by key, and the function that rebuilds it from new children.

    A child with an empty key adds nothing to the path. With `in_place` the value is changed (a
    Keras layer), which cannot fail once its leaves fit and is done last.
    """

    children: Collection[tuple[str, Any]]
    rebuild: Callable[[list[Any]], Any]
    in_place: bool = False
    undo: Callable[[], object] | None = None
    """What takes a change in place back. With it the change is made first: others may look at this
    object when they are loaded, as a loader looks at its sampler."""
    code: Mapping[str, Any] = MappingProxyType({})
    """Functions and structure that a restore takes from the target, by relative path."""


class Structure(NamedTuple):
    """What a restore takes from the target and is no function: None, and the classes of containers."""

    kinds: Any


class Contents(Node):
    """Of a subclass of a container, which its items make again: its child is a plain container with
    them, which has the same path."""


class ModuleValues(dict[str, Any]):
    """The state of a torch module: values by dotted name, which become nested leaf paths."""


class Stateful:
    """An object with a state that is read and loaded as a whole (`state_dict`, `load_state_dict`).
    `read` has to return what `load` was given. `check` changes nothing and keeps no array."""

    arrays = "numpy"
    """The class of the object's arrays, unless the checkpoint names another one."""
    class_name: str | None = None
    """The class that a checkpoint names, for a `check` that compares it."""
    can_fail = True
    """Whether `load` may fail although `check` found nothing. If so, `backup` is called first."""
    comes_first = False
    """Whether others can only be loaded after this object. It is backed up like one that may fail."""
    changes_no_array = False
    """Whether `load` never writes into an array of the state that it is given. Then these arrays may be
    in the memory of the leaves with which the object is compared."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def read(self) -> Any:
        """The present state."""
        return self.target.state_dict()

    def load(self, state: Any) -> object:
        """Load a state, which the object may keep and change."""
        return self.target.load_state_dict(state)

    def check(self) -> Check:
        """The function that finds the stored leaves that the object cannot take."""
        return lambda _: []

    def parts(self) -> Mapping[str, LeafSpec | None] | None:
        """dtype and shape (or None for any) of the values that can be restored one by one, by
        relative path. None for an object whose state is only loaded as a whole."""
        return None

    def part_values(self) -> Mapping[str, Any]:
        """The live values of `parts`, by the same paths."""
        return {}

    def sharded_values(self, stored: Mapping[str, LeafSpec]) -> Mapping[str, Any]:
        """The arrays that decide how stored leaves of the object are sharded, by path."""
        return {}

    def depends_on(self) -> Iterable[Any]:
        """The objects that this state belongs to, such as the parameters of an optimizer."""
        return ()

    def may_add(self, path: str) -> bool:
        """Whether the object may have a leaf after `load` that was not stored (a new setting)."""
        return False

    def backup(self) -> Callable[[], object]:
        """Copy the present state; returns the function that loads it again and drops new
        attributes."""
        before, attributes = copy_state(self.read()), getattr(self.target, "__dict__", {})
        names = set(attributes)

        def undo() -> None:
            try:
                self.load(before)
            finally:
                for name in attributes.keys() - names:
                    del attributes[name]

        return undo


def copy_state(state: Any) -> Any:
    """A state with new containers and arrays. Live objects inside are not copied."""
    if isinstance(state, ModuleValues):
        return ModuleValues({name: copy_state(value) for name, value in state.items()})
    if isinstance(state, np.ndarray):
        return state.copy()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        clone = state.detach().clone()
        if type(clone) is not type(state):
            return type(state)(clone, state.requires_grad)
        return clone.requires_grad_(state.requires_grad)
    if (described := describe_container(state)) is None:
        return state
    entry, children = described
    values = {join_key("", key): child for key, child in children}
    copied = build_container(entry, list(values), lambda _, part: copy_state(values[part]))
    if type(copied) is defaultdict:
        copied.default_factory = state.default_factory
    return made_value(copied) if type(copied) is dict else copied


class Adapter:
    """The verbs of an adapter. Each returns None for a value that is not of its framework, and
    raises `UnsupportedLeafError` for one that cannot be restored exactly. The type decides what is
    a leaf."""

    def spec(self, value: Any) -> LeafSpec | None:
        """dtype and shape of an array."""
        return None

    def leaf(self, value: Any) -> Leaf | None:
        """The bytes of an array, without a copy where that is possible."""
        return None

    def specs(self, values: Sequence[Any]) -> Sequence[LeafSpec] | None:
        """`spec` of many values of one type in few calls, None if each has to be asked for."""
        return None

    def leaves(self, values: Sequence[Any]) -> Sequence[Leaf] | None:
        """`leaf` of many values of one type in few calls, None if each has to be asked for."""
        return None

    def load(self, like: Any, leaf: Leaf) -> Any:
        """An array of the class, device and sharding of `like` with the bits of `leaf`."""
        raise NotImplementedError

    def variable(self, value: Any) -> Stateful | None:
        """An array that a restore changes in place, because other objects refer to it, or None."""
        return None

    def regions(self, like: Any) -> tuple[Region, ...] | None:
        """The elements that this process needs of a target; None for all, and for other values."""
        return None

    def misplaced(self, like: Any) -> str:
        """How the sharding of a target does not fit its shape; empty if it does."""
        return ""

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        """An interior value. A restore gives the `stored` leaves below it, by relative path."""
        return None


ADAPTERS = {
    "keras": "perdure.state.keras_state",
    "flax.nnx": "perdure.state.flax_state",
    "equinox": "perdure.state.equinox_state",
    "jax": "perdure.state.jax_state",
    "torch": "perdure.state.torch_state",
    "tensorflow": "perdure.state.tensorflow_state",
    "builtins": "perdure.state.builtin",
}
"""The module of each adapter by that of its framework, in the order in which they are asked.

The first one that takes a value decides: a Keras layer on PyTorch is a torch module too, and Flax and
Equinox modules are pytree nodes of JAX. The built-in adapter, of NumPy and plain Python, is last: a
dataclass that is registered with a framework (with static fields) is taken apart by that framework.
"""


def loaded_frameworks() -> list[str]:
    """The frameworks that are imported, in the order of `ADAPTERS`."""
    return [framework for framework in ADAPTERS if sys.modules.get(framework)]


def loaded_adapters() -> list[Adapter]:
    """The adapters of `loaded_frameworks`."""
    return [adapter(framework) for framework in loaded_frameworks()]


def adapter(framework: str) -> Adapter:
    """The adapter of a framework that is imported."""
    return import_module(ADAPTERS[framework]).ADAPTER


def leaf_adapter(value: Any, adapters: Sequence[Adapter]) -> tuple[Adapter, LeafSpec] | None:
    """The adapter for which a value is a leaf, and its dtype and shape; None for an interior value."""
    for candidate in adapters:
        if (spec := candidate.spec(value)) is not None:
            return candidate, spec
    return None


def leaf_of(value: Any) -> Leaf | None:
    """The leaf of one value; None if it is none."""
    taken = leaf_adapter(value, loaded_adapters())
    return None if taken is None else taken[0].leaf(value)


def load_leaf(taker: Adapter, like: Any, leaf: Leaf) -> Any:
    """An array such as `like`, made by the adapter that takes it, with the bits of `leaf`."""
    if not leaf.is_weak:
        return taker.load(like, leaf)
    # Only JAX has weak types. A Python number in the target is a weakly typed array after the first
    # compiled step; as a NumPy scalar it would be strongly typed.
    if "jax" in sys.modules:
        jax = adapter("jax")
        if taker is jax or type(like) in (int, float, complex):
            return jax.load(like, leaf)
    return taker.load(like, leaf.strong())
