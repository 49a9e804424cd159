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

    def describe(self) -> str:
        """`float32[3,4]`, or `int` for a scalar."""
        return Leaf(self.dtype, self.shape, memoryview(b"")).describe().strip()


class Node(NamedTuple):
    """An interior value: its children by name, and how to make it again from new children.

    A child with an empty name adds nothing to the path. `rebuild` returns a new value (a tuple), or
    with `in_place` changes the value and cannot fail once its leaves fit (a Keras layer). What is
    changed in place is changed last, after everything has been compared and built.
    """

    children: list[tuple[str, Any]]
    rebuild: Callable[[list[Any]], Any]
    in_place: bool = False


class Difference(NamedTuple):
    """A path at which a target and a checkpoint differ: what each of them has there, if anything.

    `reason` is set for a difference that is not one of structure, dtype or shape.
    """

    path: str
    wanted: str | None = None
    found: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        path = self.path or "(the state itself)"
        if self.reason:
            return f"{path}: {self.reason}"
        if self.found is None:
            return f"{path}: expected {self.wanted}, the checkpoint has no such leaf"
        if self.wanted is None:
            return f"{path}: the checkpoint has {self.found}, the target no such leaf"
        return f"{path}: expected {self.wanted}, found {self.found}"


Check = Callable[[Mapping[str, Leaf]], list[Difference]]
"""The leaves below an object, by their paths from there -> what the object cannot take."""


class Stateful:
    """An object that returns its state and takes one back in place (`load_state_dict`).

    It is given the state that was stored, whatever its own state looks like, and afterwards has to
    return that state. Invariant of `check`: it changes nothing, and its result refers to no array.
    """

    arrays = "numpy"
    """The class of the object's arrays if the checkpoint does not name another one."""

    can_fail = True
    """Whether `load` may fail although `check` found nothing. If so, `backup` is called before it."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def read(self) -> Any:
        """The present state."""
        return self.target.state_dict()

    def load(self, state: Any) -> object:
        """Take a state. It belongs to the object from here on."""
        return self.target.load_state_dict(state)

    def check(self) -> Check:
        """What finds the leaves that the object cannot take."""
        return lambda _: []

    def adds(self, path: str) -> bool:
        """Whether the object may have a leaf after the load that it was not given, such as a setting
        that came with a newer version. `path` begins at the object."""
        return False

    def backup(self) -> Callable[[], object]:
        """Keep the present state; returns the function that puts it back."""
        from perdure.state.objects import copied

        before = copied(self.read())
        return lambda: self.load(before)


class Names(dict[str, Any]):
    """The state of a torch module: values by dotted name, which become nested leaf paths."""


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

    def variable(self, value: Any) -> Stateful | None:
        """For a leaf: the array as an object that keeps its identity and is changed in place, because
        others refer to it. None for an array that a restore makes anew."""
        ...

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | Stateful | None:
        """An interior value.

        `stored` is None while saving. While restoring it holds the checkpoint's leaves under this
        value, for values whose structure follows what was stored.
        """
        ...


class NoVariables:
    """The verb of an adapter whose arrays are all made anew by a restore."""

    def variable(self, value: Any) -> Stateful | None:
        return None


class ContainersOnly(NoVariables):
    """The verbs of an adapter whose values hold others and are no leaves: only `node` is its own."""

    def spec(self, value: Any) -> Spec | None:
        return None

    def leaf(self, value: Any) -> Leaf | None:
        return None

    def load(self, like: Any, leaf: Leaf) -> Any:
        raise NotImplementedError
