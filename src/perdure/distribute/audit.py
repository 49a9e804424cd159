"""The audit: in some steps the contribution of one logical replica is computed a second time.

Another device of the group computes it if there is one. The bits of the two have to agree before
`update` changes the state. If they differ, further computations decide which device was wrong; two
alone cannot tell. Which steps, which replica and which devices is a function of (seed, step), so that
every process knows it and the audit changes no bit.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from blake3 import blake3

from perdure.distribute.audit_vote import Computation, Draw, draw, further, judge
from perdure.distribute.engine import Engine
from perdure.distribute.leaf_message import pack_leaves, unpack_leaves
from perdure.distribute.reduction import Plan
from perdure.errors import (
    CorruptDevice,
    MismatchError,
    SilentCorruptionError,
    StateError,
    TopologyError,
)
from perdure.excluded_devices import AUDIT, ON_CORRUPTION, report_corruption
from perdure.process_group import Processes
from perdure.state import flatten, restore
from perdure.store.leaf import Leaf

OnCorruption = Literal["raise", "exclude"]

# compute(local device, share) -> the contribution of the audited replica
Compute = Callable[[int, Any], Any]


@dataclass(frozen=True)
class AuditOptions:
    """What share of the steps is audited, and what follows a difference.

    Attributes:
        rate: From 0 to 1.
        excludes: Whether the device is reported to `perdure run` before the error is raised.
    """

    rate: float = 0.0
    excludes: bool = False


def audit_options(rate: Any, on_corruption: Any) -> AuditOptions:
    """The options of a step; None leaves them to the variables that `perdure run --audit` sets.

    Raises:
        TopologyError: A value cannot be used.
    """
    name = "audit"
    if rate is None and (text := os.environ.get(AUDIT)):
        name = AUDIT
        try:
            rate = float(text)
        except ValueError:
            rate = text
    rate = 0 if rate is None else rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise TopologyError(f"{name}: expected a share of the steps from 0 to 1, found {rate!r}")
    name = "on_corruption"
    if on_corruption is None and (text := os.environ.get(ON_CORRUPTION)):
        name, on_corruption = ON_CORRUPTION, text
    if on_corruption not in (None, *get_args(OnCorruption)):
        raise TopologyError(f"{name}: expected 'raise' or 'exclude', found {on_corruption!r}")
    return AuditOptions(float(rate), on_corruption == "exclude")


class Audit:
    """Chooses the steps; one for each `TrainStep` that is audited.

    Args:
        plan: The replicas and devices.
        seed: That of the strategy.
        options: The share of the steps, and what follows a difference.
    """

    def __init__(self, plan: Plan, seed: int, options: AuditOptions) -> None:
        self.plan = plan
        self.excludes = options.excludes
        self._seed = seed
        self._rate = options.rate
        # Devices are numbered through the processes.
        self.places = [
            (process, device)
            for process, count in enumerate(plan.engine.devices_per_process)
            for device in range(count)
        ]
        ranges = [part for parts in plan.parts for part in parts]
        self._owners = [
            next(device for device, (start, stop) in enumerate(ranges) if start <= r < stop)
            for r in range(plan.replicas)
        ]

    def of_step(self, step: int) -> AuditedStep | None:
        """The audit of a step; None for a step that is not audited."""
        drawn = draw(self._seed, step, self._rate, self._owners, len(self.places))
        return None if drawn is None else AuditedStep(self, step, drawn)


class AuditedStep:
    """The audit of one step. In a group every process makes the same calls.

    Attributes:
        replica: The logical replica whose contribution is compared.
    """

    def __init__(self, audit: Audit, step: int, drawn: Draw) -> None:
        self._audit = audit
        self._engine: Engine = audit.plan.engine
        self._processes: Processes = self._engine.processes.channel("audit")
        self.replica = drawn.replica
        self._step = step
        self._devices = drawn.devices
        self._names: list[str] = []
        self._kept: list[Leaf] | None = None
        self._shares: Sequence[Any] = ()
        self._share: Any = None
        self._sent = b""  # the share, in all processes once one of them needs it
        self._computed: list[Computation] = []
        self._values: dict[int, list[Leaf]] = {}  # of the local computations, by their number

    def keep(self, replica: int, value: Any) -> None:
        """Keep the contribution that is about to be added, if it is that of the audited replica."""
        if replica == self.replica:
            self._kept = self._leaves(value)

    def check(self, compute: Compute, shares: Sequence[Any]) -> None:
        """Compute again, and compare, before anything of the step reaches the state. A collective.

        Args:
            compute: Computes the contribution of the audited replica on a local device.
            shares: Those of the local replicas.

        Raises:
            SilentCorruptionError: The bits differ. Raised in every process.
        """
        self._shares = shares
        owner, *others = self._devices
        self._vote(compute, (owner, others[0] if others else owner))
        if self._computed[0].hashes == self._computed[1].hashes:
            return
        self._vote(compute, further(self._devices))
        self._report()

    def _vote(self, compute: Compute, devices: Sequence[int]) -> None:
        """Compute on `devices`, those of other processes too, and tell every process the hashes."""
        self._send_share(devices)
        numbered = list(enumerate(devices, len(self._computed)))
        failure: Exception | None = None
        told: dict[str, Any] = {}
        try:
            for number, device in numbered:
                process, local = self._audit.places[device]
                if process == self._processes.index:
                    self._values[number] = self._value(number, compute, local)
                    told[str(number)] = [_hash(leaf) for leaf in self._values[number]]
        except Exception as error:  # noqa: BLE001 (raised when the other processes know it)
            failure, told = error, {"failure": f"{type(error).__name__}: {error}"}
        found: dict[str, Any] = {}
        for text in self._processes.gather(json.dumps(told).encode()):
            found |= json.loads(text)
        if failure is not None:
            raise failure
        if "failure" in found:
            raise StateError(
                f"step {self._step}: the contribution of logical replica {self.replica} could not be "
                f"computed again in another process: {found['failure']}"
            )
        self._computed += [
            Computation(device, tuple(found[str(number)])) for number, device in numbered
        ]

    def _value(self, number: int, compute: Compute, device: int) -> list[Leaf]:
        """The contribution of one computation on a local device."""
        if number == 0:
            assert self._kept is not None
            return self._kept
        if self._share is None:
            try:
                self._share = restore(self._shares[0], unpack_leaves(self._sent))
            except MismatchError as error:
                raise StateError(
                    f"step {self._step}: the share of logical replica {self.replica} has another form "
                    f"than those of process {self._processes.index}, which audits it: {error} Give "
                    "all replicas shares of one shape, or train without audit."
                ) from error
        return self._leaves(compute(device, self._share))

    def _send_share(self, devices: Sequence[int]) -> None:
        """Give the share of the audited replica to all processes, if another one computes with it."""
        owner = self._audit.places[self._devices[0]][0]
        is_owner = owner == self._processes.index
        if is_owner:
            self._share = self._shares[self.replica - self._audit.plan.first]
        if self._sent or all(self._audit.places[device][0] == owner for device in devices):
            return
        data = pack_leaves(flatten(self._share)) if is_owner else b""
        self._sent = self._processes.gather(data)[owner]

    def _leaves(self, value: Any) -> list[Leaf]:
        """The leaves in memory of their own, in their order."""
        leaves, _ = self._engine.trees.flatten(value)
        if not self._names:
            self._names = self._engine.trees.paths(value)
        found = flatten(leaves)
        return [
            leaf if leaf.frozen else Leaf(leaf.dtype, leaf.shape, memoryview(bytes(leaf.data)))
            for leaf in (found[str(number)] for number in range(len(leaves)))
        ]

    def _report(self) -> None:
        """Name what was wrong, and raise the same error in every process."""
        computed = self._computed
        wrong, right, other = judge(computed)
        pairs = zip(computed[right].hashes, computed[other].hashes, strict=True)
        differing = [number for number, (one, two) in enumerate(pairs) if one != two]
        name, bits, where = self._compare(right, other, differing[0])
        devices = sorted({c.device for c in computed})
        suspects = self._describe(wrong or devices)
        others = self._describe([device for device in devices if device not in wrong])
        verdict = _verdict(suspects, others if wrong else None)
        more = f", and {len(differing) - 1} more leaves differ" if len(differing) > 1 else ""
        text = (
            f"step {self._step}, logical replica {self.replica}: {verdict} {name}: "
            f"{bits} {'bit differs' if bits == 1 else 'bits differ'}{where}{more}. The state has not "
            "changed, and nothing of this step is saved. `perdure doctor` looks at the devices."
        )
        if wrong and self._audit.excludes:
            self._exclude(wrong, text)
        self._processes.barrier()  # the report is there before a process ends
        raise SilentCorruptionError(
            text, self._step, self.replica, tuple(suspects), bool(wrong), name, bits
        )

    def _exclude(self, wrong: Sequence[int], text: str) -> None:
        places = [self._audit.places[device] for device in wrong]
        local = [device for process, device in places if process == self._processes.index]
        if local:
            report_corruption(local, len(self._engine.devices), text)

    def _describe(self, devices: Sequence[int]) -> list[CorruptDevice]:
        """Names of devices, those of other processes too. A collective."""
        mine = [socket.gethostname(), [str(device) for device in self._engine.devices]]
        told = [json.loads(text) for text in self._processes.gather(json.dumps(mine).encode())]
        places = [self._audit.places[device] for device in devices]
        return [CorruptDevice(told[p][0], p, d, told[p][1][d]) for p, d in places]

    def _compare(self, right: int, other: int, at: int) -> tuple[str, int, str]:
        """Of leaf `at` of two computations: its path, how many bits differ, and the first element."""
        numbers = [number for number in (right, other) if number in self._values]
        leaves = {str(number): self._values[number][at] for number in numbers}
        names = self._names[at : at + 1]
        found: dict[str, Leaf] = {}
        for data in self._processes.gather(json.dumps(names).encode()):
            names = names or json.loads(data)
        for data in self._processes.gather(pack_leaves(leaves)):
            found |= unpack_leaves(data)
        return names[0], *_difference(found[str(right)], found[str(other)])


def _verdict(suspects: Sequence[CorruptDevice], others: Sequence[CorruptDevice] | None) -> str:
    named = " and ".join(map(str, suspects))
    if others is None:
        return f"the computations of {named} differ, and no majority says which is wrong."
    if not others:  # the only device: two of its three computations agree
        return f"{named} computed other bits than in two other computations."
    return f"{named} computed other bits than {' and '.join(map(str, others))}."


def _hash(leaf: Leaf) -> str:
    form = f"{leaf.dtype} {leaf.shape} ".encode()
    return blake3(form).update(leaf.data).hexdigest(16)


def _difference(right: Leaf, other: Leaf) -> tuple[int, str]:
    """How many bits differ, and in words the first element that does: what was found for what."""
    if (right.dtype, right.shape) != (other.dtype, other.shape):
        return 0, f" {right.dtype}{list(right.shape)} and {other.dtype}{list(other.shape)}"
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
