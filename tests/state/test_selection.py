"""Patterns of leaves, renames and casts, without a framework and without a run directory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from perdure.errors import ArgumentError, MismatchError, StateError
from perdure.state import flatten
from perdure.state.leaf_spec import Difference, LeafSpec, format_differences
from perdure.state.leaf_values import cast_leaf, plain_value
from perdure.state.restore_request import Renaming
from perdure.store.selection import Selection

PATHS = ("model/enc/0/bias", "model/enc/0/w", "model/head/bias", "model2/w", "bias", "a%2Fb")


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        ("model", PATHS[:3]),
        ("model/**", PATHS[:3]),
        ("model/enc/0/w", PATHS[1:2]),
        ("*/bias", ()),
        ("*/*/bias", PATHS[2:3]),
        ("**/bias", (PATHS[0], PATHS[2], PATHS[4])),
        ("model/**/bias", (PATHS[0], PATHS[2])),
        ("model*/w", PATHS[3:4]),
        ("mod", ()),
        ("**", PATHS),
        ("a%2Fb", PATHS[5:]),
        ("model/en", ()),
    ],
)
def test_a_pattern_selects(pattern: str, selected: tuple[str, ...]) -> None:
    selection = Selection(pattern)
    assert tuple(filter(selection.matches, PATHS)) == selected
    for path in selected:  # every branch above a match is entered
        parts = path.split("/")
        above = ["/".join(parts[:n]) for n in range(len(parts))]
        assert all(selection.may_hold(branch) or selection.matches(branch) for branch in above)
    assert selection.unused(PATHS) == ([] if selected else [pattern])


def test_a_selection_does_not_enter_branches_that_hold_no_match() -> None:
    selection = Selection(["model/enc/*", "opt"])
    assert not selection.may_hold("other")
    assert not selection.may_hold("model/head")
    assert selection.may_hold("")


def renamed(rename: Any, *paths: str) -> list[str]:
    renaming = Renaming(rename)
    renaming.check(paths, ())
    return list(map(renaming, paths))


def test_renames_move_branches_leaves_and_the_whole_state_at_once() -> None:
    assert renamed({"a": "b", "b": "a"}, "a/x", "b/x") == ["b/x", "a/x"]
    assert renamed({"": "model"}, "w", "enc/b") == ["model/w", "model/enc/b"]
    assert renamed({"model": ""}, "model/w") == ["w"]
    assert renamed({"a": "b", "a/x": "c/y"}, "a/x", "a/z") == ["c/y", "b/z"]
    assert renamed({"ab": "c"}, "ab", "abc") == ["c", "abc"]


@pytest.mark.parametrize(
    ("rename", "phrase"),
    [
        ({"modle": "x"}, "no leaf or branch 'modle'.* Did you mean 'model'"),
        ({"model": "opt"}, "both become 'opt/w'"),
        ({"model/w": "opt/w/deep"}, "below 'opt/w', which is a leaf"),
        ({"opt/w": "sgd/w"}, "inside of the object at 'opt'"),
        ({"model/w": "opt/v"}, "inside of the object at 'opt'"),
    ],
)
def test_renames_that_fit_nothing_or_meet_are_refused(rename: Any, phrase: str) -> None:
    objects = ("opt",) if "inside" in phrase else ()
    with pytest.raises(MismatchError, match=phrase):
        Renaming(rename).check(("model/w", "opt/w"), objects)


@pytest.mark.parametrize("rename", [["a"], {"a": 1}, {1: "a"}, "ab"])
def test_a_rename_is_a_mapping_of_strings(rename: Any) -> None:
    with pytest.raises(ArgumentError, match="rename: expected a mapping"):
        Renaming(rename)


def cast(value: Any, dtype: str) -> Any:
    leaf = flatten({"x": value})["x"]
    result = cast_leaf(leaf, LeafSpec(dtype, leaf.shape))
    assert result.dtype == dtype
    return plain_value(result)


def test_floats_are_rounded_to_nearest_even_and_integers_keep_their_values() -> None:
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, np.nan, np.inf, -0.0], np.float32)
    assert cast(x, "bfloat16").tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()
    assert float(cast(x, "bfloat16")[1]) == 1.0, "a tie goes to the even value"
    assert cast(cast(x, "bfloat16"), "float32")[:1].tolist() == [1.0]
    assert cast(np.array([-5, 7], np.int64), "int32").tolist() == [-5, 7]
    assert cast(np.array([], np.int64), "uint8").tolist() == []
    assert cast(7, "int32") == 7
    assert cast(np.array([1 + 2j]), "complex64").tolist() == [1 + 2j]


@pytest.mark.parametrize(
    ("value", "dtype", "phrase"),
    [
        (np.array([1.0]), "int32", "float64 to int32; it converts floats to floats"),
        (np.array([1]), "float32", "int64 to float32"),
        (np.array([True]), "int32", "bool to int32"),
        (np.array([2**31]), "int32", "values from 2147483648 to 2147483648"),
        (np.array([2**63], np.uint64), "int64", "values from"),
        (np.array([-1]), "uint8", "values from -1 to -1"),
        (np.array([1e39]), "float32", "become infinite"),
        (np.array([500.0], np.float32), "float8_e4m3fn", "become infinite or NaN"),
        ("text", "int32", "py:str to int32"),
    ],
)
def test_a_cast_that_would_lose_more_than_precision_is_refused(
    value: Any, dtype: str, phrase: str
) -> None:
    with pytest.raises(StateError, match=phrase):
        cast(value, dtype)


def test_many_differences_of_one_branch_are_one_line() -> None:
    lines = [Difference(f"opt/{n}/mu", None, "float32[2]") for n in range(30)]
    lines += [Difference("w", "float32[2]", "float32[3]")]
    assert format_differences(lines).splitlines() == [
        "  opt: 30 leaves that only the checkpoint has",
        "  w: expected float32[2], found float32[3]",
    ]
    unlike = [Difference(f"w{n}", "float32[2]", "float32[3]") for n in range(30)]
    assert format_differences(unlike).splitlines()[20:] == ["  and 10 more"]
