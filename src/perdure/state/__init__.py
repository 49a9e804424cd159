"""Live objects <-> trees of leaves. One short adapter per framework, loaded only when used."""

from perdure.state.builtin import Beside, Members
from perdure.state.iterator import is_positioned, position, reposition
from perdure.state.template import Template, differences, listed, template_of
from perdure.state.tree import flatten, restore, snapshot, unflatten

__all__ = [
    "Beside",
    "Members",
    "Template",
    "differences",
    "flatten",
    "is_positioned",
    "listed",
    "position",
    "reposition",
    "restore",
    "snapshot",
    "template_of",
    "unflatten",
]
