"""The state of an object with `state_dict` as leaves, with entries that describe its containers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.adapter import Adapter
from perdure.state.adapter_choice import node_of
from perdure.state.containers import (
    SORTED_DICT,
    array_class_name,
    describe_container,
    describe_record,
)
from perdure.state.leaf_errors import PathInErrors, add_path, duplicate_path, type_name
from perdure.state.paths import join_dotted, join_key
from perdure.state.stateful import ModuleValues, Stateful
from perdure.store.format import SCALAR_PREFIX
from perdure.store.leaf import Leaves
from perdure.store.manifest import Container

FlattenLive = Callable[[Any, str], None]
"""Adds the leaves of a live object at a path."""


class ObjectFlattener:
    """Adds the leaves and the container entries of one object's state to `leaves`.

    A state may contain values that are no plain containers (live objects). `flatten_live` adds them;
    without it they are left out. Their paths are in `live_paths` afterwards.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        leaves: Leaves,
        flatten_live: FlattenLive | None = None,
    ) -> None:
        self._adapters = adapters
        self._leaves = leaves
        self._flatten_live = flatten_live
        self._array_classes: dict[str, str] = {}
        self.live_paths: list[str] = []

    def flatten(self, stateful: Stateful, path: str, leave_out: Collection[str] = ()) -> None:
        """Add the state of the object at `path`, of a module without the values in `leave_out`."""
        self.add_state(stateful, path, read_state(stateful, path), leave_out)

    def add_state(
        self, stateful: Stateful, path: str, state: Any, leave_out: Collection[str] = ()
    ) -> None:
        """`flatten` of an object whose present state was read already."""
        try:
            if isinstance(state, ModuleValues):
                common_class = stateful.arrays
                for name, value in state.items():
                    value_path = join_dotted(path, name)
                    if value_path not in leave_out:
                        self._add(value, value_path, needs_entry=True)
            else:
                self._add(state, path, needs_entry=True)
                common_class = self._describe_arrays(path)
        except RecursionError:
            raise UnsupportedLeafError(
                f"{path}: the state of a {type_name(stateful.target)} contains itself, or is nested "
                f"too deeply."
            ) from None
        for array_path, array_class in self._array_classes.items():
            if array_class != common_class:
                self._leaves.containers[array_path] = Container("array", arrays=array_class)

    def _describe_arrays(self, path: str) -> str | None:
        """Set the most frequent class of arrays in the entry of the whole state, and return it."""
        entry = self._leaves.containers.get(path)
        if path in self._array_classes or entry is None or entry.type is not None:
            return None
        counts = Counter(self._array_classes.values()).most_common()
        common: Any = min((name for name, n in counts if n == counts[0][1]), default=None)
        self._leaves.containers[path] = msgspec.structs.replace(entry, arrays=common)
        return common

    def _add(self, value: Any, path: str, *, needs_entry: bool = False) -> None:
        # The training loop waits for this, as for `tree_flatten._add_leaves`.
        try:
            for adapter in self._adapters:
                if (leaf := adapter.leaf(value)) is not None:
                    if path in self._leaves:
                        raise duplicate_path(path)
                    self._leaves[path] = leaf
                    if leaf.dtype[:3] != SCALAR_PREFIX:
                        self._array_classes[path] = array_class_name(value)
                    return
            described = describe_container(value) or describe_record(value)
            if described is None:
                self._add_live(value, path)
                return
        except StateError as error:
            add_path(error, path)
            raise
        entry, children = described
        if needs_entry or not children or entry != SORTED_DICT:
            self._leaves.containers[path] = entry
        for key, child in children:
            self._add(child, join_key(path, key))

    def _add_live(self, value: Any, path: str) -> None:
        node_of(value, path, self._adapters, None)  # refuses what is no object of a framework
        self.live_paths.append(path)
        if self._flatten_live is None:
            return
        self._flatten_live(value, path)
        entry = self._leaves.containers.get(path) or Container("object")
        self._leaves.containers[path] = msgspec.structs.replace(entry, type=type_name(value))


def read_state(stateful: Stateful, path: str) -> Any:
    """The present state of an object; any exception becomes a `StateError` with the path."""
    with PathInErrors(path, f"a {type_name(stateful.target)} did not return its state"):
        return stateful.read()
