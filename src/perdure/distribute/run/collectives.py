"""Reduce and gather: the two collectives over the values of all replicas, outside of a step.

Sums go through the fixed tree and are divided once; gathered values move as bytes. So both results are
the same in every process and for every topology.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from perdure.distribute.arrays import is_traced, namespace
from perdure.distribute.reduction import reduction_of
from perdure.distribute.topology import Plan
from perdure.distribute.values import PerReplica, ReduceOp, of
from perdure.errors import StateError, TopologyError
from perdure.runtime.process_group import gather_values


def operation(reduce_op: ReduceOp | str) -> str:
    """ "sum" or "mean"; TopologyError for anything else."""
    op = str(getattr(reduce_op, "value", reduce_op)).lower()
    if op not in ("sum", "mean"):
        raise TopologyError(f'reduce_op: expected "sum" or "mean", found {reduce_op!r}')
    return op


def reduce(plan: Plan, reduce_op: ReduceOp | str, value: Any, axis: int | None) -> Any:
    """See Strategy.reduce."""
    op = operation(reduce_op)
    _require_local("reduce", plan, value)
    engine = plan.engine
    sizes: list[list[int]] = []  # of each local replica, along the axis, of each array

    def prepare(leaf: Any) -> Any:
        _refuse_traced("reduce", leaf)
        if axis is not None and not -leaf.ndim <= axis < leaf.ndim:
            raise TopologyError(
                f"reduce over axis {axis}: a value has the shape {list(leaf.shape)}"
            )
        sizes[-1].append(1 if axis is None else leaf.shape[axis])
        return leaf if axis is None else leaf.sum(axis)

    reduction = reduction_of(plan)
    for device, (start, stop) in enumerate(plan.local):
        for replica in range(start, stop):
            sizes.append([])
            prepared = engine.trees.map(prepare, of(value, replica))
            reduction.push(device, replica, engine.put(prepared, engine.devices[device]))
    total = reduction.total(at=f"call {plan.runs} of strategy.run")
    if op == "sum":
        return total
    # Divided once, by the number of all elements, which may differ between replicas.
    if engine.processes.count > 1:
        sizes = [row for rows in gather_values(engine.processes, sizes) for row in rows]
    counts = iter([sum(column) for column in zip(*sizes, strict=True)])
    return engine.trees.map(lambda leaf: leaf / next(counts), total)


def gather(plan: Plan, value: Any, axis: int) -> Any:
    """See Strategy.gather."""
    _require_local("gather", plan, value)
    engine = plan.engine
    refuse = partial(_refuse_traced, "gather")
    parts = [engine.put(engine.trees.map(refuse, part), engine.devices[0]) for part in value.values]
    local_forms = [
        [
            [path, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
            for path, leaf in zip(
                engine.trees.paths(part), engine.trees.flatten(part)[0], strict=True
            )
        ]
        for part in parts
    ]
    # [path, dtype, shape] of each array, for every replica of the group.
    all_forms = [forms for row in gather_values(engine.processes, local_forms) for forms in row]
    for replica, forms in enumerate(all_forms):
        _require_like(all_forms[0], forms, replica, axis)
    sizes = [[shape[axis] for _, _, shape in forms] for forms in all_forms]
    if engine.processes.count > 1:
        parts = _exchanged(plan, parts, sizes, axis)
    columns = [iter(engine.trees.flatten(part)[0]) for part in parts]
    return engine.trees.map(
        lambda leaf: namespace(leaf).concatenate([next(column) for column in columns], axis),
        parts[0],
    )


def _exchanged(plan: Plan, parts: list[Any], sizes: list[list[int]], axis: int) -> list[Any]:
    """The values of all replicas. They travel with one shape, padded where theirs differ."""
    engine = plan.engine
    longest = [max(column) for column in zip(*sizes, strict=True)]

    def padded(value: Any) -> Any:
        lengths = iter(longest)

        def pad(leaf: Any) -> Any:
            missing, xp = next(lengths) - leaf.shape[axis], namespace(leaf)
            if not missing:
                return leaf
            shape = list(leaf.shape)
            shape[axis] = missing
            return xp.concatenate([leaf, xp.zeros(shape, leaf.dtype)], axis)

        return engine.trees.map(pad, value)

    def cut(value: Any, size: list[int]) -> Any:
        remaining = iter(size)
        return engine.trees.map(
            lambda leaf: leaf[(*[slice(None)] * (axis % leaf.ndim), slice(next(remaining)))], value
        )

    counts = tuple(ranges[-1][1] - ranges[0][0] for ranges in plan.parts)
    by_process = engine.exchange([padded(value) for value in parts], counts)
    values = [value for process_values in by_process for value in process_values]
    return [cut(value, size) for value, size in zip(values, sizes, strict=True)]


def _require_local(name: str, plan: Plan, value: Any) -> None:
    if not isinstance(value, PerReplica):
        raise TopologyError(
            f"{name}: expected a PerReplica, such as strategy.run returns, found {type(value).__name__}"
        )
    if value.replicas != plan.local_replicas:
        raise TopologyError(
            f"{name}: expected a PerReplica for the replicas {plan.local_replicas}, found one for "
            f"{value.replicas}: it was made by another strategy"
        )


def _refuse_traced(name: str, leaf: Any) -> Any:
    if is_traced(leaf):
        raise StateError(f"{name} takes values, found one that is traced: call it outside of jit")
    return leaf


def _require_like(first: list[Any], forms: list[Any], replica: int, axis: int) -> None:
    if [name for name, _, _ in first] != [name for name, _, _ in forms]:
        raise StateError(
            f"gather: logical replica {replica} gives another structure than replica 0: "
            f"{[name for name, _, _ in forms]} and {[name for name, _, _ in first]}"
        )
    for (name, dtype, shape), (_, other_dtype, other) in zip(first, forms, strict=True):
        where = f"{name or 'the value'} of logical replica {replica}"
        if not -len(other) <= axis < len(other):
            raise StateError(
                f"gather along axis {axis}: {where} has the shape {other}, which has no such axis"
            )
        position = axis % len(other)
        rest = other[:position], other[position + 1 :]
        expected = shape[:position], shape[position + 1 :]
        if dtype != other_dtype or rest != expected or len(other) != len(shape):
            raise StateError(
                f"gather along axis {axis}: {where} is {other_dtype}{other}, that of replica 0 is "
                f"{dtype}{shape}; they may differ along that axis only"
            )
