"""The permutation is a bijection, depends on its key alone, and never changes."""

from __future__ import annotations

import numpy as np
import pytest

from perdure.data import permute
from perdure.errors import DataError


@pytest.mark.parametrize("length", [*range(1, 66), 255, 256, 257, 1000, 4097])
def test_the_permutation_is_a_bijection(length: int) -> None:
    for key in [(0,), (0, 0), (7, 3)]:
        assert sorted(permute(np.arange(length), length, key)) == list(range(length))


def test_the_values_of_the_permutation_never_change() -> None:
    # Change these and every run that has begun ends with other bits.
    assert permute(np.arange(10), 10, (0, 0)).tolist() == [5, 4, 9, 3, 8, 0, 6, 7, 1, 2]
    assert permute(np.arange(5), 2**40, (0, 0)).tolist() == [
        386314517715, 366469670923, 582389536921, 790916271029, 36498192694,
    ]  # fmt: skip


def test_one_index_is_mapped_as_it_is_in_a_batch() -> None:
    whole = permute(np.arange(1000), 1000, (1, 2))
    assert [int(permute(i, 1000, (1, 2))) for i in range(1000)] == whole.tolist()
    assert (permute(np.arange(1000).reshape(10, 100), 1000, (1, 2)).reshape(-1) == whole).all()


@pytest.mark.parametrize("other", [(1, 3), (2, 2), (2, 1), (1,), (1, 2, 0)])
def test_another_key_gives_another_order(other: tuple[int, ...]) -> None:
    assert (permute(np.arange(1000), 1000, (1, 2)) != permute(np.arange(1000), 1000, other)).any()


def test_orders_look_random() -> None:
    # Over 2000 keys each of 8 places gets each of 8 values 250 times, give or take 15; seeded.
    orders = np.stack([permute(np.arange(8), 8, (5, epoch)) for epoch in range(2000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=8) for place in range(8)])
    assert counts.min() > 170
    assert counts.max() < 330


def test_lengths_and_indices_out_of_range_are_refused() -> None:
    for length in (0, -1, 2**40 + 1):
        with pytest.raises(DataError) as error:
            permute(np.arange(1), length, (0,))
        assert "from 1 to 2**40" in str(error.value)
    for index in ([-1], [5]):
        with pytest.raises(DataError) as error:
            permute(index, 5, (0,))
        assert "expected 0 to 4" in str(error.value)
