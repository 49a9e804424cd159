"""Devices of one torch process as threads: equal bits, or one by one if that is not certain."""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks

from perdure.data import ArrayDataset
from perdure.distribute.torch import private_state, state_view
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


def train_with(how: Callable[..., Any], devices: int, data: Any) -> tuple[bytes, str]:
    strategy, net = MirroredStrategy(devices, V), network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    train_step = strategy.step(*how(net, optimizer))
    state = {"held": Held(net), "sgd": optimizer, "steps": 0}
    for step in range(4):
        rounded = how is by_saved_tensors and step >= 2
        with saved_tensors_hooks(torch.round, lambda t: t) if rounded else nullcontext():
            state, _ = train_step(state, strategy.batch(data, step))
        state = {**state, "steps": step + 1}
        optimizer.state_dict()  # an error if it has entries of parameters that it does not have
    held = [value.numpy().tobytes() for value in net.state_dict().values()]
    return b"".join(held), train_step._run.way  # pyright: ignore[reportFunctionMemberAccess]


def plain(state: Any, batch: Any, key: Any) -> Any:
    loss = (state["held"].net(batch[0])[:, 0] * batch[1]).sum()
    return gradients(loss, state["held"].net)


LATER = pytest.mark.parametrize(
    "how",
    [
        *(by_optimizer, by_tensor_hook, by_module_hook, by_caught_error),
        *(by_key, by_member, by_moments, by_attribute),
        pytest.param(
            by_saved_tensors,
            marks=pytest.mark.skipif(
                not hasattr(_autograd, "_top_saved_tensors_default_hooks"),
                reason="this PyTorch does not say which hooks there are",
            ),
        ),
    ],
)


@LATER
def test_what_reaches_the_parameters_in_another_way_later_is_noticed(how: Any, data: Any) -> None:
    expected, _ = train_with(how, 1, data)
    # Attributes are copied, and hooks on saved tensors are those of one call.
    in_threads = how in (by_attribute, by_saved_tensors)
    assert train_with(how, 3, data) == (expected, THREADS if in_threads else ONE_BY_ONE)


def plain_parameter(parameter: Any) -> Any:
    """One without the attributes of the user's."""
    return nn.Parameter(parameter.detach())


