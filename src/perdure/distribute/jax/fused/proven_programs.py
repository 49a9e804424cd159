"""Programs over all local devices, and the proof that they compute what single devices compute.

A step is one program if a device has one replica, or several small ones; otherwise grad, additions
and update are programs for all devices, and the replicas of a device take turns. Either is accepted
only if its optimized instructions are those for a single device. Arrays are declared replicated and
are not, until the total is.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from perdure.distribute.jax.fused import hlo
from perdure.distribute.jax.group import bits, from_bits, packed_width
from perdure.distribute.jax.programs import name_of, one_form, plus, thread_settings, type_of
from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge
from perdure.runtime.environment import xla_flags
from perdure.state.jax_state import weaken

UNROLLED_BYTES = 16 << 20
"""One program holds the contributions of all replicas of a device at once: up to so much of them."""
UNROLLED_INSTRUCTIONS = 2000
"""The compiler takes as long for each replica: up to so many instructions of grad in all."""
_THREADS = 4

T = TypeVar("T")

# (share, seed, step, number of the replica)
Turn = tuple[Any, Any, Any, Any]

# (state, the turns of the devices) -> (state, logs)
Run = Callable[[Any, list[Turn]], tuple[Any, Any]]


class Proof(NamedTuple):
    """The programs for arguments of one form, if they may be used, and why in one sentence.

    `after`: the types of the leaves of the new state. A weak type may become a strong one.
    """

    run: Run | None
    why: str
    after: Any = None


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

    def sum(self, values: Iterable[T], add: Callable[[T, T], T]) -> T:
        """The contributions of a device, added in the tree."""
        stack = TreeSum(self.per_device, add)
        for number, value in enumerate(values):
            stack.push(TreeNode(0, number), value)
        ((_, root),) = stack.roots()
        return root


class Compiler:
    """Lowers the programs of a proof, and compiles them beside each other: XLA releases the GIL."""

    def __init__(self, layout: Layout, pool: ThreadPoolExecutor) -> None:
        self.layout = layout
        self.pool = pool

    def single(self, fn: Any, *values: Any, donate: bool = False) -> _Lowered:
        """The program of `fn` for the first device; `donate` gives its first argument away."""
        return _Lowered(self, fn, self.layout.first, values, donate)

    def everywhere(self, fn: Any, *values: Any, donate: bool = False) -> _Lowered:
        """The program of `fn` for all devices at once."""
        layout, options = self.layout, None
        if len(layout.devices) > 1:
            fn = jax.shard_map(fn, mesh=layout.mesh, in_specs=P(), out_specs=P(), check_vma=False)
            options = _options()
        return _Lowered(self, fn, layout.sharding, values, donate, options)


class _Lowered:
    """A program with every argument, used or not: its parameters are compared by number."""

    def __init__(
        self,
        compiler: Compiler,
        fn: Any,
        sharding: Any,
        values: tuple[Any, ...],
        donate: bool,
        options: dict[str, str] | None = None,
    ) -> None:
        described = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                *type_of(x)[:2], sharding=sharding, weak_type=type_of(x)[2]
            ),
            values,
        )
        self._program = jax.jit(
            lambda *args: fn(*args),
            keep_unused=True,
            donate_argnums=(0,) if donate else (),
            compiler_options=options,
        )
        self._compiler = compiler
        self._lowered = self._program.lower(*described)
        self._packed = holds_packed(values)

    def start(self, *, runs: bool = True) -> Future[Any]:
        """Compile it in another thread. A program that only is compared takes less time."""
        on_cpu = self._compiler.layout.devices[0].platform == "cpu"
        options = _NEVER_RUNS if on_cpu and not runs else None

        settings = thread_settings()

        def compiled() -> Any:
            with settings():
                program = self._lowered.compile(compiler_options=options)
            return _Packed(program, self._program) if self._packed else program

        return self._compiler.pool.submit(compiled)


class _Values(NamedTuple):
    """What the programs take and return, or its form."""

    state: Any
    turn: Turn
    contributions: Any
    results: Any


def prove(
    programs: ReferencePrograms, layout: Layout, state: Any, turn: Turn, donate: bool
) -> Proof:
    """The step for arguments of this form, if its programs are what a single device would run."""
    # Tracing raises for mistakes in the user's functions, as the reference would.
    contributions = jax.eval_shape(programs.grad, state, *turn)
    results = jax.eval_shape(programs.update, state, contributions)
    if why := _unsuitable(layout, contributions):
        return Proof(None, why)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            values = _Values(state, turn, contributions, results)
            proof = _proof(programs, Compiler(layout, pool), values, donate)
            return proof._replace(after=tuple(map(type_of, jax.tree.leaves(results[0]))))
    except Exception as error:  # noqa: BLE001  XLA may refuse for several devices what it takes for one
        return Proof(None, f"XLA does not compile it ({str(error).partition(chr(10))[0]})")
    finally:
        _give_memory_back()


def _give_memory_back() -> None:
    """Have glibc return what compilation has freed: else a process stays 80 to 120 MB larger."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _proof(programs: ReferencePrograms, compiler: Compiler, values: _Values, donate: bool) -> Proof:
    layout, (state, turn, contributions, results) = compiler.layout, values
    alone, several = len(layout.devices) == 1, layout.per_device > 1
    # On one device grad, add and update themselves run if its replicas take turns.
    grad = compiler.single(programs.grad, state, *turn).start(runs=alone and several)
    # The left one is a result of grad or of an addition, and is not used again.
    add = (
        compiler.single(programs.add, contributions, contributions, donate=True)
        if several
        else None
    )
    update = compiler.single(programs.update, state, contributions)

    def references(*, runs: bool) -> Callable[[], hlo.SinglePrograms]:
        adding = add and add.start(runs=runs)
        updating = update.start(runs=runs and not donate)
        return lambda: hlo.SinglePrograms(
            grad.result(),
            adding and adding.result(),
            updating.result(),
            paths_of("contribution", contributions),
            paths_of("new state", results[0]) + paths_of("logs", results[1]),
        )

    single = None
    if not alone:
        single = references(runs=False)
        if why := _called_back(single()):
            return Proof(None, why)
    proof = Proof(None, "")
    turns = layout.per_device
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(contributions))
    if not several or size * turns <= UNROLLED_BYTES:
        one_program = _one_program(programs, compiler, values, donate)  # while grad is compiled
        if not several or hlo.instructions(grad.result()) * turns <= UNROLLED_INSTRUCTIONS:
            proof = one_program(single or references(runs=False))
    if proof.run is None and layout.replicas > 1:
        if single is None:
            single = references(runs=True)
        proof = _in_pieces(programs, compiler, single, values, donate)
    return proof


