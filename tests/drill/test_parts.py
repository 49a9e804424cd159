"""The parts of the drill: the plan, the door in the store, the comparison, what is counted."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from perdure import CheckpointManager
from perdure.drill.causes import Diagnosis
from perdure.drill.compare import (
    LeafDifference,
    RunDifference,
    compare,
    newest_steps,
    read_back,
)
from perdure.drill.damage import damage
from perdure.drill.diagnose import repeats_for
from perdure.drill.drill_report import DrillOptions, DrillReport, DrillRow
from perdure.drill.fault_injection import PLAN, _describe_act
from perdure.drill.fault_plan import (
    KINDS,
    draw_scenario,
    plan,
    possible_kinds,
    required_restores,
)
from perdure.drill.html_report import render_html
from perdure.drill.probes import probe_environment
from perdure.drill.resume_diagnosis import ResumeDiagnosis
from perdure.drill.resume_probe import HELD, ITERATORS
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
    sequence=tuple(range(4, 41, 4)),
)


def test_a_plan_is_a_function_of_its_seed_and_takes_every_kind_in_turn() -> None:
    kinds = list(KINDS)
    planned = plan(SEEN, kinds, 63, seed=3)
    assert planned == plan(SEEN, kinds, 63, seed=3)
    assert planned != plan(SEEN, kinds, 63, seed=4)
    required = required_restores(SEEN)
    assert planned[: len(required)] == required
    assert [each.number for each in planned] == list(range(1, 64 + len(required)))
    drawn = planned[len(required) :]
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


def test_every_drill_restores_from_each_kind_of_place() -> None:
    """Counted by commits, and not by time; never the last checkpoint, after which nothing is done."""
    places = {each.place: each.attempts[0].injected[0] for each in required_restores(SEEN)}
    assert {place: (fault.point, fault.nth) for place, fault in places.items()} == {
        "the first checkpoint": ("manifest.sync", 1),
        "one in the middle": ("manifest.sync", 5),
        "the last one before the end": ("manifest.sync", 9),
    }
    with_epochs = required_restores(replace(SEEN, epoch_ends=(2, 5, 9)))
    assert [each.attempts[0].injected[0].nth for each in with_epochs] == [1, 5, 6, 9]
    assert with_epochs[2].place == "the last one before an epoch's end"
    from_nothing = replace(SEEN, sequence=(0, *SEEN.sequence))
    assert required_restores(from_nothing)[0].attempts[0].injected[0].nth == 2, "step 0 is none"
    once = replace(SEEN, sequence=(0, 40), commits=(0, 40))
    assert required_restores(once) == []
    assert "before the last step" in possible_kinds(once, ["kill-after-commit"])[1].popitem()[1]


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
        assert len(plan(bare, can, 30, seed)) == 30 + len(required_restores(bare))


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
    assert found["faults"] == {"double-kill": {"runs": 4, "fired": 2, "restored": 0, "pass": 1}}
    assert [run["all_fired"] for run in found["runs"]] == [False, False, True, True]
    assert "2 whose faults did not all fire" in verdict(found)
    assert (
        render_html(found).count("kill at step 3 (1 of 2 planned)") == 4
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


@pytest.mark.parametrize("put", [("own", "own_too", ITERATORS), ("own", "own_too"), ()])
def test_generators_and_iterators_are_put_back(put: tuple[str, ...], tmp_path: Path) -> None:
    """A resumed process draws what an uninterrupted one draws, without a change to the program; and
    as a negative control, it does not if something is left as it is."""
    whole = _drawn(tmp_path / "whole", {}, RESUMED.replace("start == 0", "False"))
    where = tmp_path / "drill"
    where.mkdir()
    environment = {DRILL: str(where), **probe_environment(where, ("resume",), {}, put)}
    drawn = []
    for attempt in (1, 2):
        (where / PLAN).write_text(json.dumps({"attempt": attempt, "faults": []}))
        drawn.append(_drawn(tmp_path / "resumed", environment, RESUMED))
    first, second = drawn
    # The step at which the first one breaks off is done again.
    assert len(first) == 8
    assert (first[:6] + second == whole) == (len(put) == 3)
    listed = json.loads((where / HELD / "differing-0.json").read_text())
    assert {"own", "own_too"} <= {unit["name"] for unit in listed["units"]}
    assert listed["iterators"] == ["source"]


def _drawn(where: Path, environment: dict[str, str], program: str) -> list[object]:
    where.mkdir(exist_ok=True)
    (where / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
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


class FakeRunner:
    """Runs nothing: `outcomes` says for each part that is put back how its runs come out, in turn.

    "there" (also for anything else): the difference is still there; "gone"; "fails": the run ends with
    a problem.
    """

    plain = Outcome()
    observed = SEEN

    def __init__(self, directory: Path, **outcomes: Sequence[str]) -> None:
        self._directory = directory
        self._outcomes = {name: list(values) for name, values in outcomes.items()}
        units = [
            {"name": "noise", "kind": "generator", "what": "numpy"},
            {"name": "w", "kind": "array", "what": "float64[40]"},
            {"name": "rate", "kind": "number", "what": "0.1"},
        ]
        listed = {"step": 4, "units": units, "iterators": ["batches"]}
        (directory / HELD).mkdir()
        (directory / HELD / "differing-0.json").write_text(json.dumps(listed))

    def faulted(
        self, attempts: object, *probes: str, put: Sequence[str] = ()
    ) -> tuple[Outcome, Path]:
        left = self._outcomes.get("_".join(put), [])
        how = left.pop(0) if left else "there"
        return Outcome(fired=[how], problem="exit 1" if how == "fails" else ""), self._directory

    def difference(self, outcome: Outcome) -> RunDifference | None:
        if outcome.fired == ["gone"]:
            return None
        leaves = () if outcome.problem else (LeafDifference("w", "", "float64[1]"),)
        return RunDifference("step 2: 1 of 1 leaves differ", "run", 2, 2, leaves)


def _diagnosed(directory: Path, **outcomes: Sequence[str]) -> Diagnosis:
    directory.mkdir()
    runner: Any = FakeRunner(directory, **outcomes)
    found = ResumeDiagnosis(runner, required_restores(SEEN)[0]).find()
    assert found is not None
    return found


def test_a_cause_needs_two_equal_runs(tmp_path: Path) -> None:
    """One probe run that comes out equal by chance decides nothing, and one that fails excludes
    nothing; what is not shown is unknown, and never the data by default."""
    known = {
        "noise": "random generator", "iterators": "data position", "rate": "unsaved state",
        "w": "unsaved state",
    }  # fmt: skip
    for name, cause in known.items():
        assert _diagnosed(tmp_path / f"{name}-2", **{name: ("gone", "gone")}).cause == cause
        by_chance = _diagnosed(tmp_path / f"{name}-1", **{name: ("gone", "there")})
        assert by_chance.cause == "unknown"
        assert any("it is there in 1 of 2 runs" in line for line in by_chance.evidence)
        failed = _diagnosed(tmp_path / f"{name}-0", **{name: ("fails",)})
        assert failed.cause == "unknown"
        assert any("could not be tried: exit 1" in line for line in failed.evidence)


def test_scalars_and_schedules_come_before_weights(tmp_path: Path) -> None:
    evidence = _diagnosed(tmp_path / "none").evidence
    rate, w = (
        next(i for i, line in enumerate(evidence) if line.startswith(f"with {name} ("))
        for name in ("rate", "w")
    )
    assert rate < w


def test_what_is_needed_together_is_found(tmp_path: Path) -> None:
    both = _diagnosed(tmp_path / "both", rate_w=("gone", "gone"))
    assert both.cause == "unsaved state"
    assert both.evidence[-1] == "needed: rate, w"
    mixed = _diagnosed(tmp_path / "mixed", noise_iterators=("gone", "gone"))
    assert mixed.cause == "several"


@pytest.mark.parametrize(("equal", "repeats"), [(0.0, 2), (1 / 3, 3), (2 / 3, 8), (0.9, 8)])
def test_a_difference_that_is_rare_is_looked_for_more_often(equal: float, repeats: int) -> None:
    assert repeats_for(equal) == repeats


ENTROPY = """
import random, secrets, uuid
import numpy as np
print([secrets.token_hex(4), uuid.uuid4().hex, random.Random().random(),
       random.SystemRandom().random(), float(np.random.default_rng().random()),
       float(np.random.RandomState().rand())])
