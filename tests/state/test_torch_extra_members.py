"""What PyTorch programs keep outside of `state_dict`: frozen parameters, modes, gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import MismatchError, StateError
from perdure.state import restore, snapshot, torch_gradients
from perdure.state.extra_members import ExtraMembers, Restoring
from perdure.state.walk import Walk
from perdure.store.leaf import Leaf, Leaves

State = dict[str, Any]


def leaves_beside(state: State, process: int = 0) -> dict[str, Leaf]:
    extras = ExtraMembers(save_random_state=False)
    return extras.capture(Walk(state), Leaves(), process)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    result = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    result[0].requires_grad_(False)
    return result


def flags(module: torch.nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in module.parameters()]


def test_a_layer_that_the_run_has_unfrozen_is_trained_after_a_resume(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"net": model()})
        state["net"][0].requires_grad_(True)
        state["net"][1].bias.requires_grad_(False)
        manager.save(1, state)
    with CheckpointManager(tmp_path, recipe={}) as manager:
        wrapped = torch.nn.DataParallel(model())
        manager.restore_or_initialize({"net": wrapped})
        assert flags(wrapped) == [True, True, True, False]
        other = model()
        manager.restore(like={"net": other}, leaves="net")  # parts of a checkpoint
        assert flags(other) == [False, False, True, True]
        manager.save(2, {"net": wrapped})
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.restore(like={"net": other})
        assert flags(other) == [True, True, True, False]


@pytest.mark.parametrize("is_changed", [True, False])
def test_modules_of_other_libraries_keep_their_mode_and_which_parameters_are_trained(
    tmp_path: Path, is_changed: bool
) -> None:
    """A weight with a parametrization lies in a module that is no layer; others bring such modules."""

    def fresh() -> State:
        net = torch.nn.Sequential(
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(2, 2))
        )
        return {"net": net.requires_grad_(False)}

    def states(net: torch.nn.Module) -> list[bool]:
        return [*flags(net), *(part.training for part in net.modules())]

    with CheckpointManager(tmp_path, recipe={}) as manager:
        state, _ = manager.restore_or_initialize(fresh())
        if is_changed:
            state["net"].requires_grad_(True)
            state["net"][0].eval()
        manager.save(1, state)
    for step in (2, 3):  # what came back is saved again
        with CheckpointManager(tmp_path, recipe={}) as manager:
            again, _ = manager.restore_or_initialize(fresh())
            assert states(again["net"]) == states(state["net"])
            manager.save(step, again)
    assert (states(fresh()["net"]) != states(state["net"])) == is_changed


def test_what_no_step_has_frozen_stays_as_the_program_has_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"net": model()})
        other = model().requires_grad_(True)
        manager.restore(like={"net": other})
    assert all(flags(other))


class Backbone(torch.nn.Module):
    """Has a part called `module`, as wrappers have, with a layer of the name of one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2)})
        self.head = torch.nn.Linear(2, 2)


def test_a_part_that_is_called_as_in_a_wrapper_keeps_its_own_flags(tmp_path: Path) -> None:
    net, other = Backbone(), Backbone()
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.restore_or_initialize({"net": net})
        net.module.requires_grad_(False).eval()
        manager.save(1, {"net": net})
        manager.wait_until_finished()
        manager.restore(like={"net": other})
    assert flags(other) == flags(net) == [False, False, True, True]
    assert modes(other) == modes(net)


