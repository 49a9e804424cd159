"""One dispatch for all local devices, where the compiler shows that it computes the same.

Owns the fast path of one process: a whole step as one program where a device has one replica, and
otherwise grad and update for all devices at once. Invariant: it is taken only when the optimized
instructions of grad, and those of update, are the ones of the programs for a single device, which
define the bits. What it adds to them moves bytes, or adds two elements.

In these programs every device has its own value under the same name: arrays are declared replicated
and are not, until the total is.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute.jax import hlo
from perdure.distribute.jax.group import bits, from_bits, packed_width
from perdure.distribute.jax.programs import (
    SETTINGS,
    one_form,
    plus,
    strong,
    without_weak_type,
)
from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge

FORMS_KEPT = 8
"""Shapes of shares and state whose programs are kept: the last batch of an epoch may be smaller."""

# (state, shares of all replicas, step) -> (state, logs); None where this path does not apply.
Step = Callable[[Any, Sequence[Any], int], tuple[Any, Any] | None]


def _is_strong(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not leaf.aval.weak_type
    return isinstance(leaf, np.ndarray | np.generic)


def _is_plain(leaf: Any) -> bool:
    """Whether it is NumPy's, of a dtype that JAX has."""
    return not isinstance(leaf, jax.Array) and jnp.result_type(leaf) == leaf.dtype


