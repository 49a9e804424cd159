"""The PyTorch engine: buffers and random numbers per logical replica, gradients as values."""

from __future__ import annotations

import contextlib
import copy
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from perdure.data import ArrayDataset
from perdure.distribute.torch import state_view
from perdure.distribute.torch.engine import keep_memory
from perdure.errors import StateError, TopologyError
from perdure.torch import MirroredStrategy, OneDeviceStrategy, apply_gradients, gradients

V = 3


class Counting(nn.Module):
    """A module with buffers of every kind: changed, constant, integer and bool."""

    scale: nn.Parameter
    table: torch.Tensor
    seen: torch.Tensor
    mean: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.tensor([0.1, 0.7]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)  # another tensor, not a write
        return x * self.scale * self.table


def dataset() -> ArrayDataset:
    return ArrayDataset(np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32), 2 * V)


def grad(state: Any, batch: Any, key: Any) -> Any:
    x, weight = batch
    module = state_view.instances(state, torch.nn.Module)[0][1]
    loss = (module(x).sum(1) * weight).sum()
    return {"grads": gradients(loss, module), "weight": weight.sum()}


def update(state: Any, total: Any) -> Any:
    apply_gradients(
        state_view.instances(state, torch.nn.Module)[0][1], total["grads"], 1 / total["weight"]
    )
    return state, {}


def test_buffers_are_means_over_logical_replicas() -> None:
    strategy, module = MirroredStrategy(replicas=V), Counting()
    train_step = strategy.step(grad, update)
    expected = torch.zeros(2)
    for step in range(2):
        batch = strategy.batch(dataset(), step)
        parts = [0.5 * expected + 0.5 * torch.from_numpy(x).mean(0) for x, _ in batch.values]
        expected = ((parts[0] + parts[1]) + parts[2]) / V
        train_step({"model": module}, batch)
    assert torch.equal(module.mean, expected)
    assert module.seen.item() == 2
    # Three times 0.1, divided by 3, is not 0.1 in float32, so unchanged buffers are not averaged.
    assert torch.equal(module.table, torch.tensor([0.1, 0.7]))
    assert module.mask.tolist() == [True, False]


@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_an_update_that_raises_leaves_the_buffers_as_they_were(error: type[BaseException]) -> None:
    strategy, module, errors = MirroredStrategy(replicas=V), Counting(), [error]

    def raises_once(state: Any, total: Any) -> Any:
        assert module.seen.item() == 1
        if errors:
            raise errors.pop()
        return update(state, total)

    step, batch = strategy.step(grad, raises_once), strategy.batch(dataset(), 0)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error):
        step({"model": module}, batch)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    step({"model": module}, batch)
    assert module.seen.item() == 1


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (torch.zeros((), dtype=torch.int64), torch.ones(()), "expected int64[], found float32[]"),
        (torch.zeros(1), torch.ones(2), "expected float32[1], found float32[2] after grad"),
        (torch.zeros(2), torch.ones(1), "expected float32[2], found float32[1] after grad"),
        (torch.zeros(2), None, "expected float32[2], found None after grad"),
        (None, torch.ones(2), "grad filled this buffer"),
        (None, torch.ones(2, dtype=torch.bool), ""),  # a mask is no contribution
        (torch.zeros(2), torch.ones(2, dtype=torch.bfloat16), ""),  # as autocast makes
    ],
)
@pytest.mark.parametrize("replicas", [1, V])
def test_a_buffer_keeps_its_dtype_and_shape(
    replicas: int, before: Any, after: Any, says: str
) -> None:
    def sets(state: Any, batch: Any, key: Any) -> Any:
        state["model"].cache = after
        return grad(state, batch, key)

    strategy = MirroredStrategy(replicas=replicas)
    module: Any = Counting()
    module.register_buffer("cache", None if before is None else before.clone())
    step, batch = strategy.step(sets, update), strategy.batch(dataset(), 0)
    if says:
        with pytest.raises(StateError) as error:
            step({"model": module}, batch)
        assert str(error.value).startswith(f"model.cache: {says}")
        assert before is None or torch.equal(module.cache, before)
    else:
        step({"model": module}, batch)
        assert module.cache.dtype == (after if before is None else before).dtype
        assert torch.equal(module.cache.to(after.dtype), after)


