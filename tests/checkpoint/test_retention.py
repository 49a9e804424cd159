"""Retention: every rule, rules together, clocks that jump, and the manager's prunes."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from perdure import CheckpointManager, ManagerOptions, Retention, verify_run
from perdure.checkpoint.retention import HOUR, Candidate, decide
from perdure.cli import main
from perdure.errors import ArgumentError, StepNotFoundError, StoreError
from perdure.store import Run
from perdure.store.format import Metric


def kept(candidates: list[Candidate], max_to_keep: int | None, **rules: Any) -> list[int]:
    verdicts = decide(candidates, max_to_keep, Retention(**rules))
    assert all(verdict.reason for verdict in verdicts)
    return [verdict.step for verdict in verdicts if verdict.keep]


def hourly(times: list[float]) -> list[Candidate]:
    return [Candidate(step, hours * HOUR) for step, hours in enumerate(times)]


def loss_of(value: float | None) -> dict[str, Metric]:
    return {} if value is None else {"loss": value}


def scored(*values: float | None) -> list[Candidate]:
    return [Candidate(step, 0, loss_of(value)) for step, value in enumerate(values)]


def test_the_newest_checkpoints_stay() -> None:
    assert kept(hourly([0] * 6), 2) == [4, 5]
    assert kept(hourly([0] * 6), None) == list(range(6))
    assert kept([], 3) == []


def test_periods_and_pins_stay_besides_the_newest() -> None:
    steps = [Candidate(step, 0, pinned=step == 7) for step in range(1, 12)]
    assert kept(steps, 1, keep_period=4) == [4, 7, 8, 11]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"best_mode": "min"}, [2, 6]),
        ({"best_mode": "max"}, [4, 6]),
        ({"best_mode": "min", "best_to_keep": 3}, [2, 3, 5, 6]),
    ],
)
def test_the_best_stay_nan_is_never_best_and_of_equal_values_the_newer_wins(
    rules: dict[str, Any], expected: list[int]
) -> None:
    values = scored(math.nan, 3.0, 1.0, 2.0, 5.0, 2.0, None)
    assert kept(values, 1, best_metric="loss", **rules) == expected


def test_a_metric_that_no_checkpoint_has_keeps_nothing() -> None:
    assert kept(scored(1.0, 2.0), 1, best_metric="accuracy") == [1]


def test_one_checkpoint_stays_for_every_n_hours() -> None:
    assert kept(hourly([0, 0.4, 0.9, 1.0, 1.5, 2.1, 2.2]), 1, keep_every_n_hours=1) == [0, 3, 5, 6]


def test_a_clock_that_jumps_back_keeps_both_sides_of_the_jump() -> None:
    times = [10, 10.5, 0, 0.5, 1.0, 1.5, 2.0, 2.1]
    assert kept(hourly(times), 1, keep_every_n_hours=1) == [0, 1, 2, 4, 6, 7]


def test_a_clock_that_is_corrected_loses_no_checkpoint() -> None:
    times = [10, 9000, 9000.5, 10.2, 10.5, 11.3, 11.4]
    assert kept(hourly(times), 1, keep_every_n_hours=1) == [0, 1, 2, 3, 5, 6]


RULES = st.builds(
    dict,
    keep_every_n_hours=st.sampled_from([None, 1.0, 2.5]),
    keep_period=st.sampled_from([None, 3]),
    best_metric=st.sampled_from([None, "loss"]),
    best_to_keep=st.integers(1, 3),
)
HISTORY = st.lists(
    st.tuples(
        st.one_of(st.floats(0, 2), st.floats(-50, 50)),  # hours since the last, or a jump
        st.one_of(st.none(), st.floats(-3, 3)),
        st.booleans(),
    ),
    max_size=25,
)


@given(HISTORY, RULES, st.integers(1, 4))
def test_pruning_after_every_save_keeps_what_the_rules_promise(
    history: list[tuple[float, float | None, bool]], rules: dict[str, Any], newest: int
) -> None:
    held: list[Candidate] = []
    clock = 1000.0
    for step, (hours, loss, pinned) in enumerate(history):
        clock += hours
        held.append(Candidate(step, clock * HOUR, loss_of(loss), pinned and step % 5 == 0))
        stay = set(kept(held, newest, **rules))
        before, held = held, [candidate for candidate in held if candidate.step in stay]
        assert {c.step for c in before[-newest:]} <= stay
        assert {c.step for c in before if c.pinned} <= stay
        assert set(kept(held, newest, **rules)) == stay, "deciding again deletes nothing more"


@given(st.lists(st.one_of(st.just(0.0), st.floats(-500, -0.5)), min_size=2, max_size=60))
def test_no_jump_of_the_clock_leaves_a_longer_gap_than_the_hours_and_one_save(
    jumps: list[float],
) -> None:
    """Saves every 15 minutes of real time, with a clock that jumps back at random."""
    every, hours = 0.25, 1.0
    held: list[Candidate] = []
    clock = 10_000.0
    for step, jump in enumerate(jumps):
        clock += every + jump
        held.append(Candidate(step, clock * HOUR))
        stay = set(kept(held, 1, keep_every_n_hours=hours))
        held = [candidate for candidate in held if candidate.step in stay]
    steps = [candidate.step for candidate in held]
    gaps = [(b - a) * every for a, b in pairwise(steps)]
    assert max(gaps) <= hours + every


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_every_n_hours": 0},
        {"keep_every_n_hours": math.nan},
        {"keep_period": 0},
        {"best_mode": "most"},
        {"best_to_keep": 0},
    ],
)
def test_rules_out_of_range_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(rules))}: expected .*found"):
        Retention(**rules)


# ---------------------------------------------------------------- through the manager


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(1000, k, np.float32), "step": k}


def test_the_manager_applies_metric_hours_and_pins(tmp_path: Path) -> None:
    now = [0.0]
    rules = Retention(keep_every_n_hours=1, best_metric="loss", best_mode="min")
    options = ManagerOptions(retention=rules, clock=lambda: now[0])
    losses = {1: 5.0, 2: 4.0, 3: 0.5, 4: math.nan, 5: 3.0, 6: 2.0, 7: -math.inf, 8: 1.0}
    with CheckpointManager(tmp_path, max_to_keep=1, options=options) as manager:
        for step, loss in losses.items():
            now[0] += 1500
            manager.save(step, state(step), {"loss": loss, "accuracy": np.float32(step)})
            manager.wait_until_finished()  # it reads the clock
            if step == 2:
                manager.pin(2)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 4, 7, 8]
        assert manager.best_step() == 3
        metrics = manager.metrics(4)
        assert metrics["accuracy"] == 4.0
        assert math.isnan(metrics["loss"])
        assert manager.pinned_steps() == [2]
        with pytest.raises(StoreError, match="steps 2 are pinned and were not deleted"):
            manager.delete(2)
        manager.unpin(2)
        manager.save(9, state(9))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3, 4, 7, 9]
        with pytest.raises(StepNotFoundError):
            manager.pin(2)
    assert verify_run(Run(tmp_path)).problems == ()


def test_a_pin_outlives_the_process_and_may_be_set_twice(tmp_path: Path) -> None:
    for _ in range(2):
        with CheckpointManager(tmp_path, max_to_keep=1) as manager:
            manager.save(1, state(1))
            manager.wait_until_finished()
            manager.pin(1)
            manager.save(2, state(2))
    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        manager.save(3, state(3))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]


def test_asking_for_the_best_without_a_metric_is_refused(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(StoreError, match="expected a metric to judge by"),
    ):
        manager.best_step()


def test_an_unreadable_checkpoint_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    (tmp_path / "checkpoints" / "000000000003.json").write_bytes(b"")
    with CheckpointManager(tmp_path, max_to_keep=2) as manager:
        manager.save(4, state(4))
        with pytest.warns(UserWarning, match="packs stay: the manifest of step 3 cannot be read"):
            manager.wait_until_finished()
        manager.save(5, state(5))
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4, 5]
    assert len(list((tmp_path / "packs").iterdir())) == 5


# ---------------------------------------------------------------- through the command line


def prune(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["prune", *arguments])


def test_prune_prints_its_plan_and_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, state(step), {"loss": step})
    held = sorted(tmp_path.rglob("*"))
    rules = ("--max-to-keep", "1", "--keep-period", "20", "--best-metric", "loss")
    shown = prune(str(tmp_path), *rules, "--best-mode", "min", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "10  keep    best loss (10)" in shown.output
    assert "30  DELETE  older than the newest 1" in shown.output
    assert "nothing was changed (--dry-run)" in shown.output
    assert sorted(tmp_path.rglob("*")) == held
    done = prune(str(tmp_path), *rules, "--json")
    document = json.loads(done.output)
    assert (document["executed"], document["steps"]) == (True, [10, 30])
    assert Run(tmp_path).steps() == [20, 40]
    assert verify_run(Run(tmp_path)).problems == ()


def test_prune_without_a_policy_deletes_no_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    assert prune(str(tmp_path)).exit_code == 0
    assert Run(tmp_path).steps() == [1, 2, 3]
    refused = prune(str(tmp_path), "--keep-period", "2")
    assert refused.exit_code == 2
    assert "every checkpoint stays" in refused.output


def test_prune_is_refused_while_another_process_writes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        refused = prune(str(tmp_path), "--max-to-keep", "1")
        assert refused.exit_code == 1
        assert "this process already has a manager" in refused.output
        assert prune(str(tmp_path), "--max-to-keep", "1", "--dry-run").exit_code == 0
