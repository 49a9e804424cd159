"""Saves on macOS, and is refused on Windows: the processes of `test_other_systems.py`.

    python tests/other_systems/saving.py WHAT RUN [OPERATION]

Prints what happened as JSON; `kill` is ended by SIGKILL at an operation on a file of step 2.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from typing import Any

import numpy as np

import perdure
from perdure.errors import PerdureError
from perdure.runtime import system

KEPT = 2


def state_at(step: int) -> dict[str, Any]:
    """The state after `step` steps; its array goes through the buffers of a large file."""
    return {"weights": np.full(300_000, step, np.float64), "step": step}


def digest(state: dict[str, Any]) -> str:
    return f"{state['step']} {hashlib.sha256(state['weights'].tobytes()).hexdigest()}"


def error_of(call: Any) -> list[str]:
    """Type and text of the error that perdure raises; none is an error of the test."""
    try:
        call()
    except PerdureError as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("expected an error of perdure, found none")


def kill(run: str, operation: str) -> None:
    """Save step 1, and be killed at `operation` while step 2 is saved."""
    armed = False

    def before(name: str, path: str) -> None:
        if armed and f"{name} {os.path.basename(os.path.dirname(path))}" == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    with perdure.CheckpointManager(perdure.LocalStorage(run, before)) as manager:
        manager.restore_or_initialize(state_at(0))
        manager.save(1, state_at(1))
        manager.wait_until_finished()
        armed = True
        manager.save(2, state_at(2))
    raise AssertionError(f"nothing was killed: there was no {operation}")


def resume(run: str) -> dict[str, Any]:
    """Restore, save and prune, while others try to write; counts the syncs to the disk itself."""
    synced: list[bool] = []  # whether each was one of a directory
    control = system.fcntl.fcntl

    def counted(fd: int, command: int, *arguments: Any) -> Any:
        if command == system.fcntl.F_FULLFSYNC:
            synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        return control(fd, command, *arguments)

    system.fcntl.fcntl = counted
    asked: list[str] = []
    storage = perdure.LocalStorage(run, lambda operation, _: asked.append(operation))
    with perdure.CheckpointManager(storage, max_to_keep=KEPT) as manager:
        state, start = manager.restore_or_initialize(state_at(0))
        found = {"restored": [start, digest(state)], "expected": digest(state_at(start))}
        for step in range(start + 1, start + 4):
            manager.save(step, state_at(step))
        manager.wait_until_finished()
        second = perdure.CheckpointManager(run)
        found["here"] = error_of(lambda: second.save(9, state_at(9)))
        command = [sys.executable, __file__, "lock", run]
        done = subprocess.run(command, capture_output=True, check=True)
        found["elsewhere"] = json.loads(done.stdout)
    found["synced"] = [synced.count(False), synced.count(True)]
    found["asked"] = [asked.count("fsync"), asked.count("fsync_dir")]
    found["steps"] = list(perdure.CheckpointManager(run).all_steps())
    found["last"] = digest(perdure.load_checkpoint(run))
    found["last_expected"] = digest(state_at(start + 3))
    return found


def lock(run: str) -> list[str]:
    """Try to write beside another process."""
    return error_of(lambda: perdure.CheckpointManager(run).save(9, state_at(9)))


def refuse(run: str) -> dict[str, list[str]]:
    """Try all that writes, to a run that is there and to a new one."""
    new = f"{run}-new"
    found = {
        "save": error_of(lambda: perdure.CheckpointManager(run).save(9, state_at(9))),
        "new": error_of(lambda: perdure.CheckpointManager(new).save(1, state_at(1))),
        "open": error_of(lambda: perdure.CheckpointManager(new).restore_or_initialize(state_at(0))),
    }
    assert not os.path.exists(new)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
