"""Streams: the position is a function of the step, exact after a resume, on any topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import REPLICAS, TOPOLOGIES, counted, once, same

from messages import unnamed
from perdure.data import StreamDataset
from perdure.data import stream as stream_module
from perdure.errors import DataError, TopologyError

# 16 shards that end at different times, one of them empty: 103 examples.
LENGTHS = [7, 0, 13, 5, 6, 6, 9, 4, 8, 8, 3, 1, 12, 7, 5, 9]
FIRST = np.cumsum([0, *LENGTHS])
N = 103


def read(shard: int, epoch: int) -> Iterator[Any]:
    """The examples of a shard, in another order in each epoch."""
    order = np.random.default_rng((shard, epoch)).permutation(LENGTHS[shard])
    return ({"n": FIRST[shard] + place, "x": np.float32(epoch)} for place in order)


def streams(open: Any = read, **kwargs: Any) -> StreamDataset:
    return StreamDataset(open, dict(enumerate(LENGTHS)), 32, **kwargs)


def test_every_example_once_through_seven_topologies() -> None:
    assert streams().steps_per_epoch == 7
    parts = [(t, 3 * i, 3 * i + 3) for i, t in enumerate(TOPOLOGIES)]
    assert once(counted(streams, parts), N, 3)


def test_control_streams_that_restart_after_a_resume_are_counted_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seek(self: Any, epoch: int, example: int) -> None:
        if self._position is None or self._position[0] != epoch:
            self._start(epoch, 0)
        self._position = (epoch, example)

    def make() -> StreamDataset:
        lengths = dict.fromkeys(range(16), 99)
        return StreamDataset(lambda s, _: ({"n": 99 * s + i} for i in range(99)), lengths, 32)

    parts = [((1,), 0, 2), ((1, 1), 2, 3)]
    assert max(counted(make, parts)[0].values()) == 1
    monkeypatch.setattr(stream_module._Shard, "_seek", seek)
    assert max(counted(make, parts)[0].values()) > 1
    # At the end of a shard the library itself notices.
    with pytest.raises(DataError) as error:
        streams().batch(3)
    assert "the stream has more than" in str(error.value)


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16])
def test_a_batch_does_not_depend_on_the_replicas_or_on_where_it_starts(replicas: int) -> None:
    data = streams()
    for step in (0, 1, 2, 6, 7, 9):  # two of the gaps are skipped
        whole = streams().batch(step)
        parts = [data.batch(step, replica, replicas) for replica in range(replicas)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in whole}
        assert same(joined, whole)


def test_steps_may_come_in_any_order() -> None:
    wanted = [streams().batch(step) for step in range(9)]
    data = streams()
    for step in (8, 3, 3, 7, 0, 6):
        assert same(data.batch(step), wanted[step])


def test_exhausted_shards_are_padded_with_the_first_example() -> None:
    data = streams()
    batch = data.batch(6)
    assert batch["weight"].sum() == 1  # of the shard with 13 examples
    first = next(read(0, 0))
    padding = batch["weight"] == 0
    assert (batch["n"][padding] == first["n"]).all()
    assert batch["n"].dtype == np.int64
    assert data.epoch(7) == (1, 0)


def test_drop_remainder_ends_with_the_last_full_batch() -> None:
    data = StreamDataset(read, {s: LENGTHS[s] for s in (0, 2, 3, 4)}, 8, drop_remainder=True)
    assert data.steps_per_epoch == 2
    assert all(data.batch(step)["weight"].all() for step in range(5))


def test_lengths_that_are_not_given_are_counted() -> None:
    assert StreamDataset(read, range(16), 32).recipe() == streams().recipe()


def test_a_stream_that_can_skip_is_not_read_up_to_its_position() -> None:
    reads: list[int] = []

    class Seekable:
        def __init__(self, start: int = 0) -> None:
            self.start = start

        def skip(self, number: int) -> Seekable:
            return Seekable(number)

        def __iter__(self) -> Iterator[Any]:
            for number in range(self.start, 10**9):
                reads.append(number)
                yield {"n": number}

    def make() -> StreamDataset:
        return StreamDataset(lambda *_: Seekable(), {"a": 10**9}, 4)

    step = 10**8
    assert make().batch(step)["n"].tolist() == [4 * step + row for row in range(4)]
    assert reads == [0, *range(4 * step, 4 * step + 4)]


def test_close_closes_the_streams() -> None:
    state = Counter[str]()

    def watched(shard: int, epoch: int) -> Iterator[Any]:
        state["open"] += 1
        try:
            yield from read(shard, epoch)
        finally:
            state["open"] -= 1

    data = streams(watched)
    for step in (0, 5, 2, 9):
        data.batch(step)
    assert 0 < state["open"] <= 16
    data.close()
    assert state["open"] == 0
    data.batch(1)
    data.close()
    assert state["open"] == 0


def test_the_recipe_has_shards_and_fingerprint() -> None:
    recipe = streams(seed=4).recipe()
    assert recipe == {
        "dataset": recipe["dataset"], "examples": N, "batch_size": 32, "seed": 4, "shards": 16,
        "drop_remainder": False,
    }  # fmt: skip
    others = [
        StreamDataset(read, {**dict(enumerate(LENGTHS)), 15: 8}, 32),
        StreamDataset(read, {f"{s}": n for s, n in enumerate(LENGTHS)} | {"0": 7}, 32),
        streams(lambda s, _: ({"n": 0.0 * s} for _ in range(LENGTHS[s]))),
    ]
    others[1]._shards[0]._open = others[1]._shards[1]._open = lambda s, e: read(int(s), e)
    prints = [other.recipe()["dataset"] for other in others]
    assert len({*prints, recipe["dataset"]}) == 4


# ---------------------------------------------------------------- errors


def raises(data: StreamDataset, step: int) -> str:
    with pytest.raises(DataError) as error:
        data.batch(step)
    return str(error.value)


def test_a_stream_of_another_length_than_promised_is_refused() -> None:
    short = StreamDataset(lambda _, e: iter([1, 2, 3][: 3 - e]), {"a": 3, "b": 3}, 4)
    short.batch(1)
    assert not unnamed(raises(short, 3), "step 3", "'a'", "epoch 1", "after 2 ", "expected 3")
    resumed = StreamDataset(lambda _, e: iter([1, 2][: 2 - e]), {"a": 6}, 2)
    assert not unnamed(raises(resumed, 5), "after 1 ", "expected 6")
    long = StreamDataset(lambda *_: iter([1, 2, 3]), {"a": 2}, 2)
    assert not unnamed(raises(long, 0), "step 0", "'a'", "epoch 0", "more than 2 examples")
    endless = StreamDataset(lambda *_: islice(count(), 2), {"a": 2}, 2)
    assert endless.batch(5)[0].tolist() == [0, 1]


def test_a_stream_that_raises_names_step_shard_and_example_and_can_be_read_again() -> None:
    faults = ["tape torn", "tape torn again"]

    def torn(shard: str, epoch: int) -> Iterator[int]:
        yield from (0, 1, 2)
        if faults:
            raise OSError(faults.pop(0))
        yield from (3, 4, 5)

    data = StreamDataset(torn, {"a": 6}, 2)
    data.batch(0)
    place = ("shard 'a'", "epoch 0", "example 3")
    assert not unnamed(raises(data, 1), "step 1", *place, "OSError: tape torn")
    assert not unnamed(raises(data, 2), "step 2", *place, "OSError: tape torn again")
    assert data.batch(1)[0].tolist() == [2, 3]


def test_a_stream_that_cannot_be_opened_again_is_refused(tmp_path: Path) -> None:
    def missing(shard: str, _: int) -> Any:
        return (tmp_path / shard).open()

    closed = StreamDataset(missing, {"a.tar": 6}, 2)
    assert not unnamed(raises(closed, 1), "step 1", "'a.tar'", "epoch 0", "FileNotFoundError")
    with pytest.raises(DataError) as error:
        StreamDataset(missing, ["a.tar"], 2)
    assert not unnamed(error.value, "'a.tar'", "epoch 0", "cannot be opened")
    one = iter(range(6))
    message = raises(StreamDataset(lambda *_: one, {"a": 6}, 2), 0)
    assert message.startswith("step 0: shard 'a', epoch 0: ")
    assert "the same iterator as before" in message


def test_an_example_of_another_structure_is_named() -> None:
    data = StreamDataset(lambda *_: iter([{"x": 1}, {"x": 1.5}]), {"a": 2}, 2)
    place = ("step 0", "shard 'a'", "example 1", "leaf x")
    assert not unnamed(raises(data, 0), *place, "expected int64[]", "found float64[]")


def test_replicas_and_shards_that_do_not_divide_are_refused() -> None:
    with pytest.raises(DataError) as error:
        StreamDataset(read, range(16), 24)
    assert "a global batch of 24 does not divide among 16 virtual shards" in str(error.value)
    with pytest.raises(TopologyError) as topology:
        StreamDataset(read, {0: 7, 2: 13}, 8).batch(0, 0, REPLICAS)
    assert "2 virtual shards do not divide into 8 logical replicas" in str(topology.value)
    for shards in ({}, {"a": 0}, {"a": -1}):
        with pytest.raises(DataError):
            StreamDataset(read, shards, 8)
    with pytest.raises(DataError) as error:
        StreamDataset(read, {0: 7, 11: 1}, 8, drop_remainder=True)
    assert "drop_remainder leaves no batch" in str(error.value)
