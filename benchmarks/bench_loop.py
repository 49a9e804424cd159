"""The time that the Trainer adds to a bare compiled loop, and the cost of a point in an event file.

    make bench-loop          one table, and the same as JSON in build/bench-loop.json

The bare loop runs the same compiled step on the same batches, in blocks between the blocks of the
Trainer, in one run: a hook stops one clock and starts the other. Figures are medians over the
blocks; `spread` is their quartiles. Two minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "8")

import jax
import jax.numpy as jnp
import loop_donated
import loop_keras
import numpy as np
from table import Row, compared, finish, installed, row

from perdure import RunConfig, Trainer
from perdure.train import Hook, OutputConfig

TARGET_S = 2e-3
STATE_BYTES = 5_000_000
LEAVES = 12


class BlockTimer(Hook):
    """Times blocks of `block` steps of the run, and as many bare steps after each block.

    Blocks begin at `offset`, so that a save after a multiple of the block falls into a block.
    """

    def __init__(self, bare: Any, block: int, offset: int) -> None:
        self._bare = bare
        self._block, self._offset = block, offset
        self._mark: float | None = None
        self.own: list[float] = []
        self.bare: list[float] = []

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        if trainer.step % self._block != self._offset:
            return
        jax.block_until_ready(trainer.state)
        now = time.perf_counter()
        if self._mark is not None:
            self.own.append((now - self._mark) / self._block)
            start = time.perf_counter()
            jax.block_until_ready(self._bare(trainer.state, trainer.step, self._block))
            self.bare.append((time.perf_counter() - start) / self._block)
        self._mark = time.perf_counter()


def compiled_step() -> tuple[Any, Any]:
    """A state of 5 MB, and a step on it that takes about 2 ms here."""
    size = STATE_BYTES // 4 // LEAVES
    state = {f"w{n}": jnp.full((size,), 1.0 + n, jnp.float32) for n in range(LEAVES)}
    state["a"] = jnp.eye(192, dtype=jnp.float32)

    def make(turns: int) -> Any:
        @jax.jit
        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            a = jax.lax.fori_loop(0, turns, lambda _, x: x @ state["a"] * 0.5 + batch, state["a"])
            new = {name: w * 0.999 + 0.001 for name, w in state.items()}
            new["a"] = state["a"]
            return new, {"loss": a.mean()}

        return step

    def seconds(step: Any) -> float:
        held, batch = state, batches(0)
        for _ in range(20):
            held, _ = step(held, batch)
        jax.block_until_ready(held)
        start = time.perf_counter()
        for _ in range(100):
            held, _ = step(held, batch)
        jax.block_until_ready(held)
        return (time.perf_counter() - start) / 100

    few, many = seconds(make(1)), seconds(make(41))
    return state, make(max(1, round((TARGET_S - few) / ((many - few) / 40))))


def batches(step: int) -> Any:
    return np.float32(step % 7)


def loop_case(state: Any, step: Any, blocks: int, block: int, save: int | None) -> BlockTimer:
    """One run of the Trainer with bare blocks in it."""

    def bare(held: Any, start: int, count: int) -> Any:
        for number in range(start, start + count):
            held, _ = step(held, batches(number))
        return held

    turns = BlockTimer(bare, block, block // 4)
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as where:
        saves: dict[str, Any] = (
            {"save_checkpoints_secs": 3600} if save is None else {"save_checkpoints_steps": save}
        )
        output = OutputConfig(progress="lines", console=io.StringIO())
        config = RunConfig(where, **saves, output=output)
        Trainer(step, state, batches, config, [turns]).train(block * (blocks + 1) + block // 4)
    return turns


def figure(what: str, values: list[float], unit: str, against: str, most: float) -> Row:
    """A row with the median and the quartiles of the blocks, which may be at most `most`."""
    quarter = statistics.quantiles(values, n=4)
    spread = f"{quarter[0]:.3g} .. {quarter[2]:.3g}, {len(values)} blocks"
    value = statistics.median(values)
    return compared(row(what, value, unit, spread), against, most, most=1.0)


def overheads(turns: BlockTimer) -> list[float]:
    """Seconds per step of each block, less the mean of the bare blocks around it."""
    around = [turns.bare[0], *turns.bare]
    return [block - (a + b) / 2 for block, a, b in zip(turns.own, around, turns.bare, strict=False)]


def rows(scale: float) -> Iterator[Row]:
    nothing = loop_case({"a": np.zeros(4)}, lambda s, b: (s, b), round(40 * scale), 2000, None)
    added = [1e6 * s for s in overheads(nothing)]
    yield figure("Trainer, empty step: added", added, "us", "bare loop", 25)
    state, step = compiled_step()
    quiet = loop_case(state, step, round(60 * scale), 200, None)
    base = statistics.median(quiet.bare)
    bare = f"bare loop, {base * 1e3:.2f} ms a step"
    added = overheads(quiet)
    yield figure("Trainer, 2 ms step: added", [1e6 * s for s in added], "us", bare, 25)
    yield figure("Trainer, 2 ms step: added", [100 * s / base for s in added], "%", bare, 1)
    saving = loop_case(state, step, round(60 * scale), 200, 50)
    base = statistics.median(saving.bare)
    bare = f"bare loop, {base * 1e3:.2f} ms a step"
    added = [100 * s / base for s in overheads(saving)]
    yield figure("with a save of 5 MB every 50 steps: added", added, "%", bare, 3)
    if installed(("orbax.checkpoint",)):
        times = loop_donated.added(max(3, round(7 * scale)))
        most = statistics.median(times["Orbax"])
        text = "a save of 200 MB that the next step is given: added to both"
        yield figure(text, times["perdure"], "ms", "Orbax", most)
    ours, theirs, base = loop_keras.overheads(max(3, round(7 * scale)))
    most = 1e6 * statistics.median(theirs)
    peer = f"Keras's own; fit alone {base * 1e3:.2f} ms a step"
    yield figure("fit, a backup every 10 steps: added", [1e6 * s for s in ours], "us", peer, most)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-loop.json"))
    parser.add_argument("--scale", type=float, default=1.0, help="how many blocks, as a factor")
    given = parser.parse_args()
    return finish(rows(given.scale), given.out)


if __name__ == "__main__":
    sys.exit(main())
