"""Features of `tf.estimator`: `steps` in place of `max_steps`, and checkpoint listeners."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problem import Spy, data, fresh, prints, step_fn, trainer
from problem import config as problem_config

import perdure
from perdure import (
    LocalStorage,
    RunConfig,
    Trainer,
    load_checkpoint,
)
from perdure.errors import ArgumentError, SaveError, TrainError
from perdure.store import Run
from perdure.train import CheckpointConfig, EarlyStopping, Hook, OutputConfig


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
    "arguments", [{"max_steps": 3, "steps": 3}, {"steps": 0}, {"steps": 1.5}, {"max_steps": list}]
)
def test_steps_and_max_steps_exclude_each_other(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises((ArgumentError, TrainError), match="steps"):
        trainer(tmp_path).train(**arguments)
    assert not (tmp_path / "perdure.json").exists()


def test_without_a_number_training_ends_with_the_data_or_by_a_hook(tmp_path: Path) -> None:
    source = data()

    def batches(step: int) -> Any:
        if step == 7:
            raise StopIteration
        return source.batch(step)

    made = trainer(tmp_path / "function", data=batches)
    made.train()
    assert made.step == 7
    assert made.latest_checkpoint() == f"{tmp_path / 'function'}@7"

    class Stop(Hook):
        def after_step(self, trainer: Any, logs: Any) -> None:
            if trainer.step == 5:
                trainer.request_stop("enough")

    made = trainer(tmp_path / "hook")
    made.train(hooks=[Stop()])
    assert made.step == 5
    with pytest.raises(TrainError, match="begin again"):
        made.train()


def test_train_takes_hooks_and_listeners_for_one_call(tmp_path: Path) -> None:
    made, listener = trainer(tmp_path), Listener()
    made.train(max_steps=4, hooks=[spy := Spy()], saving_listeners=[listener])
    made.train(max_steps=8)
    assert spy.ran == [0, 1, 2, 3]
    assert [(what, step) for what, step, _ in listener.calls] == [
        ("begin", 0),
        ("before", 4),
        ("after", 4),
        ("end", 4),
    ]
    with pytest.raises(
        TrainError, match=r"Trainer\(hooks="
    ):  # its state would be in some checkpoints
        made.train(max_steps=8, hooks=[EarlyStopping("loss")])


@pytest.mark.parametrize("fail_at", [8, 7])
def test_the_save_of_a_step_is_made_before_the_error_of_a_hook(
    tmp_path: Path, fail_at: int
) -> None:
    class Counts(Hook):
        n = 0

        def after_step(self, trainer: Any, logs: Any) -> None:
            self.n += 1

        def state_dict(self) -> dict[str, int]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.n = state["n"]

    trainer(tmp_path / "whole", [Spy(), Counts()]).train(12)
    made = trainer(tmp_path / "cut", [Spy(fail_at), Counts()])
    with pytest.raises(RuntimeError, match=f"planned at step {fail_at}"):
        made.train(12)
    assert Run(tmp_path / "cut").steps() == ([0, 4, 8] if fail_at == 8 else [0, 4])
    trainer(tmp_path / "cut", [Spy(), Counts()]).train(12)
    assert prints(tmp_path / "cut") == prints(tmp_path / "whole")


def test_the_names_of_an_estimator(tmp_path: Path) -> None:
    made: Any = trainer(tmp_path, keep_checkpoint_max=0, save_checkpoints_steps=1)
    assert made.latest_checkpoint() is None
    made.train(8)
    assert made.model_dir == tmp_path
    assert made.latest_checkpoint() == f"{tmp_path}@8"
    assert len(Run(tmp_path).steps()) == 9  # keep_checkpoint_max=0 keeps all
    assert made.get_variable_names() == ["n", "rate", "w"]
    source = data(11)  # the second batch has 5 rows that pad it
    predicted = [*made.predict(source, lambda state, batch: {"y": batch["x"] @ state["w"]})]
    assert len(predicted) == 11
    first = source.batch(0)["x"] @ load_checkpoint(tmp_path)["w"]
    assert np.array([row["y"] for row in predicted[:8]]).tobytes() == first.tobytes()
    for use, form in (
        (lambda: made.export_saved_model("x"), "perdure export"),
        (lambda: made.get_variable_value("w"), "load_checkpoint"),
        (lambda: perdure.train.Checkpoint, "perdure.Checkpoint"),  # type: ignore[attr-defined]
        (lambda: perdure.train.SessionRunHook, "Hook"),  # type: ignore[attr-defined]
        (lambda: perdure.distribute.MirroredStrategy, "perdure.jax"),  # type: ignore[attr-defined]
        (lambda: made.config.cluster_spec, "cluster_resolver"),
    ):
        with pytest.raises(AttributeError, match=form):
            use()
    for call in (
        lambda: made.train(input_fn=data, max_steps=9),  # type: ignore[call-arg]
        lambda: RunConfig(tmp_path, tf_random_seed=1),  # type: ignore[call-arg]
        lambda: Trainer(model_fn=step_fn),  # type: ignore[call-arg]
    ):
        with pytest.raises(ArgumentError, match=r"data, config|seed=|step_fn"):
            call()


def test_a_new_run_begins_with_the_values_of_another(tmp_path: Path) -> None:
    trainer(tmp_path / "first").train(8)
    start = load_checkpoint(tmp_path / "first", 4)
    options: dict[str, Any] = {"warm_start_from": f"{tmp_path / 'first'}@4"}
    more = {**fresh(), "bias": np.zeros(2)}
    made = Trainer(step_fn, more, data(), problem_config(tmp_path / "second"), **options)
    with pytest.warns(UserWarning, match="bias"):
        made.train(4)
    assert load_checkpoint(tmp_path / "second", 0)["w"].tobytes() == start["w"].tobytes()
    made.train(8)  # a resume: the other run is not read again
    assert made.step == 8


def test_a_config_knows_its_place_in_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(config: RunConfig) -> tuple[Any, ...]:
        return config.is_chief, config.task_type, config.task_id, config.num_worker_replicas

    config = RunConfig(tmp_path, seed=1)
    assert place(config) == (True, "worker", 0, 1)
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    other = config.replace(save_checkpoints_steps=5)
    assert (other.save_checkpoints_steps, other.seed, other.model_dir) == (5, 1, tmp_path)
    timed = other.replace(save_checkpoints_secs=30)  # the new interval takes the place of the other
    assert (timed.save_checkpoints_steps, timed.save_checkpoints_secs) == (None, 30)
    with pytest.raises(ArgumentError, match="expected one of save_checkpoints_steps"):
        config.replace(save_checkpoints_steps=5, save_checkpoints_secs=30)
    assert place(other) == (False, "worker", 1, 3)
    assert place(config) == (True, "worker", 0, 1)  # read once
