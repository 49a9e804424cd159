"""`strategy.step(..., audit=...)`: wrong numbers are found before `update`, and the device is named."""

from __future__ import annotations

import itertools
import json
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_engine import NumpyEngine

from perdure.data import ArrayDataset
from perdure.distribute import Strategy
from perdure.distribute.audit import AuditOptions, ComputedContribution, Draw, draw, judge
from perdure.distribute.engine import Stream
from perdure.distribute.topology import split
from perdure.errors import (
    ArgumentError,
    SilentCorruptionError,
    StateError,
    TopologyError,
    TrainError,
)
from perdure.runtime import excluded_devices, heartbeats
from perdure.train import RunConfig, Trainer
from pretend import Pretend, play

V = 6
DATA = ArrayDataset({"x": np.arange(48, dtype=np.float32)}, batch_size=12, seed=1)


def grad(state: Any, batch: Any, key: Any) -> Any:
    noise = key.normal(size=3).astype(np.float32)
    return {
        "g": (batch["x"] * batch["weight"]).sum() * state["w"] + noise,
        "n": batch["weight"].sum(),
    }


def update(state: Any, total: Any) -> Any:
    return {"w": state["w"] - np.float32(0.1) * total["g"] / total["n"]}, {}


class FaultyEngine(NumpyEngine):
    """Flips one bit of a contribution in some of the computations of one replica in one step.

    Args:
        devices: Local devices.
        processes: The group.
        wrong: For each wrong computation of a replica (0 is that which is added), the bit.
    """

    def __init__(
        self,
        devices: int,
        processes: Any = None,
        wrong: dict[tuple[int, int, int], int] | None = None,
    ) -> None:
        super().__init__(devices)
        self.wrong = wrong or {}
        self.fired = 0
        self.computed: dict[tuple[int, int], int] = {}
        if processes is not None:
            self.processes = processes
            self.devices_per_process = (devices,) * processes.count

    def grad(self, fn: Any, state: Any, share: Any, stream: Stream) -> Any:
        value = super().grad(fn, state, share, stream)
        at = (stream.step, stream.replica)
        number = self.computed.get(at, 0)
        self.computed[at] = number + 1
        bit = self.wrong.get((*at, number))
        if bit is not None:
            self.fired += 1
            value["g"].view(np.uint32)[1] ^= np.uint32(1 << bit)
        return value

    def exchange(self, roots: list[Any], counts: tuple[int, ...], merge: Any = None) -> Any:
        sent = self.processes.gather(pickle.dumps(roots))
        values = [pickle.loads(data) for data in sent]
        return values if merge is None else merge(values)


def train(engine: NumpyEngine, steps: int, audit: float | None, **options: Any) -> np.ndarray:
    strategy = Strategy(engine, V)
    train_step = strategy.step(grad, update, audit=audit, **options)
    state = {"w": np.ones(3, np.float32)}
    for step in range(steps):
        state, _ = train_step(state, strategy.batch(DATA, step))
    return state["w"]


def drawn_in(step: int, devices: int, processes: int = 1) -> tuple[Draw, ...]:
    return draw(0, step, 1.0, split(V, (devices,) * processes))


def test_an_audit_changes_no_bit_and_raises_no_false_alarm() -> None:
    plain = train(NumpyEngine(1), 30, None)
    for devices, rate in itertools.product((1, 2, 3, 4), (0.0, 0.3, 1.0)):
        engine = NumpyEngine(devices)
        assert train(engine, 30, rate).tobytes() == plain.tobytes()
        grads = sum(name == "grad" for name, _ in engine.calls)
        assert grads == 30 * V + {0.0: 0, 0.3: 9, 1.0: 30}[rate] * devices  # 9 of 30 are drawn


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_the_device_that_was_wrong_once_is_named(devices: int) -> None:
    """In the computation that is added, in the one that is compared with it: sign, exponent, value."""
    for number, bit in itertools.product((0, 1), (0, 22, 23, 30, 31)):
        step = 2 + bit % 3
        drawn = drawn_in(step, devices)[bit % devices]
        engine = FaultyEngine(devices, wrong={(step, drawn.replica, number): bit})
        with pytest.raises(SilentCorruptionError) as caught:
            train(engine, 6, 1.0)
        error = caught.value
        assert engine.fired == 1
        culprit = (*drawn.devices, 0)[number]
        assert [found.device for found in error.devices] == [culprit]
        assert (error.is_decided, error.step, error.replica) == (True, step, drawn.replica)
        assert (error.leaf, error.bits) == ("g", 1)
        assert f"step {step}, logical replica {drawn.replica}: device {culprit} (" in str(error)
        assert "first in element [1]" in str(error)
        assert engine.calls[-1][0] == "grad"  # nothing was updated after it


