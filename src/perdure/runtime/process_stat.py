"""What the kernel states of a process in /proc/PID/stat; see proc_pid_stat(5)."""

from __future__ import annotations

STATE, PARENT, SESSION, START = 0, 1, 3, 19
"""Indices of `stat_fields`; `START` is in clock ticks since the machine started."""
TIMES = slice(11, 15)
"""Those of the ticks in user and system mode, then the same of the children that have ended."""


def stat_fields(pid: int | str) -> list[str]:
    """The fields after the name of the program, which may hold anything; OSError without a process."""
    with open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
