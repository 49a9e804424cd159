"""Live objects <-> trees of leaves. One short adapter per framework, loaded only when used."""

from perdure.state.builtin import Beside, Members
from perdure.state.iterator import is_positioned, position, reposition
from perdure.state.partial import part_filter, part_names, restore_part
from perdure.state.template import Template, differences, listed, template_of
from perdure.state.tree import flatten, is_state, restore, snapshot, unflatten

__all__ = [
    "Beside",
    "Members",
    "Template",
    "differences",
    "flatten",
    "is_positioned",
    "is_state",
    "listed",
    "part_filter",
    "part_names",
    "position",
    "reposition",
    "restore",
    "restore_part",
    "snapshot",
    "template_of",
    "unflatten",
]
