"""`compile=`: one program for every topology, and none that depends on what was compiled before.

The backend of these tests runs the captured operations and scales what they return, so that a compiled
replica has other bits than a plain one, and a program for changing shapes than one for a single shape.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.utils.flop_counter
from torch import nn

from perdure import CheckpointManager
from perdure.data import ArrayDataset
from perdure.distribute import PerReplica
from perdure.errors import RecipeMismatchError, StateError, TopologyError
from perdure.torch import MirroredStrategy, OneDeviceStrategy, apply_gradients, gradients

V = 4
BACKEND = "scales"
programs: list[bool] = []  # of each program, whether it is for changing shapes


@torch._dynamo.register_backend(name=BACKEND)
def _scales(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    changing = any(isinstance(value, torch.SymInt) for value in inputs)
    programs.append(changing)
    factor = 2.0 if changing else 0.5

    def run(*args: Any) -> Any:
        return [out * factor if out.is_floating_point() else out for out in graph(*args)]

    return run


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    names = (
        "fail_on_recompile_limit_hit",
        "suppress_errors",
        "trace_autograd_ops",
        "skip_nnmodule_hook_guards",
    )
    before = {name: getattr(torch._dynamo.config, name) for name in names}
    torch._dynamo.reset()
    programs.clear()
    clear_flags()
    yield
    for name, value in before.items():
        setattr(torch._dynamo.config, name, value)
    torch._dynamo.reset()
    clear_flags()


def clear_flags() -> None:
    """Modes of overlapping threads may have left PyTorch's flags set, here or in other files."""
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
    for flag in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"):
        setattr(dispatch, flag, False)
    dispatch._is_in_any_mode_without_ignore_compile_internals = False
    dispatch.set_is_in_mode_without_ignore_compile_internals(False)


def data(rows: int = 2 * V) -> ArrayDataset:
    x = np.random.default_rng(0).normal(size=(10 * rows, 8)).astype(np.float32)
    return ArrayDataset(x, rows)


def grad(state: Any, batch: Any, key: Any) -> Any:
    loss = (state["net"](batch[0])[:, 0] * batch[1]).sum()
    return {"grads": gradients(loss, state["net"]), "loss": loss}


def update(state: Any, total: Any) -> Any:
    apply_gradients(state["net"], total["grads"], 0.01)
    state["sgd"].step()
    return {**state, "step": state["step"] + 1}, total["loss"]


def start(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1)
    )
    return {"net": net, "sgd": torch.optim.SGD(net.parameters(), 0.1, 0.9), "step": 0}


def bits(state: Any) -> bytes:
    return b"".join(value.numpy().tobytes() for value in state["net"].state_dict().values())


def train(strategy: Any, state: Any, fn: Any = grad, steps: range = range(3)) -> bytes:
    train_step = strategy.step(fn, update)
    for step in steps:
        state, _ = train_step(state, strategy.batch(data(), step))
    return bits(state)


def test_any_number_of_devices_has_the_bits_of_one() -> None:
    for dropout in (0.0, 0.5):
        plain = train(MirroredStrategy(1, V), start(dropout))
        compiled = [
            train(MirroredStrategy(devices, V, compile=BACKEND), start(dropout))
            for devices in (1, 2, 4)
        ]
        assert {*compiled} == {compiled[0]}
        assert compiled[0] != plain, "the compiled program did not run"
    assert programs == [False, False], "one program for each network, whatever the devices"


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    strategy = MirroredStrategy(2, V, compile=BACKEND)
    expected = train(strategy, start(0.5), steps=range(4))
    state = start(0.5)
    for part, devices in ((range(2), 1), (range(2, 4), 4)):
        torch._dynamo.reset()  # another process has seen nothing of this one
        strategy = MirroredStrategy(devices, V, compile=BACKEND)
        with CheckpointManager(tmp_path, recipe=strategy.recipe(data())) as manager:
            state, first = manager.restore_or_initialize(state)
            assert first == part[0]
            result = train(strategy, state, steps=part)
            state = {**state, "step": part[-1] + 1}
            manager.save(part[-1] + 1, state)
    assert result == expected
    for other in (None, "eager"):
        recipe = MirroredStrategy(1, V, compile=other).recipe(data())
        with (
            CheckpointManager(tmp_path, recipe=recipe) as manager,
            pytest.raises(RecipeMismatchError, match=f"settings: .*compile={BACKEND}"),
        ):
            manager.restore_or_initialize(state)


def loss_of(state: Any, batch: Any, key: Any) -> Any:
    return {"loss": (batch[0].sum(1) * batch[1]).sum()}


def logged(state: Any, total: Any) -> Any:
    return state, total["loss"]


def programs_for(step: Any, rows: tuple[int, ...]) -> list[bool]:
    """The programs that are made for shares of these numbers of rows, one after the other."""
    torch._dynamo.reset()
    programs.clear()
    for number, count in enumerate(rows):
        share = (np.ones((count, 8), np.float32), np.ones(count, np.float32))
        step({}, PerReplica((share,), (0,), number))
    return list(programs)


