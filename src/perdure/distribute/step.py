"""One training step over the logical replicas.

Owns the order in which the three computations are called. Invariant: grad is called once for each
logical replica, update once for each device, and nothing else touches a value.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perdure.distribute.engine import Grad, Stream, Update
from perdure.distribute.reduction import Plan
from perdure.distribute.values import PerReplica
from perdure.errors import TopologyError


class TrainStep:
    """`state, logs = train_step(state, batch)`; see Strategy.step."""

    def __init__(self, plan: Plan, seed: int, grad: Grad, update: Update) -> None:
        self._plan = plan
        self._seed = seed
        self._grad = grad
        self._update = update
        self._compiled = False

    def __call__(self, state: Any, batch: PerReplica) -> tuple[Any, Any]:
        """The state after the step, and the logs that `update` returned."""
        plan, engine = self._plan, self._plan.engine
        step = self._step_of(batch)
        states = engine.place(state)
        reduction = plan.reduction()

        def contribute(device: int, replica: int) -> None:
            share = engine.put(batch.values[replica - plan.first], engine.devices[device])
            stream = Stream(self._seed, step, replica)
            value = engine.grad(self._grad, states[device], share, stream)
            reduction.push(device, replica, value)

        longest = max(stop - start for start, stop in plan.local)
        # In rounds over the devices, so that each has work as early as possible.
        for turn in range(longest):
            self._each(
                lambda device, turn=turn: contribute(device, plan.local[device][0] + turn),
                [d for d, (start, stop) in enumerate(plan.local) if start + turn < stop],
            )
        total = reduction.total(check=not self._compiled)
        stream = Stream(self._seed, step, plan.replicas)
        results = self._each(
            lambda device: engine.update(
                self._update, states[device], engine.put(total, engine.devices[device]), stream
            ),
            list(range(len(plan.local))),
        )
        self._compiled = True
        return engine.collect([new for new, _ in results]), results[0][1]

    def _each(self, work: Callable[[int], Any], devices: list[int]) -> list[Any]:
        """`work` for every device. In threads while each device still compiles its own copy."""
        if self._compiled or len(devices) == 1:
            return [work(device) for device in devices]
        with ThreadPoolExecutor(len(devices)) as pool:
            return list(pool.map(work, devices))

    def _step_of(self, batch: PerReplica) -> int:
        if not isinstance(batch, PerReplica) or batch.step is None:
            raise TopologyError(
                "train_step expects what strategy.batch(dataset, step) returns, which carries the "
                f"step; got {type(batch).__name__}"
            )
        if batch.replicas != self._plan.local_replicas:
            raise TopologyError(
                f"expected shares for the replicas {self._plan.local_replicas}, found "
                f"{batch.replicas}: the batch was made by another strategy"
            )
        return batch.step
