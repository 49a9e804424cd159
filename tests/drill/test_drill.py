"""The drill on small programs: right ones pass under every fault, wrong ones fail for their reason."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from perdure.cli import main
from perdure.drill.causes import diagnosis
from perdure.drill.drill import run_drill
from perdure.drill.drill_report import DrillOptions, DrillReport, DrillStopped, verdict
from perdure.drill.execution import log_tail
from perdure.drill.fault_plan import KINDS, LAST
from perdure.drill.observed import Observed
from perdure.drill.scenario import Outcome
from perdure.errors import LaunchError
from perdure.report.run_report import render_drill
from perdure.store import Run
from perdure.testing import drill

PROGRAMS = Path(__file__).parent / "programs"
ALONE = {"other-devices", "other-workers", "worker-lost"}
"""Kinds that a program of one worker without JAX has not."""

FIRST_FAILURE = DrillOptions(("bit-flip",), runs=1, fail_fast=True)
"""Ends with the first restore that differs; every drill begins with restores."""


def command(name: str) -> list[str]:
    return [sys.executable, str(PROGRAMS / f"{name}.py")]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def test_a_right_program_passes_under_every_fault(tmp_path: Path) -> None:
    # What lies in its run directory already is neither read nor touched.
    mine = tmp_path / "cwd" / "runs" / "right"
    with Run(mine, create=True) as run:
        run.save(99, {})
    kinds = [kind for kind in KINDS if kind not in ALONE]
    report = run_drill(command("right"), DrillOptions(runs=len(kinds)), tmp_path / "drill")
    found = report.document()
    assert report.passed, found
    # Each of the others led to a restore; a signal that is timed may come before the first checkpoint.
    assert found["not_tested"].keys() - ALONE <= {"sigkill", "sigterm"}
    assert [run["kind"] for run in found["runs"][:4]] == ["kill-after-commit"] * 4
    # After the last one of all, nothing is left to do.
    assert [run["restored_steps"] for run in found["runs"][:4]] == [[2], [8], [14], []]
    assert [run["place"] for run in found["runs"][:4]] == [
        "the first checkpoint",
        "one in the middle",
        "the last one before the end",
        LAST,
    ]
    assert found["runs"][3]["attempts"][1]["restored"] == 16
    restored = found["restored"]
    assert restored["of"] == len(kinds) + 4
    assert restored["runs"] >= len(kinds)
    tried = found["tried"]
    assert tried["phases"][0] == tried["phases"][1]
    assert tried["kinds"] == [len(kinds) - len(found["not_tested"].keys() - ALONE), len(KINDS)]
    said = verdict(found)
    assert f"restored in {restored['runs']} of {restored['of']} runs, from " in said
    assert "of 8 checkpoints" in said
    assert "file" not in said.partition("Not looked at")[2], "it writes none of its own"
    assert {row["kind"] for row in found["runs"]} == set(kinds)
    assert found["impossible"].keys() == ALONE
    for row in report.rows:
        assert len(row.outcome.fired) == len(row.scenario.planned) > 0
        assert row.compared > 0
        assert row.outcome.attempts[-1].ended == "exit 0"
    jumps = " ".join(text for row in found["runs"] for text in row["fired"] if "clock" in text)
    assert "40 days" in jumps
    ends = {row["kind"]: [each["ended"] for each in row["attempts"]] for row in found["runs"]}
    assert ends["sigkill-at-step"] == ["worker 0: SIGKILL", "exit 0"]
    for kind in ("disk-full", "fsync-fails"):
        assert ends[kind][0].startswith("worker 0: exit 1")
        assert ends[kind][1:] == ["exit 0"]
    assert ends["stopped"][0].startswith("worker 0: stopped")
    assert len(ends["double-kill"]) == 3
    assert sum(row["repeated_steps"] for row in found["runs"]) > 0
    assert {row["fingerprint"] for row in found["runs"]} == {found["undisturbed"]["fingerprint"]}
    assert Run(mine).steps() == [99]
    assert os.listdir(tmp_path / "cwd") == ["runs"]
    assert json.loads(json.dumps(found)) == found
    page = render_drill(found)
    assert page.index("PASS") < page.index("<h1>"), "the verdict comes first"
    for fact in (found["date"], found["host"], np.__version__, "Timeline", "steps 9 to"):
        assert fact in page


@pytest.mark.parametrize(
    ("name", "cause", "leaves", "named"),
    [  # proof_drill.py has wrong_generator, wrong_iterator, wrong_metric and many more
        # The generator that its loop makes from a seed after the restore is left alone.
        # Its journal, which would end the resumed run at the first difference, does not hide the cause.
        ("wrong_momentum journal", "unsaved state", ["w"], "velocity (float64[40]) put back"),
    ],
)
def test_a_wrong_program_fails_for_its_reason(
    name: str, cause: str, leaves: list[str], named: str, tmp_path: Path
) -> None:
    program, *arguments = name.split()
    report = run_drill([*command(program), *arguments], FIRST_FAILURE, tmp_path / "drill")
    (row,) = report.rows
    assert not report.passed
    assert row.verdict == "differs"
    assert row.difference is not None
    assert [leaf.path for leaf in row.difference.leaves] == leaves
    assert row.diagnosis is not None
    assert row.diagnosis.cause == cause, row.diagnosis
    said = render_drill(report.document())
    assert row.diagnosis.advice.split(",")[0] in said
    assert leaves[0] in said
    assert f"with {named}, the difference is gone in 2 of 2 runs" in row.diagnosis.evidence


def test_a_right_program_looks_at_its_own_run_directory(tmp_path: Path) -> None:
    report = run_drill(
        command("own_files"), DrillOptions(("bit-flip",), runs=1), tmp_path / "drill"
    )
    found = report.document()
    assert report.passed, found
    assert [run["place"] for run in found["runs"]][-2:] == [LAST, ""]
    assert os.listdir(tmp_path / "cwd") == [], "what it wrote lies in the drill"
    assert not any("redirected" in limit for limit in found["limits"])


@pytest.mark.parametrize(
    ("name", "verdict", "place", "said"),
    [
        ("wrong_file", "differs", "the first checkpoint", "step 2: 1 of 1 leaves differ"),
        ("wrong_after_end", "failed", LAST, "NameError: name 'loss' is not defined"),
        ("wrong_best", "differs", "the first checkpoint", "step 2: the metric loss, by which"),
    ],
)
def test_what_another_run_left_and_what_follows_the_last_checkpoint(
    name: str,
    verdict: str,
    place: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The undisturbed run leaves a file that helps no other; the last checkpoint is restored; and the
    metric of retention counts, while one that is a timing may differ."""
    monkeypatch.setattr("perdure.drill.drill.diagnose_run", lambda *_: diagnosis("unknown"))
    report = run_drill(command(name), FIRST_FAILURE, tmp_path / "drill")
    row = report.rows[-1]
    assert (row.verdict, row.scenario.place) == (verdict, place)
    assert said in (row.difference.what if row.difference is not None else row.outcome.log)


