"""What the drill, the supervisor and the launchers promise: several hours on two cores.

`perdure drill` on four programs, and on seven that are wrong; default drills of programs with a planted
fault and of right ones (planted_rows.py; `lost-NAME`: 100 seeds of what every drill has to find);
`perdure run` that loses workers over and over (`supervise`; supervise_rows.py); Ray Train and submitit
(`launch`; launch_rows.py). Run by `make proof-drill`; ARGS='--runs 10 --kills 4 --seeds 1' makes it
shorter, ARGS='--only plain launch momentum' picks parts. The reports go to build/drill-NAME.json and
build/drill-NAME.html, and the table for docs/DRILL.md to build/drill.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import launch_rows
import planted_rows
import supervise_rows
from drill_programs import planted

from perdure.drill.drill import run_drill
from perdure.drill.drill_report import DrillOptions
from perdure.drill.fault_plan import KINDS
from perdure.report.run_report import render_drill
from report import Row, finish, row

HERE = Path(__file__).absolute().parent
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
    """One program under all kinds of faults."""
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
        [len(r["fired"]) >= r["faults"] > 0 for r in faulted],
    )
    if runs >= len(expected):
        yield row(f"{name}: kinds of faults that were tried", [kind in kinds for kind in expected])


def wrong(name: str, seed: int) -> Iterator[Row]:
    """A program that is wrong fails, and for its reason."""
    faults = ("other-devices",) if name in ON_DEVICES else ("sigkill-at-step", "bit-flip")
    where = PROGRAMS if name in ON_DEVICES else WRONG
    found = drilled(name, [str(where / f"{name}.py")], DrillOptions(faults, 4, seed))
    diagnoses = [found["undisturbed"]["diagnosis"], *(run["diagnosis"] for run in found["runs"])]
    causes = {each["cause"] for each in diagnoses if each} - {"not looked for"}
    print(f"       {name}: {', '.join(causes)}")
    yield row(f"{name}: fails, and for {CAUSES[name]} alone", [causes == {CAUSES[name]}])


def drilled(name: str, arguments: list[str], options: DrillOptions) -> dict[str, Any]:
    """The document of one drill, which is written to build/."""
    # So that no table has the figures of an earlier drill in place of one that broke off.
    (BUILD / f"drill-{name}.json").unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perdure-drill-") as where, chdir(where):
        report = run_drill([sys.executable, *arguments], options, Path(where) / "drill")
    found = {**report.document(), "total_seconds": round(time.monotonic() - began, 1)}
    BUILD.mkdir(exist_ok=True)
    (BUILD / f"drill-{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (BUILD / f"drill-{name}.html").write_text(render_drill(found))
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


def launched() -> Iterator[Row]:
    """Ray Train and submitit bring a job back."""
    with tempfile.TemporaryDirectory(prefix="perdure-proof-") as work:
        yield from launch_rows.rows(Path(work))


def parts(
    runs: int, seed: int, kills: int, seeds: int, lost: int
) -> Mapping[str, Callable[[], Iterator[Row]]]:
    """Every part of the proof by its name, the longest last."""
    every = range(seeds)
    return {
        **{name: partial(planted_rows.wrong, name, every) for name in planted.WRONG},
        **{name: partial(planted_rows.right, name, every) for name in planted.RIGHT},
        **{
            f"lost-{name}": partial(planted_rows.lost, name, range(lost))
            for name in planted_rows.LOST
        },
        **{name: partial(wrong, name, seed) for name in CAUSES},
        "supervise": partial(supervise_rows.rows, kills),
        "launch": launched,
        **{name: partial(right, name, runs, seed) for name in RIGHT},
    }


def rows(chosen: Mapping[str, Callable[[], Iterator[Row]]]) -> Iterator[Row]:
    """Every line of the chosen parts. A part that breaks (a program that cannot import what it needs,
    for instance) is a row that is not met, and the others are still tried."""
    for name, part in chosen.items():
        try:
            yield from part()
        except Exception as error:  # noqa: BLE001 (whatever it was, it is in the row)
            traceback.print_exc()
            said = str(error).strip().splitlines() or [""]
            yield row(
                f"{name}: broken off, {type(error).__name__}: {said[0]} ... {said[-1]}", [False]
            )
        if name in RIGHT:
            BUILD.mkdir(exist_ok=True)
            (BUILD / "drill.md").write_text(table())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    names = list(parts(0, 0, 0, 0, 0))
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="PART")
    parser.add_argument("--runs", type=int, default=50, help="faulted runs of each program")
    parser.add_argument(
        "--kills", type=int, default=20, help="of a worker, in the part `supervise`"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5, help="of each planted program")
    parser.add_argument("--lost", type=int, default=100, help="seeds of each part `lost-NAME`")
    given = parser.parse_args()
    os.environ.update({"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "PJRT_NPROC": "8"})
    every = parts(given.runs, given.seed, given.kills, given.seeds, given.lost)
    finish("drill", rows({name: every[name] for name in names if name in given.only}))
