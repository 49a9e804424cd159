"""The record of a run on the disk, and `perdure status`, which reads it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from full_disk import FullDisk
from supervised import HOLDS, Run, cli, held, loop

from perdure.cli import main
from perdure.errors import LaunchError
from perdure.heartbeats import Beat
from perdure.supervise import Observer, RunOptions, Supervisor, supervisor
from perdure.supervise.record import RecordedRun, RunRecord, describe_process, read_record
from perdure.supervise.worker import Worker

RECORD = Path("logs/record.jsonl")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["status", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    return json.loads(status(*arguments, "--json").output)


def only_run(path: Path = RECORD) -> RecordedRun:
    (run,), unreadable = read_record(path)
    assert unreadable == 0
    return run


FAULT = """
def fault(step):
    if ATTEMPT == 1 and step == 8:
        sys.exit("the disk of node 7 is gone")
"""


class Reads(Observer):
    """The record as it is on the disk while the second attempt runs."""

    during: RecordedRun | None = None

    def beat(self, worker: Worker, beat: Beat) -> None:
        if worker.attempt == 2 and beat.step and self.during is None:
            self.during = only_run()


def test_a_run_leaves_a_record_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PROGRESS_S", 0.0)
    reads = Reads()
    run = Run(loop(FAULT), reads)
    assert run.kinds == ["failed", "done"]
    during = reads.during
    assert during is not None
    assert during.state == "running"
    assert [attempt["kind"] for attempt in during.attempts] == ["failed"]
    assert during.attempts[0]["last_line"] == "the disk of node 7 is gone"
    assert during.running["attempt"] == 2
    assert during.running["step"] >= 5
    assert during.start["host"] == os.uname().nodename
    assert during.start["command"][0] == sys.executable
    ended = only_run()
    assert (ended.state, ended.end["status"], ended.running) == ("ended", 0, {})
    assert [attempt["end"] for attempt in ended.attempts] == [7, 20]
    said = [message["text"] for message in ended.messages]
    assert any("(last line: the disk of node 7 is gone); starting again" in text for text in said)


def test_steps_are_recorded_now_and_then_only() -> None:
    Run(loop("def fault(step): pass"))
    events = [json.loads(line)["event"] for line in RECORD.read_text().splitlines()]
    assert events == ["start", "attempt", "progress", "attempt_end", "end"]


SAVES = """
from perdure import heartbeats
assert heartbeats.saved_before("runs/a") == (None if ATTEMPT == 1 else 9)
def fault(step):
    if step == 10:
        heartbeats.committed("runs/a", 9)
        sys.exit(75 if ATTEMPT == 1 else STATUS)
"""


@pytest.mark.parametrize(("status", "known"), [(1, 9), (0, None)])
def test_what_was_saved_is_known_to_later_attempts_and_runs(status: int, known: int | None) -> None:
    """Not to one after a run that has finished, which may begin again."""
    first = Run(loop(SAVES.replace("STATUS", str(status))), max_restarts=0)
    assert [attempt.saved for attempt in first.summary.attempts] == [{"runs/a": 9}] * 2
    code = f"from perdure import heartbeats; assert heartbeats.saved_before('runs/a') == {known}"
    command = first.summary.command
    for line in (text := RECORD.read_text()).splitlines():
        if json.loads(line)["event"] == "start":  # the same command, which says what it finds
            code_of_first = json.loads(line)["command"][2]
    RECORD.write_text(text.replace(json.dumps(code_of_first), json.dumps(code)))
    assert command[2] == code_of_first
    assert Run(code).summary.status == 0


def test_a_program_that_must_not_begin_again_is_not_restarted() -> None:
    fault = """
from perdure import heartbeats
if ATTEMPT == 2:
    heartbeats.refuse("no checkpoint is there, and step 9 was saved")
    raise ValueError
def fault(step):
    if step == 10: sys.exit(1)