def test_modules_are_found_anywhere_in_a_state() -> None:
    @dataclass
    class Data:
        net: nn.Module
        step: int = 0

    net, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    state = {"a": [Data(net), optimizer], "b": (SimpleNamespace(m=other, again=net), "text")}
    modules = state_view.instances(state, torch.nn.Module)
    assert [(path, module) for path, module in modules] == [("a.0.net", net), ("b.0.m", other)]


def test_grad_may_change_only_buffers_that_have_a_mean() -> None:
    def writes_parameter(state: Any, batch: Any, key: Any) -> Any:
        with torch.no_grad():
            state["model"].scale.add_(1)
        return {"w": batch[1].sum()}

    def sets_parameter(state: Any, batch: Any, key: Any) -> Any:
        state["model"].scale.data = state["model"].scale.data + 1
        return {"w": batch[1].sum()}

    def writes_tensor(state: Any, batch: Any, key: Any) -> Any:
        state["ema"]["x"].mul_(0.5).add_(batch[0].mean(0))
        return {"w": batch[1].sum()}

    def writes_mask(state: Any, batch: Any, key: Any) -> Any:
        state["model"].mask.fill_(True)
        return {"w": batch[1].sum()}

    strategy, module = MirroredStrategy(replicas=V), Counting()
    for fn, says in [
        (writes_parameter, "model.scale: grad changed this parameter"),
        (sets_parameter, "model.scale: grad changed this parameter"),
        (writes_tensor, "ema.x: grad changed this tensor of the state"),
        (
            writes_mask,
            "model.mask: grad changed this buffer of bool, which has no mean: change it in",
        ),
    ]:
        state = {"model": module, "ema": {"x": torch.zeros(2)}}
        with pytest.raises(StateError) as error:
            strategy.step(fn, update)(state, strategy.batch(dataset(), 0))
        assert says in str(error.value)
    assert module.mask.tolist() == [True, False]


