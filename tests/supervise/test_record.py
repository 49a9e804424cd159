"""The log of a run on the disk, and `perdure status`, which reads it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from full_disk import FullDisk
from supervised import HOLDS, Run, cli, held, loop

from perdure.cli import main
from perdure.errors import LaunchError
from perdure.runtime.heartbeats import Beat
from perdure.supervise import Observer, RunOptions, Supervisor, supervisor
from perdure.supervise.attempts_log import (
    FILE,
    AttemptsLog,
    RunHistory,
    describe_process,
    read_runs,
)
from perdure.supervise.worker import Worker

LOGS = Path("logs")
LOG = LOGS / FILE


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["status", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    return json.loads(status(*arguments, "--json").output)


def only_run(logs: Path = LOGS) -> RunHistory:
    (run,) = read_runs(logs)
    assert run.unreadable == 0
    return run


def started(**fields: Any) -> dict[str, Any]:
    """The fields of the first line of a run."""
    program = {"command": ["x"], "directory": "", "workers": 1, "logs": ""}
    return program | describe_process(1) | fields


FAULT = """
def fault(step):
    if ATTEMPT == 1 and step == 8:
        sys.exit("the disk of node 7 is gone")
"""


class Reads(Observer):
    """The log as it is on the disk while the second attempt runs."""

    during: RunHistory | None = None

    def beat(self, worker: Worker, beat: Beat) -> None:
        if worker.attempt == 2 and beat.step and self.during is None:
            self.during = only_run()


def test_a_run_leaves_a_log_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PROGRESS_S", 0.0)
    reads = Reads()
    run = Run(loop(FAULT), reads)
    assert run.kinds == ["failed", "done"]
    during = reads.during
    assert during is not None
    assert during.state == "running"
    assert [attempt.kind for attempt in during.attempts] == ["failed"]
    assert during.attempts[0].last_line == "the disk of node 7 is gone"
    assert during.running["attempt"] == 2
    assert during.running["step"] >= 5
    assert during.start["host"] == os.uname().nodename
    assert during.start["command"][0] == sys.executable
    ended = only_run()
    assert (ended.state, ended.end["status"], ended.running) == ("ended", 0, {})
    assert [each.end for each in ended.attempts] == [7, 20]
    said = [message["text"] for message in ended.messages]
    assert any("(last line: the disk of node 7 is gone); starting again" in text for text in said)


def test_steps_are_logged_now_and_then_only() -> None:
    Run(loop("def fault(step): pass"))
    events = [json.loads(line)["kind"] for line in LOG.read_text().splitlines()]
    assert events == ["start", "attempt", "progress", "attempt_end", "end"]


SAVES = """
from perdure.runtime import heartbeats
assert heartbeats.saved_before() == ({} if ATTEMPT == 1 else {"runs/a": 9})
def fault(step):
    if step == 10:
        heartbeats.committed("runs/a", 9)
        sys.exit(75 if ATTEMPT == 1 else STATUS)
"""


@pytest.mark.parametrize("status", [1, 0])
def test_what_was_saved_is_known_to_later_attempts_and_to_every_later_run(status: int) -> None:
    first = Run(loop(SAVES.replace("STATUS", str(status))), max_restarts=0)
    assert [attempt.saved for attempt in first.summary.attempts] == [{"runs/a": 9}] * 2
    known = "from perdure.runtime import heartbeats; print(heartbeats.saved_before())"
    for _ in range(2):  # one that saves nothing changes nothing
        assert "{'runs/a': 9}" in Run(known).out.getvalue()


SAVES_LATE = """
from perdure.runtime import heartbeats
def fault(step):
    if step == 10:
        heartbeats.committed("runs/a", 9)
    if step in (5, 11):
        await_observer()
"""


def test_the_first_save_of_an_attempt_is_logged_at_once() -> None:
    """A supervisor that is killed then logs nothing any more."""

    class Looks(Observer):
        def beat(self, worker: Worker, beat: Beat) -> None:
            if beat.step in (4, 10):
                found.append(only_run().saved)
                worker.send(signal.SIGUSR1)

    found: list[dict[str, int | None]] = []
    assert Run(loop(SAVES_LATE), Looks()).kinds == ["done"]
    assert found == [{}, {"runs/a": 9}]


TRAINS = """
import os
from pathlib import Path
import perdure
from perdure.store import Run, repair
def damage_all():
    for path in Path("run/packs").iterdir():
        path.write_bytes(b"")
    with Run("run") as run:
        repair(run)
ATTEMPT = int(os.environ["PERDURE_ATTEMPT"])
with perdure.CheckpointManager("run", mirror=MIRROR) as manager:
    state, start = manager.restore_or_initialize({"n": 0}, start_over=False)
    for step in range(start, 4):
        state["n"] += 1
        manager.save(step + 1, state, force=True)
        if ATTEMPT == 1 and step == 2:
            manager.wait_until_finished(mirror=True)
            FAULT
            os._exit(1)
