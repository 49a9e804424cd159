"""Taking out one guard of a strategy, so that the demo can be seen to FAIL.

What perdure keeps a user from: random numbers that follow the device, and sums whose order follows
the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.distribute.agreement import Agreement
from perdure.distribute.engine import Engine, Stream
from perdure.distribute.reduction import Reduction
from perdure.distribute.topology import Plan

AllReduce = Callable[[Any, list[Any]], Any]


def random_numbers_by_device(strategy: Any) -> None:
    """Draw from one stream for each device instead of one for each logical replica."""
    plan: Plan = strategy._plan
    plan.engine = _DeviceStreams(plan)  # type: ignore[assignment]


def sums_by_all_reduce(strategy: Any, all_reduce: AllReduce) -> None:
    """Add up on each device in a row, then let the framework add over the devices."""
    one_by_one(strategy)
    plan: Plan = strategy._plan
    plan.control = lambda: _PlainSum(plan, all_reduce)


def one_by_one(strategy: Any) -> None:
    """Turn the fused step off, which would bypass the guard that is taken out."""
    strategy._plan.engine = _OneByOne(strategy._plan.engine)


class _OneByOne:
    """The verbs of another engine, save for the one that does a whole step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def fused_step(self, *_: Any) -> None:
        """None: there is no such way."""


class _DeviceStreams(_OneByOne):
    """An engine whose streams know the device and the turn on it, not the replica."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.engine)
        first_device = sum(plan.engine.devices_per_process[: plan.engine.processes.index])
        self._streams = {
            replica: (first_device + device) * 1000 + replica - start
            for device, (start, stop) in enumerate(plan.local)
            for replica in range(start, stop)
        }

    def grad(self, fn: Any, state: Any, share: Any, stream: Stream) -> Any:
        """As the engine's, under the random numbers of a device."""
        changed = stream._replace(replica=self._streams[stream.replica])
        return self._engine.grad(fn, state, share, changed)


class _PlainSum(Reduction):
    """A reduction whose order is that of the devices."""

    def __init__(self, plan: Plan, all_reduce: AllReduce) -> None:
        super().__init__(plan)
        self._all_reduce = all_reduce
        self._sums: dict[int, Any] = {}

    def push(self, device: int, replica: int, value: Any) -> None:
        """Add to the sum of the device."""
        held = self._sums.get(device)
        self._sums[device] = value if held is None else self._plan.engine.add(held, value)

    def close(self) -> None:
        """Nothing: `total` adds."""

    def total(self, agreement: Agreement | None = None, at: str = "") -> Any:
        """The sum over all devices of the group."""
        return self._all_reduce(self._plan.engine, [self._sums[d] for d in sorted(self._sums)])
