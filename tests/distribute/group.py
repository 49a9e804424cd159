"""Runs the worker programs of these tests as a group of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked import LIMIT_S, TOPOLOGY, Ended, events, run_forked
from perdure.runtime.ports import free_ports

HERE = Path(__file__).parent


def free_port() -> int:
    """A port that the kernel gives to nobody else before the group listens on it, seconds later."""
    return free_ports(1)[0]


def launch(
    worker: str,
    processes: int,
    *args: str,
    env: dict[str, str] | None = None,
    forked: str | None = None,
) -> list[tuple[int, Any, str]]:
    """(exit status, JSON of the last line or None, stderr) of every process of one group.

    The processes are new interpreters, or forks of one that has imported the engine `forked`.
    """
    environ = {k: v for k, v in os.environ.items() if k not in TOPOLOGY} | (env or {})
    group = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
    arguments = [[*group, "--process", str(process), *args] for process in range(processes)]
    if forked is None:
        ended = _run(HERE / worker, arguments, environ)
    else:
        ended = run_forked(forked, HERE / worker, arguments, [environ] * processes)
    return [(status, _answer(out), err) for status, out, err in ended]


def _run(program: Path, arguments: list[list[str]], environ: dict[str, str]) -> list[Ended]:
    group = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(program), *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in arguments
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in group]
    finally:
        for process in group:
            process.kill()
            process.communicate()
    return [
        (process.returncode, out, err) for process, (out, err) in zip(group, outputs, strict=True)
    ]


def _answer(out: str) -> Any:
    found = events(out)
    return found[-1] if found else None


def results(*args: Any, **kwargs: Any) -> list[Any]:
    """The JSON of every process. Fails with the stderr of a process that did not exit with 0."""
    ended = launch(*args, **kwargs)
    for status, _, err in ended:
        assert status == 0, err[-4000:]
    return [out for _, out, _ in ended]
