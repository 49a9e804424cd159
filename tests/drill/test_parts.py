"""The parts of the drill: the plan, the door in the store, the comparison, what is counted."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from perdure import CheckpointManager, ManagerOptions, Retention
from perdure.drill.compare import (
    LeafDifference,
    RunDifference,
    compare,
    compare_best,
    newest_steps,
    read_back,
    stable_exports,
)
from perdure.drill.drill_report import DrillOptions, DrillReport, DrillRow, TextReporter, verdict
from perdure.drill.execution import (
    DrilledProgram,
    FaultObserver,
    damage,
    execute,
    written_files,
)
from perdure.drill.fault_plan import (
    KINDS,
    LAST,
    MOST_LAST,
    MOST_PHASES,
    draw_scenario,
    estimated_seconds,
    plan,
    possible_kinds,
    required_restores,
)
from perdure.drill.observed import Observed, phases_of
from perdure.drill.scenario import (
    Commit,
    Fault,
    Launch,
    LaunchOutcome,
    Outcome,
    Scenario,
    WrittenFile,
)
from perdure.drill.working_directory import COPY, WorkingDirectory
from perdure.drill.written_files import EVENTS
from perdure.report.run_report import render_drill
from perdure.store import Run

POINTS = ("pack", "manifest")
VERBS = ("open", "write", "fsync", "link", "sync", "delete")
SEEN = Observed(
    seconds=3.0,
    first_step_s=1.0,
    steps=tuple(range(1, 41)),
    points={f"{kind}.{verb}": 10 for kind in POINTS for verb in VERBS} | {"open": 1},
    early={},
    silence_s=0.1,
    workers=2,
    replicas=4,
    modules=("jax",),
    may_devices=(2,),
    may_workers=(1, 3),
    sequence=tuple(range(4, 41, 4)),
)


def test_a_plan_is_a_function_of_its_seed_and_takes_every_kind_in_turn() -> None:
    kinds = list(KINDS)
    planned = plan(SEEN, kinds, 63, seed=3)
    assert planned == plan(SEEN, kinds, 63, seed=3)
    assert planned != plan(SEEN, kinds, 63, seed=4)
    required = required_restores(SEEN)
    assert planned[: len(required)] == required
    assert plan(SEEN, kinds, 63, seed=4)[: len(required)] == required, "no seed goes without them"
    assert [each.number for each in planned] == list(range(1, 64 + len(required)))
    drawn = planned[len(required) :]
    counted = Counter(each.kind for each in drawn)
    assert counted.keys() == KINDS.keys()
    assert max(counted.values()) - min(counted.values()) <= 1
    for each in drawn:
        assert len(each.planned) >= 1
        for fault in (fault for attempt in each.attempts for fault in attempt.injected):
            assert fault.step is None or 1 <= fault.step < 40
            assert 1 <= fault.nth <= 10
            assert fault.worker in (None, 0, 1)


def test_a_fault_that_did_not_fire_is_drawn_earlier() -> None:
    later = [
        draw_scenario(SEEN, "kill-in-save", n, 0).attempts[0].injected[0].nth for n in range(50)
    ]
    early = [
        draw_scenario(SEEN, "kill-in-save", n, 0, 3).attempts[0].injected[0].nth for n in range(50)
    ]
    assert max(later) == 10
    assert max(early) == 1


def test_every_drill_restores_from_each_kind_of_place() -> None:
    """Counted by commits, and not by time; also the last one, after which nothing is to be done."""
    places = {each.place: each.attempts[0].injected[0] for each in required_restores(SEEN)}
    assert {place: (fault.point, fault.nth) for place, fault in places.items()} == {
        "the first checkpoint": ("manifest.sync", 1),
        "one in the middle": ("manifest.sync", 5),
        "the last one before the end": ("manifest.sync", 9),
        LAST: ("manifest.sync", 10),
    }
    # Two phases of which no checkpoint would be tried: the smaller one first, and the middle of each.
    phased = replace(SEEN, phases=("a", "b", "c", "b", "a", "b", "b", "b", "a", "a"))
    assert [each.attempts[0].injected[0].nth for each in required_restores(phased)] == [
        *(1, 5, 9, 3, 6, 10)
    ]
    many = replace(SEEN, sequence=tuple(range(1, 201)), phases=tuple(range(200)))
    many = replace(many, steps=tuple(range(1, 201)))
    assert len(required_restores(many)) == 3 + MOST_PHASES + 1
    from_nothing = replace(SEEN, sequence=(0, *SEEN.sequence))
    assert required_restores(from_nothing)[0].attempts[0].injected[0].nth == 2, "step 0 is none"
    once = replace(SEEN, sequence=(0, 40))
    assert [(each.place, len(each.planned)) for each in required_restores(once)] == [(LAST, 1)]
    assert "before the last step" in possible_kinds(once, ["kill-after-commit"])[1].popitem()[1]


def test_each_phase_of_a_program_has_a_last_checkpoint() -> None:
    """The end of one run directory is no end of the steps of another."""
    phases = replace(
        SEEN, steps=(1, 2, 3, 1, 2), sequence=(1, 2, 3, 1, 2), runs=("a", "a", "a", "b", "b")
    )
    assert phases.restorable == [1, 2, 4]
    assert phases.last_commits == [3, 5]
    places = [(s.attempts[0].injected[0].nth, s.place) for s in required_restores(phases)]
    assert places[-2:] == [(3, LAST), (5, LAST)]
    later = replace(phases, runs=("a",) * 5, sequence=(1, 2, 3, 4, 5), steps=tuple(range(8)))
    assert later.restorable == [1, 2, 3, 4, 5], "steps that are not saved are done again"
    assert LAST not in [each.place for each in required_restores(later)]
    folds = replace(SEEN, steps=(1,) * 30, sequence=(1,) * 30, runs=tuple(map(str, range(30))))
    numbers = [each.attempts[0].injected[0].nth for each in required_restores(folds)]
    assert len(numbers) == MOST_LAST
    assert numbers[-1] == 30


@pytest.mark.parametrize("sign", ["leaf", "metric", "lines", "none"])
def test_a_phase_is_seen_in_what_changes_and_in_what_runs(tmp_path: Path, sign: str) -> None:
    commits, events = [], []
    with CheckpointManager(tmp_path / "run", max_to_keep=None) as manager:
        for step in range(1, 8):
            epoch = step // 3
            state = {"w": np.zeros(3) + step} | ({"epoch": epoch} if sign == "leaf" else {})
            manager.save(step, state, {"epoch": epoch} if sign == "metric" else None)
            ran = "other" if sign == "lines" and step % 3 == 0 else "loop"
            events.append({"e": "step", "w": 0, "step": step, "lines": ran})
    for step in range(1, 8):
        (copy,) = (tmp_path / "run" / "checkpoints").glob(f"*{step}.json")
        commits.append(Commit("run", step, 1, str(copy), ""))
    found = phases_of(Outcome(commits=commits, events=events))
    inner = [found["run", step] for step in range(2, 7)]  # the first and the last have their own
    # Before an epoch's end, after it, and neither.
    kinds = [inner.index(phase) for phase in inner]
    assert kinds == ([0, 1, 2, 0, 1] if sign != "none" else [0] * 5)


def test_the_files_that_are_made_at_the_end_are_compared(tmp_path: Path) -> None:
    """Not a log, nor a time, nor what lies outside of the working directory; these are named."""
    outcomes = {}
    made = {"final": "1", "when": "1", "log": "1", "latest": "1"}
    for name, contents in {
        "plain": made, "again": {**made, "when": "2"}, "same": {**made, "log": "3"},
        "other": {**made, "final": "2"}, "none": {**made, "final": None},
    }.items():  # fmt: skip
        copy = tmp_path / "drill" / name / "root" / "home"
        copy.mkdir(parents=True)
        (tmp_path / "cache").write_text(name)
        events = [{"e": "written", "path": str(copy / "latest")}, {"e": "step"}]
        for file, text in contents.items():
            if text is not None:
                (copy / file).write_text(text)
                events.append({"e": "written", "path": str(copy / file), "append": file == "log"})
        events += [{"e": "written", "path": str(tmp_path / path)} for path in ("cache", "gone")]
        events.append({"e": "written", "path": str(tmp_path / "drill" / "compiled")})
        files = written_files(tmp_path / "drill" / name, "/home", events)
        outcomes[name] = Outcome(files=files)
    plain = outcomes["plain"]
    assert plain.files.keys() == {*made, str(tmp_path / "cache")}
    exports = stable_exports(plain, outcomes["again"])
    assert exports == ["final"]
    for outcome in outcomes.values():
        outcome.hash_exports(exports)
    assert compare(plain, outcomes["same"]) == (0, None), "the control"
    for name in ("other", "none"):
        _, difference = compare(plain, outcomes[name])
        assert difference is not None
        assert [leaf.path for leaf in difference.leaves] == ["file final"]
    drawn = draw_scenario(SEEN, "sigkill", 1, 0)
    done = [LaunchOutcome("exit 0", 1.0, 1, None, last=5, restored=4)]
    row = DrillRow(drawn, Outcome(fired=["SIGKILL"], attempts=done), 3, None)
    found = DrillReport(("python",), DrillOptions(), SEEN, plain, [row]).document()
    assert found["pass"]
    assert found["tried"]["checkpoints"] == [1, 10]
    assert found["tried"]["kinds"] == [1, len(KINDS)]
    said = verdict(found)
    for fact in ("of 1 of", "from 1 of 10 checkpoints", "final the same bytes", "9 other"):
        assert fact in said, fact
    looked, unseen = said.split("Not looked at: ")
    for name in ("cache", "when", "log", "latest"):
        assert name in unseen
        assert name not in looked


def test_files_that_native_code_writes_are_found_by_their_times(tmp_path: Path) -> None:
    """In the copy of the working directory: no event of the program names them."""
    copy = tmp_path / "drill" / "plain" / "root" / "home"
    (copy / "run").mkdir(parents=True)
    (copy.parent.parent / COPY).touch()
    for name in ("final.pt", "run/perdure.json", "run/log", "__pycache__/a.pyc", "was there"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(name)
    (copy / "link").symlink_to("final.pt")
    os.utime(copy / "was there", (1, 1))  # copies keep their times
    for seconds, is_export in ((-100, True), (100, False)):
        events = [{"e": "step", "t": time.monotonic() + seconds}]
        files = written_files(copy.parent.parent, "/home", events)
        assert files == {"final.pt": WrittenFile(str(copy / "final.pt"), is_export, False)}


def test_the_estimate_counts_each_run_and_each_start() -> None:
    """A run takes as long as an undisturbed one, and each start begins before the first step again."""
    kill, kills = Launch(signal="SIGKILL"), (Launch(signal="SIGKILL"), Launch(signal="SIGKILL"))
    assert estimated_seconds([Scenario(1, "sigkill", (kill,))], SEEN) == 3.0 + (1.0 + 0.2)
    several = [Scenario(1, "sigkill", (kill,)), Scenario(2, "double-kill", kills)]
    assert estimated_seconds(several, SEEN) == 2 * 3.0 + 3 * (1.0 + 0.2)


def test_the_first_turn_of_a_kind_hits_after_a_checkpoint() -> None:
    counts = {"manifest.sync": 1, "pack.open": 2, "pack.write": 3, "pack.fsync": 2, "pack.link": 2}
    seen = replace(SEEN, before_commit=counts)
    for number in range(40):
        first = (
            draw_scenario(seen, "kill-in-save", number, 0, anywhere=False).attempts[0].injected[0]
        )
        assert first.nth > counts[first.point]
    drawn = [draw_scenario(seen, "kill-in-save", number, 0) for number in range(40)]
    places = [each.attempts[0].injected[0] for each in drawn]
    assert any(place.nth <= counts[place.point] for place in places)


def test_what_cannot_happen_says_why() -> None:
    alone = Observed(1.0, 0.5, (1, 2), {"open": 1, "manifest.sync": 1}, sequence=(2,))
    can, cannot = possible_kinds(alone, list(KINDS))
    assert "sigkill-at-step" in can
    assert "second checkpoint" in cannot["bit-flip"]
    assert "never reaches" in cannot["kill-in-prune"]
    assert "one worker" in cannot["worker-lost"]


def test_a_program_that_tells_no_steps_is_drilled_at_its_other_places() -> None:
    """Every kind that needs a step says so, for whatever is drawn; the others can be drawn."""
    bare = replace(SEEN, steps=(), early={"open": 1})
    can, cannot = possible_kinds(bare, list(KINDS))
    stepped = {
        "sigkill-at-step", "sigterm-at-step", "worker-lost", "stopped", "other-devices",
        "other-workers", "clock-jump", "double-kill",
    }  # fmt: skip
    assert cannot.keys() == stepped
    assert all("reports no steps" in why for why in cannot.values())
    for seed in range(5):
        assert len(plan(bare, can, 30, seed)) == 30 + len(required_restores(bare))


def test_whether_a_torn_write_can_happen_does_not_depend_on_what_is_drawn() -> None:
    """A state of scalars alone has no pack."""
    points = {name: n for name, n in SEEN.points.items() if not name.startswith("pack")}
    scalars = replace(SEEN, points=points)
    for number in range(40):
        assert len(draw_scenario(scalars, "torn-write", number, 0).planned) == 1


def test_a_fault_that_never_fired_is_no_pass() -> None:
    """Negative control: equal bits alone are not enough."""
    drawn = draw_scenario(SEEN, "sigkill-at-step", 1, 0)
    silent, fired = Outcome(), Outcome(fired=["kill at step 3"])
    rows = [DrillRow(drawn, each, 3, None) for each in (silent, fired)]
    assert [row.verdict for row in rows] == ["not fired", "pass"]
    report = DrillReport(("python",), DrillOptions(), SEEN, Outcome(), rows)
    assert not report.passed
    assert "1 whose faults did not all fire" in verdict(report.document())


def test_a_run_counts_as_fired_only_if_all_its_faults_did() -> None:
    """Also one that failed or differs: it is no proof that its faults can be withstood."""
    drawn = draw_scenario(SEEN, "double-kill", 1, 0)
    assert len(drawn.planned) == 2
    once, twice = ["kill at step 3"], ["kill at step 3", "kill at open"]
    differs = RunDifference("step 2: 1 of 1 leaves differ", "run", 2, 2)
    rows = [
        DrillRow(drawn, Outcome(fired=once, problem="it ended by itself"), 3, None),
        DrillRow(drawn, Outcome(fired=once), 3, differs),
        DrillRow(drawn, Outcome(fired=twice), 3, differs),
        DrillRow(drawn, Outcome(fired=twice), 3, None),
    ]
    assert [row.verdict for row in rows] == ["failed", "differs", "differs", "pass"]
    found = DrillReport(("python",), DrillOptions(), SEEN, Outcome(), rows).document()
    assert found["faults"] == {"double-kill": {"runs": 4, "fired": 2, "restored": 0, "pass": 1}}
    assert [run["all_fired"] for run in found["runs"]] == [False, False, True, True]
    assert "2 whose faults did not all fire" in verdict(found)
    assert (
        render_drill(found).count("kill at step 3 (1 of 2 planned)") == 4
    )  # two headings, two lines
    said = io.StringIO()
    reporter = TextReporter(Console(file=said, width=200))
    for row in rows:
        reporter.progress(row.scenario.kind, row)
    assert said.getvalue().count("(1 of 2 planned)") == 2


def test_steps_that_were_done_again_are_counted_over_all_attempts() -> None:
    outcome = Outcome(
        attempts=[
            LaunchOutcome("SIGKILL", 1.0, 1, None, first=1, last=7, restored=0),
            LaunchOutcome("SIGKILL", 1.0, 1, None),
            LaunchOutcome("exit 0", 1.0, 1, None, first=5, last=9, restored=4),
        ]
    )
    assert outcome.repeated == 3
    assert outcome.recomputed == [None, None, (5, 7)]
    assert outcome.restored_steps == [4]


def test_a_restore_counts_for_the_phase_whose_steps_follow_it(tmp_path: Path) -> None:
    """The first phase is over and restores its last step; the second one continues from its own."""
    for restored, counted, continued in (((5, 2), 2, True), ((5, 0), 5, False), ((3, 0), 3, True)):
        events = [{"e": "restored", "step": step} for step in restored]
        events += [{"e": "step", "step": step} for step in range(restored[1] + 1, 6)]
        (tmp_path / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
        program = DrilledProgram(("python",), WorkingDirectory(tmp_path))
        done = LaunchOutcome("exit 0", 1.0, 1, None)
        FaultObserver(program, tmp_path)._collect(1, done)
        assert (done.restored, done.continued) == (counted, continued)


# As torchrun: its own status is 1, whatever ended its process.
LAUNCHER = """
import signal, subprocess, sys

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]) != 0)
"""


@pytest.mark.parametrize(
    "launch",
    [Launch(signal="SIGTERM"), Launch((Fault("open", "kill"),))],
    ids=["outside", "inside"],
)
def test_a_signal_of_the_drill_is_no_failure_before_the_first_step(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a launcher makes a failure of it; the control is a program that fails by itself."""
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.chdir(source)
    (source / "launch.py").write_text(LAUNCHER)
    (source / "wrong.py").write_text("1 / 0")
    shutil.copy(Path(__file__).parent / "programs" / "right.py", source)

    def run(script: str) -> Outcome:
        program = DrilledProgram(
            (sys.executable, "launch.py", script), WorkingDirectory(source), cache=None
        )
        return execute(program, tmp_path / script, [launch])

    # A worker inherits the mask, so that no signal comes before the launcher handles it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        right, wrong = run("right.py"), run("wrong.py")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert not right.problem
    assert [attempt.ended for attempt in right.attempts] == ["worker 0: exit 1", "exit 0"]
    assert right.attempts[0].first is None
    assert "no fault had hit it" in wrong.problem
    assert len(wrong.attempts) == (2 if launch.signal else 1)


