"""Repair sets damaged checkpoints aside with a reason, keeps good ones, and reports both."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import contents, local_leaves, make_leaves, run_on, sharing_states

from damage import flip
from perdure import Retention
from perdure.checkpoint.restorer import load_good
from perdure.checkpoint.retention import plan_prune
from perdure.cli import main
from perdure.errors import CorruptionError, FormatVersionError, LockedError
from perdure.store import MemoryStorage, PruneRequest, Run, repair, verify_run
from perdure.store.format import CHUNK_BYTES, manifest_name
from perdure.store.reader import grouped, packed
from perdure.store.run_log import LOG_FILE


def filled(path: Path) -> None:
    with run_on(path) as run:
        for step, leaves in sharing_states().items():
            run.save(step, leaves)


def pack(path: Path, step: int) -> Path:
    return next((path / "packs").glob(f"{step:012d}-*"))


def mended(path: Path) -> tuple[int, ...]:
    """Repair; check that the run is clean and every step restores; return the steps."""
    with run_on(path) as run:
        done = repair(run)
        assert done.report.ok
        assert {problem.name.split("/")[0] for problem in done.report.problems} <= {"quarantine"}
        for step in done.report.good:
            assert contents(run.load(step).leaves) == contents(sharing_states()[step])
        assert repair(run).actions == (), "there is nothing left to do"
        run.save(9, make_leaves(9))
        assert verify_run(run).good == (*done.report.good, 9)
    return done.report.good


def test_a_repair_changes_nothing_of_a_good_run(tmp_path: Path) -> None:
    filled(tmp_path)
    held = sorted(tmp_path.rglob("*"))
    with run_on(tmp_path) as run:
        assert repair(run).actions == ()
    assert sorted(tmp_path.rglob("*")) == held


def test_damage_of_bytes_that_one_checkpoint_needs_affects_only_that_one(tmp_path: Path) -> None:
    """Step 1 loses its bulk; chunks that others share with it are copied out of the damaged pack."""
    filled(tmp_path)
    bad = pack(tmp_path, 1)
    flip(bad, 40_000)
    assert (verify_run(Run(tmp_path)).good, verify_run(Run(tmp_path)).bad) == ((2, 3, 4), (1,))
    assert mended(tmp_path) == (2, 3, 4)
    assert not bad.exists()
    aside = tmp_path / "quarantine" / bad.name.replace(".pack", "-0.pack")
    assert aside.exists()
    assert "expected hash" in Run(tmp_path).log.view.aside[f"quarantine/{aside.name}"].reason


def test_damage_that_all_need_is_reported_and_nothing_is_deleted(tmp_path: Path) -> None:
    filled(tmp_path)
    flip(pack(tmp_path, 1), 5)
    with run_on(tmp_path) as run:
        done = repair(run)
    assert done.report.good == ()
    assert not done.report.ok
    names = [path.name for path in (tmp_path / "quarantine").iterdir()]
    assert len([name for name in names if name.endswith("-0.json")]) == 4
    assert len(list((tmp_path / "packs").iterdir())) == 3


@pytest.mark.parametrize("lost", ["packs", "checkpoints"])
def test_a_run_without_a_checkpoint_left_never_looks_well(tmp_path: Path, lost: str) -> None:
    filled(tmp_path)
    if lost == "packs":
        pack(tmp_path, 1).unlink()
        done = CliRunner().invoke(main, ["verify", str(tmp_path), "--repair"])
        assert done.exit_code == 1
        assert "no checkpoint can be restored" in done.output
    else:
        shutil.rmtree(tmp_path / "checkpoints")
    word = "no checkpoint is left" if lost == "packs" else "may be moved or not mounted"
    for command in ("verify", "ls", "show"):
        result = CliRunner().invoke(main, [command, str(tmp_path)])
        assert result.exit_code != 0, command
        assert word in result.output, command
        assert "sets aside what is damaged" not in result.output, "a repair brings nothing back"
    checked = json.loads(CliRunner().invoke(main, ["verify", str(tmp_path), "--json"]).output)
    assert (checked["ok"], checked["good"]) == (False, [])


def test_what_was_set_aside_returns_once_it_is_whole_again(tmp_path: Path) -> None:
    filled(tmp_path)
    everything, one = pack(tmp_path, 1), pack(tmp_path, 1).read_bytes()
    everything.unlink()
    with run_on(tmp_path) as run:
        assert repair(run).report.good == ()
    everything.write_bytes(one)
    checked = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert checked.exit_code == 1
    assert "whole again: `perdure verify --repair` returns it" in checked.output
    assert mended(tmp_path) == (1, 2, 3, 4)


def test_an_older_checkpoint_returns_below_those_that_were_saved_before_it_was_set_aside(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    bad, data = pack(tmp_path, 1), pack(tmp_path, 1).read_bytes()
    flip(bad, 40_000)
    with run_on(tmp_path) as run:
        assert repair(run).report.good == (2, 3, 4)
    bad.write_bytes(data)
    assert mended(tmp_path) == (1, 2, 3, 4)


@pytest.mark.parametrize("since", ["saves", "saves below", "rollback"])
def test_what_the_run_went_on_without_stays_aside(tmp_path: Path, since: str) -> None:
    """Or two histories would be mixed, and what a rollback undid would be the newest again."""
    filled(tmp_path)
    if since == "saves below":
        with run_on(tmp_path) as run:
            run.save(9, sharing_states()[4])
    lost, data = pack(tmp_path, 3), pack(tmp_path, 3).read_bytes()
    lost.unlink()
    with run_on(tmp_path) as run:
        assert repair(run).report.good == (1, 2)
        if since != "rollback":
            run.save(4, make_leaves(9))
        else:
            run.rollback(1)
    lost.write_bytes(data)
    kept = Run(tmp_path).steps()
    report = verify_run(Run(tmp_path))
    assert report.ok
    assert "the run went on without" in " ".join(problem.what for problem in report.problems)
    with run_on(tmp_path) as run:
        done = repair(run)
    assert (done.actions, list(done.report.good)) == ((), kept)


@pytest.mark.parametrize("part", ["index", "length", "magic"])
def test_a_damaged_end_of_a_pack_affects_no_checkpoint(tmp_path: Path, part: str) -> None:
    filled(tmp_path)
    bad = pack(tmp_path, 1)
    flip(bad, {"index": -100, "length": -50, "magic": -3}[part] + bad.stat().st_size)
    report = verify_run(Run(tmp_path))
    assert not report.ok
    assert report.good == (1, 2, 3, 4)
    assert mended(tmp_path) == (1, 2, 3, 4)


def test_a_truncated_pack_affects_checkpoints_that_need_the_lost_bytes(tmp_path: Path) -> None:
    filled(tmp_path)
    bad = pack(tmp_path, 4)
    bad.write_bytes(bad.read_bytes()[:50])
    pack(tmp_path, 3).write_bytes(b"")
    assert mended(tmp_path) == (1, 2)


def test_a_missing_pack_affects_checkpoints_that_need_it(tmp_path: Path) -> None:
    filled(tmp_path)
    pack(tmp_path, 3).unlink()
    assert mended(tmp_path) == (1, 2)


def test_an_unreadable_manifest_keeps_packs_that_it_may_need(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / manifest_name(2)).write_bytes(b"")
    with run_on(tmp_path) as run:
        assert repair(run).report.good == (1, 3, 4)
        assert pack(tmp_path, 2).exists()
        assert repair(run).actions == ()
    (tmp_path / "quarantine" / "000000000002-0.json").unlink()
    with run_on(tmp_path) as run:
        (action,) = repair(run).actions
        assert "no checkpoint needs it" in action


def test_leftovers_and_orphans_are_removed(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / manifest_name(3)).unlink()
    (tmp_path / "packs" / "000000000007-00000-00000000.pack.tmp").write_bytes(b"half")
    assert mended(tmp_path) == (1, 2, 4)


def test_the_pack_of_a_newest_checkpoint_whose_manifest_is_lost_stays_until_a_later_save(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    manifest, lost = tmp_path / manifest_name(4), pack(tmp_path, 4)
    data = manifest.read_bytes()
    manifest.unlink()
    with run_on(tmp_path) as run:
        (problem,) = repair(run).report.problems
        assert "if step 4 should be there, bring its manifest back" in problem.what
        assert lost.name not in plan_prune(run, None, Retention()).store.orphans
    manifest.write_bytes(data)
    with run_on(tmp_path) as run:
        assert contents(run.load(4).leaves) == contents(sharing_states()[4])
    manifest.unlink()
    with run_on(tmp_path) as run:
        run.save(5, make_leaves(5))
        run.execute(plan_prune(run, 3, Retention(), saved=5).store)
        assert not lost.exists()


def test_a_pin_stays_while_its_checkpoint_is_away(tmp_path: Path) -> None:
    filled(tmp_path)
    with run_on(tmp_path) as run:
        run.pin(2)
    manifest = tmp_path / manifest_name(2)
    away = manifest.rename(tmp_path / "away")
    with run_on(tmp_path) as run:
        report = repair(run).report
        assert not report.ok
        assert [problem.name for problem in report.problems if problem.harmful] == ["step 2"]
        assert "is pinned, and is not there" in str(report.problems)
        run.unpin(3)  # a step that is not pinned: nothing
        run.execute(plan_prune(run, 1, Retention()).store)  # its pack stays, too
    away.rename(manifest)
    assert Run(tmp_path).pinned() == {2}
    assert verify_run(Run(tmp_path)).ok


@pytest.mark.parametrize("lost", ["pins", "log.jsonl"])
def test_a_pin_holds_without_its_folder_and_without_the_log(tmp_path: Path, lost: str) -> None:
    filled(tmp_path)
    with run_on(tmp_path) as run:
        run.pin(2)
        run.pin(3)
        run.unpin(3)
    if lost == "pins":
        shutil.rmtree(tmp_path / lost)
    else:
        (tmp_path / lost).unlink()
    with run_on(tmp_path) as run:
        repair(run)
        assert run.pinned() == {2}
        run.execute(plan_prune(run, 1, Retention()).store)
        assert run.steps() == [2, 4]
        run.unpin(2)
        run.execute(plan_prune(run, 1, Retention()).store)
        assert run.steps() == [4]


def test_a_pipe_in_the_place_of_the_newest_manifest_is_set_aside(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest = tmp_path / manifest_name(4)
    manifest.unlink()
    os.mkfifo(manifest)
    with run_on(tmp_path) as run:
        assert repair(run).report.good == (1, 2, 3)
        assert run.quarantined()


def test_a_directory_in_the_place_of_a_manifest_is_damage_and_no_deletion(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest, kept = tmp_path / manifest_name(4), tmp_path / "kept"
    manifest.rename(kept)
    manifest.mkdir()
    assert verify_run(Run(tmp_path)).bad == (4,)
    with run_on(tmp_path) as run:
        plan = run.plan(PruneRequest(orphans_to=9))
        assert plan.empty
        assert "cannot be read and may need any pack" in str(plan.held_back)
        assert repair(run).report.good == (1, 2, 3)
    assert pack(tmp_path, 4).exists()
    kept.rename(manifest)
    assert verify_run(Run(tmp_path)).good == (1, 2, 3, 4)


def test_after_a_repair_of_the_log_what_was_rolled_back_returns_whole(tmp_path: Path) -> None:
    filled(tmp_path)
    with run_on(tmp_path) as run:
        run.rollback(3)
        run.rollback(2)
    log = tmp_path / LOG_FILE
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], *lines[2:]]))
    with run_on(tmp_path) as run:
        repair(run)
        assert run.undo_rollback() == [3], "why step 4 is in quarantine was lost"
        assert verify_run(run).ok
        assert verify_run(run).good == (1, 2, 3)


def test_a_manifest_of_a_newer_perdure_is_not_mistaken_for_damage(tmp_path: Path) -> None:
    from test_format import resealed

    filled(tmp_path)
    manifest = tmp_path / manifest_name(3)
    manifest.write_bytes(resealed(manifest.read_bytes(), b'"format":1', b'"format":4'))
    held = manifest.read_bytes()
    with run_on(tmp_path) as run, pytest.raises(FormatVersionError, match="newer perdure"):
        repair(run)
    assert manifest.read_bytes() == held


def test_a_repair_waits_for_the_writer(tmp_path: Path) -> None:
    with run_on(tmp_path) as writer:
        writer.save(1, make_leaves(1))
        with pytest.raises(LockedError):
            repair(Run(tmp_path))


class Meanwhile(Run):
    """A check that calls a function before it lists the steps a second time."""

    def __init__(self, path: Path, happens) -> None:
        super().__init__(path)
        self.happens = happens
        self.asked = 0

    def steps(self) -> list[int]:
        self.asked += 1
        if self.asked == 2:
            self.happens()
        return super().steps()


def test_a_check_during_a_write_reports_no_damage(tmp_path: Path) -> None:
    filled(tmp_path)

    def go_on() -> None:
        with run_on(tmp_path) as run:
            run.save(5, make_leaves(5))
            run.delete([1, 2])

    run = Meanwhile(tmp_path, go_on)
    report = verify_run(run)
    assert run.asked >= 2
    assert report.problems == ()
    assert report.good == (3, 4, 5)


def test_verify_repairs_on_request_and_reports_what_remains(tmp_path: Path) -> None:
    filled(tmp_path)
    flip(pack(tmp_path, 1), 40_000)
    flip(tmp_path / manifest_name(4), 300)
    held = sorted(tmp_path.rglob("*"))
    result = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert "2 checkpoints good, 2 damaged" in result.output
    assert "`perdure verify --repair` sets aside what is damaged" in result.output
    assert "DAMAGED  step 4" in result.output
    assert "Run `perdure verify`" not in result.output
    with pytest.raises(CorruptionError, match="Run `perdure verify` on the run directory"):
        Run(tmp_path).manifest(4)
    assert sorted(tmp_path.rglob("*")) == held
    done = CliRunner().invoke(main, ["verify", str(tmp_path), "--repair"])
    assert done.exit_code == 0, done.output
    assert "repair  moved step 1 to quarantine/000000000001-0.json" in done.output
    assert "a restore takes step 3, the newest good one" in done.output
    again = CliRunner().invoke(main, ["verify", str(tmp_path), "--json"])
    assert json.loads(again.output)["good"] == [2, 3]


def test_a_damaged_local_leaf_is_damage_of_its_checkpoint(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1), process_leaves=local_leaves(1))
        chunk = (
            run.save(2, make_leaves(2), process_leaves=local_leaves(2)).process_leaves[1].chunks[0]
        )
    flip(pack(tmp_path, 2), chunk.offset)
    report = verify_run(Run(tmp_path))
    assert (report.good, report.bad) == ((1,), (2,))
    assert any("process/1/random" in problem.what for problem in report.problems)
    newest = load_good(Run(tmp_path)).loaded
    assert newest is not None
    assert newest.manifest.step == 1
    assert "process/1/random" in newest.skipped[0][1]
    with run_on(tmp_path) as run:
        assert repair(run).report.good == (1,)


class _Counted(MemoryStorage):
    """Counts the reads of parts of packs."""

    reads = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self.reads += name.startswith("packs/")
        return super().read_into(name, offset, target)


def test_a_check_reads_small_neighbours_together_and_finds_the_damaged_one() -> None:
    storage = _Counted()
    leaves = make_leaves(1, (100,) * 500)
    with Run(storage, create=True) as run:
        pack = run.save(1, leaves).packs[0].name
        run.save(2, {**leaves, "model/layer250": make_leaves(2)["model/layer0"]})
    storage.reads = 0
    report = verify_run(Run(storage))
    assert (report.good, report.chunks) == ((1, 2), 501)
    assert storage.reads <= 8, "two packs, each with its trailer, its index and its chunks"

    manifest = Run(storage).manifest(1)
    entry = next(leaf for leaf in manifest.leaves if leaf.path == "model/layer250")
    data = bytearray(storage.objects[f"packs/{pack}"])
    data[entry.chunks[0].offset + 7] ^= 1
    storage.objects[f"packs/{pack}"] = bytes(data)
    report = verify_run(Run(storage))
    assert (report.good, report.bad, report.chunks) == ((2,), (1,), 500)
    (problem,) = [problem for problem in report.problems if problem.name == f"packs/{pack}"]
    assert f"at offset {entry.chunks[0].offset}" in problem.what


def test_a_check_has_few_decoded_chunks_in_memory() -> None:
    encoded = [(f"{number:064x}", 200, CHUNK_BYTES) for number in range(50)]
    assert [len(read.chunks) for read in grouped("", packed("", 0, encoded))] == [1] * 50
    size = CHUNK_BYTES // 32
    for length in (size, 20):
        small = [(f"{number:064x}", length, size) for number in range(70)]
        assert [len(read.chunks) for read in grouped("", packed("", 0, small))] == [32, 32, 6]
