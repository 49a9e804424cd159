"""An optimizer inside `strategy.run` steps once, with the sum of all gradients from the tree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import group
import numpy as np
import optimizer_worker
import pytest
import torch
from torch.nn.functional import cross_entropy

from perdure.data import ArrayDataset
from perdure.distribute import PerReplica, get_replica_context
from perdure.distribute.torch.eager import TorchEagerRun
from perdure.errors import StateError
from perdure.torch import MirroredStrategy, compute_average_loss

V, BATCH, STEPS = 4, 16, 3


def dataset() -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 4)).astype(np.float32)
    return ArrayDataset({"x": x, "y": rng.integers(0, 3, 48)}, BATCH)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def loss_of(net: Any, batch: Any) -> Any:
    losses = cross_entropy(net(batch["x"]), batch["y"], reduction="none")
    return compute_average_loss(losses, global_batch_size=BATCH)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
}


def bits(tensors: Any) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def trained(make: Any, devices: int, replicas: int = V, zero: str = "first") -> list[bytes]:
    """The train step of TensorFlow's tutorials, as written there."""
    net, strategy = model(), MirroredStrategy(devices, replicas)
    optimizer = make(net.parameters())

    def train_step(batch: Any) -> Any:
        if zero == "first":
            optimizer.zero_grad()
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        if zero == "last":
            optimizer.zero_grad()
        if zero == "in place":
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    for number in range(STEPS):
        strategy.run(train_step, (strategy.batch(dataset(), number),))
    return bits(net.parameters())


