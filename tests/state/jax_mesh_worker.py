"""A process with 8 CPU devices: states sharded over one mesh are saved, and restored on the others.

`jax_mesh_worker.py DIRECTORY [MESH...]`, with meshes such as 2x4; MESHES by default.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from perdure import CheckpointManager
from perdure.errors import StateError
from perdure.state import flatten

MESHES: list[Any] = [(2, 4), (4, 2), (8, 1), (1, 1), None]
SPECS = {
    "both": P("x", "y"),
    "rows": P(("x", "y")),
    "columns": P(None, "x"),
    "bias": P(),
    "key": P(),
}


def shardings(shape: Any) -> dict[str, Any]:
    if shape is None:
        return dict.fromkeys(SPECS, SingleDeviceSharding(jax.devices()[3]))
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("x", "y"))
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def state(shape: Any, seed: int) -> Any:
    draw = np.random.default_rng(seed)
    values: dict[str, Any] = {
        name: draw.normal(size=(16, 24)).astype(np.float32) for name in ("both", "rows", "columns")
    }
    values["rows"] = jnp.asarray(values["rows"], jnp.bfloat16)
    values |= {"bias": draw.normal(size=5).astype(np.float32), "key": jax.random.key(seed)}
    return {name: jax.device_put(value, shardings(shape)[name]) for name, value in values.items()}


def bits(tree: Any) -> Any:
    return {
        path: (leaf.dtype, leaf.shape, bytes(leaf.data)) for path, leaf in flatten(tree).items()
    }


@jax.jit
def step(state: Any) -> Any:
    return {**state, "both": jnp.tanh(state["both"] @ state["columns"].T) @ state["columns"]}


def main() -> None:
    directory, *words = sys.argv[1:]
    meshes: list[Any] = (
        [tuple(map(int, word.split("x"))) for word in words] + [None] if words else MESHES
    )
    out: dict[str, Any] = {"equal": {}, "placed": [], "wanted": []}
    expected = bits(state(None, 1))
    for number, saved in enumerate(meshes):
        with CheckpointManager(f"{directory}/{number}") as manager:
            manager.save(1, state(saved, 1))
            manager.wait_until_finished()
            for mesh in meshes:
                restored, _ = manager.restore(1, state(mesh, 2))
                name = f"{saved or 'no mesh'} to {mesh or 'no mesh'}"
                out["equal"][name] = bits(restored) == expected
                out["placed"] += [str(leaf.sharding) for leaf in restored.values()]
                out["wanted"] += [str(sharding) for sharding in shardings(mesh).values()]
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
                state((4, 2), 2),
            )
            restored, _ = manager.restore(1, abstract)
            found = [restored[name].sharding for name in ("both", "rows", "columns", "bias")]
            wanted = [abstract[name].sharding for name in ("both", "rows", "columns", "bias")]
            out["abstract"] = bits(restored) == expected and found == wanted
            # As in a loop: the state of the step, then of the step after a restore.
            own, _ = manager.restore(1, state(saved, 2))
            out["as one"] = bits(step(own)) == bits(step(state(saved, 1)))
            out["control"] = bits(step(state(saved, 2))) == bits(step(state(saved, 1)))
            if not (out["abstract"] and out["as one"]):
                break
    out["copies"] = [*saves_of_copies(f"{directory}/copies")]
    sys.stdout.write(json.dumps(out))


def saves_of_copies(directory: str) -> Iterator[str]:
    """What a save says of a replicated array, if its copies are equal and if one is another."""
    devices = jax.devices()[:4]
    sharding = NamedSharding(Mesh(np.array(devices).reshape(2, 2), ("x", "y")), P("x"))
    for other in (2.0, 3.0):
        values = (1.0, 1.0, 2.0, other)
        parts = [
            jax.device_put(jnp.full(1, value), device)
            for value, device in zip(values, devices, strict=True)
        ]
        array = jax.make_array_from_single_device_arrays((2,), sharding, parts)
        with CheckpointManager(f"{directory}-{other}") as manager:
            try:
                manager.save(1, {"w": array})
                yield "saved"
            except StateError as error:
                yield str(error)


if __name__ == "__main__":
    main()
