"""The journal when steps are computed again: in groups, under `perdure drill`, with any data."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from perdure import CheckpointManager, ManagerOptions
from perdure.checkpoint import SingleProcess
from perdure.checkpoint.journal import batch_digest, state_digest
from perdure.errors import JournalMismatchError, UnsupportedLeafError
from perdure.store import LocalStorage, Run
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import read_journal
from pretend import Pretend, play

EVERY = ManagerOptions(journal_every=1)


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(20, k, np.float32)}


def entries(run: Path) -> list[JournalEntry]:
    return [*read_journal(LocalStorage(run))]


# ------------------------------------------------------------ the end of a group


def loop(run: Path, processes: Any, last: int, wrong: int = 0) -> CheckpointManager:
    """Saves step 5 and no other."""
    options = {"options": EVERY, "save_interval_steps": 5, "processes": processes}
    manager = CheckpointManager(run, **options)
    manager.restore_or_initialize(lambda: state(0))
    for step in range((manager.latest_step() or 0) + 1, last + 1):
        manager.save(step, state(-1 if step == wrong else step))
    return manager


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A group's run with lines to step 9, after the checkpoint of step 5."""
    assert play(2, lambda processes: loop(tmp_path, processes, 9).close()) == [None, None]
    assert [entry.step for entry in entries(tmp_path)] == [*range(1, 10)]
    return tmp_path


def test_a_difference_after_the_last_save_is_raised_by_close_in_every_process(
    recorded: Path,
) -> None:
    def close(processes: Pretend) -> str:
        manager = loop(recorded, processes, 9, wrong=8)
        with pytest.raises(JournalMismatchError, match="step 8") as caught:
            manager.close()
        manager.close()
        return str(caught.value)

    def leave(processes: Pretend) -> None:
        with loop(recorded, processes, 9, wrong=8):
            pass

    for text in play(2, close):
        assert "step 8, computed again from the checkpoint of step 5" in text
    assert [type(error) for error in play(2, leave)] == [JournalMismatchError] * 2
    assert play(2, lambda processes: loop(recorded, processes, 9).close()) == [None, None]
    with CheckpointManager(recorded) as manager:  # the lock was given back each time
        manager.restore_or_initialize(state(0))


def test_a_loop_that_exits_early_is_compared_too(recorded: Path) -> None:
    def stop(processes: Pretend) -> Any:
        loop(recorded, processes, 9, wrong=8).exit_preempted()

    assert [type(error) for error in play(2, stop)] == [JournalMismatchError] * 2

    def exit_with(status: int) -> Any:
        def run(processes: Pretend) -> Any:
            try:
                with loop(recorded, processes, 9, wrong=8):
                    raise SystemExit(status)
            except SystemExit as error:
                return error.code

        return run

    chief, other = play(2, exit_with(0))
    assert isinstance(chief, JournalMismatchError), "no group exits with 0 after a difference"
    assert other == 0
    with pytest.warns(UserWarning, match="step 8, computed again"):
        assert play(2, exit_with(3)) == [3, 3]


def test_close_hides_no_other_error_and_waits_for_no_process_then(recorded: Path) -> None:
    """The other process is in a collective of its own, and never closes."""
    met = threading.Barrier(2)

    def run(processes: Pretend) -> Any:
        manager = loop(recorded, processes, 9, wrong=8)
        met.wait(30)
        if not processes.is_chief:
            return "did not close"
        with manager:
            raise ArithmeticError("of the program")

    with pytest.warns(UserWarning, match="step 8, computed again"):
        error, other = play(2, run)
    assert (repr(error), other) == ("ArithmeticError('of the program')", "did not close")


def test_a_difference_that_a_save_has_raised_is_not_raised_again(recorded: Path) -> None:
    def run(processes: Pretend) -> Any:
        manager = loop(recorded, processes, 9, wrong=8)
        with pytest.raises(JournalMismatchError):
            manager.save(10, state(10))
        manager.close()
        return manager.all_steps()

    assert play(2, run) == [[5], [5]]


def test_a_process_that_makes_another_call_than_close_is_an_error_of_both(recorded: Path) -> None:
    def run(processes: Pretend) -> None:
        manager = loop(recorded, processes, 9)
        if processes.is_chief:
            manager.close()
        else:
            manager.save(10, state(10))

    texts = [str(error) for error in play(2, run)]
    assert all("different calls: process 0 close, process 1 save" in text for text in texts)


# ------------------------------------------------------------ what is compared


