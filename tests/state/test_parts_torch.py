"""Restores of parts on PyTorch: modules by their parameters, optimizers as a whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perdure.torch
from perdure import Checkpoint, CheckpointManager, ManagerOptions, Retention, load_checkpoint
from perdure.errors import (
    ArgumentError,
    LeafNotFoundError,
    MismatchError,
    StateError,
    StepNotFoundError,
)
from perdure.look import open_checkpoint

HEAD = ("model/head/bias", "model/head/weight")


class Net(torch.nn.Module):
    def __init__(self, out: int = 2, *, extra: int | None = None) -> None:
        super().__init__()
        self.enc = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, out)
        if extra is not None:
            self.enc.append(Extra(extra))

    def forward(self, x: Any) -> Any:
        return self.head(self.enc(x))


class Extra(torch.nn.Module):
    """A module with state that is no tensor."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = {"n": n, "list": [n, n]}

    def forward(self, x: Any) -> Any:
        return x

    def get_extra_state(self) -> Any:
        return self.n

    def set_extra_state(self, state: Any) -> None:
        self.n = state


def make(seed: int, out: int = 2, **arguments: Any) -> dict[str, Any]:
    """A model after one step of its optimizer and its scheduler."""
    torch.manual_seed(seed)
    model = Net(out, **arguments)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "opt": optimizer, "sched": scheduler, "epoch": seed}


def bits(value: Any) -> Any:
    """A copy of a state that compares by bits."""
    if hasattr(value, "state_dict"):
        return bits(value.state_dict())
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(part) for part in value]
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        octets = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(tensor.dtype), tuple(tensor.shape), octets)
    return value


def same_names(one: Any, other: Any) -> set[str]:
    """The names of a module whose values are equal."""
    first, second = bits(one), bits(other)
    return {name for name in first if first[name] == second.get(name)}


def test_a_pattern_selects_parameters_inside_a_module(manager: CheckpointManager) -> None:
    like, saved = make(2), make(1)
    before = bits(like)
    weight = like["model"].enc[0].weight
    state, _ = manager.restore(like=like, leaves="model/enc/**")
    assert state["model"] is like["model"]
    assert like["model"].enc[0].weight is weight
    expected = {name for name in before["model"] if name.startswith("enc.")}
    assert same_names(like["model"], saved["model"]) - {"enc.1.num_batches_tracked"} == (
        expected - {"enc.1.num_batches_tracked"}
    )
    assert bits(like["model"].head) == {
        name.removeprefix("head."): value
        for name, value in before["model"].items()
        if name.startswith("head.")
    }
    assert bits(like["opt"]) == before["opt"]
    manager.restore(like=like, leaves="**/bias")
    assert "head.bias" in same_names(like["model"], saved["model"])
    for part in ("opt/state", "opt/state/0/exp_avg", "sched/gamma"):
        with pytest.raises(MismatchError, match=f"{part}.*lies inside a .*only as a whole"):
            manager.restore(like=like, leaves=part)


def test_a_new_head_keeps_its_value_and_the_optimizer_its_whole_state(
    manager: CheckpointManager,
) -> None:
    like, saved = make(2, out=5), make(1)
    before = bits(like)
    with pytest.raises(MismatchError, match="strict=False") as error:
        manager.restore(like=like)
    assert all(path in str(error.value) for path in HEAD)
    assert bits(like) == before
    with pytest.warns(UserWarning, match="opt: keeps its whole state") as caught:
        report = manager.restore(like=like, strict=False).report
    assert len(caught) == 1
    assert report.mismatched == HEAD
    assert report.kept_whole == ("opt", "sched")
    names = {name for name in before["model"] if name.startswith("enc.")}
    assert same_names(like["model"], saved["model"]) >= names
    assert bits(like["model"].head) == bits(make(2, out=5)["model"].head)
    assert bits(like["opt"]) == before["opt"], "moments of other parameters would be half a state"
    assert bits(like["sched"]) == before["sched"]
    assert like["epoch"] == 2


