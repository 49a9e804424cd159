"""Saves to and loads from S3, compared with the same bytes through s3fs, on a local server.

s3fs writes the bytes as they are, in one object, and hashes nothing; perdure hashes every chunk, and
its loads verify. `--s3fs-python` names an interpreter with s3fs 2026.9.0, which must be asked for by
its exact version: with boto3, s3fs otherwise resolves to a release of 2020.

Two servers: moto, and s3rver (npm install s3rver; `--s3rver` or PATH). moto reads a whole object for
every range request; the cost of one range is measured as well, and shows moto's
part of the time of a load. s3rver serves ranges from a file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from table import Row, compared, finish, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from object_stores import moto_server, running
from perdure.store import CloudOptions, CloudStorage, Leaf, Run

MIB = 1024 * 1024
LEAF = 64 * MIB
ROUNDS = 3

PEER = """
import sys, time, json
import s3fs
endpoint, where, mib, how = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
fs = s3fs.S3FileSystem(key=sys.argv[5], secret=sys.argv[5], endpoint_url=endpoint,
                      use_listings_cache=False)
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


@dataclass(frozen=True)
class Place:
    """A bucket of a running server."""

    server: str
    endpoint: str
    bucket: str
    key: str

    def storage(self, name: str) -> CloudStorage:
        config = {"endpoint": self.endpoint, "region": "us-east-1"}
        config |= {"access_key_id": self.key, "secret_access_key": self.key}
        return CloudStorage(f"s3://{self.bucket}/{name}", CloudOptions(config=config))


@contextmanager
def on_moto() -> Iterator[Place]:
    with moto_server() as server:
        bucket = server.new_url().partition("://")[2].partition("/")[0]
        yield Place("moto", server.endpoint, bucket, "test")


@contextmanager
def on_s3rver(program: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-d", folder, "-a", "127.0.0.1", "-p", "0"]
        command += ["--configure-bucket", "bench"]
        with running(command, r"listening on ([\d.]+:\d+)", {}) as address:
            yield Place("s3rver", f"http://{address}", "bench", "S3RVER")


def ours(place: Place, mib: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each save and each load of a state in leaves of 64 MiB with new bytes."""
    saves, loads = [], []
    for number in range(rounds):
        with open("/dev/urandom", "rb") as noise:
            leaves = {
                f"w{leaf}": Leaf("uint8", (LEAF,), memoryview(noise.read(LEAF)), True)
                for leaf in range(mib * MIB // LEAF)
            }
        with Run(place.storage(f"ours-{number}"), create=True) as run:
            run.begin_writing()
            saves.append(timed(partial(run.save, 1, leaves)))
            loads.append(timed(partial(run.load, 1)))
    return saves, loads


def of_one_range(place: Place) -> float:
    """Seconds that the server needs for 4 KiB of the pack of a save, at best."""
    storage = place.storage("ours-0")
    (pack,) = storage.list("packs/")
    return min(
        timed(partial(storage.read_into, pack, 4096, memoryview(bytearray(4096)))) for _ in "123"
    )


def peer(place: Place, python: str, mib: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of s3fs: to write a file, read it in parts, and fetch it whole."""
    series: dict[str, list[float]] = {"save": [], "load": [], "cat": []}
    for number in range(rounds):
        where = f"{place.bucket}/s3fs-{number}"
        for how, seconds in series.items():
            command = [python, "-c", PEER, place.endpoint, where, str(mib), how, place.key]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"s3fs does not run with {python}: {done.stderr.strip()[-400:]}")
            seconds.append(json.loads(done.stdout)["seconds"])
    return series


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def rate(
    place: Place, what: str, mib: int, times: list[float], peer_times: dict[str, list[float]]
) -> Row:
    """The median in MB/s, compared with the faster way of s3fs."""
    mine = [mib * MIB / seconds / 1e6 for seconds in times]
    rates = {how: mib * MIB / statistics.median(of) / 1e6 for how, of in peer_times.items()}
    best = max(rates, key=lambda how: rates[how])
    text = f"S3 (loopback {place.server}): {what} of {mib} MiB"
    figure = row(text, statistics.median(mine), "MB/s", f"{min(mine):.0f} .. {max(mine):.0f}")
    return compared(figure, f"s3fs 2026.9.0, {best}", rates[best], least=1.0)


def rows_on(
    start: Callable[[], AbstractContextManager[Place]], python: str, mib: int, rounds: int
) -> Iterator[Row]:
    # A new server for each, because moto keeps all objects in memory.
    with start() as place:
        saves, loads = ours(place, mib, rounds)
        one = of_one_range(place)
    with start() as place:
        peer_times = peer(place, python, mib, rounds)
    yield rate(place, "durable save", mib, saves, {"open(wb)": peer_times["save"]})
    yield rate(
        place, "load", mib, loads, {"open(rb)": peer_times["load"], "cat_file": peer_times["cat"]}
    )
    yield row(f"S3 (loopback {place.server}): one range of 4 KiB", one * 1000, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench-cloud.json"))
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--s3fs-python", default=sys.executable)
    parser.add_argument("--s3rver", default=shutil.which("s3rver"))
    arguments = parser.parse_args()
    starts: list[Callable[[], AbstractContextManager[Place]]] = [on_moto]
    if arguments.s3rver:
        starts.append(partial(on_s3rver, arguments.s3rver))
    else:
        print("s3rver is not on PATH; only moto is measured")
    rows = (
        table_row
        for start in starts
        for table_row in rows_on(start, arguments.s3fs_python, arguments.mib, arguments.rounds)
    )
    return finish(rows, arguments.out)


if __name__ == "__main__":
    raise SystemExit(main())
