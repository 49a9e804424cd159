"""The probes of the drill inside a program, and what a diagnosis concludes from their runs."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from perdure.drill.causes import NONDETERMINISM_PROBES, Diagnosis, diagnosis
from perdure.drill.compare import LeafDifference, RunDifference, compare
from perdure.drill.drill import _Drill, _estimate
from perdure.drill.drill_report import DrillOptions, DrillReport, DrillRow, TextReporter
from perdure.drill.fault_injection import PLAN
from perdure.drill.fault_plan import LAST, draw_scenario, required_restores
from perdure.drill.frozen import freeze
from perdure.drill.observed import Observed
from perdure.drill.probes import probe_environment
from perdure.drill.resume_probe import HELD, ITERATORS
from perdure.drill.run_diagnosis import ResumeDiagnosis, diagnose_run
from perdure.drill.scenario import (
    Commit,
    Fault,
    FiredFault,
    Launch,
    LaunchOutcome,
    Outcome,
    Scenario,
    WrittenFile,
)
from perdure.drill.undisturbed_diagnosis import Probes, diagnose_undisturbed, repeats_for
from perdure.report.run_report import render_drill
from perdure.store.drill_hook import DRILL

SEEN = Observed(
    seconds=3.0,
    first_step_s=1.0,
    steps=tuple(range(1, 41)),
    points={"manifest.sync": 10},
    early={},
    silence_s=0.1,
    sequence=tuple(range(4, 41, 4)),
)


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
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
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


class Unreadable:
    """As a variable of Keras on JAX while `fit` trains, of which even a copy fails."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        if self.state is None:
            raise TypeError("'NoneType' object is not callable")
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def test_what_cannot_be_read_is_left_out_of_a_diagnosis() -> None:
    assert freeze(Unreadable()) is None
    assert freeze(Unreadable(3)) is not None, "the control"


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
            {"name": "noise", "kind": "generator", "what": "numpy", "seed": "same"},
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


def test_memory_is_tried_before_the_probes_that_move_it() -> None:
    """A clock that was replaced left other bytes in free memory, and was named in 5 of 5 drills."""
    assert NONDETERMINISM_PROBES[0][1] == "memory"


@pytest.mark.parametrize(("equal", "repeats"), [(0.0, 3), (0.125, 3), (0.25, 4), (0.9, 10)])
def test_a_difference_that_is_rare_is_looked_for_more_often(equal: float, repeats: int) -> None:
    assert repeats_for(equal) == repeats


class Undisturbed:
    """Runs nothing: each further run has the next of `values` as its end, and one under a probe has
    the value that `steady` has for it."""

    observed = SEEN

    def __init__(self, *values: str, outside: bool = False, **steady: str) -> None:
        self.plain, *self._later = map(self._ended, values)
        self._steady = steady
        if outside:
            self.plain.files["/cache"] = WrittenFile("/cache", is_export=False, is_outside=True)

    @staticmethod
    def _ended(value: str) -> Outcome:
        return Outcome(commits=[Commit(f"run {value}", 1, 1, "", "f")])

    def undisturbed(self, *probes: str) -> Outcome:
        if len(probes) == 1 and probes[0] in self._steady:
            return self._ended(self._steady[probes[0]])
        return self._later.pop(0)

    def difference(self, outcome: Outcome) -> RunDifference | None:
        return compare(self.plain, outcome)[1]

    def diagnosed(self) -> Diagnosis:
        second = self.undisturbed()
        seen = self.difference(second)
        assert seen is not None
        runner: Any = self
        return diagnose_undisturbed(runner, second, seen)


def test_what_the_first_run_has_left_is_told_from_what_each_run_does_otherwise() -> None:
    """The runs after the first are compared with each other, too."""
    left = Undisturbed(*"abbbbbb", outside=True, memory="b").diagnosed()
    assert left.cause == "left over"
    assert "/cache" in left.evidence[-1]
    assert Undisturbed(*"abbbbbb", memory="b").diagnosed().cause == "unknown", "no such file"
    # The same beginning by chance: a set of two objects, in the order of their addresses.
    chance = Undisturbed(*"abbbabbababababab", *"ab" * 9, outside=True, addresses="a")
    assert chance.diagnosed().cause == "addresses"


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


THREADS = """
import secrets, threading
if TAKES:
    other = threading.Thread(target=lambda: secrets.token_hex(4))
    other.start()
    other.join()
print([secrets.token_hex(4)])
"""


def test_a_thread_takes_no_entropy_from_another(tmp_path: Path) -> None:
    """A save in the background draws names for its files, sooner or later."""
    environment = dict(probe_environment(tmp_path, ("seed",)))
    programs = [THREADS.replace("TAKES", takes) for takes in ("True", "False")]
    first, second = (_drawn(tmp_path, environment, program) for program in programs)
    assert first == second


