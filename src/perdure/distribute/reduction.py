"""One reduction over the contributions of all logical replicas.

Contributions are added on each device, then in each process, then in the group. Every addition is an
edge of `perdure.distribute.reduction_tree`, whatever the devices, and is made by the engine's `add`.
"""

from __future__ import annotations

import itertools
from typing import Any

from perdure.distribute.agreement import Agreement, differences
from perdure.distribute.engine import describe, signature
from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge
from perdure.distribute.topology import Plan
from perdure.errors import StateError


class _DeviceSum:
    """The contributions of one device: their sum, and what they are."""

    def __init__(self, plan: Plan) -> None:
        self.tree = TreeSum(plan.replicas, plan.engine.add)
        # Its replicas, with the signatures. Compared when all are there.
        self.seen: list[tuple[int, Any]] = []
        self.is_alike = True


def reduction_of(plan: Plan) -> Reduction:
    """A reduction over the replicas of a plan, in the fixed tree."""
    return Reduction(plan) if plan.control is None else plan.control()


class Reduction:
    """Takes the contribution of each local replica and returns the total. Used once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._engine = plan.engine
        self._devices = [_DeviceSum(plan) for _ in plan.local]
        self._nodes: list[tuple[TreeNode, Any]] | None = None

    def begin(self, device: int) -> None:
        """Forget what was pushed for a device. Devices may be pushed to from different threads."""
        if self._devices[device].seen:
            self._devices[device] = _DeviceSum(self._plan)

    def push(self, device: int, replica: int, value: Any) -> None:
        """Add the contribution of `replica`; those of one device come in their order."""
        here, plan = self._devices[device], self._plan
        form = None
        if len(plan.local_replicas) > 1:  # else there is no other to compare it with
            form = signature(self._engine.trees, value)
            # Compared before it is hashed, which takes longer.
            if form != plan.last_form and form not in plan.described:
                plan.described[form] = describe(self._engine.trees, value)
            plan.last_form = form
        here.seen.append((replica, form))
        # After one that differs nothing can be added; `close` reports which.
        here.is_alike = here.is_alike and form == here.seen[0][1]
        if here.is_alike:
            here.tree.push(TreeNode(0, replica), value)

    def close(self) -> None:
        """Add what was pushed for different devices; raises `StateError` if it cannot be added."""
        engine, plan = self._engine, self._plan
        first, *others = self._devices
        if others or not first.is_alike:
            for pushed in itertools.chain(*(device.seen for device in self._devices)):
                self._require_alike(first.seen[0], pushed)
        nodes = first.tree.roots()
        for device in others:
            home = engine.devices[0]
            nodes += [(node, engine.put(value, home)) for node, value in device.tree.roots()]
        self._nodes = merge(nodes, plan.replicas, engine.add) if len(nodes) > 1 else nodes

    def total(self, agreement: Agreement | None = None, at: str = "") -> Any:
        """The sum over all replicas of the group, on the first local device. A collective.

        The processes compare where they are (`at`) and the structures of what they are about to add,
        because a difference would otherwise be a hang or a wrong sum: with the `agreement` of earlier
        calls without a message of its own.
        """
        plan = self._plan
        if self._nodes is None:
            self.close()
        assert self._nodes is not None
        if self._engine.processes.count > 1:
            assert tuple(node for node, _ in self._nodes) == plan.roots[plan.engine.processes.index]
            agreement = agreement or Agreement(plan)
            return agreement.exchange(at, [value for _, value in self._nodes])
        ((_, total),) = self._nodes
        return total

    def _require_alike(self, first: tuple[int, Any], other: tuple[int, Any]) -> None:
        if other[1] != first[1]:
            one, two = (self._plan.described[form] for _, form in (first, other))
            names = [f"replica {number}" for number, _ in (first, other)]
            raise StateError(
                f"logical {names[1]} gives another structure than {names[0]}: "
                + differences(one, two, *names)
            )
