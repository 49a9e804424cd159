"""Threads that stay for short work on bytes: to start some for each save costs as much as hashing 1 MB.

Whoever submits waits for its own jobs before it lets go of their memory: a pool is never shut down,
and serves every run directory of the process.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@cache
def pool(name: str, threads: int) -> ThreadPoolExecutor:
    """The threads for one kind of work, started when they are first needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"perdure-{name}")


# A child made by fork has none of these threads, and would wait for them for ever.
os.register_at_fork(after_in_child=pool.cache_clear)


def submit(executor: ThreadPoolExecutor, work: Callable[..., R], *given: Any) -> Future[R]:
    """Hand `work` to a pool; while Python ends no pool takes any more, and it is done here and now.

    A save that is under way when the program leaves its last line goes on to its end that way.
    """
    try:
        return executor.submit(work, *given)
    except RuntimeError:
        done: Future[R] = Future()
        try:
            done.set_result(work(*given))
        except BaseException as error:  # noqa: BLE001 - it surfaces where the result is asked for
            done.set_exception(error)
        return done


def finish(jobs: Iterable[Future[R]]) -> None:
    """Wait until none of `jobs` runs any more; those that had not begun never will."""
    wait([job for job in jobs if not job.cancel()])


def map_ahead(
    executor: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], ahead: int
) -> Generator[R, None, None]:
    """`work` of each item, in order; at most `ahead` of them are begun before they are asked for."""
    rest = iter(items)
    begun = deque(submit(executor, work, item) for item in islice(rest, ahead))
    try:
        while begun:
            yield begun[0].result()
            begun.popleft()
            begun.extend(submit(executor, work, item) for item in islice(rest, 1))
    finally:
        finish(begun)
