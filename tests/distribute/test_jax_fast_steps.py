"""Which steps on JAX are fast, the reason of each that is not, and states that are given away."""
# ruff: noqa: ARG005  grad takes (state, batch, key)

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import explained_functions as explained
import group
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_engine import NumpyEngine

from perdure.checkpoint import CheckpointManager
from perdure.data import ArrayDataset
from perdure.distribute import Strategy
from perdure.distribute.audit import AuditOptions
from perdure.distribute.jax.fused import hlo, hlo_graph, proven_programs
from perdure.distribute.jax.programs import add_program
from perdure.distribute.values import PerReplica
from perdure.errors import StateError, TopologyError
from perdure.jax import MirroredStrategy, OneDeviceStrategy
from perdure.train import RunConfig, Trainer

Apply = Callable[[Any, Any], Any]


def first_state() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    layers = {"w": draw(3, 4, 4), "k": draw(3, 3, 1, 4), "k2": draw(3, 3, 4, 4)}
    return {**layers, "n": jnp.ones(3, jnp.int4), "steps": 0}


def shares(step: int, replicas: int = 1) -> PerReplica:
    rng = np.random.default_rng(step)
    values = [{"x": rng.normal(size=(5, 4)).astype(np.float32)} for _ in range(replicas)]
    return PerReplica(tuple(values), tuple(range(replicas)), step)


def functions(apply: Apply) -> tuple[Any, Any]:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        taken = {name: state[name] for name in ("w", "k", "k2")}
        gradient = jax.grad(lambda p: (apply(p, batch["x"]) ** 2).sum())(taken)
        return {"g": gradient, "n": jnp.float32(5)}

    def update(state: Any, total: Any) -> Any:
        new = {n: state[n] - 0.1 * g / total["n"] for n, g in total["g"].items()}
        return {**new, "n": state["n"] + jnp.int4(1), "steps": state["steps"] + 1}, total["n"]

    return grad, update


def as_bytes(value: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(value)]


def trained(step: Any, replicas: int = 1, state: Any = None) -> list[bytes]:
    state = first_state() if state is None else state
    state, _ = step(state, shares(0, replicas))
    return as_bytes(step(state, shares(1, replicas)))


TOGETHER = (
    "linear", "remat in a scan", "GRU", "GroupNorm", "custom_vjp", "custom_jvp",
    "attention", "cond", "while loop", "sort", "embedding", "cumsum", "debug.print",
)  # fmt: skip


def test_these_functions_are_fast() -> None:
    """All in one step, which is compiled once; a reason would name the contribution or the log."""
    grads = {name: explained.FAST[name].grad for name in TOGETHER}

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {name: fn(state, batch, key) for name, fn in grads.items()}

    def update(state: Any, total: Any) -> Any:
        names = "moving average of the parameters", "loss scale with a condition", "int4 state"
        logs = {name: explained.UPDATES[name](state, total["linear"]) for name in names}
        gradients = jax.tree.map(lambda *g: sum(g), *(one["grads"] for one in total.values()))
        return explained.sgd(state, {**total["linear"], "grads": gradients})[0], logs

    strategy = OneDeviceStrategy(replicas=1)
    step = strategy.step(grad, update)
    assert strategy.explain(step) == "Not decided yet: the first call of the step decides."
    step(explained.first_state(), explained.shares(0, 1))
    assert strategy.explain(step) == "Fast: one program computes grad, the sums and update."


def test_what_several_devices_refuse() -> None:
    """`make proof-distribute` has all. Compiled for two devices, this one ends the process."""
    (told,) = group.results(
        "explained_worker.py",
        1,
        *("--devices", "2", "--names", "io_callback in update"),
        env={"JAX_NUM_CPU_DEVICES": "2"},
        forked="jax",
    )
    (row,) = told["rows"]
    assert row["equal"], row
    assert row["explained"], row


