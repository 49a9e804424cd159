"""SIGTERM and notices at any place: the run saves, exits with 75 and resumes with equal bits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problem import (
    STEPS,
    Spy,
    config,
    console_text,
    data,
    eval_fn,
    fresh,
    prints,
    rows,
    step_fn,
    trainer,
)

import perdure
from messages import unnamed
from perdure import CheckpointManager, Trainer, load_checkpoint
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.errors import ArgumentError
from perdure.store import Run
from perdure.testing import check_run
from perdure.train import CheckpointConfig, Hook


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """A preempted run ignores SIGTERM until its process ends; this process continues."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


class At(Hook):
    """Sends SIGTERM at one place, and a second one if asked, which must change nothing."""

    def __init__(self, place: str, step: int, times: int = 1) -> None:
        self.place, self.step, self.times, self.fired = place, step, times, 0

    def _at(self, place: str, step: int) -> None:
        if (place, step) == (self.place, self.step) and not self.fired:
            self.fired = self.times
            for _ in range(self.times):
                sigterm()

    def begin(self, trainer: Trainer) -> None:
        self._at("begin", trainer.step)

    def before_step(self, trainer: Trainer) -> None:
        self._at("before_step", trainer.step)

    def after_step(self, trainer: Trainer, logs: Any) -> None:
        self._at("after_step", trainer.step)

    def after_evaluate(self, trainer: Trainer, metrics: Any) -> None:
        self._at("after_evaluate", trainer.step)

    def data(self, step: int) -> Any:
        """A source that hangs at the step at which the signal comes."""
        if (self.place, self.step) == ("data", step) and not self.fired:
            self._at("data", step)
            threading.Event().wait(60)
            raise AssertionError("the wait for data was not interrupted")
        return data().batch(step)

    def evaluate(self, state: Any, batch: Any) -> Any:
        self._at("evaluate", state["n"])
        return eval_fn(state, batch)

    def run(self, where: Path, steps: int = STEPS, **options: Any) -> Trainer:
        made = Trainer(
            step_fn, fresh(), self.data, config(where, **options), [self], eval_fn=self.evaluate
        )
        made.train_and_evaluate(data(16), steps, every=3)
        return made


PLACES = [
    ("begin", 0, 0),
    ("before_step", 4, 5),
    ("after_step", 5, 5),
    ("after_step", 8, 8),  # with a save in progress
    ("data", 5, 5),
    ("data", 8, 8),
    ("evaluate", 6, 6),
    ("after_evaluate", 6, 6),
    ("evaluate", 12, 12),
    ("after_evaluate", 12, 12),
]


@pytest.mark.parametrize(("place", "step", "saved"), PLACES)
def test_sigterm_anywhere_saves_the_step_and_exits_with_75(
    tmp_path: Path, place: str, step: int, saved: int
) -> None:
    At("nowhere", 0).run(tmp_path / "whole", keep_checkpoint_max=None)
    where = tmp_path / "parts"
    signals = At(place, step, times=2)
    with pytest.raises(SystemExit) as left:
        signals.run(where, keep_checkpoint_max=None)
    assert signals.fired == 2
    assert left.value.code == 75
    assert check_run(where).good[-1] == saved
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    made = At("nowhere", 0).run(where, keep_checkpoint_max=None)
    assert f"resuming after step {saved}" in console_text(made)
    fingerprints, expected = prints(where), prints(tmp_path / "whole")
    assert {step: expected[step] for step in fingerprints if step in expected} == {
        step: fingerprints[step] for step in fingerprints if step in expected
    }
    assert fingerprints[STEPS] == expected[STEPS]
    assert rows(where) == rows(tmp_path / "whole")
    metrics, all_metrics = metrics_of(where), metrics_of(tmp_path / "whole")
    assert metrics.items() >= {step: all_metrics[step] for step in expected}.items()
    check_run(where)


def metrics_of(where: Path) -> dict[int, Any]:
    """The metrics in the manifests, by step."""
    run = Run(where)
    return {step: run.manifest(step).metrics for step in run.steps()}


