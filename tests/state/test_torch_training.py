"""What a PyTorch loop holds resumes with the bits of an uninterrupted run, or is refused by path."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from test_torch_objects import OPTIMIZERS, Problem, bits
from torch.optim import lr_scheduler, swa_utils

from perdure.errors import UnsupportedLeafError
from perdure.state import flatten, restore, snapshot

pytestmark = pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler", "ignore:torch.ao.quantization", "ignore:.*deprecated"
)


def takes(name: str, option: str) -> bool:
    return option in inspect.signature(getattr(torch.optim, name)).parameters


VARIANTS = [
    (name, {option: value})
    for name in OPTIMIZERS
    for option, value in [
        ("foreach", True),
        ("foreach", False),
        ("fused", True),
        ("maximize", True),
    ]
    if takes(name, option)
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda part: str(part))
def test_every_variant_of_an_optimizer_resumes(name: str, options: dict[str, bool]) -> None:
    whole, resumed = Problem(name, torch.float32, 1, **options), Problem(name, torch.float32, 2)
    whole.step(0)
    saved = snapshot(whole.state())
    resumed.take(restore(resumed.state(), saved))  # its own options are those of the checkpoint now
    for problem in (whole, resumed):
        problem.step(1)
    assert bits(resumed.state()) == bits(whole.state()) != bits(saved)


def test_some_optimizers_have_every_variant() -> None:
    assert {("Adam", "fused"), ("SGD", "foreach"), ("RAdam", "maximize")} <= {
        (name, option) for name, options in VARIANTS for option in options
    }


class GradualWarmup(lr_scheduler.LRScheduler):
    """A scheduler that holds another one as an attribute, as those of packages do."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch < 3:
            return [rate * self.last_epoch / 3 for rate in self.base_lrs]
        self.after.step()
        return self.after.get_last_lr()


SCHEDULERS: dict[str, Any] = {
    "GradualWarmup": lambda o: GradualWarmup(o, lr_scheduler.CosineAnnealingLR(o, 5)),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.6, 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, 3),
}


class Averaging(torch.optim.SGD):
    """Has an average of each parameter, under its `id` as the widespread Lookahead, or its number."""

    key: Any = id

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        kept = {self.key(each): each.detach() for each in self.param_groups[0]["params"]}
        return {**state, "averages": kept}


def test_a_state_dict_with_addresses_of_parameters_is_refused() -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = Averaging(net.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedLeafError, match=r"^optimizer: its `state_dict` has `id\(\)`s of parameters"
    ):
        snapshot({"optimizer": optimizer})
    optimizer.key = lambda each: each.ndim  # type: ignore[method-assign]
    assert "optimizer/averages/2" in snapshot({"optimizer": optimizer})


def test_every_scheduler_of_torch_is_tested() -> None:
    classes = {
        name
        for name in lr_scheduler.__all__
        if inspect.isclass(kind := getattr(lr_scheduler, name))
        and issubclass(kind, lr_scheduler.LRScheduler)
        and kind is not lr_scheduler.LRScheduler
    }
    assert classes - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes_before_and_after_its_steps(name: str) -> None:
    def make(seed: int) -> dict[str, Any]:
        problem = Problem("SGD", torch.float32, seed, lr=0.5, momentum=0.9)
        return {"optimizer": problem.optimizer, "schedule": SCHEDULERS[name](problem.optimizer)}

    def step(state: dict[str, Any]) -> None:
        state["optimizer"].step()
        plateau = isinstance(state["schedule"], lr_scheduler.ReduceLROnPlateau)
        state["schedule"].step(*[1.0] * plateau)

    whole = make(1)
    for _ in range(5):
        resumed = make(2)
        restore(resumed, snapshot(whole))
        assert bits(resumed) == bits(whole)
        before = bits(whole)
        for state in (whole, resumed):
            step(state)
        assert bits(resumed) == bits(whole) != before