def test_an_end_that_is_missing_is_a_difference() -> None:
    _, difference = compare(Outcome(), Outcome())
    assert difference is None
    one, two = ([Commit(run, 1, 1, "", "f")] for run in ("a", "b"))
    for expected, actual, said in (
        (one, [], "expected step 1 in a, found no checkpoint"),
        (one, two, "expected step 1 in a, found no checkpoint; only this run has b"),
        (one, one + two, "only this run has the run directory b"),
    ):
        _, difference = compare(Outcome(commits=expected), Outcome(commits=actual))
        assert difference is not None
        assert said in difference.what


def test_what_is_kept_for_a_metric_is_compared(tmp_path: Path) -> None:
    """Values at equal steps, and what is left at the end; a checkpoint of a preemption may be best."""
    losses = {"plain": [3, 1, 2], "same": [3, 1, 2], "other": [1, 3, 2], "values": [3, 1, 1.5]}
    rule = {"e": "retention", "run": "a", "metric": "loss", "mode": "min", "keep": 1}
    keep = ManagerOptions(retention=Retention(best_metric="loss", best_mode="min"))
    outcomes = {}
    for name, values in losses.items():
        directory = tmp_path / name / "runs" / "a"
        commits = []
        with CheckpointManager(directory, max_to_keep=1, options=keep) as manager:
            for step, loss in enumerate(values, 1):
                manager.save(step, {"w": np.zeros(3)}, {"loss": loss, "seconds": loss})
                manager.wait_until_finished()
                copy = tmp_path / f"{name}-{step}.json"
                (manifest,) = (directory / "checkpoints").glob(f"*{step}.json")
                copy.write_bytes(manifest.read_bytes())
                commits.append(Commit("a", step, 1, str(copy), "f"))
        outcomes[name] = Outcome(commits=commits, events=[rule])
    plain = outcomes["plain"]
    assert compare(plain, outcomes["same"]) == (3, None)
    assert compare(replace(plain, events=[]), outcomes["values"]) == (3, None), "not for retention"
    _, difference = compare(plain, outcomes["values"])
    assert difference is not None
    assert "step 3: the metric loss, by which checkpoints are kept" in difference.what
    assert difference.leaves == (LeafDifference("metric loss", "2.0", "1.5"),)
    assert compare_best(tmp_path / "plain", tmp_path / "same", plain) is None
    difference = compare_best(tmp_path / "plain", tmp_path / "other", plain)
    assert difference is not None
    assert difference.what == "the end: kept for the metric loss: expected 2, found 1"
    without = replace(plain, commits=plain.commits[1:])
    assert compare_best(tmp_path / "plain", tmp_path / "other", without) is None


