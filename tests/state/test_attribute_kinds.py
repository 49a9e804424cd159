"""Every kind of value that training may put into an attribute comes back, or its save is refused."""

from __future__ import annotations

import argparse
import array
import collections
import copy
import dataclasses
import datetime as dt
import enum
import functools
import itertools
import pathlib
import re
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import StateError, UnsupportedLeafError
from perdure.state.bits import same
from perdure.state.value_forms import Form

UTC = dt.UTC


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


class Parts(enum.Flag):
    HEAD = 1
    BODY = 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Record:
    count: int
    value: Any = None


class Meter:
    def __init__(self, total: Any = 0) -> None:
        self.total = total


class Recent(list):  # type: ignore[type-arg]
    pass


class Named(dict):  # type: ignore[type-arg]
    pass


class Attributes(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Scale(torch.nn.Module):
    uses: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.by = 2.0


class Shift(Scale):
    pass


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.act = Scale()
        self.value: Any = None


class Descent(torch.optim.SGD):
    def __init__(self, net: Net) -> None:
        super().__init__(net.parameters(), lr=0.1)
        self.value: Any = None


class Loop:
    def __init__(self) -> None:
        self.value: Any = None


def flat(value: Any) -> Any:
    """A value as containers that `same` compares by their bits."""
    if dataclasses.is_dataclass(value) or type(value) in (Meter, SimpleNamespace, Recent, Named):
        items: Any = list(value) if isinstance(value, list) else []
        items = list(value.items()) if isinstance(value, dict) else items
        return type(value).__name__, flat(items), flat(vars(value))
    if isinstance(value, dict):
        return type(value).__name__, [(key, flat(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [flat(part) for part in value]
    if isinstance(value, (collections.UserDict, argparse.Namespace)):
        return flat(vars(value))
    return value


VALUES: dict[str, Any] = {
    "flag": Parts.HEAD | Parts.BODY,
    "enumeration in a named tuple": Point(Phase.HOT, [1]),
    "named tuple of an array": Point(np.arange(3), 1),
    "dataclass": Record(3, np.arange(2)),
    "object": Meter(Meter(torch.ones(2))),
    "objects in a list": [Meter(1), Meter(2)],
    "objects in a dict": {"a": Record(1), "b": Meter(3)},
    "list of its own": Recent([1, 2.5]),
    "dict of its own": Named(a=1),
    "UserDict": collections.UserDict(a=1),
    "namespace": SimpleNamespace(a=1, b=[2]),
    "argparse": argparse.Namespace(rate=0.1),
    "range": range(3, 9, 2),
    "slice": slice(1, 5, 2),
    "bytearray": bytearray(b"abc"),
    "path": pathlib.Path("a") / "b",
    "time": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    "date": dt.date(2026, 1, 1),
    "duration": dt.timedelta(seconds=-1.5),
    "uuid": uuid.UUID(int=5),
    "pattern": re.compile("a+", re.IGNORECASE),
    "array.array": array.array("d", [1.0, 2.0]),
    "dtype": np.dtype([("a", "<i4"), ("b", "<f8")]),
    "torch dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([1, 2]),
    "texts": np.array(["a", "bc"]),
    "dates": np.array(["2026-01-01", "NaT"], "datetime64[D]"),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked": np.ma.array([1, 2, 3], mask=[False, True, False]),
    "no rows": np.zeros((0, 3), "U4"),
    "sparse": torch.eye(2).to_sparse(),
    "function": torch.nn.functional.gelu,
    "compiled function": torch.relu,
    "class": Shift,
    "keys": {(1, 2): Meter(3), "b": range(3)},
}


def net() -> tuple[dict[str, Any], Any]:
    made = Net()
    return {"net": made}, made


def optimizer() -> tuple[dict[str, Any], Any]:
    made = Net()
    descent = Descent(made)
    return {"net": made, "optimizer": descent}, descent


@pytest.mark.parametrize("make", [net, optimizer])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_training_puts_into_an_attribute_comes_back(
    make: Callable[[], Any], name: str
) -> None:
    storage = MemoryStorage()
    state, owner = make()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize(state)
        owner.value = copy.deepcopy(VALUES[name])
        manager.save(1, state)
    for step in (2, 3):  # what a restore has put is stored by every later save
        state, owner = make()
        with CheckpointManager(storage) as manager:
            manager.restore_or_initialize(state)
            assert type(owner.value) is type(VALUES[name])
            assert same(flat(owner.value), flat(VALUES[name]))
            manager.save(step, state)


@pytest.mark.parametrize(
    "name", [name for name, value in VALUES.items() if type(value) in (range, slice, dt.date)]
)
def test_an_object_of_the_loop_keeps_such_values_too(name: str) -> None:
    storage = MemoryStorage()
    state = {"loop": Loop()}
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize(state)
        state["loop"].value = VALUES[name]
        manager.save(1, state)
    state = {"loop": Loop()}
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize(state)
    assert state["loop"].value == VALUES[name]


class Average:
    count = 0
    best = None
    NAME = "loss"

    def __init__(self) -> None:
        self.sum = 0
        self.mean = 0.0


def test_numbers_of_a_class_and_numbers_that_become_arrays_come_back() -> None:
    storage = MemoryStorage()
    meter = Average()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize({"meter": meter})
        meter.count += 1
        meter.best = torch.ones(2)  # type: ignore[assignment]
        meter.sum += torch.tensor(1.5)  # type: ignore[assignment]
        meter.mean += np.float32(0.5)  # type: ignore[assignment]
        manager.save(1, {"meter": meter})
    meter = Average()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize({"meter": meter})
    found = vars(meter)
    assert found.keys() == {"count", "best", "sum", "mean"}
    assert same(found["best"], torch.ones(2))
    assert same(found["sum"], torch.tensor(1.5))
    assert same(found["mean"], np.float32(0.5))
    assert found["count"] == 1
    assert "count" not in vars(Average())


def test_an_object_that_was_there_stays_the_same_object() -> None:
    storage = MemoryStorage()

    def make() -> Net:
        made = Net()
        made.value = [Meter(0)]
        return made

    model = make()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize({"net": model})
        model.value[0].total = 4
        model.value.append(Meter(5))
        manager.save(1, {"net": model})
    model = make()
    held = model.value[0]
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize({"net": model})
    assert model.value[0] is held
    assert [meter.total for meter in model.value] == [4, 5]


def test_an_object_that_has_a_parameter_has_that_of_the_new_model() -> None:
    storage = MemoryStorage()
    model = Net()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize({"net": model})
        model.value = {"worst": Record(7, model.two.weight)}
        manager.save(1, {"net": model})
    model = Net()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize({"net": model})
    assert model.value["worst"].value is model.two.weight
    assert model.value["worst"].count == 7


def swap(model: Net) -> None:
    model.one, model.two = model.two, model.one


def tie(model: Net) -> None:
    model.two.weight = model.one.weight


def replace(model: Net) -> None:
    model.act = Shift()


def add(model: Net) -> None:
    model.late = Scale()


@pytest.mark.parametrize("change", [swap, tie, replace, add])
def test_what_no_state_dict_says_of_the_structure_is_refused(change: Callable[[Net], None]) -> None:
    model = Net()
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize({"net": model})
        manager.save(1, {"net": model})
        change(model)
        with pytest.raises(UnsupportedLeafError, match="A resumed program builds the first one"):
            manager.save(2, {"net": model})


def test_a_new_layer_of_the_same_class_and_a_wrapper_are_no_change_of_the_structure() -> None:
    model = Net()
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize({"net": model})
        model.one = torch.nn.Linear(2, 2)
        model.act = torch.compile(model.act, backend="eager")  # type: ignore[assignment]
        manager.save(1, {"net": model})


def test_a_lazy_layer_is_no_change_of_the_structure() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(2))
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize({"net": model})
        model(torch.ones(1, 3))
        manager.save(1, {"net": model})


def test_an_object_with_a_state_that_only_training_makes_is_refused() -> None:
    state, owner = optimizer()
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        owner.value = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        with pytest.raises(StateError, match="Make it where its owner is made"):
            manager.save(1, state)


def test_an_object_that_cannot_be_made_again_is_refused() -> None:
    class Local:
        def __init__(self) -> None:
            self.total = 1

    state, owner = net()
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        owner.value = Local()
        with pytest.raises(UnsupportedLeafError, match="cannot be made again"):
            manager.save(1, state)


def test_keys_that_are_tensors_are_refused_and_names_come_back() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = {"weight": weight, "loop": Loop()}
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        state["loop"].value = {weight: 1.0}
        with pytest.raises(UnsupportedLeafError, match="Use names as keys"):
            manager.save(1, state)
        state["loop"].value = {"weight": 1.0}
        manager.save(1, state)
        state["loop"].value = None
        assert manager.restore_or_initialize(state).step == 1
        assert state["loop"].value == {"weight": 1.0}


def test_a_generator_in_place_of_none_in_an_object_of_the_loop_is_refused() -> None:
    state = {"loop": Loop()}
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        state["loop"].value = np.random.default_rng(0)
        with pytest.raises(UnsupportedLeafError, match="there was no numpy"):
            manager.save(1, state)


@pytest.mark.parametrize(
    "form",
    [
        {"!listed": "echo", "in": "os.system"},
        {"!listed": ["true"], "in": "subprocess.Popen"},
        {"!listed": "os:system", "in": "name"},
        {"!listed": "torch:os.system", "in": "name"},
        {"!listed": [{}, []], "in": "subprocess.Popen", "!object": "object"},
        {"!listed": "load", "in": "torch.dtype"},
        {"!listed": ["numpy.random.seed", {}], "in": "generator"},
    ],
)
def test_a_foreign_checkpoint_names_no_code_of_other_modules(form: dict[str, Any]) -> None:
    storage = MemoryStorage()
    written: dict[str, Any] = {"loop": {"value": None}}
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize(written)
        written["loop"]["value"] = Form(form)
        manager.save(1, written)
    state = {"loop": Loop()}
    with CheckpointManager(storage) as manager, pytest.raises(StateError, match="has no"):
        manager.restore_or_initialize(state)
    assert state["loop"].value is None


class Counter:
    """A hook or a method's object, which counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(len(self.calls))


class Totals(dict):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__(sum=0)
        self.count = 0


def as_hook(net: Net) -> Any:
    counter = Counter()
    net.one.register_forward_hook(counter)
    return lambda: net.one(torch.ones(1, 2)), lambda: counter.calls


def as_bound_method(net: Net) -> Any:
    net.value = Counter().__call__
    return lambda: net.value(), lambda: net.value.__self__.calls


def as_partial(net: Net) -> Any:
    net.value = functools.partial(Counter.__call__, Counter())
    return lambda: net.value(), lambda: net.value.args[0].calls


def as_dict_with_attributes(net: Net) -> Any:
    net.value = Totals()

    def use() -> None:
        net.value["sum"] += 2
        net.value.count += 1

    return use, lambda: (dict(net.value), net.value.count)


def as_objects_in_an_array(net: Net) -> Any:
    net.value = np.array([1, "a", None, [1]], object)

    def use() -> None:
        net.value[0] += 1
        net.value[3].append(2)

    return use, lambda: net.value.tolist()


def as_seed_sequence(net: Net) -> Any:
    net.value = np.random.SeedSequence(3)
    return lambda: net.value.spawn(2), lambda: net.value.n_children_spawned


def as_keys(net: Net) -> Any:
    net.value = {}

    def use() -> None:
        net.value[net.two] = 1
        net.value[net.one] = net.value.get(net.one, 0) + 1

    names = {net.one: "one", net.two: "two"}
    return use, lambda: [(names[key], count) for key, count in net.value.items()]


def test_the_object_of_a_bound_method_of_a_loop_comes_back() -> None:
    storage, loop = MemoryStorage(), Loop()
    for number in range(2):
        loop = Loop()
        loop.value = Counter().__call__
        with CheckpointManager(storage) as manager:
            manager.restore_or_initialize({"loop": loop})
            if not number:
                loop.value()
                manager.save(1, {"loop": loop})
    assert loop.value.__self__.calls == [0]


@pytest.mark.parametrize("make", [iter, itertools.cycle, enumerate])
def test_an_iterator_with_a_place_is_refused_at_once(make: Callable[[Any], Any]) -> None:
    model = Net()
    model.value = {"data": make([1, 2])}
    refused = pytest.raises(UnsupportedLeafError, match=r"net/value/data: .* has a place that no")
    with CheckpointManager(MemoryStorage()) as manager, refused:
        manager.restore_or_initialize({"net": model})


def test_a_generator_that_has_begun_is_refused_and_no_other() -> None:
    model = Net()
    model.value = (number for number in range(2))
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize({"net": model})
        manager.save(1, {"net": model})
        next(model.value)
        with pytest.raises(UnsupportedLeafError, match=r"net/value: a builtins\.generator"):
            manager.save(2, {"net": model})
        list(model.value)
        manager.save(2, {"net": model})


def test_an_optimizer_that_keeps_the_parameters_of_a_replaced_layer_is_refused() -> None:
    model = Net()
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"net": model, "optimizer": descent}
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        model.two = torch.nn.Linear(2, 2)
        with pytest.raises(UnsupportedLeafError, match="optimizer/param_groups/0/params/2: "):
            manager.save(1, state)
        descent.param_groups[0]["params"][2:] = model.two.parameters()
        manager.save(1, state)


def as_attribute_of_a_parameter(net: Net) -> Any:
    def use() -> None:
        weight: Any = net.one.weight
        weight.org = weight.data + getattr(weight, "org", 0)

    return use, lambda: getattr(net.one.weight, "org", torch.zeros(1)).tolist()


def as_closure_of_a_hook(net: Net) -> Any:
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1

    net.one.register_forward_hook(hook)
    return lambda: net.one(torch.ones(1, 2)), lambda: count


def as_hidden_state(net: Net) -> Any:
    def use() -> None:
        net.value = net.one(torch.ones(1, 2) if net.value is None else net.value.detach())
        (net.value**2).sum().backward()

    return use, lambda: None if net.value is None else net.value.tolist()


def as_list_of_modules(net: Net) -> Any:
    net.value = [net.one]

    def use() -> None:
        net.value = [net.two, net.one]

    return use, lambda: [each is net.two for each in net.value]


class Teacher(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.calls, self.kept = 0, [torch.nn.BatchNorm1d(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.kept[0](self.layer(x))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        pass


def as_module_in_a_dict(net: Net) -> Any:
    teacher = Teacher()
    net.value = {"teachers": [teacher]}

    def use() -> None:
        net.value["teachers"][0](torch.rand(3, 2))
        teacher.kept[0].eval()
        teacher.layer.requires_grad_(False)

    def look() -> list[Any]:
        inner = teacher.kept[0]
        return [
            teacher.calls,
            inner.training,
            inner.state_dict(),
            teacher.layer.weight.requires_grad,
        ]

    return use, look


def as_bound_method_of_a_module(net: Net) -> Any:
    net.value = net.one.forward

    def use() -> None:
        net.value = net.two.forward

    return use, lambda: net.value.__self__ is net.two


def as_random_state(net: Net) -> Any:
    net.value = np.random.RandomState(3)
    return lambda: net.value.rand(), lambda: net.value.get_state()[2]


def _counter() -> Any:
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    return counted, lambda: count


def as_hook_of_a_tensor(net: Net) -> Any:
    hook, look = _counter()
    net.one.weight.register_hook(hook)
    return lambda: net.one(torch.ones(1, 2)).sum().backward(), look


def as_hook_after_accumulation(net: Net) -> Any:
    hook, look = _counter()
    net.one.weight.register_post_accumulate_grad_hook(hook)
    return lambda: net.one(torch.ones(1, 2)).sum().backward(), look


def as_function_with_a_closure(net: Net) -> Any:
    count, look = _counter()
    net.value = {"schedules": [count]}
    return count, look


def as_dict_with_attributes_by_key(net: Net) -> Any:
    net.value = Attributes(seen=1)

    def use() -> None:
        net.value.seen += 1

    return use, lambda: net.value.seen


def as_attribute_of_the_class(net: Net) -> Any:
    Scale.uses = []

    def use() -> None:
        Shift.uses.append(len(Scale.uses))

    return use, lambda: Scale.uses


def as_deleted_attribute(net: Net) -> Any:
    return lambda: vars(net.act).pop("by", None), lambda: hasattr(net.act, "by")


def as_sobol_sequence(net: Net) -> Any:
    net.value = torch.quasirandom.SobolEngine(2, scramble=True, seed=3)
    return lambda: net.value.draw(3), lambda: (net.value.num_generated, net.value.quasi.tolist())


def as_object_with_a_layer(net: Net) -> Any:
    net.value = SimpleNamespace(layer=net.one, criterion=torch.nn.MSELoss(), seen=[])
    return lambda: net.value.seen.append(torch.ones(2)), lambda: net.value.seen


def as_change_without_a_version(net: Net) -> Any:
    net.value = [torch.nn.Parameter(torch.zeros(5000)), torch.zeros(2)]

    def use() -> None:
        for average in net.value:
            average.data[1] += 3

    return use, lambda: [average[1].item() for average in net.value]


def as_large_array(net: Net) -> Any:
    net.value = np.zeros(9_000_000)  # as that of a replay buffer

    def use() -> None:
        net.value[-1] += 1

    return use, lambda: net.value[-1]


def as_masked_array(net: Net) -> Any:
    net.value = np.ma.zeros(3)
    return lambda: net.value.__setitem__(1, np.ma.masked), lambda: net.value.mask


def as_list_of_a_partial(net: Net) -> Any:
    net.value = functools.partial(max, [0])
    return lambda: net.value.args[0].append(4), lambda: net.value.args


def as_bit_generator(net: Net) -> Any:
    net.value = np.random.PCG64(3)
    return lambda: net.value.random_raw(), lambda: net.value.state


@pytest.mark.parametrize(
    "give",
    [
        as_object_with_a_layer,
        as_change_without_a_version,
        as_large_array,
        as_masked_array,
        as_list_of_a_partial,
        as_bit_generator,
        as_hook_of_a_tensor,
        as_hook_after_accumulation,
        as_function_with_a_closure,
        as_dict_with_attributes_by_key,
        as_attribute_of_the_class,
        as_deleted_attribute,
        as_sobol_sequence,
        as_hook,
        as_bound_method,
        as_partial,
        as_dict_with_attributes,
        as_objects_in_an_array,
        as_seed_sequence,
        as_keys,
        as_attribute_of_a_parameter,
        as_closure_of_a_hook,
        as_hidden_state,
        as_list_of_modules,
        as_module_in_a_dict,
        as_bound_method_of_a_module,
        as_random_state,
    ],
)
def test_what_a_hook_a_method_or_a_container_reaches_comes_back(give: Callable[[Net], Any]) -> None:
    storage, found, fresh = MemoryStorage(), [], ""
    for number in range(2):
        torch.manual_seed(0)
        model = Net()
        use, look = give(model)
        with CheckpointManager(storage) as manager:
            fresh = repr(look())
            assert manager.restore_or_initialize({"net": model}).step == number
            if not number:
                use()
                use()
                manager.save(1, {"net": model})
        found.append(repr(look()))
    assert found[0] == found[1] != fresh


def test_what_the_run_puts_onto_an_optimizer_of_pytorch_comes_back() -> None:
    storage, found = MemoryStorage(), []
    for number in range(2):
        adam: Any = torch.optim.Adam(Net().parameters())
        adam.norms = []
        with CheckpointManager(storage) as manager:
            assert manager.restore_or_initialize({"adam": adam}).step == number
            if not number:
                adam.norms.append(2.5)
                adam.limit = 1.5
                manager.save(1, {"adam": adam})
        found.append((adam.norms, adam.limit))
    assert found == [([2.5], 1.5)] * 2


def test_a_chain_of_objects_without_end_is_refused_by_a_sentence() -> None:
    model = Net()
    with CheckpointManager(MemoryStorage()) as manager:
        state = manager.restore_or_initialize({"net": model}).state
        for _ in range(2000):
            model.value = Meter(model.value)
        with pytest.raises(
            UnsupportedLeafError, match="nested deeper than Python's recursion limit"
        ):
            manager.save(1, state)


def nothing(*_: Any) -> None:
    pass


def hooked(state: dict[str, Any]) -> None:
    state["net"].one.register_forward_hook(nothing)


def hooked_tensor(state: dict[str, Any]) -> None:
    state["net"].one.weight.register_hook(lambda gradient: gradient)


def hooked_step(state: dict[str, Any]) -> None:
    state["optimizer"].register_step_post_hook(nothing)


def given_lambda(state: dict[str, Any]) -> None:
    state["net"].act.by = lambda value: value


def unhooked(state: dict[str, Any]) -> None:
    state["handle"][0].remove()


def other_class(state: dict[str, Any]) -> None:
    state["loop"].value = torch.nn.L1Loss()


def other_order(state: dict[str, Any]) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


def other_lambda(state: dict[str, Any]) -> None:
    state["schedule"].lr_lambdas[0] = lambda step: 0.5**step


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (hooked, "net/one: the run has added the hook "),
        (hooked_tensor, "net/one: the run has added the hook "),
        (hooked_step, "optimizer: the run has added the hook "),
        (given_lambda, "net/act: the run has added the function by ("),
        (unhooked, "net/two: the run has removed the hook "),
        (other_class, "loop/value: is a torch.nn.modules.loss.L1Loss, and was"),
        (other_order, "optimizer/param_groups/0/params/0: the run has given the parameters"),
        (other_lambda, "schedule/lr_lambdas/0: this was another function"),
    ],
)
def test_code_that_the_run_exchanges_is_refused(change: Callable[[Any], None], said: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model.two.register_forward_hook(lambda *_: None)
    loop = Loop()
    loop.value = torch.nn.MSELoss()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    state = {"net": model, "optimizer": optimizer, "loop": loop, "schedule": schedule}
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        model.act.register_forward_hook(nothing)  # before the first call of `save`
        manager.save(1, state)
        change({**state, "handle": [handle]})
        with pytest.raises(UnsupportedLeafError, match=f"^{re.escape(said)}"):
            manager.save(2, state)


def test_what_the_lambda_of_a_schedule_closes_over_comes_back() -> None:
    def make() -> tuple[dict[str, Any], dict[str, float]]:
        factor = {"by": 1.0}
        one = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        plain = torch.optim.lr_scheduler.LambdaLR(one, lambda _: factor["by"])
        inner = torch.optim.lr_scheduler.LambdaLR(one, lambda _: factor["by"] / 2)
        chained = torch.optim.lr_scheduler.ChainedScheduler([inner], one)
        return {"optimizer": one, "plain": plain, "chained": chained}, factor

    storage = MemoryStorage()
    state, factor = make()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize(state)
        factor["by"] = 0.25
        manager.save(1, state)
    state, factor = make()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize(state)
    assert factor == {"by": 0.25}


def test_what_a_hook_of_the_steps_closes_over_comes_back() -> None:
    storage, found = MemoryStorage(), []
    for number in range(2):
        weight = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        hook, look = _counter()
        optimizer.register_step_post_hook(hook)
        with CheckpointManager(storage) as manager:
            manager.restore_or_initialize({"weight": weight, "optimizer": optimizer})
            if not number:
                optimizer.step()
                manager.save(1, {"weight": weight, "optimizer": optimizer})
        found.append(look())
    assert found == [1, 1]


def test_a_learning_rate_that_is_a_tensor_stays_the_tensor_of_the_program() -> None:
    storage = MemoryStorage()
    for number in range(2):
        rate = torch.tensor(0.5)
        weight = torch.ones(1, requires_grad=True)
        groups = [{"params": [weight]}, {"params": [torch.ones(1, requires_grad=True)]}]
        optimizer = torch.optim.SGD(groups, lr=rate)
        state = {"weight": weight, "optimizer": optimizer}
        with CheckpointManager(storage) as manager:
            assert manager.restore_or_initialize(state).step == number
            assert rate.item() == 0.5 / (number + 1)
            rate.div_(2)
            manager.save(number + 1, state)
        assert [group["lr"] is rate for group in optimizer.param_groups] == [True, True]


def changed_places(state: dict[str, Any]) -> None:
    state["one"], state["two"] = state["two"], state["one"]


def keyed_by_addresses(state: dict[str, Any]) -> None:
    state["one"].value = {id(state["one"].one.weight): 1}


def keyed_by_addresses_in_an_object(state: dict[str, Any]) -> None:
    state["loop"].value = {id(state["one"].one.weight): 1}


def one_moment_for_all(state: dict[str, Any]) -> None:
    total = torch.zeros(1)
    for parameter in state["one"].parameters():
        state["optimizer"].state[parameter]["total"] = total


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_places, "optimizer: steps two/one.weight, and stepped one/one.weight"),
        (keyed_by_addresses, "one/value: has the `id` of a parameter"),
        (keyed_by_addresses_in_an_object, "loop/value: has the `id` of a parameter"),
        (one_moment_for_all, "optimizer and optimizer have a tensor of their state in common"),
    ],
)
def test_what_another_process_would_not_have_is_refused(
    change: Callable[[Any], None], said: str
) -> None:
    state: dict[str, Any] = {"one": Net(), "two": Net(), "loop": Loop(), "meter": Average()}
    state["optimizer"] = torch.optim.SGD(state["one"].parameters(), lr=0.1)
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize(state)
        manager.save(1, state)
        change(state)
        with pytest.raises(UnsupportedLeafError, match=f"^{re.escape(said)}"):
            manager.save(2, state)


@pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
@pytest.mark.parametrize("is_there", [True, False])
def test_an_array_in_several_attributes_is_one_after_a_restore(kind: Any, is_there: bool) -> None:
    def made() -> dict[str, Any]:
        state = {"one": Net(), "two": Net()}
        if is_there:
            state["one"].value = collections.deque([(0, kind(2))], maxlen=3)
            state["two"].value = {"seen": [kind(2), kind(2)]}
            state["two"].act.by = kind(2)
        return state

    state, storage = made(), MemoryStorage()
    with CheckpointManager(storage) as manager:
        manager.restore_or_initialize(state)
        manager.save(1, state)
        new, other = kind(2) + 1, kind(2) + 2
        state["one"].value = collections.deque([(0, other), (1, new)], maxlen=3)
        state["two"].value = {"seen": [new, new, other]}
        state["two"].act.by = new
        manager.save(2, state)
    state = made()
    present = state["two"].act.by
    with CheckpointManager(storage) as manager:
        assert manager.restore_or_initialize(state).step == 2
    new, other = state["two"].act.by, state["one"].value[0][1]
    assert (new is present) == is_there  # restored in place, because others may have it
    assert same([new, other], [kind(2) + 1, kind(2) + 2])
    assert state["one"].value[1][1] is new
    assert [*map(id, state["two"].value["seen"])] == [id(new), id(new), id(other)]


def test_models_and_optimizers_that_change_places_together_are_kept() -> None:
    nets = [Net(), Net()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with CheckpointManager(MemoryStorage()) as manager:
        manager.restore_or_initialize({"nets": nets, "optimizers": optimizers})
        manager.save(1, {"nets": nets, "optimizers": optimizers})
        manager.save(2, {"nets": nets[::-1], "optimizers": optimizers[::-1]})


def test_a_function_of_a_loop_keeps_what_it_counts() -> None:
    storage, found = MemoryStorage(), []
    for number in range(2):
        loop = Loop()
        loop.value, look = _counter()
        with CheckpointManager(storage) as manager:
            manager.restore_or_initialize({"loop": loop})
            if not number:
                loop.value()
                manager.save(1, {"loop": loop})
        found.append(look())
    assert found == [1, 1]


@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("inside", [torch.ones(2), 1.5, Meter(1)])
@pytest.mark.parametrize("is_local", [False, True])
def test_named_tuples_that_the_run_adds_come_back_or_are_refused(
    is_local: bool, inside: Any, begun: int
) -> None:
    """Those of a class that a function has made, which no restore finds, were dropped."""
    kind: Any = collections.namedtuple("Local", "x y") if is_local else Point
    storage, found = MemoryStorage(), []
    for number in range(2):
        net = Net()
        net.value = Meter(collections.deque(kind(np.zeros(1), -1) for _ in range(begun)))
        with CheckpointManager(storage) as manager:
            start = manager.restore_or_initialize({"net": net}).step
            if not number:
                net.value.total.append(kind(inside, 1))
                if is_local:
                    with pytest.raises(
                        UnsupportedLeafError, match=r"net/value/total: has a .*Local"
                    ):
                        manager.save(1, {"net": net})
                    return
                manager.save(1, {"net": net})
            else:
                assert start == 1
        found.append([flat(part) for part in net.value.total])
    assert same(found[0], found[1])
