"""`Worker`: one process of a run, from its start to its end: its output, its heartbeat, its log.

Invariants: no method waits for the process except `close`, which has killed it before. A disk that
takes no more bytes ends nothing and is reported once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perdure.runtime import heartbeats
from perdure.runtime.heartbeats import Beat
from perdure.runtime.memory_limit import MemoryLimit
from perdure.runtime.process_stat import SESSION, STATE, TIMES, stat_fields
from perdure.runtime.system import IS_LINUX

READ_BYTES = 65536
MOST_READS = 16  # at a time, so that a worker that never stops writing does not block the others
LINE_BYTES = 2**20  # of a line that has no end yet are kept
LINE_CHARACTERS = 300
TAIL_BYTES = 4000
FULL_DISK = ("[Errno 28]", os.strerror(errno.ENOSPC), "[Errno 122]", os.strerror(errno.EDQUOT))
FULL_DISK_LINES = 20  # at the end of the output, in which an error of a full disk is looked for
ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/vfio/")
RANK = re.compile(r"^\[rank\d+\]: ?")  # which PyTorch writes in front of each line of a traceback
FRAME = re.compile(r'  File ".*", line \d+')
ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-_])")


class Worker:
    """A started worker; OSError if the process cannot be created.

    `index` is its number in the group, `slot` that on the machine, which stays the same in a
    smaller group. `log` gets both outputs; `on_line` is called with `index` and every line, a very
    long one in parts. `stamp` gives the time before each line. `process` is one that runs the
    command already (see `WarmWorkers`).

    `first` and `newest` are time and step of new steps in heartbeats; `output` and `exit`
    descriptors, the latter readable once it has ended (None except on Linux).
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        index: int,
        slot: int,
        attempt: int,
        log: Path,
        on_line: Callable[[int, bytes], None],
        report: Callable[[str], None],
        stamp: Callable[[], str] | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.index, self.slot, self.attempt = index, slot, attempt
        self.beat: Beat | None = None
        self.start: int | None = None
        self.first: tuple[float, int | None] | None = None
        self.newest: tuple[int, float] | None = None
        self.stopped_since: float | None = None
        self._on_line = on_line
        self._stamp = stamp
        self._at_line_start = True
        self._line = bytearray()  # of a line without an end, what was not passed on yet
        self._is_drawn = self._is_open = False
        self._tail = b""
        self._heartbeat = environment[heartbeats.VARIABLE]
        self._log = WorkerLog(log, report)
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
        self.memory = MemoryLimit(self.process.pid)
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.exit = os.pidfd_open(self.process.pid) if IS_LINUX else None

    @property
    def pid(self) -> int:
        """Its process ID, which is also that of its session."""
        return self.process.pid

    @property
    def status(self) -> int | None:
        """Exit status, -n for one killed by signal n, None while it runs."""
        return self.process.poll()

    def read_beat(self) -> Beat | None:
        """Its heartbeat, if there is a new one."""
        beat = heartbeats.read(self._heartbeat)
        if beat is None or beat == self.beat:
            return None
        self.beat = beat
        # The first values stay: a later beat may come from another loop, which begins again.
        if self.start is None:
            self.start = beat.start
        if self.first is None and beat.first is not None:
            self.first = beat.first, beat.first_step
        is_new = self.newest is None or beat.step != self.newest[0]
        if beat.step is not None and beat.phase != "restore" and is_new:
            self.newest = beat.step, beat.time
        return beat

    def reported(self, name: str) -> dict[str, Any]:
        """Its newest report of this name (`heartbeats.report`); empty without one."""
        return heartbeats.read_report(self._heartbeat, name) or {}

    def note_stopped(self, now: float) -> None:
        """Find out whether SIGSTOP or a debugger has stopped it."""
        since, self.stopped_since = self.stopped_since, None
        with contextlib.suppress(OSError):
            if stat_fields(self.pid)[STATE] in ("T", "t"):
                self.stopped_since = now if since is None else since

    def catches(self, number: int) -> bool:
        """Whether it handles a signal itself; True where nobody knows."""
        if not IS_LINUX:
            return True
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/status").read_text(errors="replace")
            if match := re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE):
                return bool(int(match[1], 16) >> (number - 1) & 1)
        return False

    def uses_accelerator(self) -> bool:
        """Whether it has a GPU or a TPU open."""
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{self.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file).startswith(ACCELERATORS):
                        return True
        return False

    def cpu_seconds(self) -> float:
        """Processor time that the processes of its session have used so far, in seconds."""
        if not IS_LINUX:  # nobody knows: a worker that may compute gets the longer limit
            return time.monotonic()
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
            self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
            if self._stamp is not None:
                data = self._stamped(data, self._stamp)
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
            if self.exit is not None:
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
        return self._tail.decode(errors="replace")

    def found_full_disk(self) -> bool:
        """Whether its output ends with the error of a full disk."""
        end = "\n".join(self.tail().splitlines()[-FULL_DISK_LINES:])
        return any(text in end for text in FULL_DISK)

    def _stamped(self, data: bytes, stamp: Callable[[], str]) -> bytes:
        prefix = stamp().encode() + b" "
        ends_line = data.endswith(b"\n")
        text = data[:-1] if ends_line else data
        text = (prefix if self._at_line_start else b"") + text.replace(b"\n", b"\n" + prefix)
        self._at_line_start = ends_line
        return text + b"\n" if ends_line else text

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


def remedy(error: OSError, path: Path) -> str:
    """What to do about a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space there"
    return f"make {path.parent} a directory that can be written"


class WorkerLog:
    """The output of one worker in one attempt on the disk; created again if it was removed."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._path = path
        self._report = report
        self._file: int | None = None
        self._lost, self._cause = 0, ""
        self._was_reported = False
        self.write(b"")

    def close(self) -> None:
        """Close the file, and report how much is missing in it."""
        if self._lost:
            self.write(b"")
        if self._lost:
            self._report(f"{self._path}: the last {self._lost} bytes are missing ({self._cause})")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def write(self, data: bytes) -> None:
        """Append `data`; a note stands in the place of bytes that the disk did not take."""
        self._notice_removal()
        note = b""
        if self._lost:
            note = f"\n[perdure: {self._lost} bytes are missing here: {self._cause}]\n".encode()
        view = memoryview(note + data)
        done = 0
        try:
            if self._file is None:
                self._file = self._create()
            while done < len(view):
                done += os.write(self._file, view[done:])
            self._lost = 0
        except OSError as error:
            # A note that was cut off is written again with the next output.
            lost_before = self._lost if done < len(note) else 0
            self._lost = lost_before + len(data) - max(0, done - len(note))
            self._cause = os.strerror(error.errno or 0)
            if not self._was_reported:
                self._was_reported = True
                self._report(
                    f"{self._path}: output of the worker cannot be written ({self._cause}); the run "
                    "continues, and the log says how many bytes are missing; "
                    f"{remedy(error, self._path)}"
                )

    def _create(self) -> int:
        """Open the file, without waiting for a pipe; its directory may have been removed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(self._path, flags, 0o644)
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._path, flags, 0o644)

    def _notice_removal(self) -> None:
        """Count what a log held that was removed while it was open."""
        if self._file is None:
            return
        status = os.fstat(self._file)
        if status.st_nlink == 0:
            os.close(self._file)
            self._file = None
            self._lost, self._cause = self._lost + status.st_size, "the file was removed"
