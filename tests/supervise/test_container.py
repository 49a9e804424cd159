"""What belongs to a run in a container: orphans, zombies under process 1, memory limits, full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from supervised import Run, cli, gone, loop

from perdure.runtime import memory_limit
from perdure.runtime.heartbeats import Beat
from perdure.runtime.memory_limit import MemoryLimit
from perdure.supervise import Observer, Supervisor
from perdure.supervise.orphan_reaper import end_marked, marked
from perdure.supervise.worker import Worker


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- orphans

# A child in a process group of its own, with no variables: neither killpg nor the mark finds it.
NO_MARK = """
import os, signal, subprocess
child = subprocess.Popen(["sleep", "1000"], env={}, process_group=0)
print(os.getpid(), child.pid, flush=True)
"""


def test_a_child_that_cleared_its_environment_is_ended_with_its_attempt() -> None:
    code = NO_MARK + "raise SystemExit(75 if os.environ['PERDURE_ATTEMPT'] == '1' else 0)"
    run = Run(code)
    assert run.kinds == ["preempted", "done"]
    children = [int(line.split()[-1]) for line in run.out.getvalue().splitlines()]
    assert len(children) == 2
    assert all(gone(pid) for pid in children)


def test_a_child_that_cleared_its_environment_is_ended_with_a_killed_supervisor() -> None:
    run = cli(code=NO_MARK + "signal.pause()")
    assert run.stdout is not None
    _, worker, child = run.stdout.readline().split()
    assert not gone(int(child), 0)
    run.kill()
    run.communicate()
    assert gone(int(worker))
    assert gone(int(child))


def test_processes_of_other_sessions_are_left_alone() -> None:
    stranger = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
    marked_one = subprocess.Popen(
        ["sh", "-c", "echo; read line"],
        env={"PERDURE_RUN_MARK": "a:b"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        # A program that the kernel is just loading has no environment yet.
        assert marked_one.stdout is not None
        marked_one.stdout.readline()
        assert marked("b") == marked("a") == [marked_one.pid]
        assert end_marked("b") == 1
        assert marked_one.wait() == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        marked_one.kill()
        marked_one.communicate()


# ---------------------------------------------------------------- process 1

# A worker whose grandchild loses its parent and ends: whoever adopts it has to wait for it.
ORPHAN = """
import os, select, time
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        os._exit(0)
    os._exit(0)
os.wait()
orphan = int(os.read(read, 20))
deadline = time.monotonic() + SECONDS
state = "?"
while state != "gone" and time.monotonic() < deadline:
    try:
        with open(f"/proc/{orphan}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        state = "gone"
    select.select([], [], [], 0.01)
print(state, flush=True)
"""
ADOPTS = """
import ctypes, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER, as process 1 is one
INIT
from perdure.supervise import Supervisor
sys.exit(Supervisor([sys.executable, "-c", sys.argv[1]]).run().status)
"""
INIT = "from perdure.supervise.orphan_reaper import become_init; become_init()"


@pytest.mark.parametrize(("init", "seconds", "state"), [(INIT, 20, "gone"), ("", 0.3, "Z")])
def test_an_orphan_is_reaped(init: str, seconds: float, state: str) -> None:
    """And the control: without the init process it stays a zombie."""
    code = ORPHAN.replace("SECONDS", str(seconds))
    command = [sys.executable, "-c", ADOPTS.replace("INIT", init), code]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.stdout, run.returncode) == (f"[0] {state}\n", 0)


ASKED = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_signals_to_the_init_process_reach_the_run(number: int, status: int) -> None:
    command = [sys.executable, "-c", ADOPTS.replace("INIT", INIT), ASKED]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker = int(run.stdout.readline().split()[1])
    run.send_signal(number)
    assert run.wait() == status
    assert gone(worker)
    run.communicate()


def test_the_command_is_an_init_process_if_it_is_process_1() -> None:
    space = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    try:
        probe = subprocess.run([*space, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("unshare is not installed; test_an_orphan_is_reaped shows the same without")
    if probe.returncode:
        pytest.skip(f"no PID namespaces here: {probe.stderr.strip()}")
    command = [*space, sys.executable, "-m", "perdure.cli", "run", sys.executable, "-c"]
    code = ORPHAN.replace("SECONDS", "20")
    run = subprocess.run([*command, code], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[0] gone\n", 0)


# ---------------------------------------------------------------- memory


KILLED_FOR_MEMORY = "out of memory: the kernel killed"


class KillsForMemory(Observer):
    """As the kernel does: it counts, and then it kills."""

    fired = 0

    def __init__(self, events: Path, count: int) -> None:
        self.events, self.count = events, count

    def beat(self, worker: Worker, beat: Beat) -> None:
        if worker.attempt == 1 and beat.step == 7 and not self.fired:
            self.fired += 1
            self.events.write_text(f"low 0\noom 2\noom_kill {self.count}\noom_group_kill 0\n")
            worker.send(signal.SIGKILL)


@pytest.mark.parametrize(
    ("count", "cause"),
    [
        (
            4,
            f"worker 0: SIGKILL, {KILLED_FOR_MEMORY} a process of its cgroup, limit 512 MiB",
        ),
        (3, "worker 0: SIGKILL"),  # the control: somebody else has killed it
    ],
)
def test_a_kill_for_lack_of_memory_is_named(
    count: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "memory.events").write_text("low 0\noom_kill 3\n")
    (root / "memory.max").write_text(f"{512 * 2**20}\n")
    monkeypatch.setattr(memory_limit, "ROOT", root)
    kills = KillsForMemory(root / "memory.events", count)
    fault = """
def fault(step):
    if ATTEMPT == 1 and step == 8:
        print("step 7 of 20", flush=True)
        hold()
"""
    run = Run(loop(fault), kills)
    assert kills.fired == 1
    assert run.kinds == ["killed", "done"]
    assert run.summary.attempts[0].cause == cause
    assert (
        f"attempt 1 ended: {cause} (last line: step 7 of 20); starting again" in run.err.getvalue()
    )


def test_cgroups_of_version_1_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "ROOT", tmp_path)
    control = tmp_path / "memory.oom_control"
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    limit = MemoryLimit(os.getpid())
    assert limit.kills() == ""
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert limit.kills() == "out of memory: the kernel killed 2 processes of its cgroup"
    # A machine without memory cgroups says nothing.
    monkeypatch.setattr(memory_limit, "ROOT", tmp_path / "none")
    assert MemoryLimit(os.getpid()).kills() == ""


# ---------------------------------------------------------------- full disks


def test_a_full_disk_is_waited_for_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Supervisor, "_sleep", lambda _, seconds: waits.append(seconds))
    fault = """
def fault(step):
    if ATTEMPT < 6 and step == 8:
        open("/dev/full", "w", buffering=1).write("a checkpoint\\n")
"""
    run = Run(loop(fault))
    assert run.kinds == ["full"] * 5 + ["done"]
    assert waits == [1, 2, 4, 8, 16]
    said = run.err.getvalue()
    assert "No space left on device; a disk is full; starting again in 4 s" in said


def test_a_disk_that_stays_full_ends_the_run_after_its_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Supervisor, "_sleep", lambda *_: None)
    code = "open('/dev/full', 'w', buffering=1).write('a checkpoint\\n')"
    run = Run(code, max_restarts=2)
    assert run.kinds == ["full"] * 3
    assert run.summary.status == 1
    assert "No space left on device" in run.summary.reason
