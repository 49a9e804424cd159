"""Objects of a program: what their classes, their slots and their factories hold comes back, too."""

from __future__ import annotations

import copy
import csv
import datetime as dt
import enum
import logging
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import StateError, UnsupportedLeafError


@dataclass
class Progress:
    best: float = 9.0
    seen: list[int] = field(default_factory=list)

    @cached_property
    def shown(self) -> str:
        return f"{self.best}"


def test_a_dataclass_is_restored_in_place() -> None:
    where = MemoryStorage()
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"progress": (progress := Progress())})
        progress.best, progress.seen = 2.0, [1, 2]
        manager.save(1, {"progress": progress})
    fresh = Progress()
    assert fresh.shown == "9.0"
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"progress": fresh})
    assert state["progress"] is fresh
    assert (fresh.best, fresh.seen, fresh.shown) == (2.0, [1, 2], "2.0")


def test_dataclasses_that_become_one_object_stay_one() -> None:
    where, state = MemoryStorage(), {"population": [Progress(), Progress()]}
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize(state)
        state["population"][1] = state["population"][0]
        state["population"][0].best = 1.0
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        restored, _ = manager.restore_or_initialize({"population": [Progress(), Progress()]})
    first, second = restored["population"]
    assert first is second
    assert first.best == 1.0


class Base:
    count = 0
    losses: list[float] = []  # noqa: RUF012 (that it is one for all is what is tried)
    by_name: dict[Any, int] = {}  # noqa: RUF012
    visited: set[Any] = set()  # noqa: RUF012
    total = np.zeros(2)
    LAYERS = (1, 2)


class Agent(Base):
    def __init__(self) -> None:
        self.rate = 1.0


