"""`RUN`, `RUN@STEP`, `@latest` and `@best`: what may be named, and one error for each mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perdure.checkpoint.address import open_checkpoint, open_checkpoints, open_run
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    NotARunError,
    StepNotFoundError,
    UnreachableError,
)
from perdure.store import Leaf, MemoryStorage, Run, repair

METRICS = {10: {"loss": 0.5, "top@5": 0.5}, 20: {"loss": 0.25, "top@5": 0.25}, 30: {"loss": 0.25}}


def write(where: object, steps: tuple[int, ...] = (10, 20, 30)) -> None:
    with Run(where, create=True) as run:  # type: ignore[arg-type]
        for step in steps:
            data = memoryview(np.full(3, step, np.float32).tobytes())
            run.save(step, {"w": Leaf("float32", (3,), data)}, metrics=METRICS.get(step, {}))


@pytest.mark.parametrize(
    ("which", "step"),
    [
        ("", 30),
        ("@20", 20),
        ("@latest", 30),
        ("@best:max:loss", 10),
        ("@best:min:loss", 30),  # of two equal values the newer
        ("@best:max:top@5", 10),
    ],
)
def test_a_checkpoint_by_its_name(tmp_path: Path, which: str, step: int) -> None:
    where = str(tmp_path / "user@host" / "run")
    write(where)
    checkpoint = open_checkpoint(where + which)
    assert checkpoint.step == checkpoint.manifest.step == step
    assert checkpoint.name == f"{where}@{step}"


def test_a_directory_that_looks_like_a_step_is_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "run@10", (7,))
    assert open_checkpoint(tmp_path / "run@10").step == 7
    assert open_checkpoint(f"{tmp_path / 'run@10'}@7").step == 7
    write(tmp_path / "run", (10,))
    assert open_checkpoint(tmp_path / "run@10").step == 7
    (tmp_path / "run@11").mkdir()  # no run directory
    write(tmp_path / "run", (11,))
    assert open_checkpoint(tmp_path / "run@11").step == 11


def test_a_mistyped_best_does_not_blame_the_retention(tmp_path: Path) -> None:
    write(tmp_path)
    for which in ("best:MIN:loss", "best:min", "best:min:"):
        with pytest.raises((ArgumentError, NotARunError)) as caught:
            open_checkpoint(f"{tmp_path}@{which}")
        assert "its retention" not in str(caught.value), which
    with pytest.raises(ArgumentError, match="its retention names no"):
        open_checkpoint(f"{tmp_path}@best")


def test_several_checkpoints(tmp_path: Path) -> None:
    write(tmp_path)
    assert [each.step for each in open_checkpoints(f"{tmp_path}@30,10")] == [30, 10]
    assert [each.step for each in open_checkpoints(tmp_path)] == [10, 20, 30]
    with pytest.raises(ArgumentError):
        open_checkpoint(f"{tmp_path}@30,10")


def test_an_open_run_and_a_storage_are_accepted() -> None:
    storage = MemoryStorage()
    write(storage)
    assert open_checkpoint(storage).step == open_checkpoint(Run(storage)).step == 30
    assert open_run(storage).steps() == [10, 20, 30]


def test_each_mistake_has_its_error(tmp_path: Path) -> None:
    where = tmp_path / "run"
    write(where)
    with pytest.raises(NotARunError):
        open_checkpoint(tmp_path / "none@10")
    with pytest.raises(StepNotFoundError) as caught:
        open_checkpoint(f"{where}@26")
    assert "the nearest is step 30" in str(caught.value)
    with pytest.raises(StepNotFoundError) as caught:
        open_checkpoint(f"{where}@lastest")
    assert "RUN@latest" in str(caught.value)
    for which in ("best", "best:loss"):
        with pytest.raises(ArgumentError) as refused:
            open_checkpoint(f"{where}@{which}")
        assert "@best:min:METRIC" in str(refused.value)
        assert "loss, top@5" in str(refused.value)
    with pytest.raises(StepNotFoundError) as caught:
        open_checkpoint(f"{where}@best:max:accuracy")
    assert "'accuracy'" in str(caught.value)
    with pytest.raises(ArgumentError):
        open_run(f"{where}@10")
    with Run(tmp_path / "empty", create=True) as run:
        run.begin_writing()
    with pytest.raises(StepNotFoundError):
        open_checkpoint(tmp_path / "empty")


def test_a_damaged_manifest_is_named_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path)
    manifest = tmp_path / "checkpoints" / "000000000020.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    with pytest.raises(CorruptionError) as caught:
        open_checkpoint(f"{tmp_path}@20")
    assert "000000000020.json" in str(caught.value)
    assert str(caught.value).count("perdure verify") == 1
    assert open_checkpoint(f"{tmp_path}@10").step == 10


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_of_a_run_with_a_damaged_manifest_is_not_known(tmp_path: Path, mode: str) -> None:
    """Step 10 is the best and damaged: no other one is named in its place."""
    write(tmp_path)
    assert open_checkpoint(f"{tmp_path}@best:max:loss").step == 10
    manifest = tmp_path / "checkpoints" / "000000000010.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(CorruptionError) as caught:
        open_checkpoint(f"{tmp_path}@best:{mode}:loss")
    assert "checkpoints/000000000010.json" in str(caught.value)
    assert "--repair" in str(caught.value)
    assert open_checkpoint(f"{tmp_path}@30").step == 30  # a step by its number, and the newest
    assert open_checkpoint(tmp_path).step == 30
    with Run(tmp_path) as run:
        repair(run)
    assert open_checkpoint(f"{tmp_path}@best:max:loss").step == 30
    manifest = tmp_path / "checkpoints" / "000000000020.json"
    manifest.unlink()
    manifest.symlink_to(manifest)  # an error of the environment, and no damage
    with pytest.raises(UnreachableError) as unread:
        open_checkpoint(f"{tmp_path}@best:{mode}:loss")
    assert "checkpoints/000000000020.json" in str(unread.value)
