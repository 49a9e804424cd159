"""The shared generators of Python, NumPy and PyTorch are restored with a checkpoint."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from perdure import Checkpoint, CheckpointManager, ManagerOptions, RunConfig, Trainer, verify_run
from perdure.checkpoint import saver
from perdure.state import process_random
from perdure.store import Run
from perdure.torch import MirroredStrategy
from perdure.train import CheckpointConfig
from pretend import Pretend, play

STEPS, KILLED_AFTER, EVERY = 12, 7, 3
OFF = ManagerOptions(save_random_state=False)


pytestmark = pytest.mark.usefixtures("generators_stay")


def new_process(seed: int) -> None:
    """Seed the shared generators, as another process would have them."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def bits(*values: Any) -> list[bytes]:
    return [np.asarray(value.detach()).tobytes() for value in values]


# --- PyTorch's loop of three lines, with dropout ---


def torch_loop(directory: Path, stop: int, options: ManagerOptions | None) -> list[bytes]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    state = Checkpoint(model=model, optimizer=torch.optim.Adam(model.parameters()))
    with CheckpointManager(directory, save_interval_steps=EVERY, options=options) as manager:
        state, start = manager.restore_or_initialize(state)
        for step in range(start, stop):
            state.optimizer.zero_grad()
            order = np.random.permutation(6)  # noqa: NPY002
            data = torch.full((4, 6), step + random.random())[:, order]
            (state.model(data) * torch.rand(4, 1)).sum().backward()
            state.optimizer.step()
            manager.save(step + 1, state)
    return bits(*model.state_dict().values())


def trained(loop: Callable[..., list[bytes]], path: Path, options: Any = None) -> tuple[Any, Any]:
    new_process(0)
    whole = loop(path / "whole", STEPS, options)
    new_process(0)
    loop(path / "killed", KILLED_AFTER, options)
    new_process(1)
    return whole, loop(path / "killed", STEPS, options)


def test_a_torch_loop_with_dropout_resumes_exactly(tmp_path: Path) -> None:
    whole, resumed = trained(torch_loop, tmp_path)
    assert resumed == whole
    for place in ("whole", "killed"):
        assert verify_run(Run(tmp_path / place)).problems == ()


def test_control_without_the_generators_a_torch_loop_with_dropout_differs(tmp_path: Path) -> None:
    whole, resumed = trained(torch_loop, tmp_path, OFF)
    assert resumed != whole


