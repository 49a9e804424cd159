"""Restores of parts: patterns, `strict=False`, renames, casts, and what a run makes of them.

Without a framework: arrays of NumPy, and objects with `state_dict`.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import CheckpointManager, load_checkpoint
from perdure.checkpoint import PerRank, Restored, RestoreReport
from perdure.errors import ArgumentError, LeafNotFoundError, MismatchError, StepNotFoundError
from perdure.state.leaf_spec import LeafSpec
from pretend import Pretend, play


class Counter:
    """An object whose state is loaded as a whole."""

    def __init__(self, n: int) -> None:
        self.state = {"n": n, "history": [n] * 3}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make(k: int) -> dict[str, Any]:
    return {
        "model": {
            "enc": {"w": np.full((2, 3), k, np.float32), "bias": np.full(3, k, np.float32)},
            "head": {"w": np.full((3, 4), k, np.float32), "bias": np.full(4, k, np.float32)},
        },
        "count": Counter(k),
        "step": k,
    }


def values(state: Any) -> dict[str, Any]:
    """The first value of each leaf."""
    model = state["model"]
    flat = {f"{a}/{b}": float(model[a][b].flat[0]) for a in model for b in model[a]}
    return {**flat, "count": state["count"].state["n"], "step": state["step"]}


@pytest.mark.parametrize(
    ("leaves", "restored"),
    [
        ("model/enc/**", {"enc/w", "enc/bias"}),
        ("**/bias", {"enc/bias", "head/bias"}),
        ("model/*/w", {"enc/w", "head/w"}),
        (["count", "st*p"], {"count", "step"}),
        (["count/n", "count/history"], {"count"}),
    ],
)
def test_a_pattern_restores_what_it_matches_and_nothing_else(
    manager: CheckpointManager, leaves: Any, restored: set[str]
) -> None:
    like = make(9)
    state, step = manager.restore(like=like, leaves=leaves)
    assert step == 1
    assert {name for name, value in values(state).items() if value == 1} == restored
    assert {name for name, value in values(state).items() if value == 9} == (
        values(state).keys() - restored
    )
    if "count" not in restored:
        assert state["model"]["enc"] is not like["model"]["enc"]
        assert state["step"] is like["step"]


@pytest.mark.parametrize(
    ("leaves", "error", "phrase"),
    [
        ("modle/**", StepNotFoundError, r"no leaf that was asked for \(leaves='modle/\*\*'\)"),
        ("modle/**", MismatchError, "it has count/"),
        (["model", "modle/**"], MismatchError, r"modle/\*\*: the target has no such"),
        ("count/n", MismatchError, "count/n: lies inside a .*Counter.* name count"),
        (["step", "count/history/*"], MismatchError, "count/history/0: lies inside"),
    ],
)
def test_a_pattern_without_a_match_and_a_part_of_an_object_are_refused(
    manager: CheckpointManager, leaves: Any, error: type[Exception], phrase: str
) -> None:
    like = make(9)
    with pytest.raises(error, match=phrase):
        manager.restore(like=like, leaves=leaves)
    assert set(values(like).values()) == {9}


def test_without_a_target_patterns_and_renames_select_what_is_read(
    manager: CheckpointManager, run: Path
) -> None:
    state, _ = manager.restore(leaves="net/enc/*", rename={"model": "net"})
    assert state["net"].keys() == {"enc"}
    assert load_checkpoint(run, leaves="**/bias")["model"].keys() == {"enc", "head"}
    names_of_target = r"leaves='model/enc/\*', which are paths of the target, after rename="
    with pytest.raises(LeafNotFoundError, match=names_of_target):
        manager.restore(leaves="model/enc/*", rename={"model": "net"})
    with pytest.raises(MismatchError, match="none: the checkpoint has no such"):
        manager.restore(leaves=["model", "none"])
    for wrong in ({"strict": False}, {"cast": True}):
        with pytest.raises(ArgumentError, match="expected a target"):
            manager.restore(**wrong)  # type: ignore[arg-type]


def other_members(k: int) -> dict[str, Any]:
    """A new head, a member more, one less, and an object that the checkpoint has no state for."""
    state = make(k)
    state["model"]["head"] = {
        "w": np.full((3, 7), k, np.float32),
        "bias": np.full(4, k, np.float64),
        "scale": np.full(7, k, np.float32),
    }
    del state["step"]
    return {**state, "ema": np.full(2, k), "rng": np.random.Generator(np.random.SFC64(k)),
            "other": Counter(k)}  # fmt: skip


def test_what_does_not_fit_keeps_its_value_and_is_listed_once(manager: CheckpointManager) -> None:
    like = other_members(9)
    generator = like["rng"].bit_generator.state
    with pytest.warns(UserWarning, match="differ") as caught:
        restored = manager.restore(like=like, strict=False)
    state, step = restored
    assert step == 1
    assert float(state["model"]["enc"]["w"].flat[0]) == 1
    assert state["count"].state == {"n": 1, "history": [1, 1, 1]}
    for path in ("w", "bias", "scale"):
        assert state["model"]["head"][path] is like["model"]["head"][path]
    assert state["ema"] is like["ema"]
    assert state["rng"].bit_generator.state["bit_generator"] == generator["bit_generator"]
    assert state["other"].state["n"] == 9
    report = restored.report
    assert report.mismatched == ("model/head/bias", "model/head/w")
    assert report.unexpected == ("step",)
    assert report.kept_whole == ("rng",)
    assert {"ema", "model/head/scale", "other"} <= set(report.missing)
    assert {path.partition("/")[0] for path in report.missing} == {"ema", "model", "other", "rng"}
    assert not report.is_exact
    assert len(caught) == 1
    text = str(caught[0].message)
    assert str(report) in text
    assert "model/head/w: expected float32[3,7], found float32[3,4]" in text
    assert len(text.splitlines()) <= 22


def test_a_generator_of_another_kind_is_never_half_restored(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"rng": np.random.Generator(np.random.PCG64(1)), "x": 1})
        manager.wait_until_finished()
        like = {"rng": np.random.Generator(np.random.SFC64(2)), "x": 2}
        before = pickle.dumps(like["rng"].bit_generator.state)
        with pytest.warns(UserWarning, match="rng: keeps its whole state"):
            state, _ = manager.restore(like=like, strict=False)
        assert pickle.dumps(state["rng"].bit_generator.state) == before
        assert state["x"] == 1


def test_strict_false_restores_everything_if_everything_fits(manager: CheckpointManager) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = manager.restore(like=make(9), strict=False)
    assert set(values(restored.state).values()) == {1}
    assert restored.report == RestoreReport()
    assert restored.report.is_exact


def test_a_restore_of_nothing_at_all_is_an_error(manager: CheckpointManager) -> None:
    with pytest.raises(MismatchError, match="other: expected int") as error:
        manager.restore(like={"other": 1}, strict=False)
    assert "strict=False" not in str(error.value)


def test_a_rename_moves_branches_and_is_reported(manager: CheckpointManager) -> None:
    like = {"net": {"e": make(9)["model"]["enc"], "head": make(9)["model"]["head"]},
            "count": Counter(9), "total": 9}  # fmt: skip
    rename = {"model": "net", "model/enc": "net/e", "step": "total"}
    state, step, = restored = manager.restore(like=like, rename=rename)  # fmt: skip
    assert (state["total"], step) == (1, 1)
    assert {float(state["net"][a][b].flat[0]) for a in ("e", "head") for b in ("w", "bias")} == {1}
    assert restored.report.renamed == (
        "net/e/bias", "net/e/w", "net/head/bias", "net/head/w", "total",
    )  # fmt: skip
    assert restored.report.is_exact, "every bit of the checkpoint is there"
    for wrong, phrase in (
        ({"modle": "net"}, "no leaf or branch 'modle'"),
        ({"model/enc": "model/head"}, "would both become 'model/head/bias'"),
        ({"count/n": "n"}, "inside of the object at 'count'"),
    ):
        with pytest.raises(MismatchError, match=phrase):
            manager.restore(like=make(9), rename=wrong, strict=False)


def test_a_cast_converts_to_the_dtype_of_the_target(manager: CheckpointManager) -> None:
    like = make(9)
    like["model"]["enc"] = {k: v.astype(np.float16) for k, v in like["model"]["enc"].items()}
    restored = manager.restore(like=like, cast=True)
    weight = restored.state["model"]["enc"]["w"]
    assert (weight.dtype, float(weight.flat[0])) == (np.float16, 1)
    assert restored.report.cast == ("model/enc/bias", "model/enc/w")
    assert not restored.report.is_exact
    like["model"]["head"]["w"] = like["model"]["head"]["w"].astype(np.int32)
    with pytest.raises(MismatchError, match="model/head/w: cast=True does not convert float32 to"):
        manager.restore(like=like, cast=True)
    with pytest.warns(UserWarning, match="does not convert"):
        restored = manager.restore(like=like, cast=True, strict=False)
    assert restored.report.mismatched == ("model/head/w",)
    assert restored.report.cast == ("model/enc/bias", "model/enc/w")


def test_an_error_names_the_ways_out(manager: CheckpointManager) -> None:
    moved = make(9)
    moved["net"] = moved.pop("model")
    with pytest.raises(MismatchError) as error:
        manager.restore(like=moved)
    for way in ("strict=False", "cast=True", "rename=", "leaves="):
        assert way in str(error.value)
    assert manager.restore(like=moved, rename={"model": "net"}).report.is_exact
    with pytest.raises(MismatchError) as error:
        manager.restore(like={"nothing": "alike"}, strict=False)
    assert "ways out" not in str(error.value)


def test_only_an_exact_restore_restores_the_random_generators(tmp_path: Path) -> None:
    random.seed(5)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": np.zeros(2), "b": 1})
        manager.wait_until_finished()
        saved = random.getstate()
        for arguments, like in (
            ({"leaves": "a"}, {"a": np.ones(2), "b": 2}),
            ({"strict": False}, {"a": np.ones(2)}),
            ({"cast": True}, {"a": np.ones(2, np.float32), "b": 2}),
        ):
            random.seed(6)
            before = random.getstate()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                manager.restore(like=like, **arguments)  # type: ignore[arg-type]
            assert random.getstate() == before
        manager.restore(like={"c": np.ones(2), "b": 2}, rename={"a": "c"})
        assert random.getstate() == saved


def first_save_warns(directory: Path, **arguments: Any) -> bool:
    """Whether a run that begins with such a restore is warned at its first save, and only there."""
    with CheckpointManager(directory) as manager, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.restore(**arguments)
        caught.clear()
        step = (manager.latest_step() or 0) + 1
        manager.save(step, {"a": np.full(2, step), "b": step})
        count = len(caught)
        manager.save(step + 1, {"a": np.full(2, step + 1), "b": step})
        manager.wait_until_finished()
        assert len(caught) == count
        assert all("in part" in str(warning.message) for warning in caught)
    return bool(count)


def test_a_run_that_continues_from_parts_is_warned_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": np.full(2, 1), "b": 1})
    like = {"a": np.zeros(2, int), "b": 0}
    assert first_save_warns(tmp_path, like=like, leaves="a")
    assert first_save_warns(tmp_path, leaves="a")
    assert first_save_warns(tmp_path, like={"a": np.zeros(2, int)}, strict=False)
    assert not first_save_warns(tmp_path, like=like)
    assert not first_save_warns(tmp_path, like=like, strict=False)


def test_parts_of_a_step_that_was_restored_exactly_before_are_no_other_state(
    tmp_path: Path,
) -> None:
    state = {"a": np.full(2, 1), "b": 1}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, state)
    with CheckpointManager(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = manager.restore()
        manager.restore(whole.step, state, leaves="a")
        manager.save(3, state)
        manager.wait_until_finished()
    with CheckpointManager(tmp_path) as manager:
        manager.restore(3)
        manager.restore(2, state, leaves="a")
        with pytest.warns(UserWarning, match="step 2 only in part"):
            manager.save(4, state)


def test_a_look_at_another_step_in_the_middle_of_a_run_is_no_resume(tmp_path: Path) -> None:
    state = {"a": np.zeros(2), "b": 1}
    with CheckpointManager(tmp_path) as manager, warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.restore_or_initialize(state)
        manager.save(1, state)
        manager.wait_until_finished()
        manager.restore(1, {"a": np.ones(2)}, leaves="a")
        manager.save(2, {"a": np.ones(2), "b": 2})
        manager.wait_until_finished()


def test_a_new_run_begins_with_parts_of_an_old_one_and_resumes_exactly(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "old") as manager:
        manager.save(7, {"model": np.full(3, 7.0), "opt": np.full(3, 7.0)})

    def init() -> Any:
        fresh = {"model": np.zeros(3), "opt": np.zeros(3), "head": np.zeros(2)}
        with CheckpointManager(tmp_path / "old") as old:
            return old.restore(like=fresh, leaves="model").state

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for expected in (0, 1, 2):
            with CheckpointManager(tmp_path / "new") as manager:
                state, step = manager.restore_or_initialize(init)
                assert step == expected
                assert state["model"].tolist() == [7.0 + step] * 3
                assert state["opt"].tolist() == [float(step)] * 3
                state = {key: value + 1 for key, value in state.items()}
                manager.save(step + 1, state)


def test_a_group_restores_the_same_parts(run: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(run, processes=processes) as manager:
            like = {"model": make(9)["model"], "new": processes.index}
            restored = manager.restore(like=like, strict=False)
            state = restored.state
            return float(state["model"]["head"]["w"].flat[0]), state["new"], restored.report.missing

    with pytest.warns(UserWarning, match="differ"):
        assert play(2, program) == [(1.0, 0, ("new",)), (1.0, 1, ("new",))]


def test_a_member_per_rank_is_no_difference(tmp_path: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            rank = processes.index
            manager.save(1, {"w": np.zeros(2), "own": PerRank(np.full(2, rank + 1))})
            manager.wait_until_finished()
            like = {"w": np.ones(2), "own": PerRank(np.zeros(2, int)), "new": 5}
            restored = manager.restore(1, like, strict=False)
            part, _ = manager.restore(1, like, leaves="own/**")
            assert part["w"] is like["w"]
            own = restored.state["own"].value.tolist(), part["own"].value.tolist()
            return own, restored.report.missing, restored.report.unexpected

    with pytest.warns(UserWarning, match="new: expected int"):
        outcomes = play(2, program)
    assert outcomes == [(([n, n], [n, n]), ("new",), ()) for n in (1, 2)]


def test_metadata_is_a_tree_of_shapes_that_reads_no_array(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    manager = CheckpointManager(run)
    manager.close()
    tree = manager.metadata()
    assert tree["model"]["head"] == {
        "w": LeafSpec("float32", (3, 4)), "bias": LeafSpec("float32", (4,)),
    }  # fmt: skip
    assert tree["model"]["enc"]["w"].shape == (2, 3)
    assert tree["step"] == 1
    assert tree["count"]["n"] == 1
    assert manager.metadata(manager.latest_checkpoint) == manager.metadata(1) == tree
    with pytest.raises(StepNotFoundError):
        manager.metadata(5)


def test_a_restored_state_is_a_pair_with_a_report(manager: CheckpointManager) -> None:
    restored = pickle.loads(pickle.dumps(manager.restore(like=make(9), leaves="step")))
    assert isinstance(restored, Restored)
    assert restored[1] == restored.step == 1
    assert restored.report.leaves == ("step",)
    assert Restored(5, 0).report.is_exact
    assert Restored(5, 0) == (5, 0)
