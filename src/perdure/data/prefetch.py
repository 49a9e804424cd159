"""Batches made in the background, a bounded number of steps ahead.

Owns the threads. Invariant: a batch is what the dataset gives for its step, whether it was made ahead
or when asked for; nothing is kept that says where the loop is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from perdure.data.batches import Batches
from perdure.data.pipelines import refuse_pipeline
from perdure.errors import DataError

_Key = tuple[int, int, int]


class Prefetch:
    """`dataset`, with the next `ahead` steps of every replica made by `threads` threads.

    Whoever asks for a share of step n will ask for the same share of steps n+1 to n+ahead; an ask for
    any other step is answered as well, only without a head start. An error is raised by the ask for
    the step that it belongs to. The dataset is touched by these threads alone: with `threads=1` by
    one, which a source needs that is not safe to read from several (a stream always gets one). Close
    it, or use it in a `with` block.
    """

    def __init__(self, dataset: Batches, ahead: int = 2, *, threads: int = 2) -> None:
        if ahead < 1 or threads < 1:
            raise DataError(
                f"ahead and threads must be at least 1, got ahead={ahead}, threads={threads}"
            )
        refuse_pipeline(dataset)
        self._dataset = dataset
        self._ahead = ahead
        self._pool: _Workers | None = _Workers(1 if dataset.in_order else threads)
        self._lock = threading.Lock()
        self._made: dict[_Key, Future[Any]] = {}

    @property
    def batch_size(self) -> int:
        return self._dataset.batch_size

    @property
    def steps_per_epoch(self) -> int:
        return self._dataset.steps_per_epoch

    @property
    def num_examples(self) -> int:
        return self._dataset.num_examples

    def epoch(self, step: int) -> tuple[int, int]:
        """(epoch, step within that epoch) of a global step."""
        return self._dataset.epoch(step)

    def recipe(self) -> Mapping[str, str | int | bool]:
        """That of the dataset: making batches ahead decides nothing."""
        return self._dataset.recipe()

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        """`dataset.batch`; waits only if the batch is not made yet."""
        with self._lock:
            if self._pool is None:
                raise DataError(f"step {step}: asked for a batch after Prefetch was closed")
            # What the loop has passed, or jumped away from, is not asked for again.
            for key in [k for k in self._made if not step <= k[0] <= step + self._ahead]:
                self._made.pop(key).cancel()
            wanted = self._request((step, replica, replicas))
            del self._made[step, replica, replicas]  # the arrays are the caller's now
            for later in range(step + 1, step + self._ahead + 1):
                self._request((later, replica, replicas))
        return wanted.result()

    def close(self, *, wait: bool = True) -> None:
        """Wait for the batch in work and end the threads. Nothing that was not asked for is raised.

        With `wait=False` a thread that still reads ends by itself, or with the process.
        """
        with self._lock:
            pool, self._pool = self._pool, None
            for future in self._made.values():
                future.cancel()
            self._made.clear()
        if pool is not None:
            pool.end(wait=wait)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # On the way out of a preempted run nobody waits for a read that may never come back.
        self.close(wait=kind is None)

    def _request(self, key: _Key) -> Future[Any]:
        assert self._pool is not None
        if key not in self._made:
            self._made[key] = self._pool.submit(self._dataset.batch, *key)
        return self._made[key]


class _Workers:
    """Threads that make batches, and do not keep Python from leaving, as an executor's would."""

    def __init__(self, count: int) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"perdure-prefetch_{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args)))
        return future

    def end(self, *, wait: bool) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, make = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(make())
                except BaseException as error:  # noqa: BLE001  # raised by the ask for this batch
                    future.set_exception(error)
