"""Where fast steps were measured, and the check of them where they were not.

PERDURE_FAST_ON ("gpu", "gpu,tpu") allows them on other platforms. The first steps of every program are
then computed by the reference too. All bits have to be equal; until they were, and if they are not, the
reference's are the result.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from perdure.digests.digest import leaf_digests_of_each
from perdure.distribute.jax.fused.proven_programs import ReferencePrograms, Turn, paths_of

MEASURED = ("cpu",)
"""The platforms on which fast steps were measured to have the bits of the reference."""
FAST_ON = "PERDURE_FAST_ON"
STEPS = 4
"""How many steps are compared. In the first ones a difference may not show: moments are zero, and so
are a learning rate that rises from zero, and weights whose gradients are zero before others move."""


def refused(platform: str) -> str:
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


def unsuitable(programs: ReferencePrograms, state: Any, turn: Turn) -> str:
    """Why a step cannot be computed twice: it does more than compute; "" if it can."""

    def step(state: Any, *turn: Any) -> Any:
        return programs.update(state, programs.grad(state, *turn))

    if not jax.make_jaxpr(step)(state, *turn).effects:
        return ""
    return (
        "grad or update calls back into Python (jax.debug.print, io_callback), which computing it both "
        "ways would do twice"
    )


def warn(why: str, platform: str, stacklevel: int) -> None:
    """Tell the user that steps stay slow, and what to do."""
    warnings.warn(
        f"{why} This step and all later ones have the bits of the separate programs: exact, and "
        "slower. `perdure doctor` with the command of this program says whether the devices repeat "
        f"their own bits. Take {platform} out of {FAST_ON} to save the comparison; please report this",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


def difference(expected: list[tuple[Any, Any]], result: Any, devices: Sequence[Any]) -> str:
    """The first leaf of (state, logs) with other bits on a device, and the device; "" if there is none.

    Args:
        expected: (state, logs) of each device.
        result: (state, logs), each leaf one array on all devices.
        devices: In the order of `expected`.
    """
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
