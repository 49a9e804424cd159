"""One process of a group that saves or restores arrays whose shards lie in several processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from worker_program import answer, arguments

from perdure import CheckpointManager
from perdure.checkpoint import SingleProcess
from perdure.distribute.cluster import SimpleClusterResolver
from perdure.errors import UnsupportedLeafError
from perdure.jax import MultiWorkerMirroredStrategy

# The second array cannot be split along its first axis without crossing chunks.
SHAPES = {"rows": (12, 99_996), "columns": (30, 12 * 4096)}


def value(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(size=SHAPES[name]).astype(np.float32)


def placed(by_rows: bool, fill: bool) -> dict[str, Any]:
    """The arrays over all devices of the group, sharded by rows or by columns."""
    mesh = Mesh(np.array(jax.devices()), ("device",))
    state: dict[str, Any] = {"step": 3}
    for name, shape in SHAPES.items():
        cut = P("device") if by_rows and shape[0] % len(jax.devices()) == 0 else P(None, "device")
        data = value(name) if fill else np.zeros(shape, np.float32)
        sharding = NamedSharding(mesh, cut)
        state[name] = jax.make_array_from_callback(shape, sharding, lambda index, d=data: d[index])
    return state


def refused(manager: CheckpointManager, is_save: bool) -> str:
    """The error for an array on the devices of all processes but the first."""
    devices = [device for device in jax.devices() if device.process_index > 0]
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), P("device"))
    data = np.arange(8 * len(devices), dtype=np.float32)
    try:
        if is_save:
            array = jax.make_array_from_callback(
                data.shape, sharding, lambda index: data[index], dtype=data.dtype
            )
            manager.save(3, {"stage": {"part": array}})
            manager.wait_until_finished()
        else:
            like = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
            manager.restore(like={"stage": {"part": like}})
    except UnsupportedLeafError as error:
        return str(error)
    return "nothing"


def refused_alone(directory: str) -> str:
    """The error for a sharded array in a process that saves without the others."""
    with CheckpointManager(directory, processes=SingleProcess()) as manager:
        try:
            manager.save(3, {"model": placed(by_rows=True, fill=True)})
            manager.wait_until_finished()
        except UnsupportedLeafError as error:
            return str(error)
    return "nothing"


def main() -> None:
    options = arguments(directory=str, action=str)
    resolver = SimpleClusterResolver(options.coordinator, options.processes, options.process)
    strategy = MultiWorkerMirroredStrategy(resolver)
    out: dict[str, Any] = {}
    with CheckpointManager(options.directory, processes=strategy.processes) as manager:
        if options.action == "save":
            out["refused"] = refused(manager, is_save=True)
            out["alone"] = refused_alone(f"{options.directory}-{options.process}")
            manager.save(3, placed(by_rows=True, fill=True))
        else:
            out["refused"] = refused(manager, is_save=False)
            state, out["step"] = manager.restore(like=placed(by_rows=False, fill=False))
            out["equal"] = all(
                np.array_equal(np.asarray(shard.data), value(name)[shard.index])
                for name in SHAPES
                for shard in state[name].addressable_shards
            )
            out["spec"] = str(state["rows"].sharding.spec)
    answer(out)


if __name__ == "__main__":
    main()
