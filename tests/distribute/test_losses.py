"""Loss helpers: TensorFlow's worked figures, on every kind of array."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy_engine import NumpyEngine

from perdure.distribute import (
    PerReplica,
    Strategy,
    compute_average_loss,
    scale_regularization_loss,
)
from perdure.errors import TopologyError
from perdure.jax import OneDeviceStrategy

ARRAYS = {"numpy": np.asarray, "jax": jnp.asarray, "torch": torch.tensor}


@pytest.fixture(params=ARRAYS)
def array(request: Any) -> Any:
    return ARRAYS[request.param]


def make_strategy(replicas: int = 2) -> Strategy:
    return Strategy(NumpyEngine(1), replicas)


def test_losses_of_the_tutorial_have_its_figures(array: Any) -> None:
    strategy = make_strategy()
    losses = PerReplica((array([2.0, 3.0]), array([4.0, 5.0])), strategy.local_replicas)
    for size in (None, 4):
        losses_by_replica = strategy.run(
            partial(compute_average_loss, global_batch_size=size), (losses,)
        )
        assert [float(loss) for loss in losses_by_replica.values] == [1.25, 2.25]
        assert type(losses_by_replica.values[0]) is type(losses_by_replica.values[1])
        numbers = PerReplica(
            tuple(np.asarray(v) for v in losses_by_replica.values), losses_by_replica.replicas
        )
        assert float(strategy.reduce("sum", numbers)) == 3.5


def test_sample_weights_and_regularization(array: Any) -> None:
    strategy = make_strategy()
    results = strategy.run(
        lambda: (
            compute_average_loss(array([2.0, 3.0]), array([1.0, 0.0])),
            compute_average_loss(array([[2.0, 4.0], [3.0, 5.0]]), array([1.0, 2.0])),
            compute_average_loss([2.0, 3.0], global_batch_size=array(8.0)),
            scale_regularization_loss(array([1.0, 2.0, 4.0])),
            scale_regularization_loss(array(5.0)),
        )
    ).values
    assert [float(x) for x in results[0]] == [0.5, 22 / 4, 0.625, 3.5, 2.5]


def test_gradients_pass_through_average_loss() -> None:
    strategy = make_strategy()

    def torch_gradient() -> list[float]:
        x = torch.tensor([2.0, 3.0], requires_grad=True)
        compute_average_loss(x * x).backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert strategy.run(torch_gradient).values[0] == [1.0, 1.5]
    gradients = strategy.run(
        lambda: jax.grad(lambda x: compute_average_loss(x * x))(jnp.array([2.0, 3.0]))
    )
    assert gradients.values[0].tolist() == [1.0, 1.5]


def test_without_a_strategy_there_is_one_replica(array: Any) -> None:
    assert float(compute_average_loss(array([2.0, 3.0]))) == 2.5
    assert float(scale_regularization_loss(array(5.0))) == 5.0


def test_grad_divides_by_the_replicas_of_the_strategy() -> None:
    """A compiled function must not be used for another number of replicas."""

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return compute_average_loss(batch)

    def update(state: Any, total: Any) -> Any:
        return state, total

    for replicas in (2, 4, 2):
        strategy = OneDeviceStrategy(replicas=replicas)
        shares = (jnp.array([2.0, 3.0]),) * replicas
        _, loss = strategy.step(grad, update)(0, PerReplica(shares, strategy.local_replicas, 0))
        assert float(loss) == 2.5


def test_calls_outside_a_replica_and_bad_arguments_are_refused() -> None:
    strategy = make_strategy()
    with strategy.scope(), pytest.raises(TopologyError) as error:
        compute_average_loss(np.ones(2))
    assert "compute_average_loss was called outside of a replica" in str(error.value)
    with strategy.scope(), pytest.raises(TopologyError) as error:
        scale_regularization_loss(1.0)
    assert "scale_regularization_loss was called outside of a replica" in str(error.value)
    with strategy.scope():
        assert compute_average_loss(np.ones(2), global_batch_size=4) == 0.5
    for call, says in [
        (lambda: compute_average_loss(2.0), "one loss for each example, found a single number"),
        (lambda: compute_average_loss([1.0], global_batch_size=0), "expected more than 0, found 0"),
        (
            lambda: compute_average_loss([1.0, 2.0], [1.0, 1.0, 1.0]),
            "sample_weight has the shape [3]; expected the first axes of [2]",
        ),
    ]:
        with pytest.raises(TopologyError) as error:
            call()
        assert says in str(error.value)
