"""The thread pools, which stay alive between saves."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perdure.store import Run, verify_run
from perdure.store.pools import map_ahead, submit

SAVES = """
import os, sys, warnings
import numpy as np
import perdure

warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of every fork beside threads
state = {"a": np.arange(3_000_000, dtype=np.float32)}
with perdure.CheckpointManager(sys.argv[1] + "/parent") as manager:
    manager.save(1, state)
child = os.fork()
if child == 0:
    with perdure.CheckpointManager(sys.argv[1] + "/child") as manager:
        manager.save(1, state)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_saves_with_its_own_threads(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVES, str(tmp_path)], check=True, timeout=60)
    listings = [(tmp_path / run / "checkpoints").iterdir() for run in ("parent", "child")]
    assert [[file.name for file in listing] for listing in listings] == [["000000000001.json"]] * 2


LATE = """
import atexit, sys, threading
from functools import partial
import numpy as np
import perdure

where, kind = sys.argv[1:]
manager = perdure.CheckpointManager(where)

def work():
    threading.main_thread().join()
    state = {"a": np.arange(3_000_000, dtype=np.float32)}
    with manager:
        manager.save(1, state)
        manager.save(2, state)
        assert (manager.restore(2).state["a"] == state["a"]).all()

def save():
    manager.save(1, {"a": np.arange(3_000_000, dtype=np.float32)})
    manager.save(2, {"a": 2})  # and nothing waits for it

if kind == "thread":
    threading.Thread(target=work).start()
else:
    atexit.register(save)
"""


@pytest.mark.parametrize("kind", ["thread", "atexit"])
def test_a_save_while_python_exits_is_made(tmp_path: Path, kind: str) -> None:
    """In a thread that goes on after the main thread, and in `atexit`: no pool takes work then."""
    done = subprocess.run(
        [sys.executable, "-c", LATE, str(tmp_path / "run"), kind],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert verify_run(Run(tmp_path / "run")).good == (1, 2)


def test_a_save_while_python_exits_reports_its_error(tmp_path: Path) -> None:
    program = LATE.replace('"a": 2', '"a": partial(print)').replace(
        "nothing waits for it", "it fails"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run"), "atexit"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "UnsupportedLeafError" in done.stderr
    assert verify_run(Run(tmp_path / "run")).good == (1,)


def test_a_job_that_no_thread_takes_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that cannot begin a thread has queued the job all the same."""
    ran: list[int] = []
    with ThreadPoolExecutor(1) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _: throw())
            job = submit(executor, ran.append, 1)
        assert job.done()
        submit(executor, ran.append, 2).result()
    assert ran == [1, 2]


def throw() -> None:
    raise RuntimeError("can't start new thread")


def test_an_error_waits_for_the_other_jobs() -> None:
    begun, go_on = threading.Event(), threading.Event()
    running: list[int] = []

    def work(item: int) -> int:
        if item == 0:
            begun.wait()
            raise OSError("no")
        running.append(item)
        begun.set()
        go_on.wait()
        running.remove(item)
        return item

    with ThreadPoolExecutor(2) as executor:
        # Set after the first job has failed, so a wait from then on is for the second one.
        executor_done = threading.Thread(target=lambda: (begun.wait(), go_on.set()))
        executor_done.start()
        with pytest.raises(OSError, match="no"):
            list(map_ahead(executor, work, range(10), 2))
        assert running == []
        executor_done.join()
