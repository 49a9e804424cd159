"""The model of scale, beside closed forms, real runs of 2, 4 and 8 processes, and what others report.

The real runs are under `perdure run`, with workers killed at seeded times; their constants come from a
calibration run with other kills. Run by `make proof-scale-model`, 15 minutes on two cores;
ARGS='--no-runs' leaves the real runs out. The tables and the plot of proofs/SCALE.md are written to
build/scale-model.md and build/scale-model.svg.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from scale_model import (
    Constants,
    Plan,
    daly_seconds,
    lives,
    never,
    renewals,
    simulate,
)
from scale_runs import Comparison, compare, seeded_lives
from scale_tables import MEASURED, Reported, constants_table, grid_table, message_s, plot, table

from report import Row, finish, row

WORKERS = (2, 4, 8)
WITHIN = 0.10
BUILD = Path("build")


def closed_forms() -> Iterator[Row]:
    """The simulation beside formulas that it does not use."""
    quiet = Plan(1000, 1.0, 10, stall_s=2, durable_s=3, start_s=7, recover_s=50, end_s=3)
    expected = 7 + 1000 + 99 * 2 + 3
    yield row("without failures: only stalls", [simulate(quiet, never).seconds == expected])
    between, outcomes, control = 500.0, [], []
    for save_every in (10, 30, 100):
        plan = Plan(300_000, 1.0, save_every, stall_s=3, recover_s=50, longest_wait_s=0)
        daly = daly_seconds(plan, between)
        for workers in (1, 100):
            failures = renewals(workers, between * workers, 1, random.Random(workers))
            seconds = simulate(plan, failures).seconds
            outcomes.append(abs(seconds / daly - 1) < 0.03)
        seldom = renewals(1, 2 * between, 1, random.Random(0))
        control.append(abs(simulate(plan, seldom).seconds / daly - 1) > 0.03)
    yield row("exponential failures: within 3% of Daly's expected duration", outcomes)
    yield row("control: half as many failures are not", control)


def real_runs(compared: list[Comparison]) -> Iterator[Row]:
    """What the model says of runs that took place."""
    yield row(
        "real runs: ended with the bits of an undisturbed loop", (c.real.is_exact for c in compared)
    )
    yield row(
        "real runs: requests of a save for each of 8 workers: at most 1 more than for each of 2",
        [
            compared[-1].requests / compared[-1].workers
            <= compared[0].requests / compared[0].workers + 1
        ],
    )
    yield row("real runs: four kills or more", (len(c.real.killed_at) >= 4 for c in compared))
    yield row(
        "real runs of 2, 4 and 8 workers: goodput within 10% of the model's",
        [abs(c.goodput_error) <= WITHIN for c in compared],
    )
    measured = sum(sum(c.real.summary.repeated) for c in compared)
    modelled = sum(c.model.repeated_steps for c in compared)
    yield row(
        f"steps repeated in all of them: {measured}, by the model {modelled}: within 10%",
        [abs(modelled / measured - 1) <= WITHIN],
    )
    for what, change in (
        ("free restarts", {"recover_s": 0.0, "start_s": 0.0}),
        ("a save after every step", {"save_every": 1}),
    ):
        yield row(
            f"control: a model with {what} is more than 10% off",
            [
                abs(
                    simulate(replace(c.plan, **change), lives(seeded_lives(c.workers))).goodput
                    / (c.real.summary.goodput or 0)
                    - 1
                )
                > WITHIN
                for c in compared
            ],
        )


def runs_table(compared: list[Comparison]) -> str:
    lines = [
        [
            f"{c.workers}",
            f"{1000 * c.plan.step_s:.1f} ms",
            f"{1000 * c.plan.durable_s:.0f} ms",
            f"{c.plan.start_s:.2f} s",
            f"{c.plan.recover_s:.2f} s",
            f"{len(c.real.killed_at)} / {c.model.failures}",
            f"{sum(c.real.summary.repeated)} / {c.model.repeated_steps}",
            f"{c.real.summary.seconds:.0f} / {c.model.seconds:.0f} s",
            f"{c.real.summary.goodput:.3f} / {c.model.goodput:.3f}",
            f"{100 * c.goodput_error:+.1f}%",
        ]
        for c in compared
    ]
    head = ["workers", "step", "save", "start", "restart", "kills", "repeated steps", "duration"]
    return table([*head, "goodput", "error"], lines)


def constants_of(compared: list[Comparison]) -> Constants:
    """The measured constants, with the messages of a save as a line over the workers."""
    print(
        f"a request takes {1e6 * message_s():.0f} µs now, {1e6 * MEASURED.message_s:.0f} in the tables"
    )
    counted = {c.workers: c.requests for c in compared}
    if len(counted) < 3:
        return MEASURED
    messages = np.polynomial.Polynomial.fit(list(counted), list(counted.values()), 1).convert().coef
    return replace(MEASURED, messages=[float(f"{n:.3f}") for n in messages])


def rows(has_runs: bool) -> Iterator[Row]:
    """The rows of the proof; the tables are written on the way."""
    yield from closed_forms()
    compared: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="perdure-scale-") as path:
        for workers in WORKERS if has_runs else ():
            compared.append(compare(Path(path), workers))
            print(runs_table(compared[-1:]), flush=True)
    if has_runs:
        yield from real_runs(compared)
    constants = constants_of(compared)
    tables = [constants_table(constants)]
    tables += [runs_table(compared)] if has_runs else []
    reported = Reported(constants)
    yield row(
        "Llama 3: more than 90% at 10 minutes for each failure", [reported.llama_10_minutes > 0.9]
    )
    yield row(
        "FT-HSDP: 80% within 5 points, from the rate that gives 44%",
        [abs(reported.hsdp_80 - 0.8) < 0.05],
    )
    tables += [grid_table(constants), reported.table()]
    BUILD.mkdir(exist_ok=True)
    (BUILD / "scale-model.md").write_text("\n".join(tables))
    plot(constants, BUILD / "scale-model.svg")
    print("\n".join(tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-runs", action="store_true", help="without the real runs")
    finish("scale-model", rows(not parser.parse_args().no_runs))


if __name__ == "__main__":
    main()
