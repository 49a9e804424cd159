"""Every indexed source gives the batches of arrays: each example once, on any topology."""

from __future__ import annotations

import tracemalloc
from collections import namedtuple
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
import torch
from counting import TOPOLOGIES, Lazy, counted, once, same

from messages import unnamed
from perdure.data import ArrayDataset, Dataset
from perdure.data import sources as sources_module
from perdure.errors import DataError

N = 103
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
EXAMPLES = [{"x": X[n], "n": n} for n in range(N)]


class Torch(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, number: int) -> Any:
        return {"x": torch.from_numpy(X[number]), "n": number}


def mapped(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", X)
    numbers = np.memmap(folder / "n.bin", np.int64, "w+", shape=(N,))
    numbers[:] = np.arange(N)
    numbers.flush()
    return {
        "x": np.load(folder / "x.npy", mmap_mode="r"),
        "n": np.memmap(folder / "n.bin", np.int64, "r", shape=(N,)),
    }


def make(kind: str, folder: Path, **kwargs: Any) -> Dataset:
    if kind == "mapped":
        return ArrayDataset(mapped(folder), 24, **kwargs)
    source: Any = {
        "list": EXAMPLES,
        "torch": Torch(),
        "grain": grain.MapDataset.source(EXAMPLES),
    }[kind]
    return Dataset(source, 24, **kwargs)


@pytest.mark.parametrize("kind", ["mapped", "list", "torch", "grain"])
def test_every_source_gives_the_batches_of_arrays_in_memory(kind: str, tmp_path: Path) -> None:
    data = make(kind, tmp_path, seed=3)
    arrays = ArrayDataset({"x": X, "n": np.arange(N)}, 24, seed=3)
    for step in (0, 4, 7):
        assert same(data.batch(step), arrays.batch(step))
        assert same(data.batch(step, 5, 8), arrays.batch(step, 5, 8))
        assert type(data.batch(step)["x"]) is np.ndarray  # a copy in memory, not a view of a file
    assert data.recipe() | {"dataset": 0} == arrays.recipe() | {"dataset": 0}


@pytest.mark.parametrize("kind", ["mapped", "list", "torch", "grain"])
def test_every_example_once_through_seven_topologies(kind: str, tmp_path: Path) -> None:
    data = make(kind, tmp_path)
    parts = [(t, 2 * i, 2 * i + 2) for i, t in enumerate(TOPOLOGIES)] + [((1,), 14, 15)]
    assert once(counted(lambda: data, parts), N, 3)
    # The control: a worker that restarts its iterator after a change of topology.
    again = [*parts[:2], ((1, 1), 3, 6), *parts[3:]]
    assert not once(counted(lambda: data, again), N, 3)


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("example", "shapes"),
    [
        (lambda n: n, [(4,), (4,)]),
        (lambda _: np.zeros((2, 3), np.uint8), [(4, 2, 3), (4,)]),
        (lambda n: (np.zeros(2), n), [(4, 2), (4,), (4,)]),
        (lambda n: [np.zeros(2), n], [(4, 2), (4,), (4,)]),
        (lambda n: Pair(np.zeros(2), n), [Pair, (4,)]),
        (lambda _: (torch.ones(2, dtype=torch.float16), True), [(4, 2), (4,), (4,)]),
    ],
)
def test_an_example_is_a_tree_of_arrays_and_numbers(example: Any, shapes: list[Any]) -> None:
    batch = Dataset([example(n) for n in range(4)], 4).batch(0)
    assert isinstance(batch, tuple)
    assert [type(v) if isinstance(v, Pair) else v.shape for v in batch] == shapes
    assert batch[-1].dtype == np.float32


def test_trees_nest_and_keys_may_have_any_order() -> None:
    examples = [{"a": {"b": (0, 0)}, "c": 0}, {"c": 1, "a": {"b": (1, -1)}}]
    batch = Dataset(examples, 2, shuffle=False).batch(0)
    assert batch["a"]["b"][1].tolist() == [0, -1]
    assert batch["c"].tolist() == [0, 1]


def test_grain_keeps_its_transformations_and_draws_new_numbers_in_each_epoch() -> None:
    def noise(example: Any, rng: np.random.Generator) -> Any:
        return {**example, "noise": rng.integers(2**32)}

    source = grain.MapDataset.source(EXAMPLES).seed(3).shuffle().random_map(noise)
    data = Dataset(source, 24)
    first: dict[int, int] = {}
    for epoch in (0, 1):
        drawn: dict[int, int] = {}
        for step in range(5 * epoch, 5 * epoch + 5):
            batch = data.batch(step)
            real = batch["weight"] == 1
            drawn |= dict(
                zip(batch["n"][real].tolist(), batch["noise"][real].tolist(), strict=True)
            )
        assert sorted(drawn) == list(range(N))
        assert drawn != first
        first = drawn
    assert same(Dataset(source, 24).batch(7), data.batch(7))


def test_an_endless_grain_dataset_is_refused_and_a_filtered_one_at_its_first_gap() -> None:
    source = grain.MapDataset.range(10)
    with pytest.raises(DataError) as error:
        Dataset(source.repeat(), 5)
    assert not unnamed(error.value, "endless", "repeat()")
    assert Dataset(source.repeat(3), 5).num_examples == 30
    data = Dataset(source.filter(lambda n: n != 3), 5, shuffle=False)
    with pytest.raises(DataError) as error:
        data.batch(0)
    assert str(error.value).startswith("step 0: example 3 is None.")


