"""The plan of the logical replicas, and one reduction over all of them.

Contributions are added on each device, then in each process, then in the group. Every addition is an
edge of `perdure.distribute.reduction_tree`, whatever the devices, and is made by the engine's `add`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from perdure.distribute.engine import Engine
from perdure.distribute.leaves import describe, signature
from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge, partial_roots
from perdure.distribute.topology import split
from perdure.distribute.values import PerReplica
from perdure.errors import StateError


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
        self.last_described: Any = None
        self.local_replicas = tuple(range(self.local[0][0], self.local[-1][1]))

    def reduction(self) -> Reduction:
        """A reduction over the replicas, in the fixed tree."""
        return Reduction(self)

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


class _DeviceSum:
    """The contributions of one device: their sum, and what they are."""

    def __init__(self, plan: Plan) -> None:
        self.tree = TreeSum(plan.replicas, plan.engine.add)
        # Its replicas, with the signatures. Compared when all are there.
        self.seen: list[tuple[int, Any]] = []
        self.whole = True


class Reduction:
    """Takes the contribution of each local replica and returns the total. Used once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._engine = plan.engine
        self._devices = [_DeviceSum(plan) for _ in plan.local]

    def begin(self, device: int) -> None:
        """Forget what was pushed for a device. Devices may be pushed to from different threads."""
        if self._devices[device].seen:
            self._devices[device] = _DeviceSum(self._plan)

    def push(self, device: int, replica: int, value: Any) -> None:
        """Add the contribution of `replica`; those of one device come in their order."""
        here = self._devices[device]
        seen = here.seen
        if len(self._plan.local_replicas) == 1:  # there is no other to compare it with
            seen.append((replica, None))
            here.tree.push(TreeNode(0, replica), value)
            return
        form = signature(self._engine.trees, value)
        seen.append((replica, form))
        first = seen[0][1]
        is_like_first = form is first or form == first
        # Compared before it is hashed, which takes longer.
        if (form is first or not is_like_first) and form != self._plan.last_described:
            if form not in self._plan.described:
                self._plan.described[form] = describe(self._engine.trees, value)
            self._plan.last_described = form
        # After one that differs nothing can be added; `total` reports which.
        if is_like_first and here.whole:
            here.tree.push(TreeNode(0, replica), value)
        else:
            here.whole = False

    def total(self, *, check: bool) -> Any:
        """The sum over all replicas of the group, on the first local device. A collective.

        With `check`, the processes first compare the structures of what they are about to add,
        because a difference would otherwise be a hang or a wrong sum.
        """
        engine, plan = self._engine, self._plan
        first, *others = self._devices
        if others or not first.whole:  # else `push` has compared them
            for pushed in itertools.chain(*(device.seen for device in self._devices)):
                self._require_alike(first.seen[0], pushed)
        nodes = first.tree.roots()
        for device in others:
            home = engine.devices[0]
            nodes += [(node, engine.put(value, home)) for node, value in device.tree.roots()]
        if len(nodes) > 1:
            nodes = merge(nodes, plan.replicas, engine.add)
        if engine.processes.count > 1:
            assert tuple(node for node, _ in nodes) == plan.roots[engine.processes.index]
            if check:
                self._compare(nodes[0][1])
            counts = tuple(len(roots) for roots in plan.roots)

            def merge_all(values_of_processes: list[list[Any]]) -> Any:
                all_nodes = [
                    node
                    for roots, values in zip(plan.roots, values_of_processes, strict=True)
                    for node in zip(roots, values, strict=True)
                ]
                ((_, total),) = merge(all_nodes, plan.replicas, engine.add)
                return total

            return engine.exchange([value for _, value in nodes], counts, merge_all)
        ((_, total),) = nodes
        return total

    def _require_alike(self, first: tuple[int, Any], other: tuple[int, Any]) -> None:
        if other[1] != first[1]:
            raise StateError(
                f"logical replica {other[0]} gives another structure than replica {first[0]}: "
                + _differences(
                    self._plan.described[first[1]],
                    self._plan.described[other[1]],
                    f"replica {first[0]}",
                    f"replica {other[0]}",
                )
            )

    def _compare(self, value: Any) -> None:
        mine = describe(self._engine.trees, value)
        texts = self._engine.processes.gather(json.dumps(mine, sort_keys=True).encode())
        for process, text in enumerate(texts):
            theirs = json.loads(text)
            if theirs != mine:
                index = self._engine.processes.index
                raise StateError(
                    f"process {process} gives another structure than process {index}: "
                    + _differences(mine, theirs, f"process {index}", f"process {process}")
                )


def _differences(one: dict[str, str], other: dict[str, str], name: str, other_name: str) -> str:
    lines = [
        f"{path}: {one.get(path, 'nothing')} in {name}, {other.get(path, 'nothing')} in {other_name}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    ]
    shown = "; ".join(lines[:10]) or "the containers differ"
    return shown + (f"; and {len(lines) - 10} more" if len(lines) > 10 else "")
