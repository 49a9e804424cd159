"""Each file names its run: what is of another run is refused, and nothing beside it is deleted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure import CheckpointManager, ManagerOptions, load_checkpoint
from perdure.cli import main
from perdure.convert import average, import_run
from perdure.errors import (
    CorruptionError,
    FormatVersionError,
    HistoryError,
    PruneError,
    StoreError,
)
from perdure.store import Run, verify_run
from perdure.store.copy import Copied, copy_run, fork_run
from perdure.store.format import MARKER, manifest_name
from perdure.store.repair import repair


def train(where: Path, last: int, begin: float = 0.0, **options: Any) -> dict[int, str]:
    """Resume and save up to a step; returns the fingerprints by step."""
    with CheckpointManager(where, max_to_keep=3, **options) as manager:
        state = {"w": np.full(50, begin)}
        start = manager.restore_or_initialize(lambda: state)
        for step in range(start.step + 1, last + 1):
            start.state["w"] = start.state["w"] + 1
            manager.save(step, start.state)
    return prints(where)


def prints(where: Path) -> dict[int, str]:
    run = Run(where)
    return {step: run.manifest(step).fingerprint for step in run.steps()}


def files(where: Path) -> dict[str, bytes]:
    kept = [path for path in where.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(where)): path.read_bytes() for path in kept}


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs whose states differ."""
    train(tmp_path / "mine", 3)
    train(tmp_path / "theirs", 2, begin=100.0)
    return tmp_path / "mine", tmp_path / "theirs"


def test_a_mirror_that_is_another_run_is_refused_and_keeps_its_checkpoints(
    runs: tuple[Path, Path],
) -> None:
    mine, theirs = runs
    before = files(theirs), files(mine)
    with pytest.raises(HistoryError, match=r"the mirror .*theirs: expected run .* found run"):
        train(mine, 5, mirror=theirs)
    assert (files(theirs), files(mine)) == before
    train(mine, 5, mirror=mine.parent / "copy")  # the control
    assert prints(mine.parent / "copy")[5] == prints(mine)[5]


def test_a_run_that_was_lost_continues_its_mirror_as_the_same_run(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, mirror=tmp_path / "mirror")
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match="step 2 is restored from the mirror"):
        train(tmp_path / "run", 4, mirror=tmp_path / "mirror")
    assert prints(tmp_path / "mirror")[4] == prints(tmp_path / "run")[4]
    ids = {Run(tmp_path / name).log.run for name in ("run", "mirror")}
    assert len(ids) == 1
    assert verify_run(Run(tmp_path / "run")).ok


def test_a_copy_into_another_run_that_is_behind_is_refused(runs: tuple[Path, Path]) -> None:
    mine, theirs = runs
    before = files(theirs)
    for dry_run in (True, False):
        with pytest.raises(HistoryError, match="expected an empty directory or a copy"):
            copy_run(mine, theirs, dry_run=dry_run)
    assert files(theirs) == before
    copy_run(mine, mine.parent / "copy", [1])
    copy_run(mine, mine.parent / "copy")  # the control
    assert prints(mine.parent / "copy") == prints(mine)


def test_beside_a_manifest_of_another_run_nothing_is_moved_or_deleted(
    runs: tuple[Path, Path],
) -> None:
    mine, theirs = runs
    good = (mine / manifest_name(2)).read_bytes()
    shutil.copy(theirs / manifest_name(2), mine / manifest_name(2))
    before = files(mine)
    (problem,) = [each for each in verify_run(Run(mine)).problems if each.harmful]
    assert "is a checkpoint of run" in problem.what
    shown = CliRunner().invoke(main, ["verify", str(mine)]).output
    assert "a restore takes" not in shown
    assert "--repair` sets aside" not in shown
    listed = CliRunner().invoke(main, ["ls", str(mine), "--json"])
    assert listed.exit_code == 1
    found = json.loads(listed.stdout)
    assert [row["step"] for row in found["checkpoints"]] == [1, 3]
    (damaged,) = found["damaged"]
    assert damaged["step"] == 2
    assert "is a checkpoint of run" in damaged["error"]
    assert CliRunner().invoke(main, ["show", f"{mine}@3"]).exit_code == 0
    best = CliRunner().invoke(main, ["show", f"{mine}@best:max:loss"])
    assert best.exit_code == 1
    assert "is a checkpoint of run" in best.output
    assert "--repair" not in best.output
    with Run(mine) as run:
        with pytest.raises(PruneError, match="One of the two does not belong here"):
            repair(run)
        with pytest.raises(CorruptionError, match="is a checkpoint of run"):
            run.delete([1])
    with pytest.raises(HistoryError, match=r"000002.json: is a checkpoint of run"):
        Run(mine).load(2)
    assert CliRunner().invoke(main, ["prune", str(mine), "--max-to-keep", "1"]).exit_code == 1
    assert files(mine) == before
    (mine / manifest_name(2)).write_bytes(good)  # the control
    assert verify_run(Run(mine)).ok
    assert CliRunner().invoke(main, ["ls", str(mine)]).exit_code == 0
    with Run(mine) as run:
        assert run.delete([1]) == [1]


