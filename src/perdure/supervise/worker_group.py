"""`WorkerGroup`: the worker processes of one machine, as one thing that is started, heard and ended.

Invariant: leaving the `with` block leaves no worker behind, however it is left. A worker says what
it did by JSON objects, one a line, on its standard output; its standard error is kept.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from perdure.errors import ClusterError
from perdure.ports import free_ports
from perdure.supervise.worker_environment import tf_config

TAIL_BYTES = 4000


@dataclass(frozen=True)
class Ended:
    """How a group ended: exit status of every worker, -n for one killed by signal n."""

    statuses: tuple[int, ...]

    @property
    def status(self) -> int:
        """The one that tells most: a signal, then a failure, then 75, then 0."""
        return min(self.statuses, key=lambda s: (s >= 0, s in (0, 75), s == 0, s))

    def describe(self) -> str:
        """`exit 0`, `SIGKILL`."""
        status = self.status
        return f"exit {status}" if status >= 0 else signal.Signals(-status).name


class WorkerGroup:
    """Workers that run `command` together.

    Each gets `environment` on top of this process's own; more than one get a `TF_CONFIG` with a
    fresh coordinator port on the loopback interface.
    """

    def __init__(
        self, command: Sequence[str], workers: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = list(command)
        self._workers = workers
        self._environment = dict(environment or {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._logs: list[Any] = []
        self._cleanup = ExitStack()

    def __enter__(self) -> WorkerGroup:
        ports = free_ports(self._workers)
        for index in range(self._workers):
            environment = {**os.environ, **self._environment}
            environment.pop("TF_CONFIG", None)
            if self._workers > 1:
                environment["TF_CONFIG"] = tf_config(ports, index)
            log = self._cleanup.enter_context(tempfile.TemporaryFile())
            self._logs.append(log)
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(index, process), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.wait()
        self._cleanup.close()

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(worker, event) as they come in, until every worker has closed its output."""
        open_outputs = self._workers
        while open_outputs:
            worker, event = self._events.get()
            if event is None:
                open_outputs -= 1
            else:
                yield worker, event

    def kill(self) -> None:
        """SIGKILL to every worker that still runs."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM to every worker that still runs."""
        self._signal(signal.SIGTERM)

    def wait(self) -> Ended:
        """Wait until every worker has ended."""
        return Ended(tuple(process.wait() for process in self._processes))

    def log(self, worker: int) -> str:
        """The end of what a worker wrote to its standard error."""
        log = self._logs[worker]
        log.flush()
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - TAIL_BYTES))
        return log.read().decode(errors="replace")

    def require(self, ended: Ended, expected: Sequence[int]) -> None:
        """Raise `ClusterError` with the workers' last words unless all ended as expected."""
        for worker, status in enumerate(ended.statuses):
            if status not in expected:
                raise ClusterError(
                    f"worker {worker} of {self._workers} ended with {status}, expected "
                    f"{' or '.join(map(str, expected))}. The end of its log:\n{self.log(worker)}"
                )

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _listen(self, index: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if line.startswith(b"{"):
                    self._events.put((index, json.loads(line)))
        self._events.put((index, None))
