"""The end of an epoch of a `ResumableLoader`, in one form whether a save is in the last iteration
or after.

Both positions, (epoch, batches) and (epoch + 1, 0), belong to one step, whose state may only be
saved again with the same bits. So the first is stored, and a process leaf says that the loop has
ended.
"""

from __future__ import annotations

import gc
import itertools
import re
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any

import msgspec

from perdure.errors import CorruptionError
from perdure.state.extra_members import ExtraMember, Saving, json_leaf
from perdure.state.leaf_values import plain_value, scalar_leaf
from perdure.state.paths import join_key
from perdure.store.format import EPOCH_ENDS
from perdure.store.leaf import Leaf, Leaves
from perdure.store.manifest import LeafEntry

_PATH = re.compile(rf"process/[0-9]+/{EPOCH_ENDS}")
_ORDER = re.compile(r"([1-9][0-9]{0,18}) ([0-9a-f]*)")
_NAMES = {"epoch", "batch", "step", "seed", "examples", "batches_per_epoch"}
_decoder = msgspec.json.Decoder(list[str])


class EpochEnds(ExtraMember):
    """Put back by `load_epoch_ends`, before the state is restored."""

    def take(self, saving: Saving) -> dict[str, Leaf]:
        """Give positions after an epoch the form of its last batch; the leaf names them."""
        leaves, ended = saving.leaves, list[str]()
        # A million leaves are looked at in every save: the cheapest test first.
        for path in [path for path in leaves if path[-5:] == "order"]:
            place, _, last = path.rpartition("/")
            found = {name: leaf for name in _NAMES if (leaf := leaves.get(join_key(place, name)))}
            is_position = last == "order" and len(found) == len(_NAMES)
            if not is_position or {leaf.dtype for leaf in found.values()} != {"py:int"}:
                continue
            epoch, batch = plain_value(found["epoch"]), plain_value(found["batch"])
            parts = _ORDER.fullmatch(leaves[path].text) if leaves[path].dtype == "py:str" else None
            if parts is None or batch or not epoch:
                continue
            _put(leaves, place, epoch - 1, int(parts[1]), parts[2])
            ended.append(place)
        if not ended:
            return {}
        return {f"process/{saving.process}/{EPOCH_ENDS}": json_leaf(sorted(ended))}


def ended_order(batch: int, order: str) -> str:
    """The `order` of a position after an epoch of which `batch` batches with `order` were used."""
    return f"{batch} {order}" if batch else ""


def load_epoch_ends(leaves: Leaves, process_leaves: Iterable[LeafEntry], where: str) -> None:
    """Give the positions that `EpochEnds` has named their form after the epoch again."""
    places: set[str] = set()
    for entry in process_leaves:
        if _PATH.fullmatch(entry.path):
            try:
                places.update(_decoder.decode(entry.text or ""))
            except ValueError as error:  # of msgspec
                raise CorruptionError(f"{where}: {entry.path} cannot be read: {error}.") from error
    for place in places:
        names = [join_key(place, name) for name in ("epoch", "batch", "order")]
        if all(name in leaves for name in names):  # else only others were read
            epoch, batch, order = (plain_value(leaves[name]) for name in names)
            _put(leaves, place, epoch + 1, 0, ended_order(batch, order))


def _put(leaves: Leaves, place: str, *values: Any) -> None:
    for name, value in zip(("epoch", "batch", "order"), values, strict=True):
        leaves[join_key(place, name)] = scalar_leaf(value)


# ---------------------------------------------------------------- loops


def is_lightning(frame: FrameType) -> bool:
    """Whether a frame is that of Lightning's Trainer, which loads the states of its loaders."""
    return frame.f_globals.get("__name__", "").endswith("pytorch.utilities.combined_loader")


def warn_of_empty_loop(step: int, epoch: int) -> None:
    """A loop over `islice` has left `epoch` at its last batch, with a checkpoint from within."""
    warnings.warn(
        f"step {step}: the state of this ResumableLoader was saved inside a loop that was "
        f"left at the last batch of epoch {epoch}, and the program goes on with the next "
        f"epoch. A checkpoint of that step resumes with the end of that epoch: its first loop is "
        f"empty. If the loop is one of a number of batches (`itertools.islice`, `break`) and not "
        f"of an epoch, save after that loop.",
        RuntimeWarning,
        stacklevel=3,
    )


def warn_of_cycle(batches: Any) -> None:
    """Warn if an `itertools.cycle` has received all of `batches`, the iterator of a loader.

    It takes some milliseconds, because all objects of the process are searched.
    """
    if any(type(referrer) is itertools.cycle for referrer in gc.get_referrers(batches)):
        warnings.warn(
            "itertools.cycle keeps the batches of its first pass over this ResumableLoader and gives "
            "them again. The position does not count those, so that a resumed run gets other "
            "batches. Iterate the loader again instead, in a generator: "
            "`while True: yield from loader`.",
            RuntimeWarning,
            stacklevel=3,
        )