def test_no_training_continues_with_the_checkpoints_of_another_run(
    runs: tuple[Path, Path],
) -> None:
    mine, theirs = runs
    for folder in ("checkpoints", "packs"):
        (mine / folder).rename(mine / f"{folder}-away")
        shutil.copytree(theirs / folder, mine / folder)
    before = files(mine)
    with pytest.raises(HistoryError, match="is a checkpoint of run"):
        train(mine, 5)
    assert files(mine) == before
    for folder in ("checkpoints", "packs"):
        shutil.rmtree(mine / folder)
        (mine / f"{folder}-away").rename(mine / folder)
    assert 5 in train(mine, 5)  # the control


def test_every_flipped_bit_of_the_marker_is_found_and_repaired(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    marker, log = tmp_path / "run" / MARKER, tmp_path / "run" / "log.jsonl"
    data, lines = marker.read_bytes(), log.read_bytes()
    run = Run(tmp_path / "run").log.run
    harmless = newer = 0
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        marker.write_bytes(changed)
        try:
            harmless += Run(tmp_path / "run").log.run == run
        except FormatVersionError:
            newer += 1
        except StoreError:
            continue
    assert harmless <= 16, "white space at the end"
    assert newer == 0, "a flipped bit is no newer perdure"
    changed = bytearray(data)
    changed[data.index(run.encode() if run else b"") + 3] ^= 1
    marker.write_bytes(changed)
    with Run(tmp_path / "run", repair=True) as opened:
        repair(opened)
        assert opened.log.run == run
    assert log.read_bytes() == lines
    assert verify_run(Run(tmp_path / "run")).ok


def test_a_marker_of_another_run_is_written_again_once_it_is_removed(
    runs: tuple[Path, Path],
) -> None:
    mine, theirs = runs
    run = Run(mine).log.run
    shutil.copy(theirs / MARKER, mine / MARKER)
    before = files(mine)
    with Run(mine) as opened, pytest.raises(PruneError, match=r"If perdure.json is the wrong one"):
        repair(opened)
    assert files(mine) == before
    (mine / MARKER).unlink()
    with Run(mine, repair=True) as opened:
        repair(opened)
        assert opened.log.run == run
    assert 5 in train(mine, 5)


def forked(source: Path, out: Path) -> object:
    return fork_run(source, 3, out)


def copied(source: Path, out: Path) -> object:
    return copy_run(source, out, [3])


def averaged(source: Path, out: Path) -> object:
    return average([f"{source}@2", f"{source}@3"], out)


def imported(source: Path, out: Path) -> object:
    np.savez(source.parent / "w.npz", w=np.zeros(50))
    return import_run(source.parent / "w.npz", out)


@pytest.mark.parametrize("make", [forked, copied, averaged, imported])
@pytest.mark.parametrize(
    "place",
    [
        "writer_session.claim_folders",
        "committer.create_whole",
        "writer_session.WriterSession.finish",
    ],
)
def test_no_training_begins_in_what_a_command_did_not_finish(
    make: Callable[[Path, Path], object],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out = tmp_path / "run", tmp_path / "out"
    train(source, 3)

    def fail(*arguments: object, **keywords: object) -> None:
        failed.append(arguments)
        raise KeyboardInterrupt

    failed: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(f"perdure.store.{place}", fail)
        with pytest.raises(KeyboardInterrupt):
            make(source, out)
    assert len(failed) == 1
    assert (out / MARKER).exists()
    with pytest.raises(HistoryError, match=r"was to be made from .*, which did not end"):
        train(out, 1)
    with pytest.raises(HistoryError, match="Repeat that command"):
        Run(out).require_finished()
    make(source, out)  # repeated
    train(out, 5)
    assert 5 in prints(out)


def test_a_copy_that_was_killed_after_its_first_checkpoint_is_no_older_start(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "run", tmp_path / "out"
    train(source, 3)

    def kill(outcome: Copied) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_run(source, out, progress=kill)
    assert Run(out).steps() == [1]
    for begin in (lambda: train(out, 5), lambda: load_checkpoint(out)):
        with pytest.raises(HistoryError, match=r"was to be made from .*, which did not end"):
            begin()
    (problem,) = verify_run(Run(out)).problems
    assert (problem.name, problem.harmful) == ("perdure.json", False)
    assert "was to be made from" in problem.what
    assert load_checkpoint(f"{out}@1")["w"][0] == 1.0, "of a source that is gone"
    with pytest.raises(HistoryError, match="did not end"):
        copy_run(out, tmp_path / "of a part")
    assert not (tmp_path / "of a part").exists()
    copy_run(out, tmp_path / "named", [1])
    with (
        pytest.warns(UserWarning, match="did not end: not used"),
        pytest.raises(HistoryError, match="which did not end"),
    ):
        train(tmp_path / "lost", 5, mirror=out)
    assert Run(out).steps() == [1]
    assert [each.outcome for each in copy_run(source, out)] == ["present", "copied", "copied"]
    assert train(out, 4) | prints(source) == prints(out) | prints(source)  # the control
    copy_run(source, tmp_path / "older", [1])
    with CheckpointManager(tmp_path / "older") as manager:
        assert manager.restore_or_initialize({"w": np.zeros(50)}).step == 1


def test_an_unreadable_mark_of_a_folder_says_what_to_do(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    (tmp_path / "run" / "packs").rename(tmp_path / "disk")
    (tmp_path / "run" / "packs").symlink_to(tmp_path / "disk")
    train(tmp_path / "run", 3)
    (tmp_path / "disk" / ".run").write_bytes(b"?")
    with pytest.raises(CorruptionError, match="If no other run uses it, remove the file"):
        train(tmp_path / "run", 4)
    (tmp_path / "disk" / ".run").unlink()
    assert 4 in train(tmp_path / "run", 4)


def test_a_refused_start_marks_no_empty_mount_point(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "disk")
    (tmp_path / "mounted").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "mounted")
    with pytest.raises(HistoryError, match="may be moved or not mounted"):
        train(tmp_path / "run", 3)
    assert list((tmp_path / "mounted").iterdir()) == []


def test_a_first_start_that_was_killed_names_the_run_in_the_mirror(tmp_path: Path) -> None:
    """Two machines with one mirror: the first is killed before its first copy."""
    mirror = tmp_path / "mirror"
    with CheckpointManager(tmp_path / "a", mirror=mirror) as manager:
        manager.restore_or_initialize({"w": np.zeros(50)})
    train(tmp_path / "b", 2, mirror=mirror)
    with pytest.warns(UserWarning, match="step 2 is restored from the mirror"):
        train(tmp_path / "a", 3, mirror=mirror)
    assert prints(tmp_path / "a")[3] == prints(mirror)[3]
    assert len({Run(tmp_path / name).log.run for name in ("a", "b", "mirror")}) == 1


def test_a_copy_that_is_refused_for_one_step_changes_nothing_for_those_that_are_there(
    tmp_path: Path,
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    options = ManagerOptions(journal_every=1)
    train(mine, 3, options=options)
    copy_run(mine, other, [1, 2])
    train(mine, 5, options=options)
    train(other, 4)  # without a journal, so that a copy would add lines
    with Run(other) as run:
        run.delete([3])
    before = files(other)
    outcomes = {each.step: each.outcome for each in copy_run(mine, other, [3, 4])}
    assert outcomes == {3: "refused", 4: "present"}
    assert files(other) == before


def test_a_directory_that_cannot_be_listed_once_is_said_to_be_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 2)
    real, left = os.listdir, [0]

    def fail_once(path: Any) -> list[str]:
        left[0] -= 1
        if left[0] == 0:
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr("os.listdir", fail_once)
    fired = 0
    for marked in (True, False):
        if not marked:
            (tmp_path / MARKER).unlink()
        for number in range(1, 12):
            left[0] = number
            with suppress(StoreError), CheckpointManager(tmp_path, max_to_keep=3) as manager:
                manager.restore_or_initialize({"w": np.zeros(50)})
            fired += left[0] <= 0
    assert fired > 5


def test_a_mirror_that_was_a_part_of_a_copy_is_whole_once_it_has_all(tmp_path: Path) -> None:
    source, out = tmp_path / "run", tmp_path / "out"
    train(source, 3)

    def kill(outcome: Copied) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_run(source, out, progress=kill)
    with pytest.warns(UserWarning, match="did not end: not used"):
        train(source, 4, mirror=out)
    shutil.rmtree(source)
    with pytest.warns(UserWarning, match="is restored from the mirror"):
        assert 5 in train(source, 5, mirror=out)
