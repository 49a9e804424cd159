"""A bad day: two workers under `perdure run`, to which in ten minutes most things happen that can.

Workers are killed and stopped, the disk of the run is full for a while, the clock jumps by 40 days, the
bucket of the mirror does not answer for a while, and the supervisor itself is killed twice and started
again, as a scheduler would do it. The run ends with the fingerprint of an undisturbed process, no
process is left, at least 85% of the time was useful, and the record names every fault that ended an
attempt.

Run by `make proof-bad-day`; ARGS='--minutes 2' makes it shorter (the share of useful time is then only
reported). The disk is a file system in memory, in a mount name space of the proof: it needs `unshare`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from report import Row, finish, row

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bad_day_program import bucket

from object_stores import moto_server
from perdure.store import Run
from perdure.supervise.attempts_log import read_runs
from perdure.testing import check_run

PROGRAM = Path(__file__).with_name("bad_day_program.py")
# In the environment of every process of the day; what is left is counted without perdure's own mark.
TOKEN = "PERDURE_BAD_DAY"
INSIDE = "PERDURE_BAD_DAY_INSIDE"
WORKERS = 2
PACE_S = 0.05
SAVE_EVERY = 40
DISK = "32m"
STOPPED_S = 3.0
UNPLUGGED_S = 20.0
LIMIT_S = 120.0
GOODPUT, FULL_DAY_MINUTES = 0.85, 10.0
# The share of the time that is planned for steps; the rest is for restarts.
PLANNED = 0.9


class BadDay:
    """The run, what happens to it, and what was seen of that."""

    def __init__(self, work: Path, steps: int, mirror: str, endpoint: str, seed: int) -> None:
        self.run = work / "disk" / "run"
        self.steps = steps
        self.mirror = bucket(mirror, endpoint)
        self.expected: list[str] = []  # the causes that the record has to name, in their order
        self.fired: Counter[str] = Counter()
        self.left: list[int] = []  # how many processes were left, each time that none should be
        self.status: int | None = None
        self._work = work
        self._journal = work / "journal.jsonl"
        self._logs = work / "logs"
        self._arguments = ["--mirror", mirror, endpoint, "--pace", str(PACE_S)]
        self._chance = random.Random(seed)
        self._supervisors: list[subprocess.Popen[bytes]] = []
        self._began = 0.0
        self._seconds = 0.0

    # ---------------------------------------------------------------- the run

    def live(self) -> None:
        """Run to the end; each fault happens when its share of the steps is done."""
        victim = self._chance.randrange(WORKERS)
        faults: list[tuple[float, Callable[[], None]]] = [
            (0.06, lambda: self._kill(victim)),
            (0.14, self._fill_disk),
            (0.26, lambda: self._stop(1 - victim)),
            (0.36, self._unplug_bucket),
            (0.48, self._kill_supervisor),
            (0.56, lambda: self._kill(1 - victim)),
            (0.64, self._move_clock),
            (0.72, self._kill_supervisor),
            (0.80, lambda: self._stop(victim)),
            (0.88, lambda: self._kill(self._chance.randrange(WORKERS))),
        ]
        try:
            self._began = time.monotonic()
            self._start()
            for share, fault in faults:
                self._wait_until("steps go on", lambda at=share: self._step() >= at * self.steps)
                fault()
            self.status = self._supervisors[-1].wait(LIMIT_S + self.steps * PACE_S)
            self._seconds = time.monotonic() - self._began
            self.left.append(self._remaining())
        finally:
            for supervisor in self._supervisors:
                supervisor.kill()  # the orphan reaper ends the workers
                supervisor.wait()

    def _start(self) -> None:
        """Start `perdure run`: at first, and again after it was killed."""
        number = len(self._supervisors) + 1
        command = [sys.executable, "-m", "perdure.cli", "run", "--workers", str(WORKERS)]
        command += ["--limit", f"stopped={STOPPED_S:g}", "--max-restarts", "1000"]
        command += ["--log-dir", str(self._logs)]
        command += ["--compilation-cache", str(self._work / "cache"), "--"]
        command += [*program(self.run, self._journal, self.steps), *self._arguments]
        environ = {**os.environ, TOKEN: self._work.name, "JAX_PLATFORMS": "cpu"}
        with open(self._work / f"said-{number}", "ab") as said:
            supervisor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ
            )
        self._supervisors.append(supervisor)

    # ---------------------------------------------------------------- what happens

    def _kill(self, rank: int) -> None:
        self._signal(rank, signal.SIGKILL, f"worker {rank}: SIGKILL")
        self.fired["kill"] += 1

    def _stop(self, rank: int) -> None:
        self._signal(rank, signal.SIGSTOP, f"worker {rank}: stopped (SIGSTOP)")
        self.fired["stop"] += 1

    def _signal(self, rank: int, number: int, cause: str) -> None:
        attempt = self._newest().get("attempt")
        os.kill(self._worker(rank), number)
        self.expected.append(cause)
        self._wait_for_another(attempt)

    def _fill_disk(self) -> None:
        """Leave no space until two saves have failed, and then until one commits."""
        failed = self.output().count("Training continues")
        ballast = self.run.parent / "ballast"
        with open(ballast, "ab", buffering=0) as file:

            def is_noticed() -> bool:
                with suppress(OSError):  # what retention frees is taken too
                    while True:
                        file.write(b"\0" * 65536)
                return self.output().count("Training continues") >= failed + 2

            self._wait_until("saves fail on a full disk", is_noticed)
        ballast.unlink()
        newest = Run(self.run).steps()[-1]
        self._wait_until("a save after that", lambda: Run(self.run).steps()[-1] > newest)
        self.fired["full disk"] += 1

    def _unplug_bucket(self) -> None:
        """The server of the bucket does not answer, until the run has noticed."""
        (server,) = [pid for pid in children() if runs(pid, "moto_server_program")]
        os.kill(server, signal.SIGSTOP)
        try:
            until = time.monotonic() + UNPLUGGED_S
            self._wait_until(
                "the mirror is reported",
                lambda: time.monotonic() > until and "the mirror" in self.output(),
            )
        finally:
            os.kill(server, signal.SIGCONT)
        self.fired["unplugged bucket"] += 1

    def _move_clock(self) -> None:
        order = self._work / "jump"
        order.touch()
        self._wait_until("both clocks jump", lambda: len(self._jumps()) == WORKERS)
        order.unlink()  # a later attempt has the right time again: the clock goes back
        self.fired["clock jump"] += 1

    def _kill_supervisor(self) -> None:
        attempt = self._newest().get("attempt")
        self._supervisors[-1].kill()
        self._supervisors[-1].wait()
        until = time.monotonic() + LIMIT_S
        while (left := self._remaining()) and time.monotonic() < until:
            time.sleep(0.1)
        self.left.append(left)
        self.expected.append("")  # nobody is there who could write why this attempt ended
        self._start()
        self._wait_for_another(attempt)
        self.fired["killed supervisor"] += 1

    # ---------------------------------------------------------------- what is seen

    def output(self) -> str:
        """All that the supervisors and the workers have written."""
        said = sorted(self._work.glob("said-*"))
        return "".join(path.read_text(errors="replace") for path in said)

    def recorded_causes(self) -> list[str]:
        """Why each attempt ended, but for the last one, by its log.

        The attempt under way when its supervisor was killed has no cause.
        """
        causes: list[str] = []
        runs = read_runs(self._logs)
        unreadable = sum(run.unreadable for run in runs)
        for run in runs:
            causes += [attempt.cause.partition(" for ")[0] for attempt in run.attempts]
            causes += [""] if run.state == "lost" else []
        return causes[:-1] if not unreadable else [f"{unreadable} unreadable lines", *causes]

    def goodput(self) -> tuple[float, str]:
        """The useful share of the whole time: each step once, at its mean time (docs/RUN.md)."""
        spans: dict[str, list[float]] = {}
        for line in self._lines(self._journal.read_text()):
            if "step" in line:
                spans.setdefault(line["attempt"], []).append(line["t"])
        steps = sum(len(times) - 1 for times in spans.values())
        mean = sum(times[-1] - times[0] for times in spans.values()) / steps
        repeated = sum(map(len, spans.values())) - self.steps
        share = self.steps * mean / self._seconds
        return share, (
            f"{share:.3f} of {self._seconds:.0f} s, {len(spans)} attempts, {repeated} of "
            f"{self.steps} steps repeated, {1000 * mean:.1f} ms a step"
        )

    def _worker(self, rank: int) -> int:
        for pid, environ in self._processes().items():
            if environ.get("RANK") == str(rank) and runs(pid, PROGRAM.name):
                return pid
        raise AssertionError(f"worker {rank} is not there")

    def _remaining(self) -> int:
        return len(self._processes())

    def _processes(self) -> dict[int, dict[str, str]]:
        """The processes of the day: their environments by process ID."""
        found: dict[int, dict[str, str]] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # gone meanwhile, or another user's
                text = Path(f"/proc/{name}/environ").read_text(errors="replace")
                pairs = (line.partition("=") for line in text.split("\0"))
                environ = {name: value for name, _, value in pairs}
                if environ.get(TOKEN) == self._work.name:
                    found[int(name)] = environ
        return found

    def _jumps(self) -> set[int]:
        lines = self._lines(self._journal.read_text())
        return {line["jumped"] for line in lines if "jumped" in line}

    def _step(self) -> int:
        return self._newest().get("step", 0)

    def _newest(self) -> dict[str, Any]:
        """The last line of the journal that is about a step."""
        if not self._journal.exists():
            return {}
        with open(self._journal, "rb") as file:
            file.seek(max(0, self._journal.stat().st_size - 4096))
            lines = self._lines(file.read().decode())
        return next((line for line in reversed(lines) if "step" in line), {})

    def _lines(self, text: str) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for line in text.splitlines():
            with suppress(ValueError):  # the first one may be cut off
                value = json.loads(line)
                lines += [value] if isinstance(value, dict) else []
        return lines

    def _wait_for_another(self, attempt: str | None) -> None:
        """Until another attempt has done some steps and saved."""
        self._wait_until("another attempt", lambda: self._newest().get("attempt") != attempt)
        enough = self._step() + SAVE_EVERY
        self._wait_until("a save of it", lambda: self._step() >= enough)

    def _wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + LIMIT_S + self.steps * PACE_S
        while not condition():
            if (status := self._supervisors[-1].poll()) is not None:
                raise AssertionError(f"{what}: perdure run ended with {status}")
            if time.monotonic() > until:
                raise AssertionError(f"{what}: not in time")
            time.sleep(0.1)


# ---------------------------------------------------------------- processes


def program(run: Path, journal: Path, steps: int) -> list[str]:
    """The command of the training program."""
    where = [str(run), "--journal", str(journal), "--steps", str(steps)]
    return [sys.executable, str(PROGRAM), *where, "--save-every", str(SAVE_EVERY)]


def runs(pid: int, name: str) -> bool:
    """Whether `name` is part of the command of a process."""
    with suppress(OSError):
        return name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def children() -> list[int]:
    """The processes that this one has started."""
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def undisturbed(work: Path, steps: int) -> str:
    """The fingerprint of one process to which nothing happens."""
    command = program(work / "undisturbed", work / "undisturbed.jsonl", steps)
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    return Run(work / "undisturbed").manifest(steps).fingerprint


# ---------------------------------------------------------------- the rows


def rows(minutes: float, seed: int) -> Iterator[Row]:
    """The rows of the proof."""
    steps = int(minutes * 60 * PLANNED / PACE_S)
    with tempfile.TemporaryDirectory(prefix="perdure-bad-day-") as path, moto_server() as server:
        work = Path(path)
        (work / "disk").mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(work / "disk")]
        subprocess.run(mount, check=True)
        try:
            expected = undisturbed(work, steps)
            day = BadDay(work, steps, server.new_url(), server.endpoint, seed)
            try:
                day.live()
            except (AssertionError, subprocess.TimeoutExpired):
                traceback.print_exc()
                print(day.output()[-6000:])
                yield row("the day comes to its end", [False])
                return
            yield from outcome(day, expected, full=minutes >= FULL_DAY_MINUTES)
        finally:
            subprocess.run(["umount", "--lazy", str(work / "disk")], check=True)


def outcome(day: BadDay, expected: str, full: bool) -> Iterator[Row]:
    """What is checked at the end of the day."""
    wanted = {
        "kill": 3,
        "stop": 2,
        "full disk": 1,
        "unplugged bucket": 1,
        "clock jump": 1,
        "killed supervisor": 2,
    }
    print(f"       {', '.join(f'{kind}: {count}' for kind, count in day.fired.items())}")
    yield row(
        "faults that happened, each noticed by the run or followed by a restart",
        [day.fired[kind] >= number for kind, count in wanted.items() for number in range(1, count + 1)],
    )  # fmt: skip
    fingerprints = [Run(where).manifest(day.steps).fingerprint for where in (day.run, day.mirror)]
    yield row(
        "the run and its mirror end with the fingerprint of an undisturbed process",
        [day.status == 0 and fingerprint == expected for fingerprint in fingerprints],
    )
    other = Run(day.run).manifest(Run(day.run).steps()[0]).fingerprint
    yield row("control: an earlier step has another fingerprint", [other != expected])
    yield row("both are whole", [bool(check_run(where).good) for where in (day.run, day.mirror)])
    yield row(
        "no process is left: after each kill of the supervisor, and at the end",
        [left == 0 for left in day.left] if len(day.left) == 3 else [False],
    )
    causes = day.recorded_causes()
    print(f"       record: {causes}")
    yield row(
        "the record has every attempt that was ended, by its cause, in order",
        [causes == day.expected, len(causes) == 7],
    )
    share, figures = day.goodput()
    print(f"       goodput {figures}")
    if full:
        yield row(f"goodput of at least {GOODPUT} ({figures})", [share >= GOODPUT])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=FULL_DAY_MINUTES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if INSIDE not in os.environ:  # the mount ends with this process, whatever happens to it
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", *user, "--mount", sys.executable, *sys.argv]
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})
    finish("bad-day", rows(options.minutes, options.seed))


if __name__ == "__main__":
    main()