def test_a_program_that_removes_its_run_directory(tmp_path: Path) -> None:
    """It begins again at each start, and the real directory stays."""
    with Run(tmp_path / "cwd" / "runs" / "mine", create=True) as run:
        run.save(99, {})
    program = [*command("wrong_file"), "remove"]
    said = refused(program, tmp_path / "drill", faults=("bit-flip",), runs=1, fail_fast=True)
    assert "nothing before it that removes the run directory" in said
    assert Run(tmp_path / "cwd" / "runs" / "mine").steps() == [99]


def test_a_drill_without_a_restore_is_no_pass(tmp_path: Path) -> None:
    """Its only checkpoint is that of the last step, so nothing was ever continued."""
    program = tmp_path / "once.py"
    program.write_text((PROGRAMS / "right.py").read_text().replace("STEPS, EVERY = 16, 2", ONCE))
    options = DrillOptions(("sigkill-at-step",), runs=1)
    report = run_drill([sys.executable, str(program)], options, tmp_path / "drill")
    found = report.document()
    assert [run["verdict"] for run in found["runs"]] == ["pass", "pass"]
    assert found["runs"][0]["place"] == LAST, "restored, and no other step was done"
    assert found["restored"] == {"runs": 0, "of": 2, "steps": []}
    assert found["not_tested"]["sigkill-at-step"] == "no run with it continued from a checkpoint"
    assert not report.passed
    assert "nothing is proved" in verdict(found)


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        ("os.listdir('files')", "directory order"),
        ("list(np.empty(1 << 26, np.uint8)[:3])", "memory"),
    ],
)
def test_what_another_machine_does_otherwise(read: str, cause: str, tmp_path: Path) -> None:
    files = tmp_path / "cwd" / "files"
    files.mkdir()
    for name in "abc":
        (files / name).touch()
    program = tmp_path / "machine.py"
    program.write_text(MACHINE.replace("READ", read))
    options = DrillOptions(("other-machine",), runs=1, fail_fast=True)
    report = run_drill([sys.executable, str(program)], options, tmp_path / "drill")
    assert not report.passed
    row = report.rows[-1]
    assert row.diagnosis is not None
    assert row.diagnosis.cause == cause, row.diagnosis
    assert row.outcome.attempts[-1].planted
    if cause == "directory order":
        program.write_text(MACHINE.replace("READ", f"sorted({read})"))
        report = run_drill([sys.executable, str(program)], options, tmp_path / "control")
        assert report.passed, report.document()
        assert report.rows[-1].outcome.attempts[-1].planted


