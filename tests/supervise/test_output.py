"""What a run prints and logs: bars, long lines, encodings, closed streams, full disks, times."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_disk import FullDisk
from supervised import LoopObserver, Run, cli

from perdure.supervise import console as console_module
from perdure.supervise.console import Console, OutputWriter
from perdure.supervise.worker import LINE_BYTES, READ_BYTES, WorkerLog


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- bars and long lines

BAR = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.write(1, b"\\r 10%")
seen = signal.sigtimedwait({signal.SIGUSR1}, 20)
os.write(1, b"\\r 20%\\n" + (b"seen\\n" if seen else b"not seen\\n"))
"""


class Sees(LoopObserver):
    """Tells the worker once a text of its was printed."""

    fired = 0

    def look(self) -> None:
        if not self.fired and "10%" in self.out.getvalue():
            self.fired += 1
            self.workers_started[0].send(signal.SIGUSR1)


def test_a_bar_is_printed_as_it_is_drawn() -> None:
    sees = Sees()
    run = Run(BAR, sees)
    assert sees.fired == 1
    assert run.out.getvalue() == "\r[0]  10%\r[0]  20%\n[0] seen\n"
    assert Path("logs/attempt-1-worker-0.log").read_bytes() == b"\r 10%\r 20%\nseen\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "end"), [(io.StringIO, "\n"), (Terminal, "\r\x1b[K")])
def test_a_bar_and_other_lines_do_not_mix(stream: Callable[[], io.StringIO], end: str) -> None:
    out, err = stream(), io.StringIO()
    console = Console(out, err)
    console.line(0, b"\r 10%")
    console.line(1, b"text\n")
    console.line(0, b"\r 20%")
    console.line(0, b"\r 30%\r\n")
    console.line(1, b"\r  5%")
    console.message("said")
    assert out.getvalue() == (f"\r[0]  10%{end}[1] text\n\r[0]  20%\r[0]  30%\r\n\r[1]   5%{end}")
    assert err.getvalue() == "perdure: said\n"


def test_a_character_in_two_parts_is_one() -> None:
    out = io.StringIO()
    console = Console(out, io.StringIO())
    text = "\r██".encode()
    for place in range(len(text)):
        console.line(0, text[place : place + 1])
    console.line(0, b"\n\n")
    assert out.getvalue() == "\r[0] ██\n\n"


def test_a_line_without_an_end_is_neither_kept_nor_copied_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[int] = []
    real = Console.line

    def line(self: Console, worker: int, text: bytes) -> None:
        parts.append(len(text))
        real(self, worker, text)

    monkeypatch.setattr(Console, "line", line)
    size = 8 * LINE_BYTES
    run = Run(f"import os; left = {size}\nwhile left: left -= os.write(1, bytes([120]) * left)")
    assert run.out.getvalue() == "[0] " + "x" * size + "\n"
    assert max(parts) <= LINE_BYTES + READ_BYTES
    assert len(parts) >= 7


# ---------------------------------------------------------------- streams that fail


def test_a_character_that_the_console_does_not_have_ends_nothing() -> None:
    code = "import os; os.write(1, 'für ≤ 1\\n'.encode())"
    run = cli(code=code, env={"PYTHONIOENCODING": "ascii:strict"})
    out, err = run.communicate()
    assert (out, run.returncode) == ("[0] f\\xfcr \\u2264 1\n", 0)
    assert "perdure: finished" in err


def test_a_standard_output_that_was_closed_ends_nothing() -> None:
    code = "print('one'); print('two')"
    run = [sys.executable, "-m", "perdure.cli", "run", "--log-dir", "logs", sys.executable]
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *run, "-c", code]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert "perdure: finished" in done.stderr
    assert "Traceback" not in done.stderr
    assert Path("logs/attempt-1-worker-0.log").read_text() == "one\ntwo\n"
    # With both closed, nothing can be printed.
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *run, "-c", code], text=True)
    assert done.returncode == 0
    assert Path("logs/run-2/attempt-1-worker-0.log").read_text() == "one\ntwo\n"


def test_a_stream_that_is_closed_in_the_middle_ends_nothing() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.line(0, b"one\n")
    out.close()
    console.line(0, b"two\n")
    console.line(0, b"three\n")
    assert err.getvalue().count("the lines of the workers cannot be written any more") == 1


