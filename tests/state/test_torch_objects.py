"""PyTorch's optimizers, modules and parameters are restored with every bit, class and flag."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import CheckpointManager
from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.state import flatten, restore, snapshot
from perdure.state.torch_tensors import on_host
from perdure.store.leaf import Leaves

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)


def bits(state: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    leaves = state if isinstance(state, Leaves) else flatten(state)
    return {path: (leaf.dtype, leaf.shape, bytes(leaf.data)) for path, leaf in leaves.items()}


class Problem:
    """Two parameters (two-dimensional, because Muon accepts no others) and their optimizer."""

    def __init__(self, name: str, dtype: torch.dtype, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.sparse = name == "SparseAdam"
        shapes = [(4, 3), (2, 4)]
        self.parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
        groups = [{"params": [p]} for p in self.parameters]
        single = name == "LBFGS"
        self.optimizer = getattr(torch.optim, name)(
            self.parameters if single else groups, **options
        )

    def state(self) -> dict[str, Any]:
        return {"parameters": list(self.parameters), "optimizer": self.optimizer}

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        noise = [torch.randn(p.shape, generator=generator) for p in self.parameters]

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            for parameter, shift in zip(self.parameters, noise, strict=True):
                gradient = (parameter.detach().float() - shift).to(parameter.dtype)
                parameter.grad = gradient.to_sparse() if self.sparse else gradient
            return torch.stack([p.detach().float().square().sum() for p in self.parameters]).sum()

        self.optimizer.step(closure)

    def take(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_resumes_with_the_bits_of_an_uninterrupted_run(
    name: str, dtype: torch.dtype, steps: int
) -> None:
    whole, resumed = Problem(name, dtype, 1), Problem(name, dtype, 2)
    for number in range(steps):
        whole.step(number)
    saved = snapshot(whole.state())
    resumed.take(restore(resumed.state(), saved))
    assert bits(resumed.state()) == bits(saved)
    for number in range(steps, steps + 2):
        whole.step(number)
        resumed.step(number)
    assert bits(resumed.state()) == bits(whole.state())
    assert bits(whole.state()) != bits(saved), "the control: the steps change something"


def test_every_optimizer_of_torch_is_tested() -> None:
    assert {"LBFGS", "Adam", "AdamW", "SGD", "Adafactor", "SparseAdam"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_of_an_optimizer_keeps_its_own_dtype(dtype: torch.dtype) -> None:
    def make() -> Problem:
        return Problem("Adam", torch.bfloat16, 1)

    old, new = make(), make()
    old.step(0)
    for state in old.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(dtype) + 1e-3
    restore(new.state(), snapshot(old.state()))
    for parameter, other in zip(old.parameters, new.parameters, strict=True):
        one, two = old.optimizer.state[parameter], new.optimizer.state[other]
        assert two["exp_avg"].dtype == dtype
        assert torch.equal(one["exp_avg"], two["exp_avg"])


class Counting(torch.optim.Optimizer):
    """Loads with PyTorch's code and adds its own, as many optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            count = self.state[parameter].get("count", torch.zeros((), dtype=torch.int64))
            self.state[parameter]["count"] = count + 2**24 + 1

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class Halved(Counting):
    """Holds numbers of another dtype than it saves."""

    def state_dict(self) -> Any:  # type: ignore[override]
        state = super().state_dict()
        held = {n: {"count": values["count"].long()} for n, values in state["state"].items()}
        return {**state, "state": held}


