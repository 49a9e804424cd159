"""Parts "disk", "writers" and "donation" of the proof of the store."""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from report import Row, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "store"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "checkpoint"))

from disks import NoMount, fill, small_disk
from lock_cases import CASES, holds, writer_process

from perdure import CheckpointManager, LocalStorage, ManagerOptions, verify_run
from perdure.errors import LockedError, SaveError
from perdure.store import Run

LEVELS = 30
DISK = 24 * 1024 * 1024
STATE = 4 * 1024 * 1024
DURING = (("open", ".pack"), ("write", ".pack"), ("open", ".json"), ("write", ".json"))
WRITERS = 10
LOCK_RUNS = 10
DONATED_STEPS = 500


def state(step: int) -> dict[str, Any]:
    """A state with other bytes at every step."""
    return {"w": np.random.default_rng(step).integers(0, 256, STATE, np.uint8), "step": step}


def same(restored: Any, step: int) -> bool:
    """Whether a restored state is that of `step`."""
    expected = state(step)
    return restored["step"] == step and restored["w"].tobytes() == expected["w"].tobytes()


def disk_rows(work: Path) -> Iterator[Row]:
    """Full disks."""
    try:
        for on_error in ("raise", "continue"):
            failed: list[bool] = []
            yield row(
                f"fill levels of a small disk, on_error={on_error!r}: a clear message, the last good "
                f"checkpoint restores, the next save succeeds after space is freed",
                [level(work, n, on_error, None, failed) for n in range(LEVELS)],
            )
            print(f"       the save failed at {sum(failed)} of {LEVELS} levels")
        failed = []
        yield row(
            "the same when another program fills the disk in the middle of the save",
            [level(work, n, "continue", DURING[n % 4], failed) for n in range(LEVELS)],
        )
        print(f"       the save failed at {sum(failed)} of {LEVELS} levels")
    except NoMount as reason:
        print(f"       skipped: full disks: {reason}")


def level(
    work: Path, number: int, on_error: Any, during: tuple[str, str] | None, failed: list[bool]
) -> bool:
    """Save 1, fill the disk to a level, try to save 2, restore, free the space, save 3."""
    with small_disk(work / f"{number}-{on_error}-{during is None}", DISK) as disk:
        leave = int(1.5 * STATE * number / (LEVELS - 1)) if during is None else 2 * STATE
        ballast: list[Path] = []

        def before(operation: str, path: str) -> None:
            wanted = during is not None and operation == during[0] and during[1] in path
            if wanted and "000000000002" in path and not ballast:
                # Each level leaves another number of free bytes, always less than the save still needs.
                ballast.append(fill(disk, leave=number * 64))

        storage = LocalStorage(disk / "run", before)
        options = ManagerOptions(on_error=on_error)
        with CheckpointManager(storage, max_to_keep=None, options=options) as manager:
            manager.save(1, state(1))
            manager.wait_until_finished()
            if during is None:
                ballast.append(fill(disk, leave))
            message = attempt(manager, 2)
            newest = 1 if message else 2
            failed.append(bool(message))
            clear = not message or ("saving step 2 failed" in message and "last good" in message)
            right = same(manager.restore().state, newest) and verify_run(Run(disk / "run")).ok
            for file in ballast:
                file.unlink()
            manager.save(3, state(3))
            manager.wait_until_finished()
            return clear and right and bool(ballast) and same(manager.restore().state, 3)


def attempt(manager: CheckpointManager, step: int) -> str:
    """Save; return the text of the error or the warnings, empty if it worked."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            manager.save(step, state(step))
            manager.wait_until_finished()
        except SaveError as error:
            return str(error)
    return "\n".join(str(warning.message) for warning in caught)


def writer_rows(work: Path) -> Iterator[Row]:
    """Second writers, and programs that must not release the lock."""
    results = [second_writer(work / f"run{n}") for n in range(WRITERS)]
    yield row(
        "second writers that are refused at once, with host and process of the first",
        (a for a, _ in results),
    )
    for name in CASES:
        yield row(
            f"one writer, tried by {name}",
            (_lock_holds(work / f"{name}{n}", name) for n in range(LOCK_RUNS)),
        )
        yield row(
            f"control: one writer, tried by {name} with a lock that is taken wrongly",
            [not holds(name, work / f"{name}-control" / "run", control=True)[0]],
        )
    yield row("locks of processes killed by SIGKILL that are taken over", (b for _, b in results))


def _lock_holds(work: Path, name: str) -> bool:
    held, printed = holds(name, work / "run")
    if not held:
        print(f"       {name}: {printed[-2000:]}")
    return held


def second_writer(path: Path) -> tuple[bool, bool]:
    """Whether a second writer gets the name of the first, and writes after that process is killed."""
    with writer_process(path) as holder:
        try:
            Run(path, create=True).begin_writing()
            names_holder = False
        except LockedError as error:
            owner = json.loads(str(error).split("writes here: ")[1].split(". Nothing")[0])
            names_holder = (owner["host"], owner["pid"]) == (socket.gethostname(), holder.pid)
    with CheckpointManager(path) as manager:
        manager.save(1, {"x": 1})
        manager.wait_until_finished()
        return names_holder, verify_run(Run(path)).good == (1,)


def donation_rows(work: Path) -> Iterator[Row]:
    """States that a jitted step donates while they are saved."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from donation_cases import equal_to_copies, save_while_donating, taken_over_without_saves

    donated = save_while_donating(work / "run", DONATED_STEPS)
    print(
        f"       {sum(donated)} of {DONATED_STEPS} states were donated to the next step; the runtime "
        f"kept the others, which the save was still reading"
    )
    yield row(
        "checkpoints saved during donating steps that equal a synchronous copy",
        equal_to_copies(work / "run", DONATED_STEPS),
    )
    run = Run(work / "run")
    prints = {run.manifest(step).fingerprint for step in run.steps()}
    yield row("different states among them", [len(prints) > 100])
    yield row(
        "control: states that the same step takes over if none is saved",
        taken_over_without_saves(DONATED_STEPS),
    )
