"""Live objects <-> trees of leaves. One short adapter per framework, loaded only when used."""

from perdure.state.tree import differences, flatten, restore, snapshot, unflatten

__all__ = ["differences", "flatten", "restore", "snapshot", "unflatten"]
