"""What the first step of a PyTorch strategy finds out about `grad`, and what it lets pass."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from perdure.checkpoint import Checkpoint
from perdure.data import ArrayDataset
from perdure.errors import StateError
from perdure.torch import MirroredStrategy, apply_gradients, gradients

V = 2
DATA = ArrayDataset({"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}, 8)


class Holding(nn.Module):
    """Has tensors at every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.inner[0].average = torch.zeros(4)
        self.held: Any = SimpleNamespace(deep={"averages": [torch.zeros(4)]})
        self.statistics = [self.inner[1].running_mean, self.inner[1].running_mean[:2]]
        self.mask: Any = torch.zeros(1)
        self.cache: Any = None
        self.last: Any = torch.zeros(8, 4)

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        self.mask = torch.ones(len(x))
        self.cache = torch.arange(4.0) if self.cache is None else self.cache
        self.last = y
        return y


def run(model: Any, forward: Any = None, **more: Any) -> None:
    """One step."""

    def grad(state: Any, batch: Any, key: Any) -> Any:
        found = (forward or state.model)(batch["x"])
        found = found[0] if isinstance(found, tuple) else found
        return gradients(found.square().sum(), state.model, unused="zeros")

    def update(state: Any, total: Any) -> Any:
        apply_gradients(state.model, total)
        state.sgd.step()
        return state, {}

    sgd = torch.optim.SGD(model.parameters(), 0.1)
    strategy = MirroredStrategy(1, V)
    step = strategy.step(grad, update)
    step(Checkpoint(model=model, sgd=sgd, **more), strategy.batch(DATA, 0))


@pytest.mark.parametrize(
    ("path", "of"),
    [
        ("model.inner.0.average", lambda model, _: model.inner[0].average),
        ("model.held.deep.averages.0", lambda model, _: model.held.deep["averages"][0]),
        ("loss.scale", lambda _, loss: loss.scale),
    ],
)
def test_a_tensor_of_the_state_that_grad_changes_in_place_is_named(path: str, of: Any) -> None:
    model, loss = Holding(), SimpleNamespace(scale=torch.ones(1))

    def changes(x: Any) -> Any:
        of(model, loss).mul_(0.9).add_(x.mean())
        return model(x)

    run(model, loss=loss)
    with pytest.raises(StateError) as error:
        run(model, changes, loss=loss)
    assert str(error.value).startswith(f"{path}: grad changed this tensor in place")
    assert "register_buffer" in str(error.value)


@pytest.mark.parametrize(
    "made",
    [
        lambda: weight_norm(nn.Linear(4, 4)),
        lambda: spectral_norm(nn.Linear(4, 4)),
        lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
        lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=2),
        lambda: nn.LSTM(4, 4),
        lambda: nn.GRU(4, 4, bidirectional=True),
        lambda: nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0),
        lambda: nn.Sequential(nn.InstanceNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)),
    ],
)
def test_what_modules_of_pytorch_keep_is_left_alone(made: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)  # of weight_norm itself
        model = made()
        run(model)


def step_with(loss: Any, state: Any, parameters: Any) -> None:
    """One step that adds `loss(state, x)` to the model's, and trains `parameters` as well."""

    def grad(state: Any, batch: Any, key: Any) -> Any:
        total = state["model"](batch["x"]).square().sum() + loss(state, batch["x"])
        trained = [*state["model"].parameters(), *parameters]
        return [*torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)]

    def update(state: Any, total: Any) -> Any:
        trained = [*state["model"].parameters(), *parameters]
        with torch.no_grad():
            for parameter, gradient in zip(trained, total, strict=True):
                parameter -= 0.01 * gradient
        return state, {}

    strategy = MirroredStrategy(1, V)
    strategy.step(grad, update)(state, strategy.batch(DATA, 0))


def network() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_a_module_that_the_step_trains_without_its_state_is_warned_of_once() -> None:
    net, frozen = network(), network().requires_grad_(False)
    says = "grad uses a Sequential that is not in the state"
    for other, trained in ((net, net.parameters()), (frozen, ())):
        with pytest.warns(UserWarning, match=says) as found:
            step_with(lambda _, x, m=other: m(x).sum(), {"model": nn.Linear(4, 1)}, [*trained])
        assert len(found) == 1
    optimizer = torch.optim.SGD(net.eval().parameters(), 0.0)  # a warmup begins with 0
    with pytest.warns(UserWarning, match=says):
        step_with(lambda _, x: net(x).sum(), {"model": nn.Linear(4, 1), "sgd": optimizer}, ())

    def fails(state: Any, x: Any) -> Any:
        raise KeyError

    with pytest.raises(KeyError):
        step_with(fails, {"model": nn.Linear(4, 1)}, ())
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_other_modules_that_grad_uses_are_left_alone() -> None:
    model, values, untrained = nn.Linear(4, 1), nn.Linear(4, 1), network().eval()
    skeleton = copy.deepcopy(values)
    around = nn.Sequential(model, nn.Tanh(), nn.Dropout(0.1))

    def adapts(state: Any, x: Any) -> Any:
        fast = nn.Sequential(copy.deepcopy(state["model"]), nn.BatchNorm1d(1))
        vars(fast)["cycle"] = [fast]
        gradients = torch.autograd.grad(fast(x).square().sum(), list(fast.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(fast.parameters(), gradients, strict=True):
                parameter -= gradient
        return fast(x).sum()

    def by_function(state: Any, x: Any) -> Any:
        return torch.func.functional_call(skeleton, state["values"], (x,)).sum()

    def of_each(state: Any, x: Any) -> Any:
        values = {name: torch.stack([value, value]) for name, value in state["values"].items()}
        call = lambda one: torch.func.functional_call(skeleton, one, (x,))  # noqa: E731
        return torch.func.vmap(call)(values).sum()

    named = {name: p.detach().requires_grad_() for name, p in values.named_parameters()}
    for loss, parameters in (
        (lambda _, x: untrained(x).sum(), ()),
        (lambda _, x: around(x).sum(), ()),
        (lambda _, x: nn.MSELoss()(x, x), ()),
        (adapts, ()),
        (by_function, named.values()),
        (of_each, named.values()),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step_with(loss, {"model": model, "values": named}, [*parameters])