@pytest.mark.parametrize(("kind", "dtype"), [(Counting, torch.int64), (Halved, torch.float32)])
def test_an_optimizer_that_loads_with_the_code_of_torch_keeps_its_dtypes(
    kind: Any, dtype: torch.dtype
) -> None:
    state = {"opt": kind(torch.nn.Linear(2, 2).parameters(), {})}
    state["opt"].step()
    parameters = list(torch.nn.Linear(2, 2).parameters())
    target = {"opt": kind(parameters, {})}
    if kind is Counting:
        restore(target, snapshot(state))
        assert bits(target) == bits(state)
    else:  # 2**24 + 1 is no number of 32 bits, and what the optimizer converts is its own
        state["opt"].state[state["opt"].param_groups[0]["params"][0]]["count"] -= 1
        state["opt"].state[state["opt"].param_groups[0]["params"][1]]["count"] -= 1
        restore(target, snapshot(state))
    assert target["opt"].state[parameters[0]]["count"].dtype == dtype


def test_the_state_of_a_channels_last_parameter_keeps_the_memory_format() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    old, new = torch.optim.Adam([weight]), torch.optim.Adam([weight])
    weight.grad = torch.ones_like(weight)
    old.step()
    restore(new, snapshot(old))
    assert new.state[weight]["exp_avg"].stride() == old.state[weight]["exp_avg"].stride()
    assert bits(new) == bits(old)


@pytest.mark.parametrize("options", [{"foreach": True}, {"capturable": True}, {"amsgrad": True}])
def test_flags_of_an_optimizer_come_from_the_checkpoint(options: dict[str, bool]) -> None:
    old, new = Problem("Adam", torch.float32, 1, **options), Problem("Adam", torch.float32, 2)
    if "capturable" not in options:  # a flag that no step on a CPU accepts
        old.step(0)
    restore({"optimizer": new.optimizer}, snapshot({"optimizer": old.optimizer}))
    assert bits(new.optimizer) == bits(old.optimizer)
    assert all(new.optimizer.param_groups[0][name] is value for name, value in options.items())


def test_an_optimizer_state_of_an_older_torch_gets_missing_settings() -> None:
    old, new = Problem("Adam", torch.float32, 1), Problem("Adam", torch.float32, 2)
    old.step(0)
    saved = snapshot(old.state())
    for group in (0, 1):
        for name in ("decoupled_weight_decay", "fused"):
            del saved[f"optimizer/param_groups/{group}/{name}"]
        entry = saved.containers[f"optimizer/param_groups/{group}"]
        assert entry.keys is not None
        keys = tuple(k for k in entry.keys if k not in ("decoupled_weight_decay", "fused"))
        saved.containers[f"optimizer/param_groups/{group}"] = type(entry)("dict", keys=keys)
    new.take(restore(new.state(), saved))
    assert new.optimizer.param_groups[0]["decoupled_weight_decay"] is False
    assert bits(new.state()) == bits(old.state())


def test_a_setting_that_a_scheduler_left_in_the_groups_is_restored() -> None:
    old, new = Problem("SGD", torch.float32, 1, lr=1), Problem("SGD", torch.float32, 2, lr=1)
    torch.optim.lr_scheduler.LambdaLR(old.optimizer, lambda step: 0.5**step)
    restore({"optimizer": new.optimizer}, snapshot({"optimizer": old.optimizer}))
    assert new.optimizer.param_groups[0]["initial_lr"] == 1
    assert bits(new.optimizer) == bits(old.optimizer)


def test_an_integer_learning_rate_and_its_scheduler_resume() -> None:
    def make(seed: int) -> tuple[Problem, Any]:
        problem = Problem("SGD", torch.float32, seed, lr=1)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            problem.optimizer, lambda step: 0.5 if step else 1
        )
        return problem, schedule

    def steps(problem: Problem, schedule: Any, first: int) -> None:
        for number in range(first, first + 2):
            problem.step(number)
            schedule.step()

    (whole, schedule), (resumed, other) = make(1), make(2)
    assert isinstance(resumed.optimizer.param_groups[0]["lr"], int)
    steps(whole, schedule, 0)
    resumed.take(
        restore(
            {**resumed.state(), "schedule": other},
            snapshot({**whole.state(), "schedule": schedule}),
        )
    )
    steps(whole, schedule, 2)
    steps(resumed, other, 2)
    assert isinstance(resumed.optimizer.param_groups[0]["lr"], float)
    assert bits({**resumed.state(), "s": other}) == bits({**whole.state(), "s": schedule})


