"""Saving to and loading from S3, beside the same bytes through s3fs, on one server on loopback.

Peers get the bytes as they are, in one object, and hash nothing; what runs here hashes every chunk,
and the load verifies. `--s3fs-python` names an interpreter with s3fs 2026.9.0, which is asked for by
its exact version: boto3 beside s3fs resolves to an s3fs of 2020 otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.store import CloudOptions, CloudStorage, Leaf, Run
from perdure.testing.servers import ObjectServer, moto_server

MIB = 1024 * 1024
LEAF = 64 * MIB
ROUNDS = 3

PEER = """
import sys, time, json
import s3fs
endpoint, where, mib, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
fs = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=endpoint, use_listings_cache=False)
size = mib << 20
leaf = memoryview(bytearray(open("/dev/urandom", "rb").read(64 << 20)))
fs.ls(where.split("/")[0])  # connected before the clock starts
begin = time.perf_counter()
if how == "save":
    with fs.open(where, "wb") as file:
        for at in range(0, size, len(leaf)):
            file.write(leaf)
elif how == "load":
    got = 0
    target = memoryview(bytearray(64 << 20))
    with fs.open(where, "rb") as file:
        while n := file.readinto(target):
            got += n
    assert got == size, got
else:
    assert len(fs.cat_file(where)) == size
print(json.dumps({"seconds": time.perf_counter() - begin, "version": s3fs.__version__}))
"""


def ours(server: ObjectServer, mib: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each save and of each load of a state in leaves of 64 MiB, all bytes new."""
    config = server.options().config
    saves, loads = [], []
    for _ in range(rounds):
        storage = CloudStorage(server.new_url(), CloudOptions(config=config))
        with open("/dev/urandom", "rb") as noise:
            leaves = {
                f"w{at}": Leaf("uint8", (LEAF,), memoryview(noise.read(LEAF)), True)
                for at in range(mib * MIB // LEAF)
            }
        with Run(storage, create=True) as run:
            run.begin_writing()
            saves.append(timed(lambda run=run, leaves=leaves: run.save(1, leaves)))
            loads.append(timed(lambda run=run: run.load(1)))
    return saves, loads


def peer(server: ObjectServer, python: str, mib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of s3fs: a file written, the same file read in parts, and fetched whole."""
    found: dict[str, list[float]] = {"save": [], "load": [], "cat": []}
    for _ in range(rounds):
        where = server.new_url().partition("://")[2] + "/one"
        for how, seconds in found.items():
            command = [python, "-c", PEER, server.endpoint, where, str(mib), how]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"s3fs does not run with {python}: {done.stderr.strip()[-400:]}")
            seconds.append(json.loads(done.stdout)["seconds"])
    return found


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def row(what: str, mib: int, here: list[float], there: dict[str, list[float]]) -> dict[str, Any]:
    """Medians in MB/s; against the faster way of the peer."""
    value = mib * MIB / statistics.median(here) / 1e6
    rates = {how: mib * MIB / statistics.median(of) / 1e6 for how, of in there.items()}
    best = max(rates, key=lambda how: rates[how])
    ratio = value / rates[best]
    return {
        "what": f"S3 (loopback moto): {what} of {mib} MiB",
        "value": round(value, 1),
        "unit": "MB/s",
        "against": f"s3fs 2026.9.0, {best}: {rates[best]:.1f} MB/s",
        "ratio": round(ratio, 2),
        "reach": "> 1",
        "met": ratio > 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--s3fs-python", default=sys.executable)
    arguments = parser.parse_args()
    # A server of its own for each, because moto keeps in memory what it has ever been given.
    with moto_server() as server:
        saves, loads = ours(server, arguments.mib, arguments.rounds)
    with moto_server() as server:
        there = peer(server, arguments.s3fs_python, arguments.mib, arguments.rounds)
    rows = [
        row("durable save", arguments.mib, saves, {"open(wb)": there["save"]}),
        row("load", arguments.mib, loads, {"open(rb)": there["load"], "cat_file": there["cat"]}),
    ]
    for found in rows:
        print(
            f"{found['what']}: {found['value']} {found['unit']}; {found['against']}; "
            f"ratio {found['ratio']}; {'met' if found['met'] else 'NOT MET'}"
        )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