@pytest.mark.parametrize("probe", ["addresses", "process"])
def test_objects_have_the_same_addresses_in_each_process(probe: str, tmp_path: Path) -> None:
    environment = dict(probe_environment(tmp_path, (probe,)))
    drawn = [_drawn(tmp_path, environment, "print([id(object())])") for _ in range(3)]
    assert (drawn[0] == drawn[1] == drawn[2]) == (probe == "addresses")


CACHED = """
import functools, threading, time

@functools.cache
def counted(key, calls=[0]):
    calls[0] += 1
    return calls[0]

@functools.lru_cache(maxsize=2)
def counted_too(key, calls=[0]):
    calls[0] += 1
    return calls[0]

done = []
thread = threading.Thread(target=lambda: done.append(1))
thread.start()
time.sleep(0.1)
print([counted(1), counted(1), counted_too(1), counted_too(1), len(done)])
"""


@pytest.mark.parametrize(
    ("probe", "seen"),
    [("no caches", [1, 2, 1, 2, 1]), ("late threads", [1, 1, 1, 1, 0]), ("hash", [1, 1, 1, 1, 1])],
)
def test_caches_keep_nothing_and_threads_begin_late(
    probe: str, seen: list[int], tmp_path: Path
) -> None:
    assert _drawn(tmp_path, dict(probe_environment(tmp_path, (probe,))), CACHED) == seen


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


LIBRARY = """
import datetime
from datetime import datetime as when
KINDS = (datetime.datetime, datetime.date, when)
"""

BESIDE_A_LIBRARY = """
import datetime, library
real = type(datetime.datetime(2026, 1, 1)).__mro__[1]
assert library.KINDS == (real, datetime.date.__mro__[1], real), library.KINDS
assert datetime.datetime is not real
assert isinstance(library.when.now(), datetime.datetime)
assert not isinstance(1, datetime.datetime)
"""


@pytest.mark.parametrize("probe", ["jumps", "clock"])
def test_a_library_has_the_classes_of_the_module_datetime(tmp_path: Path, probe: str) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "library.py").write_text(LIBRARY)
    environment = dict(probe_environment(tmp_path, (probe,)))
    environment["PYTHONPATH"] += f":{installed}"
    program = tmp_path / "program.py"
    program.write_text(BESIDE_A_LIBRARY)
    subprocess.run([sys.executable, str(program)], env={**os.environ, **environment}, check=True)


def test_every_clock_of_a_program_jumps(tmp_path: Path) -> None:
    environment = dict(probe_environment(tmp_path, ("jumps",)))
    assert _drawn(tmp_path, environment, JUMPS) == [40, 40, 40, 40]


def test_the_amount_of_a_jump_is_stated() -> None:
    texts = {value: Fault("open", "clock", value=value).describe_act() for value in JUMPED}
    assert texts == JUMPED
    for number in range(20):
        launches = draw_scenario(SEEN, "clock-jump", number, 0).attempts
        jumps = [[f for f in each.injected if f.act == "clock"] for each in launches]
        assert [abs(f.value) == 40 * 86400.0 for (f,) in jumps] == [False, True]
        assert jumps[1][0].point == "open", "all steps that follow have the other date"


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


CLOCKS = """
import queue, sys, threading, time
from perdure.drill.jumping_clock import count_time, install_jumps, jump, run_faster

library = {"__name__": "library"}
exec(compile("import time; read = time.perf_counter", threading.__file__, "exec"), library)
read = compile("[time.monotonic(), time.perf_counter_ns() / 1e9, "
    "time.clock_gettime(time.CLOCK_MONOTONIC)]", "own.py", "eval")
other = compile("time.monotonic()", threading.__file__, "eval")
used = []
if sys.argv[1] == "jump":
    install_jumps()
    before, wall, theirs = eval(read), time.time(), eval(other)
    jump(-3600.0)
    done = [b - a for a, b in zip(before, eval(read))]
    print([round(x / 60) for x in done], round((time.time() - wall) / 60), eval(other) - theirs < 600)
elif sys.argv[1] == "fast":
    real = time.monotonic()
    run_faster(lambda: used.append(1))
    start = real * 60
    print([eval(read)[0] >= start], eval(other) < start, bool(used))
else:
    count_time()
    a, b = eval(read), eval(read)
    print([a < b, b[0] < 1], time.clock_gettime(time.CLOCK_REALTIME) < 1_700_000_001, True)
"""


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("jump", "[60, 60, 60] -60 True"),
        ("fast", "[True] True True"),
        ("count", "[True, True] True True"),
    ],
)
def test_the_timers_of_the_program_change_and_those_of_libraries_do_not(
    how: str, seen: str
) -> None:
    line = [sys.executable, "-c", CLOCKS, how]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == seen, done.stderr


class NoRunner:
    """Has an undisturbed run, and runs nothing."""

    plain = Outcome(commits=[Commit("run", 12, 1, "", "f")])


