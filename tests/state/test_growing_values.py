"""Containers of plain values and arrays come back as they were, whatever the fresh target holds."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import MismatchError, UnsupportedLeafError
from perdure.state import snapshot

State = dict[str, Any]


class Transition(NamedTuple):
    observation: Any
    reward: float


@dataclass
class Progress:
    best: float | None = None
    hidden: Any = None
    log: list[float] = field(default_factory=list)


class Memory:
    """A replay buffer of the program's own class, with a `state_dict`."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque(maxlen=3)

    def state_dict(self) -> State:
        return {"items": self.items}

    def load_state_dict(self, state: State) -> None:
        self.items = state["items"]


class Notes:
    """A plain object of the program."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.epsilon = 1.0
        self.hidden: Any = None
        self.counts: Counter[str] = Counter()
        self.returns: defaultdict[int, list[float]] = defaultdict(list)
        self.order: OrderedDict[str, int] = OrderedDict()
        self.waiting = {str(step): step for step in range(9)}
        self.table = np.zeros(0)
        self.visits: dict[Any, int] = {}
        self.rate = Fraction(1, 3)

    def __call__(self, step: int) -> None:
        """As early stopping has it."""
        self.counts[f"{step % 3}"] += 1
        self.returns[step // 2].append(step / 3)
        self.order[str(step)] = step
        self.order.move_to_end("1")
        del self.waiting[str(step)]
        self.table = np.append(self.table, step)
        self.visits[(step, "a")] = self.visits[""] = step
        self.rate *= 2


def fresh() -> State:
    return {
        "replay": deque(maxlen=4),
        "history": [],
        "metrics": {},
        "seen": set(),
        "hidden": None,
        "last": (0.0, 0.0),
        "memory": Memory(),
        "progress": Progress(),
        "notes": Notes(),
        "namespace": SimpleNamespace(count=0),
        "named": [],
    }


def change(state: State, step: int) -> None:
    array = np.full(2, float(step), np.float32)
    state["replay"].append((array, torch.full((2,), step)))
    state["history"].append({"loss": step / 3, "weights": torch.ones(step % 3 + 1)})
    state["metrics"][f"m{step}"] = [step, array]
    state["seen"].add(step)
    state["hidden"] = None if step == 3 else (torch.ones(step), array)
    state["last"] = None if step % 2 else (float(step), 1.0)
    state["memory"].items.append(Transition(torch.ones(2) * step, step / 7))
    progress = state["progress"]
    progress.best, progress.hidden = step / 9, torch.ones(step) * 2
    progress.log.append(step / 2)
    state["notes"].best, state["notes"].hidden = step / 5, [array, step]
    state["notes"].epsilon *= 0.9
    state["notes"](step)
    state["namespace"].count += 1
    state["named"].append(Transition(array, step))


def run(where: MemoryStorage, stop: int, interval: int = 1) -> tuple[dict[str, bytes], State]:
    with CheckpointManager(where, save_interval_steps=interval, recipe={}) as manager:
        state, start = manager.restore_or_initialize(fresh())
        for step in range(start, stop):
            change(state, step + 1)
            manager.save(step + 1, state)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}, state


@pytest.mark.parametrize("interval", [1, 2])
def test_a_resume_has_the_containers_that_the_run_had(interval: int) -> None:
    whole, expected = run(MemoryStorage(), 8, interval)
    for stop in (2, 3, 4, 6):
        run(where := MemoryStorage(), stop, interval)
        again, state = run(where, 8, interval)
        assert again == whole, stop
    assert state["replay"].maxlen == 4
    assert type(state["memory"].items[0]) is type(state["named"][0]) is Transition
    for path in ("replay", "history", "metrics", "seen", "named", "progress"):
        assert repr(state[path]) == repr(expected[path])
    assert repr(vars(state["notes"])) == repr(vars(expected["notes"]))


def test_objects_of_the_program_are_changed_in_place() -> None:
    run(where := MemoryStorage(), 2)
    state = fresh()
    notes, namespace, memory = state["notes"], state["namespace"], state["memory"]
    with CheckpointManager(where, recipe={}) as manager:
        restored, _ = manager.restore_or_initialize(state)
    assert restored["notes"] is notes
    assert notes.best == 2 / 5
    assert namespace.count == 2
    assert memory.items[1].reward == 2 / 7


def test_a_structure_that_the_run_has_not_changed_has_to_fit() -> None:
    """Negative control: only what has grown since the fresh target is described."""
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"layers": [np.ones(2), np.ones(2)]})
        manager.save(1, state)
    with (
        CheckpointManager(where, recipe={}) as manager,
        pytest.raises(MismatchError, match="layers"),
    ):
        manager.restore_or_initialize({"layers": [np.ones(2)]})


def test_what_no_save_takes_is_refused_before_the_first_step() -> None:
    for value in (lambda: 0, Memory.state_dict, object()):
        memory = Memory()
        memory.items.extend([value] * 3)
        for state in ({"x": [value]}, {"memory": memory}):
            with (
                CheckpointManager(MemoryStorage(), recipe={}) as manager,
                pytest.raises(
                    UnsupportedLeafError, match=r"^(x/0|memory/items/0): .*no exact form"
                ),
            ):
                manager.restore_or_initialize(state)


def quantized() -> torch.nn.Module:
    from torch.ao.quantization import (
        FakeQuantize,
        MovingAveragePerChannelMinMaxObserver,
    )

    torch.manual_seed(0)
    fake = FakeQuantize(
        MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
    )
    return torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 3), "fake": fake})


@pytest.mark.filterwarnings("ignore")
def test_observers_of_each_channel_are_resumed() -> None:
    def train(where: MemoryStorage, stop: int) -> dict[str, bytes]:
        net: Any = quantized()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        state = {"net": net, "optimizer": optimizer}
        with CheckpointManager(where, recipe={}) as manager:
            state, start = manager.restore_or_initialize(state)
            for step in range(start, stop):
                optimizer.zero_grad()
                weight = net["fake"](net["layer"].weight)
                (weight @ torch.tensor([1.0, step])).square().sum().backward()
                optimizer.step()
                manager.save(step + 1, state)
        return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}

    whole = train(MemoryStorage(), 5)
    for stop in (1, 3):
        train(where := MemoryStorage(), stop)
        assert train(where, 5) == whole


class Averaging(torch.nn.Module):
    """Its buffer is None until the first forward pass, and its bank without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 3)
        self.register_buffer("mean", None)
        self.register_buffer("scratch", None, persistent=False)
        self.register_buffer("bank", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        now = y.detach().mean(0) + self.bank.sum(0)
        self.bank = torch.cat([self.bank, y.detach()[:1]])[-4:]
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return y - self.mean


@pytest.mark.parametrize("wrap", [lambda module: module, torch.nn.DataParallel])
def test_a_buffer_that_begins_empty_is_resumed(wrap: Any) -> None:
    def train(storage: MemoryStorage, steps: int, stop: int = 99) -> Any:
        torch.manual_seed(0)
        module = wrap(torch.nn.Sequential(Averaging(), torch.nn.Linear(3, 1)))
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        state = {"m": module, "o": optimizer}
        with CheckpointManager(storage, recipe={}) as manager:
            for step in range(manager.restore_or_initialize(state).step, min(steps, stop)):
                optimizer.zero_grad()
                module(torch.full((4, 2), float(step))).square().mean().backward()
                optimizer.step()
                manager.save(step + 1, state)
        return snapshot({"m": module})

    storage = MemoryStorage()
    whole = train(MemoryStorage(), 6)
    train(storage, 6, stop=3)
    assert train(storage, 6) == whole
    assert any(path.endswith("0/mean") for path in whole)
    # One that the module of a library lacks is a setting of that module.
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.save(1, {"m": torch.nn.BatchNorm1d(2)})
        with pytest.raises(MismatchError, match="m/running_mean"):
            manager.restore(like={"m": torch.nn.BatchNorm1d(2, track_running_stats=False)})


class Rotary(torch.nn.Module):
    """Registers a table whenever a sequence is longer than all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.length = torch.nn.Linear(2, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length:
            self.length = len(x)
            table = self.inner.weight.detach().sum() + torch.arange(len(x)).float()
            self.register_buffer("table", table.cos(), persistent=False)
        return self.inner(x) + self.get_buffer("table")[: len(x), None]


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_buffer_that_the_run_registers_is_a_buffer_after_a_resume(stop: int) -> None:
    def train(storage: MemoryStorage, stop: int) -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(Rotary())
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        state = {"m": module, "o": optimizer}
        with CheckpointManager(storage, recipe={}) as manager:
            start = manager.restore_or_initialize(state).step
            assert [name for name, _ in module.named_buffers()] == ["0.table"] * (start > 0)
            for step in range(start, stop):
                optimizer.zero_grad()
                module(torch.rand(3 + step // 3, 2)).square().mean().backward()
                optimizer.step()
                manager.save(step + 1, state)
        table = module[0].get_buffer("table")
        assert list(module.state_dict()) == ["0.inner.weight", "0.inner.bias"]
        return snapshot({**state, "table": table.clone()})

    train(storage := MemoryStorage(), stop)
    resumed = train(storage, 6)
    assert resumed == train(MemoryStorage(), 6)
    assert resumed != train(MemoryStorage(), 5)


class Dataset:
    """Draws from a generator of its own, as a data set with augmentation does."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)
        self.torch = torch.Generator().manual_seed(2)
        self.examples = np.arange(4.0)

    def __getitem__(self, index: int) -> float:
        noise = float(torch.rand(1, generator=self.torch))
        return float(self.examples[index % 4] + self.generator.random() + noise)


@pytest.mark.parametrize("is_member", [True, False])
def test_the_generators_of_a_member_continue(is_member: bool) -> None:
    def train(where: MemoryStorage, stop: int) -> list[float]:
        dataset = Dataset()
        state = {"sum": 0.0} | ({"data": dataset} if is_member else {})
        with CheckpointManager(where, recipe={}) as manager:
            state, start = manager.restore_or_initialize(state)
            drawn = []
            for step in range(start, stop):
                drawn.append(dataset[step])
                manager.save(step + 1, state)
        return drawn

    whole = train(MemoryStorage(), 6)
    first = train(where := MemoryStorage(), 3)
    is_same = first + train(where, 6) == whole
    assert is_same == is_member  # the negative control


def test_a_shape_or_a_dtype_changes_in_objects_of_the_program_only() -> None:
    for make in (lambda value: value, lambda value: SimpleNamespace(inside=value)):
        with CheckpointManager(MemoryStorage(), recipe={}) as manager:
            state, _ = manager.restore_or_initialize({"a": make(np.zeros(2, np.float32))})
            state["a"] = make(np.zeros(3))
            if isinstance(state["a"], SimpleNamespace):
                assert manager.save(1, state)
            else:
                with pytest.raises(
                    MismatchError, match=r"expected float32\[2\], found float64\[3\]"
                ):
                    manager.save(1, state)


def learn(storage: MemoryStorage, stop: int) -> State:
    """Fills tables by keys that have no text of their own, as tabular reinforcement learning does."""
    state: State = {
        "q": {},
        "visits": Counter({(1, 2): 1}),
        "model": defaultdict(list, {(0, "left"): [1]}),
        "odd": {True: 1, None: 2.5, 1.5: "x", "": [1], "!listed": 0, "in": 1, 2: "number", "2": 3},
        "form": {"!listed": [1], "in": "range"},
    }
    with CheckpointManager(storage, recipe={}) as manager:
        state, start = manager.restore_or_initialize(state)
        for step in range(start, stop):
            q = state["q"]
            q[step % 4, step] = q.get((step % 4, step), 0.0) + 0.5
            q["row", step % 2] = np.full(2, step)
            if step == 2:
                del q[0, 0]
            state["visits"][1, 2] += 1
            state["model"][step, "right"].append(step)
            state["odd"][None] += step
            manager.save(step + 1, state)
    return state


def test_mappings_with_any_keys_come_back() -> None:
    whole = learn(MemoryStorage(), 6)
    for stop in range(1, 6):
        learn(storage := MemoryStorage(), stop)
        state = learn(storage, 6)
        assert repr(state) == repr(whole), stop  # keys in their order, and their classes
    assert len(whole["q"]) == 7


@pytest.mark.parametrize("stop", [1, 2])
def test_a_dict_of_objects_in_another_order(stop: int) -> None:
    """As `jit` returns dicts: with sorted keys."""

    def fresh() -> State:
        torch.manual_seed(0)
        models = {name: torch.nn.Linear(2, 1) for name in "bca"}
        return {"models": models | {"_": []}, "order": []}

    def train(where: MemoryStorage, stop: int) -> State:
        with CheckpointManager(where) as manager:
            state, start = manager.restore_or_initialize(fresh())
            for step in range(start, stop):
                for place, model in enumerate(state["models"].values()):
                    if isinstance(model, torch.nn.Linear):
                        torch.nn.init.constant_(model.weight, place + step * model.bias.item())
                state["models"]["_"].append(step)
                state["order"].append("".join(state["models"]))
                state = state | {"models": dict(sorted(state["models"].items()))}
                manager.save(step + 1, state)
        return state

    whole = train(MemoryStorage(), 3)
    train(where := MemoryStorage(), stop)
    again = train(where, 3)
    assert again["order"] == whole["order"] == ["bca_", "_abc", "_abc"]
    assert again["models"]["_"] == whole["models"]["_"] == [0, 1, 2]
    for name in "abc":
        assert torch.equal(again["models"][name].weight, whole["models"][name].weight)


class Plain(dict[str, Any]):
    """A dict of the program's own class."""


class Attributes(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, *items: Any, **named: Any) -> None:
        super().__init__(*items, **named)
        self.__dict__ = self


class Ordered(OrderedDict[str, Any]):
    pass


class Counts(Counter[Any]):
    pass


class Lists(defaultdict[Any, Any]):
    pass


class Replay(list[Any]):
    pass


class OfUser(UserDict[str, Any]):
    pass


KINDS = (Plain, Attributes, Ordered, Counts, Lists, Replay, OfUser, dict)


def empty(kind: Any) -> Any:
    return Lists(list) if kind is Lists else kind()


def grow(value: Any, step: int) -> None:
    if isinstance(value, Counts):
        value[step % 3] += 1
    elif isinstance(value, Lists):
        value[step % 3].append(torch.full((2,), step / 3))
    elif isinstance(value, list):
        value.append([np.full(2, step / 7), step])
    else:
        value[f"k{step % 4}"] = np.full(2, step / 7)
        value["last"] = value.pop("last", 0.0) + step / 3  # moves to the end


def collect(where: MemoryStorage, kind: Any, first: int, stop: int) -> SimpleNamespace:
    """Fills containers in attributes of plain objects from the step `first`."""
    trainer = SimpleNamespace(at=empty(kind), nested=Plain(a=empty(kind)), new=None)
    trainer.other = SimpleNamespace(at=trainer.at)
    with CheckpointManager(where, recipe={}) as manager:
        _, start = manager.restore_or_initialize({"trainer": trainer})
        for step in range(start, stop):
            if step >= first:
                grow(trainer.at, step)
                trainer.nested[f"n{step % 3}"] = empty(kind)
                trainer.new = trainer.new or Plain(inside=empty(kind))
                for part in (*trainer.nested.values(), trainer.new["inside"]):
                    grow(part, step)
            manager.save(step + 1, {"trainer": trainer})
    return trainer


def bits(value: Any) -> Any:
    if isinstance(value, (dict, UserDict)):
        return type(value), [(key, bits(part)) for key, part in value.items()]
    if isinstance(value, list):
        return type(value), [bits(part) for part in value]
    octets = value.tobytes() if isinstance(value, np.ndarray) else None
    octets = value.numpy().tobytes() if isinstance(value, torch.Tensor) else octets
    return type(value), octets or value


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_containers_of_own_classes_grow_in_plain_objects(kind: Any, first: int) -> None:
    whole = collect(MemoryStorage(), kind, first, 6)
    for stop in (1, 3, 4):
        collect(where := MemoryStorage(), kind, first, stop)
        again = collect(where, kind, first, 6)
        for name in ("at", "nested", "new"):
            assert bits(getattr(again, name)) == bits(getattr(whole, name)), (stop, name)
        assert again.other.at is again.at
    for part in (again.at, again.new["inside"], again.nested["n2"]):
        assert type(part) is kind
        assert kind is not Attributes or vars(part) is part
        assert kind is not Lists or part.default_factory is list


@pytest.mark.filterwarnings("error")
def test_a_container_gets_another_class() -> None:
    class Local(dict[str, Any]):
        """Found in the target alone."""

    def train(where: MemoryStorage, stop: int) -> SimpleNamespace:
        trainer = SimpleNamespace(a=Plain(x=1), b=Attributes(x=1), c={"x": 1}, d=Local(x=1))
        with CheckpointManager(where, recipe={}) as manager:
            _, start = manager.restore_or_initialize({"trainer": trainer})
            for step in range(start, stop):
                if step == 1:
                    trainer.a, trainer.b, trainer.c = {"x": 1}, Plain(x=1), Ordered(x=1)
                trainer.d[f"k{step}"] = Local(x=step)
                manager.save(step + 1, {"trainer": trainer})
        return trainer

    whole = train(MemoryStorage(), 4)
    for stop in (1, 3):
        train(where := MemoryStorage(), stop)
        again = train(where, 4)
        for name in "abc":
            assert bits(getattr(again, name)) == bits(getattr(whole, name)), (stop, name)
        assert {key: dict(d) for key, d in again.d.items() if key != "x"} == {
            f"k{step}": {"x": step} for step in range(4)
        }


@pytest.mark.parametrize("first", [0, 2])
def test_what_a_grown_container_cannot_give_back_is_refused_by_the_save(first: int) -> None:
    """Negative control: a module that the fresh target lacks, and a class that nothing finds."""

    class Local(list[Any]):
        pass

    for make in (lambda: torch.nn.Linear(1, 1), Local):
        trainer = SimpleNamespace(at=Plain(x=1))
        with CheckpointManager(MemoryStorage(), recipe={}) as manager:
            manager.restore_or_initialize({"trainer": trainer})
            for step in range(first):
                manager.save(step + 1, {"trainer": trainer})
            trainer.at["new"] = make()
            with pytest.raises(UnsupportedLeafError, match="trainer/at/new"):
                manager.save(first + 1, {"trainer": trainer})


class Keyed(dict[str, Any]):
    """A common recipe: a missing attribute is a KeyError."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def test_a_dict_whose_attributes_raise_key_errors_comes_back() -> None:
    import torch  # noqa: F401 (with it, dicts are asked whether they are a module's `state_dict`)

    where = MemoryStorage()
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"config": Keyed(rate=0.1)})
        state["config"].best = 3
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        state, step = manager.restore_or_initialize({"config": Keyed(rate=0.1)})
    assert (step, type(state["config"])) == (1, Keyed)
    assert state["config"] == {"rate": 0.1, "best": 3}
