"""`Worker`: one process of a run, from its start to its end: its output, its heartbeat, its log.

Invariant: no method waits for the process except `close`, which has killed it before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perdure.runtime import heartbeats
from perdure.runtime.excluded_devices import CorruptionReport, read_report
from perdure.runtime.heartbeats import Beat
from perdure.runtime.process_stat import SESSION, STATE, TIMES, stat_fields
from perdure.supervise.memory_limit import MemoryLimit
from perdure.supervise.worker_log import WorkerLog

READ_BYTES = 65536
MOST_READS = 16  # at a time, so that a worker that never stops writing does not block the others
LINE_BYTES = 2**20  # of a line that has no end yet are kept
LINE_CHARACTERS = 300
FULL_DISK = ("[Errno 28]", os.strerror(errno.ENOSPC), "[Errno 122]", os.strerror(errno.EDQUOT))
FULL_DISK_LINES = 20  # at the end of the output, in which an error of a full disk is looked for
ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/vfio/")
RANK = re.compile(r"^\[rank\d+\]: ?")  # which PyTorch writes in front of each line of a traceback
FRAME = re.compile(r'  File ".*", line \d+')
ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-_])")


class Worker:
    """A started worker.

    Args:
        command: The program and its arguments.
        environment: All its variables, with the file for heartbeats.
        index: Its number in the group.
        place: Its place on the machine, which stays the same if the group becomes smaller.
        attempt: Counts from 1.
        log: The file that gets both of its outputs.
        on_line: Is called with `index` and every line of both outputs, with its end. A line that is
            drawn again and again (with carriage returns), or is very long, comes in parts.
        report: Is called with a message if the log cannot be written.
        stamp: Gives the time that begins each line of the log; None for no times.
        process: A process that runs the command already (see `WarmWorkers`).

    Raises:
        OSError: If the process cannot be created.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        index: int,
        place: int,
        attempt: int,
        log: Path,
        on_line: Callable[[int, bytes], None],
        report: Callable[[str], None],
        stamp: Callable[[], str] | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.index, self.place, self.attempt = index, place, attempt
        self.beat: Beat | None = None
        self._on_line = on_line
        self._line = bytearray()  # of a line without an end, what was not passed on yet
        self._is_drawn = self._is_open = False
        self._heartbeat = environment[heartbeats.VARIABLE]
        self._log = WorkerLog(log, report, stamp)
        try:
            self.process = process or subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        self._memory = MemoryLimit(self.process.pid)
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.exit = os.pidfd_open(self.process.pid)

    @property
    def pid(self) -> int:
        """Its process ID, which is also that of its session."""
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status, -n for one killed by signal n, None while it runs."""
        return self.process.poll()

    def read_beat(self) -> bool:
        """Read the heartbeat; True if there is a new one."""
        before, self.beat = self.beat, heartbeats.read(self._heartbeat) or self.beat
        return self.beat is not None and self.beat != before

    def saved(self) -> dict[str, int]:
        """The newest step that it reported as saved, by run directory."""
        return heartbeats.read_report(self._heartbeat, "saved") or {}

    def refusal(self) -> str:
        """Why it must not begin again where it was saved, or ""."""
        return (heartbeats.read_report(self._heartbeat, "refused") or {"text": ""})["text"]

    def corruption(self) -> CorruptionReport | None:
        """What it reported of its devices that compute wrong numbers."""
        return read_report(self._heartbeat)

    def stopped(self) -> bool:
        """Whether SIGSTOP or a debugger has stopped it."""
        try:
            return stat_fields(self.pid)[STATE] in ("T", "t")
        except OSError:
            return False

    def catches(self, number: int) -> bool:
        """Whether it handles a signal itself."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
            if match := re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE):
                return bool(int(match[1], 16) >> (number - 1) & 1)
        return False

    def uses_accelerator(self) -> bool:
        """Whether it has a GPU or a TPU open."""
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{self.pid}/fd/{name}")
                    if target.startswith(ACCELERATORS):
                        return True
        return False

    def cpu_seconds(self) -> float:
        """Processor time that the processes of its session have used so far, in seconds."""
        ticks = 0
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    fields = stat_fields(name)
                    if int(fields[SESSION]) == self.pid:
                        ticks += sum(map(int, fields[TIMES]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def listen(self) -> bool:
        """Pass on its new output; False once no process has its output open any more."""
        for _ in range(MOST_READS):
            try:
                data = os.read(self.output, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                self._flush()
                return False
            self._log.write(data)
            self._pass_on(data)
        return True

    def send(self, number: int) -> None:
        """Send a signal to the worker alone, if it still runs."""
        if self.status is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the worker and all processes of its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker, read the rest of its output, and close the files."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._log.close)
            stack.callback(os.close, self.exit)
            assert self.process.stdout is not None
            stack.callback(self.process.stdout.close)
            self.kill()
            self.process.wait()
            self.read_beat()  # the summary is made from the last heartbeat
            self.listen()
            self._flush()

    def last_line(self) -> str:
        """The last line that it wrote. It need not be about the end of the worker."""
        lines = [line for line in self.tail().splitlines() if line.strip()]
        return _plain(lines[-1].strip())[:LINE_CHARACTERS] if lines else ""

    def exception(self) -> str:
        """The exception of the last Python traceback in the end of its output, or ""."""
        lines = [RANK.sub("", line) for line in self.tail().splitlines()]
        frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
        for line in lines[frames[-1] + 1 :] if frames else ():
            if line.strip() and not line.startswith(" "):
                return _plain(line.strip())[:LINE_CHARACTERS]
        return ""

    def tail(self) -> str:
        """The end of its output."""
        return self._log.tail()

    def found_full_disk(self) -> bool:
        """Whether its output ends with the error of a full disk."""
        end = "\n".join(self.tail().splitlines()[-FULL_DISK_LINES:])
        return any(text in end for text in FULL_DISK)

    def memory_kills(self) -> str:
        """A sentence if the kernel has killed a process of its cgroup for lack of memory, or ""."""
        return self._memory.kills()

    def _pass_on(self, data: bytes) -> None:
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._line += end
            self._end_line()
        self._line += rest
        # What is drawn on one line again and again must be seen before the line ends.
        self._is_drawn = self._is_drawn or b"\r" in rest
        if self._line and (self._is_drawn or len(self._line) > LINE_BYTES):
            line, self._line = bytes(self._line), bytearray()
            self._is_open = True
            self._on_line(self.index, line)

    def _end_line(self) -> None:
        line, self._line = bytes(self._line) + b"\n", bytearray()
        self._is_drawn = self._is_open = False
        self._on_line(self.index, line)

    def _flush(self) -> None:
        if self._line or self._is_open:
            self._end_line()


def _plain(text: str) -> str:
    """`text` without escape sequences and other characters that a terminal obeys."""
    text = ESCAPE_SEQUENCE.sub("", text)
    return "".join(c if c.isprintable() else " " for c in text)
