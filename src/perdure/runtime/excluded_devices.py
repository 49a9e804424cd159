"""What `perdure run` and the audit of its workers tell each other.

PERDURE_EXCLUDED_DEVICES ("0,3") names the devices that a process leaves out, because an audit found
that they compute wrong numbers. `perdure run` sets it from the report that a process writes beside
its heartbeat.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from perdure.errors import TopologyError
from perdure.runtime import heartbeats

AUDIT = "PERDURE_AUDIT"
ON_CORRUPTION = "PERDURE_ON_CORRUPTION"
EXCLUDED = "PERDURE_EXCLUDED_DEVICES"
REPORT = "corrupt-device"

Device = TypeVar("Device")


def excluded_devices() -> frozenset[int]:
    """The numbers in PERDURE_EXCLUDED_DEVICES, or TopologyError."""
    text = os.environ.get(EXCLUDED, "")
    words = [word for word in text.split(",") if word.strip()]
    if not all(word.strip().isdecimal() for word in words):
        raise TopologyError(f"{EXCLUDED}: expected numbers of devices, such as 0,3; found {text!r}")
    return frozenset(int(word) for word in words)


def without_excluded(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that are not excluded, or TopologyError if none is left.

    A number that no device has is ignored: a program may have a second strategy with fewer devices.
    """
    excluded = excluded_devices()
    left = tuple(device for number, device in enumerate(devices) if number not in excluded)
    if not left:
        raise TopologyError(
            f"{EXCLUDED}={os.environ[EXCLUDED]} excludes all of {list(devices)}; expected at least one "
            "device that computes right. Take the variable away, or use another machine"
        )
    return left


def named_numbers(count: int) -> list[int]:
    """The numbers of the `count` devices in use, among all that the program names."""
    excluded = excluded_devices()
    return [number for number in range(count + len(excluded)) if number not in excluded][:count]


def report_corruption(local: Sequence[int], count: int, text: str) -> bool:
    """Tell `perdure run` which of this process's `count` devices were wrong, and how many are left;
    False outside of it."""
    numbers = named_numbers(count)
    devices = [numbers[device] for device in local]
    report = {"devices": devices, "left": count - len(local), "text": text}
    return heartbeats.report(REPORT, report)
