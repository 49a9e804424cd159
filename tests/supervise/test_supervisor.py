"""A run: what workers are told, how they are watched, what follows a failure, that nothing is left.

The workers are small programs without a framework; test_real.py has one with.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from supervised import HOLDS, Full, LoopObserver, Run, cli, environment, gone, held, loop, pids

from perdure.errors import LaunchError
from perdure.runtime.heartbeats import Beat
from perdure.runtime.ports import free_ports
from perdure.supervise import (
    Limits,
    Observer,
    RunOptions,
    Supervisor,
    attempt,
    silence,
    supervisor,
)
from perdure.supervise.attempts_log import FILE, AttemptRecord
from perdure.supervise.console import Console
from perdure.supervise.orphan_reaper import MARK, marked
from perdure.supervise.worker import Worker
from perdure.supervise.worker_environment import accelerators

KILL = """
def fault(step):
    if ATTEMPT == 1 and step == 8:
        if RANK == "0":
            hold()
        while not Path("step-0").exists():  # the other one has got as far
            pass
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- what workers are told

TELL = """
import json, os
names = ("RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT JAX_COORDINATOR_ADDRESS TF_CONFIG "
    "JAX_NUM_PROCESSES JAX_PROCESS_ID PERDURE_ATTEMPT JAX_NUM_CPU_DEVICES TORCHELASTIC_USE_AGENT_STORE")
print(json.dumps({name: os.environ.get(name) for name in names.split()}))
raise SystemExit(75 if os.environ["PERDURE_ATTEMPT"] == "1" else 0)
"""


def told(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line.partition("] ")[2]) for line in run.out.getvalue().splitlines()]


def test_the_three_descriptions_agree_and_every_attempt_has_its_own_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from perdure.distribute import resolve

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "9")
    run = Run(TELL, workers=3, devices_per_worker=2)
    assert run.kinds == ["preempted", "done"]
    ports = set()
    for found in told(run):
        environ = {name: value for name, value in found.items() if value is not None}
        places = {
            (one.process_id, one.num_processes)
            for name in ("tf_config", "jax", "torchrun")
            if (one := resolve(name, environ))
        }
        assert places == {(int(found["RANK"]), 3)}
        assert resolve(None, environ).num_processes == 3
        assert found["JAX_NUM_CPU_DEVICES"] == "2"
        assert found["TORCHELASTIC_USE_AGENT_STORE"] is None
        ports.add((found["PERDURE_ATTEMPT"], found["MASTER_PORT"]))
    assert len(ports) == len({port for _, port in ports}) == 2


def test_a_worker_that_is_alone_has_nobody_to_meet() -> None:
    found = told(Run(TELL))[0]
    assert (found["RANK"], found["WORLD_SIZE"]) == ("0", "1")
    assert found["TF_CONFIG"] is found["JAX_COORDINATOR_ADDRESS"] is None


# ---------------------------------------------------------------- failures


def test_a_killed_worker_ends_the_others_and_all_start_again() -> None:
    run = Run(loop(KILL), workers=2)
    first, second = run.summary.attempts
    assert (first.kind, first.cause) == ("killed", "worker 1: SIGKILL")
    assert first.statuses == (-9, -9)
    assert (first.start, first.end, second.start, second.end) == (0, 7, 5, 20)
    assert run.summary.repeated == (2, 0)
    assert (run.summary.status, run.summary.reason) == (0, "finished")
    assert run.summary.goodput is not None
    assert 0 < run.summary.goodput < 1
    assert sorted(path.name for path in Path("logs").iterdir()) == [
        *(f"attempt-{attempt}-worker-{worker}.log" for attempt in (1, 2) for worker in (0, 1)),
        FILE,
    ]
    assert "attempt 1 ended: worker 1: SIGKILL; starting again" in run.err.getvalue()
    document = run.summary.document()
    assert (document["restarts"], document["failures"], document["repeated_steps"]) == (1, 1, 2)


def test_75_is_no_failure() -> None:
    fault = """
def fault(step):
    if ATTEMPT < 4 and step == 5 * ATTEMPT + 1:
        sys.exit(75)
"""
    run = Run(loop(fault), max_restarts=0)
    assert run.kinds == ["preempted"] * 3 + ["done"]
    assert run.summary.document()["failures"] == 0


