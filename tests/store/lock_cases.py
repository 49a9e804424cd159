"""Things that a program may do while it writes to a run directory, and stay the only writer.

Shared by the tests and by `make proof-store`. Each case runs in a process of its own, because it forks:

    python lock_cases.py CASE DIRECTORY [control]

It exits with status 0 if the lock held. `control` takes the lock wrongly, so that the case fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import contents, sharing_states

from perdure import CheckpointManager
from perdure.checkpoint.retention import Retention, plan_prune
from perdure.errors import LockedError, PerdureError, StoreError
from perdure.store import Run, file_lock, verify_run

PRUNE = (sys.executable, "-m", "perdure.cli", "prune", "--max-to-keep", "3")
TAKE = "import sys; from perdure.store import Run; Run(sys.argv[1]).begin_writing()"


def filled(path: Path) -> Run:
    run = Run(path, create=True)
    for step, leaves in sharing_states().items():
        run.save(step, leaves)
    return run


def another_process_is_refused(path: Path) -> None:
    done = subprocess.run([*PRUNE, str(path)], capture_output=True, text=True)
    assert done.returncode == 1, done
    assert "another process writes here" in done.stderr


def another_process_may_write(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TAKE, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def all_is_there(run: Run, path: Path) -> None:
    """Save and prune once more; every kept step has the bits that were saved."""
    run.save(5, sharing_states()[4])
    run.execute(plan_prune(run, 3, Retention(), saved=5).store)
    run.close()
    assert verify_run(Run(path)).problems == ()
    for step, state in ((3, 3), (4, 4), (5, 4)):
        assert contents(Run(path).load(step).leaves) == contents(sharing_states()[state])


def copy(path: Path) -> None:
    """A backup in the same process opens and closes every file, including the lock."""
    run = filled(path)
    shutil.copytree(path, path.with_name("backup"))
    another_process_is_refused(path)
    all_is_there(run, path)


def fork(path: Path) -> None:
    """A forked child cannot save, and does not hold the lock after the parent has released it."""
    run = filled(path)
    manager = CheckpointManager(path.with_name("other"))
    manager.save(1, {"a": 1})
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        refused = 0
        for change in (
            lambda: run.save(5, sharing_states()[1]),
            lambda: run.delete([1]),
            lambda: Run(path).save(5, sharing_states()[1]),
            lambda: manager.claim(),
        ):
            try:
                change()
            except StoreError:
                refused += 1
        run.close()
        os.read(begin, 1)  # lives until the parent closes the pipe
        os._exit(refused)
    os.close(begin)
    another_process_is_refused(path)
    assert run.steps() == [1, 2, 3, 4]
    all_is_there(run, path)
    another_process_may_write(path)
    os.close(end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    manager.close()


def execute(path: Path) -> None:
    """A program that was started meanwhile and outlives the writer does not hold the lock."""
    run = filled(path)
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, close_fds=False) as started:
        spawned = os.posix_spawn(sys.executable, [*waits[:2], "input()"], os.environ)
        another_process_is_refused(path)
        all_is_there(run, path)
        another_process_may_write(path)
        os.kill(spawned, 9)
        os.waitpid(spawned, 0)
        assert started.poll() is None, "it has outlived the writer"


def two_managers(path: Path) -> None:
    """A second writer in one process is refused with its name; it takes over from an abandoned one."""
    first, second = CheckpointManager(path), CheckpointManager(path)
    first.reached_preemption(1)
    assert first.save(1, {"a": 1})
    for _ in range(2):
        with pytest.raises(LockedError, match="this process already has a manager"):
            second.save(2, {"a": 2})
    another_process_is_refused(path)
    first.wait_until_finished()
    try:  # like a notebook cell that runs again after it failed: the shell keeps its traceback
        first.save(2, {"a": object()})
    except PerdureError as error:
        sys.last_traceback = error.__traceback__
    first = CheckpointManager(path)
    assert first.save(2, {"a": 2})
    sys.last_traceback = None
    first.close()
    assert second.save(3, {"a": 3})
    second.close()
    assert verify_run(Run(path)).good == (1, 2, 3)


CASES: dict[str, Callable[[Path], None]] = {
    "copy": copy,
    "fork": fork,
    "exec": execute,
    "two managers": two_managers,
}


WRITER = """
import sys
from perdure.store import Run
run = Run(sys.argv[1], create=True)
run.begin_writing()
print("writing", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def writer_process(where: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that writes to a run directory; it gets SIGKILL at the end of the block."""
    command = [sys.executable, "-c", WRITER, str(where)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        yield process
        process.kill()


def holds(name: str, path: Path, control: bool = False) -> tuple[bool, str]:
    """Whether the lock held in a case, and the output of its process."""
    command = [sys.executable, __file__, name, str(path), *(["control"] if control else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0, done.stderr


def _take_locks_wrongly(name: str) -> None:
    def record_lock(fd: int) -> None:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def nothing(*_: object, **__: object) -> None:
        """Replaces the registration that makes a forked child close the lock."""

    if name == "fork":
        file_lock._open_locks.add = nothing  # type: ignore[method-assign]
    elif name == "exec":
        os.O_CLOEXEC = 0
        real = os.open
        os.open = lambda *a, **k: [fd := real(*a, **k), os.set_inheritable(fd, True)][0]
    else:
        file_lock._lock = record_lock


if __name__ == "__main__":
    if sys.argv[3:] == ["control"]:
        _take_locks_wrongly(sys.argv[1])
    CASES[sys.argv[1]](Path(sys.argv[2]))
