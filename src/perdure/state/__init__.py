"""Live objects <-> trees of leaves. One short adapter per framework, loaded only when used."""

from perdure.state.builtin import Beside, Members
from perdure.state.iterator import is_positioned, position, reposition
from perdure.state.tree import differences, flatten, restore, snapshot, unflatten

__all__ = [
    "Beside",
    "Members",
    "differences",
    "flatten",
    "is_positioned",
    "position",
    "reposition",
    "restore",
    "snapshot",
    "unflatten",
]
