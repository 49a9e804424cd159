"""Looking inside two checkpoints of 2 GiB that share 90%: bytes read, time and peak memory of commands.

    make bench-inspect        one table, and the same as JSON in build/bench-inspect.json

Both are steps of one run directory: 128 leaves of 16 MiB, float32; in every tenth chunk of 4 MiB one
element differs. Each command runs in a process of its own with a warm page cache. `diff` is compared
with a program that reads and hashes the chunks that differ, and computes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from store_probe import MIB, middle, spread
from table import Row, compared, finish, row

from perdure.store import Leaf, Run

LEAVES = 128
LEAF_BYTES = 16 * MIB
CHUNKS_APART = 10

COMMAND = """
import json, sys, time
from perdure.store.local import LocalStorage
read = 0
def counted(self, name, offset, target, inner=LocalStorage.read_into):
    global read
    count = inner(self, name, offset, target)
    read += count
    return count
LocalStorage.read_into = counted
def finish(start):
    with open("/proc/self/status") as status:  # getrusage counts the parent before exec
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak, "read": read}))
start = time.perf_counter()
"""
CLI = (
    COMMAND
    + """
from perdure.cli import main
import contextlib, io
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main(sys.argv[1:])
finish(start)
"""
)
BARE = (
    COMMAND
    + """
from perdure.look import open_checkpoint
from perdure.store.loading import stream_chunks
sides = [open_checkpoint(name) for name in sys.argv[1:]]
pairs = [
    (one, other, n)
    for one, other in zip(*(side.manifest.leaves for side in sides))
    for n, (a, b) in enumerate(zip(one.chunks, other.chunks))
    if a.hash != b.hash
]
for place, side in enumerate(sides):
    for _ in stream_chunks(side.run.storage, side.manifest, [(p[place], p[2]) for p in pairs]):
        pass
finish(start)
"""
)


def make(where: Path) -> int:
    """Write both checkpoints; returns the bytes of one."""
    rng = np.random.default_rng(0)
    arrays = [rng.random(LEAF_BYTES // 4, np.float32) for _ in range(LEAVES)]
    with Run(where, create=True) as run:
        for step in (1, 2):
            leaves = {
                f"layer{n:03}/kernel": Leaf("float32", array.shape, array.view(np.uint8).data)
                for n, array in enumerate(arrays)
            }
            run.save(step, leaves)
            for chunk in range(0, LEAVES * 4, CHUNKS_APART):
                arrays[chunk // 4][chunk % 4 * MIB + 5] += 1
    return LEAVES * LEAF_BYTES


def measure(program: str, *arguments: object) -> dict[str, Any]:
    """The last JSON line of a program in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows(where: Path, rounds: int) -> Iterator[Row]:
    size = make(where)
    sides = f"{where}@1", f"{where}@2"
    programs = {
        "bare": (BARE, *sides),
        "diff": (CLI, "diff", *sides),
        "stats": (CLI, "stats", sides[1]),
        "tree": (CLI, "tree", sides[1]),
        "ls": (CLI, "ls", where),
    }
    series: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            series[name].append(measure(*program))
    seconds = {name: [run["seconds"] for run in runs] for name, runs in series.items()}
    read = max(run["read"] for run in series["diff"]) / (2 * size)
    yield compared(row("diff: share of the bytes that is read", read, ""), "", 0.11, most=1)
    yield compared(
        row("diff", middle(seconds["diff"]), "s", spread(seconds["diff"])),
        "reading and hashing the same chunks",
        middle(seconds["bare"]),
        most=3,
    )
    for name in ("stats", "tree", "ls"):
        yield row(name, middle(seconds[name]), "s", spread(seconds[name]))
    for name in programs:
        yield row(f"{name}: peak memory", max(run["peak"] for run in series[name]) / MIB, "MiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as scratch:
        return finish(rows(Path(scratch, "run"), options.rounds), options.out)


if __name__ == "__main__":
    sys.exit(main())
