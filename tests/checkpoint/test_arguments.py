"""The arguments of a manager: steps, metrics, recipes, callable states, names of checkpoints."""

from __future__ import annotations

import enum
import json
import math
import warnings
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from perdure import (
    Checkpoint,
    CheckpointManager,
    ManagerOptions,
    MemoryStorage,
    Retention,
    RunConfig,
    Trainer,
    load_checkpoint,
)
from perdure.checkpoint import Processes, SingleProcess
from perdure.checkpoint.checkpoint import makes_state
from perdure.checkpoint.journal import state_digest
from perdure.errors import (
    ArgumentError,
    MismatchError,
    RecipeMismatchError,
    StepNotFoundError,
    StoreError,
    UnsupportedLeafError,
)
from perdure.runtime.process_group import Rank
from perdure.store import Run
from perdure.store.format import MAX_STEP


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(10, k, np.float32)}


GOOD_STEPS = {
    "int": 7,
    "int64": np.int64(7),
    "uint8": np.uint8(7),
    "0-d": np.array(7),
    "jax": jnp.asarray(7),
    "torch": torch.tensor(7),
    "enum": enum.IntEnum("Steps", {"SEVEN": 7}).SEVEN,  # type: ignore[attr-defined]
}
BAD_STEPS = {
    "negative": -1,
    "numpy negative": np.int64(-1),
    "huge": MAX_STEP + 1,
    "very huge": 10**40,
    "float": 7.0,
    "numpy float": np.float64(7),
    "jax float": jnp.asarray(7.0),
    "torch float": torch.tensor(7.0),
    "bool": True,
    "numpy bool": np.True_,
    "jax bool": jnp.asarray(True),
    "torch bool": torch.tensor(True),
    "none": None,
    "text": "7",
    "array": np.array([7]),
}


@pytest.mark.parametrize("step", GOOD_STEPS.values(), ids=GOOD_STEPS)
def test_a_step_is_any_integer(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=5) as manager:
        assert manager.should_save(step)
        assert manager.save(step, state(7))
        manager.wait_until_finished()
        assert manager.all_steps() == [7]
        assert type(manager.restore(step).step) is int
        manager.pin(step)
        manager.unpin(step)
        assert manager.metrics(step) == {}
        assert manager.fingerprint(step)
        assert not manager.reached_preemption(step)
        manager.delete(step)
        assert manager.all_steps() == []
    Checkpoint(**state(7)).save(tmp_path, step)
    assert load_checkpoint(tmp_path, step)["w"][0] == 7


@pytest.mark.parametrize("step", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_value_that_is_no_step_is_refused_at_once(step: Any) -> None:
    storage = MemoryStorage()
    with CheckpointManager(storage) as manager:
        manager.save(1, state(1))
        manager.wait_until_finished()
        for call in (
            lambda: manager.save(step, state(2)),
            lambda: manager.save(step, state(2), force=True),
            lambda: manager.save_and_exit(step, state(2)),
            lambda: manager.should_save(step),
            lambda: manager.pin(step),
            lambda: manager.unpin(step),
            lambda: manager.delete(step),
            lambda: manager.metrics(step),
            lambda: manager.fingerprint(step),
            lambda: manager.reached_preemption(step),
            lambda: Checkpoint(**state(2)).save(
                MemoryStorage(),
                "1" if step is None else step,  # type: ignore[arg-type]
            ),
        ):
            with pytest.raises(
                ArgumentError, match=r"step: expected (an integer from 0 to|a step, or)"
            ):
                call()
        if step is not None:
            with pytest.raises(ValueError, match="step: expected a"):
                manager.restore(step)
        assert manager.save(2, state(2)), "the refusals cost nothing"
    assert Run(storage).steps() == [1, 2]


GOOD_METRICS = [0.5, 1, np.float32(0.5), jnp.asarray(0.5), torch.tensor(0.5), True, Fraction(1, 2)]
BAD_METRICS = ["0.5", b"0.5", None, [0.5], 1j, np.zeros(2), torch.zeros(2), 10**400, object()]


@pytest.mark.parametrize("value", GOOD_METRICS, ids=lambda value: type(value).__name__)
def test_a_metric_is_any_number(value: Any) -> None:
    with CheckpointManager(MemoryStorage()) as manager:
        assert manager.save(1, state(1), {"loss": value, "nan": math.nan, "inf": math.inf})
        manager.wait_until_finished()
        metrics = manager.metrics(1)
        assert math.isnan(metrics.pop("nan"))
        assert metrics == {"loss": float(value), "inf": math.inf}


@pytest.mark.parametrize("value", BAD_METRICS, ids=lambda value: type(value).__name__)
def test_a_metric_that_is_no_number_is_refused_at_once_by_name(value: Any) -> None:
    with CheckpointManager(MemoryStorage()) as manager:
        with pytest.raises(ArgumentError, match="expected a number for 'loss'"):
            manager.save(1, state(1), {"good": 1.0, "loss": value})
        for metrics, expected in (({1: 0.5}, "strings as names"), ({"\ud800": 0.5}, "in Unicode")):
            with pytest.raises(ArgumentError, match=expected):
                manager.save(1, state(1), metrics)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="metrics: expected a mapping"):
            manager.save(1, state(1), [0.5])  # type: ignore[arg-type]
        assert manager.all_steps() == []
        assert manager.save(1, state(1))