def modes(module: torch.nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def normalized() -> torch.nn.Sequential:
    inner = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    return torch.nn.Sequential(inner, torch.nn.BatchNorm1d(2))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_submodules_get_the_modes_that_they_were_saved_in(tmp_path: Path, is_wrapped: bool) -> None:
    def wrapped(module: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.DataParallel(module) if is_wrapped else module

    saved, now = normalized(), normalized()
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.restore_or_initialize({"net": wrapped(saved)})
        saved[0][0].eval()  # type: ignore[index]
        manager.save(1, {"net": wrapped(saved)})
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.restore(like={"net": now})
        assert modes(now) == modes(saved) == [True, True, False, True, True]
        evaluated = normalized().eval()
        manager.restore(like={"net": evaluated})  # inside an evaluation
        parts = normalized()
        manager.restore(like={"net": parts}, leaves="net")
        assert not any(modes(evaluated))
        assert all(modes(parts))


def test_modes_that_were_saved_in_an_evaluation_are_left_there(tmp_path: Path) -> None:
    saved, now = normalized(), normalized()
    now[1].eval()
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.restore_or_initialize({"net": saved})
        manager.save(1, {"net": saved.eval()})
        manager.wait_until_finished()
        manager.restore(like={"net": now})
    assert modes(now) == [True, True, True, True, False]


LOOPS = {  # (to None, where `zero_grad` is called)
    "keeps": (False, "first"),
    "keeps, at the end": (False, "last"),
    "drops": (True, "first"),
    "drops, after the save": (True, "last"),
    "drops, before the save": (True, "before"),
}


def heads(
    run: MemoryStorage, loop: str, stop: int, look: Callable[[State], None], interval: int = 1
) -> dict[str, bytes]:
    """Trains one head or the other, so that momentum moves an idle one that has a gradient."""
    to_none, when = LOOPS[loop]
    torch.manual_seed(0)
    net = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(3))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    with CheckpointManager(run, save_interval_steps=interval, recipe={}) as manager:
        state, start = manager.restore_or_initialize({"net": net, "optimizer": optimizer})
        look(state)
        for step in range(start, stop):
            if when == "first":
                optimizer.zero_grad(set_to_none=to_none)
            # -0.0 is a gradient here, too, which a sum with 0.0 would change.
            batch = torch.tensor([[1.0 + step, -0.0]])
            (net[0](batch) + net[1 + step % 2](batch)).sum().backward()
            if step == 3:
                net[0].requires_grad_(False)
            optimizer.step()
            if when == "before":
                optimizer.zero_grad(set_to_none=to_none)
            manager.save(step + 1, state)
            if when == "last":
                optimizer.zero_grad(set_to_none=to_none)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


@pytest.mark.parametrize("loop", LOOPS)
def test_an_optimizer_moves_an_idle_layer_after_a_resume_if_the_run_does(
    loop: str,
) -> None:
    given: list[int] = []

    def look(state: State) -> None:
        given.append(sum(value.grad is not None for value in state["net"].parameters()))

    whole = heads(MemoryStorage(), loop, 7, look)
    for stop in (4, 5):
        heads(run := MemoryStorage(), loop, stop, look)
        given.clear()
        assert heads(run, loop, 7, look) == whole
        assert given == [0 if LOOPS[loop][0] else 6]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_first_due_save_knows_whether_gradients_stay(
    monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    whole = heads(MemoryStorage(), loop, 7, lambda _: None)
    heads(run := MemoryStorage(), loop, 2, lambda _: None, interval=2)
    assert heads(run, loop, 7, lambda _: None, interval=2) == whole
    monkeypatch.setattr(torch_gradients.Gradients, "observe", lambda *_: None)
    heads(run := MemoryStorage(), loop, 2, lambda _: None, interval=2)
    is_same = heads(run, loop, 7, lambda _: None, interval=2) == whole
    assert is_same == LOOPS[loop][0]  # the negative control


@pytest.mark.parametrize(
    ("loop", "name", "instead"),
    [
        ("keeps", "give_gradients", lambda *_: None),
        ("drops, after the save", "keeps_gradients", lambda _: True),
    ],
)
def test_without_zeros_or_with_zeros_for_all_the_idle_layer_differs(
    monkeypatch: pytest.MonkeyPatch, loop: str, name: str, instead: Any
) -> None:
    """Negative control of the test above."""
    whole = heads(MemoryStorage(), loop, 7, lambda _: None)
    monkeypatch.setattr(torch_gradients, name, instead)
    heads(run := MemoryStorage(), loop, 5, lambda _: None)
    assert heads(run, loop, 7, lambda _: None) != whole


def test_a_second_save_of_a_step_is_no_sign_that_gradients_stay() -> None:
    value = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([value, torch.nn.Parameter(torch.ones(1))], 0.1)
    value.sum().backward()
    assert "process/0/gradients" not in leaves_beside({"o": optimizer})
    assert "process/0/gradients" not in leaves_beside({"o": optimizer})
    optimizer.zero_grad(set_to_none=False)
    for _ in range(2):
        assert leaves_beside({"o": optimizer})["process/0/gradients"].text == '{"o":["0"]}'
    optimizer.zero_grad()
    assert "process/0/gradients" not in leaves_beside({"o": optimizer})
    value.sum().backward()
    assert "process/0/gradients" not in leaves_beside({"o": optimizer})


ACCUMULATING = {  # whether `zero_grad` sets to None, and when it is called
    "tail": (True, "tail"),
    "head": (True, "head"),
    "zeros": (False, "tail"),
}


def accumulating(run: MemoryStorage, loop: str, stop: int, seen: list[int]) -> dict[str, bytes]:
    """Steps after every third batch and saves after each; `seen` gets the gradients in checkpoints."""
    to_none, when = ACCUMULATING[loop]
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    like = {"net": net, "optimizer": optimizer}
    with CheckpointManager(run, max_to_keep=None, recipe={}) as manager:
        state, start = manager.restore_or_initialize(like)
        for batch in range(start, stop):
            if when == "head" and batch % 3 == 0:
                optimizer.zero_grad(set_to_none=to_none)
            net(torch.tensor([[1.0 + batch, -0.5]])).sum().backward()
            if batch % 3 == 2:
                optimizer.step()
                if when == "tail":
                    optimizer.zero_grad(set_to_none=to_none)
            manager.save(batch + 1, state)
            seen.append(sum("accumulated" in name for name in leaves_beside(state)))
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


@pytest.mark.parametrize("loop", ACCUMULATING)
def test_gradients_that_no_step_has_used_are_those_of_the_save(loop: str) -> None:
    whole = accumulating(MemoryStorage(), loop, 9, seen := [])
    assert seen == [4, 4, 0] * 3
    for stop in range(1, 9):
        accumulating(run := MemoryStorage(), loop, stop, [])
        assert accumulating(run, loop, 9, []) == whole, stop
    # A job that begins between two batches of a step, and ends there.
    accumulating(run := MemoryStorage(), loop, 4, [])
    accumulating(run, loop, 5, [])
    assert accumulating(run, loop, 9, []) == whole


def test_without_accumulated_gradients_a_resume_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    whole = accumulating(MemoryStorage(), "tail", 9, [])
    monkeypatch.setattr(torch_gradients, "accumulated_leaves", lambda *_: {})
    accumulating(run := MemoryStorage(), "tail", 4, [])
    assert accumulating(run, "tail", 9, []) != whole
    accumulating(run := MemoryStorage(), "tail", 3, [])
    assert accumulating(run, "tail", 9, []) == whole


def loose(kind: str) -> tuple[State, list[torch.Tensor], Any]:
    """A state with tensors that the program steps itself, those tensors, and a function to train."""
    values = [torch.tensor([0.5, 2.0], requires_grad=True), torch.tensor(0.25, requires_grad=True)]
    if kind == "module":
        net = torch.nn.Linear(2, 1)
        return {"net": net}, [*net.parameters()], lambda x: net(x).sum()
    held: Any = dict(enumerate(values)) if kind == "dict" else SimpleNamespace(values=values)
    return {"held": held}, values, lambda x: (x * values[0]).sum() * values[1]


def stepping_by_hand(
    run: MemoryStorage, kind: str, stop: int, freeze_at: int = 99
) -> dict[str, bytes]:
    """Adds the gradients of two batches, and subtracts them."""
    torch.manual_seed(0)
    like, values, loss = loose(kind)
    with CheckpointManager(run, max_to_keep=None, recipe={}) as manager:
        state, start = manager.restore_or_initialize(like)
        for batch in range(start, stop):
            if batch == freeze_at:
                values[1].requires_grad_(not values[1].requires_grad)
            loss(torch.tensor([1.0 + batch, -0.5])).backward()
            if batch % 2:
                with torch.no_grad():
                    for value in values:
                        if value.grad is not None:
                            value.sub_(0.1 * value.grad)
                        value.grad = None
            manager.save(batch + 1, state)
    return {path: bytes(leaf.data) for path, leaf in snapshot(state).items()}


@pytest.mark.parametrize("freeze_at", [2, 99])
@pytest.mark.parametrize("kind", ["dict", "object", "module"])
def test_tensors_that_the_program_steps_itself_resume_with_their_gradients(
    kind: str, freeze_at: int
) -> None:
    whole = stepping_by_hand(MemoryStorage(), kind, 6, freeze_at)
    for stop in range(1, 6):
        stepping_by_hand(run := MemoryStorage(), kind, stop, freeze_at)
        assert stepping_by_hand(run, kind, 6, freeze_at) == whole, stop


def test_without_the_gradients_of_such_tensors_a_resume_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(torch_gradients, "_unstepped", lambda *_: ())
    for kind in ("dict", "object", "module"):
        whole = stepping_by_hand(MemoryStorage(), kind, 6)
        stepping_by_hand(run := MemoryStorage(), kind, 3)
        assert stepping_by_hand(run, kind, 6) != whole


def test_a_tensor_that_is_given_to_an_optimizer_has_its_gradient_once() -> None:
    value = torch.ones(2, requires_grad=True)
    state = {"value": value, "o": torch.optim.SGD([value], 0.1)}
    leaves_beside(state)
    value.sum().backward()
    names = [name for name in leaves_beside(state) if "attributes" not in name]
    assert names == ["process/0/accumulated/0/o"]


def test_each_process_has_the_gradients_that_it_has_accumulated() -> None:
    value = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([value], 0.1)
    state, same = {"o": optimizer}, str
    extras = ExtraMembers(save_random_state=False)
    extras.observe(state)
    value.sum().backward()
    leaves = leaves_beside(state, 0)
    value.sum().backward()
    leaves |= leaves_beside(state, 1)
    assert sorted(leaves) == ["process/0/accumulated/0/o", "process/1/accumulated/0/o"]
    for process, gradient in enumerate(([1.0, 1.0], [2.0, 2.0])):
        value.grad = None
        group: Any = SimpleNamespace(index=process, count=2, is_chief=not process)
        extras.restore(Restoring(leaves, same, "here", group), Walk(state))
        assert value.grad is not None
        assert value.grad.tolist() == gradient
    optimizer.step()
    assert not leaves_beside(state, 1)


def lazy() -> State:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LazyLinear(2))
    return {"optimizer": torch.optim.Adam(layers.parameters()), "net": layers}


def test_a_lazy_module_and_its_optimizer_resume_before_the_first_forward_pass() -> None:
    def train(state: State) -> None:
        state["optimizer"].zero_grad()
        state["net"](torch.ones(1, 3)).sum().backward()
        state["optimizer"].step()

    state = lazy()
    train(state)
    saved = snapshot(state)
    again = restore(lazy(), saved)
    train(state)
    train(again)
    one, other = snapshot(state), snapshot(again)
    assert one.keys() == other.keys()
    assert all(bytes(one[path].data) == bytes(other[path].data) for path in one)


def test_a_lazy_module_is_lazy_again_if_the_restore_fails() -> None:
    class Refuses:
        def state_dict(self) -> State:
            return {"n": 1}

        def load_state_dict(self, state_dict: State) -> None:
            raise ValueError("never")

    state = lazy()
    state["net"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    saved = snapshot({**state, "refuses": Refuses()})
    target = {**lazy(), "refuses": Refuses()}
    before = target["net"][0].weight.detach().clone()
    with pytest.raises(StateError, match=r"refuses.*never"):
        restore(target, saved)
    assert isinstance(target["net"][1].weight, torch.nn.UninitializedParameter)
    assert torch.equal(target["net"][0].weight, before)
    target.pop("refuses")
    assert restore(target, snapshot(state))["net"][1].weight.shape == (2, 3)


def test_a_group_that_the_run_has_added_is_to_be_added_before_the_restore() -> None:
    net = model()
    optimizer = torch.optim.SGD(net[1].parameters(), 0.1)
    target = torch.optim.SGD(net[1].parameters(), 0.1)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    saved = snapshot({"optimizer": optimizer})
    with pytest.raises(MismatchError, match="add the group before the restore"):
        restore({"optimizer": target}, saved)
    target.add_param_group({"params": list(net[0].parameters())})
    restore({"optimizer": target}, saved)


@pytest.mark.filterwarnings("ignore")  # of torch, about groups
def test_ddp_exchanges_buffers_in_the_next_forward_pass_as_without_a_resume(tmp_path: Path) -> None:
    def wrapped() -> torch.nn.parallel.DistributedDataParallel:
        return torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))

    rows = torch.ones(2, 2)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        net = wrapped()
        with CheckpointManager(tmp_path, recipe={}) as manager:
            manager.save(1, {"net": net})
            with net.no_sync():
                net(rows).sum().backward()
            manager.save(2, {"net": net})
            manager.restore(1, like={"net": net})
            assert net.require_forward_param_sync
            net = wrapped()
            manager.restore(2, like={"net": net})
            assert not net.require_forward_param_sync
    finally:
        torch.distributed.destroy_process_group()