class Loop:
    """Autocast, a scaler, accumulation, clipping, an average and two schedules."""

    def __init__(self, seed: int, enabled: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**40, growth_interval=2, enabled=enabled
        )
        self.schedule = lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.averaged = swa_utils.AveragedModel(
            self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(2):
            batch = torch.randn(3, 4, generator=generator)
            with torch.autocast(
                "cpu", torch.float16 if self.scaler.is_enabled() else torch.bfloat16
            ):
                loss = self.model(batch).square().mean() / 2
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.averaged.update_parameters(self.model)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loop_with_everything_of_amp_resumes_at_every_step(enabled: bool) -> None:
    whole = Loop(1, enabled)
    scales = set()
    for number in range(4):
        resumed = Loop(2, enabled)
        restore(vars(resumed), snapshot(vars(whole)))
        for loop in (whole, resumed):
            loop.step(number)
        assert bits(vars(resumed)) == bits(vars(whole))
        scales.add(whole.scaler.get_scale())
    assert len(scales) > 1 or not enabled, "the control: steps were skipped, and the scale changed"


def parallel(module: torch.nn.Module) -> torch.nn.Module:
    """A `DistributedDataParallel` without a group, which only its constructor needs."""
    kind = torch.nn.parallel.DistributedDataParallel
    wrapped = kind.__new__(kind)
    torch.nn.Module.__init__(wrapped)
    wrapped.module = module
    return wrapped


@pytest.mark.parametrize("wrap", [parallel, lambda m: torch.compile(parallel(m), backend="eager")])
def test_a_module_in_ddp_has_the_names_of_the_plain_one(wrap: Any) -> None:
    def plain(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    wrapped = wrap(plain(1))
    assert bits({"m": wrapped}) == bits({"m": plain(1)})
    for saved, target in [(wrapped, plain(2)), (plain(1), wrap(plain(2)))]:
        restore({"m": target}, snapshot({"m": saved}))
        assert bits({"m": target}) == bits({"m": plain(1)})


def test_a_compiled_module_resumes_as_a_plain_one_and_back() -> None:
    def make(seed: int, compiled: bool) -> dict[str, Any]:
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        run: Any = torch.compile(module, backend="eager") if compiled else module
        return {"m": run, "o": torch.optim.SGD(run.parameters(), 0.1, momentum=0.9)}

    def step(state: dict[str, Any]) -> None:
        state["o"].zero_grad()
        state["m"](torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        state["o"].step()

    for saved, target in [(True, False), (False, True)]:
        whole, resumed = make(1, saved), make(2, target)
        step(whole)
        restore(resumed, snapshot(whole))
        for state in (whole, resumed):
            step(state)
        assert bits(resumed) == bits(whole)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1 + 2j, -0.0j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor([3, 2**60]),
        torch.zeros(0, 3),
        torch.arange(6.0).reshape(2, 3).t()[1:],
        torch.tensor([float("nan"), -0.0, float("inf")]),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_tensors_of_every_dtype_and_layout_in_memory_come_back(value: torch.Tensor) -> None:
    target = torch.zeros_like(value, memory_format=torch.contiguous_format)
    restored = restore({"x": target}, snapshot({"x": value}))["x"]
    assert restored.dtype == value.dtype
    assert bits({"x": restored}) == bits({"x": value})


def test_tensors_without_an_exact_form_are_refused_by_path() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        rows = torch.eye(2).to_sparse_csr()
    for value in (torch.eye(2).to_sparse(), rows, quantized):
        with pytest.raises(UnsupportedLeafError, match=r"a/0: a tensor of layout"):
            flatten({"a": [value]})
        module = torch.nn.Linear(1, 1)
        module.register_buffer("odd", value)
        with pytest.raises(UnsupportedLeafError, match=r"m/odd: a tensor of layout"):
            flatten({"m": module})


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_fresh_module_on_the_meta_device_takes_a_state(is_emptied: bool) -> None:
    old = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    old[1].weight = old[0].weight
    with torch.device("meta"):
        new: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        new[1].weight = new[0].weight
    saved = snapshot({"m": old})
    if is_emptied:
        new.to_empty(device="cpu")
        new[1].weight = new[0].weight  # which `to_empty` has untied
    restore({"m": new}, saved)
    assert bits({"m": new}) == bits({"m": old})
    assert new[1].weight is new[0].weight
    assert (
        restore({"x": torch.zeros(2, device="meta")}, snapshot({"x": torch.ones(2)}))["x"].sum()
        == 2
    )


@pytest.mark.parametrize("shape", [(1, 5), (0, 5), (1, 1)])
def test_a_slice_of_one_element_is_a_leaf(shape: tuple[int, int]) -> None:
    whole = torch.arange(3.0, 3 + shape[0] * shape[1]).reshape(shape)
    part = whole[:, 0]
    assert part.is_contiguous(), "as PyTorch counts, whatever its stride"
    [leaf] = flatten({"w": part}).values()
    assert leaf.shape == (shape[0],)
    assert bytes(leaf.data) == part.clone().numpy().tobytes()
    assert torch.equal(restore({"w": part}, snapshot({"w": part}))["w"], part)
