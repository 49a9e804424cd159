"""The split of V logical replicas over devices and processes.

The parts are contiguous, in the order of (process, device), differ in size by at most one, and none is
empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.errors import TopologyError


def bounds(replicas: int, devices: int) -> tuple[tuple[int, int], ...]:
    """The half-open range of logical replicas of every device."""
    if devices < 1 or replicas < 1:
        raise TopologyError(
            f"expected at least 1 logical replica and 1 device, found {replicas} and {devices}"
        )
    if replicas < devices:
        raise TopologyError(
            f"{replicas} logical replicas cannot occupy {devices} devices: each device runs at least "
            f"one. Use at most {replicas} devices, or replicas={devices} or more (the number of "
            "replicas is part of the recipe: a run that has begun keeps it)"
        )
    return tuple((d * replicas // devices, (d + 1) * replicas // devices) for d in range(devices))


def split(
    replicas: int, devices_per_process: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every process, the range of logical replicas of each of its devices."""
    ranges = bounds(replicas, sum(devices_per_process))
    parts: list[tuple[tuple[int, int], ...]] = []
    first = 0
    for process, count in enumerate(devices_per_process):
        if count < 1:
            raise TopologyError(f"process {process} has no device")
        parts.append(ranges[first : first + count])
        first += count
    return tuple(parts)