def test_without_an_audit_the_error_stays_in_the_state() -> None:
    """The negative control: the fault is one that changes the result."""
    (drawn,) = drawn_in(2, 1)
    engine = FaultyEngine(1, wrong={(2, drawn.replica, 0): 22})
    assert train(engine, 6, 0).tobytes() != train(NumpyEngine(1), 6, None).tobytes()
    assert engine.fired == 1


def test_two_devices_that_contradict_each_other_again_are_both_suspected() -> None:
    first = drawn_in(2, 2)[0].replica
    # Computations 0 and 2 are those of the device that runs the replica.
    engine = FaultyEngine(2, wrong={(2, first, 0): 5, (2, first, 2): 5})
    with pytest.raises(SilentCorruptionError, match="no majority says what is right") as caught:
        train(engine, 6, 1.0)
    assert {found.device for found in caught.value.devices} == {0, 1}
    assert not caught.value.is_decided


def test_a_grad_that_is_not_a_function_of_its_arguments_accuses_no_device() -> None:
    random = np.random.default_rng(0)

    def impure(state: Any, batch: Any, key: Any) -> Any:
        return {**grad(state, batch, key), "n": np.float32(random.normal())}

    for devices in (1, 2, 3):
        train_step = Strategy(NumpyEngine(devices), V).step(impure, update, audit=1.0)
        batch = Strategy(NumpyEngine(devices), V).batch(DATA, 0)
        with pytest.raises(SilentCorruptionError, match="perdure doctor -- COMMAND") as caught:
            train_step({"w": np.ones(3, np.float32)}, batch)
        assert not caught.value.is_decided


def test_a_grad_that_returns_other_leaves_at_another_call_accuses_no_device() -> None:
    calls = itertools.count()

    def growing(state: Any, batch: Any, key: Any) -> Any:
        more = {"more": np.float32(1)} if next(calls) >= V else {}
        return {**grad(state, batch, key), **more}

    train_step = Strategy(NumpyEngine(2), V).step(growing, update, audit=1.0)
    batch = Strategy(NumpyEngine(2), V).batch(DATA, 0)
    with pytest.raises(StateError, match="2 leaves in one call and 3 in another"):
        train_step({"w": np.ones(3, np.float32)}, batch)


@pytest.mark.parametrize(
    ("other", "forms"),
    [
        (np.ones(2, np.float32), r"float32\[2\] in one call and as float32\[\]"),
        (np.float64(1), r"float32\[\] in one call and as float64\[\]"),
    ],
)
def test_a_leaf_of_another_form_at_another_call_accuses_no_device(other: Any, forms: str) -> None:
    calls = itertools.count()

    def changing(state: Any, batch: Any, key: Any) -> Any:
        return {"g": np.float32(1), "n": other if next(calls) >= V else np.float32(1)}

    train_step = Strategy(NumpyEngine(3), V).step(changing, update, audit=1.0)
    batch = Strategy(NumpyEngine(3), V).batch(DATA, 0)
    with pytest.raises(StateError, match=f"`grad` returned n as {forms} in another"):
        train_step({"w": np.ones(3, np.float32)}, batch)


