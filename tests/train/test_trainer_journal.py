"""The journal of a `Trainer`: `RunConfig(journal_every=n)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from problem import STEPS, data, trainer

from perdure.errors import ArgumentError, JournalMismatchError
from perdure.store import LocalStorage
from perdure.store.run_log import read_journal
from perdure.train import CheckpointConfig, Hook


class Stop(Hook):
    """Fails after a step, as a program that is killed does."""

    def __init__(self, step: int, change: float = 0.0) -> None:
        self.step, self.change = step, change

    def after_step(self, trainer: Any, logs: Any) -> None:
        if self.change and trainer.step == self.step:
            trainer.state = {**trainer.state, "w": trainer.state["w"] + self.change}
        elif trainer.step == self.step:
            raise RuntimeError("planned")


def bits(run: Path) -> list[Any]:
    lines = [*read_journal(LocalStorage(run))]
    return [(e.step, e.state, e.batch, e.metrics) for e in lines]


def test_an_interrupted_run_has_the_journal_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer(whole, journal_every=1).train_and_evaluate(data(16), STEPS, every=3)
    assert [step for step, *_ in bits(whole)] == list(range(STEPS + 1))
    assert all(batch and metrics["loss"] for _, _, batch, metrics in bits(whole)[1:])
    for stop in (6, 11):
        with pytest.raises(RuntimeError, match="planned"):
            trainer(parts, [Stop(stop)], journal_every=1).train_and_evaluate(
                data(16), STEPS, every=3
            )
    trainer(parts, journal_every=1).train_and_evaluate(data(16), STEPS, every=3)
    assert bits(parts) == bits(whole)


def test_a_step_that_is_repeated_with_other_bits_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="planned"):
        trainer(tmp_path, [Stop(7)], journal_every=1).train(STEPS)
    with pytest.raises(JournalMismatchError) as error:
        trainer(tmp_path, [Stop(5, 1e-3)], journal_every=1).train(STEPS)
    assert (error.value.step, error.value.what) == (5, "state")


def test_executions_of_several_steps_are_recorded_at_their_ends(tmp_path: Path) -> None:
    one, three = tmp_path / "one", tmp_path / "three"
    trainer(one, journal_every=1).train(STEPS)
    trainer(three, journal_every=4, steps_per_execution=3).train(STEPS)
    known = {step: entry for step, *entry in bits(one)}
    found = {step: entry for step, *entry in bits(three)}
    assert found.keys() == {0, 6, 9, 12}, "4, 8 and 12 were passed"
    assert all(entry == known[step] for step, entry in found.items())


def test_a_resumed_run_of_several_steps_at_a_time_records_the_same_steps(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sizes = {"journal_every": 4, "steps_per_execution": 3}
    trainer(whole, **sizes).train_and_evaluate(data(16), STEPS, every=3)
    for stop in (6, 9):
        with pytest.raises(RuntimeError, match="planned"):
            trainer(parts, [Stop(stop)], **sizes).train_and_evaluate(data(16), STEPS, every=3)
    trainer(parts, **sizes).train_and_evaluate(data(16), STEPS, every=3)
    assert bits(parts) == bits(whole)


def test_without_the_option_there_is_no_journal(tmp_path: Path) -> None:
    trainer(tmp_path / "none").train(4)
    assert [*read_journal(LocalStorage(tmp_path / "none"))] == []
    trainer(tmp_path / "group", checkpoint=CheckpointConfig(journal_every=4)).train(4)
    assert [step for step, *_ in bits(tmp_path / "group")] == [0, 4]
    with pytest.raises(ArgumentError, match="journal_every"):
        trainer(tmp_path, journal_every=0)
