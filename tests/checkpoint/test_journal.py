"""The journal: what a run recorded about its steps, and what is compared when they are repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import Stop
from perdure import CheckpointManager, ManagerOptions, MemoryStorage
from perdure.checkpoint import PerRank
from perdure.checkpoint.journal import share_digests, state_digest
from perdure.errors import (
    CorruptionError,
    JournalMismatchError,
    LockedError,
    SaveError,
    StoreError,
    UnsupportedLeafError,
)
from perdure.store import LocalStorage, Run, copy_run, fork_run, repair, verify_run
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import LOG_FILE, read_journal
from pretend import Pretend, play

EVERY = ManagerOptions(journal_every=1)

PROGRAM = """
import os, signal, sys
import numpy as np
from perdure import CheckpointManager, ManagerOptions

dies_at, noise = int(sys.argv[1]), float(sys.argv[2])
options = ManagerOptions(journal_every=1)
with CheckpointManager("run", save_interval_steps=4, options=options) as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(8)})
    for step in range(start, 12):
        change = np.random.default_rng(step).normal(size=8)
        if step == 9:
            change[3] += noise
        state = {"w": state["w"] + change}
        manager.save(step + 1, state, {"loss": float(state["w"].sum())})
        if step + 1 == dies_at:
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def program(directory: Path, dies_at: int = 0, noise: float = 0.0) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(dies_at), str(noise)],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def entries(run: Path) -> list[JournalEntry]:
    return [*read_journal(LocalStorage(run))]


def bits(run: Path) -> list[tuple[Any, ...]]:
    """What must not depend on the attempt and on the topology."""
    return [(e.step, e.state, e.total, e.batch, e.metrics) for e in entries(run)]


