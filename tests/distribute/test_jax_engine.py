"""The JAX engine on one device: states of every kind, the thread pool, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.data import ArrayDataset
from perdure.distribute.jax.fused import hlo, step_by_signature
from perdure.distribute.jax.xla_settings import pin
from perdure.distribute.values import PerReplica
from perdure.errors import StateError, TopologyError
from perdure.jax import MirroredStrategy, OneDeviceStrategy
from perdure.state import restore, snapshot
from perdure.store import LocalStorage
from perdure.store.run_log import read_journal

V = 4


def dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(32, dtype=np.float32), 2 * V)


def grad(state: Any, batch: Any, key: Any) -> Any:
    x, weight = batch
    return {"s": (x * weight).sum() + jax.random.normal(key), "n": weight.sum()}


def update(state: Any, total: Any) -> Any:
    # `1.0` and `step` would make weak types, which a checkpoint does not keep.
    scale = jnp.where(state["step"] > 1, 1.0, 2.0)
    new = dict(state, w=state["w"] + total["s"] / total["n"], step=state["step"] + 1, scale=scale)
    return new, {"n": total["n"]}


def first_state() -> dict[str, Any]:
    return {"w": jnp.zeros(()), "step": 0, "scale": 1.0, "key": jax.random.key(3), "none": None}


@pytest.mark.parametrize("value", [2**40, 2**70, np.int64(2**40), np.full(2, 2**31), -(2**31) - 1])
def test_a_number_that_jax_would_cut_is_refused(value: Any) -> None:
    strategy = MirroredStrategy(1, V)
    train_step = strategy.step(grad, update)
    batch = strategy.batch(dataset(), 0)
    with pytest.raises(StateError, match=r"seen: .* does not fit into the widest integers"):
        train_step({**first_state(), "seen": value}, batch)
    state, _ = train_step({**first_state(), "seen": 2**31 - 1}, batch)  # control
    assert int(state["seen"]) == 2**31 - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("jax_default_prng_impl", "rbg"), ("jax_random_seed_offset", 5), ("jax_disable_jit", True)],
)
def test_settings_that_change_bits_are_in_the_recipe(name: str, value: Any) -> None:
    usual, before = MirroredStrategy(1, V).recipe(), getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        changed = MirroredStrategy(1, V).recipe()
    finally:
        jax.config.update(name, before)
    assert f"{name}={value}" in str(changed["settings"])
    assert {key for key in usual if usual[key] != changed[key]} == {"settings"}


def test_a_state_of_python_scalars_and_keys_becomes_arrays_that_stay() -> None:
    strategy = MirroredStrategy(1, V)
    traced = []

    def counted(state: Any, batch: Any, key: Any) -> Any:
        traced.append(state["step"].aval)
        return grad(state, batch, key)

    train_step = strategy.step(counted, update)
    state, data = first_state(), dataset()
    for step in range(3):
        state, logs = train_step(state, strategy.batch(data, step))
        assert float(logs["n"]) == 8
        state = restore(first_state(), snapshot(state))
    assert state["step"].dtype == np.int32
    assert int(state["step"]) == 3
    assert len(traced) == 1, "a resumed state is the same program"
    assert traced[0].weak_type, "as in jit"


def test_keys_are_those_of_fold_in() -> None:
    strategy = OneDeviceStrategy(replicas=V, seed=2**33 + 5)
    key = jax.random.wrap_key_data(jnp.array([2, 5], jnp.uint32), impl="threefry2x32")
    for replica, actual in enumerate(strategy.keys(7).values):
        expected = jax.random.fold_in(jax.random.fold_in(key, 7), replica)
        assert (jax.random.key_data(actual) == jax.random.key_data(expected)).all()
    small = OneDeviceStrategy(replicas=V, seed=5).keys(0).values[0]
    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 0), 0)
    assert (jax.random.key_data(small) == jax.random.key_data(expected)).all()


def test_run_and_reduce_on_jax() -> None:
    strategy = MirroredStrategy(1, V)
    values = strategy.run(lambda batch: batch[0].sum(), (strategy.batch(dataset(), 0),))
    x, _ = dataset().batch(0)
    assert float(strategy.reduce("sum", values)) == x.sum()
    assert float(strategy.reduce("mean", values)) == x.sum() / V


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda s, _: (dict(s, w=s["w"][None]), {}), "w: float32[] became float32[1]"),
        (lambda s, _: ({"w": s["w"]}, {}), "key: key<fry>[] became nothing"),
        (lambda s, _: s, "expected (state, logs) as its result, found dict"),
    ],
)
def test_an_update_that_changes_the_structure_of_the_state_is_refused(fn: Any, says: str) -> None:
    strategy = MirroredStrategy(1, V)
    with pytest.raises(StateError) as error:
        strategy.step(grad, fn)(first_state(), strategy.batch(dataset(), 0))
    assert says in str(error.value)


def test_invalid_states_functions_and_devices_are_refused() -> None:
    strategy = MirroredStrategy(1, V)
    batch = strategy.batch(dataset(), 0)
    with pytest.raises(StateError) as error:
        strategy.step(grad, update)({"w": jnp.zeros(()), "name": "net"}, batch)
    assert "name: every leaf of a state must be an array or a number, found str" in str(error.value)
    with pytest.raises(StateError) as error:
        strategy.step(lambda *_: {}, update)({"w": jnp.zeros(())}, batch)
    assert "returned no contributions" in str(error.value)
    with pytest.raises(TopologyError) as error:
        MirroredStrategy(64)
    assert "64 devices were asked for" in str(error.value)
    assert "JAX_NUM_CPU_DEVICES=64" in str(error.value)
    with pytest.raises(TopologyError, match="devices: expected at least 1, found 0"):
        MirroredStrategy(0)
    with pytest.raises(
        TopologyError, match="devices: expected a number, a list of devices or None"
    ):
        MirroredStrategy("cpu")  # pyright: ignore[reportArgumentType]
    device = jax.devices()[0]
    for devices in ([], [device, device], ["cpu"], ["/gpu:0"]):
        with pytest.raises(TopologyError):
            MirroredStrategy(devices)


def test_the_thread_pool_is_pinned_before_jax_starts() -> None:
    environ: dict[str, str] = {}
    assert pin(None, environ, started=False) == 8
    assert environ == {"PJRT_NPROC": "8"}
    assert pin(None, environ, started=True) == 8
    assert pin(8, environ, started=True) == 8
    assert pin(3, fresh := {}, started=False) == 3
    assert fresh == {"PJRT_NPROC": "3"}
    assert pin(None, {"PJRT_NPROC": "5"}, started=False) == 5


def test_a_thread_pool_of_another_size_is_refused() -> None:
    with pytest.raises(TopologyError) as error:
        pin(4, {"PJRT_NPROC": "8"}, started=False)
    assert "threads=4 contradicts PJRT_NPROC=8" in str(error.value)
    with pytest.raises(TopologyError) as error:
        pin(4, {}, started=True)
    assert "comes too late" in str(error.value)
    for threads, environ in [(0, {}), (None, {"PJRT_NPROC": "many"})]:
        with pytest.raises(TopologyError):
            pin(threads, environ, started=False)


def test_an_unpinned_thread_pool_is_in_the_recipe() -> None:
    with pytest.warns(RuntimeWarning, match="before the strategy was made"):
        setting = pin(None, {}, started=True)
    assert isinstance(setting, str)
    assert setting.startswith("unpinned:")


def test_weakly_typed_values_are_not_placed_on_all_devices() -> None:
    for leaf in (np.float32(1), np.ones(2), jnp.ones(2)):
        assert step_by_signature._is_strong(leaf)
    weak = jnp.asarray(0.1)
    assert weak.aval.weak_type
    for leaf in (0.1, 1, True, weak):
        assert not step_by_signature._is_strong(leaf)


def test_a_smaller_last_batch_is_compared_once(monkeypatch: Any) -> None:
    compare, answers = hlo.step_difference, list[str]()

    def noted(*arguments: Any) -> str:
        answers.append(compare(*arguments))
        return answers[-1]

    monkeypatch.setattr(hlo, "step_difference", noted)
    strategy = OneDeviceStrategy(replicas=1)
    step = strategy.step(
        lambda state, batch, _: {"s": (state["w"] * batch["x"]).sum()},
        lambda state, total: ({"w": state["w"] - total["s"]}, {}),
    )
    state: Any = {"w": jnp.float32(1)}
    for number, rows in enumerate((4, 4, 3, 4, 4, 3)):
        share = {"x": np.ones(rows, np.float32)}
        state, _ = step(state, PerReplica((share,), strategy.local_replicas, number))
    assert answers == ["", ""]


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x0f", b"\x1a\x7f", b"\x30\x05", b"none"])
def test_an_unreadable_program_equals_no_other(data: bytes) -> None:
    class Program:
        def runtime_executable(self) -> Any:
            return self

        def hlo_modules(self) -> Any:
            return [self]

        def as_serialized_hlo_module_proto(self) -> bytes:
            return data

    single = hlo.SinglePrograms(Program(), Program(), Program(), ["x"], ["y"])
    assert hlo.difference(Program(), Program(), ["x"]) == hlo.NOT_UNDERSTOOD
    assert hlo.step_difference(Program(), single, 1, False, cast("Any", sum)) == hlo.NOT_UNDERSTOOD


@pytest.mark.parametrize("replicas", [1, 2])
def test_under_disable_jit_the_functions_see_values(replicas: int) -> None:
    strategy = MirroredStrategy(1, replicas)
    seen: list[float] = []

    def grad(state: Any, batch: Any, key: Any) -> Any:
        seen.append(float(batch[0].sum()))
        return {"s": batch[0].sum()}

    train_step = strategy.step(grad, lambda state, total: (state + total["s"], {}))
    with jax.disable_jit():
        state, _ = train_step(jnp.zeros(()), strategy.batch(dataset(), 0))
    assert len(seen) == replicas
    assert float(state) == sum(seen)


def test_a_function_over_a_mesh_of_one_device_runs() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("own",))
    spec = jax.sharding.PartitionSpec()

    def grad(state: Any, batch: Any, key: Any) -> Any:
        doubled = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)
        return {"s": doubled(batch[0].sum())}

    strategy = MirroredStrategy(1, 2)
    train_step = strategy.step(grad, lambda state, total: (state + total["s"], {}))
    state, _ = train_step(jnp.zeros(()), strategy.batch(dataset(), 0))
    assert float(state) == 2 * sum(
        float(share[0].sum()) for share in strategy.batch(dataset(), 0).values
    )


def test_many_steps_are_the_steps_one_by_one() -> None:
    strategy, data = MirroredStrategy(1, V), dataset()
    train_step, batches = strategy.step(grad, update), [strategy.batch(data, n) for n in range(3)]
    alone, logs = first_state(), []
    for batch in batches:
        alone, step_logs = train_step(alone, batch)
        logs.append(step_logs["n"])
    together, stacked = train_step.many(first_state(), batches)
    assert np.asarray(alone["w"]).tobytes() == np.asarray(together["w"]).tobytes()
    assert stacked["n"].tolist() == [float(number) for number in logs]


def test_the_journal_of_one_program_is_that_of_single_programs(tmp_path: Path) -> None:
    """A step that runs as one program has no total; everything else in its line is the same."""
    lines = []
    for name in ("fused", "single"):
        strategy = MirroredStrategy(1, 1)
        with CheckpointManager(tmp_path / name, options=ManagerOptions(journal_every=1)) as manager:
            train_step = strategy.step(
                lambda _state, batch, _key: {"s": (batch[0] * batch[1]).sum()},
                lambda state, total: (state + total["s"], {}),
                journal=manager.journal,
            )
            if name == "single":
                train_step._fused = None
            state = jnp.zeros(())
            for step in range(3):
                state, _ = train_step(state, strategy.batch(dataset(), step))
                manager.journal.record(step + 1, state)
        lines.append([*read_journal(LocalStorage(tmp_path / name))])
    fused, single = lines
    assert [(e.step, e.batch, e.state) for e in fused] == [
        (e.step, e.batch, e.state) for e in single
    ]
    assert all(entry.total and entry.batch for entry in single)
    assert [entry.total for entry in fused] == [None] * 3