def test_judge() -> None:
    def verdict(*votes: tuple[int, str]) -> tuple[int, ...]:
        return judge([ComputedContribution(device, (bits,)) for device, bits in votes]).wrong

    assert verdict((0, "x"), (1, "a"), (2, "a")) == (0,)
    assert verdict((0, "a"), (1, "x"), (2, "a")) == (1,)
    assert verdict((0, "x"), (1, "y"), (2, "z")) == ()
    assert verdict((0, "x"), (1, "a"), (0, "a"), (1, "a")) == (0,)
    assert verdict((0, "x"), (1, "a"), (0, "y"), (1, "a")) == (0,)
    assert verdict((0, "x"), (1, "a"), (0, "x"), (1, "a")) == ()
    assert verdict((0, "x"), (1, "y"), (0, "z"), (1, "a")) == ()
    assert verdict((0, "x"), (0, "a"), (0, "a")) == (0,)
    assert verdict((0, "x"), (0, "y"), (0, "z")) == ()
    # Two computations alone cannot tell: the third decides in either direction.
    assert verdict((0, "x"), (1, "a"), (2, "x")) == (1,)


def test_which_steps_are_audited_is_a_function_of_seed_and_step() -> None:
    parts = split(V, (3,))
    drawn = [draw(3, step, 0.1, parts) for step in range(4000)]
    assert drawn == [draw(3, step, 0.1, parts) for step in range(4000)]
    assert drawn != [draw(4, step, 0.1, parts) for step in range(4000)]
    chosen = [found for found in drawn if found]
    assert 340 <= len(chosen) <= 460  # 400, three standard deviations
    for device in range(3):
        assert {found[device].replica for found in chosen} == {2 * device, 2 * device + 1}
        assert len({found[device].devices for found in chosen}) == 2
        assert all(found[device].devices[0] == device for found in chosen)
        assert all(sorted(found[device].devices) == [0, 1, 2] for found in chosen)


def test_who_computes_again_in_a_group() -> None:
    """Devices of a process among themselves; of processes with one device, one with another process."""
    chosen = [draw(3, step, 1.0, split(12, (1, 2, 1, 3))) for step in range(400)]
    for found in chosen:
        near = {drawn.devices[0]: drawn.devices[1] for drawn in found}
        assert near.keys() in ({0, 1, 2, 4, 5, 6}, {1, 2, 3, 4, 5, 6})
        assert (near[1], near[2]) == (2, 1)
        assert all(near[device] in {4, 5, 6} - {device} for device in (4, 5, 6))
        assert all(len(set(drawn.devices)) == 3 for drawn in found)
    asked = {drawn.devices[:2] for found in chosen for drawn in found if drawn.devices[0] == 0}
    assert asked == {(0, other) for other in range(1, 7)}
    assert {drawn.replica for found in chosen for drawn in found} == set(range(12))


@pytest.mark.parametrize("count", [2, 3])
def test_in_a_group_every_process_raises_the_same_error(count: int) -> None:
    plain = train(NumpyEngine(1), 8, None)
    results = play(count, lambda process: train(FaultyEngine(1, process), 8, 1.0))
    assert [result.tobytes() for result in results] == [plain.tobytes()] * count
    step = 3
    (drawn,) = drawn_in(step, 1, count)

    for culprit in drawn.devices[:2]:

        def program(process: Pretend, culprit: int = culprit) -> Any:
            wrong = {(step, drawn.replica, 0): 31} if process.index == culprit else {}
            return train(FaultyEngine(1, process, wrong), 8, 1.0)

        errors = play(count, program)
        assert [type(error) for error in errors] == [SilentCorruptionError] * count
        assert len({str(error) for error in errors}) == 1
        assert [(found.process, found.device) for found in errors[0].devices] == [(culprit, 0)]
        assert (errors[0].step, errors[0].replica, errors[0].bits) == (step, drawn.replica, 1)


def test_shares_of_other_shapes_cannot_be_audited_by_another_process() -> None:
    def count(state: Any, batch: Any, key: Any) -> Any:
        return {"n": batch.sum() * state["w"]}

    def program(process: Pretend) -> Any:
        strategy = Strategy(FaultyEngine(1, process), 2)
        train_step = strategy.step(count, lambda state, _: (state, {}), audit=1.0)
        source = strategy.distribute_datasets_from_function(
            lambda context: [np.ones(1 + context.input_pipeline_id) for _ in range(4)]
        )
        return [train_step({"w": np.ones(1)}, batch) for batch in source]

    errors = play(2, program)
    assert [type(error) for error in errors] == [StateError] * 2
    assert all("has another form than those of process" in str(error) for error in errors)