# Every checkpoint before the last is a place that each drill restores from.
ONCE, TWICE = "STEPS, EVERY = 16, 16", "STEPS, EVERY = 16, 8"
MACHINE = """
import os
import numpy as np
from perdure import CheckpointManager
with CheckpointManager("runs/machine") as manager:
    state, start = manager.restore_or_initialize({"a": ""})
    for step in range(start, 2):
        manager.save(step + 1, {"a": str([step, *map(str, READ)])})
"""


def test_a_program_that_differs_by_itself_is_found_first(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    line = [sys.executable, "-m", "perdure.cli", "drill", "--json", "-o", str(page), "--"]
    line += command("wrong_clock")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["pass"]
    assert found["runs"] == []
    assert "undisturbed once more ..." in done.stderr, "the progress, beside the one document"
    plain = found["undisturbed"]
    assert [leaf["path"] for leaf in plain["difference"]["leaves"]] == ["w"]
    assert plain["difference"]["step"] == 2
    assert plain["diagnosis"]["cause"] == "time"
    assert "the result depends on the clock" in page.read_text()


def test_a_program_that_fails_behind_a_resume(tmp_path: Path) -> None:
    report = run_drill(command("wrong_resume"), FIRST_FAILURE, tmp_path / "drill")
    row = report.document()["runs"][-1]
    assert row["verdict"] in ("failed", "differs")
    assert row["diagnosis"]["cause"] == "fails after a resume"
    assert "no fault had hit it" in row["problem"]
    assert "KeyError" in row["log"]


@pytest.mark.parametrize(("spoils", "runs"), [("2", 1), ("1", 0)])
def test_an_end_that_cannot_be_read_back_is_no_pass(spoils: str, runs: int, tmp_path: Path) -> None:
    """Every manifest was committed with the right bits, and what they name is gone."""
    environment = {"SPOILS": spoils}
    options = DrillOptions(("sigkill-at-step",), 1, environment=environment, fail_fast=True)
    report = run_drill(command("wrong_end"), options, tmp_path / "drill")
    found = report.document()
    assert not report.passed
    assert len(found["runs"]) == runs
    (at,) = found["runs"] or [found["undisturbed"]]
    assert "step 6 was committed and cannot be read back" in at["difference"]["what"]
    assert at["diagnosis"]["cause"] == "unreadable"


def test_a_signal_to_the_drill_is_no_failure_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_: object, attempt: Any) -> Any:  # which has failed by then, for whatever reason
        signal.raise_signal(signal.SIGINT)
        return attempt

    monkeypatch.setattr("perdure.drill.execution.FaultObserver.ended", ended)
    with pytest.raises(DrillStopped) as caught:
        run_drill([sys.executable, "-c", "raise SystemExit(3)"], DrillOptions(), tmp_path / "drill")
    found = caught.value.report.document()
    assert found["stopped"]
    assert not found["pass"]

    def stopped(*_: Any) -> None:
        raise caught.value

    monkeypatch.setattr("perdure.drill.drill.run_drill", stopped)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["drill", "--json", "-o", str(page), "--", "python"])
    assert done.exit_code == 130
    assert json.loads(done.stdout) == found
    assert "STOPPED: the drill is not over" in page.read_text()