def test_text_for_people_has_no_raw_escapes() -> None:
    err = io.StringIO()
    Console(io.StringIO(), err).message("logs in \x1b[2J\x07")
    assert err.getvalue() == "perdure: logs in \\x1b[2J\\x07\n"


# ---------------------------------------------------------------- readers that do not read

LINES = "".join(f"{number:07}\n" for number in range(20_000))  # many times what a pipe holds
WRITES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
from perdure import heartbeat
heartbeat(0, "compile"), heartbeat(1)
data = "".join(f"{number:07}\\n" for number in range(20_000)).encode()
while data:
    data = data[os.write(1, data):]
END
signal.pause()
"""


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("heartbeat(2)", 1, "no heartbeat for"),
        ("os.kill(os.getppid(), signal.SIGTERM)", 75, "the workers have saved and exited"),
    ],
)
def test_a_standard_output_that_nobody_reads_holds_nothing_up(
    end: str, status: int, reason: str
) -> None:
    """A hang and a signal are noticed, and what was written is printed once somebody reads."""
    limits = ["--limit", "step=3", "--max-restarts", "0", "--log-dir", "logs"]
    run = cli(*limits, code=WRITES.replace("END", end))
    assert run.stdout is not None
    assert run.stderr is not None
    said = ""
    while "; logs in " not in said:
        said += (line := run.stderr.readline())
        assert line, said
    assert reason in said
    printed = "".join(line.removeprefix("[0] ") for line in run.stdout)
    assert printed == Path("logs/attempt-1-worker-0.log").read_text()
    assert printed == LINES
    assert run.wait() == status
    run.communicate()


def test_text_that_nobody_reads_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "QUEUE_BYTES", 2**16)
    monkeypatch.setattr(console_module, "PATIENCE_S", 0.0)
    read, write = os.pipe()
    # A full pipe: nothing leaves the queue until somebody reads, so that there is one gap.
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b".")
    os.set_blocking(write, True)
    writer = OutputWriter(write)
    for line in LINES.splitlines(keepends=True):
        writer.write(line.encode())
    assert writer.flush(time.monotonic() + 1000) > 0
    printed = b""
    while b"the logs have them\n" not in printed:
        printed += os.read(read, 2**16)
    writer.write(b"after\n")
    while not printed.endswith(b"after\n"):
        printed += os.read(read, 2**16)
    match = re.fullmatch(
        r"(.*)\nperdure: (\d+) bytes are missing here, because nobody read this output; the logs have "
        r"them\nafter\n",
        printed.decode(),
        re.DOTALL,
    )
    assert match is not None
    kept = match[1].lstrip(".")
    assert LINES.startswith(kept)
    assert len(kept) + int(match[2]) == len(LINES)
    assert int(match[2]) > 0
    os.close(read)
    os.close(write)


def test_a_reader_that_reads_gets_all_of_a_long_output() -> None:
    code = "import sys\nfor n in range(6000): sys.stdout.write(f'{n:0999}\\n')"
    run = cli("--log-dir", "logs", code=code)
    out, _ = run.communicate()
    assert out == "".join(f"[0] {n:0999}\n" for n in range(6000))


def test_two_streams_on_one_file_keep_their_order() -> None:
    with open("both", "a") as out, open("both", "a") as err:
        console = Console(out, err)
        for number in range(500):
            console.line(0, f"{number}\n".encode())
            console.message(str(number))
        console.flush()
    expected = "".join(f"[0] {number}\nperdure: {number}\n" for number in range(500))
    assert Path("both").read_text() == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "the lines of the workers cannot be written any more"),
        (("--json",), "the report of the run cannot be written to the standard output"),
    ],
)
def test_a_full_disk_under_the_standard_output_leaves_the_status(
    options: tuple[str, ...], said: str
) -> None:
    code = WRITES.replace("END", "os.kill(os.getppid(), signal.SIGTERM)")
    command = [sys.executable, "-m", "perdure.cli", "run", *options, sys.executable, "-c", code]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 75
    assert run.stderr.count(said) == 1
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr


PREEMPTED_UNTIL = "import os; raise SystemExit(75 * (int(os.environ['PERDURE_ATTEMPT']) < UNTIL))"


def test_a_full_disk_leaves_a_gap_in_a_log_that_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, said = FullDisk(monkeypatch, "worker.log", 6), list[str]()
    log = WorkerLog(Path("worker.log"), said.append)
    log.write(b"one\ntwo\n")
    log.write(b"three\n")
    assert len(said) == 1
    assert "worker.log: output of the worker cannot be written (No space left on device)" in said[0]
    disk.space = 1000
    log.write(b"four\n")
    log.close()
    assert disk.fired == 2
    assert Path("worker.log").read_text() == (
        "one\ntw\n[perdure: 8 bytes are missing here: No space left on device]\nfour\n"
    )
    assert len(said) == 1


def test_a_note_that_is_cut_off_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, said = FullDisk(monkeypatch, "worker.log", 0), list[str]()
    log = WorkerLog(Path("worker.log"), said.append)
    log.write(b"12345")
    disk.space = 4
    log.write(b"6789")
    log.close()
    assert disk.fired > 1
    assert said[-1] == "worker.log: the last 9 bytes are missing (No space left on device)"


def test_a_full_disk_under_the_logs_is_reported_and_ends_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FullDisk(monkeypatch, "worker-0.log", 0)
    run = Run("print('one'); raise SystemExit('the reason')")
    assert disk.fired > 0
    assert "output of the worker cannot be written (No space left on device)" in run.err.getvalue()
    assert "[0] one\n" in run.out.getvalue()
    # The last line comes from memory, so the verdict has it all the same.
    assert run.summary.attempts[0].last_line == "the reason"


def test_a_log_that_cannot_be_created_ends_no_training() -> None:
    """A disk that is full when an attempt starts; the next attempt writes its own log."""
    code = "print('said'); " + PREEMPTED_UNTIL.replace("UNTIL", "3")
    made = Run(code, Blocks())
    assert made.kinds == ["preempted", "preempted", "done"]
    assert made.err.getvalue().count("output of the worker cannot be written") == 1
    assert Path("logs/attempt-3-worker-0.log").read_text() == "said\n"


class Blocks(LoopObserver):
    """Puts a directory where the second attempt wants its log."""

    def started(self, worker: Any) -> None:
        super().started(worker)
        Path("logs/attempt-2-worker-0.log").mkdir(exist_ok=True)


def test_a_log_that_was_removed_is_created_again() -> None:
    said: list[str] = []
    log = WorkerLog(Path("logs/worker.log"), said.append)
    log.write(b"one\n")
    shutil.rmtree("logs")
    log.write(b"two\n")
    log.close()
    text = Path("logs/worker.log").read_text()
    assert text == "\n[perdure: 4 bytes are missing here: the file was removed]\ntwo\n"
    assert said == []


def test_the_advice_fits_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    Path("file").touch()
    WorkerLog(Path("file/worker.log"), said.append).write(b"one\n")
    assert "(Not a directory)" in said[0]
    assert "make file a directory that can be written" in said[0]
    FullDisk(monkeypatch, "full.log", 0)
    WorkerLog(Path("full.log"), said.append).write(b"one\n")
    assert "free some space there" in said[1]


def test_a_log_follows_no_link() -> None:
    Path("victim").write_text("mine")
    Path("worker.log").symlink_to("victim")
    said: list[str] = []
    log = WorkerLog(Path("worker.log"), said.append)
    log.write(b"text\n")
    log.close()
    assert Path("victim").read_text() == "mine"
    assert "output of the worker cannot be written" in said[0]


# ---------------------------------------------------------------- times

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def test_lines_have_times_when_asked_for() -> None:
    code = "print('one\\ntwo'); " + PREEMPTED_UNTIL.replace("UNTIL", "2")
    run = cli("--timestamps", "--log-dir", "logs", code=code)
    out, err = run.communicate()
    assert re.fullmatch(rf"(\[0\] {TIME} (one|two)\n){{4}}", out)
    assert re.search(rf"^perdure: {TIME} attempt 1 ended", err, re.MULTILINE)
    log = Path("logs/attempt-1-worker-0.log").read_text()
    assert re.fullmatch(rf"{TIME} one\n{TIME} two\n", log)
    # The control: without the option there are none.
    assert cli(code=code).communicate()[0] == "[0] one\n[0] two\n" * 2