def test_an_optimizer_that_changes_a_stored_setting_is_refused() -> None:
    class OwnRate(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.param_groups[0]["lr"] = 1.0

    parameters = [*torch.nn.Linear(2, 2).parameters()]
    leaves = snapshot({"o": torch.optim.SGD(parameters, lr=0.1)})
    with pytest.raises(MismatchError, match=r"o/param_groups/0/lr: stored float 0.1"):
        restore({"o": OwnRate(parameters, lr=0.5)}, leaves)


def test_an_optimizer_of_other_groups_is_refused_and_nothing_changes() -> None:
    old, new = Problem("SGD", torch.float32, 1, lr=0.5), Problem("LBFGS", torch.float32, 2)
    before = bits(new.optimizer)
    with pytest.raises(MismatchError, match=r"o/param_groups: expected groups of \[2\] parameters"):
        restore({"o": new.optimizer}, snapshot({"o": old.optimizer}))
    assert bits(new.optimizer) == before


def test_a_parameter_in_a_dict_stays_a_parameter_that_requires_gradients() -> None:
    def make(k: float) -> dict[str, torch.Tensor]:
        return {
            "parameter": torch.nn.Parameter(torch.full((2,), k)),
            "frozen": torch.nn.Parameter(torch.full((2,), k), requires_grad=False),
            "leaf": torch.full((2,), k, requires_grad=True),
            "plain": torch.full((2,), k),
        }

    restored = restore(make(1.0), snapshot(make(2.0)))
    assert bits(restored) == bits(make(2.0))
    for name, value in make(1.0).items():
        assert type(restored[name]) is type(value), name
        assert restored[name].requires_grad is value.requires_grad, name
        assert restored[name].is_leaf


def test_a_parameter_is_restored_in_place_so_that_its_optimizer_keeps_it() -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        weight, bias = torch.randn(3, requires_grad=True), torch.nn.Parameter(torch.randn(1))
        state = {"w": weight, "net": dict(torch.nn.Linear(3, 1).named_parameters()), "b": bias}
        held = [weight, bias, *state["net"].values()]
        return {**state, "o": torch.optim.Adam(held, lr=0.1)}

    def step(state: dict[str, Any], x: torch.Tensor) -> None:
        hidden = torch.nn.functional.linear(x * state["w"], *state["net"].values())
        state["o"].zero_grad()
        (hidden + state["b"]).square().sum().backward()
        state["o"].step()

    old, new = make(1), make(2)
    step(old, torch.ones(3))
    like = dict(new["net"])
    restored = restore(new, snapshot(old))
    assert restored["w"] is new["w"]
    assert all(restored["net"][name] is like[name] for name in like)
    for state in (old, restored):
        step(state, torch.arange(3.0))
    assert bits(restored) == bits(old)


def test_a_parameter_keeps_its_value_if_another_member_refuses_its_state() -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise RuntimeError("no")

    saved = snapshot({"a": torch.nn.Parameter(torch.ones(2)), "b": Refusing()})
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(StateError, match="no"):
        restore({"a": parameter, "b": Refusing()}, saved)
    assert parameter.tolist() == [0, 0]


def test_a_parameter_at_two_paths_takes_one_value() -> None:
    tied = torch.nn.Parameter(torch.zeros(2))
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2) * 2)
    restored = restore({"a": tied, "b": tied}, snapshot({"a": one, "b": one}))
    assert restored["a"] is restored["b"] is tied
    with pytest.raises(MismatchError, match="b: is one object with a in the target"):
        restore({"a": tied, "b": tied}, snapshot({"a": one, "b": other}))
    assert tied.tolist() == [1, 1]