def test_the_program_does_not_depend_on_the_shapes_seen_before() -> None:
    """Control: by default torch.compile takes another program for the second shape."""
    strategy = OneDeviceStrategy(replicas=1, compile=BACKEND)
    assert programs_for(strategy.step(loss_of, logged), (4, 6)) == [False, False]
    with pytest.warns(RuntimeWarning, match="sees the shapes of its batches in another order"):
        by_user = OneDeviceStrategy(replicas=1).step(
            torch.compile(loss_of, backend=BACKEND), logged
        )
    assert programs_for(by_user, (4, 6)) == [False, True]


def test_more_programs_than_allowed_are_an_error_and_not_a_plain_step() -> None:
    def by_number(state: Any, batch: Any, key: Any) -> Any:
        return {"loss": batch[0].sum() * state["step"]}

    strategy, state = OneDeviceStrategy(replicas=1, compile=BACKEND), {"step": 1}
    step = strategy.step(
        by_number, lambda state, total: ({"step": state["step"] + 1}, total["loss"])
    )
    for number in range(8):
        state, _ = step(state, strategy.batch(data(), number))
    with pytest.raises(StateError, match="by_number: expected at most 8 programs"):
        step(state, strategy.batch(data(), 8))
    assert len(programs) == 8
    assert not any(programs)


def test_a_mode_under_which_nothing_is_compiled_is_refused() -> None:
    strategy, state = OneDeviceStrategy(replicas=V, compile=BACKEND), start()
    step = strategy.step(grad, update)
    with (
        torch.utils.flop_counter.FlopCounterMode(display=False),
        pytest.raises(StateError, match="expected no TorchDispatchMode"),
    ):
        step(state, strategy.batch(data(), 0))


def test_a_flag_that_overlapping_modes_of_threads_left_set_is_no_mode_around_the_step() -> None:
    modes = [torch.utils.flop_counter.FlopCounterMode(display=False) for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for thread, mode in zip((one, other), modes, strict=True):
            thread.submit(mode.__enter__).result()
        for thread, mode in zip((one, other), modes, strict=True):
            thread.submit(mode.__exit__, None, None, None).result()
    strategy, state = OneDeviceStrategy(replicas=V, compile=BACKEND), start()
    with pytest.raises(StateError, match="leave set"):
        strategy.step(grad, update)(state, strategy.batch(data(), 0))


def test_backends_that_do_not_exist_or_do_not_run_are_refused() -> None:
    with pytest.raises(TopologyError, match="compile: expected None or a backend"):
        MirroredStrategy(compile="inducter")
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(TopologyError, match="is switched off"),
    ):
        MirroredStrategy(compile=BACKEND)


def test_what_the_user_has_compiled_is_a_warning() -> None:
    strategy = OneDeviceStrategy(replicas=V)
    with pytest.warns(RuntimeWarning, match="^grad is compiled by torch.compile, and the recipe"):
        strategy.step(torch.compile(grad, backend=BACKEND), update)
    state = start()
    state["net"] = torch.compile(state["net"], backend=BACKEND)
    with pytest.warns(RuntimeWarning, match="^a OptimizedModule of the state is compiled"):
        strategy.step(grad, update)(state, strategy.batch(data(), 0))


def test_each_function_has_programs_of_its_own() -> None:
    """PyTorch counts the programs of a code object, and allows eight."""
    strategy = OneDeviceStrategy(replicas=1, compile="eager")
    shares = strategy.batch(data(), 0)
    for factor in range(10):

        def times(state: Any, batch: Any, key: Any, factor: int = factor) -> Any:
            return {"g": batch[0].sum() * factor}

        strategy.step(times, lambda s, t: (s, t["g"]))({"w": torch.zeros(2)}, shares)


def forward_hook(net: Any) -> None:
    net[0].register_forward_hook(lambda _module, _args, output: output * 0.5)


def backward_hook(net: Any) -> None:
    net[4].register_full_backward_hook(lambda _module, grads, _outputs: (grads[0] * 0.5,))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of dynamo, for a hook
@pytest.mark.parametrize("change", [forward_hook, backward_hook])
def test_a_step_sees_a_hook_that_changed_as_a_new_process_does(change: Any) -> None:
    batches = data()

    def after(changed: bool, anew: bool) -> bytes:
        torch._dynamo.reset()
        state = start()
        strategy: Any = OneDeviceStrategy("cpu", replicas=V, compile="eager")
        step = strategy.step(grad, update)
        for number in range(2):
            if number == 1 and changed:
                change(state["net"])
            if number == 1 and anew:
                torch._dynamo.reset()
                step = OneDeviceStrategy("cpu", replicas=V, compile="eager").step(grad, update)
            state, _ = step(state, strategy.batch(batches, number))
        return bits(state)

    expected = after(changed=True, anew=True)
    assert after(changed=True, anew=False) == expected
    assert after(changed=False, anew=False) != expected
