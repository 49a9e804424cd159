"""Fast steps on a platform where they were not measured: computed both ways first, and compared.
And programs that compute something else, which the comparison of programs and these steps refuse.

Here the CPU is such a platform. test_jax_invariance.py has several devices and processes.
"""
# ruff: noqa: ARG005  grad takes (state, batch, key)

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perdure.checkpoint import CheckpointManager
from perdure.distribute.jax.fused import hlo, proven_programs, step_by_signature
from perdure.distribute.jax.programs import update_program
from perdure.distribute.step import TrainStep
from perdure.distribute.values import PerReplica
from perdure.errors import StateError
from perdure.jax import OneDeviceStrategy

Functions = tuple[Callable[..., Any], Callable[..., Any]]


def grad(state: Any, batch: Any, key: Any) -> Any:
    return {"g": batch["x"] * jnp.float32(0.7)}


def update(state: Any, total: Any) -> Any:
    return {**state, "sum": state["sum"] + total["g"]}, {"mean": total["g"].mean()}


def first_state() -> dict[str, Any]:
    return {"sum": np.zeros(64, np.float32)}


def drawing_grad(state: Any, batch: Any, key: Any) -> Any:
    return {"g": batch["x"] * jax.random.key_data(key)[0].astype(jnp.float32)}


def drawing_update(state: Any, total: Any) -> Any:
    new, logs = update(state, total)
    return {**new, "few": state["few"] + jnp.int4(1)}, logs


def drawing_state() -> dict[str, Any]:
    """A random key, and elements that share a byte."""
    return {**first_state(), "few": jnp.zeros(3, jnp.int4), "key": jax.random.key(3)}


def shares(step: int, replicas: int, rows: int = 64) -> PerReplica:
    rng = np.random.default_rng(step)
    values = [{"x": rng.normal(size=rows).astype(np.float32)} for _ in range(replicas)]
    return PerReplica(tuple(values), tuple(range(replicas)), step)


def as_bytes(value: Any) -> list[bytes]:
    def data(leaf: Any) -> Any:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return jax.random.key_data(leaf) if is_key else leaf

    return [np.asarray(data(leaf)).tobytes() for leaf in jax.tree.leaves(value)]


class Trained(NamedTuple):
    """The results and the sentences of some steps, and how many of them the reference computed."""

    results: list[list[bytes]]
    said: list[str]
    by_verbs: int


