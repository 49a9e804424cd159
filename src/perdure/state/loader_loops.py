"""Loops over a `ResumableLoader` that its position does not describe."""

from __future__ import annotations

import gc
import itertools
import warnings
from types import FrameType
from typing import Any


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
