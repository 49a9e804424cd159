"""`diff`: what differs, from the chunks that differ and no others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from perdure.checkpoint.address import (
    checkpoint_at,
    open_checkpoint,
    open_checkpoints,
    open_run,
)
from perdure.errors import ArgumentError, CorruptionError, StepNotFoundError
from perdure.look import diff, stats
from perdure.look.checkpoint_diff import CheckpointDiff, LeafDiff
from perdure.state.leaf_values import array_leaf, scalar_leaf
from perdure.store import Leaf, MemoryStorage, Run
from perdure.store.format import CHUNK_BYTES

RNG = np.random.default_rng(5)


class CountingStorage(MemoryStorage):
    """Counts the bytes that are read."""

    read_nbytes = 0

    def read(self, name: str) -> bytes:
        data = super().read(name)
        if not name.startswith("packs/"):  # parts of packs are counted below
            self.read_nbytes += len(data)
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        count = super().read_into(name, offset, target)
        self.read_nbytes += count
        return count


def leaf_of(value: Any) -> Leaf:
    if isinstance(value, Leaf):
        return value
    return array_leaf(value) if isinstance(value, np.ndarray) else scalar_leaf(value)


def save(storage: Any, step: int, state: dict[str, Any], **fields: Any) -> Any:
    with Run(storage, create=True) as run:
        run.save(step, {path: leaf_of(value) for path, value in state.items()}, **fields)
    return storage


def compare(first: dict[str, Any], second: dict[str, Any]) -> CheckpointDiff:
    return diff(save(MemoryStorage(), 1, first), save(MemoryStorage(), 1, second))


def changed(first: Any, second: Any) -> LeafDiff:
    [leaf] = compare({"w": first}, {"w": second}).changed
    return leaf


def test_equal_checkpoints_are_known_without_reading_a_chunk() -> None:
    state = {"w": np.arange(5.0), "n": math.nan, "nan": np.array([np.nan]), "step": 3}
    sides = [save(CountingStorage(), 1, state) for _ in range(2)]
    packs = {name for side in sides for name in side.list("packs/")}
    assert packs
    for side in sides:
        for name in side.list("packs/"):
            side.delete(name)  # nothing of them is needed
    result = diff(*sides)
    assert result.equal
    assert (result.equal_leaves, result.changed, result.read_nbytes) == (4, (), 0)


def test_of_checkpoints_that_share_nine_tenths_a_ninth_is_read() -> None:
    """At most 11% of the bytes, manifests included."""
    first = {f"w/{n:02}": np.full(20_000, float(n)) for n in range(30)}
    second = {**first, **{path: first[path] + 1 for path in ("w/04", "w/13", "w/29")}}
    sides = save(CountingStorage(), 1, first), save(CountingStorage(), 1, second)
    for side in sides:
        side.read_nbytes = 0
    result = diff(*sides)
    size = 30 * 160_000
    for side in sides:
        assert 0.1 * size <= side.read_nbytes <= 0.11 * size
    assert result.read_nbytes == 2 * 3 * 160_000
    assert [leaf.path for leaf in result.changed] == ["w/04", "w/13", "w/29"]


def test_of_a_leaf_only_the_chunks_that_differ_are_read() -> None:
    first = np.zeros(CHUNK_BYTES // 8 * 2 + 10)
    second = first.copy()
    place = CHUNK_BYTES // 8 * 2 + 3
    second[place] = 1
    sides = save(CountingStorage(), 1, {"w": first}), save(CountingStorage(), 1, {"w": second})
    for side in sides:
        side.read_nbytes = 0
    result = diff(*sides)
    assert max(side.read_nbytes for side in sides) < 2000
    [leaf] = result.changed
    assert (leaf.differing, leaf.compared, leaf.first_index) == (1, 10, (place,))
    assert "those of the chunks that differ" in str(result)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_figures_of_floats(dtype: Any) -> None:
    first = RNG.standard_normal((40, 50)).astype(dtype)
    second = first.copy()
    second[3, 7] = dtype(2.0)
    second[30, 1] *= dtype(-1)
    leaf = changed(first, second)
    a, b = first.astype(np.float64), second.astype(np.float64)
    assert (leaf.count, leaf.compared, leaf.differing) == (2000, 2000, 2)
    assert leaf.first_index == (3, 7)
    assert leaf.first_values == (str(first[3, 7]), str(second[3, 7]))
    assert leaf.max_abs == np.abs(a - b).max()
    assert leaf.max_rel == (np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))).max()
    assert leaf.rel_norm == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-14)
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert leaf.cosine == pytest.approx(cosine, rel=1e-14)
    word = {2: np.uint16, 4: np.uint32, 8: np.uint64}[first.itemsize]
    mask = (1 << (8 * first.itemsize - 1)) - 1
    negated = 2 * (int(first[30, 1].view(word)) & mask)
    assert leaf.max_ulp is not None
    assert leaf.max_ulp >= negated


def test_elements_that_are_equal_count_in_norm_and_cosine() -> None:
    first = RNG.standard_normal(200_000)  # several blocks, of which one differs
    first[5] = np.inf
    second = first.copy()
    second[150_000] += 3
    leaf = changed(first, second)
    a, b = np.delete(first, 5), np.delete(second, 5)
    assert leaf.rel_norm == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-14)
    cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
    assert leaf.cosine == pytest.approx(cosine, rel=1e-14)
    assert (leaf.differing, leaf.not_finite) == (1, 0)


def test_one_step_is_one_ulp() -> None:
    ones = np.ones(9, np.float32)
    other = ones.copy()
    other[4] = np.nextafter(np.float32(1), np.float32(2))
    leaf = changed(ones, other)
    assert (leaf.max_ulp, leaf.differing, leaf.max_abs) == (1, 1, 2.0**-23)


def test_bits_decide_what_differs() -> None:
    words = np.array([0x7FC00000, 0x7FC00001, 0x3F800000], np.uint32)
    first = words.view(np.float32)
    second = words[[0, 0, 2]].view(np.float32)
    leaf = changed(first, second)
    assert (leaf.differing, leaf.first_index, leaf.not_finite) == (1, (1,), 1)
    assert leaf.first_values == ("nan (0x7fc00001)", "nan (0x7fc00000)")
    assert (leaf.max_ulp, leaf.max_abs, leaf.rel_norm, leaf.cosine) == (None, 0, 0, 1)
    zeros = changed(np.array([0.0]), np.array([-0.0]))
    assert (zeros.differing, zeros.first_values) == (1, ("0.0", "-0.0"))
    assert (zeros.max_ulp, zeros.max_abs, zeros.max_rel, zeros.rel_norm) == (0, 0, 0, None)
    infinite = changed(np.array([1.0, 2.0]), np.array([np.inf, 2.0]))
    assert (infinite.not_finite, infinite.max_abs) == (1, 0)
    assert infinite.max_ulp == (0x7FF0 - 0x3FF0) << 48


def test_the_figures_of_other_dtypes() -> None:
    leaf = changed(np.array([2**63 - 1, 5]), np.array([-(2**63), 5]))
    assert (leaf.max_abs, leaf.max_ulp, leaf.differing) == (2**64 - 1, None, 1)
    leaf = changed(np.array([True, False]), np.array([True, True]))
    assert (leaf.max_abs, leaf.first_index, leaf.first_values) == (1, (1,), ("False", "True"))
    leaf = changed(np.array([1 + 1j, 2]), np.array([1 + 2j, 2]))
    assert (leaf.count, leaf.differing, leaf.max_abs) == (2, 1, 1)
    assert leaf.first_values == ("(1+1j)", "(1+2j)")
    leaf = changed(np.arange(4).astype(ml_dtypes.int4), np.arange(1, 5).astype(ml_dtypes.int4))
    assert (leaf.differing, leaf.max_abs) == (4, 1)
    words = np.arange(8, dtype=np.uint32)
    keys = [Leaf("key<fry>", (4,), memoryview((words + n).tobytes())) for n in (0, 1)]
    leaf = changed(*keys)
    assert (leaf.count, leaf.differing, leaf.first_index) == (8, 8, (0, 0))
    assert (leaf.max_abs, leaf.max_ulp, leaf.cosine) == (None, None, None)


def test_scalars() -> None:
    leaf = changed(10**400, 10**400 + 1)
    assert (leaf.max_abs, leaf.differing, leaf.first_index) == (1, 1, ())
    leaf = changed(1.0, math.nextafter(1.0, 2.0))
    assert (leaf.max_ulp, leaf.first_values) == (1, ("1.0", "1.0000000000000002"))
    assert changed("a", "b").first_values == ("a", "b")
    leaf = changed(1, 1.0)
    assert (leaf.first, leaf.second) == ("int", "float")
    assert changed(None, b"\x00").first_values == ("", "00")


def test_another_dtype_or_shape_is_no_error() -> None:
    leaf = changed(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32))
    assert (leaf.first, leaf.second) == ("float32[2,3]", "float32[3,2]")
    assert leaf.problem == "another shape, the same bytes"
    assert changed(np.zeros(2), np.zeros(2, np.int64)).problem == "another dtype, the same bytes"
    assert changed(np.zeros(2), 0.0).problem == "another dtype"


def test_an_unknown_dtype_differs_with_one_message_and_the_rest_is_compared() -> None:
    sides = [
        {"odd": Leaf("float7_x8", (1,), memoryview(bytes([n]))), "w": np.full(3, float(n))}
        for n in (1, 2)
    ]
    result = compare(*sides)
    odd, w = result.changed
    assert "float7_x8" in str(odd.problem)
    assert w.max_abs == 1
    assert not result.equal


def test_recipe_metrics_and_environment() -> None:
    state = {"w": np.ones(3)}
    first = save(
        MemoryStorage(),
        1,
        state,
        recipe={"seed": 1, "platform": "cpu", "flag": True},
        metrics={"loss": 0.5, "top": 1.0},
    )
    second = save(
        MemoryStorage(),
        1,
        state,
        recipe={"seed": 2, "platform": "gpu", "flag": 1},
        metrics={"loss": 0.5, "accuracy": 0.1},
    )
    result = diff(first, second)
    assert [(f.name, f.first, f.second) for f in result.recipe] == [
        ("flag", True, 1),
        ("seed", 1, 2),
    ]
    assert [(f.name, f.first, f.second) for f in result.environment] == [("platform", "cpu", "gpu")]
    assert [f.name for f in result.metrics] == ["accuracy", "top"]
    assert result.equal  # of the states


def test_the_origin_is_no_random_generator() -> None:
    def text(**first: str) -> str:
        a, b = MemoryStorage(), MemoryStorage()
        for storage, notes in ((a, first), (b, {})):
            with Run(storage, create=True) as run:
                leaves = {path: scalar_leaf(note) for path, note in notes.items()}
                run.save(1, {"w": scalar_leaf(1)}, process_leaves=leaves)
        result = diff(Run(a), Run(b))
        assert result.equal
        assert result.process_leaves == tuple(sorted(first))
        return str(result)

    assert "generators" not in text(origin="{}")
    assert "made from (average, import) differs" in text(origin="{}")
    both = text(origin="{}", random="1")
    assert "generators of processes: 1 leaf" in both
    assert "generators of processes: 2 leaves" in text(a="1", b="2")
    assert "made from" in both
    assert "made from" not in text(random="1")


def test_two_runs_are_compared_at_the_first_common_step_that_differs(tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for number, run in enumerate(runs):
        for step in (1, 2, 3, 4 + number):
            value = 100.0 * number if step >= 3 else step
            save(run, step, {"w": np.full(3, value), "same": 1})
    result = diff(*runs)
    assert (result.first, result.second) == (f"{runs[0]}@3", f"{runs[1]}@3")
    assert "3 common steps (1, 2, 3), equal before this one: 2" in result.common
    assert diff(*runs, leaves="same").equal
    assert (
        diff(runs[0], runs[0]).common
        == "4 common steps (1, 2, 3, 4), all equal; the last one is shown"
    )
    assert diff(f"{runs[0]}@1", f"{runs[1]}@1").equal
    one = [save(tmp_path / name, 1, {"w": np.full(3, float(name))}) for name in ("1", "2")]
    assert diff(*one).common == "1 common step (1), equal before this one: 0"
    assert "all equal" in diff(one[0], one[0]).common
    other = save(tmp_path / "c", 9, {"w": np.ones(3)})
    with pytest.raises(StepNotFoundError) as caught:
        diff(runs[0], other)
    assert "1, 2, 3, 4" in str(caught.value)
    assert "has 9" in str(caught.value)


def test_patterns_select_on_either_side() -> None:
    first = save(MemoryStorage(), 1, {"a/w": np.ones(3), "b": 1, "old": 2})
    second = save(MemoryStorage(), 1, {"a/w": np.zeros(3), "b": 1, "new": 2})
    assert diff(first, second, leaves="b").equal
    assert [leaf.path for leaf in diff(first, second, leaves="a").changed] == ["a/w"]
    assert diff(first, second, leaves="old").only_first == ("old",)
    with pytest.raises(ArgumentError) as caught:
        diff(first, second, leaves=["b", "c"])
    assert "'c'" in str(caught.value)


def test_damage_in_a_chunk_that_differs_is_an_error_and_elsewhere_it_is_not_seen(
    tmp_path: Path,
) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for number, run in enumerate(runs):
        save(run, 1, {"same": np.arange(100_000.0), "w": np.full(100_000, float(number))})
    with Run(runs[0]) as run:
        entries = {leaf.path: leaf.chunks[0] for leaf in run.manifest(1).leaves}
    [pack] = (runs[0] / "packs").iterdir()
    whole = pack.read_bytes()
    for path, fails in (("same", False), ("w", True)):
        data = bytearray(whole)
        data[entries[path].offset] ^= 1
        pack.write_bytes(data)
        if not fails:
            assert [leaf.path for leaf in diff(*runs).changed] == ["w"]
            continue
        with pytest.raises(CorruptionError) as caught:
            diff(*runs)
        assert "leaf 'w'" in str(caught.value)
    pack.unlink()
    with pytest.raises(CorruptionError) as caught:
        diff(*runs)
    assert pack.name in str(caught.value)


def test_scalars_of_two_types_are_shown_with_their_types() -> None:
    result = compare({"a": "1", "b": 1, "c": 2}, {"a": 1, "b": 1.0, "c": 3})
    a, b, c = str(result).splitlines()[5:8]
    assert "str 1  int 1" in a
    assert "int 1  float 1.0" in b
    assert "int" not in c
    assert changed("1", 1).first_values == ("1", "1")


def test_a_long_text_is_cut_once_with_its_own_length() -> None:
    result = compare({"n": 10**400}, {"n": 10**400 + 1})
    assert result.changed[0].first_values == (str(10**400), str(10**400 + 1))
    assert str(result).count("... (401 characters)") == 2


def test_a_complex_number_counts_as_its_parts() -> None:
    """`NaN or inf` counts parts, and a finite part beside NaN is compared."""
    first = np.array([complex(1, math.nan), 3 + 4j, complex(0, 1)])
    second = np.array([complex(5, math.nan), 3 + 4j, complex(0, math.inf)])
    leaf = changed(first, second)
    assert (leaf.count, leaf.differing, leaf.not_finite) == (3, 2, 1)
    assert (leaf.max_abs, leaf.max_rel) == (4, 0.8)
    parts = [
        np.array([value.real if np.isnan(value.imag) else 0, 3, 4])
        for value in (first[0], second[0])
    ]
    a, b = parts
    assert leaf.rel_norm == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-14)
    scalar = changed(complex(1, 2), complex(1, 4))
    assert (scalar.max_abs, scalar.max_rel, scalar.count) == (2, 0.5, 1)


def test_differences_above_the_largest_float64_are_infinite() -> None:
    leaf = changed(np.array([1e308, 3.0]), np.array([-1e308, 3.0]))
    assert (leaf.max_abs, leaf.max_rel, leaf.differing) == (math.inf, math.inf, 1)
    tiny = math.ulp(0.0)
    leaf = changed(np.array([1e308, tiny]), np.array([1e308 * 0.9, 3 * tiny]))
    assert leaf.max_rel == 2 / 3


def test_open_checkpoints_are_compared() -> None:
    storage = save(MemoryStorage(), 1, {"w": np.zeros(3)})
    save(storage, 2, {"w": np.ones(3)})
    first, second = (open_checkpoint(Run(storage)) for _ in range(2))
    assert diff(first, second).equal
    old = checkpoint_at(Run(storage), 1)
    assert [leaf.path for leaf in diff(old, first).changed] == ["w"]
    assert [leaf.path for leaf in diff(old, Run(storage)).changed] == ["w"]
    assert stats(old).rows[0].max == 0
    assert [one.step for one in open_checkpoints(old)] == [1]
    with pytest.raises(ArgumentError):
        open_run(old)


def test_the_order_of_the_sides_only_swaps_them() -> None:
    sides = ({"w": RNG.standard_normal(2000)}, {"w": RNG.standard_normal(2000)})
    [one], [other] = compare(*sides).changed, compare(*reversed(sides)).changed
    assert (one.max_ulp, one.max_abs, one.max_rel, one.cosine) == (
        other.max_ulp,
        other.max_abs,
        other.max_rel,
        other.cosine,
    )
    assert one.first_values == tuple(reversed(other.first_values or ()))
