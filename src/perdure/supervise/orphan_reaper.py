"""Ends every process that a run has started, even if the supervisor itself is killed.

Invariant: every process of a run carries the mark of the run in its environment. Children inherit it,
even if they change their session or lose their parent. `OrphanReaper` is a second process that waits
for the end of the supervisor, on a pipe that only the supervisor holds open. It runs this file with
nothing but the standard library, because it starts with every run (8 MB).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

MARK = "PERDURE_RUN_MARK"
# Between two searches, and how long killed processes may take to end.
PAUSE_S = 0.01
PATIENCE_S = 10.0


class OrphanReaper:
    """Ends all processes that carry `mark` once this process has ended or `close` is called.

    Then it removes the directory `scratch`, which a killed supervisor leaves behind.
    """

    def __init__(self, mark: str, scratch: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the supervisor's group do not reach it
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it waits now

    @property
    def pid(self) -> int:
        """Its process ID."""
        return self._process.pid

    def close(self) -> None:
        """End the processes that are left, and the reaper."""
        self._process.communicate()


def marked(mark: str, excluded: frozenset[int] = frozenset()) -> list[int]:
    """IDs of the processes that carry `mark`, except `excluded`. Zombies carry no mark."""
    wanted = f"{MARK}=".encode()
    text, this, pids = mark.encode(), os.getpid(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == this or int(name) in excluded:
            continue
        # Processes of other users cannot be read and do not belong to the run.
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(wanted) and text in variable[len(wanted) :].split(b":"):
                    pids.append(int(name))
    return pids


def end_marked(mark: str, excluded: frozenset[int] = frozenset()) -> int:
    """Kill every process that carries `mark`, until there is none; returns how many there were.

    Returns after `PATIENCE_S` in any case: a process in a system call of a failed disk cannot end.
    """
    ended: set[int] = set()
    calm, deadline = 0, time.monotonic() + PATIENCE_S
    # The second search finds a process that was starting during the first.
    while calm < 2 and time.monotonic() < deadline:
        pids = marked(mark, excluded)
        calm = 0 if pids else calm + 1
        for pid in pids:
            ended.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)
    return len(ended)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
    if sys.argv[2]:
        import shutil  # only now, to save memory while the process waits

        shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    _main()