def test_a_killed_run_continues_its_journal_and_compares_what_it_repeats(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert program(tmp_path / "whole").returncode == 0
    first = program(tmp_path / "killed", dies_at=11)
    assert first.returncode == -signal.SIGKILL
    run = tmp_path / "killed" / "run"
    assert [entry.step for entry in entries(run)] == list(range(1, 12))
    assert Run(run).steps() == [4, 8]

    # Steps 9 to 11 are computed again. One bit of another kind is found at its step.
    other = program(tmp_path / "killed", noise=1e-9)
    assert other.returncode == 1
    assert "JournalMismatchError" in other.stderr
    assert (
        "step 10, computed again from the checkpoint of step 8, has another state" in other.stderr
    )
    assert Run(run).steps() == [4, 8]

    assert program(tmp_path / "killed").returncode == 0
    assert Run(run).steps() == [4, 8, 12]
    assert bits(run) == bits(tmp_path / "whole" / "run")
    assert [entry.attempt for entry in entries(run)] == [1] * 11 + [2]


def state(k: int) -> dict[str, Any]:
    return {"w": np.full(20, k, np.float32)}


def recorded(run: Any, *steps: int, saved: int = 0, **options: Any) -> None:
    """A run that recorded steps and saved one of them."""
    options = {"options": EVERY, **options}
    with CheckpointManager(run, save_interval_steps=10**6, **options) as manager:
        for step in steps:
            manager.save(step, state(step), force=step == saved)


def steps_of(run: Path) -> list[int]:
    return [entry.step for entry in entries(run)]


def repeat(run: Path, *steps: int, wrong: int = 0) -> None:
    with CheckpointManager(run, options=EVERY, save_interval_steps=10**6) as manager:
        manager.restore_or_initialize(state(0))
        for step in steps:
            manager.save(step, state(-1 if step == wrong else step))


def test_a_line_has_what_the_page_says(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.journal.record(1, state(1), batch=[np.arange(3)], metrics={"loss": float("nan")})
    *_, line = map(json.loads, (tmp_path / "run" / LOG_FILE).read_text().splitlines())
    assert line.pop("hash")
    assert line.pop("kind") == "step"
    assert line.pop("topology").keys() == {"host", "processes"}
    assert line == {
        "step": 1,
        "state": state_digest(state(1)),
        "batch": state_digest([np.arange(3)]),
        "metrics": {"loss": "NaN"},
        "attempt": 1,
    }
    assert Run(tmp_path / "run").is_run_directory


def test_shares_that_are_digested_in_one_pass_have_the_digests_of_each() -> None:
    shares = [{"x": np.full(n, n), "y": [n, np.zeros((n, 700))]} for n in range(12)]
    shares += [
        np.arange(5),
        7,
        {"0": {"1": 2.0}},
        (),
        PerRank(np.ones(3)),
        {"a": PerRank(1), "b": 2},
    ]
    digests = share_digests(shares)
    assert digests == [state_digest(share) for share in shares]
    assert len({*digests}) == len(shares) - 1, "the empty share and that of PerRank"
    assert share_digests([]) == []
    with pytest.raises(UnsupportedLeafError):
        share_digests([1, object()])


def test_every_nth_step_is_recorded_also_if_nothing_is_saved(tmp_path: Path) -> None:
    recorded(tmp_path, *range(1, 11), options=ManagerOptions(journal_every=3), saved=10)
    assert steps_of(tmp_path) == [3, 6, 9]
    recorded(tmp_path / "none", 1, 2, saved=2, options=ManagerOptions())
    assert steps_of(tmp_path / "none") == []


@pytest.mark.parametrize("what", ["batch", "state"])
def test_the_first_thing_that_differs_is_named_and_nothing_more_is_committed(
    tmp_path: Path, what: str
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.journal.record(2, state(2), batch=[2])
    with CheckpointManager(tmp_path) as manager:
        manager.restore_or_initialize(state(0))
        with pytest.raises(JournalMismatchError) as caught:
            manager.journal.record(2, state(7), batch=[2] if what == "state" else [8])
        assert (caught.value.step, caught.value.what) == (2, what)
        assert f"rollback {tmp_path}@1`" in str(caught.value)
        with pytest.raises(JournalMismatchError):
            manager.journal.record(3, state(3))
        with pytest.raises(JournalMismatchError):
            manager.save(3, state(3))
        with pytest.raises(JournalMismatchError):
            manager.save_and_exit(3, state(3))
        assert manager.all_steps() == [1]
    assert steps_of(tmp_path) == [2]


def test_a_metric_that_differs_is_a_warning(tmp_path: Path) -> None:
    def run(metric: float) -> None:
        with CheckpointManager(tmp_path) as manager:
            manager.journal.record(1, state(1), metrics={"seconds": metric, "nan": float("nan")})
            manager.journal.record(2, state(2), metrics={"seconds": metric})

    run(1.0)
    with pytest.warns(UserWarning, match=r"step 1 .*'seconds' is 2.0; expected 1.0") as caught:
        run(2.0)
    assert len(caught) == 1


def test_a_torn_last_line_is_dropped_and_any_other_break_is_an_error(tmp_path: Path) -> None:
    recorded(tmp_path, 1, saved=1)
    repeat(tmp_path, 2, 3, 4)
    path = tmp_path / LOG_FILE
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for torn in (lines[-1][:-1], lines[-1][:1], b"\0" * 40):
        path.write_bytes(b"".join(lines[:-1]) + torn)
        assert steps_of(tmp_path) == [1, 2, 3]
        repeat(tmp_path, 2, 3, 4)
        assert steps_of(tmp_path) == [1, 2, 3, 4]
    changed = lines[1].replace(b'"attempt":1', b'"attempt":2')
    for broken, number in (
        ([lines[0], changed, *lines[2:]], 2),
        ([lines[0], *lines[2:]], 2),
        ([lines[1], *lines[2:]], 1),
        ([lines[0], lines[2], lines[1], lines[3]], 2),
        ([*lines[:-1], lines[-1].replace(b'"step":4', b'"step":5')], len(lines)),
        ([*lines[:-1], lines[-1][: len(lines[-1]) // 2] + b"\n"], len(lines)),
    ):
        path.write_bytes(b"".join(broken))
        with pytest.raises(CorruptionError, match=f"line {number}:"):
            repeat(tmp_path, 2)
        assert path.read_bytes() == b"".join(broken)


def test_a_broken_line_is_found_and_set_aside(tmp_path: Path) -> None:
    recorded(tmp_path, 1, 2, 3, saved=1)
    path = tmp_path / LOG_FILE
    assert verify_run(Run(tmp_path)).ok
    path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":4'))
    problems = verify_run(Run(tmp_path)).problems
    assert [problem.name for problem in problems if problem.harmful] == [LOG_FILE]
    done = repair(Run(tmp_path))
    assert [LOG_FILE in action for action in done.actions] == [True]
    assert done.report.ok
    assert steps_of(tmp_path) == [1, 2]
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    repeat(tmp_path, 2, 3)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_journal_that_is_no_file_is_named_and_not_waited_for(tmp_path: Path) -> None:
    recorded(tmp_path, 1, saved=1)
    (tmp_path / LOG_FILE).unlink()
    os.mkfifo(tmp_path / LOG_FILE)
    with pytest.raises(CorruptionError, match="expected a regular file"):
        repeat(tmp_path, 2)
    assert [problem.name for problem in verify_run(Run(tmp_path)).problems] == [LOG_FILE]
    (tmp_path / LOG_FILE).unlink()
    (tmp_path / LOG_FILE).mkdir()
    with pytest.raises(CorruptionError, match="directory"):
        repeat(tmp_path, 2)
    (problem,) = verify_run(Run(tmp_path)).problems
    assert problem.name == LOG_FILE


def test_lines_are_durable_with_the_checkpoint_that_follows_and_at_the_end(tmp_path: Path) -> None:
    done: list[str] = []
    storage = LocalStorage(tmp_path, lambda operation, path: done.append(f"{operation} {path}"))
    with CheckpointManager(storage, options=EVERY, save_interval_steps=3) as manager:
        for step in range(1, 5):
            manager.save(step, state(step))
            manager.wait_until_finished()
    journal = f"{tmp_path}/{LOG_FILE}"
    shown = [
        line.removesuffix(f" {journal}")
        for line in done
        if line.endswith((f" {journal}", "000000000003.json")) and "rename" not in line
    ]
    manifest = f"link {tmp_path}/checkpoints/000000000003.json"
    begun = ["open", "write", "fsync"]
    rules = ["write", "fsync"]  # and each step has one write
    assert shown == [*begun, *["write"] * 3, *rules, manifest, "write", "fsync", "write", "fsync"]


def test_a_line_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes half of a line."""
    write, full = os.write, [False]

    def half(file: int, data: Any) -> int:
        if full[0] and b'"hash"' in bytes(data):
            write(file, bytes(data)[:20])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", half)
    for on_error in ("raise", "continue"):
        run = tmp_path / on_error
        options = ManagerOptions(journal_every=1, on_error=on_error)
        with CheckpointManager(run, options=options, save_interval_steps=10) as manager:
            manager.save(1, state(1), force=True)
            manager.wait_until_finished()
            full[0] = True
            if on_error == "raise":
                with pytest.raises(SaveError, match="the line of step 2"):
                    manager.save(2, state(2))
            else:
                with pytest.warns(UserWarning, match="continues without this line"):
                    manager.save(2, state(2))
            full[0] = False
            manager.save(3, state(3))
        assert steps_of(run) == [1, 3]


def test_a_rollback_sets_lines_aside_and_its_undo_brings_them_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, options=EVERY, max_to_keep=None) as manager:
        for step in range(1, 6):
            manager.save(step, state(step))
        manager.wait_until_finished()
        before = entries(tmp_path)
        manager.rollback(4)
        manager.rollback(2)
        assert steps_of(tmp_path) == [1, 2]
        manager.restore_or_initialize(state(0))
        manager.journal.record(3, state(9))  # another line of steps, as far as the journal knows
    assert steps_of(tmp_path) == [1, 2, 3]
    with Run(tmp_path) as run:
        assert run.undo_rollback() == [3, 4, 5]
    assert entries(tmp_path) == before
    assert Run(tmp_path).log.view.journal.steps_aside() == [(3, 3)]  # what was recorded since
    repeat(tmp_path, 6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_what_is_undone_is_the_line_that_was_set_aside_last(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, options=EVERY) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
        manager.rollback(1)
        manager.save(2, state(7))
        manager.rollback(1)
    with Run(tmp_path) as run:
        assert run.undo_rollback() == [2]
    assert entries(tmp_path)[-1].state == state_digest(state(7))


def test_a_rollback_that_stops_anywhere_can_be_repeated(tmp_path: Path) -> None:
    """A crash before each operation; after the repetition the journal is that of one call."""
    stop = Stop()
    for number in range(1, 100):
        run = tmp_path / str(number)
        recorded(run, 1, 2, 3, saved=1)
        with CheckpointManager(run) as manager:
            manager.save(3, state(3))
        stop.left = number
        try:
            with Run(LocalStorage(run, stop)) as opened:
                opened.rollback(1)
        except (SaveError, StoreError):
            with Run(run) as opened:
                opened.rollback(1)
        assert steps_of(run) == [1]
        with Run(run) as opened:
            opened.undo_rollback()
        assert Run(run).steps() == [1, 3]
        assert steps_of(run) == [1, 2, 3]
        if stop.count < number:
            break
    assert stop.count > 10


def test_a_fork_and_a_copy_have_the_lines_up_to_their_steps(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    with CheckpointManager(run, options=EVERY, save_interval_steps=2) as manager:
        for step in range(1, 8):
            manager.save(step, state(step))
    fork_run(run, 4, tmp_path / "fork")
    assert bits(tmp_path / "fork") == bits(run)[:4]
    repeat(tmp_path / "fork", 5, 6, wrong=5)  # its own history from there on
    copy_run(run, copy, [2])
    assert steps_of(copy) == [1, 2]
    copy_run(run, copy)
    assert bits(copy) == bits(run)[:6]
    copy_run(run, tmp_path / "dry", dry_run=True)
    assert not (tmp_path / "dry").exists()


def test_only_the_chief_writes_and_all_processes_raise_at_the_next_save(tmp_path: Path) -> None:
    def program(wrong: int) -> Any:
        def run(processes: Pretend) -> Any:
            options = {"options": EVERY, "save_interval_steps": 3, "processes": processes}
            with CheckpointManager(tmp_path, **options) as manager:
                manager.restore_or_initialize(lambda: state(0))
                start = manager.latest_step() or 0
                for step in range(start + 1, 6):
                    manager.save(step, state(-1 if step == wrong else step))
                if wrong:
                    manager.save(6, state(6))
                manager.wait_until_finished()
                return manager.all_steps()

        return run

    assert play(2, program(0)) == [[3], [3]]
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    assert {entry.topology["processes"] for entry in entries(tmp_path)} == {2}
    failed = play(2, program(4))
    assert [type(error) for error in failed] == [JournalMismatchError] * 2
    assert all("step 4" in str(error) for error in failed)
    assert Run(tmp_path).steps() == [3]
    assert play(1, program(7)) == [[3, 6]]  # one process, and the same lines
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_where_no_journal_can_be_kept(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected a local run directory for a journal"):
        CheckpointManager(MemoryStorage(), options=EVERY)
    with CheckpointManager(MemoryStorage()) as manager, pytest.raises(StoreError, match="mirror"):
        manager.journal.record(1, state(1))
    with CheckpointManager(tmp_path / "closed") as manager:
        manager.journal.record(1, state(1))
    with pytest.raises(StoreError, match="recorded after the manager was closed"):
        manager.journal.record(2, state(2))
    with CheckpointManager(tmp_path / "run", options=EVERY) as writer:
        writer.save(1, state(1))
        with (
            pytest.raises(LockedError),
            CheckpointManager(tmp_path / "run", options=EVERY) as second,
        ):
            second.journal.record(1, state(1))
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match="journal_every"):
            ManagerOptions(journal_every=every)  # type: ignore[arg-type]


def test_a_digest_tells_what_is_different() -> None:
    one = {"a": np.arange(4.0), "b": np.zeros(2)}
    others = [
        {"b": np.arange(4.0), "a": np.zeros(2)},
        {"a": np.arange(4.0)[::-1], "b": np.zeros(2)},
        {"a": np.arange(4.0), "b": -np.zeros(2)},
        {"a": np.arange(4.0).reshape(2, 2), "b": np.zeros(2)},
        {"a": np.arange(4.0).view(np.int64), "b": np.zeros(2)},
    ]
    digests = {state_digest(tree) for tree in [one, *others]}
    assert len(digests) == 6
    assert state_digest(dict(reversed(one.items()))) in digests
    with pytest.raises(UnsupportedLeafError):
        state_digest({"a": object()})
