"""`Prefetch`: the same batches, errors with their step, and no thread left behind."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from counting import same

from messages import unnamed
from perdure.data import ArrayDataset, Dataset, Prefetch, StreamDataset
from perdure.errors import DataError

N, BATCH = 103, 24
NAME = "perdure-prefetch"


class Watched(Dataset):
    """Records which parts of which batches were made, and by which thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made: list[tuple[int, int]] = []
        self.by: set[int] = set()
        self.changed = threading.Condition()

    def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
        try:
            return super().batch(step, replica, replicas)
        finally:
            with self.changed:
                self.made.append((step, replica))
                self.by.add(threading.get_ident())
                self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.made) >= count, timeout=60)


def examples(broken: int = -1) -> Any:
    class Source:
        def __len__(self) -> int:
            return N

        def __getitem__(self, number: int) -> Any:
            if number == broken:
                raise OSError("disk on fire")
            return {"n": number}

    return Source()


def mine() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.mark.parametrize("threads", [1, 3])
def test_prefetched_batches_have_the_same_bits_in_any_order(threads: int) -> None:
    data = ArrayDataset({"n": np.arange(N)}, BATCH, augment=lambda _, rng: {"x": rng.random()})
    orders = [range(12), [5, 5, 4, 11, 0, 1, 2, 30, 3], range(8, -1, -1)]
    with Prefetch(data, ahead=3, threads=threads) as ahead:
        for steps in orders:
            for step in steps:
                for replica in range(8):
                    assert same(ahead.batch(step, replica, 8), data.batch(step, replica, 8))
                assert same(ahead.batch(step), data.batch(step))
        assert ahead.recipe() == data.recipe()
        assert (ahead.batch_size, ahead.steps_per_epoch, ahead.num_examples) == (BATCH, 5, N)
        assert ahead.epoch(7) == (1, 2)
    assert mine() == []


def test_prefetch_works_ahead_by_the_given_number_of_steps() -> None:
    data = Watched(examples(), BATCH)
    with Prefetch(data, ahead=2) as ahead:
        for replica in (2, 3):
            ahead.batch(0, replica, 8)
        data.wait_for(6)
        assert sorted(data.made) == [(step, r) for step in (0, 1, 2) for r in (2, 3)]
        ahead.batch(1, 2, 8)
        data.wait_for(7)
        assert sorted(data.made)[-1] == (3, 2)
        assert len(data.made) == 7  # batches that were ready were not made again
        assert len(ahead._futures) <= 2 * 2 + 1
        assert threading.get_ident() not in data.by
    assert len(data.made) == 7


def test_prefetch_drops_batches_that_the_loop_has_passed() -> None:
    with Prefetch(Watched(examples(), BATCH), ahead=2) as ahead:
        for step in [*range(20), 100, 7, *range(50, 60)]:
            for replica in range(4):
                ahead.batch(step, replica, 4)
            assert len(ahead._futures) <= 2 * 4
            assert all(step < key[0] <= step + 2 for key in ahead._futures)


def test_the_caller_may_change_a_batch_in_place() -> None:
    data = ArrayDataset({"n": np.arange(N)}, BATCH)
    with Prefetch(data) as ahead:
        ahead.batch(0)["n"][:] = -1
        assert same(ahead.batch(0), data.batch(0))


def test_an_error_is_raised_when_its_step_is_read_and_each_time_again() -> None:
    data = Watched(examples(broken=50), BATCH, shuffle=False)
    with Prefetch(data, ahead=2) as ahead:
        ahead.batch(0)
        data.wait_for(3)  # step 2 has failed by now
        ahead.batch(1)
        for _ in range(2):
            with pytest.raises(DataError) as error:
                ahead.batch(2)
            assert not unnamed(error.value, "step 2", "example 50", "OSError: disk on fire")
        ahead.batch(3)
    with Prefetch(data, ahead=2) as ahead:
        ahead.batch(0)  # a step that is never read raises nothing, not even at close
    assert mine() == []


def test_a_read_after_close_is_refused() -> None:
    ahead = Prefetch(ArrayDataset(np.arange(N), BATCH))
    ahead.batch(3)
    ahead.close()
    ahead.close()
    assert mine() == []
    with pytest.raises(DataError) as error:
        ahead.batch(4)
    assert str(error.value).startswith("step 4: asked for a batch after Prefetch was closed")
    with pytest.raises(DataError):
        Prefetch(ArrayDataset(np.arange(N), BATCH), ahead=0)


def test_threads_end_when_the_loop_fails() -> None:
    def loop() -> None:
        with Prefetch(Dataset(examples(), BATCH)) as ahead:
            ahead.batch(0)
            assert mine()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    for thread in mine():
        thread.join()
    assert mine() == []


def test_close_does_not_wait_for_a_read_that_hangs() -> None:
    go = threading.Event()

    class Stuck(Dataset):
        def batch(self, step: int, replica: int = 0, replicas: int = 1) -> Any:
            go.wait()

    def loop() -> None:
        with Prefetch(Stuck(examples(), BATCH)) as ahead:
            ahead._request((0, 0, 1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    left = mine()
    assert left
    assert all(thread.daemon for thread in left), "Python would wait for them at its end"
    go.set()
    for thread in left:
        thread.join()


def test_a_stream_is_read_by_one_thread_and_once() -> None:
    opened: list[tuple[int, int]] = []

    def read(shard: int, epoch: int) -> Any:
        opened.append((shard, epoch))
        return ({"n": np.int64(shard * 100 + n)} for n in range(20))

    def make() -> StreamDataset:
        return StreamDataset(read, dict.fromkeys(range(8), 20), 32)

    plain = make()
    wanted = [[plain.batch(step, r, 4) for r in (1, 2)] for step in range(10)]
    opened.clear()
    with Prefetch(make(), threads=4) as ahead:
        for step, parts in enumerate(wanted):
            for replica, part in zip((1, 2), parts, strict=True):
                assert same(ahead.batch(step, replica, 4), part)
        assert len(mine()) == 1
    # Each of its shards once in each epoch; shard 0 for the first example of all.
    assert sorted(o for o in opened if o[1] < 2) == [
        (0, 0), *((shard, epoch) for shard in (2, 3, 4, 5) for epoch in (0, 1)),
    ]  # fmt: skip
