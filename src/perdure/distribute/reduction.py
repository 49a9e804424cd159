"""One reduction over all logical replicas of the group.

Owns the walk of contributions through the tree: device, process, group. Invariant: every addition is
an edge of `perdure.distribute.tree`, whatever the devices; between devices only bytes move.
"""

from __future__ import annotations

import json
from typing import Any

from perdure.distribute.engine import Engine
from perdure.distribute.topology import split
from perdure.distribute.tree import Node, ShiftReduce, merge, partial_roots
from perdure.errors import StateError


class Plan:
    """Who runs which replica, and with which partial sums every process ends."""

    def __init__(self, engine: Engine, replicas: int) -> None:
        self.engine = engine
        self.replicas = replicas
        parts = split(replicas, engine.devices_per_process)
        self.local = parts[engine.processes.index]
        self.roots = [partial_roots(part[0][0], part[-1][1], replicas) for part in parts]
        self.local_replicas = tuple(range(self.local[0][0], self.local[-1][1]))

    def reduction(self) -> Reduction:
        """A reduction over the replicas, in the fixed tree."""
        return Reduction(self)

    @property
    def first(self) -> int:
        """Number of the first replica of this process."""
        return self.local[0][0]


class Reduction:
    """Takes the contribution of each local replica, gives the total. Used once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._engine = plan.engine
        self._stacks = [ShiftReduce(plan.replicas, plan.engine.add) for _ in plan.local]
        self._first: tuple[int, Any, Any] | None = None

    def push(self, device: int, replica: int, value: Any) -> None:
        """Add the contribution of `replica`; those of one device come in their order."""
        signature = self._engine.signature(value)
        if self._first is None:
            self._first = (replica, signature, value)
        elif signature != self._first[1]:
            other = self._first[0]
            raise StateError(
                f"logical replica {replica} gives another structure than replica {other}: "
                + _differences(
                    self._engine.describe(self._first[2]),
                    self._engine.describe(value),
                    f"replica {other}",
                    f"replica {replica}",
                )
            )
        self._stacks[device].push(Node(0, replica), value)

    def total(self, *, check: bool) -> Any:
        """The sum over all replicas of the group, on the first local device. A collective.

        With `check`, the processes first compare the structures of what they are about to add,
        because a difference would otherwise be a hang or a wrong sum.
        """
        engine, plan = self._engine, self._plan
        home = engine.devices[0]
        nodes = self._stacks[0].roots()
        for stack in self._stacks[1:]:
            nodes += [(node, engine.put(value, home)) for node, value in stack.roots()]
        nodes = merge(nodes, plan.replicas, engine.add)
        if engine.processes.count > 1:
            assert tuple(node for node, _ in nodes) == plan.roots[engine.processes.index]
            if check:
                self._compare(nodes[0][1])
            counts = tuple(len(roots) for roots in plan.roots)
            found = engine.exchange([value for _, value in nodes], counts)
            nodes = [
                item
                for roots, values in zip(plan.roots, found, strict=True)
                for item in zip(roots, values, strict=True)
            ]
            nodes = merge(nodes, plan.replicas, engine.add)
        ((_, total),) = nodes
        self._first = None
        return total

    def _compare(self, value: Any) -> None:
        mine = self._engine.describe(value)
        every = self._engine.processes.gather(json.dumps(mine, sort_keys=True).encode())
        for process, text in enumerate(every):
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
