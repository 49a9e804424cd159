"""Every example exactly once per epoch, counted over all workers while the topology changes.

A part of `make proof-distribute`; `python proofs/data_rows.py` runs it alone. Every worker is a new
process, started for its part of the run: it makes its dataset, asks for the rows of its logical
replicas, and returns which examples they were. The batch size does not divide the length, and the
topology changes in the middle of epochs.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from report import Row, finish, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "data"))

from counting import TOPOLOGIES, Lazy, counted_by_worker, once

from perdure.data import ArrayDataset, Dataset, Prefetch, StreamDataset
from perdure.data import stream as stream_module
from perdure.errors import DataError

BATCH = 48
EXAMPLES = 1009  # a prime, so that nothing divides it
STEPS = 44  # two epochs of 22 steps; streams need 25 steps and are counted for one epoch
# 16 shards of different lengths, one of them empty; together 1009.
SHARDS = [63, 0, 71, 74, 60, 55, 70, 66, 59, 73, 68, 72, 61, 75, 70, 72]


def _arrays(_: str) -> Any:
    return ArrayDataset({"n": np.arange(EXAMPLES)}, BATCH)


def _mapped(folder: str) -> Any:
    path = Path(folder) / "numbers.npy"
    return ArrayDataset({"n": np.load(path, mmap_mode="r")}, BATCH)


def _prefetched(_: str) -> Any:
    return Prefetch(Dataset(Lazy(EXAMPLES), BATCH), ahead=3, threads=3)


def _grain(_: str) -> Any:
    import grain

    return Dataset(grain.MapDataset.source(Lazy(EXAMPLES)).seed(4).shuffle(), BATCH)


def _read(shard: int, epoch: int) -> Iterator[Any]:
    first = sum(SHARDS[:shard])
    order = np.random.default_rng((shard, epoch)).permutation(SHARDS[shard])
    return ({"n": first + place} for place in order)


def _streams(_: str) -> Any:
    return StreamDataset(_read, dict(enumerate(SHARDS)), BATCH)


# ---------------------------------------------------------------- controls, which must be counted wrong


class _Restarted(Dataset):
    """Counts steps from its own start, as an iterator without a saved position does."""

    first: int | None = None

    def indices(self, step: int) -> Any:
        self.first = step if self.first is None else self.first
        return super().indices(step - self.first)


class _SeededByWorkers(Dataset):
    """Seeded by the number of workers: right until that changes in the middle of an epoch."""


def _restarted(_: str) -> Any:
    return _Restarted(Lazy(EXAMPLES), BATCH)


def _seeded_by_workers(_: str) -> Any:
    return _SeededByWorkers(Lazy(EXAMPLES), BATCH)


def _streams_restarted(_: str) -> Any:
    def seek(shard: Any, epoch: int, example: int) -> None:
        if shard._position is None or shard._position[0] != epoch:
            shard._start(epoch, 0)
        shard._position = (epoch, example)

    if parent_process() is not None:  # only in a worker process
        stream_module._Shard._seek = seek  # pyright: ignore[reportAttributeAccessIssue]
    return _streams("")


# ---------------------------------------------------------------- workers


def worker(
    make: Callable[[str], Any], folder: str, topology: tuple[int, ...], index: int, steps: range
) -> dict[int, Counter[int]]:
    """The examples that one worker sees in its logical replicas, by epoch."""
    data = make(folder)
    if isinstance(data, _SeededByWorkers):
        data.seed = len(topology)
    return counted_by_worker(data, topology, index, steps)


def exact(make: Callable[[str], Any], parts: list[tuple[tuple[int, ...], range]]) -> bool:
    """Whether every finished epoch of a run in these parts holds each example exactly once."""
    seen: dict[int, Counter[int]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="perdure-data-") as folder,
        ProcessPoolExecutor(2, _context(), max_tasks_per_child=1) as pool,
    ):
        np.save(Path(folder) / "numbers.npy", np.arange(EXAMPLES))
        jobs = [
            pool.submit(worker, make, folder, topology, index, steps)
            for topology, steps in parts
            for index in range(len(topology))
        ]
        try:
            for job in jobs:
                for epoch, numbers in job.result().items():
                    seen.setdefault(epoch, Counter()).update(numbers)
        except DataError as error:
            print(f"       a worker refused: {error}")
            return False
        finished = (parts[-1][1].stop) // make(folder).steps_per_epoch
    return finished > 0 and once(seen, EXAMPLES, finished)


def _context() -> Any:
    """New processes forked from a server that has only done the imports."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["numpy", "perdure.data", "perdure.distribute.topology", "report", "counting"]
    )
    return context


def changing(order: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], range]]:
    """A run in which the topology changes every few steps, in the middle of epochs."""
    cuts = [STEPS * i // len(order) for i in range(len(order) + 1)]
    return [(t, range(a, b)) for t, a, b in zip(order, cuts, cuts[1:], strict=False)]


SOURCES = {
    "arrays": _arrays,
    "memory-mapped file": _mapped,
    "__len__ and __getitem__, prefetched": _prefetched,
    "Grain MapDataset": _grain,
    "16 streams of different lengths": _streams,
}
CONTROLS = {
    "iterators restarted": _restarted,
    "shuffle seeded by the number of workers": _seeded_by_workers,
    "streams restarted": _streams_restarted,
}


def rows() -> Iterator[Row]:
    """A row for each source, and one for the controls, which must all be counted wrong."""
    whole = [[(topology, range(STEPS))] for topology in TOPOLOGIES]
    orders = [TOPOLOGIES, TOPOLOGIES[::-1], [TOPOLOGIES[i * 3 % 7] for i in range(7)]]
    for name, make in SOURCES.items():
        what = f"each example once per epoch, {name}:"
        yield row(f"{what} 7 topologies", [exact(make, parts) for parts in whole])
        outcomes = [exact(make, changing(order)) for order in orders]
        yield row(f"{what} topology changed 6 times, mid-epoch", outcomes)
    wrong = [not exact(make, changing(orders[0])) for make in CONTROLS.values()]
    yield row(f"negative controls are counted wrong: {', '.join(CONTROLS)}", wrong)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    finish("data", rows())
