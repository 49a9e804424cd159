"""What modules and optimizers hold outside of `state_dict` is saved and restored with its owner."""

from __future__ import annotations

import enum
import importlib
import itertools
import queue
import random
from collections import defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import MismatchError, UnsupportedLeafError
from perdure.state import snapshot
from perdure.state.attributes import Attributes
from pretend import Pretend, play

State = dict[str, Any]


class Codebook(torch.nn.Module):
    """Is initialised by its first batch, and counts how long it has not used each row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(3, 2))
        self.inited = False
        self.age = torch.zeros(3)

    def forward(self, x: Any) -> Any:
        if not self.inited:
            self.inited = True
            with torch.no_grad():
                self.table.copy_(x[:3] * 0.5)
        nearest = torch.cdist(x, self.table).argmin(1)
        self.age += 1
        self.age[nearest] = 0
        return self.table[nearest] * (1 + 0.01 * self.age[nearest, None] + self.age.sum() * 1e-3)


class Queue(torch.nn.Module):
    """MoCo: a queue with a place in it, and an average of the weights in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("queue", torch.zeros(4, 2))
        self.ptr = 0
        self.average = [value.detach().clone() for value in self.layer.parameters()]

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        with torch.no_grad():
            self.get_buffer("queue")[self.ptr] = out[0]
            self.ptr = (self.ptr + 1) % 4
            for old, new in zip(self.average, self.layer.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return out + self.get_buffer("queue").sum() + self.average[0].sum()


class Recurrent(torch.nn.Module):
    """Keeps its hidden state, a schedule, a generator, counters and a log from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(2, 2)
        self.hidden: Any = None
        self.temperature = 1.0
        self.noise = torch.Generator().manual_seed(3)
        self.counters = SimpleNamespace(batches=0, seen=deque(maxlen=2))
        self.draws = {"numpy": np.random.default_rng(1), "python": random.Random(1)}
        self.drop = torch.nn.Dropout(0.5)
        self.share, self.numbers = Fraction(1), itertools.count(2, 3)
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x: Any) -> Any:
        out, hidden = self.cell(x[None], self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        self.temperature *= 0.9
        self.counters.batches += 1
        self.counters.seen.append(float(out.detach().sum()))
        self.drop.p = 0.5 / (1 + self.counters.batches)
        self.share = self.share * Fraction(2, 3) + next(self.numbers)
        self.get_buffer("mean").add_(out.detach().mean((0, 1)))
        noise = torch.rand(2, generator=self.noise) + self.draws["python"].random()
        noise = noise + float(self.draws["numpy"].random()) + sum(self.counters.seen)
        noise = noise + float(self.share)
        return self.drop(out[0] * self.temperature + noise + self.get_buffer("mean"))


class Phase(enum.Enum):
    COLD, HOT = 1, 2


class Meter:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Agent(torch.nn.Module):
    """A replay memory of tuples with dicts, tables by place, a log of activations, an average."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.last: Any = None
        self.memory: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=2)
        self.visits: Any = defaultdict(int)
        self.visited: set[Any] = set()
        self.logs: Any = defaultdict(lambda: [0])
        self.losses: list[Any] = []
        self.phases: list[Any] = []
        self.meter = Meter()
        self.norms: Any = {}
        self.table: Any = {}

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        count = len(self.visited)
        scale = 0.1 if self.last is None else self.last[1]["mean"] + self.memory[0][2]["at"][0]
        scale = scale + sum(value["out"][0] for value in self.recent) + self.visits[0, "a"]
        self.last = out.detach(), {"mean": out.detach().mean()}
        self.memory = [*self.memory, (out.detach(), count, {"at": [out.detach()[0]]})][-2:]
        self.recent.append({"out": out.detach()[1]})
        self.visits[count % 2, "a"] += 1
        self.table[count % 2, None] = self.table.get((count % 2, None), 0) + out.detach()[0]
        self.visited.add((count, -count))
        self.logs[count % 2].append(count)
        self.losses.append((out.sum(), count))  # with a graph: not stored, and no error
        self.phases.append((Phase.HOT if count % 2 else Phase.COLD, count))
        self.meter.count += 1
        for part in (self.layer, self.layer.weight):  # as a K-FAC has its factors
            self.norms[part] = self.norms.get(part, 0) + self.layer.weight.detach().norm()
        scale = scale + self.norms[self.layer] + self.norms[self.layer.weight] + self.table[0, None]
        scale = scale + self.meter.count + sum(phase.value * n for phase, n in self.phases)
        return out * (scale + sum(self.logs[0]) + len(self.visited))