def _unsuitable(layout: Layout, contributions: Any) -> str:
    """Why contributions of these types are not added between devices by one program."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(contributions):
        what = f"the contribution {name_of(path)} is {leaf.dtype}, "
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_):
            return what + "which is no number"
        if len(layout.devices) == 1:
            continue
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype.itemsize < 4:
            return what + "and XLA may keep a chain of narrow sums in a wider type"
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            return what + "which XLA does not add between devices two at a time"
    return ""


def _called_back(single: hlo.SinglePrograms) -> str:
    """Why the programs of a step are not compiled for several devices, which could end the process."""
    for name, program in (("grad", single.grad), ("update", single.update)):
        if hlo.calls_python(program):
            return (
                f"{name} calls Python for a value or in order (pure_callback, io_callback), which XLA "
                "supports on one device only"
            )
    return ""


def _one_program(
    programs: ReferencePrograms, compiler: Compiler, values: _Values, donate: bool
) -> Callable[[Callable[[], hlo.SinglePrograms]], Proof]:
    """A whole step as one program: lowered, and compiled by the function that compares it.

    The sums and the update stay computations of their own, so that nothing is fused across them.
    Grad is not one: XLA's CPU compiler finds the fast form of convolutions only outside of calls.
    """
    layout, state, turn = compiler.layout, values.state, values.turn
    turns, exchanges = layout.per_device, len(layout.devices) > 1

    def step(state: Any, *arguments: Any) -> tuple[Any, Any]:
        size = len(turn)
        roots = [
            programs.grad(state, *arguments[start : start + size])
            for start in range(0, turns * size, size)
        ]
        # A constant among the contributions would be put into the called computations.
        total, *others = jax.lax.optimization_barrier(roots)
        if others:
            total = _kept(lambda *roots: layout.sum(roots, programs.add), total, *others)
        if exchanges:
            total = _kept(lambda root: _total(layout, root), total)
        return _kept(programs.update, state, total)

    lowered = compiler.everywhere(step, state, *turn * turns, donate=donate)

    def proof(single: Callable[[], hlo.SinglePrograms]) -> Proof:
        compiled = lowered.start()
        references, whole = single(), compiled.result()
        if why := hlo.step_difference(whole, references, turns, exchanges, layout.sum):
            return Proof(None, why)
        each = "" if turns == 1 else f" for the {turns} replicas of a device"
        return Proof(
            lambda state, turns: whole(state, *itertools.chain(*turns)),
            f"one program computes grad{each}, the sums and update"
            + (f" on {len(layout.devices)} devices" if exchanges else ""),
        )

    return proof


def _in_pieces(
    programs: ReferencePrograms,
    compiler: Compiler,
    single: Callable[[], hlo.SinglePrograms],
    values: _Values,
    donate: bool,
) -> Proof:
    """Grad, additions and update as programs over all devices."""
    layout, (state, turn, contributions, _) = compiler.layout, values
    count = len(layout.devices)
    grads = adds = totals = updates = None
    if count > 1:
        both = contributions, contributions
        grads = compiler.everywhere(programs.grad, state, *turn).start()
        adds = compiler.everywhere(programs.add, *both, donate=True).start()
        totals = compiler.everywhere(lambda root: _total(layout, root), contributions).start()
    if count > 1 or donate:
        updates = compiler.everywhere(programs.update, state, contributions, donate=donate).start()
    references = single()
    grad, add, update = references.grad, references.add, references.update
    if grads is not None:
        grad = grads.result()
        if path := hlo.difference(references.grad, grad, references.contributions):
            return Proof(None, f"XLA computes {path} of grad in another way for {count} devices")
    if updates is not None:
        update = updates.result()
        if path := hlo.difference(references.update, update, references.results):
            return Proof(None, f"XLA computes {path} of update in another way for {count} devices")
    add = adds.result() if adds is not None else add
    total = totals.result() if totals is not None else None

    def step(state: Any, turns: list[Turn]) -> Any:
        # One at a time, so that few partial sums are alive at once.
        root = layout.sum((grad(state, *turn) for turn in turns), add)
        return update(state, root if total is None else total(root))

    where = f"on {count} devices at once" if count > 1 else "on the device"
    return Proof(
        step, f"grad, the sums and update are programs {where}, and its replicas take turns"
    )


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
    totals = [
        next(sums) if added else _gathered(layout, leaf)
        for added, leaf in zip(adds, leaves, strict=True)
    ]
    return treedef.unflatten(
        weaken(total) if leaf.weak_type else total
        for total, leaf in zip(totals, leaves, strict=True)
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


def paths_of(what: str, tree: Any) -> list[str]:
    """The names of the leaves, in their order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{what} {name_of(path)}" if path else what for path, _ in leaves]


