"""One dispatch for all local devices, where the compiler shows that it computes the same.

Owns the fast path of several devices in one process. Invariant: it is taken only when the optimized
program of grad, and that of update, is for all devices together instruction for instruction the one
for a single device, which defines the bits. What it adds to them moves bytes, or adds two elements.

In these programs every device has its own value under the same name: arrays are declared replicated
and are not, until the total is.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute.jax.group import bits, from_bits
from perdure.distribute.jax.programs import SETTINGS
from perdure.distribute.tree import Node, ShiftReduce, merge

# (state, shares of all replicas, step) -> (state, logs); None where this path does not apply.
Step = Callable[[Any, Sequence[Any], int], tuple[Any, Any] | None]


def _is_strong(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not leaf.aval.weak_type
    return isinstance(leaf, np.ndarray | np.generic)


class Together:
    """A training step as programs over all local devices; None from a call until it is proven."""

    def __init__(
        self, grad: Any, add: Any, update: Any, everywhere: NamedSharding, replicas: int, seed: Any
    ) -> None:
        self._singles = (grad, add, update)
        self._everywhere = everywhere
        mesh: Any = everywhere.mesh
        self._devices: list[Any] = list(mesh.devices.flat)
        self._replicas = replicas
        self._seed = seed
        self._each = replicas // len(self._devices)
        self._programs: tuple[Any, Any, Any, Any] | None = None
        self._form: Any = None
        # Only whole powers of two, so that each device ends with one partial sum, on one level.
        even = replicas % len(self._devices) == 0 and self._each & (self._each - 1) == 0
        # Of other platforms nothing was measured.
        cpu = self._devices[0].platform == "cpu"
        self.possible = len(self._devices) > 1 and even and cpu

    def __call__(self, state: Any, shares: Sequence[Any], step: int) -> tuple[Any, Any] | None:
        """`state` is placed on all devices as one array per leaf."""
        leaves, forms = [], []
        for share in shares:
            flat, treedef = jax.tree.flatten(share)
            # A Python number or a weak type gives way in promotions; placed on devices it would not.
            if not all(map(_is_strong, flat)):
                return None
            leaves.append(flat)
            forms.append((treedef, [(np.shape(x), jnp.result_type(x)) for x in flat]))
        if any(form != forms[0] for form in forms):
            return None
        settings = [getattr(jax.config, f"jax_{name}") for name in SETTINGS]
        avals = [x.aval for x in jax.tree.leaves(state)]
        form = (forms[0], jax.tree.structure(state), avals, settings)
        turns = [self._turn(leaves, forms[0][0], turn) for turn in range(self._each)]
        if form != self._form:
            self._programs = self._prove(state, *turns[0], step)
            self._form = form
        if self._programs is None:
            self.possible = False
            return None
        grad, add, total, update = self._programs
        stack = ShiftReduce(self._each, lambda left, right: add(left, right))
        words = (self._seed, np.uint32(step))
        for turn, (share, replica) in enumerate(turns):
            stack.push(Node(0, turn), grad(state, share, *words, replica))
        ((_, root),) = stack.roots()
        return update(state, total(root))

    def _turn(self, leaves: Sequence[Any], treedef: Any, turn: int) -> tuple[Any, Any]:
        """(the share, the replica's number) on each device: values under one name."""
        numbers = [d * self._each + turn for d in range(len(self._devices))]
        columns = list(zip(*(leaves[n] for n in numbers), strict=True))
        columns.append(tuple(np.uint32(n) for n in numbers))
        placed = jax.device_put(columns, [tuple(self._devices)] * len(columns))
        arrays = [
            jax.make_array_from_single_device_arrays(c[0].shape, self._everywhere, list(c))
            for c in placed
        ]
        return jax.tree.unflatten(treedef, arrays[:-1]), arrays[-1]

    def _prove(self, state: Any, share: Any, replica: Any, step: int) -> Any:
        """The programs; None where one is not what a single device would run."""
        grad, add, update = self._singles
        arguments = (state, share, self._seed, np.uint32(step), replica)
        # Tracing raises what is wrong with the user's functions, as the reference would.
        contributions = jax.eval_shape(grad, *arguments)
        for leaf in jax.tree.leaves(contributions):
            # XLA may keep a chain of narrow sums in a wider type; two at a time it cannot.
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize < 4:
                return None
            if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_):
                return None
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                return None
        programs = []
        for single, values in ((grad, arguments), (update, (state, contributions))):
            together = self._compile(single, *values)
            if not same_program(self._alone(single, *values), together):
                return None
            programs.append(together)
        sums = self._compile(add, contributions, contributions)
        total = self._compile(self._total, contributions)
        return programs[0], sums, total, programs[1]

    def _total(self, root: Any) -> Any:
        """Every device's root, by their bytes, added in the tree."""
        count = len(self._devices)
        level = self._each.bit_length() - 1

        def gathered(leaf: Any) -> list[Any]:
            every = jax.lax.all_gather(bits(leaf), "device")
            return [from_bits(every[d], leaf.shape, leaf.dtype) for d in range(count)]

        every = jax.tree.map(gathered, root)
        parts = [
            jax.tree.map(lambda x, d=d: x[d], every, is_leaf=lambda x: isinstance(x, list))
            for d in range(count)
        ]
        nodes = [(Node(level, d), part) for d, part in enumerate(parts)]
        ((_, total),) = merge(nodes, self._replicas, functools.partial(jax.tree.map, jnp.add))
        return total

    def _compile(self, fn: Any, *values: Any) -> Any:
        mapped = jax.shard_map(
            fn, mesh=self._everywhere.mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        lowered = jax.jit(mapped).lower(*_described(values, self._everywhere))
        return lowered.compile()

    def _alone(self, fn: Any, *values: Any) -> Any:
        single = jax.sharding.SingleDeviceSharding(self._devices[0])
        return fn.lower(*_described(values, single)).compile()


def _described(values: Any, sharding: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), values
    )