def test_a_tensor_has_the_memory_format_of_the_target() -> None:
    for like in (
        torch.zeros(3, 2).t(),
        torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
    ):
        value = torch.arange(like.numel()).reshape(like.shape).float()
        restored = restore({"x": like}, snapshot({"x": value}))["x"]
        assert restored.stride() == like.stride()
        assert torch.equal(restored, value)


def test_a_state_restored_in_inference_mode_can_be_trained() -> None:
    old, new = Problem("Adam", torch.float32, 1), Problem("Adam", torch.float32, 2)
    old.step(1)
    plain = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        state = restore({**new.state(), "x": torch.zeros(2)}, snapshot({**old.state(), "x": plain}))
    for problem in (old, new):
        problem.step(2)
    (state["x"] * torch.ones(2, requires_grad=True)).sum().backward()
    assert bits(new.state()) == bits(old.state())


def test_an_expanded_buffer_is_restored() -> None:
    def make(k: float) -> torch.nn.Module:
        module = torch.nn.Linear(2, 2)
        module.register_buffer("scale", torch.full((1, 3), k).expand(4, 3))
        return module

    module: Any = make(2.0)
    restore({"m": module}, snapshot({"m": make(3.0)}))
    assert module.scale.stride() == (0, 1)
    assert module.scale.tolist() == [[3.0] * 3] * 4


def test_a_nested_tensor_is_refused_by_its_path() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(UnsupportedLeafError, match=r"a/b: a tensor of layout .*, nested"):
        flatten({"a": {"b": nested}})


class Named(torch.Tensor):
    """A tensor subclass with a method, which may get attributes."""


def test_a_tensor_subclass_keeps_its_class_or_is_refused() -> None:
    value = torch.ones(2).as_subclass(Named)
    assert (
        type(restore({"x": torch.zeros(2).as_subclass(Named)}, snapshot({"x": value}))["x"])
        is Named
    )
    value.scale = 3  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedLeafError, match=r"x: a tensor of the class .*Named has more"):
        flatten({"x": value})


