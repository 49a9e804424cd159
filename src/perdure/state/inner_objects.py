"""Objects inside the states of others (`state_dict`), which only a target that has them can rebuild."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from perdure.state.adapter import Adapter, loaded_adapters
from perdure.state.adapter_choice import leaf_adapter, node_of
from perdure.state.containers import describe_container, describe_record
from perdure.state.leaf_errors import PathInErrors
from perdure.state.leaf_spec import Difference
from perdure.state.object_flatten import read_state
from perdure.state.paths import join_dotted, join_key, nearest
from perdure.state.stateful import ModuleValues, Stateful
from perdure.store.leaf import Leaf, containers_of
from perdure.text import counted

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
    lost = {
        path: entry.type
        for path, entry in containers_of(leaves).items()
        if entry.type is not None and entry.keys is None
        if path not in present and path not in objects
        if nearest(path, objects) is not None
    }
    first: dict[tuple[str, str], list[str]] = {}
    for path, kind in lost.items():
        first.setdefault((path.rpartition("/")[0], str(kind)), []).append(path)
    return [
        Difference(
            paths[0],
            reason=f"would be saved as a {kind} ({counted(len(paths), 'such value')}), of which the "
            f"target has none there, and only an object of that class can rebuild it. Let the "
            f"`state_dict` that returns it give plain values (tuples, lists, dicts, arrays), of which "
            f"`load_state_dict` makes the objects",
        )
        for (_, kind), paths in first.items()
    ]


def _objects_in(value: Any, path: str, adapters: Sequence[Adapter]) -> Iterator[str]:
    if isinstance(value, ModuleValues):
        for name, child in value.items():
            if type(child).__name__.startswith("Uninitialized"):
                continue  # a lazy parameter, which has a shape before the first save
            yield from _objects_in(child, join_dotted(path, name), adapters)
        return
    with PathInErrors(path):
        if isinstance(value, _PLAIN) or leaf_adapter(value, adapters) is not None:
            return
        described = describe_container(value) or describe_record(value)
        node = None if described else node_of(value, path, adapters, None)
    if described is not None:
        children: Any = described[1]
    else:
        yield path
        assert node is not None
        if isinstance(node, Stateful):
            yield from _objects_in(read_state(node, path), path, adapters)
            return
        children = node.children
    for key, child in children:
        if not isinstance(child, _PLAIN):
            yield from _objects_in(child, join_key(path, key), adapters)
