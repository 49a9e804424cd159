"""A machine is lost and comes back: `perdure run --multi-node` and torchrun, JAX and PyTorch.

A worker of the machine stops at a step, and then nothing of the machine is left. The other one starts
its workers again and waits. The machine boots, the same command is started there, and the run ends
with the fingerprint of one undisturbed process. A part of `make proof-nodes`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from machines import Machine

from perdure.store import Run
from report import Row, row

ROOT = Path(__file__).resolve().parents[1]
FAULTY = ROOT / "tests" / "launch" / "faulty.py"
TORCH = ROOT / "proofs" / "nodes_torch.py"
STEPS, LOST_AT, WORKERS = 60, 13, 2
LIMIT_S = 400

_DESCRIBED = ["--master-addr=node0", "--master-port=29512"]
_C10D = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29513", "--rdzv-id=proof"]


@dataclass(frozen=True)
class Case:
    """What is started on both machines, and which of them is lost.

    Attributes:
        launcher: `perdure run`, or torchrun with one of its rendezvous.
        engine: "jax" or "torch".
        lost: The number of the machine; worker 0 and the coordinator are on machine 0.
        silent: Its connections stay open, as after a loss of power.
        noticed: What the launcher of the other machine writes then.
    """

    launcher: str
    engine: str
    lost: int
    silent: bool
    noticed: str

    @property
    def what(self) -> str:
        how = "without power" if self.silent else "killed"
        return f"{self.launcher}, {self.engine}: machine {self.lost} {how}, and back"

    def command(self, node: Machine, program: list[str]) -> list[str]:
        python = [sys.executable, "-m"]
        if self.launcher == "perdure run":
            options = ["--multi-node", "--workers", str(WORKERS), "--log-dir", "logs"]
            return [*python, "perdure.cli", "run", *options, "--", sys.executable, *program]
        options = [f"--nproc-per-node={WORKERS}", "--max-restarts=3"]
        if self.launcher == "torchrun, static":
            options += ["--nnodes=2", f"--node-rank={node.number}", *_DESCRIBED]
        else:
            options += _C10D
        return [*python, "torch.distributed.run", *options, *program]


CASES = [
    Case("perdure run", "jax", 1, True, "starting again"),
    Case("perdure run", "jax", 0, True, "starting again"),
    Case("perdure run", "torch", 1, True, "starting again"),
    Case("perdure run", "torch", 0, True, "starting again"),
    Case("torchrun, static", "torch", 1, False, "WorkerLostError"),
    Case("torchrun, c10d", "torch", 1, False, "WorkerLostError"),
]


class Launchers:
    """The launcher of each machine, whose output is in a file of the machine."""

    def __init__(self, case: Case, program: list[str], work: Path) -> None:
        self._case, self._program, self.work = case, program, work
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: Machine) -> None:
        described = {"MASTER_ADDR": "node0", "MASTER_PORT": "29514"}
        described |= {"RANK": str(node.number), "WORLD_SIZE": "2"}
        environ = _environ()
        # PyTorch 2.13: without it, a machine that comes back is never told of the store of the others.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self._case.launcher == "perdure run":
            environ |= described
        with self.log(node.number).open("ab") as log:
            self._started[node.number] = subprocess.Popen(
                node.inside(self._case.command(node, self._program), self.work),
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, number: int) -> Path:
        return self.work / f"output-{number}"

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self._started.values())

    def statuses(self) -> list[int | None]:
        return [process.poll() for _, process in sorted(self._started.items())]

    def close(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()


def rows(work: Path, nodes: list[Machine], expected: str) -> Iterator[Row]:
    """The rows; `expected` is the fingerprint of examples/cluster/train.py at STEPS."""
    (work / "alone").mkdir()
    alone = [str(TORCH), str(work / "alone"), "--", str(work / "alone" / "run"), str(STEPS)]
    subprocess.run([sys.executable, *alone], check=True, env=_environ())
    fingerprints = {"jax": expected, "torch": _fingerprint(work / "alone" / "run", STEPS)}
    for number, case in enumerate(CASES):
        place = work / str(number)
        (place / "marks").mkdir(parents=True)
        yield row(case.what, _lost_and_back(case, nodes, place, fingerprints[case.engine]))
    other = [_fingerprint(work / "alone" / "run", STEPS - 5) != fingerprints["torch"]]
    yield row("control: an earlier step of PyTorch has another fingerprint", other)


def _lost_and_back(
    case: Case, nodes: list[Machine], work: Path, expected: str | None
) -> list[bool]:
    """Whether the machine was lost in the step, the other noticed, both ended, and with the bits."""
    fault = f"{LOST_AT}:{case.lost * WORKERS}:SIGSTOP:self"
    program = [str(FAULTY if case.engine == "jax" else TORCH), "marks", fault, "--", "run"]
    program += ["--steps", str(STEPS)] if case.engine == "jax" else [str(STEPS)]
    lost, other = nodes[case.lost], nodes[1 - case.lost]
    with ExitStack() as stack:
        launchers = Launchers(case, program, work)
        stack.callback(launchers.close)
        for node in nodes:
            launchers.start(node)
        until = time.monotonic() + LIMIT_S
        while not list((work / "marks").iterdir()) and time.monotonic() < until:
            time.sleep(0.1)
        marked = bool(list((work / "marks").iterdir()))
        lost.lose(silent=case.silent)
        output = launchers.log(other.number)
        while case.noticed not in output.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        noticed = case.noticed in output.read_text()
        lost.boot()
        launchers.start(lost)
        while not launchers.ended() and time.monotonic() < until:
            time.sleep(0.1)
        statuses = launchers.statuses()
    same = expected is not None and _fingerprint(work / "run", STEPS) == expected
    if not same:
        print(output.read_text()[-3000:], launchers.log(lost.number).read_text()[-3000:])
    return [marked, noticed, statuses == [0, 0], same]


def _environ() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(FAULTY.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


def _fingerprint(run: Path, step: int) -> str | None:
    found = Run(run) if run.exists() else None
    return found.manifest(step).fingerprint if found and step in found.steps() else None
