"""`WorkerGroup`: workers that report events, without a supervisor that restarts them.

A worker reports an event as one line of JSON on its standard output. Invariant: when the `with` block
ends, no worker is left.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from json import JSONDecoder
from pathlib import Path
from typing import Any

from perdure.errors import ClusterError
from perdure.runtime import heartbeats
from perdure.runtime.ports import free_ports
from perdure.supervise.worker import Worker
from perdure.supervise.worker_environment import tf_config


@dataclass(frozen=True)
class Ended:
    """How a group ended: the exit status of every worker, -n for one killed by signal n."""

    statuses: tuple[int, ...]

    @property
    def status(self) -> int:
        """The most informative status: that of a signal, then a failure, then 75, then 0."""
        return min(self.statuses, key=lambda s: (s >= 0, s in (0, 75), s == 0, s))

    def describe(self) -> str:
        """The status as text, such as `exit 0` or `SIGKILL`."""
        status = self.status
        return f"exit {status}" if status >= 0 else signal.Signals(-status).name


class WorkerGroup:
    """Workers that run `command` together.

    Args:
        command: The program and its arguments.
        workers: How many processes to start. More than one get a `TF_CONFIG` with fresh ports.
        environment: Variables on top of those of this process.
    """

    def __init__(
        self, command: Sequence[str], workers: int = 1, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = list(command)
        self._count = workers
        self._environment = dict(environment or {})
        self._workers: list[Worker] = []
        self._lines: dict[int, list[bytes]] = {}  # parts of lines without an end
        self._events: deque[tuple[int, dict[str, Any]]] = deque()
        self._cleanup = ExitStack()

    def __enter__(self) -> WorkerGroup:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-")))
            self._selector = stack.enter_context(selectors.DefaultSelector())
            ports = free_ports(self._count)
            for index in range(self._count):
                environment = {**os.environ, **self._environment}
                environment.pop("TF_CONFIG", None)
                if self._count > 1:
                    environment["TF_CONFIG"] = tf_config(ports, index)
                environment[heartbeats.VARIABLE] = str(directory / f"heartbeat-{index}")
                worker = Worker(
                    self._command,
                    environment,
                    index=index,
                    place=index,
                    attempt=1,
                    log=directory / f"worker-{index}.log",
                    on_line=self._receive,
                    report=logging.getLogger(__name__).warning,
                )
                stack.callback(worker.close)
                self._workers.append(worker)
                self._selector.register(worker.output, selectors.EVENT_READ, worker)
                self._selector.register(worker.exit, selectors.EVENT_READ, worker)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._cleanup.close()

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (worker, event) as they arrive, until every worker has closed its output."""
        while self._listen() or self._events:
            while self._events:
                yield self._events.popleft()

    def kill(self) -> None:
        """Kill every worker that still runs, and its children."""
        for worker in self._workers:
            worker.kill()

    def terminate(self) -> None:
        """Send SIGTERM to every worker that still runs."""
        for worker in self._workers:
            worker.send(signal.SIGTERM)

    def wait(self) -> Ended:
        """Wait until every worker has ended; events that arrive meanwhile are kept."""
        while any(worker.status is None for worker in self._workers):
            self._listen()
        return Ended(tuple(worker.process.wait() for worker in self._workers))

    def log(self, worker: int) -> str:
        """The end of the output of a worker, standard output and standard error together."""
        self._workers[worker].listen()
        return self._workers[worker].tail()

    def require(self, ended: Ended, expected: Sequence[int]) -> None:
        """Raise `ClusterError` with the log of a worker that did not end as expected."""
        for worker, status in enumerate(ended.statuses):
            if status not in expected:
                raise ClusterError(
                    f"worker {worker} of {self._count} ended with {status}, expected "
                    f"{' or '.join(map(str, expected))}. The end of its log:\n{self.log(worker)}"
                )

    def _listen(self) -> bool:
        """Wait for output or the end of a worker; False once all have ended and closed their output."""
        if not self._selector.get_map():
            return False
        for key, _ in self._selector.select():
            worker: Worker = key.data
            if key.fd == worker.exit or not worker.listen():
                self._selector.unregister(key.fd)
        return True

    def _receive(self, worker: int, line: bytes) -> None:
        # Other output may look like an event, a killed worker may leave half of one, and a library may
        # have written text without an end of line just before it: both outputs share one pipe.
        parts = self._lines.setdefault(worker, [])
        parts.append(line)
        if not line.endswith(b"\n"):
            return
        text = b"".join(parts).decode(errors="replace")
        parts.clear()
        start = text.find("{")
        while start >= 0:
            with suppress(ValueError):
                event, _ = JSONDecoder().raw_decode(text, start)
                self._events.append((worker, event))
                return
            start = text.find("{", start + 1)
