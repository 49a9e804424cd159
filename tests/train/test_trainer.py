"""The Trainer: the same bits however often it is interrupted, and one clear error for bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grain
import jax
import jax.numpy as jnp
import numpy as np
import problem
import pytest
from problem import (
    STEPS,
    Spy,
    config,
    console_text,
    data,
    fresh,
    prints,
    rows,
    step_fn,
    trainer,
)

from perdure import (
    Checkpoint,
    CheckpointManager,
    MemoryStorage,
    Retention,
    RunConfig,
    Trainer,
    load_checkpoint,
)
from perdure.errors import (
    ArgumentError,
    DataError,
    LockedError,
    MismatchError,
    RecipeMismatchError,
    StateError,
    TrainError,
)
from perdure.jax import MirroredStrategy
from perdure.store import Run, verify_run
from perdure.testing import check_run
from perdure.train import CheckpointConfig, EarlyStopping, Hook, ReduceLROnPlateau
from perdure.train.batch_source import evaluation_batches


def test_a_trainer_saves_what_a_hand_written_loop_saves(tmp_path: Path) -> None:
    trainer(tmp_path / "trainer").train(STEPS)
    state, source = fresh(), data()
    with CheckpointManager(tmp_path / "loop", save_interval_steps=4) as manager:
        for step in range(STEPS):
            state, _ = step_fn(state, source.batch(step))
            manager.save(step + 1, state)
    expected = prints(tmp_path / "loop")
    assert list(expected) == [4, 8, 12]
    assert prints(tmp_path / "trainer").items() >= expected.items()
    report = check_run(tmp_path / "trainer")
    assert report.problems == ()  # summaries and metrics belong to a run directory
    assert report.good == (0, 4, 8, 12)


def hooks() -> list[Hook]:
    """Every hook that changes the training."""
    plateau = ReduceLROnPlateau("rate", "distance", patience=1, min_delta=0.1)
    return [plateau, EarlyStopping("distance", patience=9), ReduceLROnPlateau("rate", every=5)]


@pytest.mark.parametrize("fail_after", [1, 4, 5])
def test_an_error_after_any_step_changes_no_bit_and_no_row(tmp_path: Path, fail_after: int) -> None:
    options: Any = {"steps_per_execution": fail_after, "keep_checkpoint_max": None}

    def run(where: Path, spy: Spy, stop: int = STEPS) -> Any:
        made = trainer(where, [spy, *hooks()], **options)
        return made.train_and_evaluate(data(16), stop, every=3)

    whole = Spy()
    result = run(tmp_path / "whole", whole)
    assert len([call for call in whole.calls if call[0] == "evaluate"]) >= 2
    assert load_checkpoint(tmp_path / "whole")["rate"] < 0.5  # the plateau hook lowered the rate
    for step in (*whole.ran[1:], STEPS):
        where = tmp_path / f"{step}"
        with pytest.raises(RuntimeError, match=f"planned at step {step}"):
            run(where, Spy(fail_after=step))
        again = Spy()
        assert run(where, again) == result
        assert again.calls[0][1] <= step
        assert prints(where).items() <= prints(tmp_path / "whole").items()
        assert prints(where)[STEPS] == prints(tmp_path / "whole")[STEPS]
        assert rows(where) == rows(tmp_path / "whole")
        check_run(where)
    # Stopped at a step at which no execution of the whole run ends, and then continued.
    run(tmp_path / "parts", Spy(), 7)
    assert run(tmp_path / "parts", Spy()) == result
    assert prints(tmp_path / "parts")[STEPS] == prints(tmp_path / "whole")[STEPS]


def test_control_a_hook_whose_state_is_not_saved_changes_the_bits(tmp_path: Path) -> None:
    """Negative control of the test above."""

    class Forgetful(ReduceLROnPlateau):
        def state_dict(self) -> dict[str, Any]:
            return {"best": float("inf"), "wait": 0}

    def run(where: Path, spy: Spy) -> None:
        plateau = Forgetful("rate", "loss", patience=3, mode="max", every=2)
        trainer(where, [spy, plateau]).train(STEPS)

    run(tmp_path / "whole", Spy())
    with pytest.raises(RuntimeError):
        run(tmp_path / "parts", Spy(fail_after=6))
    run(tmp_path / "parts", Spy())
    assert prints(tmp_path / "parts")[STEPS] != prints(tmp_path / "whole")[STEPS]


def test_steps_in_one_execution_give_the_bits_of_single_steps(tmp_path: Path) -> None:
    class Step:
        """A step function that can run several steps in one call, as a compiled one can."""

        called: list[int] = []  # noqa: RUF012 (looked at by the test)

        def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
            return step_fn(state, batch)

        def many(self, state: Any, batches: Any) -> tuple[Any, Any]:
            self.called.append(len(batches))
            losses = []
            for batch in batches:
                state, logs = step_fn(state, batch)
                losses.append(logs["loss"])
            return state, {"loss": np.array(losses)}

    trainer(tmp_path / "1", save_summary_steps=5).train(STEPS)
    given = config(tmp_path / "5", steps_per_execution=5, save_summary_steps=5)
    Trainer(Step(), fresh(), data(), given).train(STEPS)
    assert rows(tmp_path / "5") == rows(tmp_path / "1")
    assert Step.called == [5, 5, 2]
    assert list(prints(tmp_path / "5")) == [0, 5, 10, 12]  # saves at the end of an execution
    assert prints(tmp_path / "5")[STEPS] == prints(tmp_path / "1")[STEPS]


def test_a_second_call_continues_and_a_reached_max_steps_is_logged(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train(5)
    spy = Spy()
    second = trainer(tmp_path, [spy])
    state = second.train(STEPS)
    assert spy.ran == list(range(5, STEPS))
    assert state["n"] == STEPS
    third = trainer(tmp_path, [(last := Spy())])
    assert third.train(STEPS)["n"] == STEPS
    assert last.ran == []
    assert last.calls == [("begin", 12), ("end", 12)]
    assert "max_steps 12 has been reached already" in console_text(third)
    assert (
        made.train(STEPS + 1)["n"] == STEPS + 1
    )  # the first trainer continues from the others' checkpoint


@pytest.mark.parametrize(("max_steps", "evaluated"), [(9, [4, 8]), (8, [4, 8])])
def test_a_finished_run_that_is_started_again_ends_in_the_state_of_the_first_call(
    tmp_path: Path, max_steps: int, evaluated: list[int]
) -> None:
    """Hooks may change the state after an evaluation that is due; the last of a call may be none."""

    class Halve(Hook):
        def after_evaluate(self, trainer: Trainer, metrics: Any) -> None:
            trainer.state["rate"] /= 2

    def ended() -> tuple[Any, Any, list[int]]:
        made = trainer(tmp_path, [Halve(), spy := Spy()])
        metrics = made.train_and_evaluate(data(), max_steps, every=4)
        return made.state["rate"], metrics, [call[1] for call in spy.calls if call[0] == "evaluate"]

    first = ended()
    assert first[2] == evaluated
    again = ended()
    assert again[:2] == first[:2]
    assert again[2] == [step for step in evaluated if step == max_steps]


def test_a_hook_that_raises_ends_the_others_and_leaves_a_good_run(tmp_path: Path) -> None:
    class Bad(Hook):
        def end(self, trainer: Trainer) -> None:
            raise ValueError("and the end fails too")

    spies = [Spy(), Spy(fail_after=6)]
    made = trainer(tmp_path, [spies[0], Bad(), spies[1]])
    with pytest.raises(RuntimeError, match="planned at step 6") as caught:
        made.train(STEPS)
    assert caught.value.__notes__ == ["While the run ended: ValueError('and the end fails too')"]
    assert [spy.calls[-1] for spy in spies] == [("end", 6)] * 2
    assert verify_run(Run(tmp_path)).good == (0, 4)
    with pytest.raises(ValueError, match="the end fails too"):
        trainer(tmp_path, [Bad()]).train(STEPS)
    assert check_run(tmp_path).good[-1] == STEPS


def test_an_error_before_the_first_checkpoint_loses_no_fresh_state(tmp_path: Path) -> None:
    def in_place(state: Any, batch: Any) -> tuple[Any, Any]:
        new, logs = step_fn(state, batch)
        state["w"][:] = new["w"]  # as modules of PyTorch change
        return {**new, "w": state["w"]}, logs

    trainer(tmp_path / "whole").train(STEPS)
    spy = Spy(fail_after=3)
    made = Trainer(in_place, fresh(), data(), config(tmp_path / "parts"), [spy])
    with pytest.raises(RuntimeError):
        made.train(STEPS)
    spy.fail_after = None
    made.train(STEPS)
    assert prints(tmp_path / "parts")[STEPS] == prints(tmp_path / "whole")[STEPS]


def test_a_second_trainer_in_one_directory_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    class Second(Hook):
        refused = 0

        def after_step(self, trainer: Trainer, logs: Any) -> None:
            if trainer.step == 6:
                with pytest.raises(LockedError) as caught, CheckpointManager(storage) as manager:
                    manager.claim()
                assert "this process already has a manager" in str(caught.value)
                with pytest.raises(LockedError):
                    problem.trainer(storage).train(STEPS)
                self.refused += 1

    storage = MemoryStorage()
    hook = Second()
    trainer(storage, [hook]).train(STEPS)
    assert hook.refused == 1
    assert load_checkpoint(storage)["n"] == STEPS


def test_data_that_shrank_between_two_runs_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path / "a").train(4)
    with pytest.raises(RecipeMismatchError) as caught:
        trainer(tmp_path / "a", data=data(32)).train(STEPS)
    assert "examples: the checkpoint has 40, this run has 32" in str(caught.value)
    batches = [data().batch(step) for step in range(5)]
    trainer(tmp_path / "b", data=batches).train(4)
    with pytest.raises(RecipeMismatchError) as caught:
        trainer(tmp_path / "b", data=batches[:4]).train(STEPS)
    assert "batches: the checkpoint has 5, this run has 4" in str(caught.value)
    assert trainer(tmp_path / "b", data=batches).train(STEPS)["n"] == STEPS


def test_a_grain_iterator_continues_at_the_step_of_the_state(tmp_path: Path) -> None:
    def batches() -> Any:
        x = np.arange(120, dtype=np.float32).reshape(40, 3)
        made = grain.MapDataset.source(list(x)).seed(3).shuffle().repeat(None).batch(8)
        made = made.map(lambda rows: {"x": rows, "weight": np.ones(8, np.float32)})
        return iter(made.to_iter_dataset(grain.ReadOptions(1, 1)))

    trainer(tmp_path / "whole", data=batches()).train(STEPS)
    where = tmp_path / "parts"
    with pytest.raises(RuntimeError):
        trainer(where, [Spy(fail_after=6)], data=batches()).train(STEPS)
    trainer(where, data=batches()).train(STEPS)
    assert prints(where)[STEPS] == prints(tmp_path / "whole")[STEPS]
    assert load_checkpoint(tmp_path / "whole")["data"]["state"] == {"next_index": 12}


class Countdown:
    """An iterator over finite data with `state_dict`."""

    def __init__(self, count: int) -> None:
        self.at, self.count = 0, count

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> Any:
        if self.at == self.count:
            raise StopIteration
        self.at += 1
        return data().batch(self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_data_that_end_save_and_end_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path, data=Countdown(6), steps_per_execution=4)
    assert made.train(STEPS)["n"] == 6
    assert "stopped after step 6: the data ended" in console_text(made)
    assert load_checkpoint(tmp_path)["n"] == 6
    assert load_checkpoint(tmp_path)["data"]["at"] == 6
    assert trainer(tmp_path, data=Countdown(9)).train(STEPS)["n"] == 9


def test_an_error_in_the_middle_of_an_execution_leaves_the_last_state(tmp_path: Path) -> None:
    def fails_at_three(state: Any, batch: Any) -> tuple[Any, Any]:
        if state["n"] == 2:
            raise ZeroDivisionError
        return step_fn(state, batch)

    made = Trainer(fails_at_three, fresh(), data(), config(tmp_path, steps_per_execution=4))
    with pytest.raises(ZeroDivisionError):
        made.train(STEPS)
    assert made.state["n"] == 2


@pytest.mark.parametrize("donate", [None, False])
def test_a_state_that_a_failed_step_has_used_is_lost_and_train_resumes(
    tmp_path: Path, donate: bool | None
) -> None:
    fails = [False]

    def check(loss: Any) -> None:
        if fails[0]:
            raise ValueError(f"the loss is {loss}")

    def grad(state: Any, batch: Any, key: Any) -> Any:
        jax.debug.callback(check, state["w"].sum())
        return {"w": batch["x"].sum(0)}

    def update(state: Any, total: Any) -> Any:
        return {"w": state["w"] + total["w"]}, {"loss": total["w"].sum()}

    class Breaks(Hook):
        def before_step(self, trainer: Trainer) -> None:
            fails[0] = trainer.step == 6 and failures.pop()

    strategy = MirroredStrategy(1, replicas=1)
    first = {"w": jnp.zeros(3)}
    failures = [False, True]  # at the first and at the second time, from the end
    step = strategy.step(grad, update, donate=donate)
    made = Trainer(step, first, data(), config(tmp_path), [Breaks()], strategy=strategy)
    with pytest.raises(Exception, match="the loss is"):
        made.train(STEPS)
    assert made.step == 6
    if donate is None:
        with pytest.raises(StateError, match=r"is lost: .*donate=False"):
            _ = made.state
    else:
        assert np.asarray(made.state["w"]).any()
    resumed = np.asarray(made.train(STEPS)["w"])
    other = Trainer(step, first, data(), config(tmp_path / "other"), strategy=strategy)
    assert np.asarray(other.train(STEPS)["w"]).tobytes() == resumed.tobytes()
    assert made.step == STEPS


@pytest.mark.parametrize(
    "source", [(batch for batch in [1]), iter([1]), {1, 2}], ids=["generator", "iterator", "set"]
)
def test_data_without_a_position_are_refused_at_once(tmp_path: Path, source: Any) -> None:
    with pytest.raises(DataError) as caught:
        Trainer(step_fn, fresh(), source, config(tmp_path))
    assert "expected data whose position can be restored" in str(caught.value)
    assert "a list of batches, an iterator with get_state" in str(caught.value)


def test_early_stopping_is_final(tmp_path: Path) -> None:
    def run() -> Any:
        return trainer(tmp_path, [EarlyStopping("loss", patience=2, mode="max", every=2)])

    made = run()
    made.train(1000)
    assert made.step < 20
    assert f"stopped after step {made.step}: loss has not improved 2 times" in console_text(made)
    assert load_checkpoint(tmp_path)["n"] == made.step
    again = run()
    again.train(1000)
    assert again.step == made.step
    # With evaluations, the checkpoint is older than their results, so they run again.
    made = trainer(tmp_path / "b", [EarlyStopping("distance", patience=1, min_delta=9.0)])
    made.train_and_evaluate(data(16), 1000, every=3)
    assert made.step == 6
    again = trainer(tmp_path / "b", [EarlyStopping("distance", patience=1, min_delta=9.0)])
    assert again.train_and_evaluate(data(16), 1000, every=3) == made.evaluate(data(16))
    assert again.step == 6


def test_the_best_checkpoint_of_an_evaluation_stays_and_nan_is_never_best(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, float("nan"), 2.0])

    def judged(state: Any, batch: Any) -> Any:
        return {"score": next(values)}

    best = CheckpointConfig(retention=Retention(best_metric="eval/score"))
    made = Trainer(
        step_fn,
        fresh(),
        data(),
        config(tmp_path, checkpoint=best, keep_checkpoint_max=1),
        eval_fn=judged,
    )
    with pytest.warns(
        UserWarning, match="step 9: the metric 'eval/score' is NaN; the step was saved"
    ):
        made.train_and_evaluate(data(), STEPS, every=3, steps=1)
    with CheckpointManager(tmp_path, options=best) as manager:
        assert manager.all_steps() == [6, 12]
        assert manager.best_step() == 6
        assert manager.metrics(6)["eval/score"] == 3.0


def diverging(state: Any, batch: Any) -> tuple[Any, Any]:
    new, _ = step_fn(state, batch)
    return new, {"loss": float("nan") if new["n"] in (7, 8) else 1.0}


def test_nan_policy_decides_about_saves_with_nan(tmp_path: Path) -> None:
    def run(policy: Any) -> Trainer:
        made = config(
            tmp_path / policy,
            checkpoint=CheckpointConfig(nan_metrics=policy),
            keep_checkpoint_max=None,
        )
        return Trainer(diverging, fresh(), data(), made)

    with pytest.warns(UserWarning, match="step 8: the metric 'loss' is NaN; the step was saved"):
        run("save").train(STEPS)
    with pytest.warns(
        UserWarning, match="step 8: the metric 'loss' is NaN; the step was not saved"
    ):
        run("skip").train(STEPS)
    with pytest.raises(TrainError) as caught:
        run("raise").train(STEPS)
    assert "Step 8 was not saved; the last checkpoint is step 4." in str(caught.value)
    assert {p: list(prints(tmp_path / p)) for p in ("save", "skip", "raise")} == {
        "save": [0, 4, 8, 12],
        "skip": [0, 4, 12],
        "raise": [0, 4],
    }
    assert rows(tmp_path / "save")[3] == (8, {"loss": "NaN"})


def test_saves_follow_the_clock(tmp_path: Path) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()

    def slow(state: Any, batch: Any) -> tuple[Any, Any]:
        clock.now += 4.0
        return step_fn(state, batch)

    given = config(
        tmp_path,
        save_checkpoints_steps=None,
        save_checkpoints_secs=10.0,
        clock=clock,
        keep_checkpoint_max=None,
    )
    Trainer(slow, fresh(), data(), given).train(STEPS)
    assert list(prints(tmp_path)) == [0, 3, 6, 9, 12]


def test_the_automatic_interval_follows_the_cost_of_a_save(tmp_path: Path) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()

    class Slow:
        """A member that is slow to read once it was trained, which makes the stall of a save."""

        def state_dict(self) -> dict[str, int]:
            clock.now += 0.5 * (clock.now > 0)
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None: ...

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        clock.now += 1.0
        return state, {"loss": 1.0}

    class Wait(Hook):
        """Waits for the save, which takes real time while the clock of the test stands still."""

        def after_step(self, trainer: Trainer, logs: Any) -> None:
            assert trainer.manager is not None
            trainer.manager.wait_until_finished()

    given = config(
        tmp_path,
        save_checkpoints_steps=None,
        save_checkpoints_secs="auto",
        clock=clock,
        keep_checkpoint_max=None,
    )
    Trainer(step, {"slow": Slow()}, data(), given, [Wait()]).train(300)
    saves = list(prints(tmp_path))
    # The first save comes after 10 s, to measure. Then 0.5 s may be at most 1%, and Daly's optimum
    # for 4 h between failures is longer: sqrt(2 * 0.5 * 14400) = 120 s.
    assert saves == [0, 10, 130, 250, 300]


def test_evaluate_uses_the_newest_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    before = made.evaluate(data(16))
    assert before == {"distance": 3.0}
    metrics = trainer(tmp_path).train_and_evaluate(data(16), STEPS, every=5)
    assert made.evaluate(data(16)) == metrics != before
    assert made.step == STEPS
    assert made.evaluate(data(16), steps=1) == metrics
    with pytest.raises(TrainError, match="an evaluation needs a function for the metrics"):
        Trainer(step_fn, fresh(), data(), config(tmp_path)).evaluate(data())


def test_an_evaluation_works_beside_a_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train(4)
    expected = made.evaluate(data(16))
    with CheckpointManager(tmp_path, recipe={}) as training:
        training.claim()
        other = trainer(tmp_path)
        assert other.evaluate(data(16)) == expected
        with pytest.raises(LockedError):
            other.train(STEPS)


def test_an_added_hook_is_refused_by_its_missing_leaf(tmp_path: Path) -> None:
    trainer(tmp_path).train(4)
    with pytest.raises(MismatchError) as caught:
        trainer(tmp_path, [EarlyStopping(), EarlyStopping("x")]).train(STEPS)
    assert "hooks/early_stopping: expected the state of" in str(caught.value)
    assert "hooks/early_stopping_2: expected the state of" in str(caught.value)
    assert "the checkpoint has no such leaf" in str(caught.value)


def test_a_state_of_any_kind_keeps_its_leaf_paths_with_hooks(tmp_path: Path) -> None:
    state = Checkpoint(w=np.ones(3, np.float32), rate=0.5, n=0)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        new, logs = step_fn(vars(state), batch)
        vars(state).update(new)
        return state, logs

    Trainer(step, state, data(), config(tmp_path), [EarlyStopping(patience=99, every=1)]).train(5)
    held = load_checkpoint(tmp_path)
    assert held.keys() == {"w", "rate", "n", "hooks"}
    assert held["hooks"]["early_stopping"].keys() == {"best", "wait"}


def test_a_missing_learning_rate_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(TrainError) as caught:
        trainer(tmp_path, [ReduceLROnPlateau("opt/lr")]).train(STEPS)
    assert "expected a leaf 'opt/lr' in the state" in str(caught.value)
    assert "found rate. Keep the learning rate in the state" in str(caught.value)
    with pytest.raises(
        TrainError, match="EarlyStopping: expected the metric 'acc' at step 1, found"
    ):
        trainer(tmp_path / "b", [EarlyStopping("acc", every=1)]).train(STEPS)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EarlyStopping(patience=0), "patience: expected an integer of at least 1, found 0"),
        (lambda: EarlyStopping(mode="most"), "mode: expected one of 'min', 'max'"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(every=0), "every: expected None or an integer of at least 1"),
        (
            lambda: ReduceLROnPlateau("x", factor=1.5),
            "factor: expected more than 0 and less than 1",
        ),
        (
            lambda: trainer("x").train(0),
            "max_steps: expected None or an integer of at least 1, found 0",
        ),
        (
            lambda: trainer("x").train(cast(int, data), steps=2),
            "max_steps: expected a number of steps, found a function. The data are given to",
        ),
        (RunConfig, "model_dir: expected a run directory, as RunConfig("),
        (
            lambda: trainer("x").train(cast(int, 2.5)),
            "max_steps: expected None or an integer of at least 1, found 2.5",
        ),
        (
            lambda: trainer("x").train(True),
            "max_steps: expected None or an integer of at least 1, found True",
        ),
        (
            lambda: trainer("x").evaluate(data(), 0),
            "steps: expected None or an integer of at least 1",
        ),
        (lambda: trainer("x", Hook()), "hooks: expected a list of perdure.train.Hook, found <"),
        (lambda: trainer("x", [Hook]), "hooks: expected a list of perdure.train.Hook, found [<cl"),
        (
            lambda: trainer("x").train_and_evaluate(data(), 5, every=0),
            "every: expected an integer of at least 1",
        ),
        (
            lambda: Trainer(step_fn, 0, data(), cast("Any", "runs/x")),
            "config: expected a RunConfig, found 'runs/x'",
        ),  # type: ignore[arg-type]
        (
            lambda: Trainer(step_fn, lambda seed: seed, data(), config("x")),
            "the function takes a seed",
        ),
    ],
)
def test_invalid_arguments_are_refused(make: Any, text: str) -> None:
    with pytest.raises((ArgumentError, TrainError)) as caught:
        make()
    assert text in str(caught.value)


def test_a_seed_makes_the_state_and_is_part_of_the_recipe(tmp_path: Path) -> None:
    def init(seed: int) -> Any:
        return {**fresh(), "w": np.random.default_rng(seed).normal(size=3).astype(np.float32)}

    def run(seed: int, where: Path) -> Any:
        return Trainer(step_fn, init, data(), config(where, seed=seed)).train(4)

    assert run(1, tmp_path / "a")["w"].tolist() == run(1, tmp_path / "b")["w"].tolist()
    assert run(1, tmp_path / "a")["w"].tolist() != run(2, tmp_path / "c")["w"].tolist()
    assert Run(tmp_path / "a").manifest(4).recipe["seed"] == 1
    assert Run(tmp_path / "a").manifest(4).recipe["data_seed"] == 1
    with pytest.raises(RecipeMismatchError, match="seed: the checkpoint has 1, this run has 2"):
        run(2, tmp_path / "a")
    assert Trainer(step_fn, fresh, data(), config(tmp_path / "d")).train(1)["n"] == 1


def test_a_run_in_a_bucket_warns_that_it_writes_no_summaries(tmp_path: Path) -> None:
    made = trainer(MemoryStorage())
    made.train(4)
    assert "no summaries: the run directory is not local; name a summary_dir" in console_text(made)
    trainer(MemoryStorage(), summary_dir=tmp_path).train(4)
    assert [step for step, _ in rows(tmp_path)] == [2, 4]


def test_an_evaluation_starts_at_the_first_batch_of_its_dataset() -> None:
    class Placed:
        """The members of a distributed dataset that an evaluation uses."""

        steps_per_epoch = 3

        def __init__(self, step: int = 0) -> None:
            self.step = step

        def from_step(self, step: int) -> Placed:
            return Placed(step)

        def take(self, count: int) -> Iterator[int]:
            return iter(range(self.step, self.step + count))

    stands = Placed(7)
    assert list(evaluation_batches(stands, 2)) == [0, 1]
    assert list(evaluation_batches(stands, None)) == [0, 1, 2]
    assert stands.step == 7
    stream = iter(range(5))
    assert list(evaluation_batches(stream, 2)) == [0, 1]
    assert next(stream) == 2, "no batch is taken that is not used"


def test_a_step_function_that_returns_no_pair_is_named(tmp_path: Path) -> None:
    made = Trainer(lambda state, _: state, fresh(), data(), config(tmp_path))
    with pytest.raises(
        TrainError, match=r"step 1: step_fn must return \(state, logs\), found dict"
    ):
        made.train(3)


def test_a_function_without_parameters_returns_the_data(tmp_path: Path) -> None:
    """As `input_fn` of an Estimator."""
    trainer(tmp_path / "whole").train(STEPS)
    made = trainer(tmp_path / "run", data=lambda: data())
    made.train(STEPS)
    assert prints(tmp_path / "run") == prints(tmp_path / "whole")
    assert made.evaluate(lambda: data()) == made.evaluate(data())
