"""The parts of the drill: the plan, the door in the store, the comparison, what is counted."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from perdure import CheckpointManager
from perdure.drill import diagnose
from perdure.drill.compare import (
    LeafDifference,
    RunDifference,
    compare,
    newest_steps,
    read_back,
)
from perdure.drill.damage import damage
from perdure.drill.drill import DrillOptions, DrillReport, DrillRow
from perdure.drill.fault_injection import PLAN
from perdure.drill.fault_plan import KINDS, draw_scenario, plan, possible_kinds
from perdure.drill.html_report import render_html
from perdure.drill.probes import probe_environment
from perdure.drill.scenario import (
    Commit,
    Launch,
    LaunchOutcome,
    Observed,
    Outcome,
    Scenario,
)
from perdure.drill.text_report import TextReporter, verdict
from perdure.errors import LaunchError
from perdure.store import Run
from perdure.store.drill_hook import DRILL

POINTS = ("pack", "manifest")
VERBS = ("open", "write", "fsync", "link", "sync", "delete")
SEEN = Observed(
    seconds=3.0,
    first_step_s=1.0,
    steps=tuple(range(1, 41)),
    commits=tuple(range(4, 41, 4)),
    points={f"{kind}.{verb}": 10 for kind in POINTS for verb in VERBS} | {"open": 1},
    early={},
    silence_s=0.1,
    workers=2,
    replicas=4,
    modules=("jax",),
    may_devices=(2,),
    may_workers=(1, 3),
)


def test_a_plan_is_a_function_of_its_seed_and_takes_every_kind_in_turn() -> None:
    kinds = list(KINDS)
    drawn = plan(SEEN, kinds, 60, seed=3)
    assert drawn == plan(SEEN, kinds, 60, seed=3)
    assert drawn != plan(SEEN, kinds, 60, seed=4)
    counted = Counter(each.kind for each in drawn)
    assert counted.keys() == KINDS.keys()
    assert max(counted.values()) - min(counted.values()) <= 1
    for each in drawn:
        assert each.faults >= 1
        assert each.describe()
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


def test_what_cannot_happen_says_why() -> None:
    alone = Observed(1.0, 0.5, (1, 2), (2,), {"open": 1, "manifest.sync": 1}, {}, 0.1)
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
        assert len(plan(bare, can, 30, seed)) == 30


def test_no_kind_is_left_says_why_each_is_not() -> None:
    with pytest.raises(LaunchError) as caught:
        plan(SEEN, [], 3, 0, {"stopped": "it tells no steps", "torn-write": "it never saves"})
    assert "stopped: it tells no steps; torn-write: it never saves." in str(caught.value)


def test_whether_a_torn_write_can_happen_does_not_depend_on_what_is_drawn() -> None:
    """A state of scalars alone has no pack."""
    points = {name: n for name, n in SEEN.points.items() if not name.startswith("pack")}
    scalars = replace(SEEN, points=points)
    for number in range(40):
        assert draw_scenario(scalars, "torn-write", number, 0).faults == 1


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
    assert drawn.faults == 2
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
    assert found["faults"] == {"double-kill": {"runs": 4, "fired": 2, "pass": 1}}
    assert [run["all_fired"] for run in found["runs"]] == [False, False, True, True]
    assert "2 whose faults did not all fire" in verdict(found)
    assert (
        render_html(found).count("kill at step 3 (1 of 2 planned)") == 4
    )  # two headings, two lines
    said = io.StringIO()
    reporter = TextReporter(Console(file=said, width=200), 4)
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


def test_an_end_that_is_missing_is_a_difference() -> None:
    _, difference = compare(Outcome(), Outcome())
    assert difference is None


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
        ({"a": 2}, wrong, f"expected {ends[0]}, found {ends[1]}"),
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
from perdure import CheckpointManager
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


RESUMED = """
import random
import numpy as np
from perdure import CheckpointManager

random.seed(1)
np.random.seed(2)
own = np.random.default_rng(3)
source = iter(range(100))
with CheckpointManager("run") as manager:
    state, start = manager.restore_or_initialize({"step": 0})
    own_too = np.random.default_rng(4)
    drawn = []
    for step in range(start, 6):
        drawn.append((random.random(), np.random.random(), own.random(), own_too.random()))
        drawn.append(next(source))
        if step == 3 and start == 0:
            break
        manager.save(step + 1, {"step": step + 1})
print(drawn)
"""


@pytest.mark.parametrize("probes", [("rng", "iterators"), ()])
def test_probes_put_generators_and_iterators_back(probes: tuple[str, ...], tmp_path: Path) -> None:
    """A resumed process draws what an uninterrupted one draws, without a change to the program; and
    as a negative control, without probes it does not."""
    whole = _drawn(tmp_path / "whole", {}, RESUMED.replace("start == 0", "False"))
    where = tmp_path / "drill"
    where.mkdir()
    environment = {DRILL: str(where), **probe_environment(where, probes)}
    drawn = []
    for attempt in (1, 2):
        (where / PLAN).write_text(json.dumps({"attempt": attempt, "faults": []}))
        drawn.append(_drawn(tmp_path / "resumed", environment, RESUMED))
    first, second = drawn
    # The step at which the first one breaks off is done again.
    assert len(first) == 8
    assert (first[:6] + second == whole) == bool(probes)


def _drawn(where: Path, environment: dict[str, str], program: str) -> list[object]:
    where.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=where,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_probes_keep_the_path_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("")
    path = filter(None, [str(tmp_path / "own"), os.environ.get("PYTHONPATH")])
    own = {"PYTHONPATH": os.pathsep.join(path)}
    environment = {**own, **probe_environment(tmp_path, ("clock",), own)}
    assert _drawn(tmp_path, environment, "import mine, time; print([int(time.time())])") == [
        1_700_000_000
    ]


def test_a_probe_that_does_not_come_to_its_end_excludes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leaves = (LeafDifference("w", "", "float64[1]"),)
    differs = RunDifference("step 2: 1 of 1 leaves differ", "run", 2, 2, leaves)
    monkeypatch.setattr(diagnose, "_largest_moving", lambda *_: "w")
    monkeypatch.setattr(diagnose, "leaves_of", lambda *_: {})
    ended = RunDifference("the end: expected step 4, found no checkpoint", "run")

    def found(fails: str) -> diagnose.Diagnosis:
        class ProbeRunner:
            plain = Outcome()
            observed = SEEN

            def faulted(self, attempts: object, *probes: str) -> tuple[Outcome, Path]:
                problem = "exit 1" if fails in probes else ""
                return Outcome(problem=problem, commits=[Commit("run", 2, 1, "", "")]), tmp_path

        def compared(_: Outcome, outcome: Outcome) -> tuple[int, RunDifference]:
            return 1, ended if outcome.problem else differs

        monkeypatch.setattr(diagnose, "compare", compared)
        drawn = Scenario(1, "x", (Launch(signal="SIGKILL"),))
        lab: Any = ProbeRunner()
        return diagnose.diagnose_run(lab, drawn, Outcome(), differs)

    assert found("nothing").cause == "data position"
    said = found("rng")
    assert said.cause == "unknown"
    assert any("it could not be tried: exit 1" in each for each in said.evidence)
    assert said.evidence[-1] == "so a random generator is not excluded"


def test_a_scenario_counts_its_faults() -> None:
    moved = Scenario(1, "x", (Launch(signal="SIGKILL"), Launch(devices=2, damage="flip")))
    assert moved.faults == 3