def test_arguments_that_cannot_be_saved_raise_in_the_call(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UnsupportedLeafError, match="odd"):
            manager.save(1, {"odd": object()})
        manager.wait_until_finished()
        assert manager.save(1, state(1))


def test_a_save_without_a_state_is_refused() -> None:
    with CheckpointManager(MemoryStorage()) as manager:
        for save in (lambda: manager.save(1), lambda: manager.save(1, None)):
            with pytest.raises(ArgumentError, match="state: expected a tree of values, found None"):
                save()
        assert manager.all_steps() == []


def test_metrics_of_a_step_that_is_not_saved_are_not_checked() -> None:
    class Waits:
        def __float__(self) -> float:
            raise AssertionError("a loop would wait for the device here")

    with CheckpointManager(MemoryStorage(), save_interval_steps=10) as manager:
        assert not manager.save(1, state(1), {"loss": Waits()})


# ---------------------------------------------------------------- recipes

EXACT_RECIPE = {
    "f32": np.float32(0.1),
    "f64": np.float64(0.1),
    "i64": np.int64(-3),
    "bool": np.True_,
    "text": np.str_("adam"),
    "jax": jnp.asarray(0.1, jnp.bfloat16),
    "torch": torch.tensor(3),
    "enum": enum.IntEnum("Kinds", {"A": 4}).A,  # type: ignore[attr-defined]
    "large": 2**64 - 1,
}
BAD_RECIPE = [
    *(math.nan, math.inf, np.float32("nan"), None, 2**64, -(2**63) - 1, [1], (1, 2), {"a": 1}),
    *(b"x", 1j, Decimal(1), np.zeros(2), np.datetime64("2020"), "\ud800", object()),
]


def test_values_of_numpy_and_frameworks_in_a_recipe_are_exact(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, recipe=EXACT_RECIPE) as manager:
        manager.save(1, state(1))
    held = Run(tmp_path).manifest(1).recipe
    given = {name: held[name] for name in EXACT_RECIPE}  # beside the settings of the frameworks
    assert given == {name: np.asarray(value).item() for name, value in EXACT_RECIPE.items()}
    json.dumps(held)
    with CheckpointManager(tmp_path, recipe=EXACT_RECIPE) as manager:
        assert manager.restore().step == 1
    other = CheckpointManager(tmp_path, recipe={**EXACT_RECIPE, "f32": 0.1})
    with other, pytest.raises(RecipeMismatchError, match="f32"):
        other.restore()


@pytest.mark.parametrize("value", BAD_RECIPE, ids=lambda value: type(value).__name__)
def test_a_recipe_that_cannot_be_recorded_is_refused_before_anything_is_done(
    tmp_path: Path, value: Any
) -> None:
    with pytest.raises(ArgumentError, match=r"recipe: expected .* for 'field'"):
        CheckpointManager(tmp_path / "run", recipe={"good": 1, "field": value})
    with pytest.raises(ArgumentError, match="recipe: expected strings as names"):
        CheckpointManager(tmp_path / "run", recipe={1: 1})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match="recipe: expected names in Unicode"):
        CheckpointManager(tmp_path / "run", recipe={"\ud800": 1})
    assert not (tmp_path / "run").exists()


