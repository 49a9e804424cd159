"""Two machines with two workers each, under `perdure run --multi-node` on both.

The machines are two network name spaces with a cable between them, each with a host name of its own;
they share a disk. A worker of the second machine is killed: both machines restart their workers, and
the group forms again. SIGTERM to both supervisors: all workers save, and both supervisors exit with
75. The same commands once more end with the fingerprint of one undisturbed process.

Run by `make proof-nodes`. It needs `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from report import Row, finish, row

from perdure import EXIT_PREEMPTED
from perdure.store import Run
from perdure.testing import check_run

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "cluster" / "train.py"
# train.py, to which something happens at given steps.
FAULTY = ROOT / "tests" / "launch" / "faulty.py"
INSIDE = "PERDURE_NODES_INSIDE"
STEPS, KILLED_AT, ASKED_AT = 60, 13, 37
NODES, WORKERS = 2, 2
PORT = 29511
LIMIT_S = 300


class Node:
    """A machine: a process that holds its name spaces."""

    def __init__(self, number: int, work: Path) -> None:
        self.number = number
        self.address = f"10.77.0.{number + 1}"
        (work / f"hosts-{number}").write_text(
            "127.0.0.1 localhost\n" + "".join(f"10.77.0.{n + 1} node{n}\n" for n in range(NODES))
        )
        setup = f"hostname node{number} && mount --bind {work}/hosts-{number} /etc/hosts"
        command = ["unshare", "--net", "--uts", "--mount", "sh", "-c"]
        self._holder = subprocess.Popen(
            [*command, f"{setup} && ip link set lo up && echo && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"\n":
            raise RuntimeError(f"node {number} could not be made")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def inside(self, command: list[str]) -> list[str]:
        """The command that runs `command` on this machine."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", *command]

    def close(self) -> None:
        self._holder.communicate()


@contextmanager
def cluster(work: Path) -> Iterator[list[Node]]:
    """The machines, connected."""
    with ExitStack() as stack:
        nodes = [Node(number, work) for number in range(NODES)]
        for node in nodes:
            stack.callback(node.close)
        ends = [f"name eth0 netns {node.pid}" for node in nodes]
        subprocess.run(f"ip link add {ends[0]} type veth peer {ends[1]}".split(), check=True)
        for node in nodes:
            for words in (f"addr add {node.address}/24 dev eth0", "link set eth0 up"):
                subprocess.run(node.inside(["ip", *words.split()]), check=True)
        yield nodes


def start(nodes: list[Node], work: Path, faults: list[str]) -> tuple[list[int], str]:
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
    with tempfile.TemporaryDirectory(prefix="perdure-nodes-") as path:
        work = Path(path)
        (work / "marks").mkdir()
        alone = [sys.executable, str(EXAMPLE), str(work / "alone"), "--steps", str(STEPS)]
        subprocess.run(alone, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        expected = Run(work / "alone").manifest(STEPS).fingerprint
        with cluster(work) as nodes:
            places = {os.readlink(f"/proc/{node.pid}/ns/net") for node in nodes}
            yield row("machines with a network of their own", [len(places) == NODES] * NODES)
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
            yield row(
                "from the step that it was sent at", [Run(work / "run").steps()[-1] == ASKED_AT]
            )
            statuses, said = start(nodes, work, faults)
            if any(statuses):
                print(said)
            yield row("the same commands again: done, status 0", [s == 0 for s in statuses])
        found = Run(work / "run").manifest(STEPS).fingerprint
        earlier = Run(work / "run").manifest(ASKED_AT).fingerprint
        yield row("the fingerprint of one undisturbed process", [found == expected])
        yield row("control: an earlier step has another one", [earlier != expected])
        yield row("the run is whole", [bool(check_run(work / "run").good)])


def main() -> None:
    if INSIDE not in os.environ:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", *user, "--net", "--mount", sys.executable, *sys.argv]
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})
    finish("nodes", rows())


if __name__ == "__main__":
    main()