def test_a_value_from_python_is_seen_in_a_program() -> None:
    def compiled(fn: Any) -> Any:
        return jax.jit(fn).lower(jnp.ones(())).compile()

    assert hlo.calls_python(compiled(explained.from_python))
    assert not hlo.calls_python(compiled(lambda x: [jax.debug.callback(np.sin, x), x + 1][1]))
    assert not hlo.calls_python(compiled(jnp.sin))


@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_branch_on_a_value_is_an_error_and_not_a_slow_step(form: str) -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"x": batch["x"] if {"bool": bool, "float": float}[form](batch["x"].sum()) else 0.0}

    strategy = OneDeviceStrategy(replicas=1)
    step = strategy.step(grad, lambda state, total: (state, total))
    with pytest.raises(jax.errors.ConcretizationTypeError):
        step(first_state(), shares(0))


def plain() -> tuple[Any, Any]:
    return functions(lambda p, x: x @ p["w"][0])


REFUSED: dict[str, tuple[tuple[Any, Any], Any, str]] = {
    "a computation of its own": (
        (explained.REFUSED.grad, explained.REFUSED.update),
        explained.share(0, 0),
        explained.REFUSED.why,
    ),
    "a Python number": (
        (lambda s, b, k: {"x": b["x"] * jnp.float32(1)}, lambda s, t: (s, t)),
        {"x": 1.0},
        "a share holds a Python number",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reason_of_a_step_that_is_not_fast(name: str) -> None:
    fns, share, why = REFUSED[name]
    strategy = OneDeviceStrategy(replicas=1)
    step = strategy.step(*fns)
    step(explained.first_state(), PerReplica((share,), (0,), 0))
    assert strategy.explain(step).startswith("Not fast: ")
    assert why in strategy.explain(step)


def test_reasons_that_do_not_depend_on_the_functions(caplog: Any) -> None:
    strategy = OneDeviceStrategy(replicas=2)
    sums = lambda s, b, k: {"x": b["x"].sum()}, lambda s, t: (s, t)
    step = strategy.step(*sums, check_finite=True)
    assert "check_finite=True reads every contribution" in strategy.explain(step)
    step = strategy.step(*sums)
    caplog.set_level("DEBUG", "perdure.distribute")
    with jax.disable_jit():
        step(jnp.ones(()), shares(0, 2))
    assert "under jax.disable_jit()" in strategy.explain(step)
    assert "under jax.disable_jit()" in caplog.text
    for audit, why in ((0.0, "Fast: "), (1.0, "Not fast: the step was audited"), (0.0, "Fast: ")):
        step.set_audit(AuditOptions(audit))
        step(jnp.ones(()), shares(0, 2))
        assert strategy.explain(step).startswith(why)
    x, y = shares(0, 2).values
    with pytest.raises(StateError, match="another structure"):
        strategy.step(lambda s, b, k: b, lambda s, t: (s, t))(
            first_state(), PerReplica(({**x, "y": x["x"]}, y), (0, 1), 0)
        )
    assert Strategy(NumpyEngine(1), 1).step(*plain()).explain().startswith("Not fast: this engine")
    with pytest.raises(TopologyError, match=r"what strategy\.step\(grad, update\) returned"):
        strategy.explain(plain)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (jnp.bfloat16, "the contribution x is bfloat16, and XLA may keep a chain of narrow sums"),
        (jnp.complex64, "the contribution x is complex64, which XLA does not add between devices"),
    ],
)
def test_contributions_that_are_not_added_between_devices(dtype: Any, why: str) -> None:
    value = {"x": jax.ShapeDtypeStruct((3,), dtype)}
    devices = [SimpleNamespace(devices=["one"] * count) for count in (1, 2)]
    found = [proven_programs._unsuitable(layout, value) for layout in devices]  # type: ignore[arg-type]
    assert found[0] == ""
    assert why in found[1]


