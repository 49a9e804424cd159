"""Helpers to measure storage: cold caches, touched memory, fsync of a tree, fio, memory in use."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
BALLAST_BYTES = 3 << 30
_DROP = "/proc/sys/vm/drop_caches"


class Ballast:
    """Memory that was just touched, and is freed right before a measurement.

    A virtual machine may return free memory to its host; touching it again then takes seconds per
    GiB. Every subject starts with this much touched memory.
    """

    def __init__(self, nbytes: int = BALLAST_BYTES) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(self._memory, np.uint8)[:: mmap.PAGESIZE] = 1

    def release(self) -> None:
        self._memory.close()


def may_drop_caches() -> bool:
    return os.access(_DROP, os.W_OK)


def timed(action: Callable[[], Any], *, cold: bool = False, warm_memory: bool = True) -> float:
    """Seconds of `action` on touched memory; `cold` empties the page cache first."""
    ballast = Ballast() if warm_memory else None
    os.sync()
    if cold and may_drop_caches():
        Path(_DROP).write_text("3")
    if ballast is not None:
        ballast.release()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def sync_tree(path: Path) -> None:
    """fsync every file and directory below `path`, and `path` itself, which makes a save durable."""
    for entry in [*sorted(path.rglob("*")), path]:
        fd = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def fresh(path: Path) -> Path:
    """An empty directory."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def disk_limit(path: Path, kind: str, nbytes: int) -> float:
    """GB/s of sequential direct `write` (with its fsync) or `read` of one file in `path`."""
    file = path / "limit"
    if kind == "write":
        file.unlink(missing_ok=True)
        os.sync()
    if shutil.which("fio") is None:
        return _bare_loop(file, kind, nbytes)
    command = ["fio", "--name=limit", f"--filename={file}", f"--rw={kind}", f"--size={nbytes}"]
    command += ["--bs=8M", "--direct=1", "--ioengine=libaio", "--iodepth=4", "--end_fsync=1"]
    out = subprocess.run([*command, "--output-format=json"], capture_output=True, check=True)
    job = json.loads(out.stdout)["jobs"][0]
    return job[kind]["io_bytes"] / (job["job_runtime"] / 1e3) / 1e9


def _bare_loop(file: Path, kind: str, nbytes: int) -> float:
    block = 8 * MIB
    buffer = mmap.mmap(-1, block)
    flags = os.O_DIRECT | (os.O_RDONLY if kind == "read" else os.O_WRONLY | os.O_CREAT)
    start = time.perf_counter()
    fd = os.open(file, flags, 0o644)
    for offset in range(0, nbytes, block):
        _ = os.preadv(fd, [buffer], offset) if kind == "read" else os.pwrite(fd, buffer, offset)
    os.fsync(fd)
    os.close(fd)
    return nbytes / (time.perf_counter() - start) / 1e9


def resident(field: str = "VmRSS") -> int:
    """Bytes of memory in use by this process (`VmRSS`), or its peak (`VmHWM`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def middle(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """The lowest and the highest value, as `0.9-1.2`."""
    return f"{min(values):.3g}-{max(values):.3g}"
