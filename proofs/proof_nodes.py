"""Two machines with two workers each, under `perdure run --multi-node` on both.

The machines are two network name spaces with a cable between them, each with a host name of its own;
they share a disk. A worker of the second machine is killed: both machines restart their workers, and
the group forms again. SIGTERM to both supervisors: all workers save, and both supervisors exit with
75. The same commands once more end with the fingerprint of one undisturbed process.

Then a machine is lost and comes back (lost_rows.py), a real Slurm runs train.sbatch (slurm_rows.py),
and jobset.yaml is compared with a published CRD (jobset_rows.py).

Run by `make proof-nodes`. It needs `unshare`, `nsenter` and `ip`. Without Slurm, or without a CRD in
$PERDURE_JOBSET_CRD, it prints that it leaves those rows out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jobset_rows
import lost_rows
import slurm_rows
from machines import Machine, enter, machines

from perdure import EXIT_PREEMPTED
from perdure.store import Run
from perdure.testing import check_run
from report import Row, finish, row

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "cluster" / "train.py"
# train.py, to which something happens at given steps.
FAULTY = ROOT / "tests" / "launch" / "faulty.py"
STEPS, KILLED_AT, ASKED_AT = 60, 13, 37
NODES, WORKERS = 2, 2
PORT = 29511
LIMIT_S = 300


def start(nodes: list[Machine], work: Path, faults: list[str]) -> tuple[list[int], str]:
    """`perdure run` on every machine: the exit statuses, and what the supervisors wrote."""
    command = [sys.executable, "-m", "perdure.cli", "run", "--multi-node"]
    command += ["--workers", str(WORKERS), "--log-dir", str(work / "logs"), "--", sys.executable]
    command += [str(FAULTY), str(work / "marks"), *faults, "--", str(work / "run")]
    command += ["--steps", str(STEPS)]
    supervisors = []
    for node in nodes:
        described = {"MASTER_ADDR": "node0", "MASTER_PORT": str(PORT)}
        described |= {"RANK": str(node.number), "WORLD_SIZE": str(NODES)}
        supervisors.append(
            subprocess.Popen(
                node.inside(command),
                env={**os.environ, **described, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [supervisor.communicate(timeout=LIMIT_S)[0] for supervisor in supervisors]
    finally:
        for supervisor in supervisors:
            supervisor.kill()
    return [supervisor.returncode for supervisor in supervisors], "".join(outputs)


def rows() -> Iterator[Row]:
    """The rows of the proof."""
    yield from jobset_rows.rows()
    with tempfile.TemporaryDirectory(prefix="perdure-nodes-") as path:
        work = Path(path)
        alone = [sys.executable, str(EXAMPLE), str(work / "alone"), "--steps", str(STEPS)]
        subprocess.run(alone, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        expected = Run(work / "alone").manifest(STEPS).fingerprint
        with machines(NODES, work) as nodes:
            places = {os.readlink(f"/proc/{node.pid}/ns/net") for node in nodes}
            yield row("machines with a network of their own", [len(places) == NODES] * NODES)
            yield from _supervised(nodes, work, expected)
            for name, part in (("lost", lost_rows.rows), ("slurm", slurm_rows.rows)):
                (work / name).mkdir()
                yield from part(work / name, nodes, expected)


def _supervised(nodes: list[Machine], work: Path, expected: str) -> Iterator[Row]:
    """`perdure run --multi-node`: a killed worker, and SIGTERM to every supervisor."""
    (work / "marks").mkdir()
    last = NODES * WORKERS - 1
    faults = [f"{KILLED_AT}:{last}:SIGKILL:self"]
    faults += [f"{ASKED_AT}:{node * WORKERS}:SIGTERM:launcher" for node in range(NODES)]
    statuses, said = start(nodes, work, faults)
    marks = sorted(mark.name for mark in (work / "marks").iterdir())
    print(f"       {', '.join(marks)}")
    held = [len(marks) == 1 + NODES, f"worker {WORKERS - 1}: SIGKILL" in said]
    held.append(said.count("starting again") >= NODES)
    yield row("a killed worker is a restart on every machine", held)
    saved = [status == EXIT_PREEMPTED for status in statuses]
    if not all(saved):
        print(said)
    yield row("SIGTERM to every supervisor: saved, status 75", saved)
    yield row("from the step that it was sent at", [Run(work / "run").steps()[-1] == ASKED_AT])
    statuses, said = start(nodes, work, faults)
    if any(statuses):
        print(said)
    yield row("the same commands again: done, status 0", [status == 0 for status in statuses])
    found = Run(work / "run").manifest(STEPS).fingerprint
    earlier = Run(work / "run").manifest(ASKED_AT).fingerprint
    yield row("the fingerprint of one undisturbed process", [found == expected])
    yield row("control: an earlier step has another one", [earlier != expected])
    yield row("the run is whole", [bool(check_run(work / "run").good)])


def main() -> None:
    enter()
    finish("nodes", rows())


if __name__ == "__main__":
    main()