# ---------------------------------------------------------------- replicas of one device


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of each comparison of a whole step."""
    compare, calls = hlo.step_difference, list[tuple[Any, ...]]()
    monkeypatch.setattr(
        hlo, "step_difference", lambda *arguments: (calls.append(arguments), compare(*arguments))[1]
    )
    yield calls
    monkeypatch.undo()


def test_small_replicas_of_a_device_are_one_program(
    compared: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = 3
    strategy = OneDeviceStrategy(replicas=replicas)
    step, single, turns = (strategy.step(*plain()) for _ in range(3))
    single._fused = None
    expected = trained(single, replicas)
    assert trained(step, replicas) == expected
    assert f"grad for the {replicas} replicas of a device" in strategy.explain(step)
    # The control: the same additions in another order are refused.
    ((whole, programs, count, exchanges, tree),) = compared

    def in_a_row(values: list[Any], add: Any) -> Any:
        first, *others = reversed(values)
        for value in others:
            first = add(first, value)
        return first

    arguments = (whole, programs, count, exchanges)
    assert hlo.step_difference(*arguments, tree) == ""
    assert "XLA adds contribution g/k in another way" in hlo.step_difference(*arguments, in_a_row)
    # Larger ones take turns.
    monkeypatch.setattr(proven_programs, "UNROLLED_BYTES", 0)
    assert trained(turns, replicas) == expected
    assert "its replicas take turns" in strategy.explain(turns)


# ---------------------------------------------------------------- what is compiled


def test_a_program_that_is_only_compared_has_the_instructions_of_one_that_runs() -> None:
    grads = {name: explained.FAST[name].grad for name in ("attention", "GRU", "GroupNorm")}
    arguments = explained.first_state(), explained.shares(0, 1).values[0], jax.random.key(0)
    lowered = jax.jit(lambda *args: {n: fn(*args) for n, fn in grads.items()}).lower(*arguments)
    ways: list[Any] = [None, proven_programs._NEVER_RUNS, {"xla_disable_hlo_passes": "fusion"}]
    first, *others = [
        hlo_graph.graph_of(lowered.compile(compiler_options=options)) for options in ways
    ]
    assert [graph == first for graph in others] == [True, False]  # the last one is the control


@pytest.mark.parametrize("control", [False, True])
def test_a_program_that_is_only_compared_never_runs(
    control: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = proven_programs._Lowered.start

    def started(self: Any, *, runs: bool = True) -> Any:
        program = start(self, runs=runs).result()
        never = SimpleNamespace(runtime_executable=program.runtime_executable)  # cannot be called
        done: Future[Any] = Future()
        done.set_result(program if runs and not control else never)
        return done

    monkeypatch.setattr(proven_programs._Lowered, "start", started)
    for replicas, limit, donate in (
        (1, 1, False),
        (2, 1 << 24, False),
        (2, 0, False),
        (2, 0, True),
    ):
        monkeypatch.setattr(proven_programs, "UNROLLED_BYTES", limit)
        strategy = OneDeviceStrategy(replicas=replicas)
        step = strategy.step(*plain(), donate=donate)
        with pytest.raises(TypeError, match="not callable") if control else nullcontext():
            trained(step, replicas)
        assert strategy.explain(step).startswith("Fast: ")


# ---------------------------------------------------------------- states that are given away


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_state_that_is_given_away_is_used_again(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that take turns; the Trainer below gives away the state of replicas in one program."""
    monkeypatch.setattr(proven_programs, "UNROLLED_BYTES", 0)
    strategy = OneDeviceStrategy(replicas=replicas)
    step, kept = strategy.step(*plain(), donate=True), strategy.step(*plain())
    numbers = {"w": np.ones((3, 4, 4), np.float32)}
    given: Any = first_state() | numbers
    expected = trained(kept, replicas, given)
    state, _ = step(given, shares(0, replicas))
    assert (numbers["w"] == 1).all(), "memory of the caller's own"
    assert given["k"].is_deleted()
    pointer = state["w"].unsafe_buffer_pointer()
    after, logs = step(state, shares(1, replicas))
    assert as_bytes((after, logs)) == expected
    assert after["w"].unsafe_buffer_pointer() == pointer
    for old in (given, state):
        with pytest.raises(StateError, match=r"was given to an earlier step.*donate=False"):
            step(old, shares(2, replicas))
    # The control: without it the old state stays.
    again = first_state()
    kept(again, shares(0, replicas))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(again) if hasattr(leaf, "devices"))


