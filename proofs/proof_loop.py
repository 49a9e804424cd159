"""Proves the Trainer and the Keras callbacks with signals at random times. 20 minutes on two cores.

Run by `make proof-loop`; ARGS='keras preemption tensorboard group' picks parts, ARGS='--signals 20'
makes it shorter.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keras_rows import keras_fit
from loop_program import EVERY, STEPS, SUMMARY

from perdure.demo.driver import run_group
from perdure.store import Run
from perdure.supervise.worker import Worker
from perdure.testing import check_run
from report import Row, finish, row

PROGRAM = Path(__file__).parent / "loop_program.py"


def start(
    where: Path,
    workers: int = 1,
    after: float | None = None,
    number: int = signal.SIGTERM,
    times: int = 1,
    behind: int = 0,
) -> tuple[int, int, str]:
    """Run the program once; send signal `number` to a worker `after` seconds after it begins, or after
    step `behind`.

    Returns the exit status, the last step that the chief printed, and the end of its log.
    """
    environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    last_step = 0

    def send(delay: float, victim: Worker) -> None:
        time.sleep(delay)
        for _ in range(times):
            if victim.status is None:
                victim.send(number)
                time.sleep(0.005)

    def on_event(worker: int, event: dict[str, Any], group: Sequence[Worker]) -> None:
        nonlocal last_step, after
        if worker != 0:
            return
        if event["event"] == "step":
            last_step = event["step"]
        if after is not None and (event["event"] == "begin" if not behind else last_step >= behind):
            threading.Thread(target=send, args=(after, group[-1]), daemon=True).start()
            after = None

    ended = run_group([sys.executable, str(PROGRAM), str(where)], workers, environment, on_event)
    return ended.status, last_step, ended.logs[0]


def whole(work: Path) -> str:
    """The fingerprint of an uninterrupted run."""
    status, _, log = start(work / "whole")
    assert status == 0, log
    return Run(work / "whole").manifest(STEPS).fingerprint


def preemption(work: Path, signals: int) -> Iterator[Row]:
    """SIGTERM at random times, every second time twice.

    A signal after training has ended and is saved finds a program that no longer handles SIGTERM. It
    is not counted.
    """
    expected = whole(work)
    chance = random.Random(4)
    saved: list[bool] = []
    ends: list[bool] = []
    lives, places = 0, {"before the first step": 0, "later": 0, "behind the end": 0}
    while len(saved) < signals:
        where = work / f"run-{lives}"
        lives += 1
        status = -1
        while status != 0:
            # Early signals hit compilation, later ones steps, evaluations and saves.
            after = chance.choice([0.0, 0.3, 1.2]) * chance.random()
            send = None if len(saved) >= signals else after
            status, last_step, log = start(where, after=send, times=1 + len(saved) % 2)
            newest = (Run(where).steps() or [0])[-1]
            # The attempt before may have been preempted in the last step: then this one makes none.
            if status == -signal.SIGTERM and newest == STEPS and last_step in (0, STEPS):
                places["behind the end"] += 1
                status = 0
            if status != 0:
                reported = (
                    "saving it now" in log or f"the newest checkpoint is step {newest}" in log
                )
                saved.append(status == 75 and reported and newest >= last_step)
                places["later" if last_step else "before the first step"] += 1
                if not saved[-1]:
                    print(f"       status {status}, step {last_step}, newest {newest}:\n{log}")
            if status not in (0, 75):
                break
        ends.append(status == 0 and Run(where).manifest(STEPS).fingerprint == expected)
        check_run(where)
    print(f"       signals: {places}")
    yield row("SIGTERM at a random time: saved, or said which checkpoint stands; status 75", saved)
    yield row("runs interrupted so that end with the bits of an uninterrupted one", ends)


def group(work: Path, signals: int) -> Iterator[Row]:
    """In a group of two, one worker gets SIGTERM and both exit at the same step."""
    expected = whole(work)
    chance = random.Random(5)
    where = work / "group"
    left: list[bool] = []
    for _ in range(max(1, signals // 20)):
        status, last_step, log = start(where, 2, chance.random())
        left.append(status == 75 and Run(where).steps()[-1] >= last_step)
        if not left[-1]:
            print(f"       status {status}, step {last_step}:\n{log}")
    status, _, log = start(where, 2)
    yield row("SIGTERM to one of two workers: both left with 75, saved", left)
    same = status == 0 and Run(where).manifest(STEPS).fingerprint == expected
    yield row("and the group ends with the bits of one process", [same])


def tensorboard(work: Path, signals: int) -> Iterator[Row]:
    """TensorBoard's own reader shows every point once after three kills."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where, chance = work / "board", random.Random(signals)
    for behind in (20, 50, 90):
        status, _, log = start(where, 1, chance.random() / 10, signal.SIGKILL, behind=behind)
        assert status == -signal.SIGKILL, log
    status, _, log = start(where)
    assert status == 0, log
    reader = EventAccumulator(str(where / "summaries"), size_guidance={"scalars": 0})
    reader.Reload()
    shown = {tag: [point.step for point in reader.Scalars(tag)] for tag in ("loss", "eval/error")}
    yield row(
        "points that TensorBoard shows once each, none missing, after three SIGKILLs",
        [
            shown["loss"] == list(range(SUMMARY, STEPS + 1, SUMMARY)),
            shown["eval/error"] == list(range(EVERY, STEPS + 1, EVERY)),
        ],
    )


PARTS: dict[str, Callable[[Path, int], Iterator[Row]]] = {
    "keras": keras_fit,
    "preemption": preemption,
    "group": group,
    "tensorboard": tensorboard,
}


def rows(parts: list[str], signals: int) -> Iterator[Row]:
    """The rows of the chosen parts, each in its own directory."""
    for part in parts:
        with tempfile.TemporaryDirectory(prefix=f"perdure-{part}-") as name:
            yield from PARTS[part](Path(name), signals)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them by default")
    parser.add_argument("--signals", type=int, default=100, help="how many of them are sent")
    given = parser.parse_args()
    finish("loop", rows(given.parts or list(PARTS), given.signals))