def expected(make: Any, replicas: int = V) -> list[bytes]:
    """The gradients of the replicas by hand, added in the tree, and one step."""
    net, strategy = model(), MirroredStrategy(1, replicas)
    optimizer = make(net.parameters())
    for number in range(STEPS):
        batch = strategy.batch(dataset(), number)
        parts = []
        for share in batch.values:
            rows = {name: torch.from_numpy(array) for name, array in share.items()}
            loss = cross_entropy(net(rows["x"]), rows["y"], reduction="none").sum() / BATCH
            parts.append(dict(enumerate(torch.autograd.grad(loss, list(net.parameters())))))
        total = strategy.reduce("sum", PerReplica(tuple(parts), batch.replicas))
        for parameter, grad in zip(net.parameters(), total.values(), strict=True):
            parameter.grad = grad
        optimizer.step()
    return bits(net.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_tutorials_train_step_on_any_devices(name: str) -> None:
    make = OPTIMIZERS[name]
    reference = expected(make)
    for devices in (1, 2, 3, 4):
        assert trained(make, devices) == reference
    for zero in ("last", "in place"):
        assert trained(make, 2, zero=zero) == reference


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_replica_equals_the_loop_without_a_strategy(name: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    batches = MirroredStrategy(1, 1)
    for number in range(STEPS):
        (share,) = batches.batch(dataset(), number).values
        optimizer.zero_grad()
        rows = {key: torch.from_numpy(array) for key, array in share.items()}
        loss_of(net, rows).backward()
        optimizer.step()
    assert trained(OPTIMIZERS[name], 1, 1) == bits(net.parameters())
    four = [np.frombuffer(b, np.float32) for b in trained(OPTIMIZERS[name], 1)]
    one = [np.frombuffer(b, np.float32) for b in bits(net.parameters())]
    # Other additions of the same numbers: far closer than one step of the optimizer.
    assert max(np.abs(a - b).max() for a, b in zip(four, one, strict=True)) < 1e-5


def test_two_optimizers_on_one_process_and_two() -> None:
    alone = [optimizer_worker.with_torch(MirroredStrategy(d, V)) for d in (1, 2, 4)]
    pair = group.results("optimizer_worker.py", 2, "--engine", "torch", forked="torch")
    assert [*alone, *pair] == [alone[0]] * 5
    assert optimizer_worker.with_torch(MirroredStrategy(1, 1)) != alone[0]


@pytest.mark.parametrize("engine", ["keras-torch", "keras-jax"])
def test_an_optimizer_of_keras(engine: str) -> None:
    (alone,) = group.results(
        "optimizer_worker.py",
        1,
        *("--engine", engine),
        env={"JAX_NUM_CPU_DEVICES": "4"},
        forked=engine,
    )
    assert len({alone[devices]["weights"] for devices in ("1", "2", "4")}) == 1
    assert len({alone[devices]["metrics"] for devices in ("1", "2", "4")}) == 1
    assert alone["1"]["metrics"] != alone["one replica"]["metrics"]  # another order of additions
    assert {found["rows"] for found in alone.values()} == {
        optimizer_worker.BATCH * optimizer_worker.STEPS
    }
    assert alone["1"]["iterations"] == optimizer_worker.STEPS
    assert alone["one replica"]["iterations"] == optimizer_worker.STEPS
    assert "assigns to this variable of Keras" in alone["1"]["refused"]
    assert "perdure.keras.Stateless" in alone["1"]["refused"]


@pytest.mark.parametrize("devices", [1, 3])
def test_gradients_accumulate_over_runs_until_a_step(devices: int) -> None:
    net, strategy = model(), MirroredStrategy(devices, V)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def accumulate(batch: Any, *, last: bool) -> None:
        loss_of(net, batch).backward()
        if last:
            optimizer.step()

    before = bits(net.parameters())
    strategy.run(accumulate, (strategy.batch(dataset(), 0),), {"last": False})
    assert bits(net.parameters()) == before
    first = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    strategy.run(accumulate, (strategy.batch(dataset(), 1),), {"last": True})

    # By hand: the gradients from before count once, as part of replica 0.
    again, parts = model(), []
    for replica, share in enumerate(strategy.batch(dataset(), 1).values):
        rows = {name: torch.from_numpy(array) for name, array in share.items()}
        for parameter, grad in zip(again.parameters(), first, strict=True):
            parameter.grad = None if replica else grad.clone()
        (cross_entropy(again(rows["x"]), rows["y"], reduction="none").sum() / BATCH).backward()
        parts.append(dict(enumerate([p.grad for p in again.parameters()])))
    total = strategy.reduce("sum", PerReplica(tuple(parts), strategy.local_replicas))
    for parameter, grad in zip(again.parameters(), total.values(), strict=True):
        parameter.grad = grad
    torch.optim.SGD(again.parameters(), 0.1).step()
    assert bits(net.parameters()) == bits(again.parameters())


def test_left_gradients_in_a_group_are_named_alike_or_refused_in_another_order_of_use() -> None:
    """The sums that two processes ask for, which use their parameters in different orders."""

    def asked(layers: list[Any]) -> dict[str, list[float]]:
        def asks(values: tuple[Any, ...]) -> Any:
            sums.update({name: grad.tolist() for name, grad in values[0]["gradients"].items()})
            return values[0]

        sums: dict[str, list[float]] = {}
        run = TorchEagerRun(torch.device("cpu"), lambda *_: None, asks, in_group=True)
        with run.replica(0, ()):
            for layer in layers:
                run.before_backward(0, [*layer.parameters()])
                for parameter in layer.parameters():
                    parameter.grad = parameter.detach() * 2
        run.finish()
        return sums

    for zeros, refused in ((False, False), (True, True)):
        layers = [torch.nn.Linear(2, 1) for _ in range(3)]
        for layer in layers:
            torch.nn.init.zeros_(layer.bias) if zeros else None
        one = asked(layers)
        assert len(one) == 6
        for layer in layers:
            layer.zero_grad()
        other = asked([*reversed(layers)])
        assert (one != other) == (one.keys() != other.keys()) == refused


def test_replicas_that_do_not_step_alike_are_refused() -> None:
    net, strategy = model(), MirroredStrategy(2, V)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def number() -> int:
        context = get_replica_context()
        assert context is not None
        return context.replica_id_in_sync_group

    def one_without(batch: Any) -> None:
        loss_of(net, batch).backward()
        if number() != 2:
            optimizer.step()

    def one_parameter(batch: Any) -> None:
        loss = loss_of(net, batch)
        if number() == 3:
            loss = next(net.parameters()).sum()
        loss.backward()
        optimizer.step()

    before = bits(net.parameters())
    for fn, says in [
        (one_without, "replica 2 reached the end"),
        (one_parameter, "replica 3 reached SGD.step() of optimizer 0 with 1 gradients"),
    ]:
        with pytest.raises(StateError) as error:
            strategy.run(fn, (strategy.batch(dataset(), 0),))
        assert says in str(error.value)
        assert bits(net.parameters()) == before
        assert all(p.grad is None for p in net.parameters()), "no gradient of one replica stays"
    # Afterwards a step works again, and optimizers outside replicas are unchanged.
    loss_of(net, {"x": torch.ones(2, 4), "y": torch.tensor([0, 1])}).backward()
    optimizer.step()
    assert bits(net.parameters()) != before


EMA = torch.zeros(8, 4)


def by_data(net: Any, batch: Any) -> None:
    loss_of(net, batch).backward()
    for parameter in net.parameters():
        parameter.data -= 0.1 * parameter.grad


def by_copy(net: Any, batch: Any) -> None:
    with torch.no_grad():
        net[0].weight.copy_(torch.ones(8, 4))


def by_new_data(net: Any, batch: Any) -> None:
    net[0].weight.data = net[0].weight.data - 1.0


def by_gradient(net: Any, batch: Any) -> None:
    net[0].weight.grad.copy_(torch.ones(8, 4))


def average(net: Any, batch: Any) -> None:
    with torch.no_grad():
        EMA.mul_(0.9).add_(net[0].weight, alpha=0.1)


def count(net: Any, batch: Any) -> None:
    EMA[0] += batch["x"].sum()


def statistics(net: Any, batch: Any) -> None:
    torch.nn.functional.batch_norm(batch["x"], EMA[0], EMA[1], training=True)


def closure(net: Any, batch: Any) -> None:
    torch.optim.LBFGS(net.parameters()).step(lambda: loss_of(net, batch))


def schedule(net: Any, batch: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer).step(1.0)


def scaler(net: Any, batch: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scale = torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]
    scale.scale(loss_of(net, batch)).backward()
    scale.step(optimizer)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (by_data, "float32[8, 4], in place (sub_)"),
        (by_copy, "float32[8, 4], in place (copy_)"),
        (by_new_data, "float32[8, 4], in place (.data = ...)"),
        (by_gradient, "float32[8, 4], in place (copy_)"),
        (average, "float32[8, 4], in place (mul_)"),
        (count, "in place (add_)"),
        (statistics, "running_mean of a batch normalization"),
        (closure, "LBFGS.step(closure) in a replica"),
        (schedule, "ReduceLROnPlateau.step() in a replica"),
        (scaler, "GradScaler.step() in a replica"),
    ],
)
def test_other_changes_of_shared_state_in_a_replica_raise_at_once(fn: Any, says: str) -> None:
    net, strategy = model(), MirroredStrategy(1, V)
    net[0].weight.grad = torch.zeros(8, 4)
    before, ema = bits(net.parameters()), EMA.clone()
    with pytest.raises(StateError) as error:
        strategy.run(fn, (net, strategy.batch(dataset(), 0)))
    assert says in str(error.value)
    assert "strategy.step" in str(error.value) or "after strategy.run" in str(error.value)
    assert bits(net.parameters()) == before
    assert torch.equal(EMA, ema)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_that_a_replica_sets_itself_are_added(devices: int, inside: bool) -> None:
    """`.grad = ...`, as after `torch.autograd.grad` or `torch.func.grad`: their sum counts."""
    net, strategy = model(), MirroredStrategy(devices, V)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)

    def train_step(batch: Any) -> None:
        grads = torch.autograd.grad(loss_of(net, batch), list(net.parameters()))
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            parameter.grad = grad
        if inside:
            optimizer.step()

    for number in range(STEPS):
        strategy.run(train_step, (strategy.batch(dataset(), number),))
        if not inside:
            optimizer.step()
    assert bits(net.parameters()) == expected(OPTIMIZERS["SGD"])