def test_a_billion_examples_cost_no_more_memory_than_ten_thousand() -> None:
    def peak(length: int) -> int:
        tracemalloc.start()
        data = Dataset(Lazy(length), 64, fingerprint="numbers")
        for step in (0, 7, data.steps_per_epoch - 1, data.steps_per_epoch + 3):
            data.batch(step, 1, 4)
        nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return nbytes

    peak(100)  # allocations that happen once in a process
    small, large = peak(10**4), peak(10**9)
    assert large < small + 1024
    # The control: a table of the order would be measured.
    tracemalloc.start()
    np.random.default_rng(0).permutation(10**5)
    assert tracemalloc.get_traced_memory()[1] > small + 1024
    tracemalloc.stop()


# ---------------------------------------------------------------- fingerprints


def test_a_large_array_is_fingerprinted_by_a_fixed_choice_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ArrayDataset(mapped(tmp_path), 4)
    assert small.fingerprint == ArrayDataset({"x": X, "n": np.arange(N)}, 4).fingerprint
    monkeypatch.setattr(sources_module, "FULL_BYTES", 100)
    monkeypatch.setattr(sources_module, "SAMPLED_BYTES", 64)
    fingerprint = ArrayDataset(mapped(tmp_path), 4).fingerprint
    assert fingerprint.startswith(f"sampled:{N}:")
    # The same bits in memory or in a file are the same data.
    assert fingerprint == ArrayDataset({"x": X, "n": np.arange(N)}, 4).fingerprint
    chosen = sources_module.sample_indices(N, 32)
    assert {0, N - 1} < set(chosen.tolist())
    for row in range(N):
        changed = X.copy()
        changed[row] += 1
        other = ArrayDataset({"x": changed, "n": np.arange(N)}, 4).fingerprint
        assert (other != fingerprint) == (row in chosen)


def test_a_list_is_fingerprinted_by_a_fixed_choice_of_examples() -> None:
    fingerprint = Dataset(EXAMPLES, 4).fingerprint
    assert fingerprint == Dataset(Torch(), 4).fingerprint
    assert fingerprint != Dataset(EXAMPLES[:-1], 4).fingerprint
    assert (
        fingerprint
        != Dataset([{**e, "x": e["x"] + (e["n"] == N - 1)} for e in EXAMPLES], 4).fingerprint
    )
    assert Dataset(EXAMPLES, 4, fingerprint="digits v2").recipe()["dataset"] == "digits v2"


def test_a_source_with_random_numbers_of_its_own_is_refused() -> None:
    rng = np.random.default_rng(0)

    class Random(Lazy):
        def __getitem__(self, number: int) -> Any:
            return rng.normal(size=3)

    with pytest.raises(DataError) as error:
        Dataset(Random(N), 4).recipe()
    assert "twice gave different bits" in str(error.value)
    assert "give them as augment=" in str(error.value)


# ---------------------------------------------------------------- errors


def test_an_empty_source_and_unsupported_objects_are_refused() -> None:
    with pytest.raises(DataError) as error:
        Dataset([], 4)
    assert "the dataset is empty" in str(error.value)
    for what in (iter([1]), {"x": X}):
        with pytest.raises(DataError) as error:
            Dataset(what, 4)
        assert "Use ArrayDataset for arrays, StreamDataset for iterators." in str(error.value)


def test_a_dataset_that_changes_its_length_during_a_run_is_refused() -> None:
    source = list(EXAMPLES)
    data = Dataset(source, 24)
    data.batch(0)
    source.pop()
    with pytest.raises(DataError) as error:
        data.batch(1)
    assert not unnamed(error.value, "step 1", "changed", "103", "102")
    assert Dataset(source, 24).recipe()["examples"] == 102  # and between runs the recipe says so


@pytest.mark.parametrize(
    ("bad", "leaf", "expected", "actual"),
    [
        ({"x": X[0], "n": 1.0}, ", leaf n", "int64[]", "float64[]"),
        ({"x": X[0, :2], "n": 1}, ", leaf x", "float32[3]", "float32[2]"),
        ({"x": X[0]}, "", "dict of ['x', 'n']", "dict of ['x']"),
        ((X[0], 1), "", "dict of ['x', 'n']", "tuple of [0, 1]"),
        ({"x": "cat", "n": 1}, ", leaf x", None, "str"),
        ({"x": object(), "n": 1}, ", leaf x", None, "object"),
    ],
)
def test_an_example_of_another_structure_is_named(
    bad: Any, leaf: str, expected: str | None, actual: str
) -> None:
    examples = [*EXAMPLES[:5], bad, *EXAMPLES[6:]]
    data = Dataset(examples, 4, shuffle=False)
    data.batch(0)
    with pytest.raises(DataError) as error:
        data.batch(1)
    wanted = "an array or a number" if expected is None else f"{expected} as in the first example"
    assert str(error.value).startswith(
        f"step 1: example 5{leaf}: expected {wanted}, found {actual}."
    )


def test_a_first_example_of_an_unsupported_type_is_refused() -> None:
    with pytest.raises(DataError) as error:
        Dataset([{"text": "cat"}], 1).batch(0)
    assert not unnamed(error.value, "step 0", "first example", "leaf text", "expected an array")
    with pytest.raises(DataError) as error:
        Dataset([{"weight": 1}], 1).batch(0)
    assert 'step 0: the examples have an entry "weight"' in str(error.value)


def test_an_example_that_raises_is_named_with_its_step() -> None:
    class Broken(Lazy):
        def __getitem__(self, number: int) -> Any:
            if number == 30:
                raise OSError("disk on fire")
            return super().__getitem__(number)

    with pytest.raises(DataError) as error:
        Dataset(Broken(N), 24, shuffle=False).batch(6)
    assert not unnamed(error.value, "step 6", "example 30 of 103", "OSError: disk on fire")
    assert isinstance(error.value.__cause__, OSError)
