"""Part "cloud" of the proof of the store: real S3 and Azure protocols, kills, races.

Azurite is searched on PATH and under PERDURE_AZURITE.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from report import Row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from http_proxy import Request, proxy_to
from object_stores import ObjectServer, ServerUnavailable, azurite_server, moto_server
from perdure.errors import LockedError, StepExistsError
from perdure.store import Leaf, Run
from perdure.testing import check_run

KILLS = 40
WRITERS = 8
RACES = 12
LARGE = 17 * 1024 * 1024

SUITES = {"moto (S3)": "TestS3", "Azurite": "TestAzure"}
TESTS = Path(__file__).resolve().parent.parent / "tests" / "store" / "test_conformance.py"

SAVER = """
import json, sys
from perdure.store import CloudOptions, CloudStorage, Leaf, Run
import random
url, config, size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
options = CloudOptions(config=config, single_put_bytes=8 << 20, part_bytes=5 << 20, concurrency=1)
with Run(CloudStorage(url, options), create=True) as run:
    data = random.Random(3).randbytes(size)
    run.save(3, {"w": Leaf("uint8", (size,), memoryview(data), True)})
print("committed", flush=True)
"""


def state(seed: int, size: int = 5000) -> dict[str, Leaf]:
    data = random.Random(seed).randbytes(size)
    return {"w": Leaf("uint8", (size,), memoryview(data), True)}


def cloud_rows(_work: Path) -> Iterator[Row]:
    """The rows of every server that is installed."""
    for name, start in (("moto (S3)", moto_server), ("Azurite", azurite_server)):
        try:
            with start() as server:
                yield from (conformance(name), kills(name, server), races(name, server))
        except ServerUnavailable as reason:
            print(f"       skipped: {name}: {reason}")


def conformance(name: str) -> Row:
    """The tests of the contract of `Storage`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"{TESTS}::{SUITES[name]}", f"--junit-xml={report}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        text = report.read_text() if report.exists() else ""
    counts = {
        key: int(text.partition(f' {key}="')[2].partition('"')[0] or -1)
        for key in ("tests", "failures", "errors", "skipped")
    }
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    met = done.returncode == 0 and passed == counts["tests"] > 0
    return _row(f"{name}: conformance suite", counts["tests"], passed, met)


def kills(name: str, server: ObjectServer) -> Row:
    """SIGKILL at each request of a save of a large state, or at `KILLS` of them, evenly spaced.

    Every earlier checkpoint stays readable and a check is clean; the new one is absent or whole,
    and the next writer saves it at once.
    """
    url = _prepared(server)
    with proxy_to(server.endpoint) as proxy:
        _save_in_child(server, url, proxy.endpoint)
        requests = len(proxy.requests)
    step = max(1, requests // KILLS)
    tried = held = whole = 0
    for number in range(0, requests, step):
        for moment in ("refuse", "lose"):
            tried += 1
            outcome = _kill_at(server, number, moment)
            held += outcome is not None
            whole += bool(outcome)
    what = f"{name}: SIGKILL before and after requests of an upload ({requests} requests)"
    return _row(what, tried, held, held == tried and 0 < whole < tried)


def _kill_at(server: ObjectServer, number: int, moment: str) -> bool | None:
    """Whether the checkpoint exists after a kill; None if a promise was broken."""
    url = _prepared(server)
    child: list[subprocess.Popen[str]] = []

    def fault(request: Request) -> str | None:
        if request.number < number:
            return None
        child[0].kill()
        return moment if request.number == number else "refuse"

    with proxy_to(server.endpoint, fault) as proxy:
        _save_in_child(server, url, proxy.endpoint, child)
        if not proxy.fired:
            return None
    report = check_run(server.storage(url))
    run = Run(server.storage(url))
    wanted = {1: state(1), 2: state(2), 3: state(3, LARGE)}
    if not {1, 2} <= set(report.good) <= set(wanted):
        return None
    if any(run.load(step).leaves["w"].data != wanted[step]["w"].data for step in report.good):
        return None
    with Run(server.storage(url)) as again:
        again.save(3, wanted[3])
    return 3 in report.good if check_run(server.storage(url)).good == (1, 2, 3) else None


def _prepared(server: ObjectServer) -> str:
    """A run with two checkpoints."""
    url = server.new_url()
    with Run(server.storage(url), create=True) as run:
        for step in (1, 2):
            run.save(step, state(step))
    return url


def _save_in_child(
    server: ObjectServer, url: str, endpoint: str, child: list[Any] | None = None
) -> None:
    config = json.dumps(dict(server.options(endpoint=endpoint).config))
    command = [sys.executable, "-c", SAVER, url, config, str(LARGE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if child is not None:
            child.append(process)
        process.communicate(timeout=120)


def races(name: str, server: ObjectServer) -> Row:
    """Writers without a lock commit the same step at once: one wins, the others raise."""
    url = server.new_url()
    with Run(server.storage(url), create=True) as run:
        run.save(0, state(0))
    runs = [Run(server.storage(url)) for _ in range(WRITERS)]
    held = 0
    for step in range(1, RACES + 1):

        def attempt(number: int, step: int = step) -> bool:
            runs[number].session.holds_lock = True  # as if it held the lock
            try:
                runs[number].save(step, state(100 * step + number))
            except (LockedError, StepExistsError):
                return False
            return True

        with ThreadPoolExecutor(WRITERS) as pool:
            won = [n for n, good in enumerate(pool.map(attempt, range(WRITERS))) if good]
        data = Run(server.storage(url)).load(step).leaves["w"].data
        held += len(won) == 1 and data == state(100 * step + won[0])["w"].data
    good = check_run(server.storage(url)).good
    what = f"{name}: {WRITERS} writers race for a step without a lock, exactly one wins"
    return _row(what, RACES, held, held == RACES and len(good) == RACES + 1)


def _row(what: str, tried: int, held: int, met: bool) -> Row:
    return {"what": what, "tried": tried, "held": held, "met": met}
