"""`stats`: figures of leaves and branches, with the same bits whatever the chunks are stored as."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from perdure.errors import ArgumentError
from perdure.look import stats
from perdure.look.leaf_stats import Stats
from perdure.state.leaf_values import array_leaf, scalar_leaf
from perdure.store import Leaf, MemoryStorage, Run
from perdure.store.format import CHUNK_BYTES

RNG = np.random.default_rng(3)


def saved(leaves: dict[str, Any], codec: str | None = None) -> MemoryStorage:
    storage = MemoryStorage()
    with Run(storage, create=True, codec=codec) as run:
        run.save(
            1,
            {
                path: value
                if isinstance(value, Leaf)
                else array_leaf(value)
                if isinstance(value, np.ndarray)
                else scalar_leaf(value)
                for path, value in leaves.items()
            },
        )
    return storage


def row_of(value: Any) -> Stats:
    [row] = stats(saved({"w": value})).rows
    return row


def test_figures_of_floats_leave_out_what_is_not_finite() -> None:
    row = row_of(np.array([3, -4, 0, -0.0, np.nan, np.inf, -np.inf], np.float32))
    assert (row.count, row.zeros, row.nans, row.infinities) == (7, 2, 1, 2)
    assert (row.min, row.max, row.mean, row.norm) == (-4, 3, -0.25, 5)
    assert row.std == pytest.approx(np.std([3, -4, 0, 0]))
    assert str(row_of(np.array([0.0, -0.0])).min) == "0.0"


@pytest.mark.parametrize(
    "array",
    [
        RNG.standard_normal(CHUNK_BYTES // 4 + 5).astype(np.float32) + 1000,  # two chunks
        RNG.standard_normal((3, 700)).astype(ml_dtypes.bfloat16),
        RNG.integers(-8, 8, 1000).astype(ml_dtypes.int4),
        RNG.integers(0, 2, 999).astype(bool),
        RNG.standard_normal(500).astype(np.float16),
    ],
    ids=str,
)
def test_figures_agree_with_numpy(array: np.ndarray[Any, Any]) -> None:
    row = row_of(array)
    numbers = array.astype(np.float64)
    assert (row.count, row.min, row.max) == (array.size, numbers.min(), numbers.max())
    assert row.mean == pytest.approx(numbers.mean(), rel=1e-12)
    assert row.std == pytest.approx(numbers.std(), rel=1e-12)
    assert row.norm == pytest.approx(np.linalg.norm(numbers.reshape(-1)), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.complex64, ml_dtypes.bfloat16])
def test_a_signalling_nan_is_counted_and_no_warning(dtype: Any) -> None:
    array = np.ones(100_000, dtype)
    words = array.view(np.uint16 if array.itemsize == 2 else np.uint32)
    infinity = np.array([np.inf], np.float32 if array.itemsize > 2 else dtype).view(words.dtype)[0]
    words[6] = infinity + words.dtype.type(1)
    row = row_of(array)
    assert (row.nans, row.infinities, row.max) == (1, 0, 1)


def test_integers_have_exact_limits_and_sums_above_the_largest_float64_are_infinite() -> None:
    row = row_of(np.array([2**63 - 1, -(2**63)]))
    assert (row.min, row.max) == (-(2**63), 2**63 - 1)
    large = row_of(np.array([1e300, -1e300, 1.7e308]))
    assert (large.min, large.max, large.norm) == (-1e300, 1.7e308, math.inf)
    assert large.mean == pytest.approx(1.7e308 / 3)
    wide = row_of(np.array([3e-140, 4e140]))
    assert wide.norm == pytest.approx(4e140)


def test_a_complex_number_counts_as_two() -> None:
    row = row_of(np.array([3 + 4j, complex(np.nan, 0)], np.complex64))
    assert (row.count, row.nans, row.zeros, row.min, row.max, row.norm) == (4, 1, 1, 0, 4, 5)


def test_what_has_no_numbers_says_so_and_an_unknown_dtype_is_an_error_beside_the_others() -> None:
    words = memoryview(bytes(8))
    result = stats(
        saved(
            {
                "empty": np.zeros(0),
                "key": Leaf("key<threefry2x32>", (), words),
                "name": "digits",
                "odd": Leaf("float7_x8", (8,), words),
                "step": 7,
                "huge": 10**400,
            }
        )
    )
    rows = {row.path: row for row in result.rows}
    assert rows["key"].problem == "random keys"
    assert rows["name"].problem == "str, no number"
    assert rows["huge"].problem is not None
    assert (rows["step"].min, rows["step"].mean) == (7, 7)
    assert (rows["empty"].problem, rows["empty"].count, rows["empty"].mean) == (None, 0, None)
    [error] = result.unknown
    assert "leaf 'odd'" in error


def test_depth_gives_a_row_for_each_branch() -> None:
    values = {f"model/{n}/w": RNG.standard_normal(1000 + n) for n in range(3)}
    values |= {"adam/0/m": np.ones(4), "step": 3}
    storage = saved(values)
    result = stats(storage, depth=1)
    assert [(row.path, row.leaf_count) for row in result.rows] == [
        ("adam", 1),
        ("model", 3),
        ("step", 1),
    ]
    numbers = np.concatenate([value for path, value in values.items() if "model" in path])
    model = result.rows[1]
    assert (model.count, model.min, model.max) == (numbers.size, numbers.min(), numbers.max())
    assert model.mean == pytest.approx(numbers.mean())
    assert model.std == pytest.approx(numbers.std())
    assert model.norm == pytest.approx(np.linalg.norm(numbers))
    [whole] = stats(storage, leaves="model", depth=0).rows
    assert (whole.path, whole.norm) == ("", model.norm)
    with pytest.raises(ArgumentError):
        stats(storage, depth=-1)
    with pytest.raises(ArgumentError, match="depth"):
        stats(storage, depth="1")  # type: ignore[arg-type]
    assert stats(storage, depth=np.int64(1)).rows == result.rows  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        stats(storage, leaves="modle")


def test_the_bits_do_not_depend_on_how_chunks_are_stored() -> None:
    values = {"b": RNG.standard_normal(300_000), "a": np.arange(1000) * 0.1}
    first = stats(saved(values))
    second = stats(saved(dict(reversed(values.items())), codec="shuffle-zstd"))
    assert [row.__dict__ for row in first.rows] == [row.__dict__ for row in second.rows]
    # Fixed forever: another order of additions would change a last digit.
    [row] = stats(saved({"a": np.arange(1000) * 0.1})).rows
    assert (row.mean, row.std, row.norm) == (49.95, 28.86749902572095, 1824.372494859534)
