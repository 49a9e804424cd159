"""The audit: in some steps contributions of logical replicas are computed a second time.

Another device computes them if there is one, and the bits have to agree before `update` changes the
state. What is audited is a function of (seed, step), so that every process knows it.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from blake3 import blake3

from perdure.checkpoint.arguments import real_number
from perdure.distribute.engine import Engine, Work
from perdure.distribute.topology import Plan
from perdure.errors import (
    CorruptDevice,
    MismatchError,
    SilentCorruptionError,
    StateError,
    TopologyError,
)
from perdure.runtime.excluded_devices import AUDIT, ON_CORRUPTION, named_numbers, report_corruption
from perdure.runtime.process_group import Processes, gather_values
from perdure.state import flatten, restore
from perdure.store.leaf import Leaf

OnCorruption = Literal["raise", "exclude"]

# compute(local device, state, replica, share) -> contribution
Compute = Callable[[int, Any, int, Any], Any]


@dataclass(frozen=True)
class AuditOptions:
    """What share of the steps is audited, and whether a wrong device is reported to `perdure run`."""

    rate: float = 0.0
    excludes: bool = False


def audit_options(rate: Any, on_corruption: Any) -> AuditOptions:
    """The options of a step; None leaves them to the variables that `perdure run --audit` sets."""
    name = "audit"
    if rate is None and (text := os.environ.get(AUDIT)):
        name = AUDIT
        try:
            rate = float(text)
        except ValueError:
            rate = text
    number = real_number(0 if rate is None else rate)
    if number is None or not 0 <= number <= 1:
        raise TopologyError(f"{name}: expected a share of the steps from 0 to 1, found {rate!r}")
    name = "on_corruption"
    if on_corruption is None and (text := os.environ.get(ON_CORRUPTION)):
        name, on_corruption = ON_CORRUPTION, text
    if on_corruption not in (None, *get_args(OnCorruption)):
        raise TopologyError(f"{name}: expected 'raise' or 'exclude', found {on_corruption!r}")
    return AuditOptions(float(number), on_corruption == "exclude")


class Audit:
    """Chooses the steps; one for each `TrainStep` that is audited."""

    def __init__(self, plan: Plan, seed: int, options: AuditOptions) -> None:
        self.plan = plan
        self.excludes = options.excludes
        self._seed = seed
        self._rate = options.rate
        # Devices are numbered through the processes.
        self.devices = [
            (process, device)
            for process, count in enumerate(plan.engine.devices_per_process)
            for device in range(count)
        ]

    def audited_step(self, step: int) -> AuditedStep | None:
        """The audit of a step; None for a step that is not audited."""
        drawn = draw(self._seed, step, self._rate, self.plan.parts)
        return AuditedStep(self, step, drawn) if drawn else None


class _Case:
    """One contribution that is computed several times.

    `pair` is the device that runs the replica and the first that is asked; `sent` is the share as a
    message, once a process needs it; `kept` are the arrays of local computations by their number.
    """

    def __init__(self, drawn: Draw) -> None:
        self.replica, self.devices = drawn
        self.pair = (*drawn.devices, drawn.devices[0])[:2]
        self.share: Any = None
        self.sent: dict[str, Any] = {}
        self.computed: list[ComputedContribution] = []
        self.kept: dict[int, list[Any]] = {}
        self.leaves: dict[int, list[Leaf]] = {}


class AuditedStep:
    """The audit of one step. In a group every process makes the same calls."""

    def __init__(self, audit: Audit, step: int, drawn: Sequence[Draw]) -> None:
        self._audit = audit
        self._engine: Engine = audit.plan.engine
        self._processes: Processes = self._engine.processes.channel("audit")
        self._step = step
        self._cases = {draw.replica: _Case(draw) for draw in drawn}
        self._names: list[str] = []
        self._shares: Sequence[Any] = ()

    def keep(self, replica: int, value: Any) -> None:
        """Keep a contribution that is about to be added, if it is computed again."""
        if replica in self._cases:
            self._keep(self._cases[replica], 0, value)

    def check(
        self,
        run: Callable[[Work, list[Any]], None],
        compute: Compute,
        states: list[Any],
        shares: Sequence[Any],
    ) -> None:
        """Compute again, and compare, before anything of the step reaches the state. A collective.

        Raises in every process SilentCorruptionError if bits differ, StateError if a contribution
        could not be computed again.
        """
        self._shares = shares
        cases = list(self._cases.values())

        def again(device: int, placed: Any) -> Iterator[tuple[int, Any]]:
            for case in cases:
                if self._local(case.pair[1]) == device:
                    value = compute(device, placed, case.replica, self._share(case))
                    self._keep(case, 1, value)
                    yield case.replica, value

        for case in cases:
            self._send_share(case, case.pair)
        self._tell([(case, case.pair) for case in cases], lambda: run(again, states))
        case = next((case for case in cases if len({c.hashes for c in case.computed}) > 1), None)
        if case is not None:
            self._decide(case, compute, states)
            self._report(case)

    def _decide(self, case: _Case, compute: Compute, states: list[Any]) -> None:
        devices = further(case.devices)

        def more() -> None:
            for number, device in enumerate(devices, len(case.computed)):
                if (local := self._local(device)) is not None:
                    placed = states[local % len(states)]
                    value = compute(local, placed, case.replica, self._share(case))
                    self._keep(case, number, value)

        self._send_share(case, devices)
        self._tell([(case, devices)], more)

    def _tell(
        self, asked: Sequence[tuple[_Case, Sequence[int]]], compute: Callable[[], None]
    ) -> None:
        """Compute, and tell every process the hashes of what `asked` of the devices."""
        failure: Exception | None = None
        told: dict[str, Any] = {}
        try:
            compute()
            for case, devices in asked:
                told |= self._to_tell(case, len(case.computed), len(devices))
        except Exception as error:  # noqa: BLE001 (raised when the other processes know it)
            failure, told = error, {"failure": f"{type(error).__name__}: {error}"}
        found = self._all(told)
        if failure is not None:
            raise failure
        if "failure" in found:
            raise StateError(
                f"step {self._step}: a contribution could not be computed again in another process: "
                f"{found['failure']}"
            )
        for case, devices in asked:
            for number, device in enumerate(devices, len(case.computed)):
                if (hashes := found.get(f"{case.replica}/{number}")) is not None:
                    case.computed.append(ComputedContribution(device, tuple(hashes)))

    def _all(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What all processes tell. A collective."""
        return {k: v for row in gather_values(self._processes, told) for k, v in row.items()}

    def _to_tell(self, case: _Case, start: int, count: int) -> dict[str, list[str]]:
        """The hashes of the local computations; nothing if both are here and agree."""
        local = {number: self._hashes(case, number) for number in case.kept if number >= start}
        if start == 0 and len(local) == count and local[0] == local[1]:
            return {}
        return {f"{case.replica}/{number}": hashes for number, hashes in local.items()}

    def _local(self, device: int) -> int | None:
        """The number of a device of the group in this process; None in another one."""
        process, local = self._audit.devices[device]
        return local if process == self._processes.index else None

    def _send_share(self, case: _Case, devices: Sequence[int]) -> None:
        """Give the share of the replica to all processes, if another one computes with it."""
        owner = self._audit.devices[case.devices[0]][0]
        is_owner = owner == self._processes.index
        if is_owner:
            case.share = self._shares[case.replica - self._audit.plan.first]
        if case.sent or all(self._audit.devices[device][0] == owner for device in devices):
            return
        leaves = flatten(case.share) if is_owner else {}
        sent = {path: _sent(leaf) for path, leaf in leaves.items()}
        case.sent = gather_values(self._processes, sent)[owner]

    def _share(self, case: _Case) -> Any:
        if case.share is None:
            try:
                leaves = {path: _received(row) for path, row in case.sent.items()}
                case.share = restore(self._shares[0], leaves)
            except MismatchError as error:
                raise StateError(
                    f"step {self._step}: the share of logical replica {case.replica} has another form "
                    f"than those of process {self._processes.index}, which audits it: {error} Give "
                    "all replicas shares of one shape, or train without audit."
                ) from error
        return case.share

    def _keep(self, case: _Case, number: int, value: Any) -> None:
        """Copies, where the arrays are: what is added may be overwritten, and nothing waits here."""
        leaves, _ = self._engine.trees.flatten(value)
        if not self._names:
            self._names = self._engine.trees.paths(value)
        case.kept[number] = [
            leaf.detach().clone() if hasattr(leaf, "detach") else leaf.copy() for leaf in leaves
        ]

    def _hashes(self, case: _Case, number: int) -> list[str]:
        """The form of each leaf, and the hash of its bits."""
        found = flatten(case.kept[number])
        case.leaves[number] = leaves = [found[str(i)] for i in range(len(found))]
        return [f"{x.dtype}{list(x.shape)} {blake3(x.data).hexdigest(16)}" for x in leaves]

    def _report(self, case: _Case) -> None:
        """Name what was wrong, and raise the same error in every process."""
        computed = case.computed
        self._require_one_form(case)
        wrong, right, other = judge(computed)
        pairs = zip(computed[right].hashes, computed[other].hashes, strict=True)
        differing = [number for number, (one, two) in enumerate(pairs) if one != two]
        name = self._name(differing[0])
        bits, where = self._compare(case, right, other, differing[0])
        devices = sorted({c.device for c in computed})
        suspects = self._describe(wrong or devices)
        others = self._describe([device for device in devices if device not in wrong])
        found = " and ".join(map(str, suspects))
        if not wrong:
            verdict = f"the computations of {found} differ, and no majority says what is right."
        elif not others:  # the only device: two of its three computations agree
            verdict = f"{found} computed other bits than in two other computations."
        else:
            verdict = f"{found} computed other bits than {' and '.join(map(str, others))}."
        advice = (
            "`perdure doctor` looks at the device."
            if wrong
            else "Either a device is wrong, or `grad` gives other bits at every call (random numbers "
            "that do not come from its key, a state of its own): `perdure doctor -- COMMAND` tells."
        )
        more = f", and {len(differing) - 1} more leaves differ" if len(differing) > 1 else ""
        text = (
            f"step {self._step}, logical replica {case.replica}: {verdict} {name}: "
            f"{bits} {'bit differs' if bits == 1 else 'bits differ'}{where}{more}. The state has not "
            f"changed, and nothing of this step is saved. {advice}"
        )
        if wrong and self._audit.excludes:
            local = [n for device in wrong if (n := self._local(device)) is not None]
            if local:
                report_corruption(local, len(self._engine.devices), text)
        self._processes.barrier()  # the report is there before a process ends
        raise SilentCorruptionError(
            text, self._step, case.replica, tuple(suspects), bool(wrong), name, bits
        )

    def _require_one_form(self, case: _Case) -> None:
        """Raise if the computations differ in more than bits, which is the program's doing."""
        forms = [tuple(text.rpartition(" ")[0] for text in c.hashes) for c in case.computed]
        lengths = sorted(set(map(len, forms)))
        if len(lengths) > 1:
            ways = f"{lengths[0]} leaves in one call and {lengths[1]}"
        elif len(set(forms)) > 1:
            at, several = next(
                (at, found)
                for at, found in enumerate(map(sorted, map(set, zip(*forms, strict=True))))
                if len(found) > 1
            )
            ways = f"{self._name(at)} as {several[0]} in one call and as {several[1]}"
        else:
            return
        raise StateError(
            f"step {self._step}, logical replica {case.replica}: `grad` returned {ways} in another, of "
            "the same state and batch. Expected the same leaves, dtypes and shapes at every call: no "
            "device can cause this. The state has not changed."
        )

    def _describe(self, devices: Sequence[int]) -> list[CorruptDevice]:
        """Names of devices, those of other processes too. A collective."""
        local = [str(device) for device in self._engine.devices]
        mine = [socket.gethostname(), list(zip(named_numbers(len(local)), local, strict=True))]
        told = gather_values(self._processes, mine)
        found = [self._audit.devices[device] for device in devices]
        return [CorruptDevice(told[p][0], p, *told[p][1][device]) for p, device in found]

    def _name(self, at: int) -> str:
        """The path of leaf `at`. A collective."""
        names = [
            name for row in gather_values(self._processes, self._names[at : at + 1]) for name in row
        ]
        # The engine of PyTorch has the buffers of modules beside what `grad` returned.
        return names[0].removeprefix("contributions/")

    def _compare(self, case: _Case, right: int, other: int, at: int) -> tuple[int, str]:
        """Of leaf `at` of two computations: how many bits differ, and where first. A collective."""
        numbers = [number for number in (right, other) if number in case.leaves]
        found = self._all({str(number): _sent(case.leaves[number][at]) for number in numbers})
        return _difference(*(_received(found[str(number)]) for number in (right, other)))


