"""Adapters: how the values of a framework become leaves and nodes, and come back.

To add a framework, write a module with a class that has the verbs of `Adapter`, let it end in
`ADAPTER = ThatClass()`, and give it a place in `ADAPTERS`. An adapter is consulted only if its
framework has been imported already: a value of that framework cannot exist otherwise, and importing
a framework to find out would take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from perdure.state.leaf_spec import LeafSpec
from perdure.state.stateful import Stateful
from perdure.store.leaf import Leaf


class Pairs:
    """Keys and values as pairs that are made when they are asked for: there may be very many."""

    def __init__(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._keys = keys
        self._values = values

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self._keys, self._values, strict=True)

    def __len__(self) -> int:
        return len(self._keys)


class Node(NamedTuple):
    """An interior value: its children by key, and the function that rebuilds it from new children.

    The children can be iterated over again; one with an empty key adds nothing to the path. `rebuild`
    returns a new value, or with `in_place` changes the value (a Keras layer) and cannot fail once its
    leaves fit. In-place changes are made last, after everything has been compared and built.
    """

    children: Collection[tuple[str, Any]] | Pairs
    rebuild: Callable[[list[Any]], Any]
    in_place: bool = False


class Adapter(Protocol):
    """The verbs of an adapter. Each returns None for a value that is not of its framework.

    Whether a value is a leaf depends on its type alone.
    All of them raise `UnsupportedLeafError` for a value that cannot be restored exactly.
    """

    def spec(self, value: Any) -> LeafSpec | None:
        """dtype and shape of an array."""
        ...

    def leaf(self, value: Any) -> Leaf | None:
        """The bytes of an array, without a copy where that is possible."""
        ...

    def specs(self, values: Sequence[Any]) -> Sequence[LeafSpec] | None:
        """`spec` of many values of one type in few calls, None if each has to be asked for."""
        ...

    def leaves(self, values: Sequence[Any]) -> Sequence[Leaf] | None:
        """`leaf` of many values of one type in few calls, None if each has to be asked for."""
        ...

    def load(self, like: Any, leaf: Leaf) -> Any:
        """An array of the class, device and sharding of `like` with the bits of `leaf`."""
        ...

    def variable(self, value: Any) -> Stateful | None:
        """An array that a restore changes in place, because other objects refer to it.

        None for an array that a restore replaces by a new one.
        """
        ...

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | Stateful | None:
        """An interior value.

        `stored` is None during a save. During a restore it has the leaves of the checkpoint below this
        value, by relative path, for values whose structure depends on what was stored.
        """
        ...


ADAPTERS = {
    "keras": "perdure.state.keras_state",
    "flax.nnx": "perdure.state.flax_state",
    "equinox": "perdure.state.equinox_state",
    "jax": "perdure.state.jax_state",
    "torch": "perdure.state.torch_state",
    "builtins": "perdure.state.builtin",
}
"""The module of each adapter by that of its framework, in the order in which they are asked.

The first one that takes a value decides: a Keras layer on PyTorch is a torch module too, and Flax and
Equinox modules are pytree nodes of JAX. The built-in adapter, of NumPy and plain Python, is last: a
dataclass that is registered with a framework (with static fields) is taken apart by that framework.
"""


def loaded_adapters() -> list[Adapter]:
    """The adapters of the frameworks that are imported, in the order of `ADAPTERS`."""
    return [adapter(framework) for framework in ADAPTERS if framework in sys.modules]


def adapter(framework: str) -> Adapter:
    """The adapter of a framework that is imported."""
    return import_module(ADAPTERS[framework]).ADAPTER


class OneByOne:
    """Base of an adapter that looks at each value by itself."""

    def specs(self, values: Sequence[Any]) -> Sequence[LeafSpec] | None:
        return None

    def leaves(self, values: Sequence[Any]) -> Sequence[Leaf] | None:
        return None


class NoVariables(OneByOne):
    """Base of an adapter whose arrays are all replaced by a restore."""

    def variable(self, value: Any) -> Stateful | None:
        return None


class ContainersOnly(NoVariables):
    """Base of an adapter without leaves; subclasses define `node`."""

    def spec(self, value: Any) -> LeafSpec | None:
        return None

    def leaf(self, value: Any) -> Leaf | None:
        return None

    def load(self, like: Any, leaf: Leaf) -> Any:
        raise NotImplementedError
