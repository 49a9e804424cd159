"""`perdure doctor -- python train.py`: the first training step computed several times, on every device.

Only digests leave this module; the doctor compares them. The program is ended afterwards, so that
nothing of it is continued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perdure.digests import leaf_digests
from perdure.distribute.engine import FusedStep, Grad, Stream, Update
from perdure.distribute.reduction import reduction_of
from perdure.distribute.topology import Plan
from perdure.distribute.values import PerReplica
from perdure.errors import StateError
from perdure.state import restore, snapshot
from perdure.store.drill_hook import drill_hook

_TIMES = 2


def step_check(
    plan: Plan, seed: int, functions: tuple[Grad, Update], fused: FusedStep | None
) -> Callable[[Any, PerReplica], None] | None:
    """What is called with the state and the batch of the first step; None outside of the doctor."""
    hook = drill_hook()
    if hook is None or not hook.is_doctor:
        return None
    return lambda state, batch: hook.checked_step(
        _StepCheck(plan, seed, functions, fused).results(state, batch)
    )


class _StepCheck:
    def __init__(
        self, plan: Plan, seed: int, functions: tuple[Grad, Update], fused: FusedStep | None
    ) -> None:
        self._plan = plan
        self._seed = seed
        self._grad, self._update = functions
        self._fused = fused
        self._results: list[dict[str, Any]] = []

    def results(self, state: Any, batch: PerReplica) -> list[dict[str, Any]]:
        """`{what, device, leaves}` of each result, or `{what, device, problem}`."""
        step = batch.step
        assert step is not None
        engine = self._plan.engine
        # Devices that share their memory compute with the same object: they count as one.
        states = engine.place(state)
        copies = list(zip(states, engine.devices, strict=False))
        total = self._total(copies, batch, step)
        self._add("the sum of the replicas", engine.devices[0], {"sum": total})
        try:
            self._updates(copies, total, step)
        except StateError as error:
            problem = f"it cannot be computed twice: {error}"
            self._results.append({"what": "update", "device": "", "problem": problem})
        self._fused_steps(state, batch, step)
        return self._results

    def _total(self, copies: list[tuple[Any, Any]], batch: PerReplica, step: int) -> Any:
        plan, engine = self._plan, self._plan.engine
        reduction = reduction_of(plan)
        for own, (first, stop) in enumerate(plan.local):
            reduction.begin(own)
            # The device that has the replica comes first: its value is the one that is added.
            home = own % len(copies)
            order = [copies[home], *copies[:home], *copies[home + 1 :]]
            for replica in range(first, stop):
                share = batch.values[replica - plan.first]
                stream = Stream(self._seed, step, replica)
                value = None
                for number, (placed, device) in enumerate(order):
                    for _ in range(_TIMES if number == 0 else 1):
                        moved = engine.put(share, device)
                        result = engine.grad(self._grad, placed, moved, stream)
                        self._add(f"replica {replica}", device, {"contribution": result})
                        value = result if value is None else value
                        del result
                reduction.push(own, replica, value)
        return reduction.total(at=f"the check of step {step}")

    def _updates(self, copies: list[tuple[Any, Any]], total: Any, step: int) -> None:
        engine = self._plan.engine
        stream = Stream(self._seed, step, self._plan.replicas)
        # As they were, because an `update` of PyTorch changes its arguments.
        whole = snapshot(total)
        for placed, device in copies:
            before = snapshot(placed)
            for number in range(_TIMES):
                total = restore(total, whole)
                moved = engine.put(total, device)
                old = placed = placed if number == 0 else restore(placed, before)
                new, logs = engine.update(self._update, old, moved, stream)
                self._add("update", device, {"state": new, "logs": logs})

    def _fused_steps(self, state: Any, batch: PerReplica, step: int) -> None:
        engine = self._plan.engine
        for _ in range(_TIMES if self._fused is not None else 0):
            assert self._fused is not None
            result = self._fused(state, batch.values, step)
            if result is None:
                return
            new, logs = result
            for placed, device in zip(engine.place(new), engine.devices, strict=False):
                name = f"{device}, as one program"
                self._add("update", name, {"state": placed, "logs": logs})

    def _add(self, what: str, device: Any, value: dict[str, Any]) -> None:
        try:
            digests = leaf_digests(value)
        except StateError:  # logs may be anything
            value.pop("logs", None)
            digests = leaf_digests(value)
        leaves = {path: digest.hex for path, digest in digests.items()}
        self._results.append({"what": what, "device": str(device), "leaves": leaves})
