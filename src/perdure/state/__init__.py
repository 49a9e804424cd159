"""Live objects as trees of leaves, and back. Each framework has one adapter, loaded only when used."""

from perdure.state.builtin import AttributeState, StateWithExtras
from perdure.state.iterator import PositionedIterator, is_positioned
from perdure.state.leaf_spec import format_differences
from perdure.state.snapshots import flatten, is_state, snapshot, unflatten
from perdure.state.tree_restore import restore
from perdure.state.walk import Template, differences, template_of

__all__ = [
    "AttributeState",
    "PositionedIterator",
    "StateWithExtras",
    "Template",
    "differences",
    "flatten",
    "format_differences",
    "is_positioned",
    "is_state",
    "restore",
    "snapshot",
    "template_of",
    "unflatten",
]
