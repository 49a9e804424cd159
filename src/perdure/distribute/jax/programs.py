"""The three compiled computations of a step: grad, add and update, separate for a single device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from perdure.distribute.engine import Grad, Update
from perdure.errors import StateError
from perdure.text import few

# Settings that each thread may have for itself, through the context managers of these names.
SETTINGS = (
    "enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "disable_jit", "debug_nans",
    "default_prng_impl", "threefry_partitionable", "enable_custom_prng", "softmax_custom_jvp",
    "numpy_rank_promotion", "debug_infs",
)  # fmt: skip


def thread_settings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Remembers JAX's settings of this thread; the result applies them in another thread."""
    config: Any = jax.config
    values = {name: getattr(config, f"jax_{name}") for name in SETTINGS}

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                # A new thread has the global settings, which most often are these.
                if getattr(config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            yield

    return enter


# `rbg` keys give other bits on other topologies; threefry does not.
_PRNG = "threefry2x32"


@functools.lru_cache(maxsize=64)
def grad_program(fn: Grad) -> Callable[..., Any]:
    """`fn` with its key. Cached, so that all strategies over one function share its executables."""

    @jax.jit
    def grad(state: Any, share: Any, seed: Any, step: Any, replica: Any) -> Any:
        try:
            contributions = fn(state, share, make_key(seed, step, replica))
        except NameError as error:  # raised by JAX for psum and pmean outside of its own pmap
            if "axis name" not in str(error):
                raise
            raise StateError(
                f"{_called(fn)} adds up over the devices itself ({error}): psum, pmean or "
                "BatchNorm(axis_name=...). The order of such a sum depends on the devices, and the "
                "bits would change with the topology. Leave the axis out: statistics are then those "
                "of each logical replica, and contributions are summed after grad"
            ) from error
        except ValueError as error:
            refuse_mesh(fn, error)
            raise
        if not jax.tree.leaves(contributions):
            raise StateError(f"{_called(fn)} returned no contributions: expected a tree of arrays")
        contributions = _arrays(fn, contributions)
        _refuse_keys(contributions)
        return contributions

    return grad


@functools.lru_cache(maxsize=64)
def update_program(fn: Update) -> Callable[..., Any]:
    @jax.jit
    def update(state: Any, total: Any) -> tuple[Any, Any]:
        result = fn(state, total)
        if not isinstance(result, tuple) or len(result) != 2:
            raise StateError(
                f"{_called(fn)}: expected (state, logs) as its result, found {type(result).__name__}"
            )
        new, logs = _arrays(fn, result[0]), _arrays(fn, result[1])
        _same_form(fn, state, new)
        return new, logs

    return update


@jax.jit
def add_program(left: Any, right: Any) -> Any:
    _refuse_keys(left)
    return jax.tree.map(plus, left, right)


def _arrays(fn: Callable[..., Any], values: Any) -> Any:
    """What a function returned with arrays in place of numbers."""

    def array(path: Any, leaf: Any) -> Any:
        try:
            return jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"{_called(fn)}: {name_of(path)}: expected arrays and numbers in what it returns, "
                f"found {type(leaf).__name__}. Keep other values outside of the step"
            ) from error

    return jax.tree_util.tree_map_with_path(array, values)


def _refuse_keys(values: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(values):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended):
            raise StateError(
                f"{name_of(path)}: values of the replicas are added, and random keys "
                f"({leaf.dtype}) have no sum. Keep keys in the state, or derive them from the key that "
                "grad gets"
            )


def plus(left: Any, right: Any) -> Any:
    """left + right, in a form that XLA's own sums can be given too."""
    return one_form(jnp.add(left, right))


def one_form(total: Any) -> Any:
    """The sum with positive zeros, as in a sum that begins with zero, and with one bit pattern for NaN:
    which of two NaNs remains depends on the program that adds them."""
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    total = jnp.where(total == 0, jnp.zeros_like(total), total)
    return jnp.where(jnp.isnan(total), jnp.full_like(total, jnp.nan), total)


def make_key(seed: Any, step: Any, replica: Any) -> Any:
    key = jax.random.wrap_key_data(jnp.asarray(seed), impl=_PRNG)
    return jax.random.fold_in(jax.random.fold_in(key, step), replica)


def words(seed: int) -> Any:
    # As jax.random.key(seed, impl="threefry2x32"), which drops the high word without x64.
    return np.array([seed >> 32, seed & 0xFFFFFFFF], dtype=np.uint32)


