"""Runs programs in forks of a process that has imported a framework, which would take each of them
seconds.

There is one such process (`fork_server.py`) for each engine and test process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from json import JSONDecoder
from pathlib import Path
from typing import Any

LIMIT_S = 480
TOPOLOGY = ("TF_CONFIG", "XLA_FLAGS", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
"""Variables of a topology, which the environment of a program has only where its test sets them."""

ENGINES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "jax": ({}, ("perdure.jax", "optax", "flax.nnx")),
    "torch": ({}, ("perdure.torch", "torch.distributed", "torch._dynamo")),
    "keras-jax": ({"KERAS_BACKEND": "jax"}, ("keras", "perdure.jax", "optax", "flax.nnx")),
    "keras-torch": ({"KERAS_BACKEND": "torch"}, ("keras", "perdure.torch", "torch._dynamo")),
    "documents": (
        {"KERAS_BACKEND": "jax"},
        ("keras", "perdure.jax", "optax", "flax.nnx", "equinox", "perdure.torch", "torch._dynamo"),
    ),
}
"""Of each kind of server: variables that the imports read, and what it imports."""

Ended = tuple[int, str, str]
"""Exit status, standard output and standard error."""


def run_forked(
    engine: str,
    program: Path,
    arguments: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
) -> list[Ended]:
    """Run `program` at the same time with each of `arguments` and `environments`, and wait for all.

    The hashes of strings are the same in all processes. A test of what must not depend on them starts
    interpreters of its own.
    """
    server = _server(engine)
    with tempfile.TemporaryDirectory() as directory:
        outputs = [
            (Path(directory, f"out-{number}"), Path(directory, f"err-{number}"))
            for number in range(len(arguments))
        ]
        workers = [
            {
                "program": str(program),
                "arguments": list(words),
                "environment": dict(environment),
                "out": str(out),
                "err": str(err),
            }
            for words, environment, (out, err) in zip(arguments, environments, outputs, strict=True)
        ]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(workers) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], LIMIT_S)[0]:
            _end(server)
        line = server.stdout.readline()
        if not line:
            _server.cache_clear()
        statuses = json.loads(line) if line else [-signal.SIGKILL] * len(workers)
        return [
            (status, _text(out), _text(err))
            for status, (out, err) in zip(statuses, outputs, strict=True)
        ]


def events(out: str) -> list[Any]:
    """The JSON objects in the output of a program, one a line at most.

    Gloo writes to standard output too, and may leave text without an end of line before an object.
    """
    lines = [line[line.find("{") :] for line in out.splitlines() if "{" in line]
    return [JSONDecoder().raw_decode(line)[0] for line in lines]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@cache
def _server(engine: str) -> subprocess.Popen[str]:
    variables, imports = ENGINES[engine]
    environment = {name: value for name, value in os.environ.items() if name not in TOPOLOGY}
    program = Path(__file__).with_name("fork_server.py")
    server = subprocess.Popen(
        [sys.executable, "-W", "error", program, *imports],
        env=environment | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """Kill a server and the programs that it runs."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