class Staged(torch.nn.Module):
    """Hashes by what it holds, as metrics do, and gets an enumeration in the place of None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.stage: Any = None
        self.note: Any = None
        self.seen: list[Any] = []

    def __hash__(self) -> int:
        return hash((id(type(self)), len(getattr(self, "seen", ()))))

    def forward(self, x: Any) -> Any:
        self.stage = Phase.HOT if self.stage is Phase.COLD else Phase.COLD
        self.note = self.stage, len(self.seen)
        self.seen.append(x.mean())
        return self.layer(x) * (self.stage.value + self.note[0].value * self.note[1])


class Forgetful(Queue):
    """Leaves its average and its place out of its own `state_dict`."""

    def state_dict(self, *args: Any, **keywords: Any) -> Any:
        return dict(super().state_dict(*args, **keywords))


def parametrized() -> torch.nn.Module:
    """A module whose class PyTorch replaces by one that it makes."""
    net = Counted()
    return torch.nn.utils.parametrize.register_parametrization(net, "weight", torch.nn.Tanh())


class Counted(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0

    def forward(self, input: Any) -> Any:
        self.calls += 1
        return super().forward(input) * self.calls


class SAM(torch.optim.Optimizer):
    """Steps with another optimizer, whose groups are its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["weight_decay"] = 0.01 * self.calls
        return self.base_optimizer.step()


def run(
    kind: Callable[[], torch.nn.Module],
    where: MemoryStorage,
    stop: int,
    interval: int = 1,
    optimizer: Callable[[Any], Any] = SAM,
    members: Callable[[State], State] = dict,
) -> dict[str, bytes]:
    torch.manual_seed(0)
    net = kind()
    steps = optimizer(net.parameters())
    state = members({"net": net, "opt": steps})
    schedule = torch.optim.lr_scheduler.StepLR(steps, 2, 0.5)
    state["schedule"] = schedule
    with CheckpointManager(where, save_interval_steps=interval, recipe={}) as manager:
        state, start = manager.restore_or_initialize(state)
        for step in range(start, stop):
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
            steps.zero_grad()
            net(x).square().mean().backward()
            steps.step()
            schedule.step()
            manager.save(step + 1, state)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


class Borrowed(torch.nn.Module):
    """Objects of libraries, which the run changes in place, exchanges, or gives other attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        self.choice = torch.distributions.Categorical(torch.ones(2))
        self.curve = np.polynomial.Polynomial([1.0, 0.5])
        self.waiting: queue.Queue[float] = queue.Queue()

    def forward(self, x: Any) -> Any:
        out = self.layer(x)
        mean = out.detach().mean()
        self.waiting.put(float(mean))
        late = self.waiting.get() if self.waiting.qsize() > 2 else 0.0
        scale = self.prior.loc.sum() + self.choice.probs[0] + self.curve(0.5) + late
        self.prior = torch.distributions.Normal(self.prior.loc + 0.1 * mean, self.prior.scale)
        logits = self.choice.logits + mean * torch.tensor([1.0, 0.0])
        self.choice = torch.distributions.Categorical(logits=logits)  # has no `probs` at first
        self.curve = self.curve * np.polynomial.Polynomial([1.0, float(mean)])
        self.of_this_step = torch.distributions.Normal(mean, 1.0)  # which the target has not
        return out * scale


KINDS = [Borrowed, Codebook, Queue, Forgetful, Recurrent, Agent, Staged, parametrized]


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_continues_with_what_the_module_holds(kind: Any, interval: int) -> None:
    whole = run(kind, MemoryStorage(), 6, interval)
    for stop in (2, 4):
        run(kind, where := MemoryStorage(), stop, interval)
        run(kind, where, stop + 1, interval)  # a process that restores, and saves at most once
        assert run(kind, where, 6, interval) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_attributes_a_resume_differs(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(Attributes, "restore", lambda *_: [])
    whole = run(kind, MemoryStorage(), 6)
    run(kind, where := MemoryStorage(), 4)
    assert run(kind, where, 6) != whole


METRIC = """
import torch

class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.total, self.count, self.values = torch.zeros(()), 0, []

    def update(self, value):
        self.total += value
        self.count += 1
        self.values.append(value)
"""


@pytest.mark.parametrize("layers", [0, 1])
def test_a_metric_of_a_library_that_is_a_member_keeps_its_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """A module of a library with parameters (the control) has its state in `state_dict` alone."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / f"a_metric_library{layers}.py").write_text(METRIC)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    library = importlib.import_module(f"a_metric_library{layers}")

    def resumed(updates: int) -> Any:
        metric = library.Mean()
        for number in range(layers):
            metric.add_module(str(number), torch.nn.Linear(1, 1))
        with CheckpointManager(where, recipe={}) as manager:
            manager.restore_or_initialize({"metric": metric})
            for number in range(updates):
                metric.update(torch.tensor(float(number)))
                manager.save(number + 1, {"metric": metric})
        return metric

    where = MemoryStorage()
    resumed(3)
    found = resumed(0)
    assert (found.total == 3, found.count == 3, len(found.values) == 3) == (not layers,) * 3


SHARING: dict[str, Callable[[State], State]] = {
    "owner": lambda state: state,
    "owner first": lambda state: {**state, "base": state["opt"].base_optimizer},
    "base first": lambda state: {"base": state["opt"].base_optimizer, **state},
    "base alone": lambda state: {"net": state["net"], "base": state["opt"].base_optimizer},
}