@pytest.mark.parametrize("devices", [1, 2])
def test_one_array_under_two_names_is_not_given_away(devices: int) -> None:
    strategy = MirroredStrategy(jax.devices()[:devices], replicas=devices)
    step = strategy.step(
        lambda s, b, k: {"x": b["x"].sum()},
        lambda s, t: ({"a": s["a"] + t["x"], "b": s["b"] - t["x"]}, {}),
        donate=True,
    )
    array = jnp.ones(3)
    state, _ = step({"a": array, "b": array}, shares(0, devices))
    assert strategy.explain(step).startswith("Fast")
    assert not array.is_deleted()
    assert float(state["a"][0] + state["b"][0]) == 2


def test_results_are_given_away_only_as_long_as_that_is_asked_for() -> None:
    strategy = MirroredStrategy(jax.devices()[:2], replicas=2)
    step = strategy.step(*plain())
    first = first_state()
    step.donate_results()
    second, _ = step(first, shares(0, 2))
    third, _ = step(second, shares(1, 2))
    assert second["w"].is_deleted()
    step.donate_results(False)
    fourth, _ = step(third, shares(2, 2))
    step.donate_results()
    step(fourth, shares(3, 2))
    for kept in (first, third, fourth):
        assert not any(x.is_deleted() for x in jax.tree.leaves(kept) if hasattr(x, "devices"))


