"""Runs and records for the tests of `report` and `plot`, made without a training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perdure.state.leaf_values import array_leaf
from perdure.store import LocalStorage, Run
from perdure.store.log import LogWriter
from perdure.supervise.attempts_log import FILE, NAME, encodable, timestamp

START = 1_800_000_000.0
"""The time of step 0 of every run here, in seconds since 1970; a step takes a second."""

Arrays = Mapping[str, np.ndarray[Any, Any]]


def save(where: Path, states: Mapping[int, Arrays], **how: Any) -> Run:
    """Save states by step; metrics are those of `how["metrics"]` by step."""
    metrics = how.get("metrics", {})
    now = [START]
    with Run(where, create=True, clock=lambda: now[0]) as run:
        for step, arrays in states.items():
            now[0] = START + step
            leaves = {path: array_leaf(np.asarray(array)) for path, array in arrays.items()}
            run.save(step, leaves, how.get("recipe"), metrics.get(step))
    return Run(where)


def states(steps: tuple[int, ...], seed: int = 0) -> dict[int, dict[str, np.ndarray[Any, Any]]]:
    """A frozen leaf, and one that moves."""
    rng = np.random.default_rng(seed)
    frozen = rng.normal(size=(4, 5)).astype("float32")
    moving = rng.normal(size=6)
    found = {}
    for step in steps:
        moving = moving + rng.normal(size=6) / 10
        found[step] = {"model/frozen": frozen, "model/moving": moving, "count": np.array(step)}
    return found


def attempt(
    number: int, start: int, end: int, kind: str, cause: str, **more: Any
) -> dict[str, Any]:
    """The fields of an attempt that did `start` to `end`, a step each second."""
    seconds = float(end - start)
    fields = {"number": number, "workers": 1, "kind": kind, "cause": cause, "place": None}
    fields |= {"statuses": [0], "start": start, "end": end, "began": 100.0 + start}
    fields |= {"first_time": 101.0 + start, "last_time": 100.0 + end, "noticed": 100.0 + end}
    fields |= {"seconds": seconds, "last_step": end, "made_progress": True, "last_line": ""}
    return fields | {"first_step": start + 1, **more}


KILLED = [attempt(1, 0, 13, "killed", "worker 0: SIGKILL"), attempt(2, 10, 30, "done", "exit 0")]


def record(
    logs: Path,
    attempts: list[dict[str, Any]],
    run: Path | None = None,
    began: float = START,
    **start: Any,
) -> Path:
    """Write the log of one start of `perdure run`, whose attempts saved in `run`."""
    fields: dict[str, Any] = {
        "command": ["python", "train.py"],
        "directory": "/jobs/mine",
        "workers": 1,
        "logs": str(logs),
        "host": "far",
        "pid": 1,
        "boot": None,
        "pid_namespace": None,
        "process_start": None,
    }
    now = began
    events: list[dict[str, Any]] = [{"kind": "start", "time": timestamp(now), **fields, **start}]
    for attempt in attempts:
        now += attempt["seconds"]
        saved = {} if run is None else {str(run): attempt["end"]}
        end = {"attempt": attempt | {"saved": saved}, "longest": {}}
        events.append({"kind": "attempt_end", "time": timestamp(now), **end})
    end = {"status": 0, "reason": "finished", "seconds": now - began}
    events.append({"kind": "end", "time": timestamp(now), **end})
    name = time.strftime("%H%M%S", time.gmtime(began))
    where = logs / (name + str(start.get("directory", "")).replace("/", "-"))
    where.mkdir(parents=True)
    log = LogWriter(LocalStorage(where), NAME)
    for event in events:
        log.append(encodable(event))
    log.close()
    return where / FILE


def flip(where: Path, step: int, path: str) -> None:
    """Flip a bit of the first chunk of a leaf."""
    manifest = Run(where).manifest(step)
    [leaf] = [leaf for leaf in manifest.leaves if leaf.path == path]
    chunk = leaf.chunks[0]
    pack = where / "packs" / manifest.packs[chunk.pack].name
    data = bytearray(pack.read_bytes())
    data[chunk.offset] ^= 1
    pack.write_bytes(data)


class Counting(LocalStorage):
    """Counts the bytes that are read from packs."""

    read_from_packs = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name.startswith("packs/"):
            self.read_from_packs += len(target)
        return super().read_into(name, offset, target)
