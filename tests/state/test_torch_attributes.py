"""Which attributes of PyTorch modules and optimizers a save compares with those of an earlier one."""

from __future__ import annotations

import enum
import random
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax  # noqa: F401  (its structure is looked for in the same state)
import numpy as np
import pytest
import torch
from torch.nn.utils import prune

from perdure import CheckpointManager
from perdure.state.unsaved_attributes import UnsavedAttributes


class Layer(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("ready", torch.zeros(()))


def warning_after(change: Callable[[Any], Any], prepare: Callable[[Any], Any] = vars) -> str:
    """What the second of two saves says, with a change between them."""
    net, check = Layer(), UnsavedAttributes()
    prepare(net)
    assert check.changed({"net": net}) is None
    change(net)
    assert not [*check.unsaved({"net": net})]
    return check.changed({"net": net}) or ""


def hidden(net: Any) -> None:
    """As a recurrent network keeps it from one batch to the next."""
    net.hidden = torch.rand(2, 3), torch.rand(2, 3)


def views(net: Any) -> None:
    with torch.no_grad():
        net.first = net.weight[0]
    net.halves = net.weight.chunk(2)


def step(net: Any) -> None:
    with torch.no_grad():
        net.weight.mul_(2)


def draws(net: Any) -> None:
    torch.rand(1, generator=net.torch_generator)
    net.numpy_generator.random()


def generators(net: Any) -> None:
    net.torch_generator, net.numpy_generator = torch.Generator(), np.random.default_rng(0)


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


def phase(net: Any) -> None:
    net.phase, net.counters = Phase.WARM, SimpleNamespace(batches=0)


def next_phase(net: Any) -> None:
    net.phase = Phase.MAIN
    net.counters.batches += 1


@pytest.mark.parametrize(
    ("prepare", "change", "names"),
    [
        (phase, next_phase, ["net/phase", "net/counters/batches"]),
        (hidden, hidden, ["net/hidden/0", "net/hidden/1"]),
        (lambda net: setattr(net, "hidden", None), hidden, ["net/hidden"]),
        (generators, draws, ["net/torch_generator", "net/numpy_generator"]),
    ],
    ids=["an enum and a namespace", "a tuple of tensors", "a tuple that was None", "generators"],
)
def test_what_training_changes_is_named(prepare: Any, change: Any, names: list[str]) -> None:
    found = warning_after(change, prepare)
    assert all(name in found for name in names), found


class Hidden(NamedTuple):
    state: Any
    cell: Any


class Statistics:
    """A plain object, whose random state and array of many elements are compared by a digest."""

    def __init__(self) -> None:
        self.count, self.mean, self.log = 0, torch.zeros(2), [0.0]
        self.many, self.many_more = np.zeros(5000), [np.zeros(5000)]
        self.draws = {"python": random.Random(0), "numpy": np.random.RandomState(0)}

    def update(self) -> None:
        self.count += 1
        self.mean, self.many = self.mean + 1, self.many + 1
        self.draws["python"].random()
        self.draws["numpy"].rand()
        self.log.append(1.0)
        self.log[0] = 1.0


class Loop:
    """Runs the steps. It is in no attribute of the network that the network depends on."""

    def __init__(self, net: Any) -> None:
        self.net, self.step = net, 0


def containers(net: Any) -> None:
    net.lists, net.dicts = [torch.rand(2), 1.0], {"a": (torch.rand(2),), "n": 1}
    net.named, net.nested = Hidden(torch.rand(2), 1.0), ((torch.rand(2), 0), "name")
    net.statistics = Statistics()


def other_values(net: Any) -> None:
    statistics = net.statistics
    containers(net)
    statistics.update()
    net.statistics = statistics


def test_values_in_containers_and_objects_are_named() -> None:
    net, check = Layer(), UnsavedAttributes()
    containers(net)
    assert check.changed({"net": torch.nn.Sequential(net)}) is None
    assert check.changed({"net": torch.nn.Sequential(net)}) is None
    net, check = Layer(), UnsavedAttributes()
    containers(net)
    assert check.changed({"net": net}) is None
    other_values(net)
    names = {*check._changed_modules({"net": net})}  # the warning names five
    statistics = ["count", "mean", "many", "draws/python", "draws/numpy"]
    assert names == {
        *("net/lists/0", "net/dicts/a/0", "net/named/state", "net/nested/0/0"),
        *(f"net/statistics/{name}" for name in statistics),
    }


def known(net: Any) -> None:
    """Tensors that the state has anyway, and objects that are not about the module."""
    net.weights, net.by_name = list(net.parameters()), dict(net.named_parameters())
    net.detached, net.loop = [net.weight.detach(), net.ready], Loop(net)


class Gone:
    """Of which only a proxy is left."""


class Raising:
    """An object that raises when it is looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not now")


def raising(net: Any) -> None:
    net.parts = [weakref.proxy(Gone()), Raising()]
    vars(net)["trainer"], net.hidden = weakref.proxy(Gone()), Raising()
    net.spectrum = torch.tensor([1j, float("nan")]).conj()
    net.bits = torch.zeros(2, dtype=torch.float4_e2m1fn_x2)
    net.nested = ([],)
    net.nested[0].append(net.nested)


class Owned:
    """Of inputs, as reinforcement learning keeps them, in an attribute of a module."""

    def __init__(self) -> None:
        self.mean = np.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Any) -> None:
        self.mean = state["mean"]


def test_an_object_with_a_state_dict_is_looked_into_unless_it_is_a_member() -> None:
    for is_member in (False, True):
        net: Any = Layer()
        net.statistics, check = Owned(), UnsavedAttributes()
        state = {"net": net} | ({"statistics": net.statistics} if is_member else {})
        assert check.changed(state) is None
        net.statistics.mean = np.ones(2)
        assert ("net/statistics/mean" in (check.changed(state) or "")) is not is_member


class Warmup:
    """An optimizer with a learning rate of its own, which PyTorch knows nothing of."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def test_an_optimizer_in_an_object_that_a_module_owns_is_named() -> None:
    check, net = UnsavedAttributes(), cast(Any, Layer())
    net.warmup = Warmup(torch.optim.Adam(net.parameters()))
    net(torch.ones(1, 2)).sum().backward()
    net.warmup.inner.step()
    assert "net/warmup/inner (Adam)" in "".join(check.unsaved({"net": net}))
    assert not [*check.unsaved({"net": net, "optimizer": net.warmup.inner})]


def odd(net: Any) -> None:
    net.sparse, net.empty = torch.eye(2).to_sparse(), torch.zeros(2, device="meta")
    net.again, net.by_tensor = [net], {torch.zeros(2): torch.zeros(2)}
    net.again.append(net.again)


def next_step(net: Any) -> None:
    step(net)
    net.ready.add_(1)
    net.loop.step += 1


def test_values_of_plain_containers_and_layers_of_torch_are_named() -> None:
    net: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    net.temperature, net[0].center = 1.0, torch.zeros(2)
    net[1].register_buffer("seen", torch.zeros(2), persistent=False)
    check, state = UnsavedAttributes(), {"net": net}
    assert check.changed(state) is None
    net.temperature, net[1].p, net[0].center = 0.9, 0.4, torch.ones(2)
    net.get_buffer("1.seen").add_(1)
    assert {*check._changed_modules(state)} == {"net/temperature", "net/0/center", "net/1/seen"}


def sizes(net: Any) -> None:
    net.sizes = (1, (2, f"{net.in_features}"))


def evaluated(net: Any) -> None:
    with torch.no_grad():
        net(torch.ones(1, 2))


def pruned(net: Any) -> None:
    prune.l1_unstructured(net, "weight", 0.5)


def with_nan(net: Any) -> None:
    net.bounds, net.limits = np.array([0.0, np.nan]), torch.tensor([0.0, float("nan")])


@pytest.mark.parametrize(
    ("prepare", "change"),
    [
        (views, step),
        (known, next_step),
        (odd, lambda net: setattr(net, "sparse", torch.eye(2).to_sparse())),
        (raising, raising),
        (pruned, evaluated),
        (torch.nn.utils.weight_norm, evaluated),
        (torch.nn.utils.spectral_norm, evaluated),
        (with_nan, with_nan),
        (generators, vars),
        (sizes, sizes),
        (phase, phase),
    ],
    ids=["views", "known", "odd", "raising", "pruned", "weight_norm", "spectral_norm", "NaN", "idle",
         "made again", "one phase"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_what_only_looks_changed_is_left_alone(prepare: Any, change: Any) -> None:
    assert warning_after(change, prepare) == ""


class FirstBatch(Layer):
    """Initialises itself by its first batch, and remembers it in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialised = self.is_used = False

    def forward(self, input: Any) -> Any:
        self.cache = input
        if not self.is_initialised:
            self.is_initialised = True
            with torch.no_grad():
                self.bias.copy_(-input.mean(0))
        return super().forward(input)


def test_a_flag_that_the_first_batch_sets_is_named_at_the_first_save(tmp_path: Path) -> None:
    for step in (1, 2):  # the second program would initialise a trained module again
        net = FirstBatch()
        with CheckpointManager(tmp_path, recipe={}) as manager:
            manager.restore_or_initialize({"net": net})
            net(torch.ones(1, 2))
            with pytest.warns(UserWarning, match=r"has them: net/is_initialised\."):
                manager.save(step, {"net": net})


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, which has nothing that PyTorch's constructor makes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


def test_an_optimizer_that_only_wraps_another_is_saved_and_restored(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1)
        return {"net": net, "sgd": Wrapping(torch.optim.SGD(net.parameters(), 0.1, 0.9))}

    def trained(state: dict[str, Any]) -> None:
        for _ in range(2):
            state["net"](torch.ones(3, 2)).sum().backward()
            state["sgd"].step()

    state, other = made(), made()
    trained(state)
    with warnings.catch_warnings(), CheckpointManager(tmp_path, recipe={}) as manager:
        warnings.simplefilter("error")
        manager.save(1, state)
        manager.restore(like=other)
    for each in (state, other):
        each["net"].zero_grad()
        trained(each)
    assert torch.equal(state["net"].weight, other["net"].weight)


class Several(torch.optim.Optimizer):
    """Optimizers for parts of the parameters, in an attribute that is a container."""

    def __init__(self, parameters: list[Any], kind: type) -> None:
        super().__init__(parameters, {})
        made = [torch.optim.SGD([parameter], 0.1, 0.9) for parameter in parameters]
        self.parts = made if kind is list else dict(enumerate(made))
        self.norm, self.generator = torch.zeros(()), torch.Generator()
        self.tensors, self.averages, self.norms = parameters, [torch.zeros(1)], [0.0]

    def step(self, closure: Any = None) -> Any:
        for each in self.parts.values() if isinstance(self.parts, dict) else self.parts:
            each.step()
        self.norm = self.norm + 1
        torch.rand(1, generator=self.generator)
        self.averages, self.norms = [torch.ones(1)], [1.0, 1.0]


@pytest.mark.parametrize("kind", [list, dict])
def test_inner_optimizers_in_containers_and_tensors_are_warned_about(kind: type) -> None:
    net, check = torch.nn.Linear(2, 1), UnsavedAttributes()
    state = {"net": net, "own": Several([*net.parameters()], kind)}
    assert not [*check.unsaved(state)]
    assert check.changed(state) is None
    net(torch.ones(1, 2)).sum().backward()
    state["own"].step()
    assert "own/parts[0] (SGD)" in "".join(check.unsaved(state))
    assert {*check._changed_modules(state)} == {"own/norm", "own/generator", "own/averages/0"}


class Actor(torch.nn.Linear):
    """A network that owns what steps it, as is common in reinforcement learning."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.parts = {"adam": torch.optim.Adam(self.parameters(), 0.1)}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.parts["adam"], 1)
        self.scaler = torch.amp.GradScaler("cpu")
        self.idle = [torch.optim.SGD(self.parameters(), 0.1)]


class Complete(Actor):
    temperature = 1.0

    def get_extra_state(self) -> Any:
        return {"temperature": self.temperature, "adam": self.parts["adam"].state_dict()}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


class Agent:
    """Returns the states of what its network owns."""

    def __init__(self, net: Actor) -> None:
        self.net = net

    def state_dict(self) -> dict[str, Any]:
        made = self.net.parts["adam"], self.net.scheduler, self.net.scaler
        return {str(n): value.state_dict() for n, value in enumerate(made)}

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


def trained(net: Any, *optimizers: Any) -> None:
    net(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_that_a_module_owns_is_named_unless_it_is_saved() -> None:
    net, check = Actor(), UnsavedAttributes()
    assert "net/scaler" in "".join(check.unsaved({"net": net}))
    trained(net, *net.parts.values())
    net.scheduler.step()
    (note,) = check.unsaved({"net": torch.nn.Sequential(net)})
    names = ["net/0/parts['adam'] (Adam)", "net/0/scheduler (StepLR)", "net/0/scaler (GradScaler)"]
    assert all(name in note for name in names), note
    assert "idle" not in note
    assert not [*check.unsaved({"net": torch.nn.Sequential(net)})]
    check = UnsavedAttributes()
    members = {"adam": net.parts["adam"], "schedule": net.scheduler, "scaler": net.scaler}
    assert not [*check.unsaved({"net": net, **members})]
    assert not [*check.unsaved({"net": net, "agent": Agent(net)})]
    other = Complete()
    assert check.changed({"net": other}) is None
    trained(other, *other.parts.values())
    other.temperature = 0.5
    assert check.changed({"net": other}) is None
    assert not [*check.unsaved({"net": torch.nn.Sequential(other)})]


def stepped(state: dict[str, Any]) -> str:
    return "".join(UnsavedAttributes().unsaved(state))


def test_tensors_that_an_optimizer_steps_outside_of_the_state_are_named() -> None:
    net, alpha = torch.nn.Linear(2, 1), torch.zeros(1, requires_grad=True)
    sgd, own = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD([alpha], 0.1)
    check, state = UnsavedAttributes(), {"net": net, "sgd": sgd, "own": own}
    assert not [*check.unsaved(state)]  # one that no step changes may be there for a schedule
    alpha.sum().backward()
    trained(net, sgd, own)
    (note,) = check.unsaved(state)
    assert "own: the SGD steps tensors" in note
    assert "number 0 of group 0, (1,) float32." in note
    assert not [*check.unsaved(state)]
    alpha.grad = torch.ones(1)
    assert stepped(state)
    assert not stepped({**state, "alpha": alpha})
    assert not stepped(
        {"net": torch.nn.DataParallel(net), "sgd": sgd, "a": [alpha.detach()], "own": own}
    )
    assert not stepped({"sgd": sgd, "own": own, "model": net.state_dict()})


def test_a_head_that_the_run_replaced_is_named_once() -> None:
    net, check = (
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)),
        UnsavedAttributes(),
    )
    state = {"net": net, "sgd": torch.optim.SGD(net.parameters(), 0.1)}
    assert not [*check.unsaved(state)]
    net[1] = torch.nn.Linear(2, 1)
    (note,) = check.unsaved(state)
    assert "number 2 of group 0, (1, 2) float32 and 1 more" in note
    assert not [*check.unsaved(state)]
