"""The threads that stay between saves."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perdure.store.pools import map_ahead

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


def test_a_child_made_by_fork_saves_with_threads_of_its_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVES, str(tmp_path)], check=True, timeout=60)
    listings = [(tmp_path / run / "checkpoints").iterdir() for run in ("parent", "child")]
    assert [[file.name for file in listing] for listing in listings] == [["000000000001.json"]] * 2


def test_an_error_leaves_no_job_running() -> None:
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
        # Opened once the first job has failed: whoever waits then, waits for the second one.
        executor_done = threading.Thread(target=lambda: (begun.wait(), go_on.set()))
        executor_done.start()
        with pytest.raises(OSError, match="no"):
            list(map_ahead(executor, work, range(10), 2))
        assert running == []
        executor_done.join()