class _Packed(NamedTuple):
    """A program with arguments whose elements share a byte (int4), called by its function."""

    compiled: Any
    program: Any

    def __call__(self, *args: Any) -> Any:
        return self.program(*args)

    def runtime_executable(self) -> Any:
        return self.compiled.runtime_executable()


def holds_packed(values: Any) -> bool:
    """Whether several elements of an array share a byte."""
    return any(packed_width(x.dtype) is not None for x in jax.tree.leaves(values))


# LLVM's effort. XLA's own passes, which make the instructions that are compared, do not look at it.
_NEVER_RUNS: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


def _options() -> dict[str, str]:
    """The options of the compiler for programs over several devices."""
    # The partitioner for several devices cleans up before it divides a program, and merges equal
    # values before the simplifier counts the users of each, which for one device comes first: of the
    # two divisions by one sum in a softmax, one then becomes a product.
    disabled = xla_flags(os.environ).get("--xla_disable_hlo_passes", "")
    return {"xla_disable_hlo_passes": ",".join(filter(None, (disabled, "spmd-cleanup")))}


def _kept(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of `args`, as a computation that XLA does not put in the place of its call."""

    def inner(*args: Any) -> Any:
        with set_xla_metadata(inlineable="true"):  # for the functions that `fn` calls
            return fn(*args)

    with set_xla_metadata(inlineable="false"):
        return jax.jit(inner)(*args)
