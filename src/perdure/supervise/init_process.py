"""`become_init`: reaps zombies if `perdure run` is the first process of a container.

Processes that lose their parent become children of process 1, and stay as zombies until it waits for
them. As in tini, process 1 then does only this and passes signals on; its child supervises.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def become_init() -> None:
    """Fork: the child returns; the parent reaps, passes signals on, and exits with its status."""
    # Signals that a process gets for its own faults or from the terminal are not passed on.
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    kept |= {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGPIPE}
    passed_on = signal.valid_signals() - kept
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    supervisor = os.fork()
    if supervisor == 0:
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the parent, which passes it on once
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