def test_memory_of_replicas_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the state, at most log2(V) + 1 gradients, and none for a new state if it is donated."""
    size, replicas, alive = 1 << 12, 8, [0]
    lower, start = proven_programs._Lowered.__init__, proven_programs._Lowered.start

    def lowered(self: Any, compiler: Any, fn: Any, *arguments: Any) -> None:
        sharding, values, donate, *options = arguments
        donate = donate and (overwrites or fn is not add_program)
        lower(self, compiler, fn, sharding, values, donate, *options)

    def watched(self: Any, **options: Any) -> Any:
        program = start(self, **options).result()

        def call(*values: Any) -> Any:
            result = program(*values)
            arrays = [a for a in jax.live_arrays() if a.shape == (size,)]
            alive.append(len({a.unsafe_buffer_pointer() for a in arrays}))
            return result

        call.runtime_executable = program.runtime_executable  # type: ignore[attr-defined]
        done: Future[Any] = Future()
        done.set_result(call)
        return done

    monkeypatch.setattr(proven_programs._Lowered, "__init__", lowered)
    monkeypatch.setattr(proven_programs._Lowered, "start", watched)
    monkeypatch.setattr(proven_programs, "UNROLLED_BYTES", 0)
    most = {}
    for donate, overwrites in ((True, True), (False, True), (True, False)):
        strategy = OneDeviceStrategy(replicas=replicas)
        step = strategy.step(
            lambda s, b, k: {"g": s["w"] * b["x"].sum()},
            lambda s, t: ({"w": s["w"] - t["g"]}, {}),
            donate=donate,
        )
        state: Any = {"w": jnp.ones(size)}
        state, _ = step(state, shares(0, replicas))
        gc.collect()
        alive[:] = []
        state, _ = step(state, shares(1, replicas))
        assert len(alive) == 2 * replicas
        most[donate, overwrites] = max(alive[:-1]), alive[-1]
        del state, _
    gradients = 4  # log2(V) + 1
    assert most[True, True][0] == 1 + gradients
    assert most[True, False][0] == 2 + gradients  # the control: a sum in memory of its own
    # During update: the state, the total, and the new state unless it has the memory of the old one.
    assert most[True, True][1] == 2
    assert most[False, True][1] == 3


def test_a_contribution_that_is_a_leaf_of_the_state_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums overwrite contributions. With int4 leaves they are made by `jit` functions."""
    monkeypatch.setattr(proven_programs, "UNROLLED_BYTES", 0)
    for few in (jnp.float32, jnp.int4):
        strategy = OneDeviceStrategy(replicas=2)
        step = strategy.step(lambda s, b, k: {"a": s, "b": s["w"]}, lambda s, t: (s, t))
        state: Any = {"w": jnp.arange(4.0), "few": jnp.ones(3, few)}
        for number in range(2):
            state, total = step(state, shares(number, 2))
            assert total["a"]["w"].tolist() == total["b"].tolist() == [0.0, 2.0, 4.0, 6.0]
            assert total["a"]["few"].tolist() == [2, 2, 2]
        assert "take turns" in strategy.explain(step)
        assert state["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert state["few"].tolist() == [1, 1, 1]


def test_a_trainer_gives_its_own_states_away(tmp_path: Path) -> None:
    strategy = OneDeviceStrategy(replicas=2)
    data = ArrayDataset({"x": np.ones((16, 4), np.float32)}, 4)
    prints = []
    for name, donate in (("given", None), ("kept", False)):
        states: list[Any] = []

        def noted(state: Any, batch: Any, step: Any) -> Any:
            states.append(state)  # noqa: B023
            return step(state, batch)

        step = strategy.step(*plain(), donate=donate)
        first = first_state()
        config = RunConfig(tmp_path / name, save_checkpoints_steps=4)
        trainer = Trainer(step, first, data, config, strategy=strategy)
        call = trainer._computation._step_fn
        watched: Any = lambda s, b, call=call: noted(s, b, call)  # noqa: E731
        watched.donate_results = call.donate_results  # type: ignore[attr-defined]
        trainer._computation._step_fn = watched
        trainer._computation._many = None
        final = trainer.train(4)
        deleted = [state["w"].is_deleted() for state in states]
        # The state that the caller has stays, and so does the last.
        assert not first["w"].is_deleted()
        assert not final["w"].is_deleted()
        assert deleted[2] == (donate is None)
        trainer.train(5)
        assert not final["w"].is_deleted(), "a call continues with what it restored"
        with CheckpointManager(tmp_path / name) as manager:
            prints.append(as_bytes(manager.restore(step=4, like=first_state()).state))
    assert prints[0] == prints[1]


# ---------------------------------------------------------------- what only moves elements


def test_moves_of_elements_are_followed() -> None:
    def origin(opcode: str, before: Any, after: Any, content: bytes = b"") -> Any:
        def shape(sizes: tuple[int, ...], order: tuple[int, ...]) -> bytes:
            layout = bytes([10, len(order), *order])
            return bytes([16, 11, 26, len(sizes), *sizes, 42, len(layout), *layout])

        instruction = hlo_graph.Instruction(opcode, shape(*after), content, 0, 1, (0,), (), (), b"")
        start = hlo.Origin("x", shape(*before))
        return hlo.moved(instruction, shape(*before), start)

    row, column = ((2, 3), (1, 0)), ((2, 3), (0, 1))
    assert origin("copy", row, column).positions is None
    assert origin("bitcast", row, ((3, 2), (0, 1))).positions.tolist() == [0, 3, 1, 4, 2, 5]
    assert origin("bitcast", row, ((6,), (0,))).positions is None
    assert origin("reshape", column, ((6,), (0,))).positions is None
    assert origin("bitcast", column, ((6,), (0,))).positions.tolist() == [0, 3, 1, 4, 2, 5]
    swapped = origin("transpose", row, ((3, 2), (1, 0)), bytes([114, 2, 1, 0]))
    assert swapped.positions.tolist() == [0, 3, 1, 4, 2, 5]