def test_one_name_may_be_allowed_without_a_tuple(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, recipe={"threads": 1}) as manager:
        manager.save(1, state(1))
    other = CheckpointManager(tmp_path, recipe={"threads": 2}, allow="threads")  # type: ignore[arg-type]
    with other, pytest.warns(UserWarning, match="threads"):
        assert other.restore().step == 1


@pytest.mark.parametrize("name", ["max_to_keep", "save_interval_steps"])
@pytest.mark.parametrize("value", [0, -1, True, 2.5, "3"])
def test_counts_are_integers(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: expected .*an integer of at least 1, found"):
        CheckpointManager(tmp_path, **{name: value})


# ---------------------------------------------------------------- states that can be called


class EquinoxModel(equinox.Module):
    w: jax.Array

    def __call__(self) -> None:
        raise AssertionError("the model was called")


class EmptyEquinoxModel(equinox.Module):
    def __call__(self) -> None:
        raise AssertionError("the model was called")


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))

    def __call__(self) -> None:
        raise AssertionError("the model was called")


class TorchModel(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def __call__(self) -> None:  # type: ignore[override]
        raise AssertionError("the model was called")


@dataclass
class DataModel:
    w: np.ndarray[Any, Any]

    def __call__(self) -> None:
        raise AssertionError("the model was called")


class Makes:
    """An object that is no state, because nothing in it can be saved."""

    def __call__(self) -> dict[str, Any]:
        return state(3)

    def method(self) -> dict[str, Any]:
        return state(3)


def make() -> dict[str, Any]:
    return state(3)


STATES = {
    "equinox": lambda: EquinoxModel(jnp.ones(3)),
    "empty equinox": EmptyEquinoxModel,
    "nnx": NnxModel,
    "torch": TorchModel,
    "dataclass": lambda: DataModel(np.ones(3)),
    "checkpoint": lambda: Checkpoint(**state(3)),
    "jax partial": lambda: jax.tree_util.Partial(jnp.add, jnp.ones(3)),
}
FUNCTIONS = {
    "function": make,
    "lambda": lambda: state(3),
    "partial": partial(state, 3),
    "method": Makes().method,
    "callable": Makes(),
    "jitted": jax.jit(lambda: {"w": jnp.full(10, 3, jnp.float32)}),
    "filter_jit": equinox.filter_jit(lambda: {"w": jnp.full(10, 3, jnp.float32)}),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_callable_state_is_not_called(tmp_path: Path, kind: str) -> None:
    fresh = STATES[kind]()
    assert not makes_state(fresh)
    with CheckpointManager(tmp_path) as manager:
        first = manager.restore_or_initialize(fresh)
        assert first.state is fresh
        assert first.step == 0
        manager.save(1, fresh)
        manager.wait_until_finished()
        assert manager.restore_or_initialize(STATES[kind]()).step == 1


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_makes_the_state(tmp_path: Path, kind: str) -> None:
    with CheckpointManager(tmp_path) as manager:
        fresh, step = manager.restore_or_initialize(FUNCTIONS[kind])
        assert (np.asarray(fresh["w"]).tolist(), step) == ([3.0] * 10, 0)
        manager.save(1, fresh)
        manager.wait_until_finished()
        assert manager.restore_or_initialize(FUNCTIONS[kind]).step == 1


def test_a_class_makes_the_state(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        fresh, _ = manager.restore_or_initialize(NnxModel)
        assert isinstance(fresh, NnxModel)


# ---------------------------------------------------------------- names, and parts


def test_every_reader_accepts_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run, save_interval_steps=2) as manager:
        assert manager.latest_checkpoint is None
        assert manager.checkpoints == []
        assert manager.checkpoint_interval == 2
        for step in (2, 4):
            manager.save(step, state(step))
        manager.wait_until_finished()
        assert manager.checkpoints == [f"{run}@2", f"{run}@4"]
        assert manager.latest_checkpoint == f"{run}@4"
        first, newest = manager.checkpoints
        assert manager.restore(first).step == 2
        assert manager.restore(manager.latest_checkpoint).step == 4
        with pytest.raises(ArgumentError, match="expected a step, or a name"):
            manager.restore("other@2")
        with pytest.raises(ArgumentError, match="expected a step, or a name"):
            manager.restore("2")
    assert load_checkpoint(first)["w"][0] == 2
    assert load_checkpoint(newest, 4)["w"][0] == 4
    assert Checkpoint(**state(0)).restore(first) == 2
    with pytest.raises(ArgumentError, match="step: expected 2"):
        load_checkpoint(first, 4)
    with pytest.raises(StepNotFoundError):
        load_checkpoint(f"{run}@3")
    assert Checkpoint(**state(0)).restore(None) == 0


def test_a_manager_accepts_the_names_of_the_best_and_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ManagerOptions(retention=Retention(best_metric="loss", best_mode="min"))
    with CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in ((1, 1.0), (2, 0.5), (3, 0.75)):
            manager.save(step, state(step), {"loss": loss})
    with CheckpointManager(tmp_path) as manager:
        for which, step in (("best", 2), ("best:max:loss", 1), ("latest", 3), ("3", 3)):
            name = f"{tmp_path}@{which}"
            assert manager.restore(name).step == step
            assert manager.metrics(name) == manager.metrics(step)
            assert manager.fingerprint(name) == manager.fingerprint(step)
            assert manager.metadata(name).keys() == manager.metadata(step).keys()
            with monkeypatch.context() as inside:
                inside.chdir(tmp_path.parent)
                assert manager.metrics(f"{tmp_path.name}/@{which}") == manager.metrics(step)
        for name in (f"{tmp_path}@worst", f"{tmp_path}x@best", "best", "@best"):
            with pytest.raises(ArgumentError, match="expected a step, or a name"):
                manager.restore(name)
        with pytest.raises(ArgumentError, match="with one step"):
            manager.metrics(f"{tmp_path}@1,2")
        with pytest.raises(StepNotFoundError):
            manager.metrics(f"{tmp_path}@best:min:other")


def test_another_value_of_a_metric_of_a_saved_step_is_warned_about(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1), {"loss": 1.0, "nan": float("nan")})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            manager.save(1, state(1), {"loss": 1.0, "nan": float("nan"), "late": 3.0}, force=True)
        with pytest.warns(
            UserWarning, match=r"step 1 .*: loss is 1\.0 there and 2\.0 in this save\."
        ):
            manager.save(1, state(1), {"loss": 2.0, "later": 4.0}, force=True)
        metrics = manager.metrics(1)
        assert math.isnan(metrics.pop("nan"))
        assert metrics == {"loss": 1.0, "late": 3.0, "later": 4.0}


def test_a_directory_whose_name_looks_like_a_step_is_that_directory(tmp_path: Path) -> None:
    odd = tmp_path / "run@7"
    with CheckpointManager(odd) as manager:
        manager.save(3, state(3))
    assert load_checkpoint(str(odd))["w"][0] == 3
    assert load_checkpoint(f"{odd}@3")["w"][0] == 3


def members(k: int) -> dict[str, Any]:
    return {
        "model": {"a/b": np.full(3, k), "c": [np.full(2, k), np.full(4, k)]},
        "model2": np.full(2, k),
        "opt": (np.full(3, k), k),
        "step": k,
    }


def test_a_partial_restore_replaces_the_chosen_leaves(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, members(1))
        manager.wait_until_finished()
        like = members(9)
        restored, step = manager.restore(1, like, leaves="model")
        assert step == 1
        assert restored["model"]["a/b"].tolist() == [1, 1, 1]
        assert restored["model"]["c"][1].tolist() == [1] * 4
        assert restored["opt"] is like["opt"], "the rest stays the very same objects"
        assert restored["model2"] is like["model2"]
        assert restored["step"] == 9
        assert like["model"]["a/b"].tolist() == [9, 9, 9], "containers come back new"
        restored, _ = manager.restore(like=like, leaves=["model/c/1", "model/a%2Fb", "step"])
        assert restored["model"]["c"][0] is like["model"]["c"][0]
        assert restored["model"]["c"][1].tolist() == [1] * 4
        assert restored["model"]["a/b"].tolist() == [1, 1, 1]
        assert restored["step"] == 1
        assert type(restored["opt"]) is tuple
        restored, _ = manager.restore(like=like, leaves=("opt", "opt/0"))
        assert [restored["opt"][0].tolist(), restored["opt"][1]] == [[1, 1, 1], 1]
        assert manager.restore(leaves="opt").state.keys() == {"opt"}


def test_a_partial_restore_writes_modules_in_place_and_other_members_not_at_all(
    tmp_path: Path,
) -> None:
    def new(k: int) -> Checkpoint:
        torch.manual_seed(k)
        model, other = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
        return Checkpoint(model=model, other=other, epoch=k)

    saved, live = new(1), new(2)
    kept = live.other.weight.detach().clone()
    model = live.model
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved)
        manager.wait_until_finished()
        restored, _ = manager.restore(like=live, leaves="model")
        assert restored is live
        assert live.model is model
        assert torch.equal(model.weight, saved.model.weight)
        assert torch.equal(live.other.weight, kept)
        assert live.epoch == 2
        manager.restore(like=live, leaves="epoch")
        assert live.epoch == 1