def test_an_interrupted_evaluation_of_the_last_step_is_repeated(tmp_path: Path) -> None:
    At("nowhere", 0).run(tmp_path / "whole", STEPS - 1, save_summary_steps=1)
    where = tmp_path / "parts"
    with pytest.raises(SystemExit):
        At("evaluate", STEPS - 1).run(where, STEPS - 1, save_summary_steps=1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    At("nowhere", 0).run(where, STEPS - 1, save_summary_steps=1)
    assert rows(where) == rows(tmp_path / "whole")
    assert metrics_of(where)[STEPS - 1] == metrics_of(tmp_path / "whole")[STEPS - 1]


def test_control_without_the_handler_a_stall_is_not_interrupted(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The tests above fail for a loop that does not handle SIGTERM while it waits."""
    monkeypatch.setattr(threading.Event, "wait", lambda *_: None)
    real = PreemptionFlag._on_signal

    def deaf(self: PreemptionFlag, *args: Any) -> None:
        self._interruptible = False
        real(self, *args)

    monkeypatch.setattr(PreemptionFlag, "_on_signal", deaf)
    with pytest.raises(AssertionError, match="was not interrupted"):
        At("data", 5).run(tmp_path)


def test_sigterm_keeps_its_meaning_before_and_after_a_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer(tmp_path).train(2)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_forked_worker_is_still_ended_by_sigterm(tmp_path: Path) -> None:
    flag = PreemptionFlag()
    flag.install()
    try:
        ready, started = os.pipe()
        child = os.fork()
        if not child:
            os.write(started, b"x")
            while True:  # no blocking wait, because a signal just before it would not end it
                pass
        os.read(ready, 1)  # a signal during the fork itself would be lost
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
    finally:
        flag.remove()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_end_of_the_grace_period_is_reported_once(capsys: Any) -> None:
    clock = Clock()
    config = perdure.TerminationConfig(grace_period=5.0)
    flag = PreemptionFlag(config, lambda: "The newest committed checkpoint is step 4.", clock)
    assert flag.seconds_left() is None
    flag.notify()
    clock.now += 1.0
    assert flag.seconds_left() == 4.0
    flag.poll()
    assert capsys.readouterr().err == ""
    clock.now += 4.0
    flag.poll()
    flag.poll()
    printed = capsys.readouterr().err
    assert not unnamed(printed, "grace period of 5 s is over", "checkpoint is step 4")
    assert printed.count("\n") == 1, "once, although polled twice"
    with pytest.raises(ArgumentError, match="grace_period: expected None or more than 0 seconds"):
        perdure.TerminationConfig(grace_period=0)


def test_a_termination_watcher_ends_a_wait_for_data(tmp_path: Path) -> None:
    asked = []

    class Poll(Hook):
        """Polls at a known place, as the watching thread does every second."""

        def before_step(self, trainer: Trainer) -> None:
            assert trainer.manager is not None
            self.flag = trainer.manager.preemption

    poll = Poll()
    waiting = threading.Event()

    def watcher() -> bool:
        asked.append(waiting.is_set())
        return waiting.is_set()

    def source(step: int) -> Any:
        if step == 5:
            thread = threading.Thread(target=poll.flag.poll)
            waiting.set()
            thread.start()
            threading.Event().wait(60)
            raise AssertionError("the wait for data was not interrupted")
        return data().batch(step)

    left = []
    termination = perdure.TerminationConfig(watcher, exit_fn=lambda: left.append("exit_fn"))
    made = Trainer(
        step_fn,
        fresh(),
        source,
        config(tmp_path, checkpoint=CheckpointConfig(termination=termination)),
        [poll],
    )
    with pytest.raises(SystemExit):
        made.train(STEPS)
    assert asked[-1]
    assert left == ["exit_fn"]
    assert load_checkpoint(tmp_path)["n"] == 5


def test_a_hand_written_loop_has_the_same_mechanism(tmp_path: Path) -> None:
    codes = []

    def leave() -> None:
        codes.append("left")
        raise SystemExit(3)

    def loop(stop_at: int | None) -> None:
        with CheckpointManager(tmp_path, save_interval_steps=100) as manager:
            handler = perdure.PreemptionCheckpointHandler(
                manager, perdure.TerminationConfig(exit_fn=leave)
            )
            state, start = manager.restore_or_initialize({"w": np.zeros(3)})
            with handler.watch_preemption_scope():
                for step in range(start, STEPS):
                    state = {"w": state["w"] + step}
                    if step == stop_at:
                        sigterm()
                    handler.save_checkpoint_if_preempted(step + 1, state)
            manager.save(STEPS, state, force=True)

    with pytest.raises(SystemExit) as left:
        loop(6)
    assert (left.value.code, codes) == (3, ["left"])
    assert check_run(tmp_path).good == (7,)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    loop(None)
    assert load_checkpoint(tmp_path)["w"].tolist() == [sum(range(STEPS))] * 3


def test_end_hooks_see_the_end_of_a_preempted_run(tmp_path: Path) -> None:
    spy = Spy()
    with pytest.raises(SystemExit):
        trainer(tmp_path, [spy, At("after_step", 5)]).train(STEPS)
    assert spy.calls == [("begin", 0), ("end", 5)]
