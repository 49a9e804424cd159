"""`fused_step`: places the arguments of a step and runs the programs that were proven for them."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from perdure.distribute.engine import FusedStep
from perdure.distribute.jax.fused.proven_programs import Layout, ReferencePrograms, Run, Turn, prove
from perdure.distribute.jax.programs import SETTINGS, strong, without_weak_type

FORMS_KEPT = 8
"""Shapes of shares and state whose programs are kept: the last batch of an epoch may be smaller."""


def fused_step(
    programs: ReferencePrograms, everywhere: NamedSharding, replicas: int, seed: Any
) -> FusedStep | None:
    """A step as programs over all local devices of one process, or None where there is none.

    At the first call with shares and a state of a form (structure, shapes, dtypes, JAX's settings), the
    programs are compiled and compared with those for a single device, which define the bits. The
    decision is kept with the form. Without an equal program the calls with that form return None.

    Args:
        programs: grad, add and update for a single device.
        everywhere: The sharding of an array that every local device holds whole.
        replicas: The number of logical replicas.
        seed: The two words of the seed.
    """
    layout = Layout(everywhere, replicas)
    count, per_device = len(layout.devices), layout.per_device
    # Only whole powers of two, so that each device ends with one partial sum, on one level. Several
    # replicas on the only device take as many dispatches as in the reference.
    even = replicas % count == 0 and per_device & (per_device - 1) == 0
    # Not measured on other platforms.
    on_cpu = layout.devices[0].platform == "cpu"
    if not on_cpu or not even or (count == 1 and per_device > 1):
        return None
    return _StepByForm(programs, layout, seed)


class _StepByForm:
    """See `fused_step`."""

    def __init__(self, programs: ReferencePrograms, layout: Layout, seed: Any) -> None:
        self._programs = programs
        self._layout = layout
        self._runs: dict[Any, Run | None] = {}
        self._refused = False
        # Leaves of the last result, by identity: looking at each array costs more than all else here.
        self._known: list[Any] = []
        self._seed = seed
        self._numbers: list[Any] = []

    def __call__(self, state: Any, shares: Sequence[Any], step: int) -> tuple[Any, Any] | None:
        config: Any = jax.config
        if self._refused or config.jax_disable_jit:
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
        if form not in self._runs:
            if len(self._runs) == FORMS_KEPT:
                del self._runs[next(iter(self._runs))]
            self._runs[form] = prove(self._programs, self._layout, state, turns[0])
        if (run := self._runs[form]) is None:
            # Asking costs something in every step; a smaller last batch of an epoch may yet differ.
            self._refused = not any(self._runs.values())
            return None
        result = run(state, turns)
        self._known = jax.tree.leaves(result[0])
        return result

    def _whole(self, state: Any) -> Any:
        """The user's state, each leaf one array on all devices."""
        sharding = self._layout.sharding

        def spread(path: Any, leaf: Any) -> Any:
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                return leaf if not leaf.aval.weak_type else without_weak_type(leaf)
            return jax.device_put(strong(path, leaf), sharding)

        return jax.tree_util.tree_map_with_path(spread, state)

    def _turns(self, columns: Sequence[Any], treedef: Any, step: int) -> list[Turn]:
        """The arguments of grad for each turn of the devices: different values under one name."""
        count, per_device = len(self._layout.devices), self._layout.per_device
        if not self._numbers:
            words = [np.asarray(self._seed)] * count
            numbers = [
                [np.uint32(d * per_device + turn) for d in range(count)]
                for turn in range(per_device)
            ]
            self._numbers = self._placed([words, *numbers])
        values = [
            [columns[d * per_device + turn][n] for d in range(count)]
            for turn in range(per_device)
            for n in range(len(columns[0]))
        ]
        *arrays, now = self._placed([*values, [np.uint32(step)] * count])
        seed, *numbers = self._numbers
        size = len(columns[0])
        return [
            (jax.tree.unflatten(treedef, arrays[t * size : (t + 1) * size]), seed, now, numbers[t])
            for t in range(per_device)
        ]

    def _placed(self, columns: list[list[Any]]) -> list[Any]:
        """One array of each column, which holds a value for every device."""
        devices, sharding = self._layout.devices, self._layout.sharding
        if len(devices) == 1:
            values = [column[0] for column in columns]
            if all(map(_is_plain, values)):
                return values  # the call of a compiled program places them at a lower cost
            return jax.device_put(values, devices[0])
        placed = jax.device_put(columns, [list(devices)] * len(columns))
        return [jax.make_array_from_single_device_arrays(c[0].shape, sharding, c) for c in placed]


def _is_strong(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not leaf.aval.weak_type
    return isinstance(leaf, np.ndarray | np.generic)


def _is_plain(leaf: Any) -> bool:
    """Whether the leaf is NumPy's, of a dtype that JAX has."""
    return not isinstance(leaf, jax.Array) and jnp.result_type(leaf) == leaf.dtype


def _settings() -> Any:
    """Every setting under which JAX would trace a function again."""
    private: Any = importlib.import_module("jax._src.config")
    if (context := getattr(private, "trace_context", None)) is not None:
        return context()
    config: Any = jax.config
    return tuple(getattr(config, f"jax_{name}") for name in SETTINGS)
