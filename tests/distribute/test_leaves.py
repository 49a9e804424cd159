"""Leaves that a strategy carries bit for bit, and leaves that it refuses by path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import group
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from perdure.checkpoint import Checkpoint
from perdure.data import ArrayDataset
from perdure.distribute.values import PerReplica
from perdure.errors import StateError
from perdure.jax import MirroredStrategy as JaxStrategy
from perdure.torch import MirroredStrategy


@pytest.fixture(scope="module")
def report() -> Any:
    (out,) = group.results(
        "leaves_worker.py", 1, env={"JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "8"}, forked="jax"
    )
    return out


def test_elements_that_share_a_byte_on_1_2_and_8_devices(report: Any) -> None:
    assert report["1"] == report["2"] == report["8"]
    assert report["1"][0] != report["1"][1]
    assert all(report["round trip"])


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_strategy_on_jax_refuses_sharded_leaves_and_added_keys_by_path(
    report: Any, devices: int
) -> None:
    assert report[f"keys {devices}"].startswith(
        "a/k: values of the replicas are added, and random keys"
    )
    sharded = report[f"sharded {devices}"]
    assert sharded.startswith("net/kernel: float32[8, 2] is sharded (NamedSharding")
    assert "every device holds the whole state" in sharded
    assert report[f"whole {devices}"] == "nothing"


def test_keys_in_reduce_are_refused_by_path() -> None:
    strategy = JaxStrategy(1, 2)
    values = strategy.run(lambda key: {"k": key, "n": jnp.ones(())}, (strategy.keys(0),))
    with pytest.raises(StateError, match="k: values of the replicas are added, and random keys"):
        strategy.reduce("sum", values)
    assert jax.random.key_data(values.values[0]["k"]).shape == (2,)


@pytest.mark.parametrize("returned", ["grad", "state", "logs"])
def test_what_is_no_number_in_what_a_function_returns_is_refused_by_path(returned: str) -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"s": batch.sum(), "of": {"text": "x" if returned == "grad" else 1}}

    def update(state: Any, total: Any) -> Any:
        new = {"n": "x"} if returned == "state" else {"n": state["n"] + total["s"]}
        return new, {"of": {"text": "x" if returned == "logs" else 1}}

    step = JaxStrategy(1, 2).step(grad, update)
    path = "n" if returned == "state" else "of/text"
    with pytest.raises(StateError, match=f"{path}: expected arrays and numbers .* found str"):
        step({"n": jnp.zeros(())}, PerReplica((np.ones(2, np.float32),) * 2, (0, 1), 0))


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one process, on which a DTensor with `Shard` still counts as sharded."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_sharded_dtensor_is_refused_by_path(mesh: Any) -> None:
    data = ArrayDataset(np.ones((8, 2), np.float32), 4)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"s": torch.as_tensor(batch[0]).sum()}

    def refused(state: Any) -> str:
        strategy = MirroredStrategy(1, 2)
        step = strategy.step(grad, lambda state, total: (state, total))
        try:
            step(state, strategy.batch(data, 0))
        except StateError as error:
            return str(error)
        return "nothing"

    net = torch.nn.Sequential(torch.nn.Linear(2, 4))
    part = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    assert isinstance(part, DTensor)
    net[0].weight = torch.nn.Parameter(part)
    for state, path in [({"net": net}, "net.0.weight"), (Checkpoint(net=net), "net.0.weight")]:
        assert refused(state).startswith(f"{path}: [4, 2] is a DTensor that is sharded")
    assert refused({"ema": [part]}).startswith("ema.0: [4, 2] is a DTensor that is sharded")
    whole = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    assert refused({"ema": [whole]}) == "nothing"
