"""Several devices of one torch process: the bits of one, whatever `grad` reaches or leaves behind."""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from perdure.data import ArrayDataset
from perdure.distribute.torch import engine, state_view
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


def train(devices: int, data: Any, fn: Callable[..., Any] = grad, dropout: float = 0.0) -> bytes:
    """The bytes of the module."""
    return train_with(lambda *_: (fn, update), devices, data, dropout)


def train_with(how: Callable[..., Any], devices: int, data: Any, dropout: float = 0.0) -> bytes:
    strategy, net = MirroredStrategy(devices, V), network(dropout)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    train_step = strategy.step(*how(net, optimizer))
    state = {"held": Held(net), "sgd": optimizer, "steps": 0}
    for step in range(4):
        rounded = how is by_saved_tensors and step >= 2
        with saved_tensors_hooks(torch.round, lambda t: t) if rounded else nullcontext():
            state, _ = train_step(state, strategy.batch(data, step))
        state = {**state, "steps": step + 1}
        optimizer.state_dict()  # an error if it has entries of parameters that it does not have
    return b"".join(value.numpy().tobytes() for value in net.state_dict().values())


@pytest.mark.parametrize("devices", [2, 4, 6])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_devices_give_the_bits_of_one(devices: int, dropout: float, data: Any) -> None:
    assert train(devices, data, dropout=dropout) == train(1, data, dropout=dropout)


def by_optimizer(net: Any, optimizer: Any) -> Any:
    """From step 2 a penalty over the parameters that the optimizer has."""

    def penalized(state: Any, batch: Any, key: Any) -> Any:
        loss = (state["held"].net(batch[0])[:, 0] * batch[1]).sum()
        if state["steps"] >= 2:
            loss = loss + 0.01 * sum((p**2).sum() for p in optimizer.param_groups[0]["params"])
        return gradients(loss, state["held"].net)

    return penalized, update


def by_caught_error(net: Any, optimizer: Any) -> Any:
    """The same, in a program that does without the penalty if that is an error."""
    penalized, _ = by_optimizer(net, optimizer)

    def caught(state: Any, batch: Any, key: Any) -> Any:
        try:
            return penalized(state, batch, key)
        except Exception:  # noqa: BLE001 - as the user writes it
            return plain(state, batch, key)

    return caught, update