def test_a_partial_restore_that_fails_changes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 2), "n": 1})
        manager.wait_until_finished()
        live = {"model": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 5), "new": 1}
        before = live["model"].weight.detach().clone()
        with pytest.raises(MismatchError, match="head/weight: expected"):
            manager.restore(like=live, leaves=("model", "head"))
        with pytest.raises(MismatchError, match="new: the checkpoint has no such"):
            manager.restore(like=live, leaves=("model", "new"))
        with pytest.raises(MismatchError, match="n: the target has no such"):
            manager.restore(like=live, leaves=("model", "n"))
        with pytest.raises(StepNotFoundError, match="no leaf that was asked for"):
            manager.restore(like=live, leaves="nothing")
        for wrong in ((), "", 5, ["model", 5]):
            with pytest.raises(ArgumentError, match="leaves: expected"):
                manager.restore(like=live, leaves=wrong)  # type: ignore[arg-type]
        assert torch.equal(live["model"].weight, before)


def test_a_partial_restore_reads_only_its_own_chunks(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": np.arange(10.0)})
        manager.wait_until_finished()
        manager.save(2, {"model": np.arange(10.0), "opt": np.arange(20.0)})
        manager.wait_until_finished()
        newest = max((tmp_path / "packs").iterdir())
        newest.write_bytes(bytes(newest.stat().st_size))  # where the leaf "opt" is
        like = {"model": np.zeros(10), "opt": np.zeros(20)}
        restored, step = manager.restore(like=like, leaves="model")
        assert (restored["model"].tolist(), step) == (np.arange(10.0).tolist(), 2)
        with pytest.raises(StoreError, match="opt"):
            manager.restore(2, like)


def test_a_trainer_does_not_call_a_module_either(tmp_path: Path) -> None:
    model = EquinoxModel(jnp.ones(3))
    trainer = Trainer(lambda s, _: (s, {}), model, [1, 2], RunConfig(tmp_path))
    assert trainer.state is model


def test_a_group_that_lacks_an_operation_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """A class that was written for an earlier release, which did not ask for `agree`."""

    names = {name for name in (*vars(Rank), *vars(Processes)) if not name.startswith("_")} - {
        "agree"
    }
    members = {name: getattr(SingleProcess, name) for name in names}
    kinds: list[Any] = [type("Older", bases, members) for bases in ((), (Processes,))]
    for kind in kinds:
        for use in (partial(CheckpointManager, tmp_path / "run"), partial(state_digest, state(1))):
            with pytest.raises(ArgumentError, match="without agree"):
                use(processes=kind())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (
            lambda: CheckpointManager("run", options=cast(Any, 5)),
            "options: expected a ManagerOptions, found 5",
        ),
        (
            lambda: ManagerOptions(retention=cast(Any, {})),
            "retention: expected a Retention, found {}",
        ),
        (lambda: ManagerOptions(clock=cast(Any, 5)), "clock: expected a function, found 5"),
        (
            lambda: Retention(best_metric=cast(Any, 5)),
            "best_metric: expected strings as names, found 5",
        ),
    ],
)
def test_options_of_another_kind_are_refused_by_name(make: Any, found: str) -> None:
    with pytest.raises(ArgumentError, match=found):
        make()
