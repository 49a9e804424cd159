"""Thread pools that are never shut down: starting threads for each save costs as much as hashing 1 MB.

All run directories of a process share them. The caller waits for its jobs before it frees their memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from typing import Any, TypeVar

from perdure.runtime.system import at_fork

T = TypeVar("T")
R = TypeVar("R")


@cache
def pool(name: str, threads: int) -> ThreadPoolExecutor:
    """The pool for one kind of work; its threads start when they are first needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"perdure-{name}")


# A forked child has none of these threads, and would wait for them for ever.
at_fork(after_in_child=pool.cache_clear)


def submit(executor: ThreadPoolExecutor, work: Callable[..., R], *args: Any) -> Future[R]:
    """Submit `work`, or call it here if no thread can begin, as while Python exits."""
    done: Future[R] = Future()
    jobs = [partial(work, *args)]

    def run() -> None:
        # A pool that cannot start a thread has queued the job all the same.
        with suppress(IndexError):
            job = jobs.pop()
            if done.set_running_or_notify_cancel():
                try:
                    result = job()
                except BaseException as error:  # noqa: BLE001 - the future raises it
                    done.set_exception(error)
                else:
                    del job  # nothing that it refers to may live until the thread has ended
                    done.set_result(result)

    try:
        executor.submit(run)
    except RuntimeError:
        run()
    return done


def finish(jobs: Iterable[Future[R]]) -> None:
    """Cancel the `jobs` that have not begun, and wait for the others."""
    wait([job for job in jobs if not job.cancel()])


def map_ahead(
    executor: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], ahead: int
) -> Generator[R, None, None]:
    """The results of `work` for each item, in order; at most `ahead` calls begin before their turn."""
    rest = iter(items)
    begun = deque(submit(executor, work, item) for item in islice(rest, ahead))
    try:
        while begun:
            yield begun[0].result()
            begun.popleft()
            begun.extend(submit(executor, work, item) for item in islice(rest, 1))
    finally:
        finish(begun)
