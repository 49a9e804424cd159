"""The arithmetic under `stats` and `diff`: sums in a fixed order, distances in ULP."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from perdure.look.numerics import (
    BLOCK,
    block_sum,
    cosine,
    integer_distance,
    product_sum,
    root_ratio,
    ulp_distance,
)

RNG = np.random.default_rng(7)


def by_halves(values: list[float]) -> float:
    """The definition, in Python's own additions."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values = [
            value + values[half + place] if half + place < len(values) else value
            for place, value in enumerate(values[:half])
        ]
    return values[0] if values else 0.0


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 1000, 1023])
def test_a_sum_has_the_order_of_its_definition(size: int) -> None:
    values = RNG.standard_normal(size) * 10.0 ** RNG.integers(-9, 9, size)
    before = values.copy()
    assert block_sum(values) == by_halves(values.tolist())
    assert np.array_equal(values, before), "the caller's array was changed"


def test_another_order_gives_other_bits() -> None:
    """Negative control of the test above."""
    values = 1 / np.arange(1.0, 1000.0)
    assert block_sum(values) != sum(values.tolist())


def test_a_sum_of_products_adds_block_by_block() -> None:
    values = RNG.standard_normal(BLOCK + 10)
    first, second = values[:BLOCK], values[BLOCK:]
    expected = block_sum(first * first) + block_sum(second * second)
    assert product_sum(values, values) == expected
    assert product_sum(second, second, block_sum(first * first)) == expected
    largest = np.full(3, 1.7e308)
    assert product_sum(largest, largest) == math.inf  # above the largest float64, and no warning


def test_ratios_of_sums() -> None:
    assert root_ratio(9.0, 4.0) == 1.5
    assert (root_ratio(0.0, 0.0), root_ratio(1.0, 0.0)) == (None, math.inf)
    assert cosine(-6.0, 4.0, 9.0) == -1
    assert cosine(0.0, 0.0, 4.0) is None


def steps_between(values: list[float], first: float, second: float) -> int:
    return abs(values.index(first) - values.index(second))


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "float8_e8m0fnu"]
)
def test_ulp_of_one_byte_counts_the_values_in_between(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype))
    width = ml_dtypes.finfo(kind).bits
    codes = np.arange(1 << width, dtype=np.uint8).view(kind)
    numbers = codes[~np.isnan(codes.astype(np.float64))]
    values = sorted(set(numbers.astype(np.float64).tolist()))
    for i, j in itertools.product(range(0, numbers.size, 5), range(0, numbers.size, 7)):
        expected = steps_between(values, float(numbers[i]), float(numbers[j]))
        assert ulp_distance(numbers[i : i + 1], numbers[j : j + 1]) == expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_ulp_steps_through_zero(dtype: Any) -> None:
    kind = np.dtype(dtype)
    one = np.array([1], kind)
    word = {2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.itemsize]
    above = (one.view(word) + word(3)).view(kind)
    assert ulp_distance(one, above) == ulp_distance(above, one) == 3
    least = np.array([1], word).view(kind)  # the smallest above zero
    zero = np.array([0.0], kind)
    assert ulp_distance(zero, -zero) == 0
    assert ulp_distance(least, zero) == 1
    assert ulp_distance(least, -least) == 2
    assert ulp_distance(np.array([-np.inf], kind), np.array([np.inf], kind)) == 2 * int(
        np.array([np.inf], kind).view(word)[0]
    )
    assert ulp_distance(one[:0], one[:0]) == 0


def test_differences_of_integers_are_exact() -> None:
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert integer_distance(np.array([low]), np.array([high])) == 2**64 - 1
    assert integer_distance(np.array([2**64 - 1], np.uint64), np.array([1], np.uint64)) == 2**64 - 2
    assert integer_distance(np.array([-128], np.int8), np.array([127], np.int8)) == 255
    assert integer_distance(np.array([True]), np.array([False])) == 1
    four = np.array([-8, 7]).astype(ml_dtypes.int4)
    assert integer_distance(four[:1], four[1:]) == 15


def test_the_sum_is_near_the_exact_one() -> None:
    values = RNG.standard_normal(5000)
    exact = float(sum(map(Fraction, values.tolist())))
    assert block_sum(values) == pytest.approx(exact, abs=1e-12)