def test_failures_beyond_the_restarts_end_it() -> None:
    run = Run(loop("def fault(step):\n  if step == 5 + ATTEMPT: sys.exit(3)"), max_restarts=1)
    assert run.kinds == ["failed", "failed"]
    assert run.summary.status == 1
    assert run.summary.reason == ("2 failures, and 1 restart is allowed (last: worker 0: exit 3)")


def test_a_crash_at_one_step_three_times_in_a_row_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Supervisor, "_sleep", lambda _, seconds: waits.append(seconds))
    run = Run(loop("def fault(step):\n  if step == 8: sys.exit('a full disk')"))
    assert run.kinds == ["failed"] * 3
    assert run.summary.status == 1
    assert run.summary.reason == (
        "it failed 3 times in a row at step 7 (last: worker 0: exit 1 (last line: a full disk))"
    )
    assert waits == [0.0, 0.0]  # the first attempt without progress is followed at once
    assert "a full disk" in run.out.getvalue()


GREETING = "[Gloo] Rank 0 is connected to 1 peer ranks"


@pytest.mark.parametrize(
    ("end", "cause", "last_line"),
    [
        ("raise ValueError('no such file')", "exit 1: ValueError: no such file", ""),
        ("sys.exit(3)", "exit 3", GREETING),
        ("os.kill(os.getpid(), 9)", "SIGKILL", GREETING),
        (
            "traceback(); os.kill(os.getpid(), 9)",
            "SIGKILL",
            GREETING,
        ),  # of an error that was caught
    ],
)
def test_only_the_exception_of_a_traceback_is_a_cause(end: str, cause: str, last_line: str) -> None:
    """What a library wrote last, also after the traceback, is shown as what it is."""
    fault = f"""
import atexit
def traceback():
    import traceback
    try:
        {{}}["x"]
    except KeyError:
        traceback.print_exc()
    print({GREETING!r}, flush=True)
atexit.register(print, {GREETING!r})
def fault(step):
    if ATTEMPT == 1 and step == 8:
        print({GREETING!r}, flush=True)
        {end}
"""
    run = Run(loop(fault))
    first = run.summary.attempts[0]
    said = f"worker 0: {cause}" + (f" (last line: {last_line})" if last_line else "")
    assert first.explanation == said
    assert f"attempt 1 ended: {said}; starting again" in run.err.getvalue()


def test_a_traceback_of_a_rank_has_its_exception(tmp_path: Path) -> None:
    text = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "train.py", line 9, in <module>\n'
        "[rank1]:     step()\n[rank1]:     ~~~~^^\n[rank1]: RuntimeError: NaN in the loss\n"
    )
    run = Run(f"print({text!r}); raise SystemExit(1)")
    assert run.summary.attempts[0].exception == "RuntimeError: NaN in the loss"


def test_a_program_that_fails_before_its_first_step_is_not_started_again() -> None:
    run = Run("raise OSError('Read-only file system')", workers=2)
    assert run.kinds == ["failed"]
    assert "failed before its first step (worker " in run.summary.reason
    assert "Read-only file system" in run.out.getvalue()


def test_a_port_in_use_is_told_and_another_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, socket
if os.environ["RANK"] == "0":
    socket.socket().bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
"""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        calls: list[int] = []

        def ports(count: int) -> list[int]:
            calls.append(count)
            return [port, *free_ports(count - 1)] if len(calls) == 1 else free_ports(count)

        monkeypatch.setattr(supervisor, "free_ports", ports)
        run = Run(code, workers=2)
    assert run.kinds == ["port", "done"]
    assert f"port {port} is in use" in run.summary.attempts[0].cause


# ---------------------------------------------------------------- silence


class Skipping(LoopObserver):
    """Skips 100 s of the supervisor's clock while all workers compile, and when worker 0 hangs.

    A busy machine may stop any worker for as long as a test can wait, so real time must not count.
    """

    compiling = 0  # how often the supervisor has looked at workers that compile
    skipped = 0.0

    def clock(self) -> float:
        return super().clock() + self.skipped

    def look(self) -> None:
        running = [worker for worker in self.workers_started if worker.status is None]
        beats = [worker.beat for worker in running]
        if beats and all(beat is not None and beat.phase == "compile" for beat in beats):
            self.compiling += 1
            if self.compiling > 3:
                for worker in running:
                    worker.send(signal.SIGUSR1)
        else:
            self.compiling = 0
        self.skipped = 100.0 if 0 < self.compiling <= 3 or self._only_0_hangs(running) else 0.0

    def _only_0_hangs(self, running: list[Worker]) -> bool:
        if [worker.index for worker in running] != [0] or running[0].attempt != 1:
            return False
        beat = running[0].beat
        return beat is not None and beat.step == 7


def test_a_hang_is_noticed_at_the_limit_of_its_phase_and_compiling_is_none() -> None:
    fault = """