def test_a_step_that_is_recorded_twice_is_compared(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=100, options=EVERY) as manager:
        for call in (manager.save, manager.journal.record):
            manager.save(4, state(4))
            manager.journal.record(5, state(5))
            manager.save(5, state(5))
            call(5, state(5))
            with pytest.raises(JournalMismatchError, match="step 5"):
                manager.journal.record(5, state(6))
            manager.rollback(1) if manager.all_steps() else manager.journal.forget()
    assert [entry.step for entry in entries(tmp_path)] == [4, 5]


def test_a_state_without_a_compared_batch_may_come_from_other_data(tmp_path: Path) -> None:
    batch = [np.arange(3)]
    for data in (None, batch):
        run = tmp_path / str(data is None)
        with CheckpointManager(run) as manager:
            manager.journal.record(1, state(1), batch)
        with CheckpointManager(run) as manager, pytest.raises(JournalMismatchError) as caught:
            manager.journal.record(1, state(2), data)
        assert caught.value.what == "state"
        assert ("no batch was compared" in str(caught.value)) == (data is None)


def test_steps_that_pass_a_multiple_are_recorded_also_by_a_resumed_run(tmp_path: Path) -> None:
    options = ManagerOptions(journal_every=7)

    def run(directory: Path, *stops: int) -> list[int]:
        for stop in stops:
            with CheckpointManager(directory, options=options, save_interval_steps=10) as manager:
                _, start = manager.restore_or_initialize(state(0))
                for step in range(start + 5, stop + 1, 5):
                    manager.save(step, state(step))
        return [entry.step for entry in entries(directory)]

    whole = run(tmp_path / "whole", 60)
    assert whole == [10, 15, 25, 30, 35, 45, 50, 60]
    assert run(tmp_path / "parts", 15, 25, 35, 45, 60) == whole


def test_a_drilled_program_is_not_stopped_by_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`perdure drill` compares what it saves, and names the cause."""
    play(1, lambda _: loop(tmp_path, None, 9).close())
    hook = Mock(is_doctor=False, traced=None)
    monkeypatch.setattr("perdure.checkpoint.journal.drill_hook", lambda: hook)
    loop(tmp_path, None, 10, wrong=8).close()
    assert Run(tmp_path).steps() == [5, 10]
    monkeypatch.undo()


# ------------------------------------------------------------ batches


def test_a_batch_of_any_arrays_has_a_digest_of_their_bytes(tmp_path: Path) -> None:
    array = np.arange(24.0).reshape(4, 6)
    file = np.memmap(tmp_path / "data", array.dtype, "w+", shape=array.shape)
    file[:] = array
    assert batch_digest({"x": file[1:3, ::2]}) == state_digest({"x": array[1:3, ::2].copy()})
    words = np.array(["ab", "c"])
    batches = [
        words,
        words[::-1],
        np.array(["ab", "d"]),
        words.astype("S2"),
        words.astype(object),
        words.reshape(1, 2),
        np.array(["2026-01-01"], "M8[D]"),
        np.array(["2026-01-01"], "M8[s]"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.array([], "U1"),
        words[0],
    ]
    digests = [batch_digest({"text": batch, "x": (array,)}) for batch in batches]
    assert len({*digests}) == len(batches)
    assert batch_digest({"text": words.copy(), "x": (array,)}) == digests[0]
    with CheckpointManager(tmp_path / "run") as manager:
        manager.journal.record(1, state(1), {"x": file[:2], "text": words})
        with pytest.raises(UnsupportedLeafError, match=r"the batch has no digest.*x/0: "):
            manager.journal.record(2, state(2), {"x": [object()]})
        with pytest.raises(UnsupportedLeafError, match=r"\(the batch itself\): ") as raised:
            manager.journal.record(2, state(2), object())
        assert "leave it out of the batch" in str(raised.value)
    assert entries(tmp_path / "run")[0].batch is not None


def test_a_batch_that_is_left_out_of_the_lines_is_a_warning_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match=r"lack the batch: .*object"):
            manager.journal.note([{"x": object()}], SingleProcess())
        manager.journal.record(1, state(1))
        manager.journal.note(
            [{"x": object()}], SingleProcess()
        )  # a second warning is an error here
        manager.journal.record(2, state(2))
        manager.journal.note([{"x": np.array(["a"])}], SingleProcess())
        manager.journal.record(3, state(3))
    assert [entry.batch is None for entry in entries(tmp_path)] == [True, True, False]
