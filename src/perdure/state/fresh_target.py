"""What a run has made of the containers of its fresh target, so that a restore has it again.

A list that has grown, a deque, a set, a value where the target has None: a checkpoint describes these
as it does the state of an object, and a restore builds them as they were, whatever the target holds
there. Everything else has the structure of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from perdure.state.adapter_choice import leaf_adapter
from perdure.state.containers import array_class_name, describe_container, describe_record
from perdure.state.leaf_values import is_plain
from perdure.state.paths import join_key, nearest
from perdure.state.per_rank import current_rank_context
from perdure.state.walk import ANY_LENGTH, GROWING, Walk
from perdure.store.leaf import Leaves
from perdure.store.manifest import Container


class FreshTarget:
    """What the target of a program had at first: its numbers, NumPy arrays and None, and its sizes."""

    def __init__(self, walk: Walk | None = None) -> None:
        pairs = [] if walk is None else [*walk.pairs()]
        self._plain = {path for path, value in pairs if value is None or is_plain(value)}
        self._none = {path for path, value in pairs if value is None}
        self._sizes = {
            branch.path: len(branch.value)
            for branch in (walk.branches if walk else ())
            if type(branch.value) in (list, tuple)
            or (type(branch.value) is dict and not branch.value)
        }

        self._has_empty = 0 in self._sizes.values()

    def describe(self, walk: Walk, leaves: Leaves) -> None:
        """Add to `leaves` what a restore into the target could not know from the target."""
        containers: dict[str, Container] = {}
        for path, value in self._others(walk, leaves):
            if nearest(path, containers) is None and (found := _described(value, path, walk)):
                containers |= found
                containers[path] = msgspec.structs.replace(found[path], grown=True)
        for path in self._none & leaves.keys():
            if leaves[path].dtype[:3] != "py:" and path not in containers:
                containers[path] = Container("array", arrays=_class_of(walk.by_path[path]))
        owns = current_rank_context().owns
        for start, stop in walk.runs if self._plain else ():
            if is_plain(walk.values[start]):  # of one type, and nearly always very many
                continue
            for path, value in zip(walk.paths[start:stop], walk.values[start:stop], strict=True):
                if path in self._plain and value is not None and not owns(path):
                    containers.setdefault(path, Container("array", arrays=_class_of(value)))
        leaves.containers |= containers

    def _others(self, walk: Walk, leaves: Leaves) -> Iterator[tuple[str, Any]]:
        may_grow = {list, *ANY_LENGTH} & walk.kinds or self._none or self._has_empty
        for branch in walk.branches if may_grow else ():
            value, size = branch.value, self._sizes.get(branch.path)
            is_larger = type(value) in (list, dict) and size not in (None, len(value))
            was_none = type(value) in GROWING and branch.path in self._none
            if is_larger or was_none or type(value) in ANY_LENGTH:
                yield branch.path, value
        for path in self._sizes.keys() & leaves.keys():
            yield path, walk.by_path[path]


_NUMBER = Container("array")
"""A Python scalar; its entry is needed where the target has a container."""


def _described(value: Any, path: str, walk: Walk) -> dict[str, Container]:
    """The entries of a value and of all in it; empty if only its target could rebuild it."""
    if leaf_adapter(value, walk.adapters) is not None:
        return {path: Container("array", arrays=_class_of(value))}
    found = describe_container(value) or describe_record(value)
    if found is None:
        return {}
    entries = {path: found[0]}
    for key, child in found[1]:
        below = _described(child, join_key(path, key), walk)
        if not below:
            return {}
        entries |= {inside: entry for inside, entry in below.items() if entry != _NUMBER}
    return entries


def _class_of(value: Any) -> Any:
    return array_class_name(value) if hasattr(value, "dtype") else None