def by_tensor_hook(net: Any, optimizer: Any) -> Any:
    """From step 2 a hook of a parameter changes its gradient."""

    def hooked(state: Any, total: Any) -> Any:
        if state["steps"] == 1:
            net[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return update(state, total)

    return plain, hooked


def by_module_hook(net: Any, optimizer: Any) -> Any:
    """From step 2 a hook of a module uses a parameter and a buffer of the user's module."""

    def hooked(state: Any, total: Any) -> Any:
        if state["steps"] == 1:
            net[4].register_forward_hook(
                lambda *given: given[2] + net[4].bias * 2 + net[1].running_mean[0]
            )
        return update(state, total)

    return plain, hooked


def penalty_of(weight: Callable[[Any], Any], first: int = 2) -> Callable[..., Any]:
    """A `grad` that weighs parameters by what `weight` looks up for each, from a step on."""

    def penalized(state: Any, batch: Any, key: Any) -> Any:
        net = state["held"].net
        loss = (net(batch[0])[:, 0] * batch[1]).sum()
        if state["steps"] >= first:
            loss = loss + sum((weight(p) * p**2).sum() for p in net.parameters())
        return gradients(loss, net)

    return penalized


def by_key(net: Any, optimizer: Any) -> Any:
    weights = {p: torch.full_like(p, 0.01) for p in net.parameters()}
    return penalty_of(lambda p: weights.get(p, 0.0)), update


def by_member(net: Any, optimizer: Any) -> Any:
    chosen = set(net[0].parameters())
    return penalty_of(lambda p: 0.01 * (p in chosen)), update


def by_moments(net: Any, optimizer: Any) -> Any:
    """`optimizer.state` makes an entry for each key that it does not have."""
    return penalty_of(lambda p: optimizer.state[p].get("momentum_buffer", 0.0)), update


def by_attribute(net: Any, optimizer: Any) -> Any:
    """From step 2 a parameter has an attribute."""

    def marked(state: Any, total: Any) -> Any:
        if state["steps"] == 1:
            net[0].weight.decay = 0.01
        return update(state, total)

    return penalty_of(lambda p: getattr(p, "decay", 0.0)), marked


def by_saved_tensors(net: Any, optimizer: Any) -> Any:
    """From step 2 the caller rounds what is saved for the backward pass; see `train_with`."""
    return plain, update


def plain(state: Any, batch: Any, key: Any) -> Any:
    loss = (state["held"].net(batch[0])[:, 0] * batch[1]).sum()
    return gradients(loss, state["held"].net)


def drawing(state: Any, batch: Any, key: Any) -> Any:
    factor = np.random.rand() * random.random()  # noqa: NPY002 - as users still write
    return plain(state, (batch[0] * factor, batch[1]), key)


def hidden(state: Any, batch: Any, key: Any) -> Any:
    noise = torch.rand(len(batch[0]), 8)
    return grad(state, (batch[0] + noise, batch[1]), key)


def in_autocast(state: Any, batch: Any, key: Any) -> Any:
    """One weight is cast in several places, of which PyTorch keeps one cast for the process."""
    net = state["held"].net
    with torch.autocast("cpu", torch.bfloat16):
        h = net(batch[0]) + net(batch[0] * 2) + net(batch[0] * 3)
    return gradients((h.float()[:, 0] * batch[1]).sum(), net)


def computed_again(state: Any, batch: Any, key: Any) -> Any:
    """Dropout inside of a function that the backward pass computes again, from step 1 on."""
    net, x = state["held"].net, batch[0]
    if state["steps"]:
        x = checkpoint(lambda x: F.dropout(net[0](x), 0.5) @ net[0].weight, x, use_reentrant=False)
    return gradients((net(x)[:, 0] * batch[1]).sum(), net)


FUNCTIONS = {
    "draws of Python and NumPy": drawing,
    "a draw without a generator": hidden,
    "autocast": in_autocast,
    "checkpoint": computed_again,
}
LATER = [by_optimizer, by_tensor_hook, by_module_hook, by_caught_error, by_key, by_member]
LATER += [by_moments, by_attribute, by_saved_tensors]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_the_process_has_once_is_as_with_one_device(name: str, data: Any) -> None:
    assert train(3, data, FUNCTIONS[name]) == train(1, data, FUNCTIONS[name])


@pytest.mark.parametrize("how", LATER)
def test_what_reaches_the_parameters_in_another_way_is_as_with_one_device(
    how: Any, data: Any
) -> None:
    assert train_with(how, 3, data) == train_with(how, 1, data)


def counts(net: Any) -> float:
    net.calls = getattr(net, "calls", 0) + 1
    return 0.5 if net.calls > 2 * V else 1.0


def anneals(net: Any) -> float:
    if not net.settings["is_first"]:
        net.settings["factor"] *= 0.9
    net.settings = dict(net.settings)  # with the same values: nothing has changed
    return net.settings["factor"]


def remembers(net: Any) -> float:
    net.seen.append(len(net.seen))
    return 0.5 if len(net.seen) > 2 * V else 1.0


class Tally:
    def __init__(self) -> None:
        self.counts = ({"n": 0}, [0])


def change_of(member: Any, change: Callable[[Any], float]) -> Any:
    """`grad` that changes the member `held` of the module, and reads the number that this returns."""

    def changed(net: Any) -> float:
        if not hasattr(net, "held"):
            net.held = member()
        return 0.5 if change(net) > 2 * V else 1.0

    return changed


def rebind(net: Any, new: Any) -> Any:
    net.held = new
    return new


def increment(table: Any, key: Any) -> Any:
    table[key] += 1
    return table[key]


def append(values: Any) -> int:
    values.append(len(values))
    return len(values)


def add_element(values: set[int]) -> int:
    values.add(len(values))
    return len(values)


CHANGES = {
    "a number": counts,
    "a dict, once": anneals,
    "a list": remembers,
    "another list": change_of(list, lambda net: len(rebind(net, [*net.held, 1]))),
    "another dict": change_of(
        lambda: {"n": 0}, lambda net: rebind(net, {"n": net.held["n"] + 1})["n"]
    ),
    "another tuple": change_of(tuple, lambda net: len(rebind(net, (*net.held, 1)))),
    "a scalar of NumPy": change_of(lambda: np.float32(0), lambda net: rebind(net, net.held + 1)),
    "another tensor": change_of(
        lambda: torch.zeros(()), lambda net: float(rebind(net, net.held + 1))
    ),
    "a tensor": change_of(lambda: torch.zeros(()), lambda net: float(net.held.add_(1))),
    "an array": change_of(lambda: np.zeros(2), lambda net: increment(net.held, 0)),
    "a set": change_of(set, lambda net: add_element(net.held)),
    "a defaultdict": change_of(lambda: defaultdict(int), lambda net: increment(net.held, "n")),
    "an OrderedDict": change_of(lambda: OrderedDict(n=0), lambda net: increment(net.held, "n")),
    "a Counter": change_of(Counter, lambda net: increment(net.held, "n")),
    "a list in a dict": change_of(lambda: {"n": []}, lambda net: append(net.held["n"])),
    "an object": change_of(Tally, lambda net: increment(net.held.counts[0], "n")),
    "a namespace": change_of(
        lambda: SimpleNamespace(n=0), lambda net: increment(vars(net.held), "n")
    ),
}


@pytest.mark.parametrize("through", ["the state", "a closure"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_grad_changes_in_a_module_is_as_with_one_device(
    name: str, through: str, data: Any
) -> None:
    how = changing(CHANGES[name], through)
    assert train_with(how, 3, data) == train_with(how, 1, data)


def changing(change: Callable[[Any], float], through: str = "the state") -> Callable[..., Any]:
    def how(net: Any, _: Any) -> tuple[Any, Any]:
        net.settings, net.seen = {"factor": 1.0, "is_first": True}, []

        def changes(state: Any, batch: Any, key: Any) -> Any:
            changed = state["held"].net if through == "the state" else net
            return plain(state, (batch[0] * change(changed), batch[1]), key)

        def later(state: Any, total: Any) -> Any:
            net.settings["is_first"] = False
            return update(state, total)

        return changes, later

    return how


def test_control_with_a_copy_of_the_state_for_each_device_the_bits_are_others(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_copies(self: Any, work: Any, states: Any) -> None:
        for device in range(self._devices):
            list(work(device, copy.deepcopy(states[0])))

    expected = {name: train_with(changing(CHANGES[name]), 3, data) for name in CHANGES}
    monkeypatch.setattr(engine._InTurn, "__call__", on_copies)
    found = {name: train_with(changing(CHANGES[name]), 3, data) for name in CHANGES}
    assert {name for name in CHANGES if found[name] != expected[name]} == {*CHANGES}


@pytest.mark.parametrize("place", ["state", "optimizer"])
def test_a_trained_tensor_outside_of_modules_has_gradients_of_its_own(
    place: str, data: Any
) -> None:
    def scales(devices: int, with_backward: bool) -> list[float]:
        strategy, net = MirroredStrategy(devices, V), network()
        scale = torch.zeros((), requires_grad=True)
        state = {"held": Held(net), "sgd": torch.optim.SGD([*net.parameters(), scale], 0.1)}
        if place == "state":
            state["scale"] = scale

        def scaled(state: Any, batch: Any, key: Any) -> Any:
            net, factor = state["held"].net, state.get("scale", scale)
            loss = (net(batch[0])[:, 0] * factor.exp() * batch[1]).sum()
            if with_backward:
                loss.backward()
                grads = [p.grad for p in (*net.parameters(), factor)]
            else:
                grads = torch.autograd.grad(loss, [*net.parameters(), factor])
            names = [name for name, _ in net.named_parameters()]
            return {"scale": grads[-1], "net": dict(zip(names, grads, strict=False))}

        def stepped(state: Any, total: Any) -> Any:
            apply_gradients(state["held"].net, total["net"], 0.01)
            scale.grad = total["scale"] * 0.01
            state["sgd"].step()
            return state, scale.detach().clone()

        train_step = strategy.step(scaled, stepped)
        return [float(train_step(state, strategy.batch(data, n))[1]) for n in range(3)]

    expected = scales(1, with_backward=False)
    assert [scales(devices, with_backward=True) for devices in (1, 2, 3)] == [expected] * 3


@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_step_refuses_what_grad_must_not_change(devices: int, data: Any) -> None:
    strategy = MirroredStrategy(devices, V)

    def step(fn: Callable[..., Any], net: Any) -> Any:
        state = {"held": Held(net), "noise": torch.Generator(), "mean": torch.zeros(8)}
        return strategy.step(fn, lambda state, _: (state, None))(state, strategy.batch(data, 0))

    def shrinks(state: Any, batch: Any, key: Any) -> Any:
        state["held"].net[0].weight.data.mul_(0.9)
        return plain(state, batch, key)

    def draws(state: Any, batch: Any, key: Any) -> Any:
        noise = torch.rand(8, generator=state["noise"])
        return plain(state, (batch[0] + noise, batch[1]), key)

    def moves(state: Any, batch: Any, key: Any) -> Any:
        F.batch_norm(batch[0], state["mean"], torch.ones(8), training=True)
        return plain(state, batch, key)

    step(plain, network())
    with pytest.raises(StateError, match="mean: grad changed this parameter or tensor"):
        step(moves, network())
    with pytest.raises(StateError, match=r"held\.net\.0\.weight: grad changed this parameter"):
        step(shrinks, network())
    with pytest.raises(StateError, match="noise: grad drew from this generator"):
        step(draws, network())
    with pytest.raises(StateError, match=r"held\.net\.1\.weight: .* lazy module"):
        step(plain, nn.Sequential(nn.Linear(8, 2), nn.LazyLinear(1)))


@pytest.mark.parametrize("devices", [1, 3])
def test_the_state_is_searched_once(
    devices: int, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []
    search = state_view.StateView.__init__

    def counted(self: Any, state: Any) -> None:
        searched.append(state)
        search(self, state)

    monkeypatch.setattr(state_view.StateView, "__init__", counted)
    strategy, net = MirroredStrategy(devices, V), network()
    state = {"held": Held(net), "sgd": torch.optim.SGD(net.parameters(), 0.1, 0.9)}
    train_step = strategy.step(grad, update)
    for step in range(3):
        train_step(state, strategy.batch(data, step))
    assert searched == [state]


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


class Graph(nn.Module):
    """A sum over the neighbours, by a sparse buffer."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the support of this layout is beta
            self.register_buffer("links", torch.eye(8).to_sparse(layout=layout), persistent=False)

    def forward(self, x: Any) -> Any:
        return (self.links @ self.linear(x).T).T


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_buffer_is_used_and_must_not_change(layout: torch.layout, data: Any) -> None:
    def run(fn: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        strategy, state = MirroredStrategy(2, V), {"held": Held(Graph(layout))}
        step = strategy.step(fn, lambda state, total: (state, total))
        return step(state, strategy.batch(data, 0))[1]["linear.weight"]

    def changes(state: Any, batch: Any, key: Any) -> Any:
        state["held"].net.links.mul_(2)
        return plain(state, batch, key)

    assert run(plain).count_nonzero() == 8
    with pytest.raises(StateError, match=r"held\.net\.links: grad changed this tensor"):
        run(changes)