def test_an_exit_with_0_after_a_signal_is_read_off_the_run() -> None:
    term = FiredFault("SIGTERM after 1.00 s", 1.0)
    hit = LaunchOutcome("exit 0", 2.0, 1, None, faults=[term])
    outcome = Outcome(attempts=[hit], commits=[Commit("run", 5, 1, "", "f")])
    seen = RunDifference("the end: expected step 12 in run, found step 5", "run")
    runner: Any = NoRunner()
    scenario = Scenario(1, "sigterm", (Launch(signal="SIGTERM", after_s=1.0),))
    found = diagnose_run(runner, scenario, outcome, seen)
    assert found.cause == "early exit"
    assert "it exited with 0, 7 steps before its end" in found.evidence[0]
    assert "75" in found.advice
    # Without the signal, further runs have to show it.
    with pytest.raises(AttributeError):
        diagnose_run(runner, scenario, Outcome(attempts=[replace(hit, faults=[])]), seen)


def test_a_loop_that_makes_all_its_steps_once_more_is_read_off_the_run() -> None:
    outcome = Outcome(commits=[Commit("run", 17, 2, "", "f")])
    seen = RunDifference("the end: expected step 12 in run, found step 17", "run")
    runner: Any = NoRunner()
    scenario = Scenario(1, "kill-after-commit", (Launch(),))
    found = diagnose_run(runner, scenario, outcome, seen)
    assert found.cause == "counted again"
    assert "range(loader.epoch, epochs)" in found.advice
    # With leaves that differ, or an end that is not beyond, further runs have to show it.
    for leaves, end in (((LeafDifference("w", "1", "2"),), 17), ((), 7)):
        outcome = Outcome(commits=[Commit("run", end, 2, "", "f")])
        with pytest.raises(AttributeError):
            diagnose_run(runner, scenario, outcome, replace(seen, leaves=leaves))


@pytest.mark.parametrize(("again", "cause"), [("exit 1", "end"), ("", "unknown")])
def test_a_wrong_end_after_the_last_checkpoint_is_tried_twice(again: str, cause: str) -> None:
    class Again(NoRunner):
        def faulted(self, attempts: object) -> tuple[Outcome, Path]:
            return Outcome(problem=again), Path()

        def difference(self, outcome: Outcome) -> None:
            return None

    runner: Any = Again()
    scenario = Scenario(1, "kill-after-commit", (Launch(),), LAST)
    found = diagnose_run(runner, scenario, Outcome(problem="exit 1"), None)
    assert found.cause == cause


def test_a_cause_is_claimed_only_for_the_run_in_which_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one leaf may have two causes; what ends otherwise is looked into again."""
    calls: list[int] = []

    def diagnosed(_: object, scenario: Scenario, *__: object) -> Diagnosis:
        calls.append(scenario.number)
        return diagnosis("unsaved state", "velocity put back")

    monkeypatch.setattr("perdure.drill.drill.diagnose_run", diagnosed)
    leaf = (LeafDifference("w", "1", "2"),)
    differences = [
        RunDifference("step 2: 1 of 1 leaves differ", "run", 2, 2, leaf),
        RunDifference("step 9: 1 of 1 leaves differ", "run", 9, 2, leaf),
        RunDifference("the end: expected step 9 in run, found step 5", "run"),
    ]
    rows = [
        DrillRow(Scenario(n, "sigkill", (Launch(signal="SIGKILL"),)), Outcome(), 1, each)
        for n, each in enumerate(differences, 1)
    ]
    report = DrillReport(("python",), DrillOptions(), SEEN, Outcome(), rows)
    program: Any = SimpleNamespace(command=("python",))
    drill = _Drill(program, DrillOptions(), tmp_path, lambda *_: None)
    unused: Any = None
    drill._diagnose(unused, report)
    assert calls == [1, 3]
    said = "like run 1: the same leaves differ; its cause was not looked for"
    found = report.document()
    assert [run["diagnosis"]["cause"] for run in found["runs"]] == [
        "unsaved state",
        "not looked for",
        "unsaved state",
    ]
    assert found["runs"][1]["diagnosis"]["what"] == said
    assert said in render_drill(found)
    text = io.StringIO()
    TextReporter(Console(file=text, width=200)).summary(found)
    assert said in text.getvalue()
    assert text.getvalue().count("velocity put back") == 1


def test_a_search_for_a_cause_shows_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is without it, and says so."""
    shown: list[str] = []
    monkeypatch.setattr("perdure.drill.undisturbed_diagnosis.execute", lambda *_: Outcome())
    unused: Any = None
    runner = Probes(unused, tmp_path, Outcome(), SEEN, lambda what, _: shown.append(what))
    runner.faulted(())
    runner.faulted(())
    assert shown == ["further run 1", "further run 2"]
    assert _estimate([], SEEN) == "0 faulted runs, about 0 s without a search for causes"
