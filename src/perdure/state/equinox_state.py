"""The adapter of Equinox: modules, and the `State` of stateful layers.

Functions, static fields and the positions of tied weights are code: a restored module keeps the ones
of the target. Invariant: a partitioned module has the same leaf paths as the whole one.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

import equinox as eqx
import jax

from perdure.errors import UnsupportedLeafError
from perdure.state.adapter import Adapter, Node, Structure
from perdure.state.jax_state import key_entry_text
from perdure.state.leaf_spec import LeafSpec
from perdure.state.paths import insert, join_key

_WITH_AUXILIARY = (dict, OrderedDict, defaultdict, jax.tree_util.Partial)
# The placeholder that `eqx.nn.Shared` puts in place of a tied weight.
_TIED = getattr(sys.modules[eqx.nn.Shared.__module__], "SharedNode", None)


class EquinoxState(Adapter):
    """Turns modules and `State`s into nodes. The adapter of JAX takes their arrays."""

    def node(self, value: Any, stored: Mapping[str, LeafSpec] | None) -> Node | None:
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
            leaves, treedef = jax.tree_util.tree_flatten_with_path(
                value, is_leaf=lambda part: part is None or isinstance(part, eqx.nn.State)
            )
            code: dict[str, Any] = {"": Structure(_kinds(treedef))}
            nested: dict[str, Any] = {}
            keys_by_position: dict[int, tuple[str, ...]] = {}
            taken = set[tuple[str, ...]]()
            for position, (path, leaf) in enumerate(leaves):
                keys = tuple(key_entry_text(entry) for entry in path)
                if callable(leaf) or leaf is None or type(leaf) is _TIED:
                    inside = reduce(join_key, keys, "")
                    code[inside] = leaf if callable(leaf) else Structure(type(leaf))
                else:
                    if keys in taken:
                        raise UnsupportedLeafError(
                            f"a mapping in this module has several keys that are {keys[-1]!r} in a "
                            f"leaf path, such as a number and its text. Rename all but one of them."
                        )
                    insert(nested, keys, leaf)
                    taken |= {keys[: length + 1] for length in range(len(keys))}
                    keys_by_position[position] = keys

            def rebuild(new: list[Any]) -> Any:
                values = [leaf for _, leaf in leaves]
                for position, keys in keys_by_position.items():
                    values[position] = reduce(getitem, keys, new[0])
                return treedef.unflatten(values)

            return Node([("", nested)], rebuild, code=code)
        return None


def _kinds(treedef: Any) -> Any:
    """The classes of the modules and containers in a module, with the keys of dicts and the functions
    of `Partial`s. What else JAX keeps of a node are its static fields, which may change."""
    kind, auxiliary = treedef.node_data() or (None, None)
    return kind, auxiliary if kind in _WITH_AUXILIARY else None, *map(_kinds, treedef.children())


def _marker(marker: object, position: int) -> str:
    """`layers.0.state_index` for the key path that Equinox writes as `.layers[0].state_index`."""
    return ".".join(re.findall(r"\w+", marker)) if isinstance(marker, str) else str(position)


ADAPTER = EquinoxState()
