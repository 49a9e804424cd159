"""Devices of one torch process as threads: equal bits, or one by one if that is not certain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perdure.data import ArrayDataset
from perdure.distribute.torch import threads as torch_threads
from perdure.distribute.torch.threads import ONE_BY_ONE, REDIRECTED, THREADS
from perdure.errors import StateError
from perdure.torch import MirroredStrategy, apply_gradients, gradients

V = 6


@dataclass(frozen=True)
class Held:
    net: nn.Module


@pytest.fixture
def data() -> ArrayDataset:
    x = np.random.default_rng(0).normal(size=(10 * V, 8)).astype(np.float32)
    return ArrayDataset(x, 2 * V)


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
    )


def grad(state: Any, batch: Any, key: Any) -> Any:
    loss = (state["held"].net(batch[0])[:, 0] * batch[1]).sum()
    loss.backward()
    return {n: p.grad for n, p in state["held"].net.named_parameters()}


def update(state: Any, total: Any) -> Any:
    apply_gradients(state["held"].net, total, 0.01)
    state["sgd"].step()
    return state, {}


def train(
    devices: int, data: Any, fn: Callable[..., Any] = grad, dropout: float = 0.0
) -> tuple[bytes, str]:
    """The bytes of the module, and how its replicas ran (`THREADS` or `ONE_BY_ONE`)."""
    strategy, net = MirroredStrategy(devices, V), network(dropout)
    state = {"held": Held(net), "sgd": torch.optim.SGD(net.parameters(), 0.1, 0.9)}
    train_step = strategy.step(fn, update)
    for step in range(4):
        state, _ = train_step(state, strategy.batch(data, step))
    held = [value.numpy().tobytes() for value in net.state_dict().values()]
    return b"".join(held), train_step._run.way  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parametrize("devices", [2, 4, 6])
@pytest.mark.parametrize(("dropout", "way"), [(0.0, THREADS), (0.5, REDIRECTED)])
def test_threads_give_the_bits_of_one_device(
    devices: int, dropout: float, way: str, data: Any
) -> None:
    expected, alone = train(1, data, dropout=dropout)
    assert alone == ONE_BY_ONE
    assert train(devices, data, dropout=dropout) == (expected, way)


def test_a_draw_that_cannot_be_redirected_runs_one_by_one(data: Any) -> None:
    def hidden(state: Any, batch: Any, key: Any) -> Any:
        noise = torch.rand(len(batch[0]), 8)  # an operation without a generator argument
        return grad(state, (batch[0] + noise, batch[1]), key)

    expected, _ = train(1, data, hidden)
    torch.manual_seed(5)
    assert train(3, data, hidden) == (expected, ONE_BY_ONE)


def test_control_without_the_watch_a_hidden_draw_changes_the_bits(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_threads._Watched, "disturbed", lambda _: False)
    monkeypatch.setattr(torch_threads, "_digest", lambda _: b"")
    assert train(3, data, dropout=0.5) != (train(1, data, dropout=0.5)[0], THREADS)
    assert train(3, data, dropout=0.5)[1] == THREADS


def by_optimizer(net: Any, optimizer: Any) -> Callable[..., Any]:
    """From step 2 a penalty over the parameters that the optimizer has."""

    def penalized(state: Any, batch: Any, key: Any) -> Any:
        loss = (state["held"].net(batch[0])[:, 0] * batch[1]).sum()
        if state["steps"] >= 2:
            loss = loss + 0.01 * sum((p**2).sum() for p in optimizer.param_groups[0]["params"])
        return gradients(loss, state["held"].net)

    return penalized


def by_tensor_hook(net: Any, optimizer: Any) -> Callable[..., Any]:
    """From step 2 a hook of a parameter changes its gradient."""

    def hooked(state: Any, total: Any) -> Any:
        if state["steps"] == 1:
            net[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return update(state, total)

    return hooked


def by_module_hook(net: Any, optimizer: Any) -> Callable[..., Any]:
    """From step 2 a hook of a module uses a parameter and a buffer of the user's module."""

    def hooked(state: Any, total: Any) -> Any:
        if state["steps"] == 1:
            net[4].register_forward_hook(
                lambda *given: given[2] + net[4].bias * 2 + net[1].running_mean[0]
            )
        return update(state, total)

    return hooked


