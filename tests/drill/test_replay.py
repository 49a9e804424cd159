"""`perdure replay`: steps computed again by their own program, compared with what the run recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from perdure.cli import main
from perdure.drill.fault_injection import redirected
from perdure.drill.replay import ReplayOptions, StretchResult, replay_run
from perdure.drill.working_directory import WorkingDirectory
from perdure.errors import ArgumentError, LaunchError, SaveError
from perdure.report import report
from perdure.store import LocalStorage, Run
from perdure.store.format import hash_bytes
from perdure.store.log import read_log
from perdure.store.run_log import LOG_FILE, read_journal

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "journaled.py")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that has a journal, and one that has none."""
    home = tmp_path_factory.mktemp("home")
    for arguments in (["run=mine"], ["run=silent", "every=0"]):
        subprocess.run([*PROGRAM, *arguments], cwd=home, check=True)
    return home


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def files(run: Path) -> dict[str, str]:
    """The hash of each file of a run directory, without the records of replays."""
    return {
        str(path.relative_to(run)): hash_bytes(path.read_bytes())
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.parent.name != "replays"
    }


def replay(tmp_path: Path, *arguments: str, run: str = "mine", **options: Any) -> StretchResult:
    command = [*PROGRAM, f"run={run}", *arguments]
    (result,) = replay_run(command, f"runs/{run}", ReplayOptions(**options), tmp_path / "replay")
    return result


def test_the_command_reproduces_a_run_and_records_that(home: Path, tmp_path: Path) -> None:
    before = files(home / "runs" / "mine")
    ended = CliRunner().invoke(main, ["replay", "runs/mine", "--json", "--", *PROGRAM])
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    (part,) = printed["stretches"]
    # From the oldest checkpoint to the last line; steps 8 and 12 were saved.
    assert (part["start"], part["stop"], part["steps"], part["checkpoints"]) == (4, 13, 9, 2)
    assert files(home / "runs" / "mine") == before
    (record,) = (home / "runs" / "mine" / "replays").iterdir()
    data = record.read_bytes()
    (line,) = read_log(LocalStorage("runs/mine"), f"replays/{record.stem}")
    assert printed == line.decode(msgspec.json.Decoder(), "")
    assert (printed["kind"], printed["verdict"]) == ("replayed", "reproduced")
    assert Run("runs/mine").steps() == [4, 8, 12]
    assert "reproduced</span>" in report("runs/mine").html
    record.write_bytes(data.replace(b'"reproduced"', b'"differs"'))
    assert "changed</span>" in report("runs/mine").html


def test_a_rollback_sets_aside_what_a_replay_has_computed(home: Path, tmp_path: Path) -> None:
    run = home / "runs" / "again"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("lock", "replays"))
    program = [*PROGRAM, "run=again"]
    perdure = CliRunner().invoke
    assert perdure(main, ["replay", str(run), "--", *program]).exit_code == 0
    assert "set aside</span>" not in report(run).html
    (record,) = (run / "replays").iterdir()
    (line,) = read_log(LocalStorage(run), f"replays/{record.stem}")
    (part,) = line.decode(msgspec.json.Decoder(), "")["stretches"]
    lines = {entry.step: entry.state for entry in read_journal(LocalStorage(run))}
    saved = {step: Run(run).manifest(step).fingerprint for step in (4, 8, 12)}
    wanted = [(4, None), *((step, lines[step]) for step in (8, 12, 13))]
    assert part["seen"] == [[step, saved.get(step), state] for step, state in wanted]
    assert perdure(main, ["rollback", f"{run}@8"]).exit_code == 0
    subprocess.run([*program, "rate=0.2"], cwd=home, check=True)
    assert "set aside</span>" in report(run).html
    file = tmp_path / "c.json"
    assert perdure(main, ["certify", f"{run}@12", "-o", str(file)]).exit_code == 0
    (counted,) = json.loads(file.read_bytes())["replays"]
    assert counted["stretches"] == [{"start": 4, "stop": 8, "verdict": "reproduced"}]


def test_one_changed_line_differs_at_its_step(tmp_path: Path) -> None:
    ended = CliRunner().invoke(
        main, ["replay", "runs/mine", "--steps", "8:11", "--", *PROGRAM, "rate=0.10000001"]
    )
    assert ended.exit_code == 1, ended.output
    assert "steps 9 to 11: differs (3 steps and 0 checkpoints compared)" in ended.output
    assert "first difference: step 10: the state: expected " in ended.output


def test_the_leaf_is_named_where_a_checkpoint_has_it(tmp_path: Path) -> None:
    result = replay(tmp_path, "rate=0.2", "every=0", first=5, last=12)
    assert (result.verdict, result.step, result.steps) == ("differs", 12, 0)
    assert [leaf.path for leaf in result.leaves] == ["w"]


def test_without_a_journal_the_fingerprints_are_compared() -> None:
    command = [*PROGRAM, "run=silent", "every=0"]
    ended = CliRunner().invoke(main, ["replay", "runs/silent", "--steps", "0:", "--", *command])
    assert ended.exit_code == 0, ended.output
    assert "steps 1 to 12: reproduced (0 steps and 3 checkpoints compared)" in ended.output
    assert "the checkpoints alone" in ended.output


def _exchanged(journal: Path) -> None:
    """By the journal of another run of the same program, whose lines are sound."""
    command = [*PROGRAM, "run=exchanged", "rate=0.2"]
    subprocess.run(command, cwd=journal.parent, check=True)
    shutil.copy(journal.parent / "runs" / "exchanged" / LOG_FILE, journal)


