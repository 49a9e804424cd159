"""Signals that ask for a save: chosen ones, and one that goes to the data workers as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from perdure import CheckpointManager, ManagerOptions
from perdure.checkpoint.preemption import PreemptionFlag
from perdure.errors import ArgumentError
from perdure.store import Run

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = [*(signal.Signals[name] for name in NAMES), signal.SIGCHLD]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---------------------------------------------------------------- chosen signals


@pytest.mark.parametrize("name", NAMES)
def test_a_chosen_signal_asks_for_a_save(name: str, tmp_path: Path) -> None:
    options = ManagerOptions(preemption_signals=(name,))
    before = {other: signal.getsignal(signal.Signals[other]) for other in NAMES}
    with CheckpointManager(tmp_path, options=options) as manager:
        assert not manager.reached_preemption(1)
        for other in NAMES:  # only the chosen one is taken over
            is_ours = signal.getsignal(signal.Signals[other]) == manager.preemption._on_signal
            assert is_ours == (other == name)
        signal.raise_signal(signal.Signals[name])
        assert manager.reached_preemption(2)
    assert {other: signal.getsignal(signal.Signals[other]) for other in NAMES} == before


def test_every_chosen_signal_counts_and_the_exit_ignores_all(tmp_path: Path) -> None:
    options = ManagerOptions(preemption_signals=NAMES)
    with CheckpointManager(tmp_path, options=options) as manager:
        manager.reached_preemption(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.reached_preemption(2)
        with pytest.raises(SystemExit) as left:
            manager.save_and_exit(2, {"n": 2})
        assert left.value.code == 75
        handlers = [signal.getsignal(signal.Signals[name]) for name in NAMES]
        assert handlers == [signal.SIG_IGN] * 3
    assert Run(tmp_path).steps() == [2]


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Python's own handler, also if the tests were started in the background, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_a_second_ctrl_c_interrupts(tmp_path: Path) -> None:
    options = ManagerOptions(preemption_signals=("SIGTERM", "SIGINT"))
    with CheckpointManager(tmp_path, options=options) as manager:
        manager.reached_preemption(1)
        signal.raise_signal(signal.SIGINT)  # would raise here
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert manager.reached_preemption(2)


@pytest.mark.parametrize("names", [(), ("SIGKILL",), "SIGTERM", ("SIGTERM", "USR1")])
def test_other_signals_are_refused(names: Any) -> None:
    with pytest.raises(ArgumentError, match="preemption_signals: expected a tuple") as caught:
        ManagerOptions(preemption_signals=names)
    assert repr(names) in str(caught.value)


@pytest.mark.parametrize(("name", "status"), [("SIGUSR1", 7), ("SIGTERM", -signal.SIGTERM)])
def test_a_forked_worker_ends_by_sigterm_alone(name: str, status: int, tmp_path: Path) -> None:
    """A signal to the group must not take the workers away from a parent that finishes its step."""
    options = ManagerOptions(preemption_signals=NAMES)
    with CheckpointManager(tmp_path, options=options) as manager:
        manager.reached_preemption(1)
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.Signals[name])
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


# ---------------------------------------------------------------- data workers


def report_dead_workers(number: int, frame: FrameType | None) -> None:
    """As the handler of SIGCHLD that torch's DataLoader installs."""
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")


def end_child() -> None:
    """Start a child and kill it; SIGCHLD arrives before this returns."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(1)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED)


def test_the_end_of_a_data_worker_raises_nothing_once_the_notice_has_come() -> None:
    flag = PreemptionFlag()
    signal.signal(signal.SIGCHLD, report_dead_workers)
    flag.install()
    flag.notify()
    end_child()  # an error here would be in the middle of a step
    flag.remove()
    assert signal.getsignal(signal.SIGCHLD) == report_dead_workers
    # The control: without the flag it raises.
    with pytest.raises(RuntimeError, match="killed by signal"):
        end_child()


def test_a_data_worker_that_dies_alone_is_an_error() -> None:
    flag = PreemptionFlag()
    signal.signal(signal.SIGCHLD, report_dead_workers)
    flag.install()
    with pytest.raises(RuntimeError, match="killed by signal"):
        end_child()


def test_a_notice_that_comes_just_after_the_end_of_a_worker_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group is signalled one process after the other."""
    fired: list[float] = []

    def wait(seconds: float) -> None:
        fired.append(seconds)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("perdure.checkpoint.preemption.time.sleep", wait)
    flag = PreemptionFlag()
    signal.signal(signal.SIGCHLD, report_dead_workers)
    flag.install()
    end_child()
    assert (len(fired), flag.raised) == (1, True)


