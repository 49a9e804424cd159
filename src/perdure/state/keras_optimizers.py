"""Warns about compiled models of Keras whose optimizer is not in the state, though it trains them.

A `Checkpoint` brings the optimizer of a member along (`Checkpoint.implied_members`); a dict, a list or
an object has only what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np

from perdure.errors import warn_caller
from perdure.state.extra_members import ExtraMember, Saving
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf

known_left_out: WeakSet[Any] = WeakSet()
"""Optimizers that were warned about, or that are left out because the program asked for that."""


class LeftOutOptimizers(ExtraMember):
    """Stores and refuses nothing. The first save after such an optimizer has made a step warns once."""

    def __init__(self) -> None:
        self._first: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def observe(self, walk: Walk) -> None:
        self._moved(walk)

    def capture(self, saving: Saving) -> dict[str, Leaf]:
        for path, optimizer in self._moved(saving.walk):
            known_left_out.add(optimizer)
            if saving.process == 0:
                warn_caller(_warning(path))
        return {}

    def _moved(self, walk: Walk) -> list[tuple[str, Any]]:
        """The optimizers that have made a step since the first look, with the paths of their models."""
        moved: list[tuple[str, Any]] = []
        for path, optimizer in _left_out(walk):
            now = int(np.asarray(keras.ops.convert_to_numpy(optimizer.iterations.value)))
            if self._first.setdefault(optimizer, now) != now:
                moved.append((path, optimizer))
        return moved


def _left_out(walk: Walk) -> Iterator[tuple[str, Any]]:
    """The path of each compiled model whose optimizer is no member, and the optimizer."""
    if not any(issubclass(kind, keras.Model) for kind in walk.kinds):
        return
    saved = {id(branch.value) for branch in walk.branches}
    for branch in walk.branches:
        if not isinstance(branch.value, keras.Model):
            continue
        optimizer = getattr(branch.value, "optimizer", None)
        if not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer in known_left_out:
            continue
        # Its variables may be members, too.
        if saved.isdisjoint(map(id, [optimizer, *optimizer.variables])):
            yield branch.path, optimizer


def _warning(path: str) -> str:
    return (
        f"{path or '(the state itself)'}: expected the optimizer of this compiled model in the state, "
        f"found the model alone, so that a resumed run would begin with a new optimizer. Save a "
        f"perdure.Checkpoint(model=model), which has both, or make the optimizer a member of its own "
        f"({{'model': model, 'optimizer': model.optimizer}}), built before the restore by "
        f"`optimizer.build(model.trainable_variables)`."
    )
