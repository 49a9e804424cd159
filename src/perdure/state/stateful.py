"""Objects that return their state and take one back in place (`state_dict`, `load_state_dict`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from perdure.state.containers import build_container, describe_container
from perdure.state.leaf_spec import Check, Difference, LeafSpec
from perdure.state.paths import join_key


class ModuleValues(dict[str, Any]):
    """The state of a torch module: values by dotted name, which become nested leaf paths."""


class Stateful:
    """An object with a state that is read and loaded as a whole.

    `load` is given the state that was stored, whatever the present state looks like, and `read` has to
    return that state afterwards. Invariant of `check`: it changes nothing, and its result holds no
    array.
    """

    arrays = "numpy"
    """The class of the object's arrays, unless the checkpoint names another one."""

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
        """The values that can be restored one by one, by path relative to the object.

        Each with its dtype and shape, or None if it takes any. None for an object whose state can only
        be loaded as a whole.
        """
        return None

    def part_values(self) -> Mapping[str, Any]:
        """The live values of `parts`, by the same paths."""
        return {}

    def sharded_values(self, stored: Mapping[str, LeafSpec]) -> Mapping[str, Any]:
        """The arrays that decide how stored leaves are sharded, by the path of the leaf.

        Args:
            stored: The stored leaves of the object. Paths are relative to the object.
        """
        return {}

    def misfits(self, state: Any) -> list[Difference]:
        """Why the object cannot take the `state` that was built for it, as far as that can be known
        before the load. Paths are relative to the object."""
        return []

    def depends_on(self) -> Iterable[Any]:
        """The objects that this state belongs to, such as the parameters of an optimizer."""
        return ()

    def may_add(self, path: str) -> bool:
        """Whether the object may have a leaf after `load` that the stored state lacks, such as a
        setting of a newer version. `path` is relative to the object."""
        return False

    def backup(self) -> Callable[[], object]:
        """Copy the present state; returns the function that loads it again.

        It also removes the attributes that the object did not have: a load that updates `__dict__` may
        have brought those of another class.
        """
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
    return build_container(entry, list(values), lambda _, part: copy_state(values[part]))