def test_a_program_that_tells_no_steps_is_drilled_all_the_same(tmp_path: Path) -> None:
    """Run.save in a loop: what hits at a step is left out with the reason, and the others are tried."""
    report = run_drill(command("without_steps"), DrillOptions(runs=7), tmp_path / "drill")
    assert report.passed, report.document()
    restored = report.rows[0].outcome.attempts[-1].restored
    assert restored == 1, "known from the checkpoint that it read, and from the next that it saved"
    assert {row.scenario.kind for row in report.rows} >= {"sigkill", "kill-in-save", "torn-write"}
    assert "reports no steps" in report.impossible["double-kill"]
    assert "after its first step" in report.impossible["disk-full"]


def test_as_a_test_of_a_team(tmp_path: Path) -> None:
    program = tmp_path / "twice.py"
    program.write_text((PROGRAMS / "right.py").read_text().replace("STEPS, EVERY = 16, 2", TWICE))
    faults = ("sigkill-at-step", "torn-write")
    found = drill([sys.executable, str(program)], faults=faults, runs=2, seed=4)
    assert found["pass"]
    assert found["faults"].keys() == {"kill-after-commit", *faults}
    with pytest.raises(AssertionError) as caught:
        drill(command("wrong_seed"), runs=1)
    said = str(caught.value)
    assert "two undisturbed runs differ" in said
    assert "(unseeded)" in said
    assert "w: expected float64[40]" in said
    clock = "runs with a clock that only counts how often it is read differ"
    assert clock in said, "the clock was excluded before"


# ---------------------------------------------------------------- bad input


def refused(arguments: list[str], directory: Path, **options: Any) -> str:
    with pytest.raises(LaunchError) as caught:
        run_drill(arguments, DrillOptions(**options), directory)
    return str(caught.value)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    said = refused(["no-such-program"], tmp_path / "drill")
    assert "no-such-program: no such command" in said
    assert "perdure drill -- python train.py" in said
    # Nothing of it is left, so the same place can be named again.
    assert not (tmp_path / "drill").exists()
    assert "missing.py: no such file" in refused([sys.executable, "missing.py"], tmp_path / "drill")


def test_a_page_that_cannot_be_written_is_found_before_the_drill(tmp_path: Path) -> None:
    for at in (tmp_path / "nowhere" / "page.html", tmp_path):
        line = ["drill", "-o", str(at), "--directory", str(tmp_path / "d"), "--"]
        done = CliRunner().invoke(main, [*line, *command("right")])
        assert done.exit_code == 2
        assert f"-o {at}: the report cannot be written there" in done.stderr
        assert "a directory that exists" in done.stderr
        assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_page_that_is_lost_at_the_end_does_not_take_the_report_with_it(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "pages"
    place.mkdir()
    report = DrillReport(("python",), DrillOptions(), Observed(), Outcome())

    def drilled(*_: Any) -> DrillReport:
        assert os.listdir(place) == [], "looking whether it can be written leaves nothing"
        place.rmdir()
        return report

    monkeypatch.setattr("perdure.drill.drill.run_drill", drilled)
    line = ["drill", *["--json"] * as_json, "-o", str(place / "p.html"), "--", "python"]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 1
    assert "the report cannot be written there" in done.stderr
    if as_json:
        assert not json.loads(done.stdout)["pass"]
    else:
        assert "FAIL: restored in 0 of 0 runs" in done.stdout


def test_a_page_that_is_there_is_kept_by_a_drill_that_is_refused(tmp_path: Path) -> None:
    at = tmp_path / "page.html"
    at.write_text("of last week")
    line = ["drill", "-o", str(at), "--read-only", "nowhere", "--", *command("right")]
    assert CliRunner().invoke(main, line).exit_code == 2
    assert at.read_text() == "of last week"


def test_a_place_that_holds_an_earlier_drill(tmp_path: Path) -> None:
    (tmp_path / "drill" / "undisturbed-1").mkdir(parents=True)
    said = refused(command("right"), tmp_path / "drill")
    assert "drill: it holds earlier runs" in said
    assert "Name another place with --directory, or remove that one." in said
    assert "space" not in said


def test_what_is_to_be_left_has_to_be_there(tmp_path: Path) -> None:
    said = refused(command("right"), tmp_path / "drill", read_only=("nowhere",))
    assert "--read-only nowhere: no such directory" in said
    assert not (tmp_path / "drill").exists()


def test_a_program_that_fails_by_itself(tmp_path: Path) -> None:
    line = [sys.executable, "-c", "raise KeyError('where is it')"]
    said = refused(line, tmp_path / "drill")
    assert "fails without any fault, before its first step" in said
    assert "KeyError: 'where is it'" in said


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("pass", "never opened a run directory"),
        ("m = CheckpointManager('r'); m.restore_or_initialize({})", "never saved a checkpoint"),
    ],
)
def test_a_program_that_never_saves(program: str, said: str, tmp_path: Path) -> None:
    line = [sys.executable, "-c", f"from perdure import CheckpointManager; {program}"]
    assert said in refused(line, tmp_path / "drill")


