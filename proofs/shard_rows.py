"""Rows of `make proof-scale`: a state does not depend on how it is sharded over processes.

Twelve shardings for each engine, on one to four processes, uneven ones and copies among them. The state
is saved under each, and restored under each: 144 pairs. Leaves and fingerprints are the same in all.
Then one of four processes is killed ahead of each of its operations of a save and of a restore.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import Row, row

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
for folder in (TESTS, TESTS / "distribute"):
    sys.path.insert(0, str(folder))

from group import launch, results  # noqa: E402
from shard_worker import DEVICES, SHARDINGS, names  # noqa: E402

from perdure import verify_run  # noqa: E402
from perdure.store import Run  # noqa: E402

LIMIT_S = 30.0

Outcome = tuple[str, bool, str]


def group(engine: str, processes: int, action: str, root: Path) -> list[list[Outcome]]:
    """What each process of a group reports."""
    devices = {"JAX_NUM_CPU_DEVICES": str(DEVICES[processes]), "JAX_PLATFORMS": "cpu"}
    arguments = ("--engine", engine, "--action", action, "--root", str(root))
    program: Any = str(HERE / "shard_worker.py")
    env = devices if engine == "jax" else {}
    reports = results(program, processes, *arguments, env=env, forked=engine)
    return [report["outcomes"] for report in reports]


def pairs(engine: str, root: Path) -> Iterator[Row]:
    """Save under each sharding, restore under each."""
    for count in SHARDINGS[engine]:
        group(engine, count, "save", root)
    saved = {name: Run(root / name).manifest(1).fingerprint for name in names(engine)}
    first = next(iter(saved.values()))
    yield row(
        f"{engine}: the fingerprint of one process under {len(saved)} shardings",
        [fingerprint == first for fingerprint in saved.values()],
    )
    yield row(
        f"{engine}: checkpoints that verify",
        [not verify_run(Run(root / n)).problems for n in saved],
    )
    leaves: list[bool] = []
    prints: list[bool] = []
    for count in SHARDINGS[engine]:
        reports = group(engine, count, "restore", root)
        for outcomes in zip(*reports, strict=True):
            leaves.append(all(equal for _, equal, _ in outcomes))
            prints.append(all(fingerprint == first for *_, fingerprint in outcomes))
            if not (leaves[-1] and prints[-1]):
                print(f"       {engine}, {outcomes[0][0]}: {outcomes}")
    yield row(f"{engine}: saved under one and restored under another, equal leaves", leaves)
    yield row(f"{engine}: saved again by those that restored it, equal fingerprints", prints)
    yield row(f"{engine}: pairs", [True] * len(leaves) if len(leaves) == 144 else [False])


def kills(action: str, victim: int) -> Iterator[Row]:
    """Kill one of four processes ahead of each of its operations on the disk."""
    whole: list[bool] = []
    ended: list[bool] = []
    for at in range(1, 1000):
        with tempfile.TemporaryDirectory(prefix="perdure-proof-") as scratch:
            root = Path(scratch, "run")
            arguments = ("--engine", "torch", "--action", action, "--root", str(root))
            where = ("--victim", str(victim), "--at", str(at))
            program: Any = str(HERE / "shard_worker.py")
            group = launch(program, 4, *arguments, *where, forked="torch")
            statuses = [status for status, _, _ in group]
            if statuses[victim] == 0:  # it has fewer operations
                break
            report = verify_run(Run(root))
            whole.append(1 in report.good and report.ok)
            others = [found for number, (_, found, _) in enumerate(group) if number != victim]
            name = f"process {victim}"
            ended.append(
                statuses[victim] == -9
                and all(found and name in found["error"] for found in others)
                and all(found["seconds"] < LIMIT_S for found in others)
            )
            if not (whole[-1] and ended[-1]):
                print(f"       {action}, process {victim}, operation {at}: {group}")
    what = f"torch: {action}, process {victim} of 4 killed ahead of each operation"
    yield row(f"{what}: the earlier checkpoint is whole", whole)
    yield row(f"{what}: the others end with one error that says so, within {LIMIT_S:g} s", ended)


def rows(engine: str | None = None, *, kills_only: bool = False) -> Iterator[Row]:
    """All rows, or those of one engine, or those of killed processes."""
    engines = SHARDINGS if engine is None else (engine,)
    for name in () if kills_only else engines:
        with tempfile.TemporaryDirectory(prefix="perdure-proof-") as scratch:
            yield from pairs(name, Path(scratch))
    for action in ("kill-save", "kill-restore") if engine != "jax" else ():
        for victim in (3, 0):
            yield from kills(action, victim)
