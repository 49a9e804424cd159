"""A crash before every operation: committed checkpoints stay, others are whole or absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from crash_cases import CASES, assert_whole, crashes, durable, operations_of, prepared
from helpers import Crash, run_on


@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_any_operation_loses_nothing_that_was_committed(
    tmp_path: Path, name: str
) -> None:
    survived = 0
    for path in crashes(tmp_path, CASES[name]):
        assert_whole(path, CASES[name])
        survived += 1
    assert survived >= 2


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import crash_cases
from helpers import run_on

def before(operation, path):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1

for left, path in enumerate(sys.argv[3:]):
    if (pid := os.fork()) == 0:
        crash_cases.CASES[sys.argv[2]].act(run_on(crash_cases.Path(path), before))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("name", ["prune", "compaction"])
def test_a_process_killed_at_any_operation_of_a_prune_loses_nothing(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    total = len(operations_of(prepared(tmp_path / "counted", case), case).done)
    paths = [prepared(tmp_path / f"kill{number}", case) for number in range(total)]
    arguments = [str(Path(__file__).parent), name, *map(str, paths)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE)
    assert done.stdout.split() == [b"-9"] * total
    for path in paths:
        assert_whole(path, case)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("left_out", ["nothing", "fsync", "fsync_dir"])
def test_the_order_of_operations_is_durable_and_the_check_sees_a_missing_sync(
    tmp_path: Path, name: str, left_out: str
) -> None:
    case = CASES[name]
    done = operations_of(prepared(tmp_path, case), case).paths
    kept = [entry for entry in done if entry[0] != left_out]
    if name == "rules" and left_out == "fsync_dir":
        assert kept == done, "a line is appended"
        return
    if name in ("delete", "prune") and left_out == "fsync":
        assert kept == done, "deleting writes no file"
        return
    assert durable(kept) == (left_out == "nothing")
    assert (len(kept) < len(done)) == (left_out != "nothing")


def position(done: list[tuple[str, str]], operation: str, part: str, last: bool = False) -> int:
    indexes = [index for index, (op, path) in enumerate(done) if op == operation and part in path]
    return indexes[-1 if last else 0]


def test_the_pack_is_durable_before_the_manifest_can_be_seen(tmp_path: Path) -> None:
    done = operations_of(prepared(tmp_path, CASES["save"]), CASES["save"]).paths
    pack, manifest = position(done, "link", ".pack"), position(done, "link", ".json")
    assert pack < position(done, "fsync_dir", "packs") < manifest


def test_compaction_moves_first_then_names_then_deletes(tmp_path: Path) -> None:
    case = CASES["compaction"]
    done = operations_of(prepared(tmp_path, case), case).paths
    order = [
        position(done, "unlink", "000000000001.json"),
        position(done, "link", "packs/000000000004-"),
        position(done, "rename", "000000000002.json"),
        position(done, "rename", "000000000004.json"),
        position(done, "unlink", "packs/000000000001-"),
    ]
    assert order == sorted(order)


def test_control_deleting_a_pack_before_its_manifest_fails_the_crash_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the wrong order, a crash in the middle harms a checkpoint."""
    case = CASES["compaction"]
    path = prepared(tmp_path, case)

    def packs_first(storage, log, held, plan):
        for name in plan.compact:
            storage.delete("packs/" + name)
        raise Crash

    monkeypatch.setattr("perdure.store.run.execute_collect", packs_first)
    run = run_on(path)
    with pytest.raises(Crash):
        case.act(run)
    run.close()
    with pytest.raises(AssertionError):
        assert_whole(path, case)


def test_control_a_rollback_that_begins_with_the_oldest_fails_the_crash_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in the middle then leaves a gap in the line of steps."""
    monkeypatch.setattr("perdure.store.rollback.reversed", iter, raising=False)
    assert failing(tmp_path, "rollback")


@pytest.mark.parametrize("name", ["rollback", "undo"])
def test_control_a_writer_that_finishes_no_move_fails_the_crash_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A crash in the middle then leaves a run that went back, or returned, half of the way."""
    monkeypatch.setattr("perdure.store.writer_session.finish_moves", lambda *_: None)
    assert failing(tmp_path, name)


def failing(tmp_path: Path, name: str) -> int:
    """How many of the crashes of a case fail the crash test."""
    seen = 0
    for path in crashes(tmp_path, CASES[name]):
        try:
            assert_whole(path, CASES[name])
        except AssertionError:
            seen += 1
    return seen
