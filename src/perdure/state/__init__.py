"""Live objects <-> trees of leaves. One short adapter per framework, loaded only when used."""

from perdure.state.builtin import Beside
from perdure.state.iterator import is_positioned, position, reposition
from perdure.state.partial import part_filter, part_names, restore_part
from perdure.state.tree import differences, flatten, is_state, restore, snapshot, unflatten

__all__ = [
    "Beside",
    "differences",
    "flatten",
    "is_positioned",
    "is_state",
    "part_filter",
    "part_names",
    "position",
    "reposition",
    "restore",
    "restore_part",
    "snapshot",
    "unflatten",
]
