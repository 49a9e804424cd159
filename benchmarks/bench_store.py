"""The speed of saves and loads, compared with the limit of the disk and with other formats.

    make bench-store          one table, and the same as JSON in build/bench-store.json

All subjects have the same conditions: 2 GiB of float32 in 64 MiB leaves; a save ends when its files and
directories are synced; loads start with an empty page cache; every subject runs in its own process,
with new values before every save, and memory that was touched just before each measurement. The figures
are medians; `spread` is the lowest and the highest value of the series.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store_peers import FLIPS, SUBJECTS
from store_probe import MIB, may_drop_caches, middle, spread
from table import Row, compared, finish, installed, row

HERE = Path(__file__).parent


def child(program: str, *arguments: object) -> dict[str, Any] | None:
    """The last JSON line of a program in this folder; None, after printing the error, if it fails."""
    print(f"  {program} {arguments[0]} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{program} {arguments[0]} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def merge(
    results: dict[str, dict[str, Any] | None], name: str, figures: dict[str, Any] | None
) -> None:
    """Add the series of one round to those of earlier rounds."""
    have = results.setdefault(name, None)
    if figures is not None:
        results[name] = {key: [*(have or {}).get(key, []), *figures[key]] for key in figures}


def disk_rows(
    disk: dict[str, Any],
    perdure: dict[str, Any] | None,
    peers: dict[str, dict[str, Any]],
    tool: str,
) -> list[Row]:
    rows = []
    for verb, text, factor in (
        ("write", "durable write of 2 GiB", 1.4),
        ("load", "cold verified load of 2 GiB", 1.0),
    ):
        mine = row(text, disk[verb], "GB/s", disk[f"{verb} spread"])
        pairs = sorted(
            a / b for a, b in zip(disk[f"{verb} all"], disk[f"{verb} limit all"], strict=True)
        )
        ratio = pairs[len(pairs) // 2]
        fio = compared(mine, f"{tool}, in turn", disk[f"{verb} limit"], least=0.95)
        # The ratio of each pair, because the speed of a shared disk varies from minute to minute.
        rows.append({**fio, "ratio": ratio, "met": ratio >= 0.95})
        if peers and perdure is not None:
            # Compared with perdure's figure from the same rounds of the same program.
            best = max(peers, key=lambda name, v=verb: middle(peers[name][v]))
            mine = row(text, middle(perdure[verb]), "GB/s", spread(perdure[verb]))
            limit = middle(peers[best][verb])
            rows.append(compared(mine, f"best: {best}", limit, least=factor))
    return rows


def _why(name: str) -> str:
    return "failed, see above" if installed(SUBJECTS[name][1]) else "not installed"


def peer_rows(results: dict[str, dict[str, Any] | None]) -> list[Row]:
    rows = []
    for name, figures in results.items():
        for key, text, unit in (
            ("write", "durable write of 2 GiB", "GB/s"),
            ("load", "cold load of 2 GiB", "GB/s"),
            ("stall", "stall of an asynchronous save of 2 GiB", "ms"),
            ("small", "durable save of 5 MB in 12 leaves", "ms"),
            ("flips", "flipped bits that a load returns as data", f"of {FLIPS}"),
        ):
            if figures is None:
                rows += [row(f"{name}: {text}", None, unit, _why(name))] if key == "write" else []
            elif figures[key]:
                rows.append(
                    row(f"{name}: {text}", middle(figures[key]), unit, spread(figures[key]))
                )
    return rows


def case_rows(cases: dict[str, dict[str, Any]], orbax: dict[str, Any] | None) -> list[Row]:
    rows: list[Row] = []
    if jax := cases.get("stall_jax"):
        stall = row("stall, 2 GiB of JAX arrays", jax["stall"], "ms", jax["stall spread"])
        rows.append(compared(stall, "", 1.0, most=1.0))
        if orbax:
            rows.append(compared(stall, "Orbax", middle(orbax["stall"]), most=0.1))
    for kind in ("numpy", "torch"):
        if place := cases.get(f"stall_{kind}"):
            text = f"stall, 2 GiB of {kind} in place"
            stall = row(text, place["stall"], "ms", place["stall spread"])
            rows.append(compared(stall, "one memcpy", place["memcpy"], most=1.2))
    if small := cases.get("small"):
        save = row("5 MB in 12 leaves, committed", small["save"], "ms", small["save spread"])
        rows.append(compared(save, "one write + fsync", small["limit"], most=1.5))
    for name, key, text, unit, limit in (
        ("leaves10k", "save", "10,000 leaves of 1 KiB, committed", "ms", 60.0),
        ("delta", "share", "bytes written, 90% unchanged", "of all", 0.11),
        ("memory", "MiB", "extra memory, 2 GiB immutable", "MiB", 64.0),
        ("listing", "latest", "latest_step, 1,000 checkpoints", "ms", 5.0),
        ("listing", "ls", "perdure ls, 1,000 checkpoints", "ms", 400.0),
    ):
        if case := cases.get(name):
            mine = row(text, case[key], unit, case.get(f"{key} spread", ""))
            rows.append(compared(mine, "", limit, most=1.0))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench-store.json"))
    parser.add_argument("--mib", type=int, default=2048, help="size of the large state")
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that every subject is measured"
    )
    parser.add_argument("--without", default="", help="peers to leave out, with commas between")
    given = parser.parse_args()
    tool = "fio" if shutil.which("fio") else "bare O_DIRECT loop"
    print(f"limit of the disk: {tool}{'' if tool == 'fio' else ' (fio is not installed)'}")
    if not may_drop_caches():
        print("loads are NOT cold: this user may not write /proc/sys/vm/drop_caches")
    given.out.parent.mkdir(
        parents=True, exist_ok=True
    )  # states are written beside it, on the same disk
    return finish(rows(given, tool), given.out)


def rows(given: argparse.Namespace, tool: str) -> Iterator[Row]:
    """Measure in turns whatever is compared, then make the rows."""
    nbytes = given.mib * MIB
    results: dict[str, dict[str, Any] | None] = {}
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=given.out.parent.absolute()) as scratch:
        for name in (
            "disk",
            "stall_jax",
            "stall_numpy",
            "stall_torch",
            "small",
            "leaves10k",
            "delta",
            "memory",
            "listing",
        ):
            if (figures := child("store_cases.py", name, f"{scratch}/case", nbytes)) is not None:
                cases[name] = figures
            shutil.rmtree(f"{scratch}/case", ignore_errors=True)
        wanted = [name for name in SUBJECTS if name not in given.without.split(",")]
        # Round by round, not subject by subject, because the speed of the disk varies.
        for name in wanted * given.rounds:
            figures = None
            if installed(SUBJECTS[name][1]):
                figures = child("store_peers.py", name, f"{scratch}/peer", nbytes, 1)
            merge(results, name, figures)
            shutil.rmtree(f"{scratch}/peer", ignore_errors=True)
    peers = {n: f for n, f in results.items() if f is not None and not n.startswith("perdure")}
    if "disk" in cases:
        yield from disk_rows(cases["disk"], results.get("perdure"), peers, tool)
    yield from case_rows(cases, peers.get("Orbax"))
    yield from peer_rows(results)


if __name__ == "__main__":
    sys.exit(main())
