"""Rows of `make proof-audit` about `strategy.step(audit=...)`: planted errors and controls."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perdure.store import Run
from report import Row, row

HERE = Path(__file__).parent
ERRORS = 200
CLEAN = 2000
SAMPLED = 1000
RATE = 0.1


def audit_rows() -> Iterator[Row]:
    """Every row; about six minutes on two cores."""
    for engine in ("jax", "torch"):
        yield from _errors(engine, "on one of 4 devices", devices=4)
        yield from _errors(engine, "in one of two processes", workers=2)
        yield from _errors(engine, "in one of two processes with 2 devices", workers=2, devices=2)
        alarms = [
            _worker(engine, devices=devices, clean=CLEAN)["alarms"] for devices in (1, 2, 3, 4)
        ]
        yield {
            "what": f"{engine}: clean steps on 1, 2, 3 and 4 devices without an alarm",
            "tried": 4 * CLEAN,
            "held": 4 * CLEAN - sum(alarms),
            "met": sum(alarms) == 0,
        }
        yield _sampled(engine)
        yield _control(engine)
    yield from _exclusions()


def _errors(engine: str, where: str, **group: Any) -> Iterator[Row]:
    result = _worker(engine, errors=ERRORS, **group)
    assert result["fired"] == result["planted"], result
    for what, held in (("found", result["found"]), ("device and replica named", result["named"])):
        yield {
            "what": f"{engine}: single-bit errors {where}, {what}",
            "tried": result["planted"],
            "held": held,
            "met": held == result["planted"] == ERRORS,
        }


def _sampled(engine: str) -> Row:
    result = _worker(engine, devices=4, errors=SAMPLED, rate=RATE)
    expected, spread = SAMPLED * RATE, math.sqrt(SAMPLED * RATE * (1 - RATE))
    print(f"{engine}: found {result['found']} of {SAMPLED}, expected {expected:g} +- {spread:.1f}")
    is_as_drawn = result["found"] == result["drawn"] == result["named"]
    return {
        "what": f"{engine}: of errors at an audit of 10%, found as drawn, and within 3 deviations",
        "tried": result["drawn"],
        "held": result["found"],
        "met": is_as_drawn and abs(result["found"] - expected) <= 3 * spread,
    }


def _control(engine: str) -> Row:
    result = _worker(engine, devices=4, errors=ERRORS, two=True)
    return {
        "what": f"{engine}: control: without a third computation half of the blamed devices are wrong",
        "tried": ERRORS,
        "held": ERRORS - result["named"],
        "met": result["found"] == ERRORS and 0.35 <= result["named"] / ERRORS <= 0.65,
    }


def _exclusions() -> Iterator[Row]:
    """`perdure run --on-corruption exclude`: the end of a run that lost a device, or a worker."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        undisturbed = _train(directory, "undisturbed", [], 4)
        device = _train(directory, "device", ["--faulty", "0:2:1"], 4)
        worker = _train(directory, "worker", ["--faulty", "1:0:3"], 1, workers=3)
        yield row(
            "a wrong device is left out, and the bits are those of an undisturbed run",
            [device == (undisturbed[0], [[2]])],
        )
        yield row("the same of a worker with one device", [worker == (undisturbed[0], [[0]])])


def _train(
    directory: Path, name: str, arguments: list[str], devices: int, workers: int = 1
) -> tuple[str, list[list[int]]]:
    """The fingerprint at the end, and the devices that were left out after each attempt."""
    run, logs = directory / name, directory / f"{name}-logs"
    command = [
        *(sys.executable, "-m", "perdure.cli", "run", "--json", "--workers", str(workers)),
        *("--devices", str(devices), "--audit", "1", "--on-corruption", "exclude"),
        *("--log-dir", str(logs), "--", sys.executable, str(HERE / "audit_program.py")),
        *(str(run), *arguments),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    attempts = json.loads(ended.stdout)["attempts"]
    excluded = [attempt["corrupt_devices"] for attempt in attempts if attempt["corrupt_devices"]]
    store = Run(run)
    return store.manifest(store.steps()[-1]).fingerprint, excluded


def _worker(
    engine: str,
    *,
    workers: int = 1,
    devices: int = 1,
    errors: int = 0,
    clean: int = 0,
    rate: float = 1.0,
    two: bool = False,
) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, str(HERE / "audit_worker.py"), str(result), "--engine", engine]
        command += ["--devices", str(devices), "--errors", str(errors), "--clean", str(clean)]
        command += ["--rate", str(rate), *(["--two-computations"] if two else [])]
        if workers > 1:
            launcher = [sys.executable, "-m", "perdure.cli", "run", "--workers", str(workers)]
            command = [*launcher, "--log-dir", scratch, "--", *command]
        environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
        return json.loads(result.read_text())
