"""One process of a subject of bench_distribute: builds training steps and runs them on request.

    distribute_case.py FRAMEWORK [PROCESS PROCESSES COORDINATOR]

Reads lines of JSON and answers each with one. A step ends when its loss is a Python number.

    {"subject": ..., "steps": n}    the milliseconds of n steps
    {"first": ...}                  the seconds of the first step of a new subject
    {"peak": ...}                   the largest memory of this process in a few steps, in bytes
    {"ask": ...}                    what the function of that name returns
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from store_probe import resident

WARM = 6
WIDE = (784, 2048, 2048, 2048, 2048, 2048, 10)
"""The widths of a network whose parameters, 73 MB, are almost all that a step has in memory."""


class Group(NamedTuple):
    """The place of this process in a group."""

    process: int = 0
    processes: int = 1
    coordinator: str = ""


def images(batch: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    x = rng.random((batch, 28, 28), dtype=np.float32)
    return x, rng.integers(0, 10, batch, dtype=np.int32)


def tokens(batch: int, length: int = 33) -> tuple[Any, Any]:
    rows = np.random.default_rng(2).integers(0, 256, (batch, length), dtype=np.int32)
    return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])


def data(model: str, batch: int) -> tuple[Any, Any]:
    return tokens(batch) if model == "transformer" else images(batch)


def measure(step: Callable[[], float], steps: int) -> list[float]:
    out = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        out.append((time.perf_counter() - start) * 1e3)
        if not np.isfinite(loss):
            raise ArithmeticError(f"the loss became {loss}")
    return out


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak(step: Callable[[], float]) -> int:
    """The largest resident set during steps, without what compilation and the first steps took."""
    measure(step, WARM)
    Path("/proc/self/clear_refs").write_text("5")
    measure(step, WARM)
    return resident("VmHWM")


def main() -> None:
    framework, *place = sys.argv[1:]
    group = Group(int(place[0]), int(place[1]), place[2]) if place else Group()
    # Libraries write to stdout as well, so the answers have their own pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    cases: Any = importlib.import_module(f"distribute_{framework}")
    built: dict[str, Callable[[], float]] = {}

    def build(name: str) -> Callable[[], float]:
        kind, *arguments = name.split()
        return getattr(cases, kind)(group, *arguments)

    for line in sys.stdin:
        order = json.loads(line)
        if "ask" in order:
            answer: Any = getattr(cases, order["ask"])()
        elif "first" in order:
            answer = seconds(build(order["first"]))
        elif "peak" in order:
            answer = peak(build(order["peak"]))
        else:
            name = order["subject"]
            if name not in built:
                built[name] = build(name)
                measure(built[name], WARM)
            answer = measure(built[name], order["steps"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
