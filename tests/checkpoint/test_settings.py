"""A plain loop is not resumed in silence under other settings of its framework."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import CheckpointManager, ManagerOptions
from perdure.errors import RecipeMismatchError
from perdure.store import Run


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


def loop(run: Any, steps: int, **options: Any) -> None:
    with CheckpointManager(run, **options) as manager:
        state, start = manager.restore_or_initialize({"w": torch.zeros(2, dtype=torch.float32)})
        for step in range(start, steps):
            manager.save(step + 1, {"w": state["w"] + step})


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        (lambda: torch.set_num_threads(2), "torch.threads", ("1", "2")),
        (lambda: torch.set_default_dtype(torch.float64), "torch.default_dtype", ("32", "64")),
        (lambda: torch.use_deterministic_algorithms(True), "torch.deterministic", ("se", "ue")),
    ],
)
def test_other_settings_are_refused_before_anything_is_saved(
    tmp_path: Path, change: Any, field: str, values: tuple[str, str]
) -> None:
    torch.set_num_threads(1)
    loop(tmp_path, 2)
    loop(tmp_path, 3)
    change()
    with pytest.raises(RecipeMismatchError) as caught:
        loop(tmp_path, 5)
    for part in (field, *values, f"allow=('{field}',)"):
        assert part in str(caught.value)
    assert Run(tmp_path).steps() == [1, 2, 3]
    with pytest.warns(UserWarning, match=field):
        loop(tmp_path, 5, allow=(field,))
    loop(tmp_path, 6)  # the newest checkpoint has the present settings


def test_the_refusal_stays_until_it_is_allowed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    loop(tmp_path, 1)
    torch.set_num_threads(2)
    with CheckpointManager(tmp_path) as manager:
        state, _ = manager.restore_or_initialize({"w": torch.zeros(2)})
        for _ in range(2):
            with pytest.raises(RecipeMismatchError):
                manager.save(2, state)
        with pytest.raises(RecipeMismatchError):
            manager.save_and_exit(2, state)
    with pytest.warns(UserWarning, match="torch.threads"):
        loop(tmp_path, 2, allow=("threads",))


def test_an_evaluation_under_other_settings_is_no_resume(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    loop(tmp_path, 1)
    torch.set_num_threads(2)
    options = ManagerOptions(save_random_state=False)
    assert CheckpointManager(tmp_path, options=options).restore(like={"w": torch.ones(2)}).step == 1


def test_a_program_makes_its_settings_after_the_restore(tmp_path: Path) -> None:
    for steps in (2, 4):
        torch.set_num_threads(3)
        with CheckpointManager(tmp_path) as manager:
            _, start = manager.restore_or_initialize({"n": 0})
            torch.set_num_threads(1)
            for step in range(start, steps):
                manager.save(step + 1, {"n": step})
    assert Run(tmp_path).manifest(4).recipe["torch.threads"] == 1


def test_only_frameworks_that_are_imported_are_read(tmp_path: Path) -> None:
    program = f"""
import sys, perdure
with perdure.CheckpointManager({str(tmp_path)!r}) as manager:
    manager.save(1, {{"n": 1}})
print([name for name in ("jax", "torch", "tensorflow") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert Run(tmp_path).manifest(1).recipe == {}
    loop(tmp_path / "torch", 1)
    recipe = Run(tmp_path / "torch").manifest(1).recipe
    assert recipe["torch.engine_version"] == f"torch {torch.__version__}"
    with CheckpointManager(tmp_path) as manager:  # the other run has imported nothing
        manager.restore_or_initialize({"n": 0})
        assert manager.save(2, {"n": 2})