def test_adding_to_a_gradient_from_before_the_run_is_refused() -> None:
    net, strategy = model(), MirroredStrategy(1, V)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    weight: Any = net[0].weight
    weight.grad = torch.ones(8, 4)

    def add(*, clear: bool) -> None:
        if clear:
            optimizer.zero_grad()
        old = weight.grad
        weight.grad = torch.ones(8, 4) if old is None else old + 1

    with pytest.raises(StateError, match="before it ran"):
        strategy.run(add, kwargs={"clear": False})
    strategy.run(add, kwargs={"clear": True})
    assert torch.equal(weight.grad, torch.full((8, 4), float(V)))


def test_settings_of_an_optimizer_must_agree_in_all_replicas() -> None:
    net, strategy = model(), MirroredStrategy(1, V)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def train_step(batch: Any, rate: float | None) -> None:
        group = optimizer.param_groups[0]
        group["lr"] = group["lr"] * 0.5 if rate is None else rate
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()

    before, batch = bits(net.parameters()), strategy.batch(dataset(), 0)
    with pytest.raises(StateError, match=r"lr 0\.025 in logical replica 1, and 0\.05 in replica 0"):
        strategy.run(train_step, (batch, None))
    assert bits(net.parameters()) == before
    strategy.run(train_step, (batch, 0.05))  # each sets the same
    assert bits(net.parameters()) != before