def _difference(right: Leaf, other: Leaf) -> tuple[int, str]:
    """How many bits differ, and in words the first element that does: what was found for what."""
    one, two = (np.frombuffer(leaf.data, np.uint8) for leaf in (right, other))
    changed = np.flatnonzero(one != two)
    bits = int(np.bitwise_count(one[changed] ^ two[changed]).sum())
    size = max(1, right.nbytes // max(1, math.prod(right.shape)))
    first = int(changed[0]) // size
    index = tuple(int(i) for i in np.unravel_index(first, right.shape or (1,)))
    span = slice(first * size, (first + 1) * size)
    values = [bytes(leaf.data[span])[::-1].hex() for leaf in (right, other)]
    where = "" if right.shape == () else f" first in element {list(index)},"
    return bits, f",{where} 0x{values[1]} for 0x{values[0]}"


def _sent(leaf: Leaf) -> list[Any]:
    return [leaf.dtype, leaf.shape, leaf.data]


def _received(row: list[Any]) -> Leaf:
    dtype, shape, data = row
    return Leaf(dtype, tuple(shape), data)


ASKED = 3


class Draw(NamedTuple):
    """One contribution that is computed again: by its device, then by at most two others."""

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
            # The devices after this one: first in its process, then in the others, each in a circle.
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
    """What computations say: the `wrong` devices (empty if undecided), a right one, another."""

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
