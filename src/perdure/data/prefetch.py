"""`Prefetch`: makes batches in background threads, a bounded number of steps ahead.

Invariant: a batch has the same bits whether it was made ahead or when it was asked for. No position of
the loop is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from perdure.data.dataset import DatasetBase
from perdure.data.pipelines import refuse_pipeline
from perdure.errors import DataError

_Key = tuple[int, int, int]


class Prefetch:
    """A dataset whose next batches are made in background threads.

    When a replica asks for its batch of step n, those of steps n+1 to n+ahead are requested too. An
    error is raised by the call for the step that it belongs to. Use it in a `with` block, or call
    `close`.

    Args:
        dataset: only the background threads read it.
        ahead: how many steps are made ahead, for each replica.
        threads: how many threads read the dataset. Use 1 for a source that is not safe to read from
            several threads; a `StreamDataset` always gets 1.

    Raises:
        DataError: `ahead` or `threads` is less than 1, or `dataset` is an input pipeline of another
            library.
    """

    def __init__(self, dataset: DatasetBase, ahead: int = 2, *, threads: int = 2) -> None:
        if ahead < 1 or threads < 1:
            raise DataError(
                f"ahead, threads: expected at least 1, found ahead={ahead}, threads={threads}."
            )
        refuse_pipeline(dataset)
        self._dataset = dataset
        self.batch_size, self.num_examples = dataset.batch_size, dataset.num_examples
        self.steps_per_epoch = dataset.steps_per_epoch
        self._ahead = ahead
        self._lock = threading.Lock()
        self._closed = False
        self._futures: dict[_Key, Future[Any]] = {}
        self._jobs: SimpleQueue[tuple[Future[Any], _Key] | None] = SimpleQueue()
        # Daemon threads: unlike those of an executor, they do not keep Python from exiting.
        self._threads = [
            threading.Thread(target=self._work, name=f"perdure-prefetch_{n}", daemon=True)
            for n in range(1 if dataset.sequential else threads)
        ]
        for thread in self._threads:
            thread.start()

    def epoch(self, step: int) -> tuple[int, int]:
        """As `DatasetBase.epoch`."""
        return self._dataset.epoch(step)

    def recipe(self) -> Mapping[str, str | int | bool]:
        """The recipe of the dataset: prefetching does not change the result."""
        return self._dataset.recipe()

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        """As `DatasetBase.batch`; waits only if the batch has not been made yet."""
        with self._lock:
            if self._closed:
                raise DataError(f"step {step}: asked for a batch after Prefetch was closed.")
            # The loop has passed these steps, or jumped away from them.
            for key in [k for k in self._futures if not step <= k[0] <= step + self._ahead]:
                self._futures.pop(key).cancel()
            future = self._request((step, replica, replicas))
            del self._futures[step, replica, replicas]  # the arrays are the caller's now
            for later in range(step + 1, step + self._ahead + 1):
                self._request((later, replica, replicas))
        return future.result()

    def close(self, *, wait: bool = True) -> None:
        """Stop the threads, after the batches that they are making; `wait=False` returns at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for future in self._futures.values():
                future.cancel()
            self._futures.clear()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error or a preemption, do not wait for a read that may never return.
        self.close(wait=kind is None)

    def _request(self, key: _Key) -> Future[Any]:
        if key not in self._futures:
            self._futures[key] = Future()
            self._jobs.put((self._futures[key], key))
        return self._futures[key]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, key = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._dataset.batch(*key))
                except BaseException as error:  # noqa: BLE001  # raised by the call for this batch
                    future.set_exception(error)