def test_a_program_that_never_restores(tmp_path: Path) -> None:
    saves = "with CheckpointManager('r') as m: [m.save(n, {'a': n}) for n in (1, 2)]"
    line = [sys.executable, "-c", f"from perdure import CheckpointManager\n{saves}"]
    said = refused(line, tmp_path / "drill", faults=("kill-after-commit",), runs=1)
    assert "never restores one" in said
    assert "restore_or_initialize" in said


def test_more_workers_than_replicas(tmp_path: Path) -> None:
    said = refused(command("too_many_workers"), tmp_path / "drill", workers=2)
    assert "before its first step" in said
    assert "TopologyError" in said


def test_the_log_of_the_worker_that_failed_is_shown(tmp_path: Path) -> None:
    # Worker 1 writes last, and is killed within its traceback.
    program = (
        "import os, pathlib, sys, time\n"
        "failed, written = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('KeyError: the cause', flush=True)\n"
        "    failed.touch()\n"
        "    while not written.exists(): time.sleep(0.001)\n"
        "    os._exit(1)\n"
        "while not failed.exists(): time.sleep(0.001)\n"
        "print('half a traceback', flush=True)\n"
        "written.touch()\n"
        "time.sleep(600)\n"
    )
    marks = [str(tmp_path / "failed"), str(tmp_path / "written")]
    line = [sys.executable, "-c", program, *marks]
    said = refused(line, tmp_path / "drill", workers=2)
    assert "KeyError: the cause" in said
    assert "half a traceback" not in said


def test_the_newest_log_is_shown_if_no_worker_failed_by_itself(tmp_path: Path) -> None:
    for index, written in enumerate(("older", "newer", "")):
        log = tmp_path / f"attempt-1-worker-{index}.log"
        log.write_text(written)
        os.utime(log, (index, index))
    assert log_tail(tmp_path, []) == "newer"


def test_faults_that_cannot_happen_say_why(tmp_path: Path) -> None:
    said = refused(command("right"), tmp_path / "drill", faults=("worker-lost",))
    assert "worker-lost: there is one worker; give --workers" in said
    with pytest.raises(LaunchError, match="found nonsense"):
        DrillOptions(("nonsense",))


def test_what_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "drill" / "run-001").mkdir(parents=True)
    program = [sys.executable, "-c", "raise SystemExit(3)"]
    assert "it holds earlier runs (run-001 exists)" in refused(program, tmp_path / "drill")
    said = refused(program, tmp_path / "other", faults=("other-workers", "worker-lost"))
    assert "worker-lost: there is one worker; give --workers" in said
    Path("train.py").touch()
    said = refused(["train.py", "--fast"], tmp_path / "other")
    assert "Write: perdure drill -- python train.py --fast" in said
    assert not (tmp_path / "other").exists()
    done = CliRunner().invoke(main, ["drill", "--faults", "", "--", "python"])
    assert "expected some of kill-after-commit" in done.stderr


def test_a_place_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    said = refused(command("right"), tmp_path / "file" / "drill")
    assert "cannot be written there" in said
    assert "--directory" in said

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert "No space left on device" in refused(command("right"), tmp_path / "drill")
