"""The public methods on both engines: one result on any topology, and errors in every process."""

from __future__ import annotations

from typing import Any

import group
import jax
import numpy as np
import pytest
import surface_worker
import torch

import perdure.jax
import perdure.torch
from perdure.data import ArrayDataset
from perdure.distribute import get_replica_context, metrics
from perdure.distribute.engine import Stream
from perdure.distribute.topology import tensorflow_device
from perdure.distribute.torch.eager import TorchEagerRun
from perdure.errors import ArgumentError, StateError, TopologyError
from perdure.jax import OneDeviceStrategy as JaxStrategy
from perdure.torch import OneDeviceStrategy

SAME = ("scores", "mean", "again", "rows", "losses", "accuracy", "metrics", "finite", "merged")
ALONE = 'replicas 0, 1, 2, 3, 4 reached the end; replica 5 reached all_reduce("sum")'


@pytest.mark.parametrize(("engine", "leaf"), [("jax", "bad"), ("torch", "contributions/bad")])
def test_one_process_and_two_give_the_same_results(engine: str, leaf: str) -> None:
    """JAX has 2 devices in each of the two: 1, 2, 1 and 2 replicas."""
    _, alone = surface_worker.ENGINES[engine](None)
    first, last = group.results(
        "surface_worker.py",
        2,
        *("--engine", engine),
        env={"JAX_NUM_CPU_DEVICES": "2"},
        forked=engine,
    )
    expected = {name: alone[name] for name in SAME}
    for process in (first, last):
        assert {name: process[name] for name in SAME} == expected
    digests = ("scores", "mean", "again", "rows", "losses", "merged")
    assert len({alone[name] for name in digests}) == len(digests)

    assert alone["finite"].startswith(f"NonFiniteError: step 3: NaN or infinity in {leaf} of")
    assert f"{leaf} of logical replica 5" in alone["finite"]
    assert f"the replicas of uneven diverge: {ALONE}" in alone["uneven"]
    assert alone["failing"] == last["failing"] == "NonFiniteError: on purpose in logical replica 5"
    # An error in the replicas of one process is raised in the other.
    assert "uneven diverge: replicas 3, 4 reached the end; replica 5 reached" in last["uneven"]
    assert (
        "uneven failed in process 1: StateError: the replicas of uneven diverge" in first["uneven"]
    )
    assert "failing failed in process 1: NonFiniteError: on purpose in" in first["failing"]


def test_random_numbers_of_a_replica_do_not_depend_on_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = OneDeviceStrategy(replicas=3)

    def draw(key: torch.Generator, *, meet: bool) -> list[float]:
        context = get_replica_context()
        assert context is not None
        first = torch.rand(2)
        if meet:
            context.all_reduce("sum", first)
        return torch.cat([first, torch.rand(2)]).tolist()

    def numbers(*, meet: bool) -> tuple[list[float], ...]:
        return strategy.run(draw, (strategy.keys(4),), {"meet": meet}).values

    expected = numbers(meet=False)
    assert numbers(meet=True) == expected
    assert len({tuple(streams) for streams in expected}) == 3
    with monkeypatch.context() as patch:
        patch.setattr(TorchEagerRun, "random_state", lambda *_: lambda: None)
        assert numbers(meet=True) != expected, "negative control: nobody switches the generators"


def test_a_merge_draws_from_a_stream_of_its_own() -> None:
    """The stream is that of (seed, step, V), as in `update`; each merge of a run continues it."""

    def numbers(replicas: int, step: int = 4, *, draws: int = 1) -> list[float]:
        strategy = OneDeviceStrategy(replicas=replicas)
        drawn: list[float] = []

        def merge(strategy: Any, *values: Any) -> None:
            drawn.append(float(torch.rand(())))

        def fn(key: torch.Generator) -> float:
            context = get_replica_context()
            assert context is not None
            for _ in range(draws):
                torch.rand(7)  # each replica has another position in its stream
                context.merge_call(merge)
            return float(torch.rand(()))

        before = torch.get_rng_state()
        drawn += strategy.run(fn, (strategy.keys(step),)).values
        assert (torch.get_rng_state() == before).all()
        return drawn

    key = OneDeviceStrategy(replicas=3).engine.key(Stream(0, 4, 3))
    expected = torch.rand(3, generator=key).tolist()
    assert numbers(3, draws=3)[:3] == expected
    assert numbers(3)[0] == expected[0]
    assert len({*expected, *numbers(3)[1:], numbers(2)[0], numbers(3, 5)[0]}) == 3 + 3 + 2


def test_a_collective_inside_jit_is_refused() -> None:
    strategy = JaxStrategy(replicas=2)

    def fn() -> None:
        context = get_replica_context()
        assert context is not None
        jax.jit(lambda x: context.all_reduce("sum", x))(1.0)

    with pytest.raises(StateError) as error:
        strategy.run(fn)
    assert "reduce takes values, found one that is traced: call it outside of jit" in str(
        error.value
    )


@pytest.mark.parametrize("module", [perdure.jax, perdure.torch])
def test_devices_and_arguments_in_tensorflows_spelling(module: Any) -> None:
    first = module.OneDeviceStrategy(module.MirroredStrategy(1).engine.devices[0]).engine.devices
    for name in ("/cpu:0", "CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"):
        assert module.OneDeviceStrategy(name).engine.devices == first
        assert module.MirroredStrategy([name]).engine.devices == first
    for devices in (["/gpu:0", "/gpu:1"], ["cpus"], ["/tpu:0"]):
        with pytest.raises(TopologyError):
            module.MirroredStrategy(devices)
    for make, name in (
        (module.MirroredStrategy, "cross_device_ops"),
        (module.MultiWorkerMirroredStrategy, "communication_options"),
    ):
        with pytest.raises(ArgumentError, match="additions have a fixed order"):
            make(**{name: None})


def test_a_gpu_in_tensorflows_spelling_has_the_name_of_pytorch() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(TopologyError, match="cuda:0 was asked for"):
            OneDeviceStrategy("/gpu:0")
    names = ("/gpu:0", "GPU:1", "/job:worker/task:1/device:GPU:3", "/device:CPU:0")
    found = [tensorflow_device(name) for name in names]
    assert found == [("gpu", 0), ("gpu", 1), ("gpu", 3), ("cpu", 0)]
    assert [tensorflow_device(name) for name in ("cuda:0", "cpu", "/job:a", 0)] == [None] * 4


def test_names_of_tensorflow_that_a_strategy_and_a_metric_have() -> None:
    strategy: Any = OneDeviceStrategy(replicas=2)
    source = ArrayDataset({"x": np.arange(8.0, dtype=np.float32)}, 4, shuffle=False)
    batches = strategy.experimental_distribute_dataset(source)
    with strategy.scope():
        seen: Any = metrics.Mean()
    for batch in batches.take(2):
        inside = strategy.run(lambda batch: seen(batch["x"], batch["weight"]), (batch,))
        assert strategy.experimental_local_results(inside) == (None, None)
    assert seen.result() == 3.5
    seen.reset_states()
    assert metrics.Mean()(np.arange(3.0, dtype=np.float32)) == 1
    for use, form in (
        (lambda: strategy.experimental_run_v2, "strategy.run"),
        (lambda: seen.merge_state, "merge"),
    ):
        with pytest.raises(AttributeError, match=form):
            use()
