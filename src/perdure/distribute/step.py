"""One training step over the logical replicas.

Owns the order in which the three computations are called. Invariant: grad is called once for each
logical replica, update once for each device, and nothing else touches a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from perdure.checkpoint.group_save import require_same
from perdure.distribute.engine import Grad, Stream, Update
from perdure.distribute.reduction import Plan
from perdure.distribute.values import PerReplica
from perdure.errors import StateError, TopologyError
from perdure.process_group import Processes
from perdure.state import flatten


class TrainStep:
    """`state, logs = train_step(state, batch)`; see Strategy.step."""

    def __init__(self, plan: Plan, seed: int, grad: Grad, update: Update) -> None:
        self._plan = plan
        self._seed = seed
        self._grad = grad
        self._update = update
        self._run = plan.engine.runner()
        self._together = plan.engine.together(grad, update, plan.replicas, seed)
        self._checked = False

    def __call__(self, state: Any, batch: PerReplica) -> tuple[Any, Any]:
        """The state after the step, and the logs that `update` returned."""
        plan, engine = self._plan, self._plan.engine
        step = self._step_of(batch)
        if not self._checked and engine.processes.count > 1:
            _same_state(engine.processes, state)
        if self._together and (done := self._together(state, batch.values, step)) is not None:
            return done
        states = engine.place(state)
        reduction = plan.reduction()

        def contribute(device: int, own: Any) -> Iterator[tuple[int, Any]]:
            reduction.begin(device)
            for replica in range(*plan.local[device]):
                share = engine.put(batch.values[replica - plan.first], engine.devices[device])
                stream = Stream(self._seed, step, replica)
                value = engine.grad(self._grad, own, share, stream)
                reduction.push(device, replica, value)
                yield replica, value
                del value  # not alive beside the next one

        self._run(contribute, states)
        total = reduction.total(check=not self._checked)
        self._checked = True
        stream = Stream(self._seed, step, plan.replicas)
        results = [
            engine.update(self._update, own, engine.put(total, device), stream)
            for own, device in zip(states, engine.devices, strict=False)
        ]
        return engine.collect([new for new, _ in results]), results[0][1]

    def many(self, state: Any, batches: Iterable[PerReplica]) -> tuple[Any, Any]:
        """(the state after a step on each batch, the logs of all of them, stacked).

        The same bits as the steps one by one: they are called one by one.
        """
        logs = []
        for batch in batches:
            state, own = self(state, batch)
            logs.append(own)
        if not logs:
            raise TopologyError("many expects at least one batch, got none")
        return state, self._plan.engine.stack(logs)

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


def _same_state(processes: Processes, state: Any) -> None:
    """Once: workers that begin with different states would end with different ones, unnoticed."""
    try:
        leaves = flatten(state)
    except StateError:
        leaves = {}  # what has no exact form on disk can still be trained
    require_same(processes, leaves)
