"""What every compared way to save and load is measured by: the state, the phases, the figures.

The state is that of a transformer of 17 million parameters with AdamW: 8 layers of 12 tensors, and two
moments of each, together 288 tensors and 200 MB of float32.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from store_probe import Ballast, fresh, sync_tree

TOUCHED_BYTES = 1 << 30
"""More than both processes allocate in a save or a load."""

WIDTH, LAYERS = 416, 8
SHAPES = {
    "norm1.weight": (WIDTH,),
    "norm1.bias": (WIDTH,),
    "qkv.weight": (3 * WIDTH, WIDTH),
    "qkv.bias": (3 * WIDTH,),
    "out.weight": (WIDTH, WIDTH),
    "out.bias": (WIDTH,),
    "norm2.weight": (WIDTH,),
    "norm2.bias": (WIDTH,),
    "up.weight": (4 * WIDTH, WIDTH),
    "up.bias": (4 * WIDTH,),
    "down.weight": (WIDTH, 4 * WIDTH),
    "down.bias": (WIDTH,),
}
"""The parameters of one layer."""

Figures = dict[str, list[float]]


def state_bytes() -> int:
    """Bytes of the parameters and both moments."""
    sizes = [shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in SHAPES.values()]
    return 3 * 4 * LAYERS * sum(sizes)


class Subject(Protocol):
    """One way to save and load, in one process of the group.

    Attributes:
        is_durable: Whether what `save` and `finish` have written survives a power loss.
    """

    is_durable: bool

    def change(self) -> None:
        """Make a step, which changes every tensor."""

    def save(self, step: int) -> None:
        """Until the training loop continues."""

    def finish(self, step: int) -> None:
        """Until the checkpoint is complete."""

    def renew(self) -> None:
        """Make the objects of a program that has just begun, and has loaded nothing."""

    def load(self, step: int) -> None:
        """Until the objects hold the checkpoint."""

    def digest(self) -> str:
        """A hash of all that this process holds."""
        ...

    def close(self) -> None:
        """Give back what it holds."""


def measure_each(
    make: Callable[[str, Path], Any],
    names: Sequence[str],
    path: Path,
    barrier: Callable[[], object],
    is_chief: bool,
    saves: int,
) -> dict[str, Figures]:
    """The figures of each subject, one after the other, each in a directory that is empty."""
    out: dict[str, Figures] = {}
    for name in names:
        if is_chief:
            fresh(path)
        barrier()
        subject = make(name, path)
        out[name] = measure(subject, path, barrier, is_chief, saves)
        subject.close()
        barrier()
    return out


def measure(
    subject: Subject, path: Path, barrier: Callable[[], object], is_chief: bool, saves: int
) -> Figures:
    """Seconds of the phases of `saves` saves and loads, and CPU seconds of this process in them.

    The first save is not counted, because it allocates memory that the others use again.
    """
    out: Figures = {
        name: [] for name in ("stall", "write", "unsynced", "write cpu", "load", "load cpu")
    }
    for step in range(1, saves + 2):
        subject.change()
        _begin(barrier, is_chief)
        cpu, start = time.process_time(), time.perf_counter()
        subject.save(step)
        stall = time.perf_counter() - start
        subject.finish(step)
        barrier()
        unsynced = time.perf_counter() - start
        if not subject.is_durable:
            if is_chief:
                sync_tree(path)
            barrier()
        if step > 1:
            out["stall"].append(stall)
            out["unsynced"].append(unsynced)
            out["write"].append(time.perf_counter() - start)
            out["write cpu"].append(time.process_time() - cpu)
    saved = subject.digest()
    for _ in range(saves):
        subject.renew()
        ctypes.CDLL(None).malloc_trim(0)  # a program that resumes has no freed memory to use again
        if is_chief:
            leave_cache(path)
        _begin(barrier, is_chief)
        cpu, start = time.process_time(), time.perf_counter()
        subject.load(saves + 1)
        barrier()
        out["load"].append(time.perf_counter() - start)
        out["load cpu"].append(time.process_time() - cpu)
        if subject.digest() != saved:
            raise RuntimeError("an undamaged checkpoint was loaded with other values")
    return out


def _begin(barrier: Callable[[], object], is_chief: bool) -> None:
    """Begin together, on a machine whose free memory no host has taken back."""
    gc.collect()
    barrier()
    if is_chief:
        Ballast(TOUCHED_BYTES).release()
    barrier()


def leave_cache(path: Path) -> None:
    """Make the files below `path` leave the page cache, and no file of other programs."""
    sync_tree(path)
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def report(figures: dict[str, Any]) -> None:
    print("\n" + json.dumps(figures), flush=True)
