"""Digests: fixed values, the formula of docs/JOURNAL.md, what changes them, what does not."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from golden_states import array, found, golden_state

from perdure.digests import (
    VERSION,
    Digest,
    combined,
    digest,
    digests_of_leaves,
    leaf_digests,
    memory_sums,
)
from perdure.digests.memory_sums import ROW_BYTES, SMALL_BYTES, byte_sums, region_sums
from perdure.errors import StateError, UnsupportedLeafError
from perdure.state import snapshot

MASK = 2**64 - 1


def key(stream: int, index: int) -> int:
    z = ((stream << 48) + index + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31) | 1


def sums_by_formula(data: bytes) -> list[int]:
    """The two sums as docs/JOURNAL.md defines them, with Python's integers."""
    data += bytes(-len(data) % 8)
    sums = [0, 0]
    for start in range(0, len(data), 8):
        row, lane = divmod(start // 8, 16_384)
        for which, order in enumerate(("little", "big")):
            word = int.from_bytes(data[start : start + 8], order)
            sums[which] += word * key(2 + which, row) * key(which, lane)
    return [total & MASK for total in sums]


def test_the_digest_of_a_state_never_changes_while_its_version_stays() -> None:
    golden = json.loads(Path(__file__).with_name("golden.json").read_text())
    assert golden == found()


def test_the_digest_is_the_formula_of_the_page() -> None:
    state = golden_state()["arrays"]
    state = {name: state[name] for name in ("float16", "rows", "bool", "empty")}
    leaves = []
    for name, values in sorted(state.items()):
        sums = sums_by_formula(values.tobytes())
        fields = [name, values.dtype.name, values.shape, values.nbytes, *sums]
        leaves.append(blake3(msgspec.json.encode(["leaf", VERSION, *fields])).hexdigest(16))
    whole = blake3(msgspec.json.encode(["state", VERSION, leaves])).hexdigest(16)
    assert str(digest(state)) == whole


def digest_by_formula(path: str, data: np.ndarray) -> str:
    fields = [path, data.dtype.name, data.shape, data.nbytes, *sums_by_formula(data.tobytes())]
    return blake3(msgspec.json.encode(["leaf", VERSION, *fields])).hexdigest(16)


def test_leaves_of_every_small_length_have_the_digests_of_the_formula() -> None:
    """Lengths on both sides of those at which leaves are summed in another way, beside long ones."""
    around = [bound + change for bound in (512, SMALL_BYTES, ROW_BYTES) for change in range(-9, 10)]
    data = array(np.uint8, (2 * ROW_BYTES,))
    state = {f"{n:06}": data[n : 2 * n] for n in [*range(75), *around]}
    expected = {path: digest_by_formula(path, values) for path, values in state.items()}
    assert {path: str(value) for path, value in leaf_digests(state).items()} == expected
    backwards = dict(reversed(state.items()))
    assert {path: str(value) for path, value in leaf_digests(backwards).items()} == expected
    in_memory = digests_of_leaves(snapshot(state))
    assert {path: str(value) for path, value in in_memory.items()} == expected


def test_many_small_leaves_are_summed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    state = {str(n): rng.integers(0, 256, n % 5000, np.uint8) for n in range(0, 20_000, 7)}
    small = [values for values in state.values() if values.nbytes <= SMALL_BYTES]
    expected = {path: digest({path: values}) for path, values in state.items()}
    calls = []
    dots = memory_sums._dots
    monkeypatch.setattr(memory_sums, "_dots", lambda *a: calls.append(a[0].nbytes) or dots(*a))
    assert {path: combined({path: leaf}) for path, leaf in leaf_digests(state).items()} == expected
    assert len(calls) < len(state) - 0.95 * len(small)
    assert max(calls) <= 1 << 19, "no more than the cache of a core holds"


def test_the_leaves_are_those_of_a_save() -> None:
    state = golden_state()
    assert list(leaf_digests(state)) == sorted(snapshot(state))
    assert combined(leaf_digests(state)) == digest(state)
    assert combined(dict(reversed(leaf_digests(state).items()))) == digest(state)


def test_the_layout_in_memory_does_not_change_it() -> None:
    values = array(np.float32, (60, 80))
    wide = np.zeros((60, 160), np.float32)
    wide[:, ::2] = values
    shifted = np.zeros(values.nbytes + 3, np.uint8)
    shifted[3:] = values.reshape(-1).view(np.uint8)
    same = {
        "columns first": np.asfortranarray(values),
        "strided": wide[:, ::2],
        "big-endian": values.astype(">f4"),
        "unaligned": shifted[3:].view(np.float32).reshape(values.shape),
        "reversed twice": values[::-1].copy()[::-1],
    }
    assert {name: digest({"w": other}) for name, other in same.items()} == dict.fromkeys(
        same, digest({"w": values})
    )
    long = array(np.uint8, (3 * ROW_BYTES + 8,))
    assert digest(long[1:]) == digest(long[1:].copy()), "rows of unaligned memory"


def test_a_long_array_is_the_sum_of_its_parts_wherever_it_is_cut() -> None:
    data = array(np.uint8, (70 * ROW_BYTES + 12,))
    cuts = [0, 1, 1029, ROW_BYTES - 1, ROW_BYTES, 3 * ROW_BYTES + 4, 65 * ROW_BYTES, data.size]
    parts = [byte_sums(data[a:b], a) for a, b in pairwise(cuts)]
    assert np.array_equal(sum(parts), byte_sums(data))
    assert not np.array_equal(sum(parts), byte_sums(np.roll(data, 8))), "the control"


@pytest.mark.parametrize("sizes", [(3, 300, 11), (7, 100, 11), (7, 299, 4), (2, 7, 3)])
def test_uneven_regions_add_up(sizes: tuple[int, int, int]) -> None:
    values = array(np.uint16, (7, 300, 11))
    total = np.zeros(2, np.uint64)
    for corner in np.ndindex(*(-(-n // size) for n, size in zip(values.shape, sizes, strict=True))):
        region = tuple(
            (at * size, min(at * size + size, n))
            for at, size, n in zip(corner, sizes, values.shape, strict=True)
        )
        part = values[tuple(slice(*span) for span in region)]
        total += region_sums(part, region, values.shape)
    assert np.array_equal(total, byte_sums(values.reshape(-1).view(np.uint8)))


def test_a_region_of_an_array_with_long_rows() -> None:
    values = array(np.uint8, (2, 3, 700_000))
    total = np.zeros(2, np.uint64)
    for start, stop in ((0, 1), (1, 3)):
        for first, last in ((0, 5), (5, 700_000)):
            region = ((0, 2), (start, stop), (first, last))
            total += region_sums(values[:, start:stop, first:last], region, values.shape)
    assert np.array_equal(total, byte_sums(values.reshape(-1)))


def swapped(values: np.ndarray, one: int, other: int) -> np.ndarray:
    copy = values.copy()
    copy[[one, other]] = copy[[other, one]]
    return copy


def changes() -> dict[str, tuple[Any, Any]]:
    values = np.arange(1, 100_000, dtype=np.float32)
    other = values[::-1].copy()
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    return {
        "swapped neighbours": ({"w": values}, {"w": swapped(values, 6, 7)}),
        "swapped at a distance": ({"w": values}, {"w": swapped(values, 6, 6 + 2**15)}),
        "swapped leaves": ({"a": values, "b": other}, {"a": other, "b": values}),
        "renamed leaf": ({"a": values}, {"b": values}),
        "moved leaf": ({"a": {"b": values}}, {"a": {"c": values}}),
        "lost leaf": ({"a": values, "b": values}, {"a": values}),
        "dtype": ({"w": values}, {"w": values.view(np.int32)}),
        "shape": ({"w": values}, {"w": values.reshape(1, -1)}),
        "length of zeros": ({"w": np.zeros(8)}, {"w": np.zeros(9)}),
        "sign of zero": ({"w": np.array([0.0])}, {"w": np.array([-0.0])}),
        "payload of NaN": ({"w": nan[:1]}, {"w": nan[1:]}),
        "scalar for array": ({"w": 1.0}, {"w": np.float64(1.0)}),
        "integer for float": ({"w": 1}, {"w": 1.0}),
        "zero byte of a text": ({"w": "a"}, {"w": "a\0"}),
        "container of none": ({"w": None}, {}),
    }


@pytest.mark.parametrize("name", changes())
def test_a_change_changes_it(name: str) -> None:
    before, after = changes()[name]
    assert digest(before) == digest(before)
    assert digest(before) != digest(after)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128", "float8_e5m2", "bool"])
def test_every_single_bit_changes_it(dtype: str) -> None:
    values = array(np.uint8, (6 * 16,)) & (1 if dtype == "bool" else 255)
    digests = {digest(values)}
    for bit in range(8 * values.size):
        if dtype != "bool" or bit % 8 == 0:
            flipped = values.copy()
            flipped[bit // 8] ^= 1 << bit % 8
            digests.add(digest(flipped))
    assert len(digests) == 1 + values.size * (1 if dtype == "bool" else 8)


def xor_of_words(values: np.ndarray) -> int:
    return int(np.bitwise_xor.reduce(values.view(np.uint32)))


def sum_modulo_32_bits(values: np.ndarray) -> int:
    keys = np.array([key(0, n) for n in range(values.size)], np.uint64).astype(np.uint32)
    return int((values.view(np.uint32) * keys).sum(dtype=np.uint32))


def test_an_xor_misses_a_swap_that_the_digest_finds() -> None:
    values = array(np.float32, (64,))
    exchanged = swapped(values, 3, 40)
    assert xor_of_words(values) == xor_of_words(exchanged)
    assert digest(values) != digest(exchanged)


def test_odd_keys_modulo_32_bits_miss_two_sign_bits_that_the_digest_finds() -> None:
    values = array(np.float32, (64,))
    negated = values.copy()
    negated.view(np.uint32)[[3, 40]] ^= np.uint32(1 << 31)
    assert sum_modulo_32_bits(values) == sum_modulo_32_bits(negated)
    assert digest(values) != digest(negated)


def test_the_sums_find_rectangles_of_sign_bits_at_powers_of_two() -> None:
    """Their differences cancel if the keys have any regularity: those of a polynomial hash do.

    The sums are linear, so that those of the differences of the words show what a digest sees.
    """
    rng = np.random.default_rng(0)
    missed_by_powers = 0
    for _ in range(300):
        start = int(rng.integers(ROW_BYTES))
        one, other = (1 << rng.choice(16, 2, replace=False)).tolist()
        corners = start, start + one, start + other, start + one + other
        sums, powers = [0, 0], 0
        for corner, sign in zip(corners, (1, -1, -1, 1), strict=True):
            word = (1 << (63 if corner % 2 else 31)).to_bytes(8, "little")
            row, lane = divmod(corner // 2, 16_384)
            for which, order in enumerate(("little", "big")):
                value = int.from_bytes(word, order)
                sums[which] += sign * value * key(2 + which, row) * key(which, lane)
            powers += sign * (pow(key(0, 0), corner, 2**64) << 31)
        assert any(total & MASK for total in sums), corners
        missed_by_powers += not powers & MASK
    assert missed_by_powers > 10, "the control"


def test_nothing_of_the_size_of_an_array_is_allocated() -> None:
    values = array(np.float32, (4 << 20,))
    digest(values)  # makes the buffers of the threads
    tracemalloc.start()
    digest({"w": values})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes / 16


def test_digests_are_values() -> None:
    one, other = digest({"a": 1}), digest({"a": 2})
    assert len({one, other, digest({"a": 1})}) == 2
    assert str(one) == one.hex
    assert Digest(str(one)) == one
    assert sorted([one, other]) == sorted([other, one])
    for wrong in ("", str(one)[:-1], str(one).upper(), str(one) + "\n", None):
        with pytest.raises(StateError) as refused:
            Digest(wrong)  # type: ignore[arg-type]
        assert repr(wrong) in str(refused.value)


def test_what_cannot_be_saved_is_refused_by_its_path() -> None:
    with pytest.raises(UnsupportedLeafError) as refused:
        digest({"model": {"w": object()}})
    assert "model/w" in str(refused.value)


def test_a_digest_of_numpy_arrays_loads_no_framework() -> None:
    program = (
        "import sys, numpy\n"
        "from perdure.digests import digest\n"
        "print(digest({'w': numpy.zeros(3)}))\n"
        "print({'jax', 'torch', 'keras', 'flax'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(digest({"w": np.zeros(3)})), "set()"]


@pytest.mark.parametrize("leaves", [["a"], "a", None, {"w": "0" * 32}, {1: digest(1)}])
def test_what_is_no_mapping_to_digests_is_not_combined(leaves: Any) -> None:
    with pytest.raises(StateError, match="combined: expected a"):
        combined(leaves)
