"""`perdure drill` proved on four programs, and on seven that are wrong. About 20 minutes on two cores.

Run by `make proof-drill`; ARGS='--runs 10' makes it shorter, ARGS='--only plain two_workers' picks
programs. The reports go to build/drill-NAME.json and build/drill-NAME.html, and the table for
docs/DRILL.md to build/drill.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import Row, finish, row

from perdure.supervise.drill import KINDS, DrillOptions, run_drill
from perdure.supervise.drill.page import page

HERE = Path(__file__).parent
PROGRAMS = HERE / "drill_programs"
WRONG = HERE.parent / "tests" / "drill" / "programs"
BUILD = Path("build")

DEMO = ["-m", "perdure.demo.train_jax", "--run", "runs/demo", "--steps", "21", "--seed", "3"]
RIGHT: dict[str, tuple[list[str], int]] = {
    "demo": (DEMO, 1),
    "plain": ([str(PROGRAMS / "plain_jax.py")], 1),
    "keras": ([str(PROGRAMS / "keras_fit.py")], 1),
    "two_workers": ([str(PROGRAMS / "two_workers.py")], 2),
}
"""Arguments of Python, and workers."""

CAUSES = {
    "wrong_generator": "random generator",
    "wrong_iterator": "data position",
    "wrong_clock": "time",
    "wrong_metric": "metric state",
    "wrong_seed": "unseeded",
    "wrong_resume": "fails after a resume",
    "wrong_psum": "topology",
}
# What a program is wrong about only on other devices.
ON_DEVICES = {"wrong_psum"}

# Kinds that a program of one worker has not.
GROUP = {"other-workers", "worker-lost"}


def right(name: str, runs: int, seed: int) -> Iterator[Row]:
    """Line 1: one program under all kinds of faults."""
    arguments, workers = RIGHT[name]
    options = DrillOptions(runs=runs, seed=seed, workers=workers)
    found = drilled(name, arguments, options)
    faulted = found["runs"]
    for run in faulted:
        if run["verdict"] != "pass":
            print(f"       {json.dumps(run, indent=1)}")
    kinds = {run["kind"] for run in faulted}
    expected = KINDS.keys() - (GROUP if workers == 1 else set())
    yield row(
        f"{name}: faulted runs, every checkpoint equal", [r["verdict"] == "pass" for r in faulted]
    )
    yield row(
        f"{name}: faulted runs whose every fault fired",
        [r["verdict"] != "not fired" for r in faulted],
    )
    if runs >= len(expected):
        yield row(f"{name}: kinds of faults that were tried", [kind in kinds for kind in expected])


def wrong(name: str, seed: int) -> Row:
    """Line 2: a program that is wrong fails, and for its reason."""
    # Each goes on from a checkpoint, as most faults make it do.
    faults = ("other-devices",) if name in ON_DEVICES else ("sigkill-at-step", "bit-flip")
    where = PROGRAMS if name in ON_DEVICES else WRONG
    found = drilled(name, [str(where / f"{name}.py")], DrillOptions(faults, 4, seed))
    diagnoses = [found["undisturbed"]["diagnosis"], *(run["diagnosis"] for run in found["runs"])]
    causes = {each["cause"] for each in diagnoses if each}
    print(f"       {name}: {', '.join(causes)}")
    return row(f"{name}: fails, and for {CAUSES[name]} alone", [causes == {CAUSES[name]}])


def drilled(name: str, arguments: list[str], options: DrillOptions) -> dict[str, Any]:
    """The document of one drill, which is written to build/."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perdure-drill-") as where:
        report = run_drill([sys.executable, *arguments], options, Path(where))
    found = {**report.document(), "total_seconds": round(time.monotonic() - began, 1)}
    BUILD.mkdir(exist_ok=True)
    (BUILD / f"drill-{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (BUILD / f"drill-{name}.html").write_text(page(found))
    return found


def table() -> str:
    """The runs of all programs by kind of fault, as Markdown."""
    found = {
        name: json.loads(path.read_text())
        for name in RIGHT
        if (path := BUILD / f"drill-{name}.json").exists()
    }
    head = ["fault", *found]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for kind in KINDS:
        cells = [f"`{kind}`"]
        for each in found.values():
            counts = each["faults"].get(kind)
            cells.append(f"{counts['pass']} of {counts['runs']}" if counts else "-")
        lines.append("| " + " | ".join(cells) + " |")
    for what, key in (("attempts", "attempts"), ("steps repeated", "repeated_steps")):
        totals = []
        for each in found.values():
            values = [run[key] for run in each["runs"]]
            totals.append(str(sum(len(v) if isinstance(v, list) else v for v in values)))
        lines.append("| " + " | ".join([what, *totals]) + " |")
    every = [
        f"{sum(run['verdict'] == 'pass' for run in each['runs'])} of {len(each['runs'])}"
        for each in found.values()
    ]
    lines.append("| **all** | " + " | ".join(every) + " |")
    return "\n".join(lines) + "\n"


def has_callback() -> bool:
    """Whether this perdure has the callback that the Keras program uses."""
    line = [sys.executable, "-c", "from perdure.keras import BackupAndRestore"]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


def rows(only: list[str], runs: int, seed: int) -> Iterator[Row]:
    """Every line of the proof."""
    for name in CAUSES:
        if not only or name in only:
            yield wrong(name, seed)
    for name in RIGHT:
        if only and name not in only:
            continue
        if name == "keras" and not has_callback():
            print("       left out: keras: perdure.keras has no BackupAndRestore here")
            continue
        yield from right(name, runs, seed)
        (BUILD / "drill.md").write_text(table())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=[*RIGHT, *CAUSES])
    parser.add_argument("--runs", type=int, default=50, help="faulted runs of each program")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.environ.update({"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "PJRT_NPROC": "8"})
    finish("drill", rows(given.only, given.runs, given.seed))