def test_an_optimizer_whose_groups_differ_is_kept_and_the_rest_restored(
    manager: CheckpointManager,
) -> None:
    like, saved = make(2), make(1)
    like["opt"] = torch.optim.SGD(like["model"].enc.parameters(), lr=0.5)
    del like["sched"]
    before = bits(like["opt"])
    with pytest.warns(UserWarning, match="opt: expected groups of"):
        report = manager.restore(like=like, strict=False).report
    assert bits(like["opt"]) == before
    assert bits(like["model"]) == bits(saved["model"])
    assert report.mismatched == ("opt",)
    assert set(report.unexpected) == {path for path in report.unexpected if "sched/" in path}


def test_missing_and_unexpected_names_are_listed_and_nothing_else_changes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": make(1)["model"], "old": torch.nn.Linear(2, 2)})
        manager.wait_until_finished()
        model = make(2)["model"]
        model.gate = torch.nn.Linear(2, 2)
        del model.enc[1]
        gate = bits(model.gate)
        with pytest.warns(UserWarning, match="differ"):
            report = manager.restore(like={"model": model}, strict=False).report
    assert report.missing == ("model/gate/bias", "model/gate/weight")
    assert {path for path in report.unexpected if path.startswith("old/")} == {
        "old/bias", "old/weight",
    }  # fmt: skip
    assert "model/enc/1/running_mean" in report.unexpected
    assert bits(model.gate) == gate
    assert bits(model.head) == bits(make(1)["model"].head)


def test_tied_weights_stay_tied_and_count_as_restored(tmp_path: Path) -> None:
    def tied(seed: int) -> Any:
        torch.manual_seed(seed)
        module = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)}
        )
        module["b"].weight = module["a"].weight
        return module

    with CheckpointManager(tmp_path) as manager:
        saved = tied(1)
        del saved["b"]
        optimizer = torch.optim.SGD(saved.parameters(), lr=0.1)
        manager.save(1, {"m": saved, "opt": optimizer})
        manager.wait_until_finished()
        live = tied(2)
        like = {"m": live, "opt": torch.optim.SGD(live.parameters(), lr=0.9)}
        with pytest.warns(UserWarning, match="m/b/weight"):
            report = manager.restore(like=like, strict=False).report
    assert live["b"].weight is live["a"].weight
    assert torch.equal(live["b"].weight, saved["a"].weight)
    assert report.kept_whole == ()
    assert like["opt"].param_groups[0]["lr"] == 0.1


def test_extra_state_is_restored_as_a_whole_or_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, make(1, extra=1))
        manager.wait_until_finished()
        like = make(2, extra=2)
        manager.restore(like=like, leaves="model/head")
        assert like["model"].enc[2].n == {"n": 2, "list": [2, 2]}
        manager.restore(like=like, leaves="model/enc/2/**")
        assert like["model"].enc[2].n == {"n": 1, "list": [1, 1]}
        with pytest.raises(MismatchError, match=r"_extra_state/n: lies inside"):
            manager.restore(like=like, leaves="model/enc/2/_extra_state/n")
        with pytest.warns(UserWarning, match="head"):
            manager.restore(like=(like := make(3, out=7, extra=3)), strict=False)
        assert like["model"].enc[2].n == {"n": 1, "list": [1, 1]}
        names = perdure.torch.state_dict(tmp_path, "model")
        assert names["enc.2._extra_state"] == {"n": 1, "list": [1, 1]}


def test_a_module_is_cast_with_the_bits_of_torch(manager: CheckpointManager) -> None:
    like, saved = {"model": Net().bfloat16()}, make(1)["model"]
    with pytest.raises(MismatchError, match="cast=True"):
        manager.restore(like=like, leaves="model")
    report = manager.restore(like=like, leaves="model", cast=True).report
    assert bits(like["model"]) == bits(saved.bfloat16())
    assert "model/enc/1/num_batches_tracked" not in report.cast
    assert set(HEAD) <= set(report.cast)


def test_a_branch_moves_into_a_module(manager: CheckpointManager) -> None:
    head = torch.nn.Linear(4, 2)
    rename = {"model/head": "classifier"}
    manager.restore(like={"classifier": head}, leaves="classifier", rename=rename)
    assert bits(head) == bits(make(1)["model"].head)
    wrapped = torch.nn.Sequential(make(2)["model"])
    manager.restore(like={"m": wrapped}, leaves="m", rename={"model": "m/0"})
    assert bits(wrapped[0]) == bits(make(1)["model"])


class RefusesOnce:
    """An object whose first load fails."""

    def __init__(self) -> None:
        self.loads = 0

    def state_dict(self) -> Any:
        return {"n": 5}

    def load_state_dict(self, state: Any) -> None:
        self.loads += 1
        if self.loads == 1:
            raise RuntimeError(f"no {state}")


