"""Nothing begins again, and nothing is deleted, where checkpoints are lost or another run's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import Crash, make_leaves

from perdure import CheckpointManager
from perdure.cli import main
from perdure.errors import CorruptionError, HistoryError, PerdureError, PruneError, SaveError
from perdure.store import LocalStorage, Run, copy_run, fork_run, repair, verify_run


def train(where: Path, last: int, **options: Any) -> int:
    """Resume, save up to a step, and return the step that it began from."""
    with CheckpointManager(where, max_to_keep=2) as manager:
        start = manager.restore_or_initialize({"w": np.zeros(50)}, **options).step
        for step in range(start + 1, last + 1):
            manager.save(step, {"w": np.full(50, float(step))})
    return start


def packs(where: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (where / "packs").glob("0*")}


def prune(where: Path) -> int:
    return CliRunner().invoke(main, ["prune", str(where), "--max-to-keep", "1"]).exit_code


@pytest.mark.parametrize("how", ["moved", "emptied"])
def test_a_run_whose_checkpoints_are_not_there_keeps_its_packs_and_does_not_begin_again(
    tmp_path: Path, how: str
) -> None:
    run = tmp_path / "run"
    train(run, 1)  # one checkpoint: its packs alone could be leftovers
    before = packs(run)
    (run / "checkpoints").rename(tmp_path / "away")
    if how == "emptied":
        (run / "checkpoints").mkdir()
    assert prune(run) != 0
    with pytest.raises(HistoryError, match="start_over=True"):
        train(run, 3)
    with Run(run) as opened, pytest.raises(HistoryError, match="Bring it back"):
        opened.save(1, {})
    assert not verify_run(Run(run)).ok
    for arguments in (["ls", str(run)], ["copy", str(run), str(tmp_path / "copy")]):
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == 1
        assert "may be moved or not mounted" in shown.output
    assert packs(run) == before
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    (tmp_path / "away").rename(run / "checkpoints")
    assert train(run, 3) == 1  # the control
    shutil.rmtree(run / "checkpoints")
    assert train(run, 2, start_over=True) == 0


@pytest.mark.parametrize("folder", ["checkpoints", "packs"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_moved_under_a_running_training_loses_no_checkpoint(
    tmp_path: Path, folder: str, replaced: bool
) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run, max_to_keep=2) as manager:
        manager.restore_or_initialize({"w": np.zeros(50)})
        for step in (1, 2):
            manager.save(step, {"w": np.full(50, float(step))})
        manager.wait_until_finished()
        (run / folder).rename(tmp_path / "away")
        if replaced:
            (run / folder).mkdir()
        manager.save(3, {"w": np.full(50, 3.0)})
        with pytest.raises(SaveError, match="moved, deleted, unmounted or replaced"):
            manager.wait_until_finished()
        with pytest.raises(PruneError, match="moved, deleted, unmounted or replaced"):
            manager.delete(1)
        if replaced:
            (run / folder).rmdir()
        (tmp_path / "away").rename(run / folder)
        manager.save(4, {"w": np.full(50, 4.0)})  # the training went on
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 4]
    assert verify_run(Run(run)).good == (2, 4)


def test_a_prune_reads_the_newest_checkpoint_before_it_deletes_the_others(tmp_path: Path) -> None:
    with Run(tmp_path, create=True) as run:
        for step in (1, 2, 3):
            run.save(step, make_leaves(step))
    newest = max((tmp_path / "packs").glob("0*"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 4] ^= 1
    newest.write_bytes(data)
    before = packs(tmp_path)
    result = CliRunner().invoke(main, ["prune", str(tmp_path), "--max-to-keep", "1"])
    assert result.exit_code == 1
    assert "verify" in result.output
    assert "DELETE" not in result.output
    assert packs(tmp_path) == before
    assert Run(tmp_path).steps() == [1, 2, 3]
    with Run(tmp_path) as run:
        repair(run)
    assert prune(tmp_path) == 0  # the control
    assert Run(tmp_path).steps() == [2]


@pytest.mark.parametrize("log", ["cut", "gone", "empty"])
def test_the_pack_of_one_step_shows_that_there_was_a_checkpoint(tmp_path: Path, log: str) -> None:
    train(tmp_path, 1)
    before = packs(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    lines = (tmp_path / "log.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_bytes(lines[0] if log == "cut" else b"")
    if log == "gone":
        (tmp_path / "log.jsonl").unlink()
    assert not verify_run(Run(tmp_path)).ok
    with pytest.raises(HistoryError, match="start_over=True"):
        train(tmp_path, 2)
    assert packs(tmp_path) == before


@pytest.mark.parametrize("lost", ["moved", "set aside"])
def test_a_mirror_that_has_lost_its_checkpoints_does_not_let_the_run_begin_again(
    tmp_path: Path, lost: str
) -> None:
    mirror = tmp_path / "mirror"

    def start(where: str, **options: Any) -> int:
        with CheckpointManager(tmp_path / where, mirror=mirror) as manager:
            start = manager.restore_or_initialize({"w": np.zeros(50)}, **options).step
            manager.save(start + 1, {"w": np.full(50, 1.0)})
            return start

    assert start("run") == 0
    shutil.rmtree(tmp_path / "run")
    if lost == "moved":
        (mirror / "checkpoints").rename(tmp_path / "away")
    else:
        with Run(mirror) as opened:
            opened.quarantine(1, "a test")
    with pytest.raises(HistoryError, match="mirror"):
        start("run")
    if lost == "moved":
        (tmp_path / "away").rename(mirror / "checkpoints")
        with pytest.warns(UserWarning, match="is restored from the mirror"):
            assert start("run") == 1  # the control
    else:
        assert start("run", start_over=True) == 0


def test_what_a_rollback_set_aside_does_not_excuse_that_the_others_are_gone(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    train(run, 3)
    copy_run(run, other, [2])
    with Run(run) as opened:
        opened.rollback(2)
    before = packs(run)
    (run / "checkpoints").rename(tmp_path / "away")
    (run / "checkpoints").mkdir()
    assert not verify_run(Run(run)).ok
    assert prune(run) != 0
    for arguments in (["prune", str(run), "--rolled-back"], ["verify", str(run), "--repair"]):
        assert CliRunner().invoke(main, arguments).exit_code == 1
    for begin in (lambda: copy_run(other, run), lambda: fork_run(other, 2, run)):
        with pytest.raises(HistoryError, match="Bring it back"):
            begin()
    with Run(run) as opened, pytest.raises(HistoryError, match="Bring it back"):
        opened.save(1, {})
    assert packs(run) == before
    (run / "checkpoints").rmdir()
    (tmp_path / "away").rename(run / "checkpoints")
    with Run(run) as opened:  # the control
        assert opened.undo_rollback() == [3]
        assert verify_run(opened).ok


def test_a_fork_does_not_begin_where_damaged_checkpoints_are_set_aside(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    train(run, 2)
    train(other, 1)
    with Run(run) as opened:
        for step in opened.steps():
            opened.quarantine(step, "a test")
    before = packs(run)
    with pytest.raises(HistoryError, match="set aside"):
        fork_run(other, 1, run)
    assert packs(run) == before
    assert prune(run) == 0
    assert packs(run) == before


@pytest.mark.parametrize("lost", ["all", "newest"])
def test_a_prune_neither_counts_nor_deletes_a_checkpoint_that_lacks_a_pack(
    tmp_path: Path, lost: str
) -> None:
    where, away = tmp_path / "run", tmp_path / "away"
    with Run(where, create=True) as run:
        for step in (1, 2, 3):
            run.save(step, make_leaves(step))
    names = sorted(packs(where))[-1:] if lost == "newest" else sorted(packs(where))
    away.mkdir()
    for name in names:
        (where / "packs" / name).rename(away / name)
    assert prune(where) == 0
    assert Run(where).steps() == ([2, 3] if lost == "newest" else [1, 2, 3])
    for name in names:
        (away / name).rename(where / "packs" / name)
    assert verify_run(Run(where)).ok
    assert prune(where) == 0  # the control
    assert Run(where).steps() == [3]


def test_after_a_repair_that_left_nothing_the_next_start_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    for pack in (tmp_path / "packs").glob("0*"):
        pack.write_bytes(b"")
    with Run(tmp_path) as run:
        assert repair(run).report.good == ()
    with pytest.raises(HistoryError, match="set aside"):
        train(tmp_path, 3)
    assert train(tmp_path, 3, start_over=True) == 0
    assert train(tmp_path, 4) == 3, "said once"


def test_a_save_without_a_restore_does_not_begin_where_all_is_set_aside(tmp_path: Path) -> None:
    train(tmp_path, 2)
    with Run(tmp_path) as run:
        for step in run.steps():
            run.quarantine(step, "a test")
        run.save(3, make_leaves(3))  # the control: the same process still has the state
        run.quarantine(3, "a test")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"step": 1}, force=True)
        with pytest.raises(HistoryError, match="set aside"):
            manager.wait_until_finished()
        assert manager.all_steps() == []
        manager.restore_or_initialize({"step": 0}, start_over=True)
        manager.save(1, {"step": 1}, force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


def test_a_repair_moves_nothing_while_the_packs_are_away(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 3)
    manifests = sorted((run / "checkpoints").iterdir())
    (run / "packs").rename(tmp_path / "away")
    (run / "packs").mkdir()
    result = CliRunner().invoke(main, ["verify", str(run), "--repair"])
    assert result.exit_code != 0
    assert "not mounted" in result.output
    assert sorted((run / "checkpoints").iterdir()) == manifests
    (run / "packs").rmdir()
    (tmp_path / "away").rename(run / "packs")
    assert verify_run(Run(run)).ok


def test_a_run_that_never_saved_or_was_emptied_on_purpose_begins(tmp_path: Path) -> None:
    """The control: a crash before the first checkpoint, and a deletion that the user asked for."""
    assert train(tmp_path, 0) == 0
    assert train(tmp_path, 2) == 0
    with CheckpointManager(tmp_path) as manager:
        for step in manager.all_steps():
            manager.delete(step)
    assert train(tmp_path, 2) == 0


def test_a_run_whose_first_saves_were_killed_begins_if_the_log_is_whole(tmp_path: Path) -> None:
    def kill_before_the_commit(_: str, path: str) -> None:
        if "checkpoints/0" in path:
            raise Crash

    def kill_in_a_save(step: int, value: int) -> None:
        storage = LocalStorage(tmp_path, kill_before_the_commit)
        with pytest.raises(Crash), Run(storage, create=True) as run:
            run.save(step, make_leaves(value, (40,)))

    for value in (3, 4, 5):
        kill_in_a_save(3, value)
    assert len(packs(tmp_path)) == 3
    assert verify_run(Run(tmp_path)).ok
    log = tmp_path / "log.jsonl"
    log.rename(tmp_path / "away")  # the control: nothing shows that none was committed
    with pytest.raises(HistoryError, match="holds data of 1 save"):
        train(tmp_path, 2)
    assert len(packs(tmp_path)) == 3
    (tmp_path / "away").rename(log)
    shutil.copytree(tmp_path, tmp_path.with_name("other"))
    assert train(tmp_path, 2) == 0
    # A save begins after the commit of the one before: several steps were saved, whatever the log says.
    tmp_path = tmp_path.with_name("other")
    kill_in_a_save(4, 6)
    with pytest.raises(HistoryError, match="holds data of 2 saves"):
        train(tmp_path, 2)
    assert train(tmp_path, 2, start_over=True) == 0


def test_a_run_whose_log_and_checkpoints_are_older_does_not_begin_again(tmp_path: Path) -> None:
    train(tmp_path, 6)
    before = packs(tmp_path)
    for path in (tmp_path / "checkpoints").glob("0*"):
        path.unlink()
    log = tmp_path / "log.jsonl"
    whole = log.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == ord("\n")]
    for end in ends:
        log.write_bytes(whole[:end])
        with pytest.raises(HistoryError, match="start_over=True"):
            train(tmp_path, 8)
        prune(tmp_path)
    assert len(ends) > 2
    assert packs(tmp_path) == before


def test_older_copies_of_the_manifests_are_named_at_the_next_start(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=None) as manager:
        for step in range(1, 7):
            manager.save(step, {"w": np.full(50, float(step))})
    for step in (4, 5):
        (tmp_path / f"checkpoints/{step:012d}.json").unlink()
    train(tmp_path, 0)  # step 6 is there
    (tmp_path / f"checkpoints/{6:012d}.json").unlink()
    with pytest.warns(UserWarning, match="data of steps 4, 5, 6, whose manifests are not there"):
        train(tmp_path, 0)


def test_a_rolled_back_checkpoint_that_was_copied_back_stays_aside(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def branch(last: int, line: float) -> float:
        with CheckpointManager(run, max_to_keep=None) as manager:
            state, start = manager.restore_or_initialize({"w": np.zeros(50)})
            begun = float(state["w"][0])
            for step in range(start + 1, last + 1):
                manager.save(step, {"w": np.full(50, step + line)})
        return begun

    branch(6, 0.0)
    shutil.copytree(run, tmp_path / "backup")
    with Run(run) as opened:
        opened.rollback(3)
    branch(5, 0.5)
    shutil.copy(tmp_path / "backup/checkpoints/000000000006.json", run / "checkpoints")
    assert branch(0, 0.5) == 5.5
    assert (run / "quarantine/000000000006-0.json").exists()
    # The control: of the line that is there it is what a move left in both places.
    with Run(run) as opened:
        opened.rollback(4)
    shutil.copy(run / "quarantine/000000000005-1.json", run / "checkpoints/000000000005.json")
    assert branch(0, 0.5) == 5.5
    assert not (run / "quarantine/000000000005-1.json").exists()


def test_a_copy_that_shares_its_packs_by_a_link_changes_nothing_of_them(tmp_path: Path) -> None:
    run, disk, copy = tmp_path / "run", tmp_path / "disk", tmp_path / "copy"
    train(run, 2)
    (run / "packs").rename(disk)
    (run / "packs").symlink_to(disk)
    train(run, 3)
    shutil.copytree(run, copy, symlinks=True, ignore=shutil.ignore_patterns("lock"))
    before = packs(run)
    shown = CliRunner().invoke(main, ["verify", str(copy)])
    assert shown.exit_code == 1
    assert "2 checkpoints good" in shown.output
    assert "restore" not in shown.output, "no training starts here, and each can be restored"
    assert prune(copy) != 0
    with pytest.raises(CorruptionError, match="of the run at"):
        train(copy, 6)
    with Run(copy) as opened, pytest.raises(PerdureError):
        opened.rollback(2)
    assert packs(run) == before
    assert train(run, 5) == 3, "the owner continues"
    assert verify_run(Run(run)).ok


def test_a_strangers_link_to_the_packs_of_a_run_deletes_none_of_them(tmp_path: Path) -> None:
    mine, stranger = tmp_path / "mine", tmp_path / "stranger"
    train(mine, 3)
    train(stranger, 3)
    shutil.rmtree(stranger / "packs")
    (stranger / "packs").symlink_to(mine / "packs")
    foreign = mine / "packs" / "000000000009-00000-00000000.pack.00000000.tmp"
    foreign.write_bytes(b"a save that is under way")
    before = packs(mine)
    assert prune(stranger) != 0
    with pytest.raises(CorruptionError):
        train(stranger, 5)
    assert packs(mine) == before
    assert foreign.exists()


def test_files_that_perdure_did_not_write_stay(tmp_path: Path) -> None:
    train(tmp_path, 2)
    foreign = [tmp_path / folder / "notes.tmp" for folder in ("packs", "checkpoints")]
    ours = tmp_path / "packs" / "000000000009-00000-00000000.pack.00000000.tmp"
    for path in (*foreign, ours):
        path.write_bytes(b"x")
    train(tmp_path, 3)
    assert [path.exists() for path in (*foreign, ours)] == [True, True, False]


@pytest.mark.parametrize("name", ["log.jsonl", "perdure.json", "checkpoints", "packs", "lock"])
def test_a_pipe_in_the_place_of_any_file_is_an_error_and_no_wait(tmp_path: Path, name: str) -> None:
    train(tmp_path, 2)
    place = tmp_path / name
    if place.is_dir():
        place = max(place.glob("0*"))
    place.unlink()
    os.mkfifo(place)
    for arguments in (["verify"], ["ls"], ["prune", "--max-to-keep", "1"]):
        assert CliRunner().invoke(main, [arguments[0], str(tmp_path), *arguments[1:]]) is not None
    if name != "lock":
        assert CliRunner().invoke(main, ["verify", str(tmp_path)]).exit_code != 0