def same_program(one: Any, other: Any) -> bool:
    """Whether two compiled programs make their results by the same instructions of the same values."""
    return _digest(one.as_text()) == _digest(other.as_text())


# What of an instruction's text is no part of what it computes: its origin, and shardings, which have
# been carried out when the program is optimized.
_ASIDE = re.compile(
    r', (?:metadata|sharding|frontend_attributes)=\{(?:"[^"]*"|[^{}"]|\{[^{}]*\})*\}'
)
_NAME = re.compile(r"%[\w.\-]+")


def _digest(text: str) -> str:
    """Of an optimized module: of its result, with what it is made of in place of all names.

    The module's header is left out, which says its name and for how many devices it is. What the entry
    calls is one kernel, whose instructions count in their order; the entry's own instructions are
    kernels, of which only the operands count.
    """
    known: dict[str, str] = {}
    for block in re.split(r"^\}$", text, flags=re.MULTILINE):
        if not (head := re.search(r"^(ENTRY )?(%[\w.\-]+) .*$", block, flags=re.MULTILINE)):
            continue
        lines = _ASIDE.sub("", block[head.end() :]).strip().split("\n")
        if head[1]:
            return _result(lines, known)
        names: dict[str, str] = {}

        def canonical(name: re.Match[str], names: dict[str, str] = names) -> str:
            return known.get(name[0]) or names.setdefault(name[0], f"%{len(names)}")

        known[head[2]] = _hash(_NAME.sub(canonical, "\n".join(lines)))
    raise ValueError("a compiled program shows no entry computation")


def _result(lines: list[str], known: dict[str, str]) -> str:
    """Of an entry computation, whose instructions come after their operands."""
    made, result = dict(known), ""
    for line in lines:
        name, _, text = line.strip().removeprefix("ROOT ").partition(" = ")
        made[name] = _hash(_NAME.sub(lambda operand: made[operand[0]], text))
        if line.lstrip().startswith("ROOT "):
            result = made[name]
    return result


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
