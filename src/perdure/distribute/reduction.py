"""One reduction over the contributions of all logical replicas.

They are added on each device, then in each process, then in the group, each time along an edge of
the tree. A process may fail, leave a step out, or contribute another structure: so a digest of step
and structure travels with every partial sum, and the sum of these shows whether they are equal.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import numpy as np
from blake3 import blake3

from perdure.distribute.arrays import namespace
from perdure.distribute.engine import describe, signature
from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge
from perdure.distribute.topology import Plan
from perdure.errors import PerdureError, StateError, WorkerLostError
from perdure.runtime.process_group import gather_values
from perdure.text import few


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

    def push(self, device: int, replica: int, value: Any) -> None:
        """Add a contribution; each device adds its contributions in order, from any thread."""
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
            replica, form = first.seen[0]
            for other, other_form in itertools.chain(*(device.seen for device in self._devices)):
                if other_form != form:
                    names = f"replica {replica}", f"replica {other}"
                    raise StateError(
                        f"logical {names[1]} gives another structure than {names[0]}: "
                        + differences(plan.described[form], plan.described[other_form], *names)
                    )
        nodes = first.tree.roots()
        for device in others:
            home = engine.devices[0]
            nodes += [(node, engine.put(value, home)) for node, value in device.tree.roots()]
        self._nodes = merge(nodes, plan.replicas, engine.add) if len(nodes) > 1 else nodes

    def total(self, agreement: Agreement | None = None, at: str = "") -> Any:
        """The sum over all replicas of the group, on the first local device. A collective.

        The processes compare where they are (`at`) and the structures that they add, because a
        difference would be a hang or a wrong sum.
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


_ALIKE = (
    "In a group every process makes the same steps: what one of them skips or repeats (a bad batch, "
    "a loss that is not finite), all of them have to"
)


class Agreement:
    """The exchange of partial sums for one function; `check` is a collective before each exchange."""

    def __init__(self, plan: Plan, check: Callable[[], None] | None = None) -> None:
        self._plan = plan
        self._check = check
        self._engine = plan.engine
        self._counts = tuple(len(roots) for roots in plan.roots)
        # The structure that all processes have. Zeros of it are sent for a contribution that a process
        # does not have, because all processes have to send equally many bytes.
        self._form: Hashable = None
        self._described = ""
        self._shapes: list[list[int]] = []
        self._scalars: Any = None

    def exchange(self, at: str, roots: list[Any]) -> Any:
        """The sum of the partial sums of all processes, on the first local device. A collective.

        Raises StateError in all if they are at different steps, one has failed, or structures
        differ.
        """
        form = signature(self._engine.trees, roots[0])
        is_new = form != self._form
        described = self._described
        if is_new:
            described = json.dumps(describe(self._engine.trees, roots[0]), sort_keys=True)
        if self._form is None:
            self._compare(at, described)
        else:
            sent = self._zeros(len(roots)) if is_new else roots
            try:
                is_equal, total = self._sum(sent, f"{at} {described}")
            except WorkerLostError:
                raise
            except PerdureError as error:  # of this process alone, which has sent nothing
                self.fail(at, error)
                raise
            if not is_equal:
                self._compare(at, described)
                raise StateError(f"{at}: the processes add different values. {_ALIKE}.")
            if not is_new:
                return total
        # All processes have this structure.
        self._form, self._described, self._shapes = form, described, []

        def scalar(leaf: Any) -> Any:
            self._shapes.append(list(leaf.shape))
            return namespace(leaf).zeros([], leaf.dtype)

        self._scalars = self._engine.trees.map(scalar, roots[0])
        return self.exchange(at, roots)

    def fail(self, at: str, error: BaseException) -> None:
        """Let all processes raise an error, because this one has failed there. A collective."""
        index = self._engine.processes.index
        with suppress(PerdureError):  # the caller raises `error`
            if self._form is not None:
                self._sum(self._zeros(self._counts[index]), f"{at} failed in {index}")
            self._compare(at, "", f"{type(error).__name__}: {error}")

    def _sum(self, roots: list[Any], text: str) -> tuple[bool, Any]:
        """The sum, and whether all processes have given the same text."""
        engine, plan = self._engine, self._plan

        def merge_all(values_of_processes: list[list[Any]]) -> Any:
            all_nodes = [
                node
                for roots, values in zip(plan.roots, values_of_processes, strict=True)
                for node in zip(roots, values, strict=True)
            ]
            ((_, total),) = merge(all_nodes, plan.replicas, engine.add)
            return total

        # Numbers of 16 bits, so that no group is large enough for their sum to overflow.
        digest = np.frombuffer(blake3(text.encode()).digest(8), np.uint16).astype(np.int32)
        values = [{"check": digest, "value": root} for root in roots]
        if self._check is not None:
            self._check()
        total = engine.exchange(values, self._counts, merge_all)
        return total["check"].tolist() == (digest * sum(self._counts)).tolist(), total["value"]

    def _zeros(self, count: int) -> list[Any]:
        """So many values of the structure that all processes have."""
        shapes = iter(self._shapes)
        zeros = self._engine.trees.map(
            lambda leaf: namespace(leaf).zeros(next(shapes), leaf.dtype), self._scalars
        )
        return [self._engine.put(zeros, self._engine.devices[0])] * count

    def _compare(self, at: str, described: str, error: str = "") -> None:
        """Raise `StateError` unless all processes are at one step with one structure. A collective."""
        processes = self._engine.processes
        rows = gather_values(processes, [at, described, error])
        for process, (there, _, failure) in enumerate(rows):
            if failure:
                raise StateError(f"process {process} failed in {there}: {failure}. {_ALIKE}.")
        for process, (there, text, _) in enumerate(rows):
            if there != at:
                raise StateError(
                    f"process {processes.index} is at {at}, and process {process} at {there}. {_ALIKE}."
                )
            if text != described:
                raise StateError(
                    f"process {process} gives another structure than process {processes.index}: "
                    + differences(
                        json.loads(described),
                        json.loads(text),
                        f"process {processes.index}",
                        f"process {process}",
                    )
                )


def differences(one: dict[str, str], other: dict[str, str], name: str, other_name: str) -> str:
    """The leaves of two structures that differ, as a text."""
    lines = [
        f"{path}: {one.get(path, 'nothing')} in {name}, {other.get(path, 'nothing')} in {other_name}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path)
    ]
    return few(lines, separator="; ") or "the containers differ"
