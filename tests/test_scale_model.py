"""The model of scale in `proofs`: its functions and its simulation, in cases that can be computed."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "proofs"))

from scale_model import (
    Cluster,
    Constants,
    Plan,
    daly_seconds,
    durable_s,
    intervals,
    lives,
    messages,
    never,
    plan,
    renewals,
    save_parts,
    simulate,
    solve,
    young_s,
)

QUIET = Plan(100, 1.0, 10, stall_s=2.0, durable_s=3.0, start_s=7.0, recover_s=5.0, end_s=4.0)


def test_without_failures_only_saves_cost_something() -> None:
    run = simulate(QUIET, never)
    assert run.seconds == 7 + 100 + 9 * 2 + 4
    assert (run.useful_s, run.stalled_s, run.repeated_s, run.down_s) == (100, 18, 0, 11)
    assert (run.repeated_steps, run.failures) == (0, 0)


def test_a_save_waits_until_the_one_before_it_is_durable() -> None:
    slow = replace(QUIET, durable_s=25.0)  # a save every 27 s: 25 s, and its stall
    assert simulate(slow, never).seconds == 7 + 10 + 2 + 8 * (25 + 2) + 10 + 4


@pytest.mark.parametrize(
    ("life", "repeated"),
    [
        (9.5, 9),  # nothing is saved yet
        (14.5, 12),  # 10 s, the stall, and 2.5 s: the save of step 10 is under way
        (15.5, 3),  # it is durable
        (11.0, 10),  # in the snapshot of step 10
    ],
)
def test_a_failure_repeats_the_steps_since_the_last_durable_save(
    life: float, repeated: int
) -> None:
    run = simulate(QUIET, lives([life]))
    assert (run.failures, run.repeated_steps) == (1, repeated)
    parts = run.useful_s + run.stalled_s + run.repeated_s + run.down_s
    assert run.seconds == parts
    kept = 0 if repeated != 3 else 10
    assert run.seconds == 7 + life + 5 + (100 - kept) + 2 * (9 - kept // 10) + 4


def test_attempts_without_progress_wait_longer_and_longer() -> None:
    given = [8.0, 0.5, 0.5, 0.5, 0.5]
    with_waits = simulate(QUIET, lives(given)).seconds
    assert (
        with_waits - simulate(replace(QUIET, longest_wait_s=0), lives(given)).seconds == 1 + 2 + 4
    )


def test_a_failure_while_the_workers_start_starts_them_again() -> None:
    times = iter([3.0, 6.0])
    run = simulate(replace(QUIET, longest_wait_s=0), lambda *_: next(times, math.inf))
    assert run.failures == 2
    assert run.down_s == 6 + 5 + 4


def test_the_leap_over_saves_changes_nothing() -> None:
    chance = random.Random(0)
    for _ in range(200):
        job = Plan(
            steps=chance.randint(1, 300),
            step_s=0.25,
            save_every=chance.randint(1, 40),
            stall_s=chance.randint(0, 8) / 4,
            durable_s=chance.randint(0, 80) / 4,
        )
        life = chance.randint(0, 800) / 8
        assert simulate(job, lives([life])).repeated_steps == step_by_step(job, life)


def step_by_step(job: Plan, life: float) -> int:
    """How many steps a failure after `life` seconds repeats, one step after the other."""
    time, kept, under_way = 0.0, 0, (0, 0.0)
    for step in range(1, job.steps + 1):
        if time + job.step_s > life:
            return step - 1 - (under_way[0] if under_way[1] <= life else kept)
        time += job.step_s
        if step % job.save_every == 0 and step < job.steps:
            ready = max(time, under_way[1])
            if ready + job.stall_s > life:
                return step - (under_way[0] if under_way[1] <= life else kept)
            kept, time = under_way[0], ready + job.stall_s
            under_way = (step, time + job.durable_s)
    return 0


def test_exponential_failures_cost_what_daly_computed() -> None:
    job = Plan(200_000, 1.0, 30, stall_s=3, recover_s=50, longest_wait_s=0)
    expected = daly_seconds(job, 500.0)
    seconds = simulate(job, renewals(10, 5000.0, 1, random.Random(0))).seconds
    assert seconds == pytest.approx(expected, rel=0.03)
    seldom = simulate(job, renewals(10, 10_000.0, 1, random.Random(0))).seconds
    assert seldom != pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_workers_fail_as_often_as_their_mean_says(shape: float) -> None:
    assert fmean(gaps(5, shape)) == pytest.approx(20.0, rel=0.05)


def test_the_shape_shows_in_the_spread_and_vanishes_with_many_workers() -> None:
    def spread(workers: int, shape: float) -> float:
        return pstdev(gaps(workers, shape)) / fmean(gaps(workers, shape))

    assert spread(1, 2.0) < 0.6 < 0.9 < spread(1, 1.0) < 1.1 < 1.3 < spread(1, 0.7)
    assert spread(2000, 2.0) == pytest.approx(1.0, abs=0.1)


def gaps(workers: int, shape: float) -> list[float]:
    """Times between failures of `workers` that each fail every 100 s on average (5: every 20 s)."""
    failures, last, found = renewals(workers, 100.0, shape, random.Random(1)), 0.0, []
    for _ in range(5000):
        time = failures(last, last)
        found.append(time - last)
        last = time
    return found


def test_parts_of_a_save_and_what_saturates_first() -> None:
    constants = Constants(0.001, 2e9, 2e9, 0.01, 1e-5, (1, 34), 2.0)
    small = Cluster(10, 1e12, 1e11, 1e11, 1e6, 0.0)
    parts = save_parts(constants, small)
    assert parts["processes"] == 50.0
    assert parts["storage"] == 10.0
    assert messages(constants, 10) == 341
    assert durable_s(parts) == pytest.approx(50 + 0.01 + 341e-5)
    for workers, largest in ((10, "processes"), (500, "storage"), (100_000, "chief")):
        parts = save_parts(constants, replace(small, workers=workers))
        assert max(parts, key=lambda name: parts[name]) == largest
    job = plan(constants, small, steps=10, step_s=1.0, save_every=5)
    assert job.recover_s == 2.0 + 50.0


def test_intervals_and_the_search() -> None:
    assert young_s(2.0, 10_000.0) == 200.0
    assert list(intervals(10, 2.0)) == [1, 2, 4, 8]
    assert solve(lambda value: 1 / value, 0.25, 1e-3, 1e3) == pytest.approx(4.0)
