"""Statistics over several replicas are refused with the reason; statistics of one are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import perdure.jax
import perdure.torch
from perdure.data import ArrayDataset
from perdure.errors import StateError


def data() -> ArrayDataset:
    return ArrayDataset({"x": np.ones((8, 4), np.float32)}, 8)


def jax_step(grad: Any, state: Any) -> None:
    strategy = perdure.jax.MirroredStrategy(1, 2)
    strategy.step(grad, lambda state, _total: (state, None))(state, strategy.batch(data(), 0))


def test_psum_inside_grad_is_refused() -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"mean": jax.lax.psum(batch["x"], "batch")}

    with pytest.raises(StateError) as caught:
        jax_step(grad, {"w": jnp.ones(2)})
    assert "grad adds up over the devices itself (" in str(caught.value)
    assert "the bits would change with the topology" in str(caught.value)


@pytest.mark.parametrize("axis_name", ["batch", None])
def test_flax_batchnorm_across_devices_is_refused(axis_name: str | None) -> None:
    norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=nnx.Rngs(0))
    graph, params, stats = nnx.split(norm, nnx.Param, nnx.BatchStat)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"y": nnx.merge(graph, params, stats, copy=True)(batch["x"])}

    if axis_name is None:
        jax_step(grad, {"w": jnp.ones(2)})
        return
    with pytest.raises(StateError) as caught:
        jax_step(grad, {"w": jnp.ones(2)})
    assert "BatchNorm(axis_name=...)" in str(caught.value)


def test_another_name_error_is_not_renamed() -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"y": missing}  # type: ignore[name-defined]  # noqa: F821 (what is tested)

    with pytest.raises(NameError) as caught:
        jax_step(grad, {"w": jnp.ones(2)})
    assert "missing" in str(caught.value)


def test_torch_sync_batchnorm_is_refused() -> None:
    strategy = perdure.torch.MirroredStrategy(replicas=2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SyncBatchNorm(4))
    step = strategy.step(
        lambda state, batch, _key: {"y": state["model"](batch["x"])}, lambda s, _total: (s, None)
    )
    with pytest.raises(StateError) as caught:
        step({"model": model}, strategy.batch(data(), 0))
    assert str(caught.value).startswith("model.1: SyncBatchNorm adds up statistics")
    model[1] = torch.nn.BatchNorm1d(4)
    step({"model": model}, strategy.batch(data(), 0))
