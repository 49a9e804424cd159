"""Runs programs of others undisturbed and interrupted, with perdure and in their own way."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from real_program import Edit, Program

HERE = Path(__file__).resolve().parent
OBSERVER, STAND_INS = HERE / "observe.py", HERE / "stand_ins"
LIMIT_S = 600.0
OWN_RUNS = 2


@dataclass
class End:
    """How a process ended: its status, its steps, and the hash of its weights (per rank).

    `is_trained` says that the weights have changed since the first step.
    """

    status: int
    steps: int
    digest: str
    is_trained: bool
    has_fired: bool
    errors: str


@dataclass
class Laboratory:
    """Where the programs are, with what and how often they are run.

    Attributes:
        programs: The folder of the clones.
        digits: The folder with MNIST's files.
        pythons: Interpreters; a program runs in the first that has what it needs.
        runs: Interrupted runs of each program.
    """

    programs: Path
    digits: Path
    pythons: list[str]
    runs: int
    _server: subprocess.Popen[str] | None = None
    _served: str = ""

    def python_for(self, program: Program) -> str | None:
        find = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
        for python in self.pythons:
            if not subprocess.run(
                [python, "-c", find, *program.needs], env=self._base(program.is_standing_in)
            ).returncode:
                return python
        return None

    def missing(self, program: Program) -> str:
        """Why `program` cannot be run, or ""."""
        if not (self.programs / program.folder).is_dir():
            return f"no {self.programs / program.folder}"
        if self.python_for(program) is None:
            return f"no interpreter with {', '.join(program.needs)}"
        return ""

    def start(
        self,
        program: Program,
        path: Path,
        out: Path,
        fault: str = "",
        arguments: str = "",
        is_new: bool = False,
    ) -> End:
        """Run the program at `path` once, in a fork or (`is_new`) in a new interpreter."""
        out.mkdir()
        argv = [str(path), *program.arguments.split(), *arguments.split()]
        variables = {
            "OBSERVE_OUT": str(out),
            "OBSERVE_STEP": program.steps,
            "OBSERVE_FAULT": fault,
            "OBSERVE_RANK": str(program.ranks - 1),
        }
        output = out / "output"
        if is_new:
            status = self._start_new(program, argv, variables, output)
        else:
            order = {"argv": argv, "cwd": str(path.parent), "environment": variables}
            order |= {"output": str(output), "ranks": program.ranks}
            status = self._ask(program, order)
        ends = [json.loads(file.read_bytes()) for file in sorted(out.glob("end-*.json"))]
        is_whole = status == 0 and len(ends) == program.ranks
        digest = " ".join(end["digest"] for end in ends) if is_whole else ""
        steps = max((end["steps"] for end in ends), default=0)
        errors = output.read_text(errors="replace")[-3000:] if output.exists() else ""
        is_trained = bool(ends) and all(end["trained"] for end in ends)
        return End(status, steps, digest, is_trained, bool(list(out.glob("fired-*"))), errors)

    def _start_new(
        self, program: Program, argv: list[str], variables: dict[str, str], output: Path
    ) -> int:
        python = self.python_for(program)
        assert python is not None
        command = [python]
        if program.ranks > 1:
            workers = f"--nproc-per-node={program.ranks}"
            command += ["-m", "torch.distributed.run", "--standalone", workers]
        command += [str(OBSERVER), *argv]
        with open(output, "w") as file:
            return subprocess.run(
                command,
                cwd=Path(argv[0]).parent,
                env=self._base(program.is_standing_in) | variables,
                stdout=file,
                stderr=file,
                timeout=LIMIT_S,
            ).returncode

    def _ask(self, program: Program, order: dict[str, Any]) -> int:
        """The exit status of a fork of the server for `program`."""
        server = self._server
        if server is None or self._served != program.name:
            self.close()
            self._served = program.name
            python = self.python_for(program)
            assert python is not None
            server = self._server = subprocess.Popen(
                [python, str(OBSERVER), "--serve", *program.imports],
                env=self._base(program.is_standing_in),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], LIMIT_S)[0]:
            raise SystemExit(f"{program.name}: no end after {LIMIT_S:.0f} s")
        return int(server.stdout.readline())

    def close(self) -> None:
        """End the server."""
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            self._server.wait()
        self._server = None

    def _base(self, is_standing_in: bool) -> dict[str, str]:
        paths = [str(STAND_INS) if is_standing_in else "", os.environ.get("PYTHONPATH", "")]
        settings = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "MNIST_DIGITS": str(self.digits),
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": os.path.join(gettempdir(), "perdure-proof-doors-jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PJRT_NPROC": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        return dict(os.environ) | settings


@dataclass
class Findings:
    """What the runs of one program gave: `own` says what its own way of resuming gives."""

    outcomes: list[bool]
    repeated: int
    own: str


def trial(lab: Laboratory, program: Program) -> Findings:
    """The undisturbed run, the interrupted ones, and its own way of resuming."""
    with TemporaryDirectory(prefix="real-") as name:
        folder = Path(name)
        edited = program.copy(lab.programs, folder / "undisturbed", program.edits)
        whole = lab.start(program, edited, folder / "out")
        if not whole.digest or not whole.is_trained:
            reason = "its weights did not change" if whole.digest else f"status {whole.status}"
            print(f"  undisturbed: {reason}\n{whole.errors}", flush=True)
            return Findings([False], 0, "")
        findings = Findings([], 0, "none: begins again")
        for number, fault in enumerate(_faults(program, whole.steps, lab.runs)):
            target = folder / f"{number}"
            ends = _interrupted(lab, program, target, program.edits, fault, is_new=number % 10 == 9)
            is_equal, note = _compare(whole, ends)
            findings.outcomes.append(is_equal)
            repeated = int(fault.split(":")[1]) + ends[1].steps - whole.steps
            findings.repeated = max(findings.repeated, repeated)
            print(f"  {fault}: {note or f'equal, {repeated} steps repeated'}", flush=True)
        if program.own:
            findings.own = f"{program.own}: {_own_way(lab, program, folder)}"
        return findings


def _own_way(lab: Laboratory, program: Program, folder: Path) -> str:
    plain = program.copy(lab.programs, folder / "own", program.own_edits)
    whole = lab.start(program, plain, folder / "own-out")
    if not whole.digest:
        print(f"  own way, undisturbed: status {whole.status}\n{whole.errors}", flush=True)
        return "did not run"
    equal = 0
    for number, fault in enumerate(_faults(program, whole.steps, OWN_RUNS)):
        ends = _interrupted(
            lab, program, folder / f"own-{number}", program.own_edits, fault, program.own_arguments
        )
        is_equal, note = _compare(whole, ends)
        equal += is_equal
        lines = note.strip().splitlines() or ["equal"]
        print(f"  own way, {fault}: {'; '.join(dict.fromkeys((lines[0], lines[-1])))}", flush=True)
    return f"{equal} of {OWN_RUNS} equal"


def _interrupted(
    lab: Laboratory,
    program: Program,
    folder: Path,
    edits: tuple[Edit, ...],
    fault: str,
    arguments: str = "",
    is_new: bool = False,
) -> tuple[End, End]:
    """A run that is interrupted, and the one that follows it (`is_new`: in a new interpreter)."""
    path = program.copy(lab.programs, folder, edits)
    first = lab.start(program, path, folder / "out-first", fault)
    second = lab.start(program, path, folder / "out-second", "", arguments, is_new)
    return first, second


def _compare(whole: End, ends: tuple[End, End]) -> tuple[bool, str]:
    """Whether the fault happened, the run was resumed, and the bits are equal; and what is wrong."""
    first, second = ends
    if not first.has_fired or first.digest:  # Lightning ends with status 0 after SIGTERM
        return False, f"the fault did not fire, status {first.status}\n{first.errors}"
    if not second.digest:
        return False, f"status {second.status} after the resume\n{second.errors}"
    if second.digest != whole.digest:
        return False, f"other bits, {second.steps} of {whole.steps} steps after the restart"
    if second.steps >= whole.steps:
        return False, f"began again: {second.steps} of {whole.steps} steps after the restart"
    return True, ""


def _faults(program: Program, steps: int, runs: int) -> Iterator[str]:
    """SIGKILL and SIGTERM by turns, in the middle of epochs, in the second half of them too."""
    places = [
        step
        for step in range(program.first, steps - 1)
        if 0 < step % program.epoch < program.epoch - 1
    ]
    chosen = random.Random(program.name).sample(places, min(runs, len(places)))
    for number in range(runs):
        signal = ("SIGKILL", "SIGTERM")[number % 2]
        yield f"{signal}:{chosen[number % len(chosen)]}"