def train_with(how: Callable[..., Any], devices: int, data: Any) -> tuple[bytes, str]:
    strategy, net = MirroredStrategy(devices, V), network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    fn = how(net, optimizer)
    functions = (fn, update) if how is by_optimizer else (plain, fn)
    train_step = strategy.step(*functions)
    state = {"held": Held(net), "sgd": optimizer, "steps": 0}
    for step in range(4):
        state, _ = train_step(state, strategy.batch(data, step))
        state = {**state, "steps": step + 1}
    held = [value.numpy().tobytes() for value in net.state_dict().values()]
    return b"".join(held), train_step._run.way  # pyright: ignore[reportFunctionMemberAccess]


def plain(state: Any, batch: Any, key: Any) -> Any:
    loss = (state["held"].net(batch[0])[:, 0] * batch[1]).sum()
    return gradients(loss, state["held"].net)


LATER = pytest.mark.parametrize("how", [by_optimizer, by_tensor_hook, by_module_hook])


@LATER
def test_what_reaches_the_parameters_in_another_way_later_is_noticed(how: Any, data: Any) -> None:
    expected, _ = train_with(how, 1, data)
    assert train_with(how, 3, data) == (expected, ONE_BY_ONE)


@LATER
def test_control_without_the_refusal_it_changes_the_bits(
    how: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = train_with(how, 1, data)
    monkeypatch.setattr(torch_threads, "_withheld", lambda _: nullcontext())
    monkeypatch.setattr(torch_threads, "_has_tensor_hooks", lambda _: False)
    found, way = train_with(how, 3, data)
    assert way == THREADS
    assert found != expected


def test_no_thread_computes_beside_the_reference_after_an_error() -> None:
    begun = threading.Event()
    ended: list[int] = []

    def work(device: int, _: Any) -> Iterator[tuple[int, Any]]:
        if device == 0:
            begun.wait(60)
            raise ValueError("the first device")
        begun.set()
        value = torch.ones(300, 300)
        for _ in range(100):
            value = value @ value / 300
        ended.append(device)
        yield device, value

    error, _ = torch_threads.Threads(2, 1)._in_threads(work, [None, None])
    assert str(error) == "the first device"
    assert ended == [1]


def test_a_module_inside_an_unknown_object_runs_one_by_one(data: Any) -> None:
    class Box:
        def __init__(self, net: nn.Module) -> None:
            self.net = net

    strategy, net = MirroredStrategy(2, V), network()
    state = {"held": Box(net), "sgd": torch.optim.SGD(net.parameters(), 0.1, 0.9)}
    train_step = strategy.step(grad, update)
    train_step(state, strategy.batch(data, 0))
    assert train_step._run.way == ONE_BY_ONE  # pyright: ignore[reportFunctionMemberAccess]


def test_a_result_that_differs_in_threads_is_not_used(data: Any) -> None:
    def by_thread(state: Any, batch: Any, key: Any) -> Any:
        in_thread = torch_threads.own_generator() is not None
        return {n: g + in_thread for n, g in grad(state, batch, key).items()}

    expected, _ = train(1, data, by_thread)
    assert train(2, data, by_thread) == (expected, ONE_BY_ONE)


def test_the_error_of_the_first_failing_replica_is_raised(data: Any) -> None:
    def refuses(state: Any, batch: Any, key: Any) -> Any:
        return {"loss": 1.5}

    with pytest.raises(StateError, match="contributions must be tensors, found float"):
        train(3, data, refuses)


def test_autocast_of_the_caller_applies_to_every_replica(data: Any) -> None:
    def low(state: Any, batch: Any, key: Any) -> Any:
        logits = F.linear(batch[0], torch.ones(3, 8))
        return {"w": logits.float().sum() + (logits.dtype == torch.bfloat16)}

    seen = []
    for devices in (1, 3):
        strategy = MirroredStrategy(devices, V)
        train_step = strategy.step(low, lambda state, total: (state, total["w"]))
        out = [train_step(None, strategy.batch(data, 0))[1].item()]
        with torch.autocast("cpu", torch.bfloat16):
            out.append(train_step(None, strategy.batch(data, 0))[1].item())
        seen.append(out)
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]