def test_a_restore_of_parts_that_fails_changes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {**make(1), "x": RefusesOnce()})
        manager.wait_until_finished()
        like = {**make(2, out=5), "x": RefusesOnce(), "epoch": 5}
        before = bits(like["model"]), bits(like["opt"])
        with pytest.raises(StateError, match="Every object has the state that it had before"):
            manager.restore(like=like, strict=False)
        assert like["x"].loads == 2
        assert (bits(like["model"]), bits(like["opt"])) == before


def test_a_module_on_the_meta_device_gets_memory(tmp_path: Path) -> None:
    def tied(seed: int) -> Any:
        model = make(seed)["model"]
        model.again = torch.nn.Linear(4, 2)
        model.again.weight = model.head.weight
        return model

    saved = tied(1)
    saved.head.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": saved, "opt": optimizer})
        manager.wait_until_finished()
        with torch.device("meta"):
            model = Net()
            model.again = torch.nn.Linear(4, 2)
        model.again.weight = model.head.weight
        model.head.weight.requires_grad_(False)
        weight = model.enc[0].weight
        like = {"model": model, "opt": torch.optim.AdamW(model.parameters())}
        report = manager.restore(like=like).report
        assert report.is_exact
        assert bits(like) == bits({"model": saved, "opt": optimizer})
        assert model.again.weight is model.head.weight
        assert model.enc[0].weight is weight, "an optimizer made before still steps it"
        assert not model.head.weight.requires_grad
        for live, opt in ((saved, optimizer), (model, like["opt"])):
            opt.zero_grad()
            live(torch.ones(5, 3)).sum().backward()
            opt.step()
        assert bits(like) == bits({"model": saved, "opt": optimizer})

        with torch.device("meta"):
            part = Net(out=9)
        with pytest.raises(MismatchError, match="model/head/weight: is abstract"):
            manager.restore(like={"model": part}, strict=False)
        assert all(value.is_meta for value in part.state_dict().values())
        with torch.device("meta"):
            part.register_buffer("lost", torch.zeros(1), persistent=False)
        with pytest.raises(MismatchError, match="lost: is on the meta device and never saved"):
            manager.restore(like={"model": part}, leaves="model")


def test_a_failed_restore_leaves_a_meta_module_on_the_meta_device(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"m": torch.nn.Linear(2, 2), "x": RefusesOnce()})
        manager.wait_until_finished()
        with torch.device("meta"):
            like = {"m": torch.nn.Linear(2, 2), "x": RefusesOnce()}
        weight = like["m"].weight
        with pytest.raises(StateError, match="Every object has the state that it had before"):
            manager.restore(like=like)
        assert like["m"].weight is weight
        assert weight.is_meta
        manager.restore(like=like)
        assert not weight.is_meta


def test_state_dict_gives_plain_tensors_without_the_model(tmp_path: Path) -> None:
    model = Net().bfloat16()
    compiled = torch.nn.DataParallel(model)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": compiled, "opt": torch.optim.SGD(model.parameters()), "n": 1,
                         "tree": {"layers": [{"w": np.ones((2, 3), np.float32)}]}})  # fmt: skip
    tensors = perdure.torch.state_dict(tmp_path, "model")
    assert bits(tensors) == bits(model)
    assert tensors["head.weight"].dtype == torch.bfloat16
    assert not any(value.requires_grad for value in tensors.values())
    other = Net().bfloat16()
    assert str(other.load_state_dict(tensors)) == "<All keys matched successfully>"
    tensors["head.weight"].zero_()
    assert perdure.torch.state_dict(f"{tmp_path}@1", "model")["head.weight"].any()
    assert (
        perdure.torch.state_dict(tmp_path, "tree", step=1)["layers.0.w"].tolist() == [[1.0] * 3] * 2
    )
    for branch in ("opt", "n"):
        with pytest.raises(MismatchError, match=f"{branch}: expected a module"):
            perdure.torch.state_dict(tmp_path, branch)
    with pytest.raises(StepNotFoundError):
        perdure.torch.state_dict(tmp_path, "mod")
    with CheckpointManager(tmp_path / "bare") as manager:
        manager.save(1, model)
    assert bits(perdure.torch.state_dict(tmp_path / "bare", "")) == bits(model)


