"""The journal of a run whose lines were lost, rolled back, repaired or copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from damage import Stop
from perdure import CheckpointManager, ManagerOptions
from perdure.cli import main
from perdure.errors import CorruptionError, HistoryError, SaveError, StoreError
from perdure.look import diff
from perdure.store import LocalStorage, Run, copy_run, fork_run, repair, verify_run
from perdure.store.run_log import LOG_FILE, read_journal

EVERY = ManagerOptions(journal_every=1)


def train(run: Any, last: int, rate: float = 1.0, **options: Any) -> None:
    """Train from the newest checkpoint to a step; every fourth is saved."""
    options = {"options": EVERY, "max_to_keep": None, **options}
    with CheckpointManager(run, save_interval_steps=4, **options) as manager:
        value, start = manager.restore_or_initialize({"w": np.zeros(8)})
        for step in range(start + 1, last + 1):
            value = {"w": value["w"] + rate * step}
            manager.save(step, value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 4, 8, 12 and 16, and lines to 18."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(run, 18)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def lines(run: Path) -> list[bytes]:
    return (run / LOG_FILE).read_bytes().splitlines(keepends=True)


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in read_journal(LocalStorage(run))]


def place_of(run: Path, step: int) -> int:
    """The number of lines before that of a step."""
    return next(n for n, line in enumerate(lines(run)) if b'"step","step":%d,' % step in line)


def keep(run: Path, step: int) -> None:
    """Cut the log after the line of a step."""
    (run / LOG_FILE).write_bytes(b"".join(lines(run)[: place_of(run, step) + 1]))


def harm(run: Path, step: int) -> None:
    changed = lines(run)
    place = place_of(run, step)
    changed[place] = changed[place].replace(b'"attempt":1', b'"attempt":2')
    (run / LOG_FILE).write_bytes(b"".join(changed))


def recorded(run: Path) -> list[Any]:
    return [*read_journal(LocalStorage(run))]


def aside(run: Path) -> list[tuple[int, int]]:
    return Run(run).log.view.journal.steps_aside()


def command(*arguments: Any, status: int = 0) -> str:
    ended = CliRunner().invoke(main, [*map(str, arguments)])
    assert ended.exit_code == status, ended.output
    return ended.output


# ------------------------------------------------------------ lost lines


def other_journal(run: Path) -> None:
    """A whole journal whose chain is intact, of a run with other bits."""
    train(run.parent / "other", 18, rate=2.0)
    shutil.copy(run.parent / "other" / LOG_FILE, run / LOG_FILE)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda run: keep(run, 15), "ends before it"),
        (lambda run: keep(run, 3), "ends before it"),
        (lambda run: (run / LOG_FILE).write_bytes(b""), "found none, or an empty one"),
        (lambda run: (run / LOG_FILE).unlink(), "found none, or an empty one"),
        (other_journal, "found that of run"),
    ],
)
def test_lines_that_are_lost_are_found_by_verify_and_by_a_resumed_training(
    run: Path, change: Callable[[Path], Any], phrase: str
) -> None:
    assert verify_run(Run(run)).ok
    change(run)
    (problem,) = (problem for problem in verify_run(Run(run)).problems if problem.harmful)
    assert problem.name == LOG_FILE
    assert phrase in problem.what
    with pytest.raises(CorruptionError, match=phrase):
        train(run, 20)
    assert Run(run).steps() == [4, 8, 12, 16]
    # The loss can be accepted, and is not found again.
    repaired = repair(Run(run))
    assert [LOG_FILE in action for action in repaired.actions] == [True]
    assert repaired.report.ok
    train(run, 20)
    assert verify_run(Run(run)).ok
    assert steps_of(run)[-1] == 20
    assert Run(run).manifest(20).log is not None


def test_lines_after_the_newest_checkpoint_may_be_lost(run: Path) -> None:
    train(run, 20)
    train(run, 22)
    keep(run, 20)
    assert verify_run(Run(run)).ok
    train(run, 22)
    assert steps_of(run) == list(range(1, 23))


def test_what_has_no_journal_or_began_it_later_lacks_nothing(run: Path, tmp_path: Path) -> None:
    late = tmp_path / "late"
    train(late, 8, options=ManagerOptions())
    train(late, 13)
    assert steps_of(late) == [9, 10, 11, 12, 13]
    train(late, 16, options=ManagerOptions())  # and pauses
    train(late, 21)
    assert verify_run(Run(late)).ok
    (late / LOG_FILE).unlink()
    assert not verify_run(Run(late)).ok
    for every in (3, 100):
        rare = tmp_path / f"every-{every}"
        train(rare, 9, options=ManagerOptions(journal_every=every))
        train(rare, 13, options=ManagerOptions(journal_every=every))
        assert verify_run(Run(rare)).ok
    # A mirror, a copy and a fork are whole, with their own lines or without any.
    mirror, copy = tmp_path / "mirror", tmp_path / "copy"
    train(run, 20, mirror=mirror)
    copy_run(run, copy)
    fork_run(run, 12, tmp_path / "fork")
    for other in (mirror, copy, tmp_path / "fork"):
        assert verify_run(Run(other)).ok
        train(other, 22)
        assert verify_run(Run(other)).ok


def test_the_same_bits_with_other_lines_are_no_difference(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "b", 16, options=ManagerOptions(journal_every=5))
    assert diff(f"{run}@16", f"{tmp_path / 'b'}@16").process_leaves == ()


# ------------------------------------------------------------ rollback and undo


def test_a_rollback_of_lines_alone_is_reported_and_undone(run: Path) -> None:
    before = recorded(run)
    for options in (("--dry-run",), ()):
        output = command("rollback", f"{run}@16", *options)
        assert "set aside  lines of the journal, of steps 17 to 18" in output
        assert "already" not in output
    assert steps_of(run)[-1] == 16
    assert "is the newest already" in command("rollback", f"{run}@16")
    for options in (("--dry-run",), ()):
        output = command("rollback", run, "--undo", *options)
        assert "bring back  lines of the journal, of steps 17 to 18" in output
    assert recorded(run) == before
    assert "no rollback has set anything aside" in command("rollback", run, "--undo")
    # Two in a row, of lines and then of checkpoints.
    command("rollback", f"{run}@16")
    command("rollback", f"{run}@8")
    assert steps_of(run)[-1] == 8
    done = json.loads(command("rollback", run, "--undo", "--json"))
    assert (done["brought_back"], done["lines_brought_back"]) == ([12, 16], [9, 18])
    assert recorded(run) == before
    assert aside(run) == []
    assert verify_run(Run(run)).ok


def test_lines_that_an_undo_replaces_are_set_aside(run: Path) -> None:
    before = recorded(run)
    command("rollback", f"{run}@8")
    train(run, 11, rate=2.0)
    for options in (("--dry-run",), ()):
        output = command("rollback", run, "--undo", *options)
        assert "bring back  lines of the journal, of steps 9 to 18" in output
        assert "set aside  lines of the journal, of steps 9 to 11" in output
    assert recorded(run) == before
    assert aside(run) == [(9, 11)]
    assert "9 to 11" in command("rollback", run, "--undo", status=1)
    assert verify_run(Run(run)).ok


def test_the_lines_return_to_which_the_returning_checkpoints_refer(run: Path) -> None:
    """Other lines were set aside later, without a checkpoint."""
    before = recorded(run)
    command("rollback", f"{run}@8")
    train(run, 11, rate=2.0)
    command("rollback", f"{run}@8")
    assert json.loads(command("rollback", run, "--undo", "--json"))["brought_back"] == [12, 16]
    assert recorded(run) == before
    assert verify_run(Run(run)).ok


def test_lines_alone_do_not_replace_newer_lines(run: Path) -> None:
    command("rollback", f"{run}@16")
    train(run, 19, rate=2.0)
    before = recorded(run)
    with Run(run) as opened, pytest.raises(HistoryError, match="17 to 19 were recorded since"):
        opened.undo_rollback()
    assert recorded(run) == before


def test_an_undo_that_stops_anywhere_can_be_repeated(trained: Path, tmp_path: Path) -> None:
    stop = Stop()
    start = shutil.copytree(trained, tmp_path / "start")
    command("rollback", f"{start}@16")
    command("rollback", f"{start}@8")
    for number in range(1, 100):
        run = shutil.copytree(start, tmp_path / str(number))
        stop.left = number
        try:
            with Run(LocalStorage(run, stop)) as opened:
                opened.undo_rollback()
        except (SaveError, StoreError):
            with Run(run) as opened:
                opened.undo_rollback()
        assert Run(run).steps() == [4, 8, 12, 16]
        assert steps_of(run) == list(range(1, 19))
        assert aside(run) == []
        if stop.count < number:
            break
    assert stop.count > 10


def test_a_rollback_over_a_damaged_line_names_it_and_moves_nothing(run: Path) -> None:
    harm(run, 6)
    damaged, line = lines(run), place_of(run, 6) + 1
    for options in (("--dry-run",), ()):
        assert f"line {line}:" in command("rollback", f"{run}@8", *options, status=1)
    assert lines(run) == damaged
    assert Run(run).steps() == [4, 8, 12, 16]
    command("verify", run, "--repair")
    command("rollback", f"{run}@4")
    assert steps_of(run) == [1, 2, 3, 4]


# ------------------------------------------------------------ repair and prune


def test_a_repair_and_a_prune_name_the_lines_that_they_move_and_drop(run: Path) -> None:
    harm(run, 6)
    line = place_of(run, 6) + 1
    done = repair(Run(run))
    (copy,) = (run / "quarantine").iterdir()
    (action,) = done.actions
    assert f"quarantine/{copy.name}" in action
    assert f"line {line}:" in action
    assert "othing was changed" not in action
    assert done.report.ok
    command("rollback", f"{run}@4")
    for options in (("--dry-run",), ()):
        assert aside(run) == [(5, 5)]
        output = command("prune", run, "--rolled-back", *options)
        assert "delete   lines of the journal, of step 5" in output
    assert aside(run) == []
    train(run, 20)
    assert steps_of(run) == [1, 2, 3, 4, *range(5, 21)]


# ------------------------------------------------------------ fork and copy


def test_a_damaged_journal_stops_a_fork_or_copy_that_needs_it_before_anything_is_created(
    run: Path, tmp_path: Path
) -> None:
    harm(run, 10)
    for call in (
        lambda: fork_run(run, 12, tmp_path / "new"),
        lambda: copy_run(run, tmp_path / "new"),
    ):
        with pytest.raises(CorruptionError, match=r"line \d+:"):
            call()
        assert not (tmp_path / "new").exists()
    fork_run(run, 8, tmp_path / "fork")
    copy_run(run, tmp_path / "copy", [4, 8])
    assert steps_of(tmp_path / "fork") == steps_of(tmp_path / "copy") == [*range(1, 9)]