def reset_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would have them."""
    for name, value in {"count": 0, "losses": [], "by_name": {}, "visited": set()}.items():
        monkeypatch.setattr(Base, name, value)
    monkeypatch.setattr(Base, "total", np.zeros(2))


def train(where: MemoryStorage, stop: int) -> tuple[Any, ...]:
    agent = Agent()
    with CheckpointManager(where, recipe={}) as manager:
        _, start = manager.restore_or_initialize({"agents": [agent, {"inner": Agent()}]})
        state = {"agents": [agent, {"inner": Agent()}]}
        for step in range(start, stop):
            Base.count += 1
            agent.losses.append(step / 3)
            agent.by_name[step, "x"] = step
            agent.visited.add((step, 1))
            Base.total += step
            agent.rate *= 0.9
            manager.save(step + 1, state)
    held = (
        Base.count,
        list(Base.losses),
        dict(Base.by_name),
        set(Base.visited),
        Base.total.tobytes(),
    )
    return agent.rate, *held


def test_what_a_run_changes_in_a_class_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_classes(monkeypatch)
    whole = train(MemoryStorage(), 6)
    reset_classes(monkeypatch)
    train(where := MemoryStorage(), 3)
    reset_classes(monkeypatch)
    assert train(where, 6) == whole
    assert train(MemoryStorage(), 1)[1] == 7  # control: the class itself goes on in one process


class Slots:
    __slots__ = ("n", "seen")

    def __init__(self) -> None:
        self.n, self.seen = 0, [0]


class WithDict(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.k = 0


@pytest.mark.parametrize("kind", [Slots, WithDict])
def test_slots_are_attributes(kind: type[Any]) -> None:
    where, value = MemoryStorage(), kind()
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"value": value})
        value.n, value.seen = 3, [0, 1]
        manager.save(1, {"value": value})
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"value": (fresh := kind())})
    assert (fresh.n, fresh.seen) == (3, [0, 1])


class Table:
    def __init__(self, factory: Any) -> None:
        self.q = defaultdict(factory)
        self.nested = defaultdict(lambda: defaultdict(factory))


@pytest.mark.parametrize("in_object", [True, False])
def test_a_factory_of_the_program_is_that_of_the_target(in_object: bool) -> None:
    def make() -> tuple[Any, Any]:
        table = Table(lambda: np.zeros(2))
        return table, table if in_object else {"q": table.q, "nested": table.nested}

    def held(state: Any) -> Any:
        return state if in_object else Table.__new__(Table)

    where = MemoryStorage()
    with CheckpointManager(where, recipe={}) as manager:
        table, member = make()
        manager.restore_or_initialize({"table": member})
        table.q[0, "left"] += 1.5
        table.q["plain"] += 1
        table.nested["a"][3] += 2
        manager.save(1, {"table": member})
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"table": make()[1]})
    found = vars(state["table"]) if in_object else state["table"]
    assert found["q"][0, "left"].tolist() == [1.5, 1.5]
    assert found["q"]["plain"].tolist() == [1.0, 1.0]
    assert found["nested"]["a"][3].tolist() == [2.0, 2.0]
    assert found["q"]["new"].tolist() == found["nested"]["b"]["new"].tolist() == [0.0, 0.0]
    assert found["nested"]["a"]["new"].tolist() == [0.0, 0.0]


def test_a_set_of_tuples_is_restored() -> None:
    where, visited = MemoryStorage(), {(1, "a"), (0, (2, None)), 3, "x", (1, 2)}
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"visited": set[Any]()})
        manager.save(1, {"visited": visited})
    with CheckpointManager(where, recipe={}) as manager:
        assert manager.restore_or_initialize({"visited": set()})[0]["visited"] == visited


def best_of(optimizer: Any, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    return {"loss": 9.0, "optimizer": wrap(optimizer.state_dict())}


def test_a_copy_of_the_state_of_an_optimizer_may_be_kept_beside_it() -> None:
    where = MemoryStorage()

    def make() -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        best = best_of(optimizer, copy.deepcopy)
        return {"model": model, "optimizer": optimizer, "best": best}

    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(make())
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        state["best"] = best_of(state["optimizer"], copy.deepcopy)
        kept = copy.deepcopy(state["best"]["optimizer"])
        state["optimizer"].step()
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        found = manager.restore_or_initialize(make())[0]["best"]["optimizer"]
    for number, values in kept["state"].items():
        for name, value in values.items():
            assert torch.equal(found["state"][number][name], value)
    with CheckpointManager(
        MemoryStorage(), recipe={}
    ) as manager:  # control: by itself it is not one
        state = make()
        del state["optimizer"]
        with pytest.raises(UnsupportedLeafError, match="this is the `state_dict\\(\\)`"):
            manager.restore_or_initialize(state)


class Failing:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError(f"no {state}")


def test_a_failed_restore_gives_classes_dataclasses_and_slots_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reset_classes(monkeypatch)
    where = MemoryStorage()

    def make() -> dict[str, Any]:
        return {"agent": Agent(), "progress": Progress(), "slots": WithDict(), "z": Failing()}

    with CheckpointManager(where, recipe={}) as manager:
        state = make()
        manager.restore_or_initialize(state)
        Base.losses.append(1.0)
        Base.count = 5
        state["progress"].best, state["slots"].n = 1.0, 4
        manager.save(1, state)
    reset_classes(monkeypatch)
    fresh = make()
    with CheckpointManager(where, recipe={}) as manager, pytest.raises(StateError, match="Failing"):
        manager.restore_or_initialize(fresh)
    assert (Base.losses, Base.count, fresh["slots"].n) == ([], 0, 0)
    assert fresh["progress"].best == 9.0


class Found:
    def __init__(self, size: int) -> None:
        self.genome, self.fit, self.tags = np.arange(float(size)), None, ["a"]

    @cached_property
    def size(self) -> int:
        return len(self.genome)


class InSlots:
    __slots__ = ("genome", "parts")

    def __init__(self, size: int) -> None:
        self.genome, self.parts = np.ones(size), [Found(1), {"k": Found(size)}]


class Owner:
    def __init__(self) -> None:
        self.best: Any = None
        self.found: list[Any] = []


def resumed(make: Callable[[], Any], change: Callable[[Any], object]) -> tuple[Any, Any, Any]:
    """The state of a run, and the target and the state of the program that resumes it."""
    where = MemoryStorage()
    with CheckpointManager(where, recipe={}) as manager:
        state = make()
        manager.restore_or_initialize(state)
        change(state)
        manager.save(1, state)
    with CheckpointManager(where, recipe={}) as manager:
        fresh = make()
        restored, _ = manager.restore_or_initialize(fresh)
        manager.save(2, restored)
    return state, fresh, restored


def parts(value: Any) -> Any:
    """All that a value has, with its classes."""
    if isinstance(value, dict):
        return {key: parts(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [parts(part) for part in value]
    if isinstance(value, np.ndarray):
        return parts(value.tolist()) if value.dtype == object else value.tobytes()
    if type(value).__module__ == __name__ and not isinstance(value, enum.Enum):
        names = getattr(value, "__slots__", None) or sorted(vars(value))
        return type(value).__name__, [(name, parts(getattr(value, name))) for name in names]
    return value


def add_found(state: Any) -> None:
    state["found"] += [Found(3), InSlots(2), Progress(1.0, [2])]
    state["found"][0].fit = 0.5
    state["best"] = state["found"][1]
    sizes = [state["best"].size, state["found"][0].size]  # kept in the objects
    assert sizes == [3, 2]
    state["last"].extend(map(Found, range(5)))
    state["owner"].best = Found(2)
    state["owner"].found.append(state["owner"].best)


def some() -> Any:
    return {"found": [Found(2)], "best": None, "last": deque(maxlen=3), "owner": Owner()}


def test_objects_that_a_run_makes_come_back_and_those_of_the_target_are_changed_in_place() -> None:
    state, fresh, restored = resumed(some, add_found)
    sizes = [restored["best"].size, restored["found"][0].size]
    assert sizes == [3, 2], "computed again"
    assert parts(restored) == parts(state)
    assert restored["best"] is restored["found"][1]
    assert restored["owner"].best is restored["owner"].found[0]
    assert restored["found"][0] is fresh["found"][0], "others may have it"


def test_objects_that_become_one_stay_one() -> None:
    def change(state: Any) -> None:
        state["found"][1] = state["found"][0]
        state["found"][0].fit = 3.0

    _, _, restored = resumed(lambda: {"found": [Found(2), Found(3)]}, change)
    assert restored["found"][0] is restored["found"][1]
    assert restored["found"][1].fit == 3.0


def test_an_object_gets_and_loses_attributes_as_those_of_the_run() -> None:
    def change(state: Any) -> None:
        owner = state["owner"]
        owner.hidden = np.ones(2)  # as in `forward`
        owner.seen = {1: "x"}
        owner.found = [1, 2]
        del owner.best

    state, fresh, restored = resumed(lambda: {"owner": Owner()}, change)
    assert restored["owner"] is fresh["owner"]
    assert parts(restored) == parts(state)
    assert sorted(vars(restored["owner"])) == ["found", "hidden", "seen"]


class Phase(enum.Enum):
    COLD = 1
    HOT = 2


@dataclass
class Config:
    out: Any = Path("runs")
    phase: Phase = Phase.COLD
    layer: type = torch.nn.Linear
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    share: Any = Fraction(1, 3)


@dataclass(frozen=True, slots=True)
class Frozen:
    phase: Phase = Phase.COLD


def test_a_dataclass_keeps_what_an_object_keeps() -> None:
    def change(state: Any) -> None:
        state["config"].out, state["config"].phase = Path("b"), Phase.HOT
        state["config"].layer = torch.nn.Conv1d
        state["frozen"] = Frozen(Phase.HOT)
        state["owner"].best[1] = "x", np.ones(2)

    def make() -> Any:
        owner = Owner()
        owner.best = np.zeros(3, object)
        return {"config": Config(), "frozen": Frozen(), "owner": owner}

    state, _, restored = resumed(make, change)
    assert parts(restored) == parts(state)
    assert type(restored["frozen"]) is Frozen


class Loop:
    """Knows its callback, which knows it, and has what belongs to the process."""

    def __init__(self, directory: Path) -> None:
        self.callback = Owner()
        self.callback.loop = self  # type: ignore[attr-defined]
        self.log = logging.getLogger("loop")
        self.lock = threading.Lock()
        self.numpy = np
        self.file = (directory / "log.csv").open("a")
        self.rows = csv.writer(self.file)
        self.step = 0


def test_an_owner_that_its_part_knows_and_what_belongs_to_the_process(tmp_path: Path) -> None:
    def change(state: Any) -> None:
        state["loop"].step = 4
        state["loop"].callback.best = 2.0

    made = []

    def make() -> Any:
        made.append(Loop(tmp_path))
        return {"loop": made[-1]}

    _, fresh, restored = resumed(make, change)
    loop = restored["loop"]
    assert loop is fresh["loop"]
    assert loop.callback.loop is loop
    assert (loop.step, loop.callback.best) == (4, 2.0)
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:  # control
        state = make()
        manager.restore_or_initialize(state)
        state["loop"].callback.loop = made[0]
        with pytest.raises(UnsupportedLeafError, match="loop/callback/loop"):
            manager.save(1, state)
    for loop in made:
        loop.file.close()


@dataclass
class Counted:
    number: int = 0
    made: ClassVar[int] = 0
    SIZE = 3

    def __post_init__(self) -> None:
        Counted.made += 1


class Net(torch.nn.Module):
    calls = 0


class Left(Net, Base):
    pass


class Right(Net):
    pass


def test_classes_of_any_object_keep_what_the_run_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reset() -> None:
        monkeypatch.setattr(Counted, "made", 0)
        for kind in (Left, Right):
            if "calls" in vars(kind):
                delattr(kind, "calls")
        reset_classes(monkeypatch)

    def change(state: Any) -> None:
        for _ in range(3):
            type(state["left"]).calls += 1
            state["list"].append(Counted())
        type(state["right"]).calls += 5
        type(state["agent"]).count += 2
        Base.losses.append(1.5)

    reset()
    where = MemoryStorage()

    def make() -> Any:
        return {"left": Left(), "right": Right(), "list": [], "agent": Agent()}

    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize(state := make())
        change(state)
        manager.save(1, state)
    reset()
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(make())
    assert (Left.calls, Right.calls, Net.calls, Counted.made) == (3, 5, 0, 3)
    assert (Agent.count, Base.count, Base.losses) == (2, 0, [1.5])
    assert "count" not in vars(state["agent"]), "an attribute of its own would hide the class"
    del Agent.count
    reset()


def test_an_object_that_becomes_two_stays_two() -> None:
    def make() -> Any:
        first = Found(2)
        return {"found": [first, Found(3)], "best": first, "owner": Owner()}

    def change(state: Any) -> None:
        state["best"] = copy.deepcopy(state["found"][1])  # no longer the first one
        state["best"].fit = 1.0
        state["found"][0].fit = 2.0

    state, fresh, restored = resumed(make, change)
    assert parts(restored) == parts(state)
    assert restored["found"][0] is fresh["found"][0]
    assert restored["best"] is not restored["found"][0]


class Warm:
    def __init__(self) -> None:
        self.value = 1.0


class Main(Warm):
    pass


@dataclass(slots=True)
class Slotted:
    total: float = 0.0


def test_an_object_that_is_exchanged_for_another_one_comes_back_as_that() -> None:
    def make() -> Any:
        return {"phase": Warm(), "list": [Warm(), Warm()], "owner": Owner(), "made": []}

    def change(state: Any) -> None:
        state["phase"] = Main()
        state["list"][1] = Owner()
        state["owner"].best = Warm()
        state["owner"].found = None
        state["made"] += [Slotted(2.0)]

    state, _, restored = resumed(make, change)
    assert parts(restored) == parts(state)
    state, _, restored = resumed(make, lambda state: state.update(phase=None))
    assert parts(restored) == parts(state)


def test_attributes_without_a_leaf_do_not_keep_others_from_coming() -> None:
    """An empty container, a logger and an owner have no leaf: a checkpoint with them is whole."""

    def make() -> Any:
        loop = Owner()
        loop.best = Owner()
        loop.best.owner, loop.log, loop.none = loop, logging.getLogger("x"), {}  # type: ignore[attr-defined]
        return {"loop": loop}

    def change(state: Any) -> None:
        state["loop"].rate = 0.1
        del state["loop"].best.found

    _, fresh, restored = resumed(make, change)
    loop = restored["loop"]
    assert loop is fresh["loop"]
    assert (loop.rate, loop.found, loop.none) == (0.1, [], {})
    assert sorted(vars(loop.best)) == ["best", "owner"]


def test_what_would_work_on_an_old_container_is_refused_at_once() -> None:
    words: Any = defaultdict()
    words.default_factory = words.__len__
    closed: Any = defaultdict(lambda: len(closed))
    owner = Owner()
    owner.best = owner.found.append
    for state in ({"words": words}, {"words": closed}, {"words": owner}):
        with (
            CheckpointManager(MemoryStorage(), recipe={}) as manager,
            pytest.raises(UnsupportedLeafError, match=r"words.*a method of a list"),
        ):
            manager.restore_or_initialize(state)


def test_a_graph_with_very_many_paths_is_refused_and_does_not_hang() -> None:
    layers = [[Owner() for _ in range(3)] for _ in range(30)]
    for one, other in pairwise(layers):
        for node in one:
            node.found = list(other)
    with (
        CheckpointManager(MemoryStorage(), recipe={}) as manager,
        pytest.raises(UnsupportedLeafError, match="more than 50 paths"),
    ):
        manager.restore_or_initialize({"layers": layers})


class Track:
    ROWS = np.eye(2)
    rows = [np.zeros(1)]  # noqa: RUF012

    def __init__(self) -> None:
        self.x = 1.0


def test_classes_of_which_the_first_state_has_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Track, "ROWS", np.eye(2))
    monkeypatch.setattr(Track, "rows", [np.zeros(1)])
    where = MemoryStorage()
    with CheckpointManager(where, recipe={}) as manager:
        state: Any = {"tracks": []}
        manager.restore_or_initialize(state)
        for step in (1, 2):
            Track.ROWS = Track.ROWS * 0.5
            Track.rows.append(np.ones(1))
            state["tracks"] = [Track()] if step == 1 else []  # none at the last save
            manager.save(step, state)
    Track.ROWS, Track.rows = np.eye(2), [np.zeros(1)]
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"tracks": []})
    assert Track.ROWS[0, 0] == 0.25
    assert len(Track.rows) == 3


class Name(str):
    pass


class Words(dict[str, int]):
    pass


class Stop(Exception):
    pass


class Settings(dict[str, Any]):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    "make",
    [
        lambda: Name("a"),
        lambda: Stop("a"),
        lambda: SimpleNamespace(a=1),
    ],
)
def test_an_object_with_a_part_that_no_class_of_python_has_is_not_made(
    make: Callable[[], Any],
) -> None:
    """It is kept where the target has one, and refused by the save where a run makes it."""
    owner = Owner()
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"owner": owner})
        owner.best = make()
        with pytest.raises(UnsupportedLeafError, match="owner/best: there was no"):
            manager.save(1, state)
    owner, other = Owner(), Owner()
    owner.best, other.best = make(), make()
    with CheckpointManager(where, recipe={}) as manager:
        manager.save(2, {"owner": owner})
    with CheckpointManager(where, recipe={}) as manager:
        _, step = manager.restore_or_initialize({"owner": other})
    assert step == 2
    assert type(other.best) is type(make())


@pytest.mark.parametrize("kind", [Words, Settings])
def test_a_dict_of_an_own_class_that_the_run_makes_comes_back(kind: type[Any]) -> None:
    owner = Owner()
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize({"owner": owner})
        owner.best = kind(b=2, a=1)
        manager.save(1, {"owner": owner})
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"owner": (other := Owner())})
    assert type(other.best) is kind
    assert [*other.best.items()] == [("b", 2), ("a", 1)]


def _take_out(state: Any) -> None:
    state["used"].pop(0)


def _exchange(state: Any) -> None:
    state["used"], state["spare"] = state["spare"], state["used"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_take_out, "used/0: used had another class, length or set of keys when"),
        (_exchange, "spare/0: there was no numpy.* here when"),
    ],
)
def test_objects_that_no_restore_makes_in_a_list_that_changed_are_refused_with_the_list(
    change: Callable[[Any], None], reason: str
) -> None:
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize(_generators())
        state["used"].reverse()
        manager.save(1, state)  # the control: each place has a generator
        drawn = state["used"][0].random()
    with CheckpointManager(where, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(_generators())
        assert state["used"][0].random() == drawn
        change(state)
        with pytest.raises(UnsupportedLeafError, match=reason) as error:
            manager.save(2, state)
    assert "leave it in its place" in str(error.value)


def test_a_view_of_a_dict_is_refused_with_what_to_write() -> None:
    owner = Owner()
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize({"owner": owner})
        owner.best = {"a": 1}.keys()
        with pytest.raises(UnsupportedLeafError, match=r"owner/best: .*dict_keys.* into a list"):
            manager.save(1, {"owner": owner})
        owner.best = ["a"]  # the control
        manager.save(1, {"owner": owner})


def _generators() -> dict[str, Any]:
    return {"used": [np.random.default_rng(seed) for seed in (1, 2)], "spare": []}


class ByKey:
    def __init__(self) -> None:
        self.values = {"a": 1}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["values"][name]


def test_a_class_whose_attributes_raise_a_key_error_is_named() -> None:
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        with pytest.raises(UnsupportedLeafError, match=r"x/0: a .*ByKey raises KeyError"):
            manager.restore_or_initialize({"x": [ByKey()]})
        state, _ = manager.restore_or_initialize({"owner": (owner := Owner())})
        owner.best = ByKey()
        with pytest.raises(UnsupportedLeafError, match=r"owner/best: a .*ByKey raises KeyError"):
            manager.save(1, state)


class Stored:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    "value", [slice(1, 2), range(3), Fraction(1, 3), Path("a"), dt.date(2020, 1, 2), Phase.HOT]
)
def test_a_value_of_a_state_dict_that_the_target_has_not_comes_back(value: Any) -> None:
    with CheckpointManager(where := MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize({"stored": (stored := Stored(None))})
        stored.value = [value, {"inside": value}]
        manager.save(1, {"stored": stored})
    with CheckpointManager(where, recipe={}) as manager:
        manager.restore_or_initialize({"stored": (fresh := Stored(None))})
    assert fresh.value == [value, {"inside": value}]
    assert type(fresh.value[0]) is type(value)


class Link:
    def __init__(self, value: float) -> None:
        self.value = value
        self.other: Any = None


def aliased(draw: random.Random) -> Any:
    links = [Link(float(place)) for place in range(4)]
    return {
        "list": [draw.choice(links) for _ in range(4)],
        "by name": {"a": draw.choice(links), "b": draw.choice(links)},
        "one": draw.choice([None, *links]),
        "made": [],
    }


def exchange(state: Any, draw: random.Random) -> None:
    for number in range(draw.randrange(1, 7)):
        new = Link(10.0 + number)
        known = [*state["list"], *state["by name"].values(), new]
        value, place = draw.choice(known), draw.randrange(4)
        match draw.randrange(5):
            case 0:
                state["list"][place] = value
            case 1:
                state["by name"][draw.choice("ab")] = value
            case 2:
                state["one"] = draw.choice([None, value])
            case 3:
                state["made"].append(value)
            case _:
                target = state["list"][place]
                if all(each is not target for each in chain(value)):  # else a circle
                    target.other = value
    for number, each in enumerate(state["list"]):
        each.value += number


def chain(link: Any) -> list[Any]:
    return [] if link is None else [link, *chain(link.other)]


def identities(state: Any) -> Any:
    """The values, with a number for each object in place of its identity."""
    numbers: dict[int, int] = {}

    def shown(link: Any) -> Any:
        return [(numbers.setdefault(id(each), len(numbers)), each.value) for each in chain(link)]

    found = [shown(each) for each in [*state["list"], *state["by name"].values(), state["one"]]]
    return [*found, *map(shown, state["made"])]


def test_objects_that_share_and_exchange_objects_come_back_with_the_same_identities() -> None:
    for seed in range(25):
        state, _, restored = resumed(
            lambda: aliased(random.Random(seed)),  # noqa: B023 (called in the same pass)
            lambda state: exchange(state, random.Random(seed + 1)),  # noqa: B023
        )
        assert identities(restored) == identities(state), seed
