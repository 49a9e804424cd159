"""Features of `tf.estimator`: `steps` in place of `max_steps`, and checkpoint listeners."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from problem import data, fresh, prints, step_fn, trainer

from perdure import (
    CheckpointManager,
    LocalStorage,
    RunConfig,
    Trainer,
    load_checkpoint,
)
from perdure.errors import SaveError, TrainError
from perdure.store import Run
from perdure.train import CheckpointConfig, Hook, OutputConfig


class Listener(Hook):
    """Records the committed steps at each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, list[int]]] = []

    def begin(self, trainer: Any) -> None:
        trainer.manager.wait_until_finished()
        self._note("begin", trainer)

    def before_save(self, trainer: Any) -> None:
        self._note("before", trainer)

    def after_save(self, trainer: Any) -> None:
        assert not trainer.manager.is_saving_in_progress()
        self._note("after", trainer)

    def end(self, trainer: Any) -> None:
        self.calls.append(("end", trainer.step, []))

    def _note(self, what: str, trainer: Any) -> None:
        self.calls.append((what, trainer.step, trainer.manager.all_steps()))


def test_listeners_are_called_before_and_after_every_save(tmp_path: Path) -> None:
    listener = Listener()
    trainer(tmp_path / "one", [listener]).train(10)
    assert listener.calls == [
        ("begin", 0, [0]),
        ("before", 4, [0]),
        ("after", 4, [0, 4]),
        ("before", 8, [0, 4]),
        ("after", 8, [0, 4, 8]),
        ("before", 10, [0, 4, 8]),
        ("after", 10, [0, 4, 8, 10]),
        ("end", 10, []),
    ]
    trainer(tmp_path / "two").train(10)
    assert prints(tmp_path / "one") == prints(tmp_path / "two")


def test_a_listener_may_end_the_training(tmp_path: Path) -> None:
    class Enough(Hook):
        def after_save(self, trainer: Any) -> None:
            trainer.request_stop("one save is enough")

    made = trainer(tmp_path, [Enough()])
    made.train(10)
    assert made.step == 4


@pytest.mark.parametrize("on_error", ["raise", "continue"])
def test_after_save_is_not_called_for_a_save_that_failed(tmp_path: Path, on_error: Any) -> None:
    fired = []

    def before(operation: str, path: str) -> None:
        if operation == "fsync" and "/packs/000000000004-" in path:
            fired.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    listener = Listener()
    options: dict[str, Any] = {
        "save_checkpoints_steps": 4,
        "checkpoint": CheckpointConfig(on_error=on_error),
    }
    options["output"] = OutputConfig(progress="off")
    config = RunConfig(LocalStorage(tmp_path, before), **options)  # type: ignore[arg-type]
    made = Trainer(step_fn, fresh(), data(), config, [listener])
    if on_error == "raise":
        with pytest.raises(SaveError, match="step 4"):
            made.train(8)
    else:
        with pytest.warns(UserWarning, match="saving step 4 failed"):
            made.train(8)
    assert len(fired) == 1
    afters = [step for what, step, _ in listener.calls if what == "after"]
    assert afters == ([] if on_error == "raise" else [8])


def test_steps_are_counted_from_the_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path / "steps")
    made.train(steps=5)
    assert made.step == 5
    made.train(steps=5)
    assert made.step == 10
    again = trainer(tmp_path / "steps")
    again.train(steps=2)
    assert again.step == 12
    trainer(tmp_path / "max").train(12)
    expected = prints(tmp_path / "max")
    fingerprints = prints(tmp_path / "steps")
    assert fingerprints[12] == expected[12]
    assert Run(tmp_path / "steps").steps()[-1] == 12


@pytest.mark.parametrize(
    "arguments", [{}, {"max_steps": 3, "steps": 3}, {"steps": 0}, {"steps": 1.5}]
)
def test_steps_and_max_steps_exclude_each_other(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(TrainError, match="steps"):
        trainer(tmp_path).train(**arguments)
    assert not (tmp_path / "perdure.json").exists()


def test_the_loop_of_tensorflows_checkpoint_guide_works(tmp_path: Path) -> None:
    # "Training checkpoints": the names of tf.train.CheckpointManager in the guide's loop
    for expected in (None, f"{tmp_path}@10"):
        with CheckpointManager(tmp_path, max_to_keep=3) as manager:
            assert manager.latest_checkpoint == expected
            state, start = manager.restore_or_initialize({"step": 0})
            for step in range(start + 1, start + 11):
                state = {"step": step}
                if step % 10 == 0:
                    manager.save(step, state)
    assert load_checkpoint(f"{tmp_path}@20") == {"step": 20}
