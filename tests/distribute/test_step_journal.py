"""`strategy.step(..., journal=...)`: digests of batch and total that no topology changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_engine import NumpyEngine

from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.checkpoint.journal import state_digest
from perdure.data import ArrayDataset
from perdure.distribute import Strategy
from perdure.errors import ArgumentError, JournalMismatchError
from perdure.store import LocalStorage
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import read_journal
from pretend import play

V = 6


def grad(state: Any, batch: Any, key: Any) -> Any:
    return {"g": (batch["x"] * batch["weight"]).sum() * state["w"], "n": batch["weight"].sum()}


def update(state: Any, total: Any) -> Any:
    w = state["w"] - np.float32(0.1) * total["g"] / total["n"]
    return {"w": w}, {"loss": total["g"]}


def train(run: Path, devices: int, stop: int, every: int = 1, **wrong: Any) -> None:
    dataset = ArrayDataset({"x": np.arange(48, dtype=np.float32)}, batch_size=12, seed=1)
    strategy = Strategy(NumpyEngine(devices), V)
    options = ManagerOptions(journal_every=every)
    with CheckpointManager(
        run, options=options, save_interval_steps=4, recipe=strategy.recipe(dataset)
    ) as manager:
        planted = wrong.get("update", update)
        train_step = strategy.step(grad, planted, journal=manager.journal)
        state, start = manager.restore_or_initialize({"w": np.ones(3, np.float32)})
        for step in range(start, stop):
            batch = strategy.batch(wrong.get("data", dataset), step)
            state, _ = train_step(state, batch)
            manager.save(step + 1, state)


def entries(run: Path) -> list[JournalEntry]:
    return [*read_journal(LocalStorage(run))]


def test_lines_do_not_depend_on_the_devices_and_say_how_many_there_were(tmp_path: Path) -> None:
    for devices in (1, 2, 3):
        train(tmp_path / str(devices), devices, 6)
    lines = {devices: entries(tmp_path / str(devices)) for devices in (1, 2, 3)}
    digests = [[(e.step, e.batch, e.total, e.state) for e in lines[d]] for d in lines]
    assert digests[0] == digests[1] == digests[2]
    assert [step for step, *_ in digests[0]] == [1, 2, 3, 4, 5, 6]
    assert len({digest for _, *three in digests[0] for digest in three}) == 18
    assert [lines[d][0].topology["devices"] for d in lines] == [1, 2, 3]


def test_the_lines_of_a_resume_on_other_devices_are_compared(tmp_path: Path) -> None:
    other = ArrayDataset({"x": np.arange(1, 49, dtype=np.float32)}, batch_size=12, seed=1)

    def coarse(state: Any, total: Any) -> Any:
        return {"w": (state["w"] - np.float32(0.1) * total["g"] / total["n"]) * 1}, {}

    def later(state: Any, total: Any) -> Any:
        new, logs = update(state, total)
        return {"w": np.nextafter(new["w"], np.float32(9))}, logs

    train(tmp_path, 1, 7)
    train(tmp_path, 3, 5)
    train(tmp_path, 2, 5, update=coarse)  # another program, and the same bits
    planted: list[tuple[str, dict[str, Any]]] = [
        ("batch", {"data": other}),
        ("state", {"update": later}),
    ]
    for what, wrong in planted:
        with pytest.raises(JournalMismatchError) as error:
            train(tmp_path, 2, 7, **wrong)
        assert (error.value.step, error.value.what) == (5, what)


def test_only_recorded_steps_are_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import perdure.checkpoint.journal as module

    digested: list[Any] = []

    def counted(*arguments: Any) -> str:
        digested.append(arguments[0])
        return "0" * 32

    monkeypatch.setattr(module, "state_digest", counted)
    monkeypatch.setattr(module, "share_digests", lambda shares: [counted(one) for one in shares])
    train(tmp_path, 1, 6, every=3)
    assert len(digested) == 2 * (V + 1 + 1)  # shares, total, state


def test_the_batch_of_a_group_has_the_digest_of_one_process(tmp_path: Path) -> None:
    shares = [{"x": np.full(3, replica)} for replica in range(V)]

    def program(processes: Any) -> None:
        part = V // processes.count
        first = part * processes.index
        with CheckpointManager(tmp_path / str(processes.count), processes=processes) as manager:
            manager.journal.note(shares[first : first + part], processes, devices=V)
            manager.journal.record(1, {"w": np.ones(2)})

    for count in (1, 2, 3):
        assert play(count, program) == [None] * count
    lines = [entries(tmp_path / str(count))[0] for count in (1, 2, 3)]
    assert lines[0].batch
    assert {line.batch for line in lines} == {lines[0].batch}
    assert {line.state for line in lines} == {state_digest({"w": np.ones(2)})}
    assert [line.topology["processes"] for line in lines] == [1, 2, 3]


def test_a_journal_that_is_none_is_refused_when_the_step_is_made(tmp_path: Path) -> None:
    strategy = Strategy(NumpyEngine(1), V)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(
            ArgumentError, match=r"expected manager\.journal, found a CheckpointManager"
        ):
            strategy.step(grad, update, journal=manager)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"expected manager\.journal, found a str"):
            strategy.step(grad, update, journal="x")  # type: ignore[arg-type]
        strategy.step(grad, update, journal=manager.journal)
