"""`Background`: a thread that saves while the training loop runs.

Invariant: there is one job at a time, and the next call raises its error.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs one job at a time on a thread of its own."""

    def __init__(self) -> None:
        # One thread for all saves: the loop would wait for a new one to start. It is not a daemon, so
        # that Python waits for the save under way before it exits.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="perdure-save")
        self._job: Future[None] | None = None
        self._pid = os.getpid()
        atexit.register(_log_at_exit, weakref.ref(self))  # runs after the wait for threads

    @property
    def busy(self) -> bool:
        job = self._job  # read once: another thread may take it away
        # A forked child has no thread that would ever finish the job.
        return job is not None and not job.done() and os.getpid() == self._pid

    def submit(self, job: Callable[[], None]) -> None:
        """Start `job` after the one before it; raises the error of that one.

        While Python exits no thread can begin. Then the job runs here, and its error is raised at once,
        because there may be no next call.
        """
        self.wait()
        # The thread of a pool refers to its job for a moment after the result is known. Nothing that
        # the job refers to (a saver that nobody else has, and its lock) may live that long.
        jobs = [job]
        try:
            self._job = self._pool.submit(lambda: jobs.pop()())
        except RuntimeError:
            jobs.pop()()

    def wait(self) -> None:
        """Wait for the job under way; raises its error, once."""
        if (job := self._job) is None:
            return
        try:
            job.result()
        finally:
            # An interrupted wait (Ctrl-C) leaves the job under way: it still reads the snapshot.
            if job.done():
                self._job = None

    def join(self) -> None:
        """Wait for the job under way; its error stays for the next call."""
        if self.busy and (job := self._job) is not None:
            job.exception()

    def check(self) -> None:
        """Raise the error of a finished job, once; never waits."""
        if not self.busy:
            self.wait()

    def log_error(self) -> None:
        """Log the error of a finished job that no call has raised."""
        job = self._job
        if job is not None and job.done() and os.getpid() == self._pid:
            self._job = None
            if error := job.exception():
                logging.getLogger(__name__).error("The last save before the end failed: %s", error)

    def __del__(self) -> None:
        self.log_error()


def _log_at_exit(background: weakref.ref[Background]) -> None:
    if (alive := background()) is not None:
        alive.log_error()