def test_a_sparse_gradient_is_refused() -> None:
    strategy, net = MirroredStrategy(1, V), torch.nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(net.parameters())

    def train_step() -> None:
        net(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(StateError, match="sparse=False"):
        strategy.run(train_step)


def test_a_module_may_be_moved_to_its_own_device() -> None:
    strategy, net = MirroredStrategy(1, V), model()
    before = bits(net.parameters())
    strategy.run(lambda: net.to("cpu")(torch.ones(1, 4)).sum())
    assert bits(net.parameters()) == before


def test_a_step_in_a_merge_call_needs_its_own_gradients() -> None:
    net, strategy = model(), MirroredStrategy(1, V)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def merge(across: Any, *grads: Any, reduce: bool) -> None:
        for parameter, grad in zip(net.parameters(), grads, strict=True):
            if reduce:
                parameter.grad = across.reduce("sum", grad)
        optimizer.step()

    def fn(batch: Any, *, reduce: bool) -> None:
        context = get_replica_context()
        assert context is not None
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        grads = [p.grad for p in net.parameters()]
        context.merge_call(functools.partial(merge, reduce=reduce), tuple(grads))

    batch = strategy.batch(dataset(), 0)
    with pytest.raises(StateError, match="in a merge_call"):
        strategy.run(fn, (batch,), {"reduce": False})
    strategy.run(fn, (batch,), {"reduce": True})
    other = model()
    reference = torch.optim.SGD(other.parameters(), 0.1)

    def plain(batch: Any) -> None:
        loss_of(other, batch).backward()
        reference.step()

    strategy.run(plain, (batch,))
    assert bits(net.parameters()) == bits(other.parameters())


def test_tensors_of_one_replica_may_be_changed_in_place() -> None:
    strategy, rows = MirroredStrategy(2, V), torch.zeros(V, 4)

    def fn(batch: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        x = torch.zeros(4)
        x += batch["x"].mul_(2).sum(0)  # its part of the batch, and a tensor that it made
        x[1:] *= 3
        buffer = torch.from_numpy(np.ones(4, np.float32)).add_(x)
        rows[context.replica_id_in_sync_group] = x  # a row that only this replica writes
        torch.nn.functional.relu_(buffer)
        return torch.nn.functional.batch_norm(batch["x"], None, None, training=True).sum() + buffer

    values = strategy.run(fn, (strategy.batch(dataset(), 0),)).values
    assert len(values) == V
    assert (rows != 0).all()
