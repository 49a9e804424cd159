"""The figures of perdure beyond a save and a load: limits, stalls, memory, listing.

Each function runs in a new process (`python store_cases.py NAME DIRECTORY NBYTES`) and prints
JSON. A limit (fio, memcpy, write+fsync) is measured in turn with the figure compared with it, because
the speed of a shared machine varies from second to second.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from store_peers import Perdure, Torch
from store_probe import (
    MIB,
    Ballast,
    disk_limit,
    fresh,
    middle,
    resident,
    spread,
    timed,
)

LEAF = 64 * MIB


def disk(path: Path, nbytes: int) -> dict[str, Any]:
    """GB/s of durable writes and cold loads, each measured right after the limit of the disk."""
    subject = Perdure()
    state = subject.make(nbytes // LEAF, LEAF)
    out: dict[str, list[float]] = {"write": [], "write limit": [], "load": [], "load limit": []}
    for step in range(1, 6):
        state = subject.change(state)
        shutil.rmtree(path / f"run{step - 1}", ignore_errors=True)
        run = fresh(path / f"run{step}")
        out["write limit"].append(disk_limit(path, "write", nbytes))
        seconds = timed(partial(subject.save, run, step, state))
        out["write"].append(nbytes / seconds / 1e9)
        out["load limit"].append(disk_limit(path, "read", nbytes))
        seconds = timed(partial(subject.load, run, step, None), cold=True)
        out["load"].append(nbytes / seconds / 1e9)
    return out


def stall_jax(path: Path, nbytes: int) -> dict[str, Any]:
    """ms that `save` stops the loop, without the first one, which makes the run directory."""
    subject = Perdure()
    state = subject.make(nbytes // LEAF, LEAF)
    stalls = []
    for step in range(2, 9):
        state = subject.change(state)
        stall = subject.save(path / "run", step, state)
        stalls.append(1e3 * (stall or 0))
    return {"first": stalls[0], "stall": stalls[1:]}


def stall_numpy(path: Path, nbytes: int) -> dict[str, Any]:
    leaves = {f"layer{i}": np.ones(LEAF // 4, np.float32) for i in range(nbytes // LEAF)}
    return _stall_in_place(path, leaves, leaves)


def stall_torch(path: Path, nbytes: int) -> dict[str, Any]:
    leaves = Torch().make(nbytes // LEAF, LEAF)
    return _stall_in_place(path, leaves, {name: leaf.numpy() for name, leaf in leaves.items()})


def _stall_in_place(path: Path, state: Any, views: dict[str, Any]) -> dict[str, Any]:
    from perdure import CheckpointManager

    targets = {name: np.ones_like(view) for name, view in views.items()}
    out: dict[str, list[float]] = {"stall": [], "memcpy": []}
    with CheckpointManager(path / "run", max_to_keep=1) as manager:
        for step in range(1, 7):
            for view in views.values():
                view[:: MIB // 4] += 1
            start = time.perf_counter()
            manager.save(step, state)
            out["stall"].append(1e3 * (time.perf_counter() - start))
            manager.wait_until_finished()
            start = time.perf_counter()
            for name, view in views.items():
                np.copyto(targets[name], view)
            out["memcpy"].append(1e3 * (time.perf_counter() - start))
    first = out["stall"].pop(0)
    return {"first": first, "stall": out["stall"], "memcpy": out["memcpy"][1:]}


def small(path: Path, _: int) -> dict[str, Any]:
    """ms of a committed save of 5 MB in 12 leaves, and of a plain write and fsync of 5 MB."""
    state = {f"layer{i}": np.zeros(5_000_000 // 12 // 4, np.float32) for i in range(12)}
    blob = os.urandom(5_000_000)

    def plain(name: str) -> None:
        fd = os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, blob)
        os.fsync(fd)
        os.close(fd)

    return _many_saves(path, state, lambda step: plain(f"plain{step}"), 40)


def leaves10k(path: Path, _: int) -> dict[str, Any]:
    """ms of a committed save of 10,000 leaves of 1 KiB."""
    state = {"model": {f"leaf{i}": np.zeros(256, np.float32) for i in range(10_000)}}
    return _many_saves(path, state, lambda _: None, 20)


def _many_saves(path: Path, state: Any, limit: Any, rounds: int) -> dict[str, Any]:
    from perdure import CheckpointManager

    out: dict[str, list[float]] = {"save": [], "limit": []}
    source = np.random.default_rng(0)
    with CheckpointManager(path / "run", max_to_keep=None) as manager:
        for step in range(1, rounds + 1):
            for leaf in state.get("model", state).values():
                leaf[:] = source.random(leaf.size, np.float32)
            out["limit"].append(1e3 * timed(lambda n=step: limit(n), warm_memory=False))

            def save(n: int = step) -> None:
                manager.save(n, state)
                manager.wait_until_finished()

            out["save"].append(1e3 * timed(save, warm_memory=False))
    return {key: values[2:] for key, values in out.items()}


def delta(path: Path, _: int) -> dict[str, Any]:
    """The fraction of the bytes that a save writes if 90% of them are unchanged."""
    from perdure import CheckpointManager

    state = {f"layer{i}": np.full(4 * MIB, i, np.float32) for i in range(20)}
    for i, leaf in enumerate(state.values()):
        leaf[:] = np.random.default_rng(i).random(leaf.size, np.float32)
    with CheckpointManager(path / "run", max_to_keep=None) as manager:
        manager.save(1, state)
        manager.wait_until_finished()
        before = sum(file.stat().st_size for file in (path / "run").rglob("*"))
        for name in ("layer3", "layer17"):
            state[name] += 1
        manager.save(2, state)
        manager.wait_until_finished()
    after = sum(file.stat().st_size for file in (path / "run").rglob("*"))
    return {"share": (after - before) / sum(leaf.nbytes for leaf in state.values())}


def memory(path: Path, nbytes: int) -> dict[str, Any]:
    """Peak MiB by which the process grew while it saved immutable arrays."""
    import perdure

    subject = Perdure()
    state = subject.make(nbytes // LEAF, LEAF)
    manager = perdure.CheckpointManager(path / "run")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()
    manager.save(1, state)
    manager.wait_until_finished()
    return {"MiB": (resident("VmHWM") - before) / MIB}


def listing(path: Path, _: int) -> dict[str, Any]:
    """ms of `latest_step`, of opening the run for it, and of `perdure ls`, with 1,000 checkpoints."""
    from perdure import CheckpointManager

    run = path / "run"
    with CheckpointManager(run, max_to_keep=None) as manager:
        for step in range(1000):
            manager.save(step, {"w": np.full(100, step), "step": step})
    out: dict[str, list[float]] = {"latest": [], "open and latest": [], "ls": []}
    command = [str(Path(sys.executable).with_name("perdure")), "ls", str(run)]
    if not Path(command[0]).exists():
        command[:1] = [sys.executable, "-m", "perdure.cli"]
    for _ in range(20):
        manager = CheckpointManager(run)
        out["latest"].append(1e3 * timed(manager.latest_step, warm_memory=False))
        opened = timed(lambda: CheckpointManager(run).latest_step(), warm_memory=False)
        out["open and latest"].append(1e3 * opened)
    for _ in range(7):
        call = partial(subprocess.run, command, capture_output=True, check=True)
        out["ls"].append(1e3 * timed(call, warm_memory=False))
    return out


CASES = {
    case.__name__: case
    for case in (
        disk,
        stall_jax,
        stall_numpy,
        stall_torch,
        small,
        leaves10k,
        delta,
        memory,
        listing,
    )
}

if __name__ == "__main__":
    where = fresh(Path(sys.argv[2]))
    Ballast().release()
    figures = CASES[sys.argv[1]](where, int(sys.argv[3]))
    for key, values in list(figures.items()):
        if isinstance(values, list):
            figures[key], figures[f"{key} spread"] = middle(values), spread(values)
            figures[f"{key} all"] = values
    print("\n" + json.dumps(figures))
