"""What an adapter for a framework offers: how its values become leaves and nodes, and come back.

An adapter is consulted only when its framework is imported already: a value of that framework
cannot exist otherwise, and importing one to find out would cost seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from perdure.store.format import WEAK_PREFIX
from perdure.store.leaf import Leaf


class Spec(NamedTuple):
    """dtype name and shape of a leaf, known without reading its data.

    A weak type is no part of it: whether an array of JAX is weakly typed changes as a program runs,
    so the target does not decide it.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, leaf: Leaf) -> Spec:
        """The spec of stored bytes."""
        return cls(leaf.dtype.removeprefix(WEAK_PREFIX), leaf.shape)


class Node(NamedTuple):
    """An interior value: its children by name, and how to make it again from new children.

    A child with an empty name adds nothing to the path. `rebuild` may change the value in place
    and return it (a torch module), or return a new one (a tuple).
    """

    children: list[tuple[str, Any]]
    rebuild: Callable[[list[Any]], Any]


class Adapter(Protocol):
    """Each verb returns None for a value that is not this framework's."""

    def spec(self, value: Any) -> Spec | None:
        """dtype and shape of an array."""
        ...

    def leaf(self, value: Any) -> Leaf | None:
        """The bytes of an array, without a copy where that is possible."""
        ...

    def load(self, like: Any, leaf: Leaf) -> Any:
        """An array such as `like` (kind, device, sharding) with the bits of `leaf`."""
        ...

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
        """An interior value.

        `stored` is None while saving. While restoring it holds the checkpoint's leaves under this
        value, for objects such as optimizers that create their state only when they are first used.
        """
        ...


class ContainersOnly:
    """The verbs of an adapter whose values hold others and are no leaves: only `node` is its own."""

    def spec(self, value: Any) -> Spec | None:
        return None

    def leaf(self, value: Any) -> Leaf | None:
        return None

    def load(self, like: Any, leaf: Leaf) -> Any:
        raise NotImplementedError
