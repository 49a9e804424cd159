"""What many leaves and many kept checkpoints cost: saves, `latest_step`, and requests to a bucket.

`python scale_store.py CASE FOLDER COUNT` measures one case in a process of its own and prints JSON.
`rows` calls it for the installed perdure and, in turn with that, for another source tree.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from table import Row, compared, row

TESTS = Path(__file__).parent.parent / "tests"
FEW = 10
LEAVES = {
    "10,000 leaves of 1 KiB": (10_000, 1024, 60.0),
    "1,000,000 leaves of 64 B": (10**6, 64, 6e3),
}
WRITTEN = 2
"""Requests by which a save writes: its pack and its manifest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kept", type=int, default=100_000, help="checkpoints that are kept")
    parser.add_argument("--in-bucket", type=int, default=1000, help="checkpoints in the bucket")
    parser.add_argument("--most-leaves", type=int, default=10**6, help="leave larger states out")
    parser.add_argument("--before", default="", help="another src folder, measured in turns")
    parser.add_argument("--store-rounds", type=int, default=5)


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """The rows of this module, for the table of `bench_scale`."""
    sources = {"": "", **({"before: ": given.before} if given.before else {})}
    with tempfile.TemporaryDirectory(dir=given.out.parent.absolute()) as scratch:
        for text, (count, size, most) in LEAVES.items():
            if count <= given.most_leaves:
                series = {name: [] for name in sources}
                for _ in range(given.store_rounds):
                    for name, source in sources.items():
                        series[name] += child(source, "leaves", scratch, count, size)["ms"]
                for name, figures in series.items():
                    yield compared(figure(f"{name}save of {text}", figures, "ms"), "", most, most=1)
        for count in (FEW, given.kept):
            make_run(Path(scratch, f"kept{count}"), count)
        kept: dict[tuple[str, str, int], list[float]] = {}
        for number in range(given.store_rounds + 1):
            for name, source in sources.items():
                for count in (FEW, given.kept):
                    found = child(source, "first", f"{scratch}/kept{count}", count)
                    for what, ms in found.items():
                        if number:  # the first round warms the cache
                            kept.setdefault((name, what, count), []).append(ms)
        for name in sources:
            for what, reach in (("first save", 1000.0), ("prune", None), ("latest_step", None)):
                few, many = (kept[name, what, count] for count in (FEW, given.kept))
                text = f"{name}{what} beside {given.kept:,} checkpoints"
                yield row(f"{name}{what} beside {FEW}", median(few), "ms", spread(few))
                more = figure(f"{text}, more than that", [m - median(few) for m in many], "ms")
                yield more if reach is None else compared(more, "", reach, most=1)
        for name, source in sources.items():
            counts = child(source, "requests", scratch, given.in_bucket)
            for what, count in counts.items():
                text = f"{name}requests of {what} beside {given.in_bucket:,} checkpoints in S3"
                found = row(text, count, "requests")
                is_first = what.startswith("the first")
                yield found if is_first else compared(found, "", WRITTEN + 10, most=1)


def figure(text: str, series: list[float], unit: str) -> Row:
    return row(text, median(series), unit, spread(series))


def median(series: list[float]) -> float:
    return sorted(series)[len(series) // 2]


def spread(series: list[float]) -> str:
    return f"{min(series):.3g} .. {max(series):.3g}"


def child(source: str, case: str, *arguments: object) -> dict:
    print(f"  {case} {arguments[1:]} {source} ...", file=sys.stderr, flush=True)
    paths = [source] if source else []
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if source else None
    command = [sys.executable, __file__, case, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_run(path: Path, count: int) -> None:
    """A run directory with `count` checkpoints."""
    sys.path.insert(0, str(TESTS / "store"))
    from many_checkpoints import make_checkpoints

    from perdure.store import MemoryStorage

    memory = MemoryStorage()
    make_checkpoints(memory, count)
    for name, data in memory.objects.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def leaves(folder: str, count: int, size: int) -> dict[str, list[float]]:
    """ms of a committed save of `count` leaves of `size` bytes, with new values each time."""
    from perdure import CheckpointManager

    state = {f"leaf{i}": np.zeros(size // 4, np.float32) for i in range(count)}
    source = np.random.default_rng(0)
    out = []
    with CheckpointManager(f"{folder}/leaves", max_to_keep=None) as manager:
        for step in range(8 if count <= 10_000 else 1):
            for leaf in state.values():
                leaf[:] = source.random(leaf.size, np.float32)
            start = time.perf_counter()
            manager.save(step, {"model": state})
            manager.wait_until_finished()
            out.append(1e3 * (time.perf_counter() - start))
    shutil.rmtree(f"{folder}/leaves")
    return {"ms": out[2:] or out}


def first(folder: str, count: int) -> dict[str, float]:
    """ms of `latest_step` and of the first save of a process, and of a save that deletes a step."""
    from perdure import CheckpointManager

    with CheckpointManager(folder, max_to_keep=None) as manager:
        start = time.perf_counter()
        step = manager.latest_step() or 0
        latest = 1e3 * (time.perf_counter() - start)
        start = time.perf_counter()
        manager.save(step + 1, {"w": np.arange(100) + step})
        manager.wait_until_finished()
        save = 1e3 * (time.perf_counter() - start)
    with CheckpointManager(folder, max_to_keep=count) as manager:
        manager.save(step + 2, {"w": np.arange(100) - step})  # the process knows what is kept
        manager.wait_until_finished()
        start = time.perf_counter()
        manager.save(step + 3, {"w": np.arange(100) * step})
        manager.wait_until_finished()
        prune = 1e3 * (time.perf_counter() - start)
    return {"latest_step": latest, "first save": save, "prune": prune}


def requests(_: str, count: int) -> dict[str, int]:
    """Requests of a save in a bucket, without and with a prune that deletes."""
    sys.path[:0] = [str(TESTS), str(TESTS / "store")]
    from many_checkpoints import make_checkpoints

    from http_proxy import proxy_to
    from object_stores import moto_server
    from perdure import CheckpointManager
    from perdure.store import CloudStorage, MemoryStorage

    memory = MemoryStorage()
    make_checkpoints(memory, count)
    out: dict[str, int] = {}
    with moto_server() as server:
        url = server.new_url()
        for name, data in memory.objects.items():
            server.write(url, name, data)
        for what, keep in (("a save", None), ("a save and its prune", count)):
            with proxy_to(server.endpoint) as proxy:
                storage = CloudStorage(url, server.options(endpoint=proxy.endpoint))
                with CheckpointManager(storage, max_to_keep=keep) as manager:
                    begin = manager.latest_step() or 0
                    for step in range(begin + 1, begin + 6):
                        seen = len(proxy.requests)
                        manager.save(step, {"w": np.arange(100) + step, "frozen": np.ones(50)})
                        manager.wait_until_finished()
                        out[what] = len(proxy.requests) - seen
                        out.setdefault(f"the first save of a process ({what})", out[what])
    return out


if __name__ == "__main__":
    case = {"leaves": leaves, "first": first, "requests": requests}[sys.argv[1]]
    print(json.dumps(case(sys.argv[2], *map(int, sys.argv[3:]))))
