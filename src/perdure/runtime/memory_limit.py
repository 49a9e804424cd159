"""`MemoryLimit`: whether the kernel has killed processes of a cgroup because its memory was full.

Without this, a worker that was killed for lack of memory cannot be told from one that somebody killed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # cgroups of version 1 write a number above this for no limit


class MemoryLimit:
    """The memory cgroup of a process. `kills` counts from the time at which this was made."""

    def __init__(self, pid: int) -> None:
        self._directory = _directory(pid)
        self._kills = self._count()

    def kills(self) -> str:
        """A sentence if processes of the cgroup were killed for lack of memory, otherwise ""."""
        count = self._count() - self._kills
        if count < 1:
            return ""
        limit = self.limit()
        size = "" if limit is None else f", limit {limit / 2**20:,.0f} MiB"
        processes = "a process" if count == 1 else f"{count} processes"
        return f"out of memory: the kernel killed {processes} of its cgroup{size}"

    def _count(self) -> int:
        for name in ("memory.events", "memory.oom_control"):  # cgroups of version 2, and 1
            for line in self._read(name).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdecimal():
                    return int(value)
        return 0

    def limit(self) -> int | None:
        """The most bytes that the cgroup may have; None for no limit."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = self._read(name).strip()
            if text.isdecimal() and int(text) < UNLIMITED:
                return int(text)
        return None

    def _read(self, name: str) -> str:
        if self._directory is not None:
            with suppress(OSError):
                return (self._directory / name).read_text()
        return ""


def _directory(pid: int) -> Path | None:
    """The directory of the memory cgroup of a process."""
    cgroups: list[Path] = []
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                cgroups = [ROOT / "memory" / path[1:], ROOT / "memory", *cgroups]
            elif not controllers:
                cgroups += [ROOT / path[1:], ROOT]  # a container sees its own cgroup as the root
    for cgroup in cgroups:
        if (cgroup / "memory.events").exists() or (cgroup / "memory.oom_control").exists():
            return cgroup
    return None