"""


@pytest.mark.parametrize(
    ("fault", "mirror", "kinds"),
    [
        ("os.rename('run', 'elsewhere')", None, ["failed", "refused"]),  # as if it were not mounted
        ("os.rename('run', 'elsewhere')", "mirror", ["failed", "done"]),
        ("manager.close(); damage_all()", None, ["failed", "refused"]),  # nothing can be restored
        ("pass", None, ["failed", "done"]),  # the control
    ],
)
def test_a_run_that_lost_its_directory_does_not_begin_again(
    fault: str, mirror: str | None, kinds: list[str]
) -> None:
    code = TRAINS.replace("FAULT", fault).replace("MIRROR", repr(mirror))
    run = Run(code)
    assert run.kinds == kinds
    if kinds[-1] == "refused":
        assert run.summary.status == 1
        assert "start_over=True" in run.summary.reason
        assert not any(Path("run").glob("checkpoints/*"))
    if Path("elsewhere").exists() and mirror is None:
        assert "step 3 was saved" in run.summary.reason
        again = code.replace("2:", "-1:")
        for later in (code, code, again):  # a refusal does not erase it, nor does another command
            assert Run(later).kinds == ["refused"]
            assert not Path("run").exists(), "a refused start leaves nothing"
        Path("elsewhere").rename("run")
        assert Run(again).kinds == ["done"]
        shutil.rmtree("run")
        assert "step 4 was saved" in Run(again).summary.reason, "a run that has finished is no less"
        assert Run(again.replace("start_over=False", "start_over=True")).kinds == ["done"]


def test_an_error_of_the_supervisor_is_an_end() -> None:
    command = [sys.executable, "-c", "pass"]
    made = Supervisor(command, RunOptions(log_directory=Path("logs")), observer=Breaks())
    with pytest.raises(LaunchError):
        made.run()
    assert only_run().end["reason"] == "LaunchError: worker 0 could not be started: no"


class Breaks(Observer):
    def started(self, worker: Worker) -> None:
        raise LaunchError("worker 0 could not be started: no")


# ---------------------------------------------------------------- disks that fail


def test_a_full_disk_delays_the_log_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    disk = FullDisk(monkeypatch, FILE, 150)
    log = AttemptsLog(LOGS, said.append)
    for number in range(10):
        log.add("message", text=str(number))
    assert disk.fired > 1
    assert len(said) == 1
    assert "the log of the run cannot be written: [Errno 28]" in said[0]
    disk.space = 10_000
    log.add("end", status=0, reason="", seconds=1.0)
    run = only_run()
    assert [message["text"] for message in run.messages] == [str(n) for n in range(10)]
    assert run.end["status"] == 0


def test_a_line_that_a_crash_cut_off_is_no_line() -> None:
    log = AttemptsLog(LOGS, print)
    log.add("start", **started())
    whole = LOG.read_bytes()
    log.add("end", status=0, reason="", seconds=1.0)
    log.close()
    both = LOG.read_bytes()
    for kept in range(len(whole), len(both)):  # at every byte
        LOG.write_bytes(both[:kept])
        assert only_run().end == {}
    LOG.write_bytes(both)
    assert only_run().end["status"] == 0


@pytest.mark.parametrize(
    "line", [b"null\n", b"[" * 100_000 + b"\n", b"\0\xff\n", b'{"kind":"end"}\n']
)
def test_nothing_is_believed_after_a_damaged_line(line: bytes) -> None:
    log = AttemptsLog(LOGS, print)
    log.add("start", **started())
    first = LOG.read_bytes()
    log.add("message", text="hello")
    LOG.write_bytes(first + line + LOG.read_bytes()[len(first) :])
    (run,) = read_runs(LOGS)
    assert run.start["command"] == ["x"]
    assert (run.messages, run.unreadable) == ([], 2)
    assert "2 lines cannot be believed" in status("logs").output
    assert document("logs")["unreadable_lines"] == 2


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_another_thing_in_the_place_of_the_log_is_left_alone(kind: str) -> None:
    LOGS.mkdir()
    Path("victim").write_text("mine")
    if kind == "pipe":
        os.mkfifo(LOG)
    else:
        LOG.symlink_to(Path("victim").absolute())
    run = Run("print('said')")
    assert run.summary.status == 0
    assert Path(run.summary.log_directory).name == "run-2"
    assert Path("victim").read_text() == "mine"
    assert only_run(LOGS / "run-2").state == "ended"


def test_a_log_that_was_removed_is_begun_again() -> None:
    said: list[str] = []
    log = AttemptsLog(LOGS, said.append)
    log.add("start", **started())
    LOG.unlink()
    LOGS.rmdir()
    log.add("end", status=0, reason="", seconds=1.0)
    assert said == []
    assert only_run().start["command"] == ["x"]
    assert only_run().end["status"] == 0


# ---------------------------------------------------------------- restarts, and perdure status


def test_a_killed_supervisor_is_seen_and_the_next_one_goes_on() -> None:
    code = HOLDS.replace("STOP", "")
    run = cli("--log-dir", "logs", code=code)
    held(run)
    assert document("logs")["starts"][0]["state"] == "running"
    assert "state    running" in status("logs").output
    run.kill()
    run.communicate()
    assert document("logs")["starts"][0]["state"] == "lost"
    assert "ended without a word" in status("logs").output
    # The same command again: `HOLDS` is asked to end this time.
    again = cli("--log-dir", "logs", code=code)
    held(again)
    again.send_signal(signal.SIGTERM)
    _, err = again.communicate()
    assert "an earlier run of this command ended without a word" in err
    runs = document("logs")["starts"]
    assert [run["state"] for run in runs] == ["lost", "ended"]
    assert runs[1]["status"] == 143
    # Another command is another program, and shown alone.
    cli("--log-dir", "logs", code="print(1)").communicate()
    assert [run["status"] for run in document("logs")["starts"]] == [0]


def test_a_restarted_supervisor_knows_how_long_a_step_may_take() -> None:
    def limit() -> float:
        made = Supervisor(
            [sys.executable, "-c", "pass"], RunOptions(log_directory=Path("logs"), poll=0.01)
        )
        made.run()
        return made._silence.limit("step")

    before = limit()
    fields = only_run().start
    log = AttemptsLog(LOGS / "earlier", print)
    same = {name: fields[name] for name in ("command", "directory")}
    log.add("start", **started(**same))
    (first,) = [run for run in read_runs(LOGS) if run.attempts]
    log.add("attempt_end", attempt=asdict(first.attempts[0]), longest={"step": 5000.0})
    assert (before, limit()) == (600.0, 10000.0)


def test_values_that_are_no_text_end_neither_a_run_nor_its_log() -> None:
    run = Run("print(1)", environment={}, log_directory=Path("logs-\udcff"))
    assert run.summary.status == 0
    assert only_run(Path("logs-\udcff")).start["logs"].endswith("logs-\\udcff")


@pytest.mark.parametrize("name", ["host", "boot", "pid_namespace"])
def test_only_the_same_kernel_and_container_can_tell_whether_a_run_is_alive(name: str) -> None:
    """A process ID means another process on another host, after a restart, and in a container."""

    def state(process: dict[str, Any]) -> str:
        shutil.rmtree(LOGS, ignore_errors=True)
        AttemptsLog(LOGS, print).add("start", **started(**process))
        (row,) = document("logs")["starts"]
        return row["state"]

    process = describe_process(os.getpid())
    assert all(process.values())
    assert state(process) == "running"
    assert state(process | {"process_start": 1}) == "lost"
    value = process[name]
    assert state(process | {name: value + 1 if isinstance(value, int) else "another"}) == "unknown"


def test_status_shows_the_table_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(loop(FAULT))
    shown = status("logs").output
    for attempt in run.summary.attempts:
        assert attempt.cause in shown
    assert "0-7" in shown
    assert "ended " in shown
    assert "with status 0: finished" in shown
    (row,) = document("logs")["starts"]
    assert row["attempts"][0]["end"] == 7
    assert row["repeated_steps"] == 2
    assert row["directory"] == os.getcwd()
    assert status(LOG).output == shown


def test_without_a_name_the_logs_of_this_directory_are_meant() -> None:
    Run("print(1)", log_directory=None)
    (directory,) = [path for path in Path("perdure-logs").iterdir() if path.is_dir()]
    assert document()["starts"][0]["log_directory"] == str(directory.absolute())
    assert document() == document("perdure-logs")
    assert document()["starts"] == document(directory)["starts"]


def test_status_says_what_it_expects() -> None:
    result = status("nowhere")
    assert result.exit_code == 2
    assert "expected the log directory of `perdure run`" in result.output


def test_an_attempt_of_a_run_that_has_ended_has_ended() -> None:
    """The supervisor ended by an error, so that its log has no end of the attempt."""
    log = AttemptsLog(LOGS, print)
    log.add("start", **started())
    log.add("attempt", attempt=1, workers=1)
    assert "has not ended" in status("logs").output
    log.add("end", status=1, reason="LaunchError: no", seconds=0.0)
    assert "has not ended" not in status("logs").output


def test_status_prints_no_raw_escapes() -> None:
    Run("raise SystemExit('\\x1b]0;title\\x07\\x1b[31mred')")
    assert "\x1b" not in status("logs").output
    assert "red" in status("logs").output