DEAD = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")


@pytest.mark.parametrize("error", [DEAD, EOFError(), BrokenExecutor(), ConnectionResetError()])
def test_a_loop_that_gets_no_more_data_leaves_with_75(error: Exception, tmp_path: Path) -> None:
    def loop() -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, {"n": 1})
            manager.reached_preemption(1)
            signal.raise_signal(signal.SIGTERM)
            raise error

    with pytest.raises(SystemExit) as left:
        loop()
    assert left.value.code == 75
    assert left.value.__context__ is error
    assert Run(tmp_path).steps() == [1]  # durable, and the run continues after it


@pytest.mark.parametrize(
    ("error", "notice"),
    [(DEAD, False), (RuntimeError("out of memory"), True), (ValueError(), True)],
)
def test_any_other_error_stays_one(error: Exception, notice: bool, tmp_path: Path) -> None:
    def loop() -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.reached_preemption(1)
            if notice:
                signal.raise_signal(signal.SIGTERM)
            raise error

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error


# ---------------------------------------------------------------- PyTorch's DataLoader

# Each case runs in a process group of its own, forked from one that has imported torch.
LOADER = """
import os, select, signal, sys
from multiprocessing.connection import wait
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as LoaderIterator
from perdure import CheckpointManager
from perdure.checkpoint.preemption import PreemptionFlag
LoaderIterator._try_get_data.__defaults__ = (0.2,)  # seconds between two looks for dead workers

class Items:
    def __init__(self, place, reached):
        self.place, self.reached = place, reached
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if self.place == "data" and index == 20:
            while not self.reached.exists():
                select.select([], [], [], 0.01)
            os.killpg(0, signal.SIGTERM)  # the loop waits for this batch
        return index

def run(place, directory, ready):
    reached = Path(f"{directory}-reached")
    loader = DataLoader(Items(place, reached), num_workers=2, persistent_workers=True)
    with CheckpointManager(directory, save_interval_steps=5) as manager:
        state, start = manager.restore_or_initialize({"sum": torch.zeros(())})
        for step, batch in enumerate(loader, 1):
            if place == "step" and step == 8:
                workers = [worker.sentinel for worker in loader._iterator._workers]
                os.write(ready, b"1")  # the signal comes from outside, as a scheduler sends it
                while workers:  # their end would raise here, in the middle of the step
                    for sentinel in wait(workers):
                        workers.remove(sentinel)
            state["sum"] += batch[0]
            manager.save(step, state)
            if manager.reached_preemption(step):
                manager.save_and_exit(step, state)
            if step == 20:
                reached.touch()

for place in ("step", "data"):
    for control in ("no", "yes"):
        read, ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os.setpgid(0, 0)
            if control == "yes":
                PreemptionFlag._guard_children = lambda self: None
                PreemptionFlag.explains = lambda self, error: False
            try:
                run(place, f"{sys.argv[1]}/{place}-{control}", ready)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                os._exit(1)
            except SystemExit as end:
                os._exit(end.code)
            os._exit(0)
        os.close(ready)
        if os.read(read, 1):
            os.killpg(child, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(place, control, status, flush=True)
"""


def test_sigterm_to_a_group_with_data_workers_leaves_with_75(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path)], capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["step no 75", "step yes 1", "data no 75", "data yes 1"]
    # In the middle of a step: that step was finished and saved. In a wait for data: the newest stands.
    assert Run(tmp_path / "step-no").steps()[-1] == 8
    assert Run(tmp_path / "data-no").steps()[-1] == 20
    assert "a data worker ended by the signal that preempts the run. The newest" in run.stderr
    assert "is killed by signal: Terminated" in run.stderr  # of the controls
