"""The promises on one NVIDIA GPU, in at most ten minutes: doctor, drill, fast steps, replay.

    python proofs/proof_gpu.py        with an interpreter whose torch and jax find the GPU

For each engine that finds one: the kernels of `perdure doctor` have equal bits under deterministic
settings; a drill of `gpu_program.py` passes; 50 steps of its run, replayed, have the bits of the
journal. On JAX a run with `PERDURE_FAST_ON` has the bits of one without. Without a GPU it refuses;
`--platform cpu` tries this program itself, and proves nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_platform import engines

from perdure.store.run import Run
from report import Row, finish, row

PROGRAM = Path(__file__).absolute().parent / "gpu_program.py"


def perdure(*arguments: object, where: Path) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a command of perdure."""
    ended = called("-m", "perdure", *arguments, where=where)
    try:
        return ended.returncode, json.loads(ended.stdout)
    except ValueError:
        print(ended.stdout[-2000:], ended.stderr[-2000:], flush=True)
        return ended.returncode or 1, {}


def called(*arguments: object, where: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**os.environ, **more}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )


def train(engine: str, run: str, steps: int, where: Path, **more: str) -> str:
    """The last line of a whole run; RuntimeError if it fails."""
    ended = called(PROGRAM, engine, run, steps, where=where, **more)
    if ended.returncode:
        raise RuntimeError(f"{PROGRAM.name} {engine}: {ended.stderr[-2000:]}")
    return ended.stdout.splitlines()[-1]


def fingerprints(run: Path) -> list[str]:
    found = Run(run)
    return [found.manifest(step).fingerprint for step in found.steps()]


def doctor_rows(where: Path) -> Iterator[Row]:
    """A row for each engine and kind of device, of the kernels under deterministic settings."""
    _, document = perdure("doctor", "--json", where=where)
    kernels: dict[str, list[bool]] = {}
    for each in document.get("comparisons", []):
        if each["group"].endswith("deterministic"):
            kernels.setdefault(each["group"], []).append(each["is_equal"])
    for group, outcomes in kernels.items():
        yield row(f"doctor, {group}: kernels", outcomes)


def drill_row(engine: str, given: argparse.Namespace, where: Path) -> Row:
    command = [sys.executable, PROGRAM, engine, "runs/a", given.steps // 2]
    status, document = perdure("drill", "--runs", given.runs, "--json", "--", *command, where=where)
    outcomes = [each["verdict"] == "pass" for each in document.get("runs", [])]
    return row(f"drill of {PROGRAM.name}, {engine}: faulted runs", [*outcomes, status == 0])


def replay_row(engine: str, given: argparse.Namespace, where: Path) -> Row:
    print(f"{engine}: {train(engine, 'runs/whole', given.steps, where)}", flush=True)
    command = [sys.executable, PROGRAM, engine, "runs/whole", given.steps]
    status, document = perdure("replay", "runs/whole", "--json", "--", *command, where=where)
    print(json.dumps(document)[:400], flush=True)
    return row(f"replay of {given.steps} steps, {engine}", [status == 0])


def fast_row(given: argparse.Namespace, where: Path) -> Row:
    steps = min(given.steps, 20)
    slow = train("jax", "runs/slow", steps, where)
    fast = train("jax", "runs/fast", steps, where, PERDURE_FAST_ON=given.platform)
    same = fingerprints(where / "runs/slow") == fingerprints(where / "runs/fast")
    print(f"without: {slow}\nwith PERDURE_FAST_ON={given.platform}: {fast}", flush=True)
    return row("jax: steps that are proven fast, or not, have the bits of the slow ones", [same])


def main() -> None:
    parser = argparse.ArgumentParser(description="The proof on one NVIDIA GPU.")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--steps", type=int, default=50, help="of the run that is replayed")
    parser.add_argument("--runs", type=int, default=2, help="faulted runs beside the restores")
    given = parser.parse_args()
    found = engines(parser, given.platform)

    def rows() -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as scratch:
            yield from doctor_rows(Path(scratch))
            for engine in found:
                where = Path(scratch) / engine
                where.mkdir()
                yield replay_row(engine, given, where)
                if engine == "jax":
                    yield fast_row(given, where)
                yield drill_row(engine, given, where)

    finish("gpu", rows())


if __name__ == "__main__":
    main()
