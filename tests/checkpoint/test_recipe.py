"""A resume and all processes of a group must have the recipe of the checkpoint."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from messages import unnamed
from perdure import CheckpointManager
from perdure.checkpoint.recipe import allowed, check_group, check_resume
from perdure.errors import RecipeMismatchError
from perdure.store import Run
from pretend import Pretend, play

RECIPE: dict[str, Any] = {"replicas": 8, "seed": 0, "threads": 8, "shuffle": True}
OTHER = {**RECIPE, "replicas": 4, "threads": 2}


def save(directory: Path, recipe: dict[str, Any] | None) -> None:
    with CheckpointManager(directory, recipe=recipe) as manager:
        manager.save(2, {"step": 2})


def resume(directory: Path, recipe: dict[str, Any] | None, *allow: str) -> int:
    with CheckpointManager(directory, recipe=recipe, allow=allow) as manager:
        return manager.restore_or_initialize({"step": 0}).step


def test_every_field_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    save(tmp_path, RECIPE)
    with pytest.raises(RecipeMismatchError) as error:
        resume(tmp_path, OTHER)
    assert not unnamed(
        error.value,
        f"{tmp_path}: step 2",
        "\n  replicas: the checkpoint has 8, this run has 4\n",
        "\n  threads: the checkpoint has 8, this run has 2 (may change bits)\n",
        "allow=('replicas', 'threads')",
        "PERDURE_ALLOW=replicas,threads",
    )
    assert resume(tmp_path, RECIPE) == 2
    assert Run(tmp_path).manifest(2).recipe.items() >= RECIPE.items()


def test_an_allowed_difference_is_a_warning_and_others_are_still_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, RECIPE)
    with pytest.warns(
        UserWarning, match="replicas: the checkpoint has 8, this run has 4"
    ) as caught:
        assert resume(tmp_path, OTHER, "replicas", "threads") == 2
    assert "was made by a recipe that is not the same in all" in str(caught[0].message)
    with pytest.raises(RecipeMismatchError) as error:
        resume(tmp_path, OTHER, "replicas", "thread")
    assert "replicas:" not in str(error.value)
    assert not unnamed(error.value, "PERDURE_ALLOW=threads", "allowed so far: replicas, thread")
    monkeypatch.setenv("PERDURE_ALLOW", "threads")
    with pytest.warns(UserWarning, match="threads"):
        assert resume(tmp_path, OTHER, "replicas") == 2


def test_a_checkpoint_or_a_run_without_a_recipe_is_not_compared(tmp_path: Path) -> None:
    save(tmp_path, None)
    assert resume(tmp_path, RECIPE) == 2
    save(tmp_path / "other", RECIPE)
    assert resume(tmp_path / "other", None) == 2


def test_a_field_that_one_side_lacks_is_a_warning() -> None:
    note = check_resume("run: step 2", {**RECIPE, "old": 1}, {**RECIPE, "new": "x"}, frozenset())
    assert note is not None
    assert note.splitlines()[1:] == [
        "  new: the checkpoint has nothing, this run has 'x'",
        "  old: the checkpoint has 1, this run has nothing",
    ]


def test_a_flag_is_not_a_number() -> None:
    assert check_resume("", {"x": 1}, {"x": 1.0}, frozenset()) is None
    with pytest.raises(RecipeMismatchError, match="the checkpoint has True, this run has 1"):
        check_resume("", {"x": True}, {"x": 1}, frozenset())


def test_perdure_allow_names_fields_in_the_environment() -> None:
    assert allowed(("a",), {"PERDURE_ALLOW": " b, c,"}) == {"a", "b", "c"}
    assert allowed((), {}) == frozenset()


def test_another_number_of_processes_resumes_without_a_warning(tmp_path: Path) -> None:
    """Positive control: the recipe is the same."""
    save(tmp_path, RECIPE)

    def program(processes: Pretend) -> int:
        with CheckpointManager(tmp_path, recipe=RECIPE, processes=processes) as manager:
            return manager.restore().step

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert play(3, program) == [2, 2, 2]


def test_a_worker_with_another_recipe_raises_in_all_before_anything_is_saved(
    tmp_path: Path,
) -> None:
    def program(processes: Pretend) -> None:
        recipe = {**RECIPE, "seed": 7 if processes.index == 2 else 0}
        with CheckpointManager(tmp_path, recipe=recipe, processes=processes) as manager:
            manager.save(1, {"step": 1})

    errors = play(3, program)
    assert {type(error) for error in errors} == {RecipeMismatchError}
    assert len({str(error) for error in errors}) == 1
    process = f"({socket.gethostname()}, pid {os.getpid()})"
    assert f"  seed: process 0 {process} has 0, process 2 {process} has 7\n" in str(errors[0])
    assert "the processes of the group do not have one recipe" in str(errors[0])
    assert "PERDURE_ALLOW=seed" in str(errors[0])
    assert list(tmp_path.iterdir()) == []


def test_releases_are_not_mixed_in_a_group() -> None:
    def program(other: str) -> Callable[[Pretend], str | None]:
        return lambda processes: check_group(
            processes, {**RECIPE, **({"perdure": other} if processes.index else {})}, frozenset()
        )

    errors = play(3, program("0.0.9"))
    assert {type(error) for error in errors} == {RecipeMismatchError}
    assert len({str(error) for error in errors}) == 1
    assert f"has {perdure.__version__!r}, process 1" in str(errors[0])
    assert "has '0.0.9'" in str(errors[0])
    assert play(3, program(perdure.__version__)) == [None] * 3


def test_processes_of_a_group_may_be_allowed_to_differ() -> None:
    def program(processes: Pretend) -> str | None:
        recipe = dict(RECIPE) if processes.index else {**RECIPE, "instruction_set": "avx2"}
        return check_group(processes, recipe, frozenset({"instruction_set"}))

    notes = play(2, program)
    assert notes[1] is None
    assert notes[0] is not None
    assert "has 'avx2', process 1" in notes[0]
    assert notes[0].endswith("has nothing (may change bits)")