@pytest.mark.parametrize("members", SHARING)
def test_optimizers_that_share_their_groups_share_them_after_a_restore(members: str) -> None:
    kind = Queue
    whole = run(kind, MemoryStorage(), 6, members=SHARING[members])
    run(kind, where := MemoryStorage(), 3, members=SHARING[members])
    resumed = run(kind, where, 6, members=SHARING[members])
    if members != "base alone":  # whose own counter no member reaches
        assert resumed == whole
    optimizer = SAM(torch.nn.Linear(2, 2).parameters())
    state = {"opt": optimizer, "base": optimizer.base_optimizer}
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.save(1, state)
        manager.wait_until_finished()
        manager.restore(like=state)
    assert optimizer.param_groups is groups is optimizer.base_optimizer.param_groups
    assert groups[0] is group


class Frozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv, relu = torch.nn.Conv1d(1, 1, 1), torch.nn.ReLU()
        self.layer: Any = torch.ao.nn.intrinsic.ConvReLU1d(conv, relu)
        self.layer.frozen = False  # as `freeze_bn` of the layers that are trained for quantization


def test_a_flag_of_a_layer_for_quantization_comes_back() -> None:
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize({"net": (net := Frozen())})
        net.layer.frozen = True
        manager.save(1, {"net": net})
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"net": (net := Frozen())})
    assert net.layer.frozen


class Holder:
    value: Any = None


@pytest.mark.parametrize("place", ["member", "list", "object", "module"])
def test_a_graph_that_waits_for_its_backward_pass_is_refused(place: str) -> None:
    """Negative control: after that pass the number is saved without the graph."""
    owner = Holder() if place == "object" else torch.nn.Linear(1, 1)
    loss = torch.nn.Parameter(torch.ones(2)).square().sum()
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        state: State
        state, _ = manager.restore_or_initialize({"owner": owner, "losses": None})
        if place in ("member", "list"):
            state["losses"] = loss if place == "member" else [loss]
        else:
            owner.value = loss
        for _ in range(2):
            with pytest.raises(
                UnsupportedLeafError, match=r"(losses|owner).*a tensor with a graph"
            ):
                manager.save(1, state)
        loss.backward()
        manager.save(1, state)
        manager.wait_until_finished()
        assert manager.latest_step() == 1


def shared() -> State:
    array, tensor, log = np.zeros(2), torch.zeros(2), [0.0]
    return {
        "log": log,
        "again": {"log": log, "array": array},
        "arrays": [array, np.zeros(2)],
        "tensors": (tensor, tensor),
    }


def test_members_that_are_one_object_are_one_after_a_restore() -> None:
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize(shared())
        state["log"].append(1.0)
        state["arrays"][0] += 1
        manager.save(1, state)
    target = shared()
    target["again"]["log"] = [0.0]  # the run that saved decides
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(target)
    assert state["log"] is state["again"]["log"]
    assert state["log"] == [0.0, 1.0]
    assert state["arrays"][0] is state["again"]["array"]
    assert state["arrays"][1] is not state["arrays"][0]
    assert state["tensors"][0] is state["tensors"][1]


def test_optimizers_that_no_longer_share_their_groups_are_refused() -> None:
    sam = SAM(torch.nn.Linear(1, 1).parameters())
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.save(1, {"opt": sam, "base": sam.base_optimizer})
        manager.wait_until_finished()
        other = SAM(torch.nn.Linear(1, 1).parameters())
        other.base_optimizer.param_groups = [dict(group) for group in other.param_groups]
        with pytest.raises(MismatchError, match="one list of `param_groups`"):
            manager.restore(like={"opt": other, "base": other.base_optimizer})


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(1))
        self.count = 0
        self.hidden: Any = None


def test_each_process_of_a_group_has_its_own_attributes(tmp_path: Path) -> None:
    def counts(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes, recipe={}) as manager:
            net = Counting()
            _, step = manager.restore_or_initialize({"net": net})
            found = net.count, None if net.hidden is None else net.hidden.tolist()
            net.count += 1 + processes.index
            net.hidden = torch.full((1,), float(net.count))
            manager.save(step + 1, {"net": net})
            manager.wait_until_finished()
            return found

    assert play(2, counts) == [(0, None), (0, None)]
    assert play(2, counts) == [(1, [1.0]), (2, [2.0])]
    assert play(1, counts) == [(2, [2.0])]  # that of process 0


class Shown(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(2, 2))
        self.row = self.table[0]


def test_a_graph_of_what_is_not_stored_stops_no_save() -> None:
    """A view of a parameter, and an object that each forward pass makes anew."""
    net: Any = Shown()
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize({"net": net})
        net.made = torch.distributions.Normal(net.table.square().sum(), 1.0)
        manager.save(1, {"net": net})
        manager.wait_until_finished()
        assert manager.latest_step() == 1