class Together:
    """A training step as programs over all local devices; None from a call until it is proven."""

    def __init__(
        self, grad: Any, add: Any, update: Any, everywhere: NamedSharding, replicas: int, seed: Any
    ) -> None:
        self._singles = (grad, add, update)
        mesh: Any = everywhere.mesh
        self._mesh = mesh
        self._devices: list[Any] = list(mesh.devices.flat)
        self._alone = SingleDeviceSharding(self._devices[0])
        self._sharding: Any = everywhere if len(self._devices) > 1 else self._alone
        self._replicas = replicas
        self._each = replicas // len(self._devices)
        self._steps: dict[Any, Callable[[Any, list[Any]], Any] | None] = {}
        # What the last step gave, by identity: looking at each array costs more than all else here.
        self._known: list[Any] = []
        # Only whole powers of two, so that each device ends with one partial sum, on one level. Several
        # replicas on the only device are what the reference does with as many dispatches.
        even = replicas % len(self._devices) == 0 and self._each & (self._each - 1) == 0
        # Of other platforms nothing was measured.
        cpu = self._devices[0].platform == "cpu"
        self.possible = cpu and even and (len(self._devices) > 1 or self._each == 1)
        self._seed = seed
        self._numbers: list[Any] = []

    def __call__(self, state: Any, shares: Sequence[Any], step: int) -> tuple[Any, Any] | None:
        config: Any = jax.config
        if config.jax_disable_jit:
            return None
        columns, forms = [], []
        for share in shares:
            flat, treedef = jax.tree.flatten(share)
            # A Python number or a weak type gives way in promotions; placed on devices it would not.
            if not all(map(_is_strong, flat)):
                return None
            columns.append(flat)
            forms.append((treedef, tuple((np.shape(x), jnp.result_type(x)) for x in flat)))
        if any(form != forms[0] for form in forms):
            return None
        leaves, treedef = jax.tree.flatten(state)
        if len(leaves) != len(self._known) or any(map(operator.is_not, leaves, self._known)):
            state = self._whole(state)
            leaves = jax.tree.leaves(state)
        form = (forms[0], treedef, tuple((x.shape, x.dtype) for x in leaves), _settings())
        turns = self._turns(columns, forms[0][0], step)
        if form not in self._steps:
            if len(self._steps) == FORMS_KEPT:
                del self._steps[next(iter(self._steps))]
            self._steps[form] = self._prove(state, turns[0])
        if (run := self._steps[form]) is None:
            # Asking costs something in every step; a smaller last batch of an epoch may yet differ.
            self.possible = any(self._steps.values())
            return None
        result = run(state, turns)
        self._known = jax.tree.leaves(result[0])
        return result

    def _whole(self, state: Any) -> Any:
        """The user's state, each leaf one array on all devices."""

        def spread(path: Any, leaf: Any) -> Any:
            if isinstance(leaf, jax.Array) and leaf.sharding == self._sharding:
                return leaf if not leaf.aval.weak_type else without_weak_type(leaf)
            return jax.device_put(strong(path, leaf), self._sharding)

        return jax.tree_util.tree_map_with_path(spread, state)

    def _turns(self, columns: Sequence[Any], treedef: Any, step: int) -> list[Any]:
        """(share, seed, step, replica's number) for each turn of the devices: values under one name."""
        count, each = len(self._devices), self._each
        if not self._numbers:
            words = [np.asarray(self._seed)] * count
            numbers = [[np.uint32(d * each + t) for d in range(count)] for t in range(each)]
            self._numbers = self._placed([words, *numbers])
        values = [
            [columns[d * each + turn][n] for d in range(count)]
            for turn in range(each)
            for n in range(len(columns[0]))
        ]
        *arrays, now = self._placed([*values, [np.uint32(step)] * count])
        seed, *numbers = self._numbers
        size = len(columns[0])
        return [
            (jax.tree.unflatten(treedef, arrays[t * size : (t + 1) * size]), seed, now, numbers[t])
            for t in range(each)
        ]

    def _placed(self, columns: list[list[Any]]) -> list[Any]:
        """One array of each column, which holds a value for every device."""
        if len(self._devices) == 1:
            values = [column[0] for column in columns]
            if all(map(_is_plain, values)):
                return values  # the call of a compiled program places them at a lower cost
            return jax.device_put(values, self._devices[0])
        placed = jax.device_put(columns, [list(self._devices)] * len(columns))
        return [
            jax.make_array_from_single_device_arrays(c[0].shape, self._sharding, c) for c in placed
        ]

    def _prove(self, state: Any, turn: Any) -> Callable[[Any, list[Any]], Any] | None:
        """How a step is run; None where a program is not what a single device would run."""
        grad, *_ = self._singles
        # Tracing raises what is wrong with the user's functions, as the reference would.
        contributions = jax.eval_shape(grad, state, *turn)
        results = jax.eval_shape(self._singles[2], state, contributions)
        # Of elements that share a byte (int4), a compiled program wants another layout than device_put
        # makes.
        if any(
            packed_width(x.dtype) for x in jax.tree.leaves((state, turn, contributions, results))
        ):
            return None
        for leaf in jax.tree.leaves(contributions):
            # XLA may keep a chain of narrow sums in a wider type; two at a time it cannot.
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize < 4:
                return None
            if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_):
                return None
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                return None
        with suppress(Exception):  # what XLA refuses on several devices, it may take on each
            return self._proven(state, turn, contributions)
        return None

    def _proven(
        self, state: Any, turn: Any, contributions: Any
    ) -> Callable[[Any, list[Any]], Any] | None:
        grad, _, update = self._singles
        singles = [
            _compiled(fn, self._alone, *values)
            for fn, values in ((grad, (state, *turn)), (update, (state, contributions)))
        ]
        if self._each == 1:
            whole = self._together(self._one_program, state, *turn)
            if hlo.is_grad_then_update(whole, *singles, between=len(self._devices) > 1):
                return lambda state, turns: whole(state, *turns[0])
        if len(self._devices) == 1:
            return None
        return self._in_pieces(singles, state, turn, contributions)

    def _one_program(self, state: Any, *turn: Any) -> tuple[Any, Any]:
        """A step of one replica on each device.

        The update stays a computation of its own, so that nothing is fused across its edge. Grad is
        not one: XLA's CPU compiler rewrites convolutions to their fast form only outside of calls.
        """
        grad, _, update = self._singles
        total = grad(state, *turn)
        if len(self._devices) > 1:
            total = _kept(self._total, total)
        else:
            # A constant among the contributions would be put into the called computation.
            total = jax.lax.optimization_barrier(total)
        return _kept(update, state, total)

    def _in_pieces(
        self, singles: list[Any], state: Any, turn: Any, contributions: Any
    ) -> Callable[[Any, list[Any]], Any] | None:
        single_grad, single_update = singles
        grad_fn, add_fn, update_fn = self._singles
        grad = self._together(grad_fn, state, *turn)
        if not hlo.same_program(single_grad, grad):
            return None
        update = self._together(update_fn, state, contributions)
        if not hlo.same_program(single_update, update):
            return None
        add = self._together(add_fn, contributions, contributions)
        total = self._together(self._total, contributions)

        def step(state: Any, turns: list[Any]) -> Any:
            stack = TreeSum(self._each, lambda left, right: add(left, right))
            for number, own in enumerate(turns):
                stack.push(TreeNode(0, number), grad(state, *own))
            ((_, root),) = stack.roots()
            return update(state, total(root))

        return step

    def _total(self, root: Any) -> Any:
        """Every device's root, added in the tree."""
        leaves, treedef = jax.tree.flatten(root)
        count = len(self._devices)
        # In whole subtrees two at a time: level by level, each pair's sum to both of it.
        pairs = count & (count - 1) == 0
        adds = [pairs and leaf.dtype != jnp.bool_ for leaf in leaves]
        paired = list(itertools.compress(leaves, adds))
        for distance in (1 << level for level in range((count - 1).bit_length())):
            groups = [[d, d + distance] for d in range(count) if not d & distance]
            paired = jax.lax.psum(paired, "device", axis_index_groups=groups) if paired else []
        sums = map(one_form, paired)
        return treedef.unflatten(
            next(sums) if added else self._gathered(leaf)
            for added, leaf in zip(adds, leaves, strict=True)
        )

    def _gathered(self, leaf: Any) -> Any:
        """The total of one array, of whose bytes every device gets those of all."""
        level = self._each.bit_length() - 1
        every = jax.lax.all_gather(bits(leaf), "device")
        nodes = [
            (TreeNode(level, d), from_bits(every[d], leaf.shape, leaf.dtype))
            for d in range(len(self._devices))
        ]
        ((_, total),) = merge(nodes, self._replicas, plus)
        return total

    def _together(self, fn: Any, *values: Any) -> Any:
        if len(self._devices) > 1:
            fn = jax.shard_map(fn, mesh=self._mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return _compiled(fn, self._sharding, *values)


def _settings() -> Any:
    """Every setting under which JAX would trace a function again."""
    private: Any = importlib.import_module("jax._src.config")
    if (context := getattr(private, "trace_context", None)) is not None:
        return context()
    config: Any = jax.config
    return tuple(getattr(config, f"jax_{name}") for name in SETTINGS)


def _compiled(fn: Any, sharding: Any, *values: Any) -> Any:
    """The program of `fn`, with every argument, used or not: its parameters are compared by number."""
    described = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), values
    )
    return jax.jit(lambda *args: fn(*args), keep_unused=True).lower(*described).compile()


def _kept(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of `args`, as a computation that XLA does not put in the place of its call."""

    def inner(*args: Any) -> Any:
        with set_xla_metadata(inlineable="true"):  # of what `fn` calls itself
            return fn(*args)

    with set_xla_metadata(inlineable="false"):
        return jax.jit(inner)(*args)
