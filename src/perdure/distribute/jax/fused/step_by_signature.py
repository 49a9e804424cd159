"""`fused_step`: places the arguments of a step and runs the programs that were proven for them.

PERDURE_FAST_ON ("gpu", "gpu,tpu") allows fast steps on platforms where they were not measured; the
first steps of every program are then computed by the reference, too, whose bits count.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, SingleDeviceSharding

from perdure.digests.digest import leaf_digests_of_each
from perdure.distribute.engine import FusedStep, Reference
from perdure.distribute.jax.fused.proven_programs import (
    Layout,
    Proof,
    ReferencePrograms,
    Run,
    Turn,
    holds_packed,
    paths_of,
    prove,
)
from perdure.distribute.jax.group import packed_width
from perdure.distribute.jax.programs import SETTINGS, as_array, name_of, traced, type_of
from perdure.errors import StateError

FORMS_KEPT = 8
"""Shapes of shares and state whose programs are kept: the last batch of an epoch may be smaller."""

MEASURED = ("cpu",)
"""The platforms on which fast steps were measured to have the bits of the reference."""
FAST_ON = "PERDURE_FAST_ON"
STEPS = 4
"""How many steps are compared. In the first ones a difference may not show: moments are zero, and so
are a learning rate that rises from zero, and weights whose gradients are zero before others move."""

_log = logging.getLogger(__name__)


def fused_step(
    programs: ReferencePrograms, everywhere: NamedSharding, replicas: int, seed: Any
) -> FusedStep | str:
    """A step as programs over all local devices of one process, or why there is none.

    At the first call of a form (structure, shapes, dtypes, JAX's settings) the programs are
    compiled and compared with those for a single device, which define the bits. Without an equal
    program the calls with that form return None.
    """
    layout = Layout(everywhere, replicas)
    count, per_device = len(layout.devices), layout.per_device
    if why := _refused(layout.devices[0].platform):
        return why
    # Each device has to end with one partial sum, on one level.
    if count > 1 and (replicas % count or per_device & (per_device - 1)):
        return (
            f"{replicas} replicas are no power of two for each of {count} devices, which would leave "
            "several partial sums"
        )
    return _StepBySignature(programs, layout, seed)


class _StepForm(NamedTuple):
    """What was decided for arguments of a form.

    `plain`: the arrays of the shares are NumPy's and go to one device. `unchecked` steps are still
    compared.
    """

    run: Run | None
    why: str
    plain: bool
    unchecked: int
    after: Any


class _StepBySignature:
    """See `fused_step`."""

    def __init__(self, programs: ReferencePrograms, layout: Layout, seed: Any) -> None:
        self._programs = programs
        self._layout = layout
        self._forms: dict[Any, _StepForm] = {}
        self._refused = False
        self._why = ""
        self._platform = layout.devices[0].platform
        self._checks = 0 if self._platform in MEASURED else STEPS
        # The last result, by the identity of its leaves, and their types: looking at each array costs
        # more than all else here.
        self._known: list[Any] = []
        self._known_types: Any = None
        self._settings = _settings()
        self._seed = seed
        self._numbers: list[Any] = []

    def explain(self) -> str:
        return self._why

    def forget(self) -> None:
        self._known = []

    def __call__(
        self,
        state: Any,
        shares: Sequence[Any],
        step: int,
        donate: bool | None = False,
        reference: Reference | None = None,
    ) -> tuple[Any, Any] | None:
        config: Any = jax.config
        if self._refused:
            return None
        if config.jax_disable_jit:
            return self._not_now("under jax.disable_jit() nothing is compiled")
        if isinstance(described := _described(shares), str):
            return self._not_now(described)
        columns, share_form = described
        leaves, treedef = jax.tree.flatten(state)
        gives = donate is not False
        if len(leaves) != len(self._known) or any(map(operator.is_not, leaves, self._known)):
            # One array under two names cannot be given away twice.
            twice = len({id(leaf) for leaf in leaves}) < len(leaves)
            copies = donate is None or (gives and twice)
            state = self._whole(state, copies=copies, gives=gives)
            leaves, treedef = jax.tree.flatten(state)
            self._known_types = tuple(map(type_of, leaves))
        form = share_form, treedef, self._known_types, self._settings(), gives
        known = self._forms.get(form)
        turns = self._turns(columns, share_form[0], step, known is not None and known.plain)
        if known is None:
            known = self._decide(form, state, columns, turns[0], gives)
        self._why = known.why
        if (run := known.run) is None:
            # Asking costs something in every step; a smaller last batch of an epoch may yet differ.
            self._refused = not any(known.run for known in self._forms.values())
            return None
        if not known.unchecked or reference is None:
            result = run(state, turns)
        elif (result := self._compared(form, run, state, turns, reference)) is None:
            return None
        self._known, self._known_types = jax.tree.leaves(result[0]), known.after
        return result

    def _decide(
        self, form: Any, state: Any, columns: Sequence[Any], turn: Turn, donate: bool
    ) -> _StepForm:
        if len(self._forms) == FORMS_KEPT:
            del self._forms[next(iter(self._forms))]
        why = _unsuitable(self._programs, state, turn) if self._checks else ""
        proof = (
            Proof(None, why) if why else prove(self._programs, self._layout, state, turn, donate)
        )
        plain = len(self._layout.devices) == 1 and not holds_packed((state, turn))
        # NumPy's arrays, of dtypes that JAX has.
        plain = plain and all(
            not isinstance(x, jax.Array) and jnp.result_type(x) == x.dtype
            for column in columns
            for x in column
        )
        why = f"Fast: {proof.why}." if proof.run else f"Not fast: {proof.why}."
        _log.debug("%s", why)
        self._forms[form] = _StepForm(proof.run, why, plain, self._checks, proof.after)
        return self._forms[form]

    def _compared(
        self, form: Any, run: Run, state: Any, turns: list[Turn], reference: Reference
    ) -> tuple[Any, Any] | None:
        """The result of `run` if the reference gives the same bits; None, for ever, if it does not."""
        expected = reference(state)  # first, because `run` may use the memory of the state
        try:
            result = run(state, turns)
            where = difference(expected, result, self._layout.devices)
        except Exception as error:  # noqa: BLE001  such as too little memory beside the other result
            line = str(error).partition("\n")[0]
            why = f"a step failed where the separate programs did not ({line})"
            return self._refuse(why)
        if where:
            return self._refuse(f"a step computed both ways had other bits in {where}")
        known, steps = self._forms[form], STEPS
        known = self._forms[form] = known._replace(unchecked=known.unchecked - 1)
        done = steps - known.unchecked
        if known.unchecked:
            self._why = (
                f"Not fast yet: the first {steps} steps on {self._platform} are computed both ways, "
                f"and the bits of {done} were equal so far."
            )
            return result
        why = (
            f"{known.why[:-1]}; on {self._platform} the first {steps} steps, computed both ways, had "
            "equal bits."
        )
        self._forms[form], self._why = known._replace(why=why), why
        _log.info("%s", why)
        return result

    def _refuse(self, why: str) -> None:
        """No step of any form is fast from now on."""
        self._forms.clear()
        self._known, self._refused = [], True
        self._why = f"Not fast: on {self._platform} {why}."
        _log.debug("%s", self._why)
        _warn(self._why, self._platform, stacklevel=5)

    def _not_now(self, why: str) -> None:
        if self._why != (why := f"Not fast: {why}."):
            self._why = why
            _log.debug("%s", why)

    def _whole(self, state: Any, *, copies: bool, gives: bool) -> Any:
        """The user's state, each leaf one array on all devices, in memory of its own with `copies`."""
        sharding = self._layout.sharding

        def spread(path: Any, leaf: Any) -> Any:
            if isinstance(leaf, jax.core.Tracer):
                raise traced(path)
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise StateError(
                    f"{name_of(path)}: this state was given to an earlier step, which used its memory "
                    "(donate=True, and in a Trainer by default). Continue with the state that the step "
                    "returned, or make the step with strategy.step(..., donate=False)"
                )
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding and not copies:
                return leaf
            # What shares its memory with the caller's array could not be given away. To put an array on
            # several devices shares it on its own device, whatever `may_alias` says.
            leaf = as_array(path, leaf)
            if gives and isinstance(leaf, jax.Array):
                leaf = leaf.copy()
            placed = jax.device_put(leaf, sharding, may_alias=False)
            if isinstance(
                placed, jax.core.Tracer
            ):  # a step of concrete arrays in a traced function
                raise traced(path)
            return placed

        return jax.tree_util.tree_map_with_path(spread, state)

    def _turns(
        self, columns: Sequence[list[Any]], treedef: Any, step: int, plain: bool
    ) -> list[Turn]:
        """The arguments of grad for each turn of the devices: different values under one name."""
        devices, per_device = self._layout.devices, self._layout.per_device
        count, size = len(devices), len(columns[0])
        if not self._numbers:
            words = [np.asarray(self._seed)] * count
            numbers = [
                [np.uint32(d * per_device + turn) for d in range(count)]
                for turn in range(per_device)
            ]
            self._numbers = self._placed([words, *numbers])
        seed, *numbers = self._numbers
        now: Any = np.uint32(step)
        if plain:  # the call of a compiled program places them at a lower cost
            rows = columns
        else:
            values = [
                [columns[d * per_device + turn][n] for d in range(count)]
                for turn in range(per_device)
                for n in range(size)
            ]
            *arrays, now = self._placed([*values, [now] * count])
            rows = [arrays[t * size : (t + 1) * size] for t in range(per_device)]
        return [
            (jax.tree.unflatten(treedef, row), seed, now, number)
            for row, number in zip(rows, numbers, strict=True)
        ]

    def _placed(self, columns: list[list[Any]]) -> list[Any]:
        """One array of each column, which holds a value for every device."""
        devices, sharding = self._layout.devices, self._layout.sharding
        if len(devices) == 1:
            return jax.device_put([column[0] for column in columns], devices[0])
        return [_on_each(column, devices, sharding) for column in columns]


def _on_each(column: list[Any], devices: list[Any], sharding: NamedSharding) -> Any:
    """One array that holds a value of its own on each device."""
    shape, dtype = column[0].shape, column[0].dtype
    put: Any = getattr(_pxla(), "batched_device_put", None)
    # JAX keeps the dtype, and gives each element bytes of its own.
    is_known = jax.dtypes.canonicalize_dtype(dtype) == dtype and packed_width(dtype) is None
    numpy = all(
        (type(x) is np.ndarray or isinstance(x, np.generic)) and x.dtype == dtype for x in column
    )
    if put is None or not numpy or not is_known:
        placed = jax.device_put(column, devices)
    else:
        # `device_put` ends in this call and takes several times as long. One call for all devices would
        # give them the first value, because the sharding says that all have the same.
        aval = ShapedArray(shape, dtype)
        placed = [
            put(aval, SingleDeviceSharding(device), [value], [device])
            for value, device in zip(column, devices, strict=True)
        ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


@functools.cache
def _pxla() -> Any:
    return importlib.import_module("jax._src.interpreters.pxla")


def _described(shares: Sequence[Any]) -> tuple[list[list[Any]], Any] | str:
    """The leaves of each share and the form of all, or why they cannot be placed together."""
    columns, form = [], None
    for share in shares:
        flat, treedef = jax.tree.flatten(share)
        # A Python number or a weak type gives way in promotions; placed on devices it would not.
        if not all(map(_is_strong, flat)):
            return "a share holds a Python number, which promotes in another way than an array"
        this = treedef, tuple([(x.shape, x.dtype) for x in flat])
        form = form or this
        if this != form and _canonical(this) != _canonical(form):
            return "the shares of the replicas differ in their structure, shapes or dtypes"
        columns.append(flat)
    return columns, form


def _canonical(form: Any) -> Any:
    treedef, leaves = form
    return treedef, [(shape, jax.dtypes.canonicalize_dtype(dtype)) for shape, dtype in leaves]


def _is_strong(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return not leaf.aval.weak_type
    return isinstance(leaf, np.ndarray | np.generic)


def _settings() -> Callable[[], Any]:
    """A function that gives every setting under which JAX would trace a function again."""
    private: Any = importlib.import_module("jax._src.config")
    if (context := getattr(private, "trace_context", None)) is not None:
        return context
    config: Any = jax.config
    return lambda: tuple(getattr(config, f"jax_{name}") for name in SETTINGS)


def _refused(platform: str) -> str:
    """Why a platform has no fast steps; "" if it was measured, or the user allows it."""
    value = os.environ.get(FAST_ON, "")
    if platform in (*MEASURED, *(word.strip().lower() for word in value.split(","))):
        return ""
    found = f" (found {FAST_ON}={value})" if value else ""
    return (
        f"it has been measured on {' and '.join(MEASURED)} only, and the devices are {platform}. With "
        f"{FAST_ON}={platform} the first {STEPS} steps are computed both ways and compared, which "
        f"decides{found}"
    )


def _unsuitable(programs: ReferencePrograms, state: Any, turn: Turn) -> str:
    """Why a step cannot be computed twice: it does more than compute; "" if it can."""

    def step(state: Any, *turn: Any) -> Any:
        return programs.update(state, programs.grad(state, *turn))

    if not jax.make_jaxpr(step)(state, *turn).effects:
        return ""
    return (
        "grad or update calls back into Python (jax.debug.print, io_callback), which computing it both "
        "ways would do twice"
    )


def _warn(why: str, platform: str, stacklevel: int) -> None:
    """Tell the user that steps stay slow, and what to do."""
    warnings.warn(
        f"{why} This step and all later ones have the bits of the separate programs: exact, and "
        "slower. `perdure doctor` with the command of this program says whether the devices repeat "
        f"their own bits. Take {platform} out of {FAST_ON} to save the comparison; please report this",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


def difference(expected: list[tuple[Any, Any]], result: Any, devices: Sequence[Any]) -> str:
    """The first leaf of (state, logs) with other bits on a device, and the device; or ""."""
    paths = paths_of("new state", result[0]) + paths_of("logs", result[1])
    parts = [
        {shard.device: shard.data for shard in leaf.addressable_shards}
        for leaf in jax.tree.leaves(result)
    ]
    wanted = [jax.tree.leaves(one) for one in expected]
    found = [[part[device] for part in parts] for device in devices]
    # As lists, whose leaves are named by number: a tree may have containers that no save takes.
    digests = leaf_digests_of_each([*wanted, *found])
    pairs = list(zip(digests[: len(devices)], digests[len(devices) :], devices, strict=True))
    for number, path in enumerate(paths):
        for one, other, device in pairs:
            if one[str(number)] != other[str(number)]:
                return f"{path} on {device}"
    return ""
