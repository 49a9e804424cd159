"""No orphans: whatever a run started is ended with it, also when the run itself is killed.

Invariant: every process of a run carries the run's mark in its environment, which children inherit,
whether they change their session or lose their parent. `OrphanReaper` is a second process that
waits for the end of the first one, on a pipe that only the first one holds open. It runs this file
with nothing but the standard library, because it starts with every run (8 MB).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

MARK = "PERDURE_RUN_MARK"
# Between two looks, for what was just about to start; and how long a killed process may take to go.
PAUSE_S = 0.01
PATIENCE_S = 10.0


class OrphanReaper:
    """Ends all processes that carry `mark` once this process is gone, or `close` is called.

    Then it removes `scratch`, which whoever is killed leaves behind.
    """

    def __init__(self, mark: str, scratch: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what is sent to the supervisor's group does not reach it
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it has begun to wait

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def close(self) -> None:
        """End what is left, and the reaper."""
        self._process.communicate()


def marked(mark: str, spared: frozenset[int] = frozenset()) -> list[int]:
    """Processes that carry `mark`, save for those in `spared`. Zombies carry nothing."""
    wanted = f"{MARK}=".encode()
    text, own, found = mark.encode(), os.getpid(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == own or int(name) in spared:
            continue
        # Processes of other users cannot be read, and are none of ours.
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(wanted) and text in variable[len(wanted) :].split(b":"):
                    found.append(int(name))
    return found


def end_marked(mark: str, spared: frozenset[int] = frozenset()) -> int:
    """SIGKILL to every process that carries `mark`, until there is none; gives how many there were.

    Returns after `PATIENCE_S` in any case: a process inside a system call of a dead disk stays.
    """
    ended: set[int] = set()
    calm, deadline = 0, time.monotonic() + PATIENCE_S
    # One that was being started during the first look is there at the second.
    while calm < 2 and time.monotonic() < deadline:
        found = marked(mark, spared)
        calm = 0 if found else calm + 1
        for pid in found:
            ended.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)
    return len(ended)


def _main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
    if sys.argv[2]:
        import shutil  # not held in memory by a process that only waits

        shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    _main()
