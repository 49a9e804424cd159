"""Steps over states with leaves of every narrow dtype, sharded arrays and keys, on several devices."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from worker_program import answer, arguments

from perdure.data import ArrayDataset
from perdure.distribute.jax.group import bits, from_bits
from perdure.errors import StateError
from perdure.jax import MirroredStrategy

REPLICAS = 8
INTEGERS = ("int2", "uint2", "int4", "uint4")
FLOATS = ("float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
DATA = ArrayDataset(np.arange(64, dtype=np.float32).reshape(32, 2), 16)


def narrow(dtype: str) -> Any:
    return jnp.array([0, 1, 1, 0, 1, 1, 0], jnp.float32).astype(dtype)


def exact(tree: Any) -> str:
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        total.update(array.astype(np.float64).tobytes())
    return total.hexdigest()[:16]


def trained(devices: int, state: dict[str, Any], extra: Any = None) -> Any:
    def grad(state: Any, batch: Any, key: Any) -> Any:
        more = {} if extra is None else extra(state, key)
        return {"sum": batch[0].sum(), **more}

    def update(state: Any, total: Any) -> Any:
        return {**state, "w": state["w"] + total["sum"]}, total

    strategy = MirroredStrategy(devices, REPLICAS)
    step, logs = strategy.step(grad, update), None
    for number in range(2):
        state, logs = step(state, strategy.batch(DATA, number))
    return state, logs


def refused(devices: int, state: dict[str, Any], extra: Any = None) -> str:
    try:
        trained(devices, state, extra)
    except StateError as error:
        return str(error)
    return "nothing"


def main() -> None:
    arguments()
    out: dict[str, Any] = {"round trip": []}
    w = jnp.zeros(())
    for dtype in (*INTEGERS, *FLOATS):
        leaf = narrow(dtype)
        same = from_bits(bits(leaf), leaf.shape, leaf.dtype)
        out["round trip"].append(same.dtype == leaf.dtype and exact(same) == exact(leaf))
    for devices in (1, 2, 8):
        state = {"w": w, **{dtype: narrow(dtype) for dtype in (*INTEGERS, *FLOATS)}}
        new, _ = trained(devices, state)
        assert exact({k: v for k, v in new.items() if k != "w"}) == exact(
            {k: v for k, v in state.items() if k != "w"}
        )
        summed = trained(devices, {"w": w}, lambda *_: {dtype: narrow(dtype) for dtype in INTEGERS})
        out[str(devices)] = [exact(new), exact(summed)]
        out[f"keys {devices}"] = refused(devices, {"w": w}, lambda _, key: {"a": {"k": key}})
        mesh = Mesh(np.array(jax.devices()), ("model",))
        sharded = jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, P("model")))
        out[f"sharded {devices}"] = refused(devices, {"w": w, "net": {"kernel": sharded}})
        whole = jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, P()))
        out[f"whole {devices}"] = refused(devices, {"w": w, "net": {"kernel": whole}})
    answer(out)


if __name__ == "__main__":
    main()
