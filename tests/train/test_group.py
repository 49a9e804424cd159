"""A group of processes, simulated by threads: they agree on the step, the saves and the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problem
import pytest
from problem import STEPS, data, eval_fn, fresh, prints, rows, step_fn, trainer

from perdure import RunConfig, Trainer
from perdure.errors import LockedError, TrainError
from perdure.store import Run
from perdure.testing import check_run
from perdure.train import Hook
from pretend import Pretend, play


class Strategy:
    """The members of a strategy that the loop uses; every process computes the whole batch."""

    def __init__(self, processes: Pretend) -> None:
        self.processes = processes

    def recipe(self, dataset: Any = None) -> dict[str, Any]:
        return {"seed": 0, **({} if dataset is None else {"examples": dataset.num_examples})}

    def batch(self, dataset: Any, step: int) -> Any:
        return dataset.batch(step)

    def run(self, fn: Any, args: Any) -> Any:
        return fn(*args)

    def reduce(self, op: str, value: Any) -> Any:
        return value


class Notice(Hook):
    """One process gets a preemption notice (threads cannot handle signals)."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        assert trainer.manager is not None
        if trainer.step == self.step:
            trainer.manager.preemption.notify()


def member(where: Path, processes: Pretend, step: int | None = None, **options: Any) -> Any:
    given = problem.config(where, **options)
    hooks = [Notice(step if processes.index == 1 else None)]
    made = Trainer(
        step_fn, fresh(), data(), given, hooks, strategy=Strategy(processes), eval_fn=eval_fn
    )
    try:
        made.train_and_evaluate(data(16), STEPS, every=3)
    except SystemExit as left:
        return left.code, made.step
    return None, made.step


def test_a_preemption_of_one_process_ends_all(tmp_path: Path) -> None:
    trainer(tmp_path / "one", keep_checkpoint_max=None).train_and_evaluate(data(16), STEPS, every=3)
    where = tmp_path / "group"
    assert play(3, lambda processes: member(where, processes, 5)) == [(75, 5)] * 3
    assert check_run(where).good[-1] == 5
    assert play(2, lambda processes: member(where, processes)) == [(None, STEPS)] * 2
    assert prints(where)[STEPS] == prints(tmp_path / "one")[STEPS]
    assert rows(where) == rows(tmp_path / "one")  # only the chief writes them


def test_the_clock_of_the_chief_decides_for_all(tmp_path: Path) -> None:
    class Clock:
        def __init__(self, pace: float) -> None:
            self.now, self.pace = 0.0, pace

        def __call__(self) -> float:
            self.now += self.pace
            return self.now

    def one(processes: Pretend) -> Any:
        # By their own clocks, the others would save at every step or never.
        clock = Clock((1.0, 100.0, 0.0)[processes.index])
        return member(
            tmp_path,
            processes,
            save_checkpoints_steps=None,
            save_checkpoints_secs=3.0,
            clock=clock,
            keep_checkpoint_max=None,
        )

    assert play(3, one) == [(None, STEPS)] * 3
    # At every third step for the evaluations, and when the chief's clock asks for it.
    steps = set(Run(tmp_path).steps())
    assert {0, 3, 6, 9, 12} < steps < set(range(STEPS + 1))


def test_a_locked_directory_is_refused_in_all_processes(tmp_path: Path) -> None:
    import perdure.store.local as local  # the lock belongs to a process, so it is simulated as well

    def taken(*_: Any) -> Any:
        raise BlockingIOError(11, "host x, pid 1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local.LocalStorage, "lock", taken)
        errors = play(2, lambda processes: member(tmp_path, processes))
    assert [type(error) for error in errors] == [LockedError] * 2
    assert all("another process writes here: host x, pid 1" in str(error) for error in errors)


def test_an_iterator_is_refused_under_a_strategy(tmp_path: Path) -> None:
    class Positions:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            return 0

        def state_dict(self) -> Any: ...

        def load_state_dict(self, state: Any) -> None: ...

    config = RunConfig(tmp_path)
    with pytest.raises(
        TrainError, match="a strategy takes its shares by index: expected a dataset"
    ):
        Trainer(step_fn, fresh(), Positions(), config, strategy=Strategy(play(1, lambda p: p)[0]))
    with pytest.raises(
        TrainError, match="expected one seed, found 3 in RunConfig and 0 in the str"
    ):
        Trainer(
            step_fn,
            fresh(),
            data(),
            RunConfig(tmp_path, seed=3),
            strategy=Strategy(play(1, lambda p: p)[0]),
        )
