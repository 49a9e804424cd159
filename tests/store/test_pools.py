"""The thread pools, which stay alive between saves."""

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


def test_a_forked_child_saves_with_its_own_threads(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVES, str(tmp_path)], check=True, timeout=60)
    listings = [(tmp_path / run / "checkpoints").iterdir() for run in ("parent", "child")]
    assert [[file.name for file in listing] for listing in listings] == [["000000000001.json"]] * 2


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