@LATER
def test_control_without_the_refusal_it_changes_the_bits(
    how: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = train_with(how, 1, data)
    monkeypatch.setattr(torch_threads, "_withheld", lambda _: nullcontext())
    monkeypatch.setattr(torch_threads, "_has_tensor_hooks", lambda _: False)
    monkeypatch.setattr(private_state, "_same_memory", plain_parameter)
    monkeypatch.setattr(private_state.ThreadParameter, "__hash__", torch.Tensor.__hash__)
    monkeypatch.setattr(torch_threads._Watched, "has_new_keys", lambda _: False)
    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", lambda _: {})
    monkeypatch.setattr(torch_threads, "_saved_tensors_hooks", lambda _: None)
    found, way = train_with(how, 3, data)
    assert way == THREADS
    assert found != expected


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("in_state", [True, False])
def test_no_parameter_of_a_thread_stays_where_it_was_looked_up(
    in_state: bool, first: int, data: Any
) -> None:
    found = []
    for devices in (1, 3):
        strategy, net = MirroredStrategy(devices, V), network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        entries = optimizer.state if in_state else defaultdict(dict)
        fn = penalty_of(lambda p, entries=entries: entries[p].get("none", 0.01), first)
        train_step = strategy.step(fn, update)
        for step in range(4):
            state = {"held": Held(net), "sgd": optimizer, "steps": step}
            train_step(state, strategy.batch(data, step))
            if in_state:  # at once; elsewhere in the next step, where two keys are the same
                assert all(type(key) is nn.Parameter for key in entries)
        assert {id(key) for key in entries} == {id(p) for p in net.parameters()}
        found.append([p.tolist() for p in net.parameters()])
    assert found[0] == found[1]


def drawing(state: Any, batch: Any, key: Any) -> Any:
    factor = np.random.rand() * random.random()  # noqa: NPY002 - as users still write
    return plain(state, (batch[0] * factor, batch[1]), key)


def test_draws_from_generators_of_python_run_one_by_one(data: Any) -> None:
    found = []
    for devices in (1, 3):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        found.append(train(devices, data, drawing))
    assert found == [(found[0][0], ONE_BY_ONE)] * 2


def test_control_without_the_watch_draws_of_python_change_the_bits(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_threads._Shared, "disturbed", lambda _: False)
    with pytest.raises(AssertionError):
        test_draws_from_generators_of_python_run_one_by_one(data)


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


class AttributeDict(dict):
    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class OwnNew:
    def __new__(cls) -> Any:
        made: Any = super().__new__(cls)
        made.n = 0
        return made


class Doubling(list):
    def __iter__(self) -> Iterator[Any]:
        return (2 * value for value in list.__iter__(self))


class Frozen(dict):
    def __setitem__(self, name: Any, value: Any) -> None:
        raise TypeError("frozen")


class Link:
    def __init__(self, following: Any) -> None:
        self.following = following


def chain(length: int) -> Any:
    link = None
    for _ in range(length):
        link = Link(link)
    return link


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


ALONE = {
    "a dict that is its own attributes": change_of(
        lambda: AttributeDict(n=0), lambda net: increment(vars(net.held), "n")
    ),
    "an object of a class with __new__": change_of(
        OwnNew, lambda net: increment(vars(net.held), "n")
    ),
    "an object in a set": change_of(
        lambda: {Tally()}, lambda net: increment(next(iter(net.held)).counts[0], "n")
    ),
    "a list with other values": change_of(lambda: Doubling([1]), lambda net: sum(net.held)),
    "a dict that refuses": change_of(lambda: Frozen(a=[1]), lambda net: net.held["a"][0]),
    "a long chain": change_of(lambda: chain(2000), lambda net: net.held is not None),
}
"""What nobody can copy, so that no threads are used."""


@pytest.mark.parametrize("name", ALONE)
def test_with_what_cannot_be_copied_replicas_run_one_by_one(name: str, data: Any) -> None:
    def how(net: Any, _: Any) -> tuple[Any, Any]:
        ALONE[name](net)  # there before the first step

        def changing(state: Any, batch: Any, key: Any) -> Any:
            return plain(state, (batch[0] * ALONE[name](state["held"].net), batch[1]), key)

        return changing, update

    one, _ = train_with(how, 1, data)
    assert train_with(how, 3, data) == (one, ONE_BY_ONE)


def test_hooks_that_grad_registers_are_those_of_one_thread(data: Any) -> None:
    def featured(state: Any, batch: Any, key: Any) -> Any:
        net, features = state["held"].net, []
        hooks = [part.register_forward_hook(lambda *a: features.append(a[2])) for part in net]
        result = plain(state, batch, key)
        for hook in hooks:
            hook.remove()
        assert len(features) == len(net)
        return result

    one, _ = train_with(lambda *_: (featured, update), 1, data)
    assert train_with(lambda *_: (featured, update), 3, data) == (one, THREADS)


def test_a_hook_that_stays_is_noticed_and_is_not_that_of_the_user() -> None:
    net: Any = network()
    private = private_state.PrivateState({"net": net}, [], compiled=False)
    hook = private.state["net"][0].register_forward_hook(lambda *_: None)
    assert private.has_changed()
    assert not net[0]._forward_hooks
    hook.remove()
    assert not private.has_changed()


SHARED = {"a tensor", "an array"}
"""Threads write to one and the same: without the repetition their results depend on who comes first."""


@pytest.mark.parametrize("through", ["the state", "a closure"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_grad_changes_in_a_module_is_as_with_one_device(
    name: str, through: str, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = CHANGES[name]

    def how(net: Any, _: Any) -> tuple[Any, Any]:
        net.settings, net.seen = {"factor": 1.0, "is_first": True}, []

        def changing(state: Any, batch: Any, key: Any) -> Any:
            changed = state["held"].net if through == "the state" else net
            return plain(state, (batch[0] * change(changed), batch[1]), key)

        def later(state: Any, total: Any) -> Any:
            net.settings["is_first"] = False
            return update(state, total)

        return changing, later

    one, _ = train_with(how, 1, data)
    assert train_with(how, 3, data) == (one, ONE_BY_ONE)
    if through == "the state" and name not in SHARED:
        monkeypatch.setattr(private_state.PrivateState, "has_changed", lambda _: False)
        monkeypatch.setattr(torch_threads._Originals, "changed", lambda _: False)
        assert train_with(how, 3, data)[0] != one  # control


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


def test_another_thread_that_uses_the_model_during_a_step_gets_what_to_do() -> None:
    weight = nn.Parameter(torch.ones(2))
    refused = pytest.raises(StateError, match="Use it between two steps")
    with torch_threads._withheld([weight]), refused:
        weight.detach()
    assert weight.detach().tolist() == [1, 1]


@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_step_refuses_what_grad_must_not_change(devices: int, data: Any) -> None:
    strategy = MirroredStrategy(devices, V)

    def step(fn: Callable[..., Any], net: Any) -> Any:
        state = {"held": Held(net), "noise": torch.Generator(), "sgd": None}
        return strategy.step(fn, lambda state, _: (state, None))(state, strategy.batch(data, 0))

    def shrinks(state: Any, batch: Any, key: Any) -> Any:
        state["held"].net[0].weight.data.mul_(0.9)
        return plain(state, batch, key)

    def draws(state: Any, batch: Any, key: Any) -> Any:
        noise = torch.rand(8, generator=state["noise"])
        return plain(state, (batch[0] + noise, batch[1]), key)

    step(plain, network())
    with pytest.raises(StateError, match=r"held\.net\.0\.weight: grad changed this parameter"):
        step(shrinks, network())
    with pytest.raises(StateError, match="noise: grad drew from this generator"):
        step(draws, network())
    with pytest.raises(StateError, match=r"held\.net\.1\.weight: .* lazy module"):
        step(plain, nn.Sequential(nn.Linear(8, 2), nn.LazyLinear(1)))


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


@pytest.mark.parametrize("devices", [1, 3])
def test_the_state_is_searched_once_for_the_engine_and_its_threads(
    devices: int, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []
    search = state_view.StateView.__init__

    def counted(self: Any, state: Any, in_thread: bool = False) -> None:
        searched.append(state)
        search(self, state, in_thread)

    monkeypatch.setattr(state_view.StateView, "__init__", counted)
    strategy, net = MirroredStrategy(devices, V), network()
    state = {"held": Held(net), "sgd": torch.optim.SGD(net.parameters(), 0.1, 0.9)}
    train_step = strategy.step(grad, update)
    for step in range(3):
        train_step(state, strategy.batch(data, step))
    assert [value is state for value in searched].count(True) == 1
    if devices == 1:
        assert len(searched) == 1


def test_a_module_inside_an_object_that_is_not_copied_runs_one_by_one(data: Any) -> None:
    class Box:
        def __new__(cls, *_: Any) -> Any:  # nobody else knows how to make one
            return super().__new__(cls)

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
