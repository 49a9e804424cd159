"""Equinox: modules with functions among their leaves, and the `State` of stateful layers.

The state of a module is its arrays, numbers and strings. Invariant: a function (an activation in a list
of layers), a static field and the place of a tied weight (`eqx.nn.Shared`) belong to the code: they are
no leaves, and a restored module has those of the target. A module that was partitioned
(`eqx.partition`) has the same leaf paths as the whole one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import ContainersOnly, Node, Spec
from perdure.state.jax_state import key_name

# What stands where `eqx.nn.Shared` took a tied weight out.
_TIED = getattr(sys.modules[eqx.nn.Shared.__module__], "SharedNode", None)


class EquinoxState(ContainersOnly):
    """See `perdure.state.adapter.Adapter`. Arrays inside are JAX's and left to its adapter."""

    def node(self, value: Any, stored: Mapping[str, Spec] | None) -> Node | None:
        if isinstance(value, eqx.nn.State):
            children, treedef = jax.tree.flatten(value, is_leaf=lambda part: part is not value)
            _, markers = value.tree_flatten()
            return Node(
                [
                    (_marker(marker, i), child)
                    for i, (marker, child) in enumerate(zip(markers, children, strict=True))
                ],
                treedef.unflatten,
            )
        if isinstance(value, eqx.Module):
            leaves, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_state)
            nested: dict[str, Any] = {}
            places = []
            for position, (path, leaf) in enumerate(leaves):
                if not callable(leaf) and type(leaf) is not _TIED:
                    names = [key_name(entry) for entry in path]
                    _put(nested, names, leaf)
                    places.append((position, names))

            def rebuild(new: list[Any]) -> Any:
                values = [leaf for _, leaf in leaves]
                for position, path in places:
                    values[position] = _get(new[0], path)
                return treedef.unflatten(values)

            return Node([("", nested)], rebuild)
        return None


def _is_state(value: Any) -> bool:
    return isinstance(value, eqx.nn.State)


def _marker(marker: object, position: int) -> str:
    """`layers.0.state_index` of the key path that Equinox writes as `.layers[0].state_index`."""
    return ".".join(re.findall(r"\w+", marker)) if isinstance(marker, str) else str(position)


def _put(root: dict[str, Any], path: list[str], leaf: Any) -> None:
    *parents, last = path
    for part in parents:
        root = root.setdefault(part, {})
    if last in root:
        raise UnsupportedLeafError(
            f"a mapping in this module has several keys that are {last!r} in a leaf path, such as a "
            f"number and its text. Rename all but one of them."
        )
    root[last] = leaf


def _get(root: Any, path: list[str]) -> Any:
    for part in path:
        root = root[part]
    return root


ADAPTER = EquinoxState()
