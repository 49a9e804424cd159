"""Ends every process that a run has started, even if the supervisor itself is killed.

Invariant: every process of a run carries the mark of the run in its environment, or is in a session
with one that does. Children inherit both; only one that clears its environment and also leaves its
session is lost. `OrphanReaper` is a second process that waits for the end of the supervisor, on a pipe
that only the supervisor holds open. It runs this file with nothing but the standard library, because it
starts with every run (8 MB).
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
PR_SET_PDEATHSIG = 1  # of prctl(2)


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

    def close(self) -> None:
        """End the processes that are left, and the reaper."""
        self._process.communicate()


def become_init() -> None:
    """Fork: the child returns; the parent reaps, passes signals on, and exits with its status.

    For `perdure run` as the first process of a container, where orphans stay as zombies until it
    waits for them, as tini does.
    """
    import ctypes  # not in the reaper, which has little memory

    # Signals that a process gets for its own faults or from the terminal are not passed on.
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    kept |= {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGPIPE}
    passed_on = signal.valid_signals() - kept
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    supervisor = os.fork()
    if supervisor == 0:
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the parent, which passes it on once
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(passed_on)
        if number != signal.SIGCHLD:
            os.kill(supervisor, number)
            continue
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == supervisor:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
            if pid == 0:
                break


def marked(
    mark: str,
    excluded: frozenset[int] = frozenset(),
    sessions: frozenset[int] = frozenset(),
) -> list[int]:
    """IDs of the processes with `mark`, and of all in their sessions, but `excluded`; none if /proc
    does not tell."""
    wanted = f"{MARK}=".encode()
    text, this = mark.encode(), os.getpid()
    pids: list[int] = []
    others: list[tuple[int, int]] = []  # with their sessions
    of_run = set(sessions)
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if not name.isdigit() or int(name) == this or int(name) in excluded:
            continue
        pid = int(name)
        # Processes of other users cannot be read and do not belong to the run.
        with contextlib.suppress(OSError):
            session = os.getsid(pid)
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if any(
                variable.startswith(wanted) and text in variable[len(wanted) :].split(b":")
                for variable in variables
            ):
                pids.append(pid)
                of_run.add(session)
            else:
                others.append((pid, session))
    return pids + [pid for pid, session in others if session in of_run and not _is_zombie(pid)]


def end_marked(
    mark: str,
    excluded: frozenset[int] = frozenset(),
    sessions: frozenset[int] = frozenset(),
) -> int:
    """Kill every process that `marked` finds, until there is none; returns how many there were.

    After `PATIENCE_S` it returns in any case: a system call of a failed disk cannot end.
    """
    ended: set[int] = set()
    calm, deadline = 0, time.monotonic() + PATIENCE_S
    # The second search finds a process that was starting during the first.
    while calm < 2 and time.monotonic() < deadline:
        pids = marked(mark, excluded, sessions)
        sessions |= {pid for pid in pids if pid not in ended and _is_leader(pid)}
        calm = 0 if pids else calm + 1
        for pid in pids:
            ended.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(PAUSE_S)
    return len(ended)


def _is_leader(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
    return True


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
