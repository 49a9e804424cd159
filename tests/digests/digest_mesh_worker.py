"""A process with 8 CPU devices: digests of arrays in many shardings beside those of NumPy."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from golden_states import array
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from perdure.digests import digest, jax_arrays
from perdure.state import jax_state

PLAIN = {
    "matrix": array(np.float32, (24, 2056)),
    "small": array(np.uint8, (16, 24)),
    "half": np.asarray(jnp.asarray(array(np.uint16, (8, 40, 8))).view(jnp.bfloat16)),
    "complex": array(np.complex64, (8, 8)),
}
SPECS = {
    "rows": P(("x", "y")),
    "first axis over a part of the mesh": P("y"),
    "columns": P(None, ("y", "x")),
    "both": P("x", "y"),
    "replicated": P(),
}


class GatheredError(Exception):
    pass


def refuse(self: Any, value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_replicated:
        raise GatheredError
    return WHOLE_LEAF(self, value)


WHOLE_LEAF = jax_state.JaxState.leaf


def placed(spec: Any, devices: Any) -> Any:
    mesh = Mesh(np.array(devices).reshape(2, 4), ("x", "y"))
    state: Any = {
        name: jax.device_put(values, NamedSharding(mesh, spec)) for name, values in PLAIN.items()
    }
    keys = jax.random.split(jax.random.key(1), (8, 8))
    return {**state, "keys": jax.device_put(keys, NamedSharding(mesh, spec))}


def main() -> None:
    devices = jax.devices()
    keys = jax.random.split(jax.random.key(1), (8, 8))
    expected = digest({**PLAIN, "keys": keys})
    equal = {}
    with mock.patch.object(jax_state.JaxState, "leaf", refuse):
        for name, spec in SPECS.items():
            equal[name] = digest(placed(spec, devices)) == expected
        equal["devices in another order"] = digest(placed(P("x", "y"), devices[::-1])) == expected
        state = placed(P(None, ("y", "x")), devices)
        some = {name: state[name] for name in ("half", "keys")}
        of_some = digest({"half": PLAIN["half"], "keys": keys})
        with mock.patch.object(jax_arrays, "_is_on_cpu", return_value=False):
            equal["columns, as on accelerators"] = digest(some) == of_some
            tiles = placed(P("x", "y"), devices)["half"]
            equal["both, as on accelerators"] = digest(tiles) == digest(PLAIN["half"])
        third = SingleDeviceSharding(devices[3])
        elsewhere = {name: jax.device_put(values, third) for name, values in PLAIN.items()}
        changed = placed(P("x", "y"), devices)
        changed["small"] = changed["small"].at[15, 23].add(1)
        equal["a changed element differs"] = digest(changed) != expected
        try:
            jax_state.ADAPTER.leaf(state["matrix"])
            control = "missed"
        except GatheredError:
            control = "gathered"
    with jax.enable_x64(True):
        program = str(jax_arrays._elementwise.lower(tiles).compile().as_text())
    equal["nothing but sums is sent"] = "all-reduce" in program and "all-gather" not in program
    equal["on one other device"] = digest({**elsewhere, "keys": keys}) == expected

    print(json.dumps({"equal": equal, "control": control}))  # noqa: T201


if __name__ == "__main__":
    main()
