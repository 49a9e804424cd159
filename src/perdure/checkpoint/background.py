"""One save at a time behind the training loop; its error surfaces at the next call, never later."""

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
        # One thread that stays: a new one for each save would make the loop wait until it runs. It is
        # no daemon, so that leaving Python normally waits for the save that is under way.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="perdure-save")
        self._job: Future[None] | None = None
        self._pid = os.getpid()
        atexit.register(_tell_what_nobody_asked, weakref.ref(self))  # behind the wait for threads

    @property
    def busy(self) -> bool:
        job = self._job  # read once: another thread may take it away
        # A forked child has no thread that would ever finish the job.
        return job is not None and not job.done() and os.getpid() == self._pid

    def submit(self, job: Callable[[], None]) -> None:
        """Start `job` once the one before it is done; raises what that one raised."""
        self.wait()
        self._job = self._pool.submit(job)

    def wait(self) -> None:
        """Wait for the job under way; raises what it raised, once."""
        if (job := self._job) is None:
            return
        try:
            job.result()
        finally:
            # An interrupted wait (Ctrl-C) leaves the job under way: it still reads the snapshot.
            if job.done():
                self._job = None

    def check(self) -> None:
        """Raise what a finished job raised, once; never waits."""
        if not self.busy:
            self.wait()

    def tell(self) -> None:
        """Log what a finished job raised, where nobody asked for it any more."""
        job = self._job
        if job is not None and job.done() and os.getpid() == self._pid:
            self._job = None
            if error := job.exception():
                logging.getLogger(__name__).error("The last save before the end failed: %s", error)

    def __del__(self) -> None:
        self.tell()


def _tell_what_nobody_asked(background: weakref.ref[Background]) -> None:
    if (alive := background()) is not None:
        alive.tell()
