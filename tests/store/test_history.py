"""One history, forward only: refused saves, rollback, undo, and checkpoints that a prune keeps."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import Operations, contents, make_leaves, run_on, sharing_states

from perdure import CheckpointManager, ManagerOptions
from perdure.checkpoint.restorer import load_good
from perdure.checkpoint.retention import Retention, plan_prune
from perdure.cli import main
from perdure.errors import (
    CorruptionError,
    HistoryError,
    PruneError,
    SaveError,
    StepExistsError,
    StepNotFoundError,
    UnreachableError,
)
from perdure.store import (
    Leaf,
    LocalStorage,
    MemoryStorage,
    PruneRequest,
    Run,
    copy_run,
    verify_run,
)
from perdure.store.format import manifest_name
from perdure.store.repair import repair
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import LOG_FILE


def filled(place: Path | MemoryStorage, *steps: int) -> Run:
    run = run_on(place)
    for step in steps:
        run.save(step, make_leaves(step))
    return run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 4
    path.write_bytes(data)


def perdure(*arguments: Any) -> dict[str, Any]:
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


# ------------------------------------------------------------ forward only


@pytest.mark.parametrize("step", [0, 15, 20, 25])
def test_a_step_at_or_below_the_newest_is_refused_with_rollback_and_fork(
    place: Path | MemoryStorage, step: int
) -> None:
    with filled(place, 10, 20, 30) as run:
        held = {name: run.storage.read(name) for name in run.storage.list("checkpoints/")}
        with pytest.raises(HistoryError, match="one line of steps") as caught:
            run.save(step, make_leaves(99))
        if step > 10:
            back = 10 if step <= 20 else 20
            assert f"manager.rollback({back})" in str(caught.value)
            assert f"perdure rollback {run.where}@{back}" in str(caught.value)
            assert f"perdure fork {run.where}@{back} NEW" in str(caught.value)
        assert isinstance(caught.value, StepExistsError) == (step == 20)
        assert {name: run.storage.read(name) for name in held} == held
        assert len(list(run.storage.list("packs/"))) == 3, "nothing was written"
        run.save(20, make_leaves(20))
        run.save(31, make_leaves(31))
        assert verify_run(run).problems == ()


def test_a_newest_checkpoint_that_went_to_quarantine_does_not_count(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30).close()
    flip(tmp_path / manifest_name(30))
    with run_on(tmp_path) as run:
        loaded = load_good(run).loaded
        assert loaded is not None
        for step, why in loaded.skipped:
            run.quarantine(step, why)
        run.save(25, make_leaves(25))
        assert run.steps() == [10, 20, 25]


def test_a_damaged_newest_step_is_saved_again_and_an_older_one_is_not(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2).close()
    for step in (1, 2):
        flip(tmp_path / manifest_name(step))
    with run_on(tmp_path) as run:
        with pytest.raises(HistoryError, match="step 1 is older than step 2, and damaged"):
            run.save(1, make_leaves(1))
        assert run.steps() == [1, 2]
        run.save(2, make_leaves(7))
        assert contents(run.load(2).leaves) == contents(make_leaves(7))
        assert len(run.quarantined()) == 1


# ------------------------------------------------------------ durable before it is reported


def test_a_step_whose_writer_was_killed_before_the_sync_is_made_durable_by_a_repeated_save(
    tmp_path: Path,
) -> None:
    filled(tmp_path, 1, 2).close()
    done = Operations()
    with run_on(tmp_path, done) as run:
        run.save(2, make_leaves(2))
        position = done.done.index(("rename", "000000000002.json"))
        assert ("fsync", "000000000002.json.tmp") in done.done[:position]
        assert ("fsync_dir", "checkpoints") in done.done[position:]
        count = len(done.done)
        run.save(2, make_leaves(2))
        run.save(3, make_leaves(3))
        assert [op for op, name in done.done[count:] if name.startswith("000000000002")] == []


def test_a_save_whose_directory_sync_failed_is_synced_by_the_next(tmp_path: Path) -> None:
    filled(tmp_path, 1).close()
    broken = Operations(
        fail=lambda _, op, path: (
            OSError(errno.EIO, "Input/output error")
            if op == "fsync_dir" and path.endswith("checkpoints") and not broken.fired
            else None
        )
    )
    with run_on(tmp_path, broken) as run:
        with pytest.raises(SaveError, match="Input/output error"):
            run.save(2, make_leaves(2))
        assert broken.fired == 1
        count = len(broken.done)
        run.save(2, make_leaves(2))
        assert ("fsync_dir", "checkpoints") in broken.done[count:]


def test_a_step_saved_by_this_writer_is_not_read_again(
    place: Path | MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(place, 1, 2) as run:
        read: list[str] = []
        real = run.storage.read_into
        monkeypatch.setattr(
            run.storage, "read_into", lambda name, *a: [read.append(name), real(name, *a)][1]
        )
        run.save(2, make_leaves(2))
        assert [name for name in read if name.startswith("packs/")] == []
        run.close()
        run.save(2, make_leaves(2))
        assert [name for name in read if name.startswith("packs/")] != [], "another session reads"


# ------------------------------------------------------------ the disk decides


def test_a_writer_that_missed_a_compaction_reads_the_disk_before_it_saves_and_prunes(
    place: Path | MemoryStorage,
) -> None:
    storage = LocalStorage(place) if isinstance(place, Path) else place
    run = Run(storage, create=True)
    for step, leaves in sharing_states().items():
        run.save(step, leaves)
    other = Run(LocalStorage(place) if isinstance(place, Path) else storage)
    other.session.holds_lock = other.session._ready = (
        True  # a second writer, as if there were no lock
    )
    other.execute(plan_prune(other, 3, Retention()).store)
    run.save(5, sharing_states()[4])
    run.execute(plan_prune(run, None, Retention()).store)
    assert verify_run(Run(storage)).problems == ()
    assert run.steps() == [2, 3, 4, 5]
    for step, state in ((2, 2), (3, 3), (4, 4), (5, 4)):
        assert contents(run.load(step).leaves) == contents(sharing_states()[state])


def test_a_plan_reads_manifests_again_whose_packs_another_writer_has_moved(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    for step, leaves in sharing_states().items():
        run.save(step, leaves)
    other = Run(tmp_path)
    other.session.holds_lock = other.session._ready = True
    other.execute(plan_prune(other, 3, Retention()).store)
    plan = plan_prune(run, 3, Retention(), saved=4)
    assert plan.store.empty, "by the remembered manifests, no checkpoint needs the new pack"
    run.execute(plan.store, plan.view)
    assert verify_run(Run(tmp_path)).good == (2, 3, 4)
    assert verify_run(Run(tmp_path)).problems == ()


def test_chunks_of_a_truncated_pack_are_written_again(tmp_path: Path) -> None:
    shared = make_leaves(9, (50_000,))
    with run_on(tmp_path) as run:
        run.save(1, shared)
        (pack,) = (tmp_path / "packs").iterdir()
        pack.write_bytes(pack.read_bytes()[:-1])
        run.save(2, {**shared, "own": make_leaves(2)["model/layer0"]})
        assert contents(run.load(2).leaves)["model/layer0"] == contents(shared)["model/layer0"]
        assert 2 in verify_run(run).good


def test_a_prune_leaves_the_newest_and_what_was_just_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_stay(candidates: Any, *_: Any) -> list[Any]:
        return [verdict(candidate.step) for candidate in candidates]

    def verdict(step: int) -> Any:
        from perdure.checkpoint.retention import Verdict

        return Verdict(step, False, "a rule of somebody's own")

    monkeypatch.setattr("perdure.checkpoint.retention.decide", none_stay)
    with filled(tmp_path, 1, 2, 3) as run:
        plan = plan_prune(run, 1, Retention(), saved=2)
        assert [(verdict.step, verdict.keep) for verdict in plan.verdicts] == [
            (1, False),
            (2, True),
            (3, True),
        ]
        run.execute(plan.store, plan.view)
        assert run.steps() == [2, 3]


# ------------------------------------------------------------ rollback


def test_a_rollback_sets_newer_ones_aside_and_saving_continues(
    place: Path | MemoryStorage,
) -> None:
    with filled(place, 10, 20, 30, 40) as run:
        assert run.rollback(20, dry_run=True) == [30, 40]
        assert run.steps() == [10, 20, 30, 40]
        assert run.rollback(20) == [30, 40]
        assert run.rollback(20) == []
        assert run.steps() == [10, 20]
        assert [checkpoint.why.rolled_back_to for checkpoint in run.rolled_back()] == [20, 20]
        run.save(25, make_leaves(25))
        assert verify_run(run).ok
        with pytest.raises(StepNotFoundError, match="Step 30 was set aside by a rollback"):
            run.load(30)
        run.execute(plan_prune(run, 1, Retention()).store)
        for checkpoint in run.rolled_back():
            for pack in checkpoint.manifest.packs:
                assert run.storage.size(f"packs/{pack.name}") == pack.size


def test_undo_restores_everything_that_was_rolled_back(place: Path | MemoryStorage) -> None:
    with filled(place, 10, 20, 30, 40) as run:
        assert run.undo_rollback() == [], "nothing is set aside"
        run.rollback(30)
        run.rollback(10)
        assert run.steps() == [10]
        assert run.undo_rollback(dry_run=True) == [20, 30, 40]
        assert run.steps() == [10]
        assert run.undo_rollback() == [20, 30, 40]
        for step in (10, 20, 30, 40):
            assert contents(run.load(step).leaves) == contents(make_leaves(step))
        assert list(run.storage.list("quarantine/")) == []
        assert verify_run(run).problems == ()


def test_rolled_back_checkpoints_out_of_a_backup_stay_aside_however_many(tmp_path: Path) -> None:
    """An additive backup merges both histories; the next writer removes the copies."""
    with filled(tmp_path, 10, 20, 30, 40) as run:
        held = {step: (tmp_path / manifest_name(step)).read_bytes() for step in (20, 30, 40)}
        run.rollback(10)
        run.save(15, make_leaves(15))
    for copies, kept in ((held, [10, 15]), ({20: held[20]}, [10, 15])):
        for step, data in copies.items():
            (tmp_path / manifest_name(step)).write_bytes(data)
        with Run(tmp_path) as run:
            run.begin_writing()
            assert run.steps() == kept
    with Run(tmp_path) as run:
        run.delete([15])
        for step, data in held.items():
            (tmp_path / manifest_name(step)).write_bytes(data)
    with Run(tmp_path) as run:  # the control: these follow what is there
        run.begin_writing()
        assert run.steps() == [10, 20, 30, 40]


def test_a_recommended_command_works_in_a_shell_for_a_path_with_spaces(tmp_path: Path) -> None:
    with filled(tmp_path / "a run", 10, 20) as run:
        run.rollback(10)
        with pytest.raises(StepNotFoundError) as caught:
            run.load(20)
    command = str(caught.value).split("`")[1]
    assert shlex.split(command) == ["perdure", "rollback", str(tmp_path / "a run"), "--undo"]
    assert shown_by(*shlex.split(command)[1:])[0] == 0
    assert Run(tmp_path / "a run").steps() == [10, 20]


def test_undo_continues_a_step_that_was_saved_again_with_the_same_bits(
    place: Path | MemoryStorage,
) -> None:
    with filled(place, 10, 20, 30) as run:
        run.rollback(10)
        run.save(20, make_leaves(20))
        assert run.undo_rollback() == [30]
        assert run.steps() == [10, 20, 30]
        assert verify_run(run).ok


def test_undo_is_refused_once_something_newer_was_saved(place: Path | MemoryStorage) -> None:
    with filled(place, 10, 20, 30) as run:
        run.rollback(10)
        run.save(15, make_leaves(15))
        with pytest.raises(HistoryError, match=r"newest checkpoint is step 15.*continues step 10"):
            run.undo_rollback()
        run.rollback(10)
        assert run.undo_rollback() == [15], "the line that was left last"
        run.rollback(10)
        run.storage.delete(next(e.name for e in run.rolled_back() if e.manifest.step == 15))
        assert run.undo_rollback() == [20, 30]


def test_a_rollback_to_a_damaged_checkpoint_moves_nothing(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3).close()
    flip(sorted((tmp_path / "packs").iterdir())[1])
    with run_on(tmp_path) as run:
        with pytest.raises(CorruptionError, match=r"step 2, leaf .*Nothing was moved"):
            run.rollback(2)
        with pytest.raises(StepNotFoundError, match="step 9"):
            run.rollback(9)
        run.pin(3)
        with pytest.raises(HistoryError, match="steps 3 are newer than 1 and pinned"):
            run.rollback(1)
        assert run.steps() == [1, 2, 3]
        run.unpin(3)
        assert run.rollback(1) == [2, 3]
        assert run.undo_rollback() == [2, 3]


def test_a_damaged_newer_manifest_is_set_aside_by_a_rollback(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3).close()
    flip(tmp_path / manifest_name(2))
    with run_on(tmp_path) as run:
        assert run.rollback(1) == [2, 3]
        assert run.undo_rollback() == [3]
        assert contents(run.load(3).leaves) == contents(make_leaves(3))
        assert len(run.quarantined()) == 1


def test_prune_removes_rolled_back_checkpoints_on_request_and_no_damaged_ones(
    tmp_path: Path,
) -> None:
    shared = make_leaves(9)["model/layer0"]
    with run_on(tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.save(step, {"shared": shared, "own": make_leaves(step)["model/layer0"]})
        run.quarantine(4, "looked at by hand")
        run.rollback(1)
    dry = perdure("prune", tmp_path, "--rolled-back", "--dry-run")
    assert len(dry["quarantined"]) == 2
    assert perdure("prune", tmp_path)["quarantined"] == []
    assert len(list((tmp_path / "packs").iterdir())) == 4
    assert perdure("prune", tmp_path, "--rolled-back")["quarantined"] == dry["quarantined"]
    assert len(list((tmp_path / "packs").iterdir())) == 2
    assert len(Run(tmp_path).quarantined()) == 1
    assert {step for step, _ in Run(tmp_path).log.view.removed} == {2, 3}
    assert verify_run(Run(tmp_path)).ok, "a note is no finding"
    with run_on(tmp_path) as run:
        assert run.undo_rollback() == []
        assert verify_run(run).ok
        assert contents(run.load(1).leaves)["shared"] == contents({"a": shared})["a"]


def test_an_undo_names_what_is_not_in_quarantine_any_more(tmp_path: Path) -> None:
    with filled(tmp_path, 10, 20, 30) as run:
        run.rollback(10)
    quarantine, copy = tmp_path / "quarantine", tmp_path.with_name(f"{tmp_path.name}-copy")
    quarantine.rename(copy)
    quarantine.mkdir()
    for dry_run in (["--dry-run"], []):
        code, shown = shown_by("rollback", tmp_path, "--undo", *dry_run)
        assert code == 1
        assert "quarantine/000000000020-0.json, quarantine/000000000030-0.json" in shown
    quarantine.rmdir()
    copy.rename(quarantine)  # the control
    assert shown_by("rollback", tmp_path, "--undo")[0] == 0
    assert Run(tmp_path).steps() == [10, 20, 30]


def test_a_copy_or_a_fork_of_a_run_onto_itself_is_wrong_usage(tmp_path: Path) -> None:
    filled(tmp_path, 10).close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for command, run in (("copy", tmp_path), ("fork", f"{tmp_path}@10")):
        code, shown = shown_by(command, run, tmp_path)
        assert code == 2
        assert str(tmp_path) in shown
    assert {path: path.read_bytes() for path in before} == before


def test_a_damaged_pack_that_a_rolled_back_checkpoint_needs_stays(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2).close()
    with run_on(tmp_path) as run:
        run.rollback(1)
    pack = sorted((tmp_path / "packs").iterdir())[1]
    good = pack.read_bytes()
    flip(pack)
    assert CliRunner().invoke(main, ["verify", str(tmp_path), "--repair"]).exit_code == 1
    pack.write_bytes(good)
    with run_on(tmp_path) as run:
        assert run.undo_rollback() == [2]
        assert contents(run.load(2).leaves) == contents(make_leaves(2))


def test_the_command_rolls_back_and_undoes_and_ls_shows_it(tmp_path: Path) -> None:
    filled(tmp_path, 10, 20, 30).close()
    done = perdure("rollback", f"{tmp_path}@10", "--dry-run")
    assert (done["executed"], done["set_aside"], done["newest"]) == (False, [20, 30], 30)
    done = perdure("rollback", f"{tmp_path}@10")
    assert (done["executed"], done["set_aside"], done["newest"]) == (True, [20, 30], 10)
    listed = perdure("ls", tmp_path)
    assert [(row["step"], row["rolled_back_to"]) for row in listed["rolled_back"]] == [
        (20, 10),
        (30, 10),
    ]
    assert listed["quarantined"] == []
    shown = CliRunner().invoke(main, ["ls", str(tmp_path)]).output
    assert "step 30 is set aside: rolled back to step 10" in shown
    shown = CliRunner().invoke(main, ["show", f"{tmp_path}@20"])
    assert shown.exit_code == 2
    assert f"perdure rollback {tmp_path} --undo" in shown.output
    notes = [problem["what"] for problem in perdure("verify", tmp_path)["problems"]]
    assert notes == ["rolled back to step 10"] * 2
    assert perdure("rollback", tmp_path, "--undo")["brought_back"] == [20, 30]
    assert perdure("ls", tmp_path)["rolled_back"] == []
    for wrong in (["rollback", tmp_path], ["rollback", tmp_path, "10", "--undo"]):
        assert CliRunner().invoke(main, [*map(str, wrong)]).exit_code == 2


@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_rollback_whose_log_is_damaged_is_not_undone_in_part(tmp_path: Path, line: int) -> None:
    with filled(tmp_path, 1, 2, 3) as run:
        run.rollback(2)
        run.rollback(1)
    log = tmp_path / LOG_FILE
    lines = log.read_bytes().splitlines(keepends=True)
    rollbacks = [number for number, text in enumerate(lines) if b'"rolled back"' in text]
    damaged, at = [*lines], rollbacks[line - 1]
    damaged[at] = damaged[at].replace(b'"step"', b'"stop"')
    log.write_bytes(b"".join(damaged))
    with Run(tmp_path) as run:
        with pytest.raises(CorruptionError, match=f"line {at + 1}"):
            run.undo_rollback()
        plan = run.plan(PruneRequest(frozenset({1}), everywhere=True, compact_from=0))
        assert plan.empty
        assert run.steps() == [1]
        assert len(list((tmp_path / "packs").iterdir())) == 3
    log.write_bytes(b"".join(lines))
    with Run(tmp_path) as run:  # the control
        assert run.undo_rollback() == [2, 3]


def test_a_manifest_that_was_exchanged_in_quarantine_returns_to_no_wrong_place(
    tmp_path: Path,
) -> None:
    with filled(tmp_path, 1, 2) as run:
        run.rollback(1)
        manifest = tmp_path / "quarantine" / "000000000002-0.json"
        manifest.write_bytes((tmp_path / manifest_name(1)).read_bytes())
        with pytest.raises(HistoryError):
            run.undo_rollback()
        assert run.steps() == [1]


@pytest.mark.parametrize("damage", ["gone", "empty"])
def test_lines_do_not_return_without_their_checkpoints(tmp_path: Path, damage: str) -> None:
    with CheckpointManager(tmp_path, options=ManagerOptions(journal_every=1)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": float(step)})
        manager.rollback(1)
    aside = tmp_path / "quarantine" / "000000000002-0.json"
    held = aside.read_bytes()
    aside.write_bytes(b"")
    if damage == "gone":
        aside.unlink()
    with Run(tmp_path) as run:
        with pytest.raises(HistoryError, match="nothing was brought back: quarantine/"):
            run.undo_rollback()
        aside.write_bytes(held)
        assert run.undo_rollback() == [2]  # the control


def cut_log(run: Path, lost: int) -> bytes:
    """Cut the log by so many bytes, or (0) by its last line; returns the whole one."""
    log = run / LOG_FILE
    whole = log.read_bytes()
    kept = whole
    if b'"done"' in whole.splitlines()[-1]:  # nothing is lost with it
        kept = whole[: whole[:-1].rindex(b"\n") + 1]
    log.write_bytes(kept[: -lost or kept[:-1].rindex(b"\n") + 1])
    return whole


def shown_by(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.parametrize("lost", [1, 150, 0])
def test_a_checkpoint_in_quarantine_without_a_line_shows_that_lines_are_missing(
    tmp_path: Path, lost: int
) -> None:
    with filled(tmp_path, 10, 20, 30) as run:
        run.rollback(10)
    quarantine = tmp_path / "quarantine"
    (quarantine / "000000000020-0.json.bak").write_bytes(b"a copy by hand")
    (quarantine / "log-0.jsonl").write_bytes(b"set aside by a repair")
    assert verify_run(Run(tmp_path)).ok, "the control"
    whole = cut_log(tmp_path, lost)
    held = {path: path.read_bytes() for path in tmp_path.rglob("0*")}
    copy = tmp_path.with_name(f"{tmp_path.name}-copy")
    code, shown = shown_by("verify", tmp_path)
    assert code == 1
    assert "found none for quarantine/000000000020-0.json, quarantine/000000000030-0.json:" in shown
    assert "a restore takes step 10, the newest good one" in shown
    assert "no checkpoint can be restored" not in shown
    loaded = load_good(Run(tmp_path)).loaded
    assert loaded is not None
    assert loaded.manifest.step == 10, "as the check says"
    for dry_run in (["--dry-run"], []):
        code, shown = shown_by("rollback", tmp_path, "--undo", *dry_run)
        assert code == 1
        assert "quarantine/000000000020-0.json" in shown
    with Run(tmp_path) as run:
        run.save(20, make_leaves(20))
        with pytest.raises(CorruptionError, match="lines are missing"):
            run.delete([10])
    assert {path: path.read_bytes() for path in held} == held
    assert [each.outcome for each in copy_run(tmp_path, copy, [10])] == ["copied"]
    (tmp_path / manifest_name(20)).unlink()
    (tmp_path / LOG_FILE).write_bytes(whole)  # the control
    assert verify_run(Run(tmp_path)).ok
    with Run(tmp_path) as run:
        assert run.undo_rollback() == [20, 30]


def test_a_lost_object_of_the_log_in_a_bucket_is_found_by_what_is_in_quarantine() -> None:
    storage = MemoryStorage()
    with filled(storage, 10, 20) as run:
        run.rollback(10)
    assert verify_run(Run(storage)).ok, "the control"
    for _ in range(2):  # the line `done`, and that of the rollback
        storage.delete(max(storage.list("log/")))
    (problem,) = [each for each in verify_run(Run(storage)).problems if each.harmful]
    assert "none for quarantine/000000000020-0.json" in problem.what


def test_where_the_quarantine_is_away_checkpoints_can_be_copied_and_nothing_is_deleted(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    with filled(here, 10, 20, 30) as run:
        run.rollback(20)
    (here / "quarantine").rename(tmp_path / "away")
    (here / "quarantine").symlink_to(tmp_path / "unmounted")
    held = {path: path.read_bytes() for path in here.rglob("0*")}
    assert [each.outcome for each in copy_run(here, tmp_path / "copy")] == ["copied", "copied"]
    assert shown_by("show", f"{here}@20")[0] == 0
    with pytest.raises(UnreachableError, match="quarantine"):
        verify_run(Run(here))
    with pytest.raises((UnreachableError, SaveError), match="quarantine"), Run(here) as run:
        run.delete([10])
    assert {path: path.read_bytes() for path in held} == held


def test_a_log_that_is_read_during_a_rollback_lacks_no_line(tmp_path: Path) -> None:
    class Meanwhile(LocalStorage):
        asked = False

        def list(self, prefix: str) -> Iterator[str]:
            if prefix == "quarantine/" and not self.asked:
                self.asked = True
                with Run(tmp_path) as writer:
                    writer.rollback(10)
            return super().list(prefix)

    with filled(tmp_path, 10, 20):
        pass
    storage = Meanwhile(tmp_path)
    assert Run(storage).log.view.problem_with({}) is None
    assert storage.asked


def test_after_a_repair_of_a_cut_log_a_checkpoint_in_quarantine_returns_by_hand(
    tmp_path: Path,
) -> None:
    with filled(tmp_path, 10, 20, 30) as run:
        for step in (10, 20, 30):
            run.log.append(JournalEntry(step=step, state=f"{step:032x}", attempt=1))
        run.rollback(10)
    log = tmp_path / LOG_FILE
    lines = log.read_bytes().splitlines(keepends=True)
    steps = [line for line in lines if b'"kind":"step"' in line]
    # Only lines of steps are damaged, and no line says what lies in quarantine.
    last = lines.index(steps[-1])
    log.write_bytes(b"".join([*lines[: last - 1], lines[last - 1].replace(b"0", b"1"), steps[-1]]))
    with Run(tmp_path) as run:
        assert repair(run).report.ok
        assert repair(run).actions == ()
    assert shown_by("verify", tmp_path)[0] == 0
    code, shown = shown_by("rollback", tmp_path, "--undo")
    assert code == 1
    assert "lost before a repair" in shown
    (tmp_path / "quarantine/000000000020-0.json").rename(tmp_path / manifest_name(20))
    report = verify_run(Run(tmp_path))
    assert (report.ok, report.good) == (True, (10, 20))
    assert contents(Run(tmp_path).load(20).leaves) == contents(make_leaves(20))


def test_a_log_that_is_a_link_is_an_error_that_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run, options=ManagerOptions(journal_every=1)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": float(step)})
    with Run(run) as opened:
        opened.rollback(1)
    (run / LOG_FILE).rename(tmp_path / "log")
    (run / LOG_FILE).symlink_to(tmp_path / "log")
    done = CliRunner().invoke(main, ["prune", str(run), "--rolled-back"])
    assert isinstance(done.exception, SystemExit), "no traceback from inside the library"
    assert done.exit_code == 1
    assert "symbolic link" in done.output


@pytest.mark.parametrize("damage", ["empty", "pipe", "another run's", "another run's pack"])
def test_verify_tells_what_of_a_rollback_cannot_return_and_its_packs_stay(
    tmp_path: Path, damage: str
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    with filled(run, 1, 2) as opened:
        opened.rollback(1)
    filled(other, 1, 2, 3).close()
    aside, pack = run / "quarantine/000000000002-0.json", max((run / "packs").iterdir())
    held = {path: path.read_bytes() for path in (aside, pack)}
    assert verify_run(Run(run)).ok  # the control
    if damage == "another run's pack":
        pack.write_bytes(max((other / "packs").iterdir()).read_bytes())
    else:
        aside.unlink()
    if damage == "pipe":
        os.mkfifo(aside)
    elif damage in ("empty", "another run's"):
        foreign = (other / manifest_name(2)).read_bytes()
        aside.write_bytes(foreign if damage == "another run's" else b"")
    report = verify_run(Run(run))
    assert [problem.name for problem in report.problems if problem.harmful] == [
        "quarantine/000000000002-0.json"
    ]
    assert report.good == (1,)
    CliRunner().invoke(main, ["prune", str(run)])
    CliRunner().invoke(main, ["verify", str(run), "--repair"])
    assert pack.exists()
    if damage != "another run's pack":
        with Run(run) as opened, pytest.raises(HistoryError, match="cannot be read"):
            opened.undo_rollback()
    for path, data in held.items():
        path.unlink()
        path.write_bytes(data)
    with Run(run) as opened:
        assert opened.undo_rollback() == [2]
        assert verify_run(opened).ok


def test_a_rollback_on_a_full_disk_raises_and_can_be_repeated(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3).close()
    full = Operations(
        fail=lambda _, op, path: (
            OSError(errno.ENOSPC, "No space left on device")
            if op == "link" and "000000000002" in path
            else None
        )
    )
    with run_on(tmp_path, full) as run, pytest.raises(SaveError, match="stopped in the middle"):
        run.rollback(1)
    assert full.fired
    with run_on(tmp_path) as run:
        assert run.steps() == [1, 2]
        assert run.rollback(1) == [], "the next writer has finished it"
        assert run.steps() == [1]
        assert run.undo_rollback() == [2, 3]


def test_a_delete_that_the_disk_refuses_is_a_store_error(tmp_path: Path) -> None:
    with filled(tmp_path, 1, 2) as run:
        run.storage.delete = _refuse  # type: ignore[method-assign]
        with pytest.raises(PruneError, match="Every checkpoint that stays is readable"):
            run.delete([1])


def _refuse(name: str) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", name)


def leaf(seed: int) -> Leaf:
    return make_leaves(seed)["model/layer0"]


def test_rolled_back_checkpoints_can_be_pruned_on_a_full_disk(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3).close()

    def full(_: int, operation: str, name: str) -> OSError | None:
        return OSError(errno.ENOSPC, "full", name) if operation == "write" else None

    with run_on(tmp_path) as run:
        run.rollback(1)
    operations = Operations(fail=full)
    with run_on(tmp_path, operations) as run:
        run.execute(plan_prune(run, None, Retention(), rolled_back=True).store)
        assert run.quarantined() == []
    assert operations.fired
    assert verify_run(Run(tmp_path)).good == (1,)


def test_what_is_damaged_in_quarantine_returns_neither_in_silence_nor_for_ever(
    tmp_path: Path,
) -> None:
    with filled(tmp_path, 1, 2, 3, 4) as run:
        run.rollback(1)
    aside = tmp_path / "quarantine" / "000000000003-0.json"
    held = aside.read_bytes()
    aside.write_bytes(held[:-9])
    for _ in range(2):
        shown = CliRunner().invoke(main, ["rollback", str(tmp_path), "--undo"])
        assert shown.exit_code == 1
        assert "nothing was brought back: quarantine/000000000003-0.json" in shown.output
        assert "remove it" in shown.output
        assert Run(tmp_path).steps() == [1]
    aside.unlink()
    shown = CliRunner().invoke(main, ["rollback", str(tmp_path), "--undo"])
    assert shown.exit_code == 0
    assert "quarantine/000000000003-0.json, which does not return" in shown.output
    assert verify_run(Run(tmp_path)).good == (1, 2, 4)