def _cut(journal: Path) -> None:
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:10]))


def _changed(journal: Path) -> None:
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)


@pytest.mark.parametrize("damage", [_exchanged, _cut, Path.unlink, _changed])
@pytest.mark.parametrize("looks", ["replay", "bisect", "verify"])
def test_no_command_believes_a_journal_that_its_checkpoints_contradict(
    damage: Callable[[Path], None], looks: str, home: Path, tmp_path: Path
) -> None:
    """Only a run that never had a journal is replayed by its checkpoints alone."""
    run = tmp_path / "run"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("lock", "replays"))
    arguments = {
        "replay": ["replay", str(run), "--", *PROGRAM, f"run={run}"],
        "bisect": ["bisect", str(run), "runs/mine"],
        "verify": ["verify", str(run)],
    }[looks]
    if looks != "replay" or damage is Path.unlink:
        assert CliRunner().invoke(main, arguments).exit_code == 0, "the control"
    damage(run / LOG_FILE)
    ended = CliRunner().invoke(main, arguments)
    said = ended.output + str(ended.exception or "")
    assert ended.exit_code == 1, said
    assert LOG_FILE in said
    assert "reproduced" not in said
    assert not (run / "replays").exists() or damage is Path.unlink


def test_a_program_that_ends_too_early_differs(tmp_path: Path) -> None:
    result = replay(tmp_path, "steps=10", first=8)
    assert (result.verdict, result.step, result.what) == ("differs", 11, "end")


def test_another_recipe_is_not_comparable(tmp_path: Path) -> None:
    result = replay(tmp_path, "seed=1", first=8)
    assert (result.verdict, result.step, result.what) == ("not comparable", 9, "state")
    assert result.recipe == ("seed: the run has 0, the program has 1",)


def test_a_sample_replays_stretches_between_checkpoints(tmp_path: Path) -> None:
    options = ReplayOptions(sample=1, seed=1)
    (result,) = replay_run(PROGRAM, "runs/mine", options, tmp_path / "one")
    assert (result.start, result.stop) in {(4, 8), (8, 12), (12, 13)}
    assert (result.verdict, result.steps) == ("reproduced", result.stop - (result.start or 0))


def test_a_run_outside_of_the_working_directory_is_replayed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run = tmp_path / "elsewhere" / "run"
    shutil.copytree(home / "runs" / "mine", run, ignore=shutil.ignore_patterns("lock", "replays"))
    command = [*PROGRAM, f"run={run}"]
    (result,) = replay_run(command, run, ReplayOptions(first=8), tmp_path / "replay")
    assert (result.verdict, result.start, result.steps) == ("reproduced", 8, 5)
    assert steps_of(tmp_path / "replay", run) == [9, 10, 11, 12, 13]
    with pytest.raises(LaunchError, match="it holds earlier runs"):
        replay_run(command, run, ReplayOptions(first=8), tmp_path / "replay")


def steps_of(replays: Path, run: Path) -> list[int]:
    """The steps after 8 that the replay itself has recorded."""
    _, place = redirected(replays / "replay-1", str(run))
    lines = [*read_journal(LocalStorage(place))]
    return [entry.step for entry in lines if entry.step > 8]


def test_a_program_with_another_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"the program opened .*runs/other, and not .*runs/mine"):
        replay_run([*PROGRAM, "run=other"], "runs/mine", ReplayOptions(first=8), tmp_path / "r")


def test_mistakes_in_the_arguments_exit_with_2(home: Path, tmp_path: Path) -> None:
    for arguments in (
        ["runs/none"],
        ["runs/mine", "--steps", "5"],
        ["runs/mine", "--steps", "9:9"],
        ["runs/mine", "--steps", "0:14"],
    ):
        ended = CliRunner().invoke(main, ["replay", *arguments, "--", *PROGRAM])
        assert ended.exit_code == 2, (arguments, ended.output)
    with pytest.raises(ArgumentError, match="up to 13"):
        replay_run(PROGRAM, "runs/mine", ReplayOptions(last=99), tmp_path)
    assert (home / "runs" / "mine" / LOG_FILE).exists()


def test_a_replay_lies_outside_of_the_run_and_is_no_part_of_the_next_one(
    home: Path, tmp_path: Path
) -> None:
    inside = CliRunner().invoke(
        main, ["replay", "runs/mine", "--directory", "runs/mine/here", "--", *PROGRAM]
    )
    assert inside.exit_code == 2, inside.output
    assert "expected a place outside of the run directory runs/mine" in inside.output
    kept = home / "kept"
    kept.mkdir()
    WorkingDirectory(home).make(kept)
    assert (kept / "root" / "proc").exists()
    (tmp_path / "next").mkdir()
    copied = WorkingDirectory(home).make(tmp_path / "next")
    assert not (copied / str(kept)[1:]).exists()
    shutil.rmtree(kept)


def test_what_lies_in_proc_is_never_read(tmp_path: Path) -> None:
    source = tmp_path / "work"
    source.mkdir()
    (source / "system").symlink_to("/proc")
    (tmp_path / "copy").mkdir()
    copied = WorkingDirectory(source).make(tmp_path / "copy") / str(source)[1:]
    assert (copied / "system").is_symlink()


def test_a_record_that_cannot_be_written_changes_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> str:
        raise SaveError("runs/mine: the record of the replay cannot be written")

    monkeypatch.setattr("perdure.drill.replay.write_record", full)
    ended = CliRunner().invoke(main, ["replay", "runs/mine", "--", *PROGRAM])
    assert ended.exit_code == 0, ended.output
    assert "cannot be written" in ended.output