def type_of(leaf: Any) -> tuple[Any, Any, bool]:
    """Shape, dtype, and whether the dtype gives way in promotions: what JAX compiles a program for."""
    return leaf.shape, leaf.dtype, bool(getattr(leaf, "weak_type", False))


def as_array(path: Any, leaf: Any) -> Any:
    """A leaf of the user's state as an array; a Python number becomes a weakly typed one, as in jit."""
    if isinstance(leaf, jax.core.Tracer):
        raise traced(path)
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_replicated:
            raise StateError(
                f"{name_of(path)}: {leaf.dtype}{list(leaf.shape)} is sharded ({leaf.sharding}). "
                "Strategies are data-parallel: every device holds the whole state, so the parts would "
                "be copied to all of them. Give a replicated array, or train a model that is sharded "
                "by its parameters with your own jit and perdure.CheckpointManager"
            )
        return leaf
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError):
        array = None
    if type(leaf) is int or (array is not None and array.dtype in (np.int64, np.uint64)):
        _require_fits(path, leaf, array)
    if array is None or array.dtype.kind in "OSUMm":
        raise StateError(
            f"{name_of(path)}: every leaf of a state must be an array or a number, found "
            f"{type(leaf).__name__}; keep other values outside (eqx.partition), or as static fields"
        )
    return jnp.asarray(leaf) if type(leaf) in (int, float, complex) else array


def traced(path: Any) -> StateError:
    """The error for a step that is called while JAX traces another function."""
    return StateError(
        f"{name_of(path)}: expected an array, found a value that JAX traces: a step of a strategy was "
        "called inside jit, grad, vmap or scan. It compiles its own programs. Call it from a loop in "
        "Python, or train_step.many(state, batches); to change the result too, use `update`"
    )


def refuse_mesh(fn: Any, error: ValueError) -> None:
    """StateError if the error of JAX means that a function does not run on one device."""
    if not any(mark in str(error) for mark in ("incompatible devices", "passed to shard_map")):
        return
    raise StateError(
        f"{_called(fn)} runs on one device for each logical replica, and uses several: a shard_map, a "
        "sharding constraint or an array over a mesh. Leave the mesh out of it: the strategy spreads "
        "the replicas over the devices. Train a model that is sharded itself with your own jit and "
        f"perdure.CheckpointManager. JAX says: {str(error).splitlines()[0]}"
    ) from error


def _require_fits(path: Any, leaf: Any, array: Any) -> None:
    """StateError for integers that JAX would cut to 32 bits."""
    if array is not None and array.dtype.kind in "iu":
        narrow = jax.dtypes.canonicalize_dtype(array.dtype)
        if np.array_equal(array.astype(narrow), array):
            return
    value = f"the number {leaf}" if np.ndim(leaf) == 0 else "a number in this array"
    raise StateError(
        f"{name_of(path)}: {value} does not fit into the widest integers of JAX with its present "
        f"settings. Set jax_enable_x64, or keep it outside of the state of the strategy"
    )


def _same_form(fn: Update, old: Any, new: Any) -> None:
    """StateError if the form changes: the step would compile again, and a restore would not fit."""

    def form(tree: Any) -> dict[str, str]:
        return {
            name_of(path): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    before, after = form(old), form(new)
    if jax.tree.structure(old) == jax.tree.structure(new) and before == after:
        return
    paths = sorted(p for p in before.keys() | after.keys() if before.get(p) != after.get(p))
    differ = [f"{p}: {before.get(p, 'nothing')} became {after.get(p, 'nothing')}" for p in paths]
    raise StateError(
        f"{_called(fn)} must return a state of the form that it got: "
        + (few(differ, separator="; ") or "the containers differ")
        + _widened(old, {after[path].partition("[")[0] for path in paths if path in after})
    )


def _widened(old: Any, kinds: set[str]) -> str:
    """What may have made leaves wider: scalars of the state with their new dtypes."""
    scalars = [
        f"{name_of(path)} ({leaf.dtype})"
        for path, leaf in jax.tree_util.tree_leaves_with_path(old)
        if str(leaf.dtype) in kinds and leaf.ndim == 0 and not leaf.weak_type
    ]
    if not scalars:
        return ""
    return (
        f". An expression has the widest of its dtypes, and the state has {few(scalars)}: keep such "
        "a number as a Python number, which takes the other dtype, or cast it where it is used, "
        "such as lr.astype(w.dtype)"
    )


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the state"


def _called(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))