"""
    run = Run(loop(fault))
    assert run.kinds == ["failed", "refused"]
    assert run.summary.status == 1
    assert run.summary.reason == "worker 0: no checkpoint is there, and step 9 was saved"


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


def test_a_full_disk_delays_the_record_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    disk = FullDisk(monkeypatch, "record.jsonl", 150)
    record = RunRecord(Path("record.jsonl"), "r", said.append)
    for number in range(10):
        record.add("message", text=str(number))
    assert disk.fired > 1
    assert len(said) == 1
    assert "the record of the run cannot be written: [Errno 28]" in said[0]
    disk.space = 10_000
    record.add("end", status=0)
    (run,), unreadable = read_record(Path("record.jsonl"))
    assert [message["text"] for message in run.messages] == [str(n) for n in range(10)]
    assert run.end["status"] == 0
    assert unreadable == 1  # the line in which the disk became full; it is there again, whole


def test_a_line_that_a_crash_cut_off_spoils_no_other() -> None:
    path = Path("record.jsonl")
    RunRecord(path, "first", print).add("start", pid=1)
    whole = path.read_bytes()
    for kept in range(len(whole)):  # at every byte
        path.write_bytes(whole + whole[:kept])
        RunRecord(path, "second", print).add("end", status=3)
        runs, unreadable = read_record(path)
        assert [run.name for run in runs] == ["first", "second"]
        assert runs[1].end["status"] == 3
        # A line that lacks only its end is whole.
        assert unreadable == (0 if kept in (0, len(whole) - 1) else 1)


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "7",
        "[]",
        '{"event": "end"}',
        '{"event": "end", "run": [], "time": "x"}',
        "\x00\xff",
        '{"time": 1',
        "[" * 100_000,
        '{"event": "end", "run": "first", "time": "x", "status": 1' + "0" * 5000 + "}",
    ],
)
def test_a_line_that_is_no_event_is_counted(line: str) -> None:
    path = Path("record.jsonl")
    RunRecord(path, "first", print).add("start", pid=1)
    with path.open("a") as file:
        file.write(line + "\n")
    runs, unreadable = read_record(path)
    assert ([run.name for run in runs], unreadable) == (["first"], 1)


def test_a_record_that_is_a_pipe_is_waited_for_by_nobody() -> None:
    Path("logs").mkdir()
    os.mkfifo(RECORD)
    run = Run("print('said')")
    assert run.summary.status == 0
    assert "the record of the run cannot be written" in run.err.getvalue()
    assert status("logs").exit_code == 2


def test_a_record_that_was_removed_is_begun_again() -> None:
    said: list[str] = []
    record = RunRecord(RECORD, "r", said.append)
    record.add("start", pid=1)
    RECORD.unlink()
    RECORD.parent.rmdir()
    record.add("end", status=0)
    assert said == []
    assert only_run().end["status"] == 0


def test_a_record_follows_no_link() -> None:
    Path("victim").write_text("mine")
    Path("logs").mkdir()
    RECORD.symlink_to(Path("victim").absolute())
    run = Run("print('said')")
    assert run.summary.status == 0
    assert "the record of the run cannot be written" in run.err.getvalue()
    assert Path("victim").read_text() == "mine"


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
    record = RunRecord(RECORD, "earlier", print)
    record.add("start", **{name: fields[name] for name in ("command", "directory")})
    record.add("attempt_end", longest={"step": 5000.0})
    assert (before, limit()) == (600.0, 10000.0)


def test_values_of_other_types_end_neither_a_run_nor_status() -> None:
    Run("print(1)")
    fields = only_run().start
    record = RunRecord(RECORD, "odd", print)
    record.add("start", **{name: fields[name] for name in ("command", "directory")}, pid="x")
    record.add("attempt", attempt=None)
    for longest in (None, 3, {"step": "long"}, {"step": None}):
        record.add("attempt_end", longest=longest, began="x")
    run = Run("print(1)")
    assert run.summary.status == 0
    assert run.supervisor._silence.limit("step") == 600.0
    result = status("logs")
    assert (result.exit_code, result.output.count("state ")) == (0, 3)
    assert [run["state"] for run in document("logs")["starts"]] == ["ended", "unknown", "ended"]


@pytest.mark.parametrize("name", ["host", "boot", "pid_namespace"])
def test_only_the_same_kernel_and_container_can_tell_whether_a_run_is_alive(name: str) -> None:
    """A process ID means another process on another host, after a restart, and in a container."""

    def state(process: dict[str, Any]) -> str:
        RECORD.unlink(missing_ok=True)
        RunRecord(RECORD, "r", print).add("start", command=["x"], **process)
        (row,) = document("logs")["starts"]
        return row["state"]

    process = describe_process(os.getpid())
    assert all(process.values())
    assert state(process) == "running"
    assert state(process | {"process_start": 1}) == "lost"
    value = process[name]
    assert state(process | {name: value + 1 if isinstance(value, int) else "another"}) == "unknown"


ODD = [None, True, [None], {"a": 1}, "\x1b[2J\ud800", float("nan"), 10**400]


def test_no_value_in_a_record_ends_status_or_a_run() -> None:
    Run(loop(FAULT))
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    last_of_event = {line["event"]: number for number, line in enumerate(lines)}
    for number in last_of_event.values():
        for name in lines[number]:
            odd = [*ODD, {"step": 10**400}, {"step": "long"}]
            runs = [[line | {"run": f"run-{place}"} for line in lines] for place in range(len(odd))]
            for run, value in zip(runs, odd, strict=True):
                run[number][name] = value
            # Runs of another program are only shown if they are the newest.
            runs = runs[-3:] if name in ("command", "directory") else [*runs, lines]
            RECORD.write_text("".join(json.dumps(line) + "\n" for run in runs for line in run))
            for options in ([], ["--json"]):
                result = status("logs", *options)
                assert result.exit_code == 0, (number, name, result.exception)
                assert "\x1b" not in result.output
                if options:
                    json.loads(result.output, parse_constant=pytest.fail)
            for read in read_record(RECORD)[0]:
                assert all(type(seconds) in (int, float) for seconds in read.longest.values())


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
    assert status("logs/record.jsonl").output == shown


def test_without_a_name_the_logs_of_this_directory_are_meant() -> None:
    Run("print(1)", log_directory=None)
    (directory,) = [path for path in Path("perdure-logs").iterdir() if path.is_dir()]
    assert document()["starts"][0]["log_directory"] == str(directory.absolute())
    assert document() == document("perdure-logs") == document(directory)


def test_status_says_what_it_expects() -> None:
    result = status("nowhere")
    assert result.exit_code == 2
    assert "expected the log directory of `perdure run`" in result.output


def test_an_attempt_of_a_run_that_has_ended_has_ended() -> None:
    """The supervisor ended by an error, so that the record has no end of the attempt."""
    record = RunRecord(RECORD, "r", print)
    record.add("start", command=["x"])
    record.add("attempt", attempt=1, workers=1)
    assert "has not ended" in status("logs").output
    record.add("end", status=1, reason="LaunchError: no")
    assert "has not ended" not in status("logs").output


def test_status_prints_no_raw_escapes() -> None:
    Run("raise SystemExit('\\x1b]0;title\\x07\\x1b[31mred')")
    assert "\x1b" not in status("logs").output
    assert "red" in status("logs").output