def test_the_end_is_read_back_where_an_undisturbed_run_leaves_one(tmp_path: Path) -> None:
    assert read_back(tmp_path, newest_steps(tmp_path), Outcome()) is None, "one that was removed"
    with CheckpointManager(tmp_path / "runs" / "a") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.arange(2000.0) + step})
    ends = [Run(tmp_path / "runs" / "a").manifest(step).fingerprint for step in (1, 2)]
    right, wrong = (Outcome(commits=[Commit("a", 2, 1, "", end)]) for end in reversed(ends))
    assert newest_steps(tmp_path) == {"a": 2}
    assert read_back(tmp_path, {"a": 2}, right) is None
    # What was set aside, and what lies below the newest, may be damaged.
    for pack in (tmp_path / "runs" / "a" / "packs").glob("000000000001*"):
        os.truncate(pack, 10)
    assert read_back(tmp_path, {"a": 2}, right) is None
    for wanted, outcome, why in (
        ({"a": 2}, wrong, f"expected {ends[0][:16]}, found {ends[1][:16]}"),
        ({"a": 3}, right, "the newest that is left is step 2"),
        ({"a": 2, "b": 1}, right, "no checkpoint is left"),
    ):
        found = read_back(tmp_path, wanted, outcome)
        assert found is not None
        assert why in found.what
    for pack in (tmp_path / "runs" / "a" / "packs").iterdir():
        os.truncate(pack, 10)
    found = read_back(tmp_path, {"a": 2}, right)
    assert found is not None
    assert "step 2 was committed and cannot be read back" in found.what


PROBE = """
import sys
from perdure import CheckpointManager, ManagerOptions, Retention
with CheckpointManager("run") as manager:
    manager.save(1, {})
print(sorted(name for name in sys.modules if "drill" in name))
"""


def test_without_the_variable_nothing_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['perdure.store.drill_hook']"


@pytest.mark.parametrize(("how", "left"), [("flip", [1]), ("delete", [1])])
def test_damage_takes_the_newest_checkpoint_and_no_other(
    how: str, left: list[int], tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, {"w": np.arange(2000.0)})
        manager.wait_until_finished()
        assert damage(tmp_path, how, 0.5) is None, "the only one is left alone"
        manager.save(2, {"w": np.arange(2000.0) + 1})
    said = damage(tmp_path, how, 0.5)
    assert said is not None
    assert "step 2" in said
    with CheckpointManager(tmp_path / "a") as manager:
        with pytest.warns(UserWarning, match="step 2 is damaged"):
            state, step = manager.restore()
        assert [step] == left
        assert (state["w"] == np.arange(2000.0)).all()


def test_a_scenario_counts_its_faults() -> None:
    moved = Scenario(1, "x", (Launch(signal="SIGKILL"), Launch(devices=2, damage="flip")))
    assert len(moved.planned) == 3