class Extra(torch.nn.Module):
    """A module with extra state of every kind."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), float(k)))
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        if state == "refuse":
            raise RuntimeError("not this one")
        self.extra = state


EXTRAS = [
    {"scale": torch.tensor(2.0), "history": [1, 2.5], "k": {1: b"\0\xff", "deep": {"a": ()}}},
    {"a": 1, "b": {"c": 2}},
    [torch.ones(2), None],
    torch.arange(3),
    b"bytes",
    7,
    None,
    {},
    "text",
]


@pytest.mark.parametrize("extra", EXTRAS, ids=repr)
@pytest.mark.parametrize("fresh", [None, {"other": [1]}, [2]], ids=repr)
def test_extra_state_of_any_structure_comes_back(extra: Any, fresh: Any) -> None:
    old, new = torch.nn.Sequential(Extra(1)), torch.nn.Sequential(Extra(2))
    old[0].extra, new[0].extra = extra, fresh
    restore({"m": new}, snapshot({"m": old}))
    assert bits(new) == bits(old)
    assert repr(new[0].extra) == repr(extra)


def test_extra_state_that_is_refused_changes_nothing() -> None:
    old = {"a": torch.nn.Linear(2, 2), "b": Extra(1), "c": torch.nn.Linear(2, 2), "n": [1]}
    new = {"a": torch.nn.Linear(2, 2), "b": Extra(2), "c": torch.nn.Linear(2, 2), "n": [2]}
    old["b"].extra = "refuse"
    before = bits(new)
    with pytest.raises(StateError, match=r"b: a .*Extra did not take the state") as caught:
        restore(new, snapshot(old))
    assert "not this one" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert bits(new) == before != bits(old)


def test_a_lazy_module_is_refused_at_the_save_and_made_by_a_restore() -> None:
    with pytest.raises(UnsupportedLeafError, match="m/0/weight: a lazy parameter without a shape"):
        flatten({"m": torch.nn.Sequential(torch.nn.LazyLinear(3))})
    old = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    old(torch.ones(2, 4))
    new = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    restore({"m": new}, snapshot({"m": old}))
    assert bits(new) == bits(old)
    assert torch.equal(new.eval()(torch.ones(2, 4)), old.eval()(torch.ones(2, 4)))


def test_a_lazy_module_is_untouched_when_another_member_does_not_fit() -> None:
    old = torch.nn.LazyLinear(3)
    old(torch.ones(2, 4))
    new: Any = torch.nn.LazyLinear(3)
    with pytest.raises(MismatchError, match="other/weight: expected"):
        restore(
            {"m": new, "other": torch.nn.Linear(1, 1)},
            snapshot({"m": old, "other": torch.nn.Linear(2, 1)}),
        )
    assert new.has_uninitialized_params()


def test_names_of_wrappers_are_left_out_of_paths() -> None:
    def plain(k: int) -> torch.nn.Module:
        torch.manual_seed(k)
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def inner_compiled(k: int) -> torch.nn.Module:
        module = plain(k)
        module[1] = torch.compile(module[1], backend="eager")  # type: ignore[index]
        return module

    kinds = {
        "plain": plain,
        "compiled": lambda k: torch.compile(plain(k), backend="eager"),
        "parallel": lambda k: torch.nn.DataParallel(plain(k)),
        "both": lambda k: torch.compile(torch.nn.DataParallel(plain(k)), backend="eager"),
        "inner": inner_compiled,
    }
    expected = bits({"m": plain(1)})
    for saved in kinds.values():
        assert bits({"m": saved(1)}) == expected
        for target in kinds.values():
            new = target(2)
            restore({"m": new}, snapshot({"m": saved(1)}))
            assert bits({"m": new}) == expected


def test_a_submodule_called_module_keeps_its_name() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(1, 1)

    assert set(flatten(Holder())) == {"module/weight", "module/bias"}
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    assert set(flatten(averaged)) == {"n_averaged", "module/weight", "module/bias"}


def test_tied_weights_stay_tied_and_untied_ones_are_refused() -> None:
    def make(k: float, *, tied: bool) -> Any:
        module: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        torch.nn.init.constant_(module[0].weight, k)
        if tied:
            module[1].weight = module[0].weight
        return module

    new = make(2.0, tied=True)
    restore({"m": new}, snapshot({"m": make(1.0, tied=True)}))
    assert new[1].weight is new[0].weight  # type: ignore[index]
    before = bits(new)
    with pytest.raises(MismatchError, match="m/1/weight: is one tensor with 0/weight"):
        restore({"m": new}, snapshot({"m": make(3.0, tied=False)}))
    assert bits(new) == before


def test_parametrizations_and_buffers_are_saved_as_in_the_state_dict() -> None:
    def make(k: int) -> Any:
        torch.manual_seed(k)
        module = torch.nn.Sequential(
            torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3)),
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3)),
            torch.nn.BatchNorm1d(3),
        )
        module.register_buffer("lost", torch.full((1,), float(k)), persistent=False)
        module(torch.randn(4, 3))
        return module

    old, new = make(1), make(2)
    restore(new, snapshot(old))
    assert bits(new) == bits(old)
    assert new.lost.item() == 2.0
    x = torch.ones(2, 3)
    assert torch.equal(new.eval()(x), old.eval()(x))


def test_a_meta_module_with_code_for_loading_is_refused_before_anything_changes() -> None:
    class OwnCode(torch.nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:  # type: ignore[override]
            super()._load_from_state_dict(*args)

    with torch.device("meta"):
        meta = OwnCode(2, 2)
    other = torch.nn.Linear(2, 2)
    before = bits(other)
    saved = snapshot({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match="b/weight: is on the meta device"):
        restore({"a": other, "b": meta}, saved)
    assert bits(other) == before


def test_a_module_that_converts_what_it_loads_is_not_restored_silently() -> None:
    class Converting(torch.nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:  # type: ignore[override]
            state, prefix = args[:2]
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
            super()._load_from_state_dict(*args)

    other = torch.nn.Linear(2, 2)
    new = {"a": other, "b": Converting(2, 2)}
    before = bits(new)
    saved = snapshot({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match=r"b/weight: stored .* the object has other bits"):
        restore(new, saved)
    assert bits(new) == before


def test_an_empty_tensor_can_have_a_size_after_a_save_or_a_restore(tmp_path: Path) -> None:
    saved, restored = torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(1)
    for module in (saved, restored):
        module.register_buffer("least", torch.tensor([]))
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, {"net": saved})
        manager.restore(like={"net": restored})
    for module in (saved, restored):
        assert module.get_buffer("least").resize_(3).shape == (3,)


def test_a_restore_does_not_depend_on_the_default_device(tmp_path: Path) -> None:
    state = {"x": torch.arange(3.0), "net": torch.nn.Linear(2, 1)}
    with CheckpointManager(tmp_path, recipe={}) as manager:
        manager.save(1, state)
        like = {"x": torch.zeros(3), "net": torch.nn.Linear(2, 1)}
        with torch.device("meta"):
            restored, _ = manager.restore(like=like)
    assert restored["x"].tolist() == [0, 1, 2]
    assert torch.equal(restored["net"].weight, state["net"].weight)


def compressed(layer: torch.nn.Module) -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = torch.nn.parallel.DistributedDataParallel(layer)
    hook_state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    return {"member": model}


def zero(layer: torch.nn.Module) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return {"member": ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Adam, lr=0.1)}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "reason"), [(compressed, "keeps errors"), (zero, "no `state_dict` of all")]
)
def test_what_keeps_state_that_no_checkpoint_gets_is_refused(
    tmp_path: Path, make: Any, reason: str
) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state = make(torch.nn.Linear(2, 2))
        with (
            CheckpointManager(tmp_path) as manager,
            pytest.raises(UnsupportedLeafError, match=f"member: .*{reason}"),
        ):
            manager.restore_or_initialize(state)
    finally:
        torch.distributed.destroy_process_group()


class OnGpu:
    """What `on_host` asks of a tensor on a GPU."""

    is_cuda = True

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def cpu(self) -> str:
        return "in fresh memory"


def test_what_cannot_be_pinned_is_copied_into_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[OnGpu] = []

    def refuse(like: OnGpu, **options: Any) -> None:
        assert options == {"device": "cpu", "pin_memory": True}
        pinned.append(like)
        raise RuntimeError("out of memory")

    taken = {"allocated_bytes.current": 0}
    monkeypatch.setattr("torch.cuda.host_memory_stats", lambda: taken, raising=False)
    monkeypatch.setattr("torch.empty_like", refuse)
    large = OnGpu(2**21)
    assert on_host(large) == on_host(OnGpu(2**10)) == on_host(OnGpu(2**60)) == "in fresh memory"
    assert pinned == [large]
    taken["allocated_bytes.current"] = 2**60
    assert on_host(large) == "in fresh memory"
    assert pinned == [large]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU of CUDA here")
def test_a_save_of_a_gpu_has_the_bits_of_its_moment(tmp_path: Path) -> None:
    values = [torch.randn(2**20, device="cuda"), torch.randn(999, 1024, device="cuda").t()]
    kept = []
    with CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in range(3):
            kept.append([value.cpu() for value in values])
            manager.save(step, {"values": values})
            for value in values:
                value.mul_(1.5)
    with CheckpointManager(tmp_path) as manager:
        for step, before in enumerate(kept):
            state = {"values": [torch.empty_like(each) for each in before]}
            restored = manager.restore(step, state).state["values"]
            assert all(map(torch.equal, restored, before))
