"""Programs with a planted fault, and right ones, under a default drill.

Figures go to build/planted-NAME-SEED.json, so that several calls add up to one table
(build/planted.md).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest import mock

from drill_programs.planted import RIGHT, WRONG, Program

from perdure.drill.causes import diagnosis
from perdure.drill.drill import run_drill
from perdure.drill.drill_report import DrillOptions
from report import Row, row

BUILD = Path("build").absolute()

LOST = ("momentum", "schedule", "generator", "cursor")
"""What the default drill has to find under every seed."""


def wrong(name: str, seeds: Sequence[int]) -> Iterator[Row]:
    """A program with a planted fault fails, and for its reason; "unknown" is no wrong reason."""
    program = WRONG[name]
    records = [_drilled(name, program, seed) for seed in seeds]
    yield row(f"{name}: fails", [not record["pass"] for record in records])
    allowed = {*program.causes, "unknown"}
    yield row(
        f"{name}: no wrong cause is named", [set(record["causes"]) <= allowed for record in records]
    )
    yield row(
        f"{name}: {' or '.join(program.causes)} is named",
        [
            bool(record["causes"]) and set(record["causes"]) <= set(program.causes)
            for record in records
        ],
    )


def right(name: str, seeds: Sequence[int]) -> Iterator[Row]:
    """A program without a fault passes."""
    records = [_drilled(name, RIGHT[name], seed) for seed in seeds]
    yield row(f"{name}: passes", [record["pass"] for record in records])


def lost(name: str, seeds: Sequence[int]) -> Iterator[Row]:
    """Under every seed, the first runs of the default drill differ; no cause is looked for."""
    found = []
    with mock.patch("perdure.drill.drill.diagnose_run", return_value=diagnosis("unknown")):
        for seed in seeds:
            found.append(not _drilled(name, WRONG[name], seed, keep=False)["pass"])
    yield row(f"{name} lost: found under each seed by the default drill", found)


def _drilled(name: str, program: Program, seed: int, *, keep: bool = True) -> dict[str, Any]:
    """One default drill, which ends at the first run that differs."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perdure-planted-") as work:
        home = Path(work) / "home"
        home.mkdir()
        script = home / "program.py"
        script.write_text(program.source)
        environment = {"SEED": str(seed), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["PLANTED_CACHE"] = str(Path(work) / "beside" / "cache.npy")
        (Path(work) / "beside").mkdir()
        options = DrillOptions(seed=seed, runs=20, environment=environment, fail_fast=True)
        with chdir(home):
            report = run_drill([sys.executable, str(script)], options, Path(work) / "drill")
    document = report.document()
    diagnoses = [document["undisturbed"]["diagnosis"], *(r["diagnosis"] for r in document["runs"])]
    record = {
        "name": name,
        "seed": seed,
        "pass": document["pass"],
        "runs": len(document["runs"]),
        "restored": document["restored"],
        "causes": sorted({each["cause"] for each in diagnoses if each}),
        "evidence": [line for each in diagnoses if each for line in each["evidence"]],
        "problems": [r["problem"] for r in document["runs"] if r["problem"]],
        "unfired": [r["planned"] for r in document["runs"] if not r["all_fired"]],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(
        f"       {json.dumps({k: v for k, v in record.items() if v and k != 'evidence'})}",
        flush=True,
    )
    if keep:
        _keep(record)
    return record


def _keep(record: dict[str, Any]) -> None:
    BUILD.mkdir(exist_ok=True)
    path = BUILD / f"planted-{record['name']}-{record['seed']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    (BUILD / "planted.md").write_text(table())


def table() -> str:
    """What was tried of the planted programs, as Markdown."""
    records = [json.loads(path.read_text()) for path in sorted(BUILD.glob("planted-*-*.json"))]
    lines = ["| program | cause | seeds | fails | right cause | unknown | wrong cause |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, program in WRONG.items():
        mine = [record for record in records if record["name"] == name]
        causes = [set(record["causes"]) for record in mine]
        good = sum(bool(each) and each <= set(program.causes) for each in causes)
        unknown = sum(each <= {"unknown"} for each in causes)
        cells = [
            name,
            " or ".join(program.causes),
            len(mine),
            sum(not record["pass"] for record in mine),
            good,
            unknown,
            len(mine) - good - unknown,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| right program | seeds | passes | restored in |", "|---|---|---|---|"]
    for name in RIGHT:
        mine = [record for record in records if record["name"] == name]
        runs = sum(record["restored"]["runs"] for record in mine)
        tried = sum(record["restored"]["of"] for record in mine)
        passes = sum(record["pass"] for record in mine)
        lines.append(f"| {name} | {len(mine)} | {passes} | {runs} of {tried} runs |")
    return "\n".join(lines) + "\n"