def test_exclude_reports_the_device_to_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeats.VARIABLE, str(tmp_path / "beat"))
    monkeypatch.setenv(excluded_devices.EXCLUDED, "1")
    drawn = drawn_in(2, 3)[0]
    engine = FaultyEngine(3, wrong={(2, drawn.replica, 1): 9})
    with pytest.raises(SilentCorruptionError) as caught:
        train(engine, 6, 1.0, on_corruption="exclude")
    report = heartbeats.read_report(str(tmp_path / "beat"), excluded_devices.REPORT)
    culprit = (0, 2, 3)[drawn.devices[1]]  # number 1 is out already
    assert report == {"devices": [culprit], "left": 2, "text": str(caught.value)}
    assert [found.device for found in caught.value.devices] == [culprit]
    assert excluded_devices.without_excluded("abcd") == ("a", "c", "d")
    assert json.loads((tmp_path / "beat.corrupt-device").read_text())["devices"] == [culprit]


def test_options_of_the_command_line_are_those_of_a_step_without_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERDURE_AUDIT", "1")
    engine = NumpyEngine(2)
    train(engine, 5, None)
    assert sum(name == "grad" for name, _ in engine.calls) == 5 * (V + 2)
    monkeypatch.setenv("PERDURE_AUDIT", "often")
    with pytest.raises(TopologyError, match=r"PERDURE_AUDIT: expected a share .* found 'often'"):
        train(engine, 5, None)
    train(engine, 5, 0.5)


def test_options_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = Strategy(NumpyEngine(2), V)
    for rate in (-0.1, 1.5, True, "1", float("nan")):
        with pytest.raises(TopologyError, match="audit: expected a share of the steps from 0 to 1"):
            strategy.step(grad, update, audit=rate)  # type: ignore[arg-type]
    for rate in (np.float32(0.5), np.array(0.5), Fraction(1, 2)):
        assert strategy.step(grad, update, audit=rate).audit_options.rate == 0.5  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="expected 'raise' or 'exclude', found 'ignore'"):
        strategy.step(grad, update, audit=1, on_corruption="ignore")  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="replicas=2"):
        Strategy(NumpyEngine(2)).step(grad, update, audit=1, on_corruption="exclude")
    monkeypatch.setenv(excluded_devices.EXCLUDED, "0,1")
    with pytest.raises(TopologyError, match=r"excludes all of \['a', 'b'\]"):
        excluded_devices.without_excluded(["a", "b"])
    monkeypatch.setenv(excluded_devices.EXCLUDED, "first")
    with pytest.raises(
        TopologyError, match="expected numbers of devices, such as 0,3; found 'first'"
    ):
        excluded_devices.without_excluded(["a", "b"])


def test_a_trainer_audits_the_step_of_its_strategy(tmp_path: Path) -> None:
    engine = NumpyEngine(2)
    strategy = Strategy(engine, V)
    config = RunConfig(tmp_path / "run", audit=1.0)
    state = {"w": np.ones(3, np.float32)}
    train_step = strategy.step(grad, update, on_corruption="exclude")
    Trainer(train_step, state, DATA, config, strategy=strategy).train(max_steps=4)
    assert sum(name == "grad" for name, _ in engine.calls) == 4 * (V + 2)
    assert train_step.audit_options == AuditOptions(1.0, excludes=True)
    with pytest.raises(TrainError, match="audit: expected a step_fn made by strategy"):
        Trainer(lambda state, _: (state, 0), state, [1, 2], config)
    for rate in (-1, 2, "1", True):
        with pytest.raises(ArgumentError, match="audit: expected a share"):
            RunConfig(tmp_path / "run", audit=rate)  # type: ignore[arg-type]
    train_step = strategy.step(grad, update)
    config = RunConfig(tmp_path / "run", audit=np.array(0.5))  # type: ignore[arg-type]
    Trainer(train_step, state, DATA, config, strategy=strategy)
    assert train_step.audit_options == AuditOptions(0.5)