def fault(step):
    if step == start + 1:
        await_observer()
    if ATTEMPT == 1 and step == 8 and RANK == "0":
        hold()
"""
    run = Run(loop(fault), Skipping(), workers=2, limits=Limits(step=60))
    assert run.kinds == ["hung", "done"]
    cause = run.summary.attempts[0].cause
    assert cause.startswith("worker 0: no heartbeat for 10")
    assert cause.endswith("in the phase step, limit 60 s")
    # The control: with a limit for the compiler too, it counts as hung, each time.
    Path("step-0").unlink()
    Path("step-1").unlink()
    strict = Run(loop(fault), limits=Limits(compile=0.1), max_restarts=0)
    assert "in the phase compile, limit 0.1 s" in strict.summary.attempts[0].cause


def test_a_loop_that_computes_between_two_heartbeats_is_not_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(silence.DEFAULT_S, "step", 0.3)
    # Long enough that a busy machine lets a process that computes have its share in it.
    monkeypatch.setattr(silence, "WINDOW_S", 0.5)
    monkeypatch.setattr(silence, "BUSY", 1e6)
    # An epoch without a heartbeat: 1 s of work, which is more than the limit and a window.
    work = """
import time
def fault(step):
    begun = time.process_time()
    while step == 3 and time.process_time() < begun + 1:
        pass
"""
    healthy = Run(loop(work))
    assert healthy.kinds == ["done"]
    # The control: a loop that waits there without computing is hung.
    Path("step-0").unlink()
    waiting = "def fault(step):\n    if ATTEMPT == 1 and step == 3: hold()"
    hung = Run(loop(waiting))
    assert hung.kinds == ["hung", "done"]
    assert "computes" not in hung.summary.attempts[0].cause


def test_a_hang_states_the_limit_that_was_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a worker that computes; `test_silence.py` has the limits themselves."""

    def exceeded(_: Any, worker: Worker, beat: Beat, now: float) -> float | None:
        return 1800.0 if worker.attempt == 1 and beat.step == 2 else None

    monkeypatch.setattr(silence.Silence, "exceeded_limit", exceeded)
    run = Run(loop("def fault(step):\n    if ATTEMPT == 1 and step == 3: hold()"))
    assert run.kinds == ["hung", "done"]
    cause = run.summary.attempts[0].cause
    assert cause.endswith("in the phase step, limit 1800 s for a worker that computes")


class Stop(Observer):
    """SIGSTOP to one worker, once, at a step."""

    fired = 0

    def beat(self, worker: Worker, beat: Beat) -> None:
        if not self.fired and worker.index == 1 and (beat.step or 0) >= 3:
            self.fired += 1
            worker.send(signal.SIGSTOP)


def test_a_stopped_worker_is_noticed_within_its_limit() -> None:
    fault = """
def fault(step):
    if ATTEMPT == 1 and step == 4:
        hold()
"""
    stop = Stop()
    run = Run(loop(fault), stop, workers=2, limits=Limits(stopped=0.2))
    assert stop.fired == 1
    assert run.kinds == ["stopped", "done"]
    assert "worker 1: stopped (SIGSTOP) for 0.2 s, limit 0.2 s" in run.summary.attempts[0].cause


# ---------------------------------------------------------------- nothing is left behind

CHILD = """
def fault(step):
    if step == 1:
        subprocess.Popen(["setsid", "sleep", "1000"])
    if ATTEMPT == 1 and step == 2:
        hold()
"""


