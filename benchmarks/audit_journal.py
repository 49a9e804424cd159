"""What the journal costs: a digest at every step beside the step, and a search in long journals.

    audit_journal.py ENGINE MODEL BATCH REPLICAS BLOCKS STEPS

As a program, it trains and answers with one line of JSON: for each block of steps, the milliseconds of
a bare step, of a recorded one, and of what the calls of the journal took of that. Blocks of bare and of
recorded steps alternate. A recorded step has digests of the state, of the batch and, on PyTorch, of the
total of all replicas.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from distribute_case import data
from store_probe import spread
from table import Row, compared, row

from perdure import CheckpointManager
from perdure.distribute import PerReplica
from perdure.look.journal_bisect import bisect_runs
from perdure.store import LocalStorage
from perdure.store.log import encode_line, read_log
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import LOG, LOG_FILE

CASES = (("cnn", 128, "the tutorial's network"), ("transformer", 32, "a small transformer"))
REPLICAS = 8
WARM = 6
LINES = 1_000_000
PARTED = 700_001


class TimedJournal:
    """The journal of a manager, and the seconds that its calls have taken."""

    def __init__(self, journal: Any, wait: Callable[[Any], Any]) -> None:
        self._journal = journal
        self._wait = wait
        self.seconds = 0.0

    def wants(self, step: int) -> bool:
        return self._journal.wants(step)

    def __getattr__(self, name: str) -> Callable[..., None]:
        call = getattr(self._journal, name)

        def timed(*args: Any) -> None:
            self._wait(args)  # for JAX, which is still computing them
            start = time.perf_counter()
            call(*args)
            self.seconds += time.perf_counter() - start

        return timed


class Training:
    """A state in training, whose steps may be recorded."""

    def __init__(self, engine: str, model: str, batch: int, replicas: int, journal: Any) -> None:
        cases: Any = importlib.import_module(f"distribute_{engine}")
        strategy = cases.MirroredStrategy(1, replicas)
        self._state, grad, update = (
            cases._functions(model)
            if engine == "jax"
            else (cases._state(model), cases.grad, cases.update)
        )
        shares = zip(*(np.split(part, replicas) for part in data(model, batch)), strict=True)
        self._shares, self._replicas = tuple(shares), strategy.local_replicas
        wait = cases.jax.block_until_ready if engine == "jax" else lambda args: args
        self._journal = TimedJournal(journal, wait)
        self._bare = strategy.step(grad, update)
        self._recorded = strategy.step(grad, update, journal=self._journal)
        self._number = 0

    def steps(self, count: int, *, recorded: bool) -> tuple[float, float]:
        """Milliseconds of a step, and what the journal took of them."""
        train_step = self._recorded if recorded else self._bare
        self._journal.seconds = 0.0
        start = time.perf_counter()
        for _ in range(count):
            share = PerReplica(self._shares, self._replicas, self._number)
            self._state, loss = train_step(self._state, share)
            loss = float(loss)  # waits for the step
            self._number += 1
            if recorded:
                self._journal.record(self._number, self._state, None, {"loss": loss})
        whole = time.perf_counter() - start
        return 1e3 * whole / count, 1e3 * self._journal.seconds / count


def measure(engine: str, model: str, *numbers: str) -> list[tuple[float, float, float]]:
    batch, replicas, blocks, steps = map(int, numbers)
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as where:
        with CheckpointManager(where) as manager:
            training = Training(engine, model, batch, replicas, manager.journal)
            for recorded in (False, True):
                training.steps(WARM, recorded=recorded)
            found = []
            for _ in range(blocks):
                bare, _ = training.steps(steps, recorded=False)
                found.append((bare, *training.steps(steps, recorded=True)))
        return found


def journal_rows(blocks: int, steps: int) -> Iterator[Row]:
    """A recorded step beside the bare one, and the interval at which the journal costs 1%."""
    for engine in ("jax", "torch"):
        for model, batch, name in CASES:
            numbers = map(str, (batch, REPLICAS, blocks, steps))
            ended = subprocess.run(
                [sys.executable, __file__, engine, model, *numbers],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(ended.stdout.splitlines()[-1])
            bare = statistics.median(bare for bare, _, _ in found)
            added = [100 * taken / (whole - taken) for _, whole, taken in found]
            percent = statistics.median(added)
            text = f"journal at every step, {engine}, {name}"
            against = f"bare step, {bare:.1f} ms"
            figure = row(f"{text}: calls of the journal", percent, "%", spread(added))
            yield compared(figure, against, 1.0, most=1.0)
            ratios = [whole / bare for bare, whole, _ in found]
            middle = statistics.median(ratios)
            yield row(
                f"{text}: recorded step", middle, "x", spread(ratios), against=against, ratio=middle
            )
            yield row(f"{text}: 1% at journal_every=", math.ceil(percent), "steps")


def written_journal(where: Path, same: Path | None = None) -> None:
    """A run with a journal of `LINES` steps, which parts from that of `same` at `PARTED`."""
    with CheckpointManager(where) as manager:
        manager.journal.record(1, {"w": np.zeros(1)})  # makes a run directory
    *_, last = read_log(LocalStorage(where), LOG)
    previous = last.hash
    with open(where / LOG_FILE, "ab") as file:
        for step in range(2, LINES + 1):
            state = "f" if same is not None and step >= PARTED else "0"
            entry = JournalEntry(
                step=step,
                state=f"{state}{step:031x}",
                batch=f"{step:032x}",
                metrics={"loss": 1 / step},
                attempt=1,
                topology={"host": "a", "processes": 1},
            )
            line, previous = encode_line(entry, previous)
            file.write(line)


def bisect_rows(rounds: int) -> Iterator[Row]:
    """The first step at which two journals of a million lines part."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as where:
        one, two = Path(where, "one"), Path(where, "two")
        written_journal(one)
        written_journal(two, one)
        seconds: dict[str, list[float]] = {"bisect_runs": [], "perdure bisect": []}
        for _ in range(rounds):
            start = time.perf_counter()
            assert bisect_runs(one, two).step == PARTED
            seconds["bisect_runs"].append(time.perf_counter() - start)
            start = time.perf_counter()
            command = shutil.which("perdure", path=os.path.dirname(sys.executable))
            assert command, "the command line is not installed beside this Python"
            ended = subprocess.run([command, "bisect", one, two], capture_output=True, check=False)
            assert ended.returncode == 1, ended
            seconds["perdure bisect"].append(time.perf_counter() - start)
        size = (one / LOG_FILE).stat().st_size / 2**20
        for name, series in seconds.items():
            text = f"{name}: two journals of {LINES:,} lines, {size:.0f} MiB each"
            figure = row(text, statistics.median(series), "s", spread(series))
            yield compared(figure, "", 1.0, most=1.0)


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
