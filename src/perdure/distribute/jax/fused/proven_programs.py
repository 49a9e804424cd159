"""Programs over all local devices, and the proof that they compute what single devices compute.

A step is one program where a device has one replica, and otherwise grad and update for all devices at
once. It is accepted only if the optimized instructions of grad, and those of update, are those of the
programs for a single device. Everything that it adds to them moves bytes, or adds two elements.

In these programs every device has its own value under the same name: arrays are declared replicated
and are not, until the total is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute.jax.fused import hlo
from perdure.distribute.jax.group import bits, from_bits, packed_width
from perdure.distribute.jax.programs import one_form, plus
from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge

# (share, seed, step, number of the replica)
Turn = tuple[Any, Any, Any, Any]

# (state, the turns of the devices) -> (state, logs)
Run = Callable[[Any, list[Turn]], tuple[Any, Any]]


class ReferencePrograms(NamedTuple):
    """The programs of a step for a single device, which define the bits."""

    grad: Any
    add: Any
    update: Any


class Layout:
    """The local devices, and how many replicas each of them has."""

    def __init__(self, everywhere: NamedSharding, replicas: int) -> None:
        self.mesh: Any = everywhere.mesh
        self.devices: list[Any] = list(self.mesh.devices.flat)
        self.first = SingleDeviceSharding(self.devices[0])
        self.sharding: Any = everywhere if len(self.devices) > 1 else self.first
        self.replicas = replicas
        self.per_device = replicas // len(self.devices)

    def compile(self, fn: Any, *values: Any) -> Any:
        """The program of `fn` for all devices at once."""
        if len(self.devices) > 1:
            fn = jax.shard_map(fn, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return _compiled(fn, self.sharding, *values)


def prove(programs: ReferencePrograms, layout: Layout, state: Any, turn: Turn) -> Run | None:
    """The step for arguments of this form; None if a program is not what a single device would run."""
    # Tracing raises for mistakes in the user's functions, as the reference would.
    contributions = jax.eval_shape(programs.grad, state, *turn)
    results = jax.eval_shape(programs.update, state, contributions)
    # If elements share a byte (int4), a compiled program wants another layout than device_put makes.
    if any(packed_width(x.dtype) for x in jax.tree.leaves((state, turn, contributions, results))):
        return None
    for leaf in jax.tree.leaves(contributions):
        # XLA may keep a chain of narrow sums in a wider type; two at a time it cannot.
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize < 4:
            return None
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_):
            return None
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return None
    with suppress(Exception):  # XLA may refuse on several devices what it takes on each of them
        grad = _compiled(programs.grad, layout.first, state, *turn)
        update = _compiled(programs.update, layout.first, state, contributions)
        if layout.per_device == 1:
            whole = _one_program(programs, layout, state, turn)
            if hlo.is_grad_then_update(whole, grad, update, between=len(layout.devices) > 1):
                return lambda state, turns: whole(state, *turns[0])
        if len(layout.devices) > 1:
            return _in_pieces(programs, layout, (grad, update), state, turn, contributions)
    return None


def _one_program(programs: ReferencePrograms, layout: Layout, state: Any, turn: Turn) -> Any:
    """A step of one replica on each device, compiled.

    The update stays a computation of its own, so that nothing is fused across its edge. Grad is not
    one: XLA's CPU compiler rewrites convolutions to their fast form only outside of calls.
    """

    def step(state: Any, *turn: Any) -> tuple[Any, Any]:
        total = programs.grad(state, *turn)
        if len(layout.devices) > 1:
            total = _kept(lambda root: _total(layout, root), total)
        else:
            # A constant among the contributions would be put into the called computation.
            total = jax.lax.optimization_barrier(total)
        return _kept(programs.update, state, total)

    return layout.compile(step, state, *turn)


def _in_pieces(
    programs: ReferencePrograms,
    layout: Layout,
    singles: tuple[Any, Any],
    state: Any,
    turn: Turn,
    contributions: Any,
) -> Run | None:
    """Grad, additions and update as programs over all devices."""
    single_grad, single_update = singles
    grad = layout.compile(programs.grad, state, *turn)
    if not hlo.same_program(single_grad, grad):
        return None
    update = layout.compile(programs.update, state, contributions)
    if not hlo.same_program(single_update, update):
        return None
    add = layout.compile(programs.add, contributions, contributions)
    total = layout.compile(lambda root: _total(layout, root), contributions)

    def step(state: Any, turns: list[Turn]) -> Any:
        stack = TreeSum(layout.per_device, lambda left, right: add(left, right))
        for number, turn in enumerate(turns):
            stack.push(TreeNode(0, number), grad(state, *turn))
        ((_, root),) = stack.roots()
        return update(state, total(root))

    return step


def _total(layout: Layout, root: Any) -> Any:
    """Every device's root, added in the tree."""
    leaves, treedef = jax.tree.flatten(root)
    count = len(layout.devices)
    # In whole subtrees two at a time: level by level, each pair's sum to both of it.
    pairs = count & (count - 1) == 0
    adds = [pairs and leaf.dtype != jnp.bool_ for leaf in leaves]
    paired = list(itertools.compress(leaves, adds))
    for distance in (1 << level for level in range((count - 1).bit_length())):
        groups = [[d, d + distance] for d in range(count) if not d & distance]
        paired = jax.lax.psum(paired, "device", axis_index_groups=groups) if paired else []
    sums = map(one_form, paired)
    return treedef.unflatten(
        next(sums) if added else _gathered(layout, leaf)
        for added, leaf in zip(adds, leaves, strict=True)
    )


def _gathered(layout: Layout, leaf: Any) -> Any:
    """The total of one array, whose bytes every device gets from all others."""
    level = layout.per_device.bit_length() - 1
    rows = jax.lax.all_gather(bits(leaf), "device")
    nodes = [
        (TreeNode(level, d), from_bits(rows[d], leaf.shape, leaf.dtype))
        for d in range(len(layout.devices))
    ]
    ((_, total),) = merge(nodes, layout.replicas, plus)
    return total


def _compiled(fn: Any, sharding: Any, *values: Any) -> Any:
    """The program of `fn`, with every argument, used or not: its parameters are compared by number."""
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), values
    )
    return jax.jit(lambda *args: fn(*args), keep_unused=True).lower(*described).compile()


def _kept(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of `args`, as a computation that XLA does not put in the place of its call."""

    def inner(*args: Any) -> Any:
        with set_xla_metadata(inlineable="true"):  # for the functions that `fn` calls
            return fn(*args)

    with set_xla_metadata(inlineable="false"):
        return jax.jit(inner)(*args)