def test_weights_that_only_the_target_ties_name_a_way_out(tmp_path: Path) -> None:
    def tied(seed: int, *, is_tied: bool) -> dict[str, Any]:
        torch.manual_seed(seed)
        net: Any = torch.nn.ModuleDict(
            {"emb": torch.nn.Embedding(7, 5), "out": torch.nn.Linear(5, 7, bias=False)}
        )
        if is_tied:
            net["out"].weight = net["emb"].weight
        return {"model": net}

    saved = tied(1, is_tied=False)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved)
        like = tied(2, is_tied=True)
        for options in ({}, {"strict": False}):
            with pytest.raises(MismatchError, match="name with `leaves` what to") as error:
                manager.restore(like=like, **options)  # type: ignore[arg-type]
            assert "cast" not in str(error.value)
        manager.restore(like=like, leaves="model/emb/weight")
        assert torch.equal(like["model"]["out"].weight, saved["model"]["emb"].weight)


def test_what_a_restore_of_parts_leaves_out_may_be_on_the_meta_device(tmp_path: Path) -> None:
    def with_buffer() -> Any:
        net = Net()
        net.enc.register_buffer("mask", torch.ones(2), persistent=False)
        return net

    saved = with_buffer()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": saved})
        with torch.device("meta"):
            net = with_buffer()
        manager.restore(like={"model": net}, leaves="model/head/*")
        assert torch.equal(net.head.weight, saved.head.weight)
        assert net.enc.mask.is_meta
        assert net.enc[0].weight.is_meta
        with pytest.raises(MismatchError, match="model/enc/mask: is on the meta device"):
            manager.restore(like={"model": net}, leaves="model/enc")


def test_members_that_only_the_checkpoint_has_are_left_out_by_naming_the_leaves(
    tmp_path: Path,
) -> None:
    state = make(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": state["model"], "opt": state["opt"]})
        net = Net()
        with pytest.raises(MismatchError) as error:
            manager.restore(like={"model": net})
        assert "state_dict()" not in str(error.value)
        manager.restore(like={"model": net}, leaves="model")
        assert bits(net) == bits(state["model"])
        # The negative control: a copy of the state dict, which has grown since.
        grown = {"model": net, "opt": torch.optim.AdamW(net.parameters()).state_dict()}
        with pytest.raises(MismatchError, match=r"its `state_dict\(\)` is a copy"):
            manager.restore(like=grown)


def test_the_names_of_a_checkpoint_are_the_same_everywhere(tmp_path: Path) -> None:
    where, nets = f"{tmp_path}/a", {step: Net() for step in (1, 2, 3)}
    options = ManagerOptions(retention=Retention(best_metric="acc"))
    with CheckpointManager(where, options=options) as manager:
        for step, net in nets.items():
            manager.save(step, {"model": net, "n": step}, {"acc": -abs(step - 2.0)})
        manager.wait_until_finished()
        assert manager.restore(f"{where}@best").step == 2
        assert manager.restore(f"{where}@latest").step == 3
    for name, step in {"best": 2, "best:min:acc": 3, "latest": 3, "1": 1}.items():
        at = f"{where}@{name}"
        assert open_checkpoint(at).step == step
        assert load_checkpoint(at)["n"] == step
        assert Checkpoint(model=Net(), n=0).restore(at) == step
        loaded = Net()
        loaded.load_state_dict(perdure.torch.state_dict(at, "model"))
        assert bits(loaded) == bits(nets[step])
    assert load_checkpoint(f"{where}@best", 2)["n"] == 2
    for at, step in ((f"{where}@best", 3), (f"{where}@latest", 3), (f"{where}@1,2", None)):
        with pytest.raises(ArgumentError):
            load_checkpoint(at, step)
    with pytest.raises(StepNotFoundError, match="found @worst"):
        load_checkpoint(f"{where}@worst")


def test_a_branch_that_is_not_there_is_named(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": Net()})
    with pytest.raises(LeafNotFoundError, match=r"\(the branch 'net'\); it has model/"):
        perdure.torch.state_dict(tmp_path, "net")
    with pytest.raises(LeafNotFoundError, match=r"it has model/\. Did you mean 'model'\? Nothing"):
        perdure.torch.state_dict(tmp_path, "modle")