Train = Callable[..., Trained]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains some steps from a state. `on` is PERDURE_FAST_ON where the CPU was not measured."""
    by_verbs, calls = TrainStep._by_verbs, list[int]()

    def counted(self: TrainStep, state: Any, batch: Any, step: int, *rest: Any) -> Any:
        calls.append(step)
        return by_verbs(self, state, batch, step, *rest)

    monkeypatch.setattr(TrainStep, "_by_verbs", counted)

    def train(
        steps: range,
        on: str | None = "cpu",
        functions: Functions = (grad, update),
        replicas: int = 1,
        state: Any = None,
        donate: bool = False,
    ) -> Trained:
        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            if on is not None:
                patch.setattr(step_by_signature, "MEASURED", ("abacus",))
                patch.setenv("PERDURE_FAST_ON", on)
            strategy = OneDeviceStrategy(replicas=replicas)
            step = strategy.step(*functions, donate=donate)
            results, said = [], []
            state = first_state() if state is None else state
            for number in steps:
                state, logs = step(state, shares(number, replicas))
                results.append(as_bytes((state, logs)))
                said.append(strategy.explain(step))
        return Trained(results, said, len(calls))

    return train


@pytest.mark.parametrize("on", ["", "gpu, tpu"])
def test_a_platform_that_was_not_measured_is_slow_until_it_is_named(train: Train, on: str) -> None:
    trained = train(range(2), on)
    assert trained.by_verbs == 2
    for sentence in trained.said:
        assert "measured on abacus only, and the devices are cpu" in sentence
        assert "PERDURE_FAST_ON=cpu" in sentence
        assert ("found PERDURE_FAST_ON=gpu, tpu" in sentence) == bool(on)


def test_a_step_is_fast_after_steps_that_were_equal(train: Train, caplog: Any) -> None:
    caplog.set_level("INFO", "perdure.distribute")
    count = step_by_signature.STEPS

    def run(on: str, donate: bool) -> Trained:
        functions = drawing_grad, drawing_update
        return train(range(count + 2), on, functions, 2, drawing_state(), donate)

    slow, checked = run("", donate=False), run("tpu, CPU", donate=True)
    assert checked.results == slow.results
    assert (slow.by_verbs, checked.by_verbs) == (count + 2, count)
    for number, sentence in enumerate(checked.said[: count - 1], 1):
        assert f"the bits of {number} were equal so far" in sentence
    assert {sentence.startswith("Fast: ") for sentence in checked.said[count - 1 :]} == {True}
    assert f"on cpu the first {count} steps, computed both ways, had equal bits" in checked.said[-1]
    assert [record.message for record in caplog.records] == [checked.said[-1]], "told once"


def test_another_shape_is_another_program_and_compared_again(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, compared = step_by_signature.STEPS, list[int]()
    difference = step_by_signature.difference
    monkeypatch.setattr(
        step_by_signature, "difference", lambda *words: (compared.append(1), difference(*words))[1]
    )
    monkeypatch.setattr(step_by_signature, "MEASURED", ())
    monkeypatch.setenv("PERDURE_FAST_ON", "cpu")
    step = OneDeviceStrategy(replicas=1).step(
        lambda s, b, k: {"x": b["x"].sum()}, lambda s, t: (s + t["x"], t)
    )
    state: Any = jnp.zeros(())
    for rows, expected in ((8, count), (4, 2 * count), (8, 2 * count), (4, 2 * count)):
        for number in range(count + 1):
            state, _ = step(state, shares(number, 1, rows))
        assert len(compared) == expected


# ---------------------------------------------------------------- negative controls


def fused_update(patch: pytest.MonkeyPatch) -> None:
    """Grad and update without the edge that keeps XLA from a fused multiply-add over it."""
    patch.setattr(proven_programs, "_kept", lambda fn, *args: fn(*args))


def reordered_sum(patch: pytest.MonkeyPatch) -> None:
    """The replicas added from the last to the first in the program of a whole step."""
    total, compare = proven_programs.Layout.sum, cast("Any", hlo.step_difference)
    one_program = cast("Any", proven_programs._one_program)

    def broken(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                proven_programs.Layout,
                "sum",
                lambda self, values, add: total(self, reversed(list(values)), add),
            )
            return one_program(*args)

    def in_the_tree(*args: Any) -> str:
        *others, tree = args
        return compare(*others, lambda values, add: total(tree.__self__, values, add))

    patch.setattr(proven_programs, "_one_program", broken)
    patch.setattr(hlo, "step_difference", in_the_tree)


def averages(decays: tuple[float, float]) -> Any:
    def averaged(state: Any, total: Any) -> Any:
        new = [(1 - d) * s + d * total["g"] for s, d in zip(state["averages"], decays, strict=True)]
        return {"averages": new}, {"mean": total["g"].mean()}

    return averaged


def merged_constants(patch: pytest.MonkeyPatch) -> None:
    """An update in which two decays that print alike have become one, in every fast program."""
    merged = update_program(averages((0.001, 0.001)))
    for name in ("_one_program", "_in_pieces"):
        made = getattr(proven_programs, name)
        patch.setattr(
            proven_programs,
            name,
            lambda programs, *rest, made=made: made(programs._replace(update=merged), *rest),
        )


def failing(patch: pytest.MonkeyPatch) -> None:
    """A program that uses the memory of the state and then fails."""

    def prove(*_: Any) -> proven_programs.Proof:
        def run(state: Any, turns: Any) -> Any:
            for leaf in jax.tree.leaves(state):
                leaf.delete()
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

        return proven_programs.Proof(run, "it fails")

    patch.setattr(step_by_signature, "prove", prove)


MERGED = (
    merged_constants,
    (grad, averages((0.001, 0.0001))),
    {"averages": [np.zeros(64, np.float32)] * 2},
)

CONTROLS: dict[str, tuple[Any, Functions, Any, int, str]] = {
    # Equal at the first step, in which the sum is zero.
    "fused update": (fused_update, (grad, update), None, 1, "other bits in new state sum on "),
    "reordered sum": (reordered_sum, (grad, update), None, 3, "other bits in new state sum on "),
    "merged constants": (*MERGED, 1, "other bits in new state averages/1 on "),
    "a failure": (
        failing,
        (grad, update),
        None,
        1,
        "a step failed where the separate programs did not (RESOURCE_EXHAUSTED: out of memory)",
    ),
}


COMPARED: dict[str, tuple[Any, Functions, Any, int, str]] = {
    "fused update": (fused_update, (grad, update), None, 1, "are not three computations to XLA"),
    "reordered sum": (reordered_sum, (grad, update), None, 3, "its replicas take turns"),
    "merged constants": (*MERGED, 1, "new state averages/1 of update in another way"),
    "merged constants, in turns": (*MERGED, 2, "new state averages/1 of update in another way"),
}


@pytest.mark.parametrize("name", COMPARED)
def test_the_comparison_refuses_a_program_that_computes_something_else(
    train: Train, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    break_it, functions, state, replicas, why = COMPARED[name]

    def run(on: str | None = None) -> Trained:
        return train(range(4), on, functions, replicas, state, donate=True)

    expected = run("")
    monkeypatch.setattr(proven_programs, "UNROLLED_BYTES", 0 if "turns" in name else 1 << 20)
    break_it(monkeypatch)
    compared = run()
    assert compared.results == expected.results
    assert why in compared.said[-1]
    # The fault is one that changes the result where nothing is compared.
    for comparison in ("difference", "step_difference"):
        monkeypatch.setattr(hlo, comparison, lambda *_: "")
    assert run().results != expected.results


@pytest.mark.parametrize("name", CONTROLS)
def test_a_program_that_computes_something_else_is_refused(
    train: Train, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    break_it, functions, state, replicas, why = CONTROLS[name]

    def run(on: str | None) -> Trained:
        return train(range(4), on, functions, replicas, state, donate=True)

    expected = run("")
    break_it(monkeypatch)
    monkeypatch.setattr(hlo, "step_difference", lambda *_: "")
    with pytest.warns(RuntimeWarning, match="please report this") as warned:
        checked = run("cpu")
    assert checked.results == expected.results
    assert len(warned) == 1
    assert why in str(warned[0].message)
    assert "`perdure doctor`" in str(warned[0].message)
    assert warned[0].filename == __file__
    assert checked.said[-1].startswith("Not fast: on cpu a step ")
    assert why in checked.said[-1]
    seen = name == "fused update"
    assert checked.said[0].startswith("Not fast yet: ") == seen, "one step does not show it"
    # The fault is one that changes the result, where nothing is compared.
    if name == "a failure":
        with pytest.raises(RuntimeError, match="out of memory"):
            run(None)
    else:
        unseen = run(None)
        assert unseen.results != expected.results
        assert unseen.by_verbs == 0, "where it was measured, nothing is computed twice"


def test_a_step_that_calls_back_is_not_computed_twice(train: Train) -> None:
    seen: list[float] = []

    def calling(state: Any, batch: Any, key: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), batch["x"].sum())
        return grad(state, batch, key)

    trained = train(range(3), functions=(calling, update))
    jax.effects_barrier()
    assert len(seen) == trained.by_verbs == 3
    assert "calls back into Python" in trained.said[-1]


def test_a_mistake_of_the_user_is_raised_as_ever(train: Train) -> None:
    with pytest.raises(StateError, match="must return a state of the form that it got"):
        train(range(1), functions=(grad, lambda state, total: ({}, {})))


@pytest.mark.parametrize("differs", ["", "new state w on cpu"])
def test_both_ways_have_one_state_more_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, differs: str
) -> None:
    def states() -> int:
        gc.collect()
        arrays = [array for array in jax.live_arrays() if array.shape == (4099,)]
        return len({array.unsafe_buffer_pointer() for array in arrays})

    alive = []
    monkeypatch.setattr(
        step_by_signature, "difference", lambda *_: (alive.append(states()), differs)[1]
    )
    monkeypatch.setattr(step_by_signature, "MEASURED", ())
    monkeypatch.setenv("PERDURE_FAST_ON", "cpu")
    step = OneDeviceStrategy(replicas=1).step(
        lambda s, b, k: {"x": b["x"].sum()}, lambda s, t: ({"w": s["w"] + t["x"]}, t), donate=True
    )
    state: Any = {"w": jnp.zeros(4099)}
    with pytest.warns(RuntimeWarning) if differs else contextlib.nullcontext():
        for number in range(step_by_signature.STEPS + 1):
            state, _ = step(state, shares(number, 1))
            assert states() == 1
    assert alive == [2] * (1 if differs else step_by_signature.STEPS)


# ---------------------------------------------------------------- attempts of one run


def test_attempts_may_decide_in_other_ways(train: Train, tmp_path: Path) -> None:
    """Checked, without the variable, where it was measured, and checked again: one run, one result."""
    expected = train(range(12), "").results
    state: Any = first_state()
    said, results = [], []
    for first, stop, on in ((0, 5, "cpu"), (5, 7, ""), (7, 10, None), (10, 12, "cpu")):
        with pytest.MonkeyPatch.context() as patch:
            if on is not None:
                patch.setattr(step_by_signature, "MEASURED", ("abacus",))
                patch.setenv("PERDURE_FAST_ON", on)
            strategy = OneDeviceStrategy(replicas=1)
            step = strategy.step(grad, update, donate=True)
            recipe = strategy.recipe() | {"dataset": "shares"}
            with CheckpointManager(tmp_path / "run", recipe=recipe) as manager:
                state, found = manager.restore_or_initialize(first_state())
                assert found == first
                for number in range(first, stop):
                    state, logs = step(state, shares(number, 1))
                    results.append(as_bytes((state, logs)))
                manager.save(stop, state)
            said.append(strategy.explain(step).partition(":")[0])
    assert results == expected
    assert said == ["Fast", "Not fast", "Fast", "Not fast yet"]