def trainer_loop(directory: Path, stop: int, options: ManagerOptions | None) -> list[bytes]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step_fn(state: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        return state, loss.item()

    checkpoint = CheckpointConfig(save_random_state=options is None)
    config = RunConfig(directory, save_checkpoints_steps=EVERY, checkpoint=checkpoint)
    state = Checkpoint(model=model, optimizer=optimizer)
    Trainer(step_fn, state, lambda step: torch.full((4, 6), float(step)), config).train(stop)
    return bits(*model.state_dict().values())


@pytest.mark.parametrize("options", [None, OFF])
def test_a_trainer_without_a_strategy_resumes_exactly(
    tmp_path: Path, options: ManagerOptions | None
) -> None:
    whole, resumed = trained(trainer_loop, tmp_path, options)
    assert (resumed == whole) == (options is None)


def test_draws_of_the_initialisation_do_not_affect_a_resume(tmp_path: Path) -> None:
    def init() -> dict[str, Any]:
        return {"x": np.array([random.random() for _ in range(5)])}

    def loop(stop: int) -> Any:
        with CheckpointManager(tmp_path) as manager:
            state, start = manager.restore_or_initialize(init)
            for step in range(start, stop):
                # The generator makes two numbers and keeps one for the next call.
                state = {"x": state["x"] + random.gauss(0, 1)}
                manager.save(step + 1, state)
        return state["x"].tolist()

    new_process(0)
    source = random.Random(0)
    expected = np.array([source.random() for _ in range(5)])
    for _ in range(5):
        expected = expected + source.gauss(0, 1)
    loop(3)
    new_process(9)
    assert loop(5) == expected.tolist()


# --- where the generators are stored ---


def test_generators_are_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    state = {"x": np.arange(3)}
    for name, options in (("with", None), ("without", OFF)):
        with CheckpointManager(tmp_path / name, options=options) as manager:
            manager.save(1, state)
    stored, bare = (Run(tmp_path / name).manifest(1) for name in ("with", "without"))
    assert stored.fingerprint == bare.fingerprint
    assert stored.leaves[0].path == "x"
    assert [leaf.path for leaf in stored.process_leaves] == ["process/0/random"]
    assert bare.process_leaves == ()
    with CheckpointManager(tmp_path / "with") as manager:
        assert list(manager.restore(1).state) == ["x"]


def test_a_step_that_is_saved_again_gets_the_generators_of_the_second_save(tmp_path: Path) -> None:
    """As after an evaluation that draws, in a run that is preempted before its next step."""
    new_process(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": 1}, {"loss": 2.0})
        random.random()
        manager.save(1, {"x": 1}, {"accuracy": 1.0}, force=True)
        manager.wait_until_finished()
        assert manager.metrics(1) == {"loss": 2.0, "accuracy": 1.0}
    expected = random.random()
    new_process(1)
    with CheckpointManager(tmp_path) as manager:
        manager.restore()
    assert random.random() == expected
    assert verify_run(Run(tmp_path)).ok


def test_generators_keep_no_old_pack(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=2) as manager:
        for step in range(1, 7):
            manager.save(step, {"x": np.full(100, step)})
    assert len(list((tmp_path / "packs").iterdir())) == 2


def test_generators_write_no_pack_if_nothing_has_changed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"x": np.arange(10)})
    assert len(list((tmp_path / "packs").iterdir())) == 1


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_bit_generator_of_numpy_can_be_the_shared_one(kind: str) -> None:
    shared: Any = np.random
    shared.set_bit_generator(getattr(np.random, kind)(5))
    try:
        np.random.standard_normal()  # noqa: NPY002
        saved = process_random.capture()["numpy"]
        expected = np.random.standard_normal(5).tolist()  # noqa: NPY002
        assert process_random.restore_generator("numpy", saved) is None
        assert np.random.standard_normal(5).tolist() == expected  # noqa: NPY002
    finally:
        shared.set_bit_generator(np.random.MT19937(0))


# --- another topology ---


