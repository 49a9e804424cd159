"""Proves exact resume and topology invariance with the demo's programs. 30 minutes on two cores.

Run by `make proof-foundation`; ARGS='--data PATH' adds the accuracy on MNIST.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from perdure.checkpoint import CheckpointManager
from perdure.demo import GUARDS
from perdure.demo.driver import run_group
from perdure.store import Run, verify_run
from perdure.supervise.worker import Worker
from report import Row, finish, row

ENGINES = ("jax", "torch")
DEMOS = 5
KILL_STEPS = 30
TOPOLOGY_STEPS = 12
FLIPS = 200
ACCURACY = 0.97


def train(
    engine: str,
    directory: Path,
    steps: int,
    devices: int = 1,
    processes: int = 1,
    kill_at: int | None = None,
) -> int:
    """Run a training program once, with SIGKILL after step `kill_at`; return the last finished step."""
    command = [sys.executable, "-m", f"perdure.demo.train_{engine}"]
    command += ["--run", str(directory), "--steps", str(steps), "--devices", str(devices)]
    environment = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    done = 0

    def on_event(worker: int, event: dict[str, Any], group: Sequence[Worker]) -> None:
        nonlocal done
        if worker == 0 and event["event"] == "step":
            done = event["step"]
            for each in group if done == kill_at else ():
                each.kill()

    run_group(command, processes, environment, on_event).require([0] if kill_at is None else [-9])
    return done


def fingerprint(directory: Path, step: int) -> str:
    """The fingerprint of a committed checkpoint."""
    return Run(directory).manifest(step).fingerprint


def demo(*arguments: str) -> tuple[int, Any]:
    """Run `perdure demo --json`; return its exit status and its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "perdure.cli", "demo", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def demos(engine: str) -> Iterator[bool]:
    """Demos with random kill points pass."""
    for seed in random.Random(engine).sample(range(10**6), DEMOS):
        status, result = demo("--engine", engine, "--seed", str(seed))
        yield status == 0 and result["pass"]


def guards(engine: str) -> Iterator[bool]:
    """Without one guard, the demo ends with FAIL."""
    for guard in GUARDS:
        status, result = demo("--engine", engine, "--without", guard, "--epochs", "2")
        yield status == 1 and not result["pass"] and None not in result["fingerprints"]


def topologies(engine: str, work: Path) -> Iterator[bool]:
    """All devices and processes give one fingerprint."""
    shapes = {
        "jax": [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 2)],
        "torch": [(1, 1), (1, 2), (1, 3), (1, 4)],
    }[engine]
    prints = []
    for devices, processes in shapes:
        directory = work / f"{engine}-{devices}-{processes}"
        train(engine, directory, TOPOLOGY_STEPS, devices, processes)
        prints.append(fingerprint(directory, TOPOLOGY_STEPS))
        yield prints[-1] == prints[0]


def kills(engine: str, work: Path) -> Iterator[bool]:
    """SIGKILL after every step, in a new run each."""
    plain = work / f"{engine}-plain"
    train(engine, plain, KILL_STEPS)
    expected = fingerprint(plain, KILL_STEPS)
    for step in range(1, KILL_STEPS):
        directory = work / f"{engine}-kill-{step}"
        train(engine, directory, KILL_STEPS, kill_at=step)
        train(engine, directory, KILL_STEPS)
        yield fingerprint(directory, KILL_STEPS) == expected
    # A kill after the last step happens between the last save and the end of the run.
    directory = work / f"{engine}-kill-{KILL_STEPS}"
    train(engine, directory, KILL_STEPS, kill_at=KILL_STEPS)
    train(engine, directory, KILL_STEPS)
    yield fingerprint(directory, KILL_STEPS) == expected


def flips(work: Path, restores: list[bool]) -> Iterator[bool]:
    """Single flipped bits at random places of packs and manifests are found."""
    source = work / "flips"
    train("jax", source, 15)
    chance = random.Random(5)
    files = sorted([*(source / "packs").iterdir(), *(source / "checkpoints").iterdir()])
    sizes = [path.stat().st_size for path in files]
    steps = Run(source).steps()
    for number in range(FLIPS):
        # Half of them by size, which hits packs, and half by file, so that manifests are hit as well.
        victim = chance.choices(files, sizes if number % 2 else None)[0]
        copy = work / "flipped"
        shutil.copytree(source, copy)
        target = copy / victim.relative_to(source)
        data = bytearray(target.read_bytes())
        bit = chance.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        target.write_bytes(data)
        report = verify_run(Run(copy))
        yield not report.ok
        restores.append(_restore_falls_back(copy, report.good, steps, victim.name))
        shutil.rmtree(copy)


def _restore_falls_back(copy: Path, good: tuple[int, ...], steps: list[int], victim: str) -> bool:
    """The newest checkpoint whose chunks are whole is restored, and a warning names the file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CheckpointManager(copy) as manager:
            _, step = manager.restore()
    named = any(victim in str(warning.message) for warning in caught)
    # A check finds a flip in the index of a pack as well, which harms no checkpoint.
    return step == steps[-1] or (step == max(good) and named)


def rows(engines: list[str], data: str | None) -> Iterator[Row]:
    """The rows of the proof."""
    with tempfile.TemporaryDirectory(prefix="perdure-proof-") as name:
        work = Path(name)
        restores: list[bool] = []
        yield row("flipped bits in packs and manifests that are found", flips(work, restores))
        yield row("restores after them that took the newest good checkpoint", restores)
        for engine in engines:
            yield row(
                f"{engine}: runs of {KILL_STEPS} steps, killed after each, that end equal",
                kills(engine, work),
            )
            yield row(f"{engine}: demos with random kill points that end with PASS", demos(engine))
            if data is not None:
                yield row(f"{engine}: MNIST test accuracy above {ACCURACY}", mnist(engine, data))
            yield row(
                f"{engine}: topologies with the fingerprint of one device", topologies(engine, work)
            )
            yield row(f"{engine}: demos without one guard that end with FAIL", guards(engine))


def mnist(engine: str, data: str) -> Iterator[bool]:
    """The accuracy on MNIST after 10 epochs, with V=8 and a global batch of 128."""
    status, result = demo("--engine", engine, "--data", data, "--epochs", "10", "--seed", "1")
    print(f"       test accuracy: {result['accuracy']}, on {result['test_examples']} digits")
    yield status == 0 and result["accuracy"][0] > ACCURACY


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="MNIST files, for the accuracy")
    parser.add_argument("--engine", choices=ENGINES, help="one of the engines; by default both")
    options = parser.parse_args()
    engines: list[str] = [options.engine] if options.engine else list(ENGINES)
    finish("foundation", rows(engines, options.data))
