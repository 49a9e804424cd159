"""The plan: which device of which process runs which of V logical replicas.

The parts are contiguous, in the order of (process, device), differ in size by at most one, and none
is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from perdure.distribute.engine import Engine
from perdure.distribute.reduction_tree import partial_roots
from perdure.distribute.values import PerReplica
from perdure.errors import TopologyError

_TENSORFLOW_DEVICE = re.compile(r"(?:/\w+:\w+)*/?(?:device:)?([cg]pu):(\d+)", re.IGNORECASE)


def tensorflow_device(name: Any) -> tuple[str, int] | None:
    """ "cpu" or "gpu" and the number, if a device is named as in TensorFlow: "/gpu:0", "GPU:0",
    "/job:worker/task:0/device:GPU:0"."""
    match = _TENSORFLOW_DEVICE.fullmatch(name) if isinstance(name, str) else None
    return (match[1].lower(), int(match[2])) if match else None


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


class Plan:
    """Which device runs which replica, and with which partial sums every process ends."""

    def __init__(self, engine: Engine, replicas: int) -> None:
        self.engine = engine
        self.replicas = replicas
        # For every process, the range of replicas of each of its devices.
        self.parts = split(replicas, engine.devices_per_process)
        self.local = self.parts[engine.processes.index]
        # Number of the first replica of this process.
        self.first = self.local[0][0]
        self.roots = [partial_roots(part[0][0], part[-1][1], replicas) for part in self.parts]
        # The leaves of a contribution, by signature: for errors, without keeping values.
        self.described: dict[Any, dict[str, str]] = {}
        self.last_form: Any = None
        # What adds in place of the tree: for negative controls, which show that the tree is needed.
        self.control: Callable[[], Any] | None = None
        # The calls of `strategy.run` and of `strategy.step` so far.
        self.runs = self.steps = 0
        self.local_replicas = tuple(range(self.local[0][0], self.local[-1][1]))

    def device_of(self, replica: int) -> Any:
        """The local device that runs a local replica."""
        devices = zip(self.engine.devices, self.local, strict=True)
        return next(device for device, (_, stop) in devices if replica < stop)

    def everywhere(self, value: Any) -> PerReplica:
        """The same value for every local replica, on its device."""
        return PerReplica(
            tuple(self.engine.put(value, self.device_of(r)) for r in self.local_replicas),
            self.local_replicas,
        )