"""


def test_the_probe_for_entropy_reaches_every_source(tmp_path: Path) -> None:
    environment = dict(probe_environment(tmp_path, ("seed",)))
    first, second = (_drawn(tmp_path, environment, ENTROPY) for _ in range(2))
    assert first == second
    control = _drawn(tmp_path, {}, ENTROPY)
    assert not set(first) & set(control)


JUMPS = """
import time, datetime
from datetime import datetime as when
from time import time as now
from perdure.drill.jumping_clock import jump
before = (now(), when.now(), datetime.date.today(), time.localtime())
jump(40 * 86400.0)
after = (now(), when.now(), datetime.date.today(), time.localtime())
print([round((after[0] - before[0]) / 86400), round((after[1] - before[1]).total_seconds() / 86400),
       (after[2] - before[2]).days, round((time.mktime(after[3]) - time.mktime(before[3])) / 86400)])
"""


def test_every_clock_of_a_program_jumps(tmp_path: Path) -> None:
    environment = dict(probe_environment(tmp_path, ("jumps",)))
    assert _drawn(tmp_path, environment, JUMPS) == [40, 40, 40, 40]


def test_the_amount_of_a_jump_is_stated() -> None:
    texts = {value: _describe_act({"act": "clock", "value": value}) for value in JUMPED}
    assert texts == JUMPED
    for number in range(20):
        launches = draw_scenario(SEEN, "clock-jump", number, 0).attempts
        values = [f.value for launch in launches for f in launch.injected if f.act == "clock"]
        assert [abs(value) for value in values].count(40 * 86400.0) == 1


JUMPED = {40 * 86400.0: "clock +40 days", -3700.0: "clock -1.03 hours", 90.0: "clock +1.5 minutes"}


DIRECTORY = """
import perdure
from perdure import CheckpointManager
with CheckpointManager("run") as manager:
    manager.save(1, {"a": 5})
    manager.wait_until_finished()
    print([perdure.load_checkpoint(manager.directory)["a"]])
"""


def test_the_directory_of_a_manager_is_redirected_once(tmp_path: Path) -> None:
    where = tmp_path / "drill"
    where.mkdir()
    (where / PLAN).write_text(json.dumps({"attempt": 1, "faults": []}))
    assert _drawn(tmp_path, {DRILL: str(where)}, DIRECTORY) == [5]
    assert len(list((where / "runs").iterdir())) == 1


WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
from perdure.testing import check_run, drill
print([drill.__name__, check_run.__name__])
"""


def test_the_drill_of_a_team_needs_no_pytest(tmp_path: Path) -> None:
    assert _drawn(tmp_path, {}, WITHOUT_PYTEST) == ["drill", "check_run"]


def test_a_scenario_counts_its_faults() -> None:
    moved = Scenario(1, "x", (Launch(signal="SIGKILL"), Launch(devices=2, damage="flip")))
    assert moved.faults == 3
