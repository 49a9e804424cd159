"""The plan of a sharded array, against NumPy: every byte once, and as few as possible move."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from perdure.errors import CorruptionError
from perdure.store import format as store_format
from perdure.store import shard_plan
from perdure.store.shard_plan import (
    Region,
    ShardLayout,
    ShardPlan,
    Shards,
    blocks,
    first_element,
    own_chunks,
    plan_shards,
    read_slices,
    slices_of,
    volume,
)

CHUNK = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (store_format, shard_plan):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


def cuts(size: int, source: np.random.Generator) -> list[tuple[int, int]]:
    points = sorted(source.integers(0, size + 1, source.integers(0, 3)).tolist())
    return list(itertools.pairwise([0, *points, size]))


def layout_of(source: np.random.Generator) -> ShardLayout:
    """An array of up to three axes, cut unevenly along each, some of the parts in several processes."""
    shape = tuple(source.integers(1, 12, source.integers(1, 4)).tolist())
    grid = [cuts(size, source) for size in shape]
    regions: list[list[Region]] = [[] for _ in range(source.integers(1, 5))]
    for region in dict.fromkeys(itertools.product(*grid)):
        for process in {*source.integers(0, len(regions), source.integers(1, 3)).tolist()}:
            regions[process].append(region)
    itemsize = int(source.choice([1, 2, 4, 8, 16]))
    return ShardLayout(shape, itemsize, tuple(map(tuple, regions)))


def shards_of(array: np.ndarray, layout: ShardLayout, process: int) -> Shards:
    regions = layout.regions[process]
    parts = tuple(
        memoryview(array[tuple(slice(*span) for span in region)].tobytes()) for region in regions
    )
    return Shards(layout.shape, layout.itemsize, regions, parts)


@pytest.mark.parametrize("seed", range(80))
def test_every_byte_comes_from_one_place_and_as_few_as_possible_move(seed: int) -> None:
    source = np.random.default_rng(seed)
    layout = layout_of(source)
    count = len(layout.regions)
    array = source.integers(0, 256, (*layout.shape, layout.itemsize), dtype=np.uint8)
    whole, numbers = array.tobytes(), np.arange(array.size).reshape(array.shape)
    has = [np.zeros(array.size, bool) for _ in range(count)]
    for process, regions in enumerate(layout.regions):
        for region in regions:
            has[process][numbers[tuple(slice(*span) for span in region)].reshape(-1)] = True
    plan = ShardPlan("w", layout, [0] * count)
    shards = [shards_of(array, layout, process) for process in range(count)]
    written: dict[int, bytes] = {}
    moved = 0
    for process in range(count):

        def fetch(
            sender: int, chunk: int, size: int, place: Callable[..., None], writer: int = process
        ) -> None:
            nonlocal moved
            memory = memoryview(bytearray(size))
            slices = slices_of(plan, chunk, writer, sender)
            assert read_slices(slices, shards[sender], memory) == size
            place(memory)
            moved += size

        for number, chunk in own_chunks(plan, shards[process], process, fetch):
            assert number not in written
            written[number] = bytes(shard_plan.whole(chunk))
    assert b"".join(written[number] for number in range(len(plan.spans))) == whole
    assert moved == sum(
        stop - start - max(int(own[start:stop].sum()) for own in has) for start, stop in plan.spans
    )


def test_chunks_that_several_processes_have_are_divided() -> None:
    region = ((0, 16 * CHUNK),)
    layout = ShardLayout((16 * CHUNK,), 1, ((region,),) * 4)
    load = [0] * 4
    plan = ShardPlan("w", layout, load)
    assert load == [4 * CHUNK] * 4
    assert {len([w for w in plan.writers if w == process]) for process in range(4)} == {4}


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 6, 1)])
def test_blocks_follow_each_other(shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for start in range(numbers.size):
        for stop in range(start, numbers.size + 1):
            found = blocks(shape, start, stop)
            elements: list[Any] = []
            for block in found:
                elements += numbers[tuple(slice(*span) for span in block)].reshape(-1).tolist()
                assert first_element(shape, block) == elements[-volume(block)]
            assert elements == list(range(start, stop))
            assert len(found) < 2 * len(shape)


def test_a_region_with_gaps_in_memory_has_no_first_element() -> None:
    assert first_element((4, 6), ((1, 3), (0, 6))) == 6
    assert first_element((4, 6), ((2, 3), (1, 4))) == 13
    assert first_element((4, 6), ((1, 3), (1, 4))) is None


def test_elements_that_no_process_has_are_an_error() -> None:
    layout = ShardLayout((4, 64), 1, ((((0, 2), (0, 64)),), (((3, 4), (0, 64)),)))
    with pytest.raises(CorruptionError, match=r"w: expected 64 bytes of chunk 2 .*found 0"):
        ShardPlan("w", layout, [0, 0])


def test_every_process_finds_the_same_plan() -> None:
    source = np.random.default_rng(5)
    layouts = {f"leaf{number}": layout_of(source) for number in range(80)}
    layouts = {path: layout for path, layout in layouts.items() if len(layout.regions) == 4}
    assert len(layouts) > 2
    found = []
    for process in range(4):
        plans = plan_shards(dict(reversed(layouts.items()) if process else layouts), 4)
        found.append({path: plan.writers for path, plan in plans.items()})
    assert found == found[:1] * 4
