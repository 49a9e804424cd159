"""Objects inside the states of others (`state_dict`), which only a target that has them can rebuild."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from perdure.state.adapter import Adapter, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.containers import describe_container
from perdure.state.leaf_spec import Difference
from perdure.state.object_flatten import read_state
from perdure.state.paths import join_dotted, join_key, nearest
from perdure.state.stateful import ModuleValues, Stateful
from perdure.store.leaf import Leaf, containers_of

_PLAIN = (type(None), bool, int, float, str, bytes)


def inner_objects(objects: Mapping[str, Stateful]) -> set[str]:
    """The paths of the values in the states of objects that are neither leaves nor plain containers.

    Raises:
        StateError: An object does not return its state.
    """
    adapters = loaded_adapters()
    return {
        inner
        for path, value in objects.items()
        for inner in _objects_in(read_state(value, path), path, adapters)
    }


def lost_objects(
    leaves: Mapping[str, Leaf], objects: Collection[str], present: Collection[str]
) -> list[Difference]:
    """The objects in the leaves that a target could not rebuild.

    Args:
        leaves: What would be saved.
        objects: The paths of the objects with `load_state_dict` in the target.
        present: Their `inner_objects`.
    """
    return [
        Difference(
            path,
            reason=f"would be saved as a {entry.type}, of which the target has none there, and only an "
            f"object of that class can rebuild it. Let the `state_dict` that returns it give plain "
            f"values (tuples, lists, dicts, arrays), of which `load_state_dict` makes the objects",
        )
        for path, entry in containers_of(leaves).items()
        if entry.type is not None and path not in present and path not in objects
        if nearest(path, objects) is not None
    ]


def _objects_in(value: Any, path: str, adapters: Sequence[Adapter]) -> Iterator[str]:
    if isinstance(value, ModuleValues):
        for name, child in value.items():
            yield from _objects_in(child, join_dotted(path, name), adapters)
        return
    if isinstance(value, _PLAIN) or leaf_adapter(value, adapters) is not None:
        return
    described = describe_container(value)
    if described is not None:
        children: Any = described[1]
    else:
        yield path
        node = node_of(value, path, adapters, None)
        if isinstance(node, Stateful):
            yield from _objects_in(read_state(node, path), path, adapters)
            return
        children = node.children
    for key, child in children:
        if not isinstance(child, _PLAIN):
            yield from _objects_in(child, join_key(path, key), adapters)
