"""`Worker`: one process of a run, from its start to its end: its output, its heartbeat, its log.

Invariant: no method waits for the process except `close`, which has killed it before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perdure import heartbeats
from perdure.heartbeats import Beat

READ_BYTES = 65536
MOST_READS = 16  # at a time, so that a worker that never stops writing does not block the others
TAIL_BYTES = 4000
LINE_CHARACTERS = 300
# Fields of proc_pid_stat(5) after the name of the program, which may hold anything. The times are those
# of the process in user and system mode, then the same of its children that have ended.
_STAT_STATE, _STAT_SESSION, _STAT_TIMES = 0, 3, slice(11, 15)


class Worker:
    """A started worker.

    Args:
        command: The program and its arguments.
        environment: All its variables, with the file for heartbeats.
        index: Its number in the group.
        place: Its place on the machine, which stays the same if the group becomes smaller.
        attempt: Counts from 1.
        log: The file that gets both of its outputs.
        on_line: Is called with `index` and every line of both outputs.
        process: A process that runs the command already (see `WarmWorkers`).

    Raises:
        OSError: If the log or the process cannot be created.
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
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.index, self.place, self.attempt, self.log = index, place, attempt, log
        self.beat: Beat | None = None
        self._on_line = on_line
        self._rest = b""
        self._heartbeat = environment[heartbeats.VARIABLE]
        self._file = open(log, "wb", buffering=0)  # noqa: SIM115 (closed by `close`)
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
            self._file.close()
            raise
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

    def stopped(self) -> bool:
        """Whether SIGSTOP or a debugger has stopped it."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except OSError:
            return False
        return text.rpartition(")")[2].split()[_STAT_STATE] in ("T", "t")

    def cpu_seconds(self) -> float:
        """Processor time that the processes of its session have used so far, in seconds."""
        ticks = 0
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                    if int(fields[_STAT_SESSION]) == self.pid:
                        ticks += sum(map(int, fields[_STAT_TIMES]))
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
            self._keep(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._on_line(self.index, line)
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
            stack.callback(self._file.close)
            stack.callback(os.close, self.exit)
            assert self.process.stdout is not None
            stack.callback(self.process.stdout.close)
            self.kill()
            self.process.wait()
            self.read_beat()  # the summary is made from the last heartbeat
            self.listen()
            self._flush()

    def last_line(self) -> str:
        """The last line that it wrote; after an error in Python, the message of the error."""
        lines = self.tail().rstrip().splitlines()
        return lines[-1].strip()[:LINE_CHARACTERS] if lines else ""

    def tail(self) -> str:
        """The end of its log."""
        try:
            with open(self.log, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _keep(self, data: bytes) -> None:
        # A full disk must not end the run; the console still gets the lines.
        with contextlib.suppress(OSError):
            self._file.write(data)

    def _flush(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._on_line(self.index, rest)
