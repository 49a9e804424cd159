"""What an audit computes again, and which device was wrong. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

ASKED = 3


class Draw(NamedTuple):
    """One contribution that is computed again: by its own device, then by at most two others, in
    order.
    """

    replica: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class ComputedContribution:
    """One computation of the contribution: the device, and the hashes of the leaves in their order."""

    device: int
    hashes: tuple[str, ...]


def draw(
    seed: int, step: int, rate: float, parts: Sequence[Sequence[tuple[int, int]]]
) -> tuple[Draw, ...]:
    """What is computed again in `step`; nothing in a share of 1 - `rate` of the steps.

    One replica of each device of a process with several devices, by another device of that process,
    so that shares need not travel. Of the processes with one device, one is drawn, whose replica
    another process computes. `parts` are the replicas of each device of each process.
    """
    words = blake3(f"perdure audit {seed} {step}".encode()).digest(32)
    chance, turn, other_turn, alone = (int.from_bytes(words[i : i + 8]) for i in (0, 8, 16, 24))
    if chance >= rate * 2**64:
        return ()
    total = sum(len(ranges) for ranges in parts)
    single = [process for process, ranges in enumerate(parts) if len(ranges) == 1]
    drawn, first = [], 0
    for process, ranges in enumerate(parts):
        end, others = first + len(ranges), total - len(ranges)
        for device, (start, stop) in enumerate(ranges, first):
            if len(ranges) == 1 and process != single[alone % len(single)]:
                continue
            # The devices after this one, those of its process and the others, each in a circle.
            near = [first + (device - first + 1 + i) % len(ranges) for i in range(len(ranges) - 1)]
            far = [(end + (other_turn + i) % others) % total for i in range(min(2, others))]
            at = turn % max(1, len(near))
            devices = (device, *near[at:], *near[:at], *far)[:ASKED]
            drawn.append(Draw(start + turn % (stop - start), devices))
        first = end
    return tuple(drawn)


def further(devices: Sequence[int]) -> tuple[int, ...]:
    """The devices that compute after two computations differ: a third; of two, both again."""
    if len(devices) == 1:
        return (devices[0],)
    return (devices[2],) if len(devices) > 2 else tuple(devices)


class Judgement(NamedTuple):
    """What several computations say: the devices that were `wrong` (empty if undecided), a right
    one, another.
    """

    wrong: tuple[int, ...]
    right: int
    other: int


def judge(computed: Sequence[ComputedContribution]) -> Judgement:
    """Which devices were wrong, of computations that do not all agree.

    A device is wrong that contradicts itself, or two others that agree. Nothing is decided if no
    two computations agree: then `grad` itself may give other bits at every call.
    """
    results: dict[tuple[str, ...], list[int]] = {}
    devices: dict[int, set[tuple[str, ...]]] = {}
    for computation in computed:
        results.setdefault(computation.hashes, []).append(computation.device)
        devices.setdefault(computation.device, set()).add(computation.hashes)
    if len(results) == len(computed):
        return Judgement((), 0, 1)
    wrong = {device for device, found in devices.items() if len(found) > 1}
    if len(devices) == 1:
        best = max(results, key=lambda hashes: len(results[hashes]))
    else:
        agreed = [hashes for hashes, by in results.items() if len(set(by)) > 1]
        best = agreed[0] if len(agreed) == 1 else None
        if best is not None:
            wrong |= {device for device, found in devices.items() if found != {best}}
        else:
            best = next((c.hashes for c in computed if c.device not in wrong), computed[0].hashes)
            if len(wrong) == len(devices):
                wrong = set()
    numbers = range(len(computed))
    right = next(number for number in numbers if computed[number].hashes == best)
    other = next(number for number in numbers if computed[number].hashes != best)
    return Judgement(tuple(sorted(wrong)), right, other)