class Faked:
    """The generators of a group's processes, which are threads of one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: dict[int, bytes] = {}
        self.restored: dict[int, bytes] = {}
        monkeypatch.setattr(process_random, "capture", lambda: {"python": self._current()})
        monkeypatch.setattr(process_random, "restore_generator", self._restore_generator)
        self._thread = threading.local()

    def of(self, index: int) -> None:
        self._thread.index = index

    def _current(self) -> bytes:
        return self.states[self._thread.index]

    def _restore_generator(self, name: str, state: bytes) -> None:
        self.restored[self._thread.index] = state
        self.states[self._thread.index] = state


def saved_by(fake: Faked, path: Path, states: list[bytes], drawn: list[bytes] | None) -> None:
    def program(processes: Pretend) -> None:
        fake.of(processes.index)
        fake.states[processes.index] = states[processes.index]
        with CheckpointManager(path, processes=processes) as manager:
            manager.restore_or_initialize({"x": 0})
            if drawn:
                fake.states[processes.index] = drawn[processes.index]
            manager.save(1, {"x": 1})

    assert play(len(states), program) == [None] * len(states)


def resumed_by(fake: Faked, path: Path, count: int) -> tuple[dict[int, bytes], list[str]]:
    fake.restored.clear()

    def program(processes: Pretend) -> None:
        fake.of(processes.index)
        fake.states[processes.index] = b"fresh%d" % processes.index
        with CheckpointManager(path, processes=processes) as manager:
            manager.restore_or_initialize({"x": 0})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert play(count, program) == [None] * count
    return dict(fake.restored), [str(warning.message) for warning in caught]


def test_each_process_of_a_group_restores_its_own_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Faked(monkeypatch)
    saved_by(fake, tmp_path, [b"a", b"b", b"c"], [b"A", b"B", b"C"])
    assert [leaf.path for leaf in Run(tmp_path).manifest(1).process_leaves] == [
        f"process/{process}/random" for process in range(3)
    ]
    assert resumed_by(fake, tmp_path, 3) == ({0: b"A", 1: b"B", 2: b"C"}, [])
    assert verify_run(Run(tmp_path)).problems == ()


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_processes_drops_the_generators_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    fake = Faked(monkeypatch)
    saved_by(fake, tmp_path, [b"a", b"b"], [b"A", b"B"])
    restored, warned = resumed_by(fake, tmp_path, count)
    assert restored == {}
    assert len(warned) == 1
    assert "differ from those of an uninterrupted run" in warned[0]
    assert "saved by 2 processes" in warned[0]


def test_generators_that_the_run_never_draws_from_cause_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Faked(monkeypatch)
    saved_by(fake, tmp_path, [b"a", b"b"], None)
    assert resumed_by(fake, tmp_path, 3) == ({}, [])


def test_generators_that_are_equal_in_all_processes_continue_in_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Faked(monkeypatch)
    saved_by(fake, tmp_path, [b"a", b"a"], [b"A", b"A"])
    assert resumed_by(fake, tmp_path, 3) == ({0: b"A", 1: b"A", 2: b"A"}, [])


def test_a_resume_remembers_which_generators_were_drawn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Faked(monkeypatch)
    saved_by(fake, tmp_path, [b"a", b"b"], [b"A", b"B"])

    def program(processes: Pretend) -> None:
        fake.of(processes.index)
        fake.states[processes.index] = b"fresh"
        with CheckpointManager(tmp_path, processes=processes) as manager:
            _, step = manager.restore_or_initialize({"x": 0})
            manager.save(step + 1, {"x": 2})  # without drawing

    play(2, program)
    _, warned = resumed_by(fake, tmp_path, 1)
    assert len(warned) == 1


def test_a_generator_of_a_missing_device_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = process_random.capture
    used = iter([bytes(16), bytes(16), bytes([1] * 16)])
    monkeypatch.setattr(process_random, "capture", lambda: {**real(), "torch cuda:3": next(used)})
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"x": 0})
        manager.save(1, {"x": 1})
        expected = random.random()
    monkeypatch.setattr(process_random, "capture", real)
    random.seed(99)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.warns(UserWarning, match=r"cuda:3 .*CUDA devices") as warned,
    ):
        manager.restore()
    assert len(warned) == 1
    assert random.random() == expected, "the others are restored all the same"


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_draws_of_callbacks_under_way_belong_to_the_step_that_is_saved(
    is_waited_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The callback of a program that JAX computes in the background.
    monkeypatch.setattr(jax, "effects_barrier", lambda: np.random.random())  # noqa: NPY002
    if not is_waited_for:
        monkeypatch.setattr(saver, "finish_callbacks", lambda: None)  # the control
    new_process(3)
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore_or_initialize({"x": 1.0})
        manager.save(1, state)
    if not is_waited_for:
        jax.effects_barrier()
    following = np.random.random()  # noqa: NPY002
    new_process(5)
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize({"x": 1.0})
    assert (np.random.random() == following) is is_waited_for  # noqa: NPY002


def test_the_steps_of_a_strategy_do_not_count_as_draws(tmp_path: Path) -> None:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"sum": torch.nn.functional.dropout(state["w"], 0.5)}

    def update(state: Any, total: Any) -> Any:
        return {"w": state["w"] + total["sum"]}, {}

    try:
        strategy = MirroredStrategy(replicas=2)
        step = strategy.step(grad, update)
        with CheckpointManager(tmp_path, recipe=strategy.recipe()) as manager:
            state, _ = manager.restore_or_initialize({"w": torch.ones(5)})
            for number, drawing in enumerate((False, True)):
                state, _ = step(state, strategy.keys(number))
                if drawing:
                    torch.rand(1)  # the control
                manager.save(number, state)
        first, second = (Run(tmp_path).load(number).process_leaves for number in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    drawn = [
        {
            name
            for name, record in process_random.saved_generators(generator)[0].items()
            if record.drawn
        }
        for generator in (first, second)
    ]
    assert drawn == [set(), {"torch"}]
