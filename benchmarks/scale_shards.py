"""Rows of `make bench-scale`: sharded saves and restores, perdure beside Orbax and DCP.

Eight arrays of float32, cut by rows (each process has whole chunks) or by columns (each chunk has bytes
of every process), on 2 and 4 processes of this machine. The stall is the time until `save` returns, of
JAX arrays, which never change, or of tensors, which may. A write ends when files and directories are
synced. Memory is what a process takes above its shards. A restore begins with files that are not in the
page cache, onto both cuts. Its memory is counted in each process that maps it; its CPU time is that of
all processes, and says more than its speed if the machine has other work. All take turns; a figure is
the middle one, and of the processes the worst.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from local_group import reports_of
from store_probe import fresh, middle, spread
from table import Row, compared, installed, row

HERE = Path(__file__).parent
PEERS = {"perdure-jax": "Orbax", "perdure-torch": "DCP"}
MODULES = {
    "perdure-jax": "jax",
    "Orbax": "orbax.checkpoint",
    "perdure-torch": "torch",
    "DCP": "torch",
}
MEMORY_MIB = 96.0
STALL_MS = 5.0

Report = dict[str, Any]


def group(name: str, cut: str, processes: int, given: argparse.Namespace, path: Path) -> Report:
    """The figures of one group: of times and memory the worst process, of bytes all together."""
    reports = reports_of(
        "scale_worker.py", processes, name, cut, given.mib, given.saves, fresh(path)
    )
    total = sum(report["expected"] for report in reports)
    for onto in (0, 1):
        found = sum(report["total"][onto] for report in reports)
        if abs(found - total) > 1e-6 * abs(total):
            raise RuntimeError(f"{name}: an undamaged checkpoint was loaded with other values")
    lists = ("stall", "write", "save peak", "load", "load peak")
    worst = {key: [max(at) for at in zip(*(r[key] for r in reports), strict=True)] for key in lists}
    cpu = [sum(at) for at in zip(*(report["load cpu"] for report in reports), strict=True)]
    return {**worst, "load cpu": cpu, "received": sum(report["received"] for report in reports)}


def rows_of(
    name: str, cut: str, count: int, mine: list[Report], theirs: list[Report], given: Any
) -> Iterator[Row]:
    """The rows of perdure and of its peer for one cut."""
    what, peer = f"{name}, {count} processes, {cut}", PEERS[name]
    total = given.mib / 1000 * 1.048576

    def values(reports: list[Report], key: str) -> list[float]:
        return [middle(report[key]) for report in reports]

    stall = [1e3 * value for value in values(mine, "stall")]
    this = row(f"{what}: stall", middle(stall), "ms", spread(stall))
    if name == "perdure-jax":
        yield compared(this, "goal", STALL_MS, most=1)
    if theirs:
        yield compared(this, peer, 1e3 * middle(values(theirs, "stall")), most=1)
    peak = max(max(report["save peak"]) for report in mine)
    figure = row(f"{what}: memory above the shards, save", peak, "MiB")
    if name == "perdure-jax":
        yield compared(figure, "goal", MEMORY_MIB, most=1)
    else:  # the copy of the shards that the loop does not wait for
        limit = MEMORY_MIB + given.mib / count
        yield compared(figure, "goal, with a copy of the shards", limit, most=1)
    if theirs:
        yield row(f"{peer}: the same", max(max(r["save peak"]) for r in theirs), "MiB")
    least = 0 if cut == "rows" else given.mib * 2**20 * (count - 1) / count
    moved = mine[0]["received"]
    yield row(f"{what}: bytes between processes", moved / 2**20, "MiB", met=moved <= least)
    speeds = [total / value for value in values(mine, "write")]
    this = row(f"{what}: durable write", middle(speeds), "GB/s", spread(speeds))
    if theirs:
        yield compared(this, peer, middle([total / t for t in values(theirs, "write")]), least=1.5)
    yield from restore_rows(what, peer, mine, theirs, total)


def restore_rows(
    what: str, peer: str, mine: list[Report], theirs: list[Report], total: float
) -> Iterator[Row]:
    """The rows of restores of `total` GB onto both cuts."""
    for number, onto in enumerate(("rows", "columns")):
        speeds = [total / report["load"][number] for report in mine]
        this = row(f"{what}: restore onto {onto}", middle(speeds), "GB/s", spread(speeds))
        if theirs:
            other = middle([total / report["load"][number] for report in theirs])
            yield compared(this, peer, other, least=1.0)
        cpu = [report["load cpu"][number] for report in mine]
        used = row(f"{what}: CPU of the restore onto {onto}", middle(cpu), "s", spread(cpu))
        if theirs:
            other = middle([report["load cpu"][number] for report in theirs])
            used |= {"against": peer, "limit": other, "ratio": used["value"] / other}
        yield used
        peaks = [report["load peak"][number] for report in mine]
        yield row(f"{what}: memory of the restore onto {onto}, with the shards", max(peaks), "MiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=1024, help="size of the sharded state")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every subject")
    parser.add_argument("--saves", type=int, default=2, help="saves in each turn, after the first")
    parser.add_argument("--processes", default="2,4", help="with commas between")
    parser.add_argument("--subjects", default=",".join(PEERS), help="with commas between")


def rows(given: argparse.Namespace) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(dir=given.out.parent.absolute()) as scratch:
        path = Path(scratch) / "files"
        for name in given.subjects.split(","):
            has_peer = installed((MODULES[PEERS[name]],))
            for count in map(int, given.processes.split(",")):
                for cut in ("rows", "columns"):
                    mine, theirs, alone = [], [], []
                    for _ in range(given.rounds):
                        alone.append(group(name, "rows", 1, given, path))
                        mine.append(group(name, cut, count, given, path))
                        if has_peer:
                            theirs.append(group(PEERS[name], cut, count, given, path))
                    yield from rows_of(name, cut, count, mine, theirs, given)
                    yield beside_one(f"{name}, {count} processes, {cut}", mine, alone, given)


def beside_one(what: str, mine: list[Report], alone: list[Report], given: Any) -> Row:
    """The write of a group beside that of one process with the whole state."""
    total = given.mib / 1000 * 1.048576
    one, speeds = ([total / middle(r["write"]) for r in reports] for reports in (alone, mine))
    this = row(f"{what}: durable write", middle(speeds), "GB/s", spread(speeds))
    return compared(this, "one process with the whole state", middle(one), least=0.95)