class Marks(Observer):
    """How many processes of the run there are when a worker is about to die, and afterwards."""

    def __init__(self) -> None:
        self.mark = ""
        self.during: list[int] = []
        self.after: list[int] = []

    def beat(self, worker: Worker, beat: Beat) -> None:
        self.mark = self.mark or environment(worker)[MARK]
        if beat.step and worker.attempt == 1:
            self.during.append(len(marked(self.mark)))
            worker.send(signal.SIGKILL)

    def ended(self, attempt: AttemptRecord) -> AttemptRecord:
        self.after.append(len(marked(self.mark)))
        return attempt


def test_children_that_left_their_session_are_ended_with_their_attempt() -> None:
    marks = Marks()
    run = Run(loop(CHILD), marks)
    assert run.kinds == ["killed", "done"]
    assert marks.during == [2]  # the control: the child is seen while it lives
    assert marks.after == [0, 0]
    assert run.summary.left_behind == 0


def reaper_of(run: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    (found,) = (
        p for p in children if b"orphan_reaper.py" in Path(f"/proc/{p}/cmdline").read_bytes()
    )
    return int(found)


def test_a_killed_supervisor_leaves_nobody_behind_and_can_be_started_again() -> None:
    run = cli(code=HOLDS.replace("STOP", ""))
    scratch, found = held(run)
    found.append(reaper_of(run))
    assert not any(gone(pid, 0) for pid in found)
    assert scratch.is_dir()
    run.kill()
    run.communicate()
    assert all(gone(pid) for pid in found)
    assert not scratch.exists()
    again = cli(code="print('here')")
    assert again.communicate()[0] == "[0] here\n"
    assert again.returncode == 0


@pytest.mark.parametrize(
    ("number", "stop", "status"),
    [
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", 75),
        (signal.SIGHUP, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", 75),
        # Ctrl-C asks for the same as SIGTERM too, but a program without a handler gets it as it is.
        (signal.SIGINT, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", 75),
        (signal.SIGTERM, "", 143),
        (signal.SIGINT, "", 130),
        (signal.SIGINT, "signal.signal(signal.SIGINT, lambda *_: sys.exit(75))", 75),
        (signal.SIGUSR1, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", 75),
        (signal.SIGUSR2, "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))", 75),
        (signal.SIGQUIT, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", 75),
    ],
)
def test_signals_are_passed_on(number: int, stop: str, status: int) -> None:
    # Where the tests themselves run under nohup, their children would ignore SIGHUP.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        run = cli(code=HOLDS.replace("STOP", stop))
    finally:
        signal.signal(number, before)
    found = pids(run)
    run.send_signal(number)
    _, err = run.communicate()
    assert run.returncode == status
    assert all(gone(pid) for pid in found)
    # The end of a terminal and Ctrl-\\ ask for the same as SIGTERM.
    as_term = number in (signal.SIGHUP, signal.SIGQUIT)
    asked = signal.SIGTERM if as_term else signal.Signals(number)
    assert asked.name in err


def test_a_second_signal_kills_the_workers() -> None:
    run = cli(code=HOLDS.replace("STOP", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    found = pids(run)
    # The worker ignores SIGTERM, so that it is sent no SIGINT only if it counts as one that handles it.
    run.send_signal(signal.SIGTERM)
    assert run.stderr is not None
    asked = run.stderr.readline()
    assert "SIGTERM: the workers are asked to save and exit, within 60 s" in asked
    assert not any(gone(pid, 0) for pid in found)
    run.send_signal(signal.SIGINT)
    run.communicate()
    assert run.returncode == 128 + signal.SIGKILL
    assert all(gone(pid) for pid in found)


def test_two_signals_at_once_are_called_a_kill() -> None:
    code = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getppid(), signal.SIGTERM)
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""
    run = cli(code=code)
    _, err = run.communicate()
    assert run.returncode == 128 + signal.SIGKILL
    assert err.count("a second signal: the workers are killed without a save") == 1
    assert "SIGKILL: the workers are asked" not in err
    assert re.search("ended by SIG(TERM|INT) and a second signal, which killed the workers", err)
    assert "killed at a second signal" in err


def test_a_signal_before_the_first_worker_ends_the_run_in_order() -> None:
    code = """
import os, signal
from perdure.supervise import Supervisor, supervisor
class Early(supervisor.AttemptsLog):
    def __init__(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        super().__init__(*arguments)
supervisor.AttemptsLog = Early
summary = Supervisor(["touch", "started"]).run()
print(summary.status, len(summary.attempts))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "143 0\n"
    assert "perdure: SIGTERM: no worker was started yet" in run.stderr
    assert not Path("started").exists()


def test_a_program_that_a_shell_saw_killed_was_killed() -> None:
    code = "import os; raise SystemExit(137 * (os.environ['PERDURE_ATTEMPT'] == '1'))"
    run = Run(code)
    assert run.kinds == ["killed", "done"]
    assert run.summary.attempts[0].cause == "worker 0: exit 137 (SIGKILL in a shell)"
    # The control: another status before the first step is a fault of the program.
    assert Run(code.replace("137", "127")).kinds == ["failed"]


def test_time_in_which_the_supervisor_was_stopped_is_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sleeps(LoopObserver):
        slept = 0.0

        def clock(self) -> float:
            return super().clock() + self.slept

        def look(self) -> None:
            for worker in self.workers_started:
                if not self.slept and worker.beat is not None and worker.beat.step == 7:
                    self.slept = 1000.0
                    worker.send(signal.SIGUSR1)

    fault = """
def fault(step):
    if step == 8:
        await_observer()
        import select
        select.select([], [], [], 0.1)  # the supervisor looks while this worker is silent
"""
    sleeps = Sleeps()
    stopped = types.SimpleNamespace(monotonic=lambda: time.monotonic() + sleeps.slept)
    with monkeypatch.context() as patch:
        patch.setattr(attempt, "time", stopped)
        assert Run(loop(fault), sleeps, limits=Limits(step=60)).kinds == ["done"]
    assert sleeps.slept == 1000.0
    # The control: a worker that is silent while the supervisor runs is hung.
    Path("step-0").unlink()
    awake = Run(loop(fault), Sleeps(), limits=Limits(step=60), max_restarts=0)
    assert awake.kinds == ["hung"]


def test_workers_that_cannot_save_without_one_that_failed_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Asks(LoopObserver):
        fired = 0

        def look(self) -> None:
            reached = [w for w in self.workers_started if w.beat and w.beat.step == 7]
            if len(reached) == 2 and not self.fired:
                self.fired += 1
                self.supervisor._signal = signal.SIGTERM

    monkeypatch.setattr(attempt, "FAILED_EXIT_S", 0.1)
    fault = """
if RANK == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def fault(step):
    if step == 8:
        hold()
"""
    asks = Asks()
    run = Run(loop(fault), asks, workers=2, grace=1000)
    assert asks.fired == 1
    assert run.kinds == ["ended"]
    assert run.summary.attempts[0].cause == (
        "workers [0] were asked to exit and still ran 0.1 s later (worker 1: SIGTERM)"
    )


# ---------------------------------------------------------------- warm workers

WARM = """
import os, sys
print("colorsys" in sys.modules, __name__, sys.argv, sys.path[0], os.environ["PERDURE_ATTEMPT"])
"""
HOLDS_AT_8 = """
def fault(step):
    if ATTEMPT == 1 and step > 8:
        hold()
"""


class KillOnceWarm(LoopObserver):
    """SIGKILL to the first worker, at step 8, once it has a warm worker."""

    fired = False

    def look(self) -> None:
        for worker in self.workers_started[:1]:
            if self.fired or worker.beat is None or worker.beat.step != 8:
                continue
            if len(marked(environment(worker)[MARK])) == 2:
                self.fired = True
                worker.send(signal.SIGKILL)


@pytest.mark.parametrize("form", ["script", "module"])
def test_a_warm_worker_takes_over_as_python_would_have_started_it(form: str) -> None:
    Path("train.py").write_text(WARM + loop(HOLDS_AT_8))
    how = ["train.py"] if form == "script" else ["-m", "train"]
    out, observer = io.StringIO(), KillOnceWarm()
    summary = Supervisor(
        [sys.executable, *how, "--epochs", "3"],
        RunOptions(log_directory=Path("logs"), poll=0.01, warm=("colorsys",)),
        console=Console(out, io.StringIO()),
        observer=observer,
        clock=observer.clock,
    ).run()
    assert [each.kind for each in summary.attempts] == ["killed", "done"]
    assert (summary.repeated, summary.left_behind) == ((3, 0), 0)
    first, second = out.getvalue().splitlines()
    # The control: the first worker was started cold. All else is the same.
    assert first.startswith("[0] False __main__")
    assert second == first.replace("False", "True", 1)[:-1] + "2"


class KillOnceWarmWorkerEnded(LoopObserver):
    """SIGKILL to the first worker once its warm worker has ended."""

    warm_workers: Any = None

    def look(self) -> None:
        process = self.warm_workers._ready.get(0)
        for worker in self.workers_started[:1]:
            if worker.status is None and process is not None and process.poll() is not None:
                worker.send(signal.SIGKILL)


def test_a_warm_worker_that_cannot_import_is_reported() -> None:
    Path("train.py").write_text(WARM + loop(HOLDS_AT_8))
    observer, err = KillOnceWarmWorkerEnded(), io.StringIO()
    run = Supervisor(
        [sys.executable, "train.py"],
        RunOptions(log_directory=Path("logs"), poll=0.01, warm=("no_such_module",)),
        console=Console(io.StringIO(), err),
        observer=observer,
        clock=observer.clock,
    )
    observer.warm_workers = run._warm
    assert [each.kind for each in run.run().attempts] == ["killed", "done"]
    assert (
        "the warm worker of place 0 ended while it imported no_such_module: Mod" in err.getvalue()
    )


def test_a_warm_worker_that_imported_under_other_variables_is_not_used() -> None:
    class Other(KillOnceWarm):
        def environment(self, attempt: int, worker: int) -> Mapping[str, str]:
            return {"JAX_NUM_CPU_DEVICES": str(attempt)}

    Path("train.py").write_text(WARM + loop(HOLDS_AT_8))
    out, observer = io.StringIO(), Other()
    Supervisor(
        [sys.executable, "train.py"],
        RunOptions(log_directory=Path("logs"), poll=0.01, warm=("colorsys",)),
        console=Console(out, io.StringIO()),
        observer=observer,
        clock=observer.clock,
    ).run()
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["False", "False"]


# ---------------------------------------------------------------- elastic

ELASTIC = """
import time
broken = Path("broken")
if RANK == "1" and broken.exists():
    sys.exit(1)
if os.environ["WORLD_SIZE"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: (done.write_text(str(step)), sys.exit(75)))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
def fault(step):
    if os.environ["WORLD_SIZE"] == "1" and step == 8:
        broken.unlink()  # from here on a larger group gets on
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        hold()  # until it is asked to leave, for the larger group
    if os.environ["WORLD_SIZE"] == "2" and broken.exists():
        hold()
"""


def test_a_worker_that_does_not_come_back_is_left_out_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "COMMON_FAILURE_S", 0.2)
    Path("broken").touch()
    run = Run(loop(ELASTIC), workers=2, elastic=(1, 2), return_s=0.2, max_restarts=2)
    assert [each.workers for each in run.summary.attempts] == [2, 2, 1, 2]
    assert run.kinds == ["failed", "failed", "resized", "done"]
    assert "the worker in place 1 does not come back; continuing with 1 of 2" in run.err.getvalue()


LEAVES = """
signal.signal(signal.SIGTERM, HOW)
def fault(step):
    if ATTEMPT == 1 and step == 8:
        hold()  # until it is asked to leave, for the larger group
"""


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ("lambda *_: sys.exit(75)", ["resized", "done"]),
        ("lambda *_: sys.exit(0)", ["done"]),
        ("signal.SIG_DFL", ["killed", "done"]),
    ],
)
def test_only_75_makes_room_for_a_larger_group(
    how: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "_should_grow", lambda self: not self._attempts)
    run = Run(loop(LEAVES.replace("HOW", how)), workers=2, elastic=(1, 2))
    assert run.kinds == kinds
    assert run.summary.status == 0


def test_a_program_that_fails_in_all_places_is_not_tried_with_fewer() -> None:
    run = Run("raise SystemExit(1)", workers=3, elastic=(1, 3))
    assert run.kinds == ["failed"]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "expected a command after --"),
        (["no-such-command"], "no-such-command: no such command"),
        ([sys.executable, "nowhere.py"], "nowhere.py: no such file"),
    ],
)
def test_a_command_that_cannot_start_is_refused(command: list[str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Supervisor(command)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RunOptions(workers=0), "workers: expected at least 1, found 0"),
        (lambda: RunOptions(max_restarts=-1), "max_restarts: expected at least 0, found -1"),
        (lambda: RunOptions(devices_per_worker=0), "devices_per_worker: expected at least 1"),
        (lambda: RunOptions(workers=4, elastic=(1, 2)), "elastic: expected fewest:most"),
        (lambda: RunOptions(workers=2, elastic=(1, 4)), "found 1:4 and 2 workers"),
        (lambda: RunOptions(grace=float("nan")), "grace: expected at least 0, found nan"),
        (lambda: RunOptions(grace=-1), "grace: expected at least 0, found -1"),
        (lambda: RunOptions(compilation_cache=Path(__file__)), "expected a directory for compiled"),
        (lambda: Limits(step=0), "limit step: expected more than 0 seconds, found 0"),
    ],
)
def test_options_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        make()
    assert message in str(caught.value)


def test_a_script_whose_interpreter_is_missing_is_refused() -> None:
    script = Path("train")
    script.write_text("#!/no/such/python -u\nprint(1)\n")
    script.chmod(0o755)
    with pytest.raises(LaunchError, match="names the interpreter /no/such/python"):
        Supervisor(["./train"])
    script.write_text(f"#!{sys.executable} -u\nprint(1)\n")
    Supervisor(["./train"])


def test_a_place_that_takes_no_logs_is_told_before_anything_starts() -> None:
    Path("file").touch()
    with pytest.raises(LaunchError) as caught:
        Run("print(1)", log_directory=Path("file/logs"))
    assert "the logs of the workers cannot be written there" in str(caught.value)


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(LaunchError) as caught:
        Run(TELL, workers=2, devices_per_worker=2)
    assert "worker 1 needs 2 GPUs from number 2 on, found 3 in all" in str(caught.value)


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    run = Run(
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", workers=2, devices_per_worker=1
    )
    assert sorted(run.out.getvalue().splitlines()) == ["[0] 4", "[1] 5"]


def test_gpus_are_counted_as_cuda_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    lent = ["nvidia6", "nvidia-uvm", "nvidiactl", "nvidia4", "null"]
    monkeypatch.setattr(os, "listdir", lambda _: lent)
    assert accelerators() == ("0", "1")


# ---------------------------------------------------------------- what is printed, and kept


def test_an_output_that_cannot_be_written_to_ends_no_training() -> None:
    full, err = Full(), io.StringIO()
    code = "print('one'); print('two')"
    options = RunOptions(workers=2, log_directory=Path("logs"), poll=0.01)
    made = Supervisor([sys.executable, "-c", code], options, console=Console(full, err))
    assert made.run().status == 0
    assert full.tries == 1
    assert err.getvalue().count("cannot be written any more") == 1
    assert Path("logs/attempt-1-worker-1.log").read_text() == "one\ntwo\n"
    out, full = io.StringIO(), Full()
    Supervisor([sys.executable, "-c", code], options, console=Console(out, full)).run()
    assert out.getvalue().count("messages of perdure run cannot be written any more") == 1


def test_a_reader_that_has_gone_ends_no_training() -> None:
    run = cli(code="print('one'); print('two' * 1000)")
    assert run.stdout is not None
    run.stdout.close()
    assert run.stderr is not None
    said = run.stderr.read()
    run.stderr.close()
    assert run.wait() == 0
    assert "perdure: finished" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_every_worker_is_closed_also_where_one_cannot_be() -> None:
    made: list[Worker] = []

    class Breaks(Console):
        def line(self, worker: int, text: bytes) -> None:
            raise RuntimeError("no line")

    class Kept(Observer):
        def started(self, worker: Worker) -> None:
            made.append(worker)

    # The second line has no end: it is printed when the worker is closed.
    code = "import os, signal; os.write(1, b'one\\ntwo'); signal.pause()"
    command = [sys.executable, "-c", code]
    options = RunOptions(workers=2, log_directory=Path("logs"), poll=0.01)
    with pytest.raises(RuntimeError, match="no line"):
        Supervisor(command, options, console=Breaks(), observer=Kept()).run()
    assert len(made) == 2
    assert all(worker._log._file is None and worker.status == -signal.SIGKILL for worker in made)


def test_a_second_run_keeps_the_logs_of_the_first() -> None:
    for said in ("first", "second", "third"):
        run = Run(f"print('{said}')")
        assert said in Path(run.summary.log_directory, "attempt-1-worker-0.log").read_text()
    assert Path("logs/attempt-1-worker-0.log").read_text() == "first\n"
    assert Path("logs/run-2/attempt-1-worker-0.log").read_text() == "second\n"


def test_a_child_that_imports_perdure_does_not_make_a_crash_one_of_the_start() -> None:
    fault = """
def fault(step):
    if ATTEMPT == 1 and step == 8:
        subprocess.run([sys.executable, "-c", "import perdure.runtime.heartbeats"])
        sys.exit(3)
"""
    run = Run(loop(fault))
    assert run.kinds == ["failed", "done"]


def test_a_second_loop_in_one_process_does_not_make_a_crash_one_of_the_start() -> None:
    class Seen(Observer):
        def beat(self, worker: Worker, beat: Beat) -> None:
            if worker.attempt == 1 and beat.step == 7:
                worker.send(signal.SIGUSR1)

    fault = """
def fault(step):
    if ATTEMPT == 1 and step == 8:
        await_observer()
        heartbeat(0, "compile")
        sys.exit(3)
"""
    run = Run(loop(fault), Seen())
    assert run.kinds == ["failed", "done"]


def test_a_failure_without_any_heartbeat_says_so() -> None:
    run = Run("raise SystemExit(3)")
    assert "it gave no heartbeat of a step" in run.summary.reason
    told = Run("import perdure; perdure.heartbeat(0, 'compile'); raise SystemExit(3)")
    assert "failed before its first step" in told.summary.reason
    assert "no heartbeat" not in told.summary.reason


# ---------------------------------------------------------------- the command


def test_the_command_prints_one_document() -> None:
    run = cli("--json", "--max-restarts", "0", code="print('said'); raise SystemExit(4)")
    out, err = run.communicate()
    assert run.returncode == 1
    assert json.loads(out)["attempts"][0]["statuses"] == [4]
    assert "[0] said" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "stepp=3"), "expected PHASE=SECONDS with one of start, restore"),
        (("--elastic", "2"), "expected MIN:MAX"),
        (("--elastic", "1:²"), "expected MIN:MAX"),
        (("--log-dir", ""), "expected the path of a directory, found an empty text"),
    ],
)
def test_wrong_usage_of_the_command(arguments: tuple[str, ...], message: str) -> None:
    from click.testing import CliRunner

    from perdure.cli import main

    result = CliRunner().invoke(main, ["run", *arguments, "--", "true"])
    assert result.exit_code == 2
    assert message in result.output


def test_options_after_the_program_belong_to_it() -> None:
    code = "import sys; print(sys.argv[1:])"
    command = [sys.executable, "-m", "perdure.cli", "run", "--log-dir", "logs", sys.executable]
    arguments = ["-c", code, "--workers", "7", "--log-dir", "mine", "--", "--json", "-x"]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert run.stdout == "[0] ['--workers', '7', '--log-dir', 'mine', '--', '--json', '-x']\n"
    assert Path("logs").is_dir()
    assert not Path("mine").exists()


def test_fields_that_may_differ_are_passed_on() -> None:
    code = "import os; print(os.environ.get('PERDURE_ALLOW'))"
    run = cli("--allow", "threads", "--allow", "seed", code=code, env={"PERDURE_ALLOW": "tree"})
    assert run.communicate()[0] == "[0] seed,threads,tree\n"


def test_the_supervising_process_imports_no_numpy() -> None:
    code = (
        "import sys, perdure.cli.run, perdure.supervise, perdure.supervise.worker_environment\n"
        "print([name for name in ('numpy', 'jax', 'torch', 'rich') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