def test_what_changes_between_steps_is_isolated_too() -> None:
    """The engine looks up parameters and buffers once, and again when a module holds others."""

    def writes(state: Any, batch: Any, key: Any) -> Any:
        with torch.no_grad():
            next(state["model"].parameters()).add_(1)
        return {"w": batch[1].sum()}

    def another_parameter(state: Any) -> None:
        state["model"].scale = nn.Parameter(torch.zeros(2))

    def another_module(state: Any) -> None:
        state["model"] = Counting()

    def another_buffer(state: Any) -> None:
        state["model"].mean = torch.full((2,), 7.0)

    def another_place(state: Any) -> None:
        state["model"] = nn.Sequential(state["model"])

    for change in (another_parameter, another_module, another_buffer, another_place):
        strategy, state = MirroredStrategy(replicas=V), {"model": Counting()}
        strategy.step(grad, update)(state, strategy.batch(dataset(), 0))
        change(state)
        fresh = copy.deepcopy(state)
        for engine, its_state in ((strategy, state), (MirroredStrategy(replicas=V), fresh)):
            engine.step(grad, update)(its_state, strategy.batch(dataset(), 1))
        ours, expected = (value["model"] for value in (state, fresh))
        for name, tensor in expected.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), (change.__name__, name)
        for one, other in zip(ours.parameters(), expected.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
        with pytest.raises(StateError, match="scale: grad changed this parameter"):
            strategy.step(writes, update)(state, strategy.batch(dataset(), 2))


def test_a_view_of_a_state_is_used_until_something_is_replaced() -> None:
    """Numbers of the state may change; what may have a module or a tensor in it may not."""

    @dataclass
    class Data:
        net: nn.Module

    def made() -> tuple[dict[str, Any], SimpleNamespace, nn.Linear]:
        inner, net = SimpleNamespace(x=torch.ones(1), note="a"), nn.Linear(1, 1)
        nets = [Data(nn.Linear(1, 1)), [nn.Linear(1, 1)]]
        sgd = torch.optim.SGD(net.parameters())
        return {"step": 0, "net": net, "inner": inner, "nets": nets, "sgd": sgd}, inner, net

    def moves(state: Any) -> None:
        state["nets"] = [state["nets"][0], *state["nets"][1]]

    def renames(state: Any) -> None:
        state["other"] = state.pop("net")

    state, inner, net = made()
    view = state_view.StateView(state)
    state["step"], inner.note = 10**9, "b"
    assert view.is_of(state)
    assert view.is_current()
    assert not view.is_of(dict(state))
    for change in (
        moves,
        renames,
        lambda state: state.update(new=nn.Linear(1, 1)),
        lambda state: state.update(step=torch.ones(1)),
        lambda state: state.update(sgd=torch.optim.SGD(state["net"].parameters())),
        lambda state: setattr(state["inner"], "x", nn.Linear(1, 1)),
        lambda state: setattr(state["nets"][0], "net", nn.Linear(1, 1)),
        lambda state: state["nets"][1].append(nn.Linear(1, 1)),
    ):
        state, _, _ = made()
        view = state_view.StateView(state)
        change(state)
        assert not view.is_of(state)
    for change in (
        lambda: net.register_buffer("new", torch.ones(1)),
        lambda: setattr(net, "bias", nn.Parameter(torch.ones(1))),
        lambda: net._parameters.update(other=net._parameters.pop("bias")),
        lambda: setattr(net, "_parameters", dict(net._parameters)),
    ):
        view = state_view.StateView([net])
        change()
        assert not view.is_current()


def test_gradients_in_a_step_are_those_of_the_parameters_at_this_moment() -> None:
    """The names are found once; a replaced, frozen or hidden parameter counts at once all the same."""

    class Hiding(nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if n not in hidden)

    hidden: set[str] = set()
    names: list[list[str]] = []

    def grad(state: Any, batch: Any, key: Any) -> Any:
        loss = (state["model"](batch[0]).sum(1) * batch[1]).sum()
        changes.pop()(state["model"]) if changes else None
        found = gradients(loss, state["model"], unused="zeros")
        names.append(list(found))
        return {"grads": found}

    def update(state: Any, total: Any) -> Any:
        apply_gradients(state["model"], total["grads"])
        return state, sorted(n for n, p in state["model"].named_parameters() if p.grad is not None)

    def replaced(model: Any) -> None:
        model.weight = nn.Parameter(torch.zeros(2, 2))

    for kind, change, expected in (
        (nn.Linear, replaced, ["weight", "bias"]),
        (nn.Linear, lambda model: model.bias.requires_grad_(False), ["weight"]),
        (nn.Linear, lambda model: model.register_parameter("bias", None), ["weight"]),
        (Hiding, lambda _model: hidden.add("weight"), ["bias"]),
    ):
        model = kind(2, 2)
        changes: list[Any] = []
        strategy = MirroredStrategy(replicas=1)
        step, state = strategy.step(grad, update), {"model": model}
        assert step(state, strategy.batch(dataset(), 0))[1] == ["bias", "weight"]
        changes.append(change)
        _, seen = step(state, strategy.batch(dataset(), 1))
        assert names[-2:] == [["weight", "bias"], expected]
        assert seen == sorted(expected)
        if change is replaced:
            assert model.weight.grad is not None
            assert not model.weight.grad.any()


def test_backward_in_grad_gives_the_gradients_of_one_replica() -> None:
    def with_backward(state: Any, batch: Any, key: Any) -> Any:
        (state["model"](batch[0]).sum(1) * batch[1]).sum().backward()
        gradients = {n: p.grad for n, p in state["model"].named_parameters()}
        return {"grads": gradients, "weight": batch[1].sum()}

    by_function = []
    for fn in (grad, with_backward):
        strategy, module = MirroredStrategy(replicas=V), Counting()
        train_step = strategy.step(fn, update)
        for step in range(2):  # the second one begins with the `.grad` of the first
            train_step({"model": module}, strategy.batch(dataset(), step))
        assert module.scale.grad is not None
        by_function.append(module.scale.grad.tolist())
    assert by_function[0] == by_function[1]


def test_random_numbers_depend_on_seed_step_and_replica() -> None:
    def draws(seed: int) -> list[Any]:
        seen: list[Any] = []

        def grad(state: Any, batch: Any, key: Any) -> Any:
            seen.append((torch.rand(2).tolist(), torch.rand(2, generator=key).tolist()))
            return {"w": batch[1].sum()}

        strategy = MirroredStrategy(replicas=V, seed=seed)
        train_step = strategy.step(grad, lambda *_: (torch.rand(2), {}))
        for step in range(2):
            seen.append(train_step(None, strategy.batch(dataset(), step))[0].tolist())
        return seen

    torch.manual_seed(1)
    first = torch.rand(1).item()
    torch.manual_seed(1)
    one = draws(0)
    assert torch.rand(1).item() == first, "the user's own generator is as it was"
    assert one == draws(0)
    assert one != draws(1)
    assert len({str(draw) for draw in one}) == len(one)
    # `key` and the global generator have the same seed.
    assert all(a == b for a, b in (pair for pair in one if isinstance(pair, tuple)))


def test_what_the_user_draws_between_steps_is_neither_undone_nor_repeated() -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        drawn = torch.rand(())
        if state == "fails":
            raise ValueError("a replica")
        return {"w": drawn}

    for devices in (1, 2):
        strategy = MirroredStrategy(devices, replicas=V)
        train_step = strategy.step(grad, lambda state, _: (state, torch.rand(())))
        torch.manual_seed(1)
        expected = torch.rand(4).tolist()
        torch.manual_seed(1)
        drawn = []
        for step, state in enumerate(("works", "works", "fails", "works")):
            drawn.append(torch.rand(()).item())
            with pytest.raises(ValueError) if state == "fails" else contextlib.nullcontext():
                train_step(state, strategy.batch(dataset(), step))
        assert drawn == expected


def test_contributions_have_no_graph_and_are_no_parameters() -> None:
    """With one replica nothing is added, so that `update` gets what `grad` returned."""

    def grad(state: Any, batch: Any, key: Any) -> Any:
        scale = state["model"].scale
        return {"parameter": scale, "graph": 2 * scale, "frozen": nn.Parameter(scale, False)}

    def update(state: Any, total: Any) -> Any:
        assert not any(leaf.requires_grad or leaf.grad_fn for leaf in total.values())
        assert not any(isinstance(leaf, nn.Parameter) for leaf in total.values())
        return state, total

    strategy, module = MirroredStrategy(replicas=1), Counting()
    _, total = strategy.step(grad, update)({"model": module}, strategy.batch(dataset(), 0))
    assert torch.equal(total["parameter"], module.scale)


def test_a_tensor_at_two_paths_is_added_at_each() -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        weight = batch[1].sum()
        return {"a": (weight, weight), "b": weight}

    strategy = MirroredStrategy(replicas=V)
    step = strategy.step(grad, lambda state, total: (state, total))
    _, total = step(None, strategy.batch(dataset(), 0))
    assert [total["a"][0].item(), total["a"][1].item(), total["b"].item()] == [6, 6, 6]


def test_unused_parameters_are_refused_unless_zeros_are_asked_for() -> None:
    module = nn.ModuleDict({"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1, bias=False)})
    loss = module["used"](torch.ones(1, 1)).sum()
    with pytest.raises(StateError) as error:
        gradients(loss, module)
    assert "the loss does not depend on unused.weight" in str(error.value)
    loss = module["used"](torch.ones(1, 1)).sum()
    assert gradients(loss, module, unused="zeros")["unused.weight"].tolist() == [[0.0]]
    module["unused"].requires_grad_(False)
    loss = module["used"](torch.ones(1, 1)).sum()
    assert sorted(gradients(loss, module)) == ["used.bias", "used.weight"]
    with pytest.raises(StateError) as error:
        apply_gradients(module, {"other": torch.ones(1)})
    assert "found other as well" in str(error.value)


def test_invalid_functions_and_devices_are_refused() -> None:
    strategy = OneDeviceStrategy(replicas=V)
    batch = strategy.batch(dataset(), 0)
    with pytest.raises(StateError) as error:
        strategy.step(lambda *_: {"loss": 1.5}, update)(None, batch)
    assert "loss: contributions must be tensors, found float" in str(error.value)
    with pytest.raises(StateError) as error:
        strategy.step(lambda _s, b, _k: b[1].sum(), lambda s, _: s)({}, batch)
    assert "must return (state, logs), got dict" in str(error.value)
    for devices in ([], ["cuda:0", "cuda:1"], ["cpu", "cuda:0"]):
        with pytest.raises(TopologyError) as error:
            MirroredStrategy(devices)
        assert "one process per accelerator" in str(error.value)
    for wrong in cast("list[dict[str, Any]]", [{"threads": 0}, {"devices": 0}]):
        with pytest.raises(TopologyError):
            MirroredStrategy(**wrong)


def test_all_leaves_are_added_at_once_with_the_bits_of_one_after_the_other() -> None:
    torch.manual_seed(0)
    pair = []
    for _ in range(2):
        values = [torch.randn(33) * 10.0**n for n in (-40, -5, 0, 38)]
        values.append(torch.tensor([0.0, -0.0, float("nan"), float("inf")]))
        leaves = [v.to(kind) for v in values for kind in (torch.float32, torch.bfloat16)]
        leaves += [values[2].to(kind) for kind in (torch.float64, torch.float16, torch.complex64)]
        pair.append([*leaves, torch.arange(5), torch.randn(4, 6).t()])
    one, other = pair
    for total, left, right in zip(OneDeviceStrategy().engine.add(one, other), *pair, strict=True):
        expected = left + right
        assert total.stride() == expected.stride()
        bits = [value.contiguous().view(torch.uint8) for value in (total, expected)]
        assert torch.equal(*bits), total.dtype


def test_gradients_of_the_step_before_are_freed_before_new_ones_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.Linear(2, 2)
    grads = {name: torch.ones_like(p) for name, p in module.named_parameters()}
    apply_gradients(module, grads)
    old = [weakref.ref(p.grad) for p in module.parameters()]
    alive = []
    multiply = getattr(torch, "_foreach_mul")  # noqa: B009

    def watched(*args: Any) -> Any:
        alive.extend(reference() is not None for reference in old)
        return multiply(*args)

    monkeypatch.setattr(torch, "_foreach_mul", watched)
    apply_gradients(module, grads, 0.5)
    assert alive == [False, False]
    assert [p.grad.mean().item() for p in module.parameters()] == [0.5, 0.5]  # pyright: ignore[reportOptionalMemberAccess]


def test_many_steps_are_the_steps_one_by_one() -> None:
    def logged(state: Any, total: Any) -> Any:
        return update(state, total)[0], {"weight": total["weight"], "one": total["weight"] * 0 + 1}

    results = []
    for many in (False, True):
        strategy, state = MirroredStrategy(replicas=V), {"model": Counting()}
        train_step = strategy.step(grad, logged)
        batches = [strategy.batch(dataset(), step) for step in range(3)]
        if many:
            state, logs = train_step.many(state, batches)
            assert logs["weight"].tolist() == [6.0, 6.0, 6.0]
        else:
            for batch in batches:
                state, _ = train_step(state, batch)
        results.append(state["model"].scale.tolist())
    assert results[0] == results[1]
    with pytest.raises(TopologyError, match="at least one batch"):
        train_step.many(state, [])


def test_the_recipe_records_settings_that_decide_bits() -> None:
    recipe = MirroredStrategy(replicas=V, threads=2).recipe()
    assert recipe["threads"] == 2
    assert recipe["deterministic"] is True
    assert MirroredStrategy(replicas=V).recipe()["threads"] == 1


def test_malloc_settings_of_the_environment_are_kept() -> None:
    for name, value in [
        ("MALLOC_TRIM_THRESHOLD_", "1"),
        ("GLIBC_TUNABLES", "glibc.malloc.perturb=1"),
    ]:
        assert not keep_memory({name: value})


def test_what_grad_returns_and_what_it_does_to_its_batch_is_checked() -> None:
    module = torch.nn.Embedding(4, 2, sparse=True)
    data = ArrayDataset({"x": np.arange(8, dtype=np.float32)}, batch_size=4)

    def changes_its_batch(state: Any, batch: Any, key: Any) -> Any:
        return {"g": batch["x"].div_(255).sum()}

    def sparse(state: Any, batch: Any, key: Any) -> Any:
        rows = module(batch["x"].long() % 4)
        return {"g": torch.autograd.grad(rows.sum(), list(module.parameters()))}

    for grad, message in (
        (changes_its_batch, r"^x: grad changed this tensor of its batch in place"),
        (
            sparse,
            r"^g/0: contributions must be dense tensors, found one of layout torch.sparse_coo",
        ),
        (lambda *_: {}, "returned no contributions: expected a tree of tensors"),
    ):
        for devices in (1, 2):
            strategy = MirroredStrategy(devices, 2)
            train_step = strategy.step(grad, lambda state, total: (state, total))
            with pytest.raises(StateError, match=message):
                train_step({"m": module}, strategy.batch(data, 0))
