"""One save at a time behind the training loop; its error surfaces at the next call, never later."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one job at a time on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Callable[[], None]) -> None:
        """Start `job` once the one before it is done; raises what that one raised."""
        self.wait()
        go = threading.Lock()
        go.acquire()

        def run() -> None:
            with go:
                pass
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (raised by the next call)
                self._error = error

        # Not a daemon: leaving Python normally waits for the save that is under way.
        self._thread = threading.Thread(target=run, name="perdure-save", daemon=False)
        self._thread.start()
        # `start` returns once the thread runs. Without the lock the thread would go on to the job
        # then, and keep this one, the training loop, waiting for the interpreter.
        go.release()

    def wait(self) -> None:
        """Wait for the job under way; raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what a finished job raised, once; never waits."""
        if self._thread is not None and self._thread.is_alive():
            return
        error, self._error = self._error, None
        if error is not None:
            raise error
