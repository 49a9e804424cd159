"""One process of JAX that saves and loads the same state with Orbax, or with perdure's manager.

    doors_orbax.py LAYOUT DIRECTORY SAVES SUBJECT...     with the environment of torchrun

Arrays are replicated over the devices of two processes, or sharded over them by their first axis.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from blake3 import blake3
from doors_measure import LAYERS, SHAPES, measure_each, report
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Training:
    is_durable = False

    def __init__(self, path: Path, layout: str) -> None:
        self.path = path
        mesh = Mesh(np.array(jax.devices()), ("x",))
        self.sharding = NamedSharding(mesh, P("x") if layout == "FSDP2" else P())
        self._step = jax.jit(
            lambda tree: jax.tree.map(lambda leaf: leaf * 0.999 + 0.001, tree),
            donate_argnums=0,
        )
        self.renew()

    def renew(self) -> None:
        def init() -> Any:
            return {
                part: {
                    f"{layer}.{name}": jax.random.normal(jax.random.key(layer), shape)
                    for layer in range(LAYERS)
                    for name, shape in SHAPES.items()
                }
                for part in ("params", "mu", "nu")
            }

        shapes = jax.eval_shape(init)
        placed = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding), shapes
        )
        self.state: Any = placed
        self._init = jax.jit(init, out_shardings=self.sharding)

    def change(self) -> None:
        if isinstance(jax.tree.leaves(self.state)[0], jax.ShapeDtypeStruct):
            self.state = self._init()
        self.state = jax.block_until_ready(self._step(self.state))

    def digest(self) -> str:
        found = blake3()
        for leaf in jax.tree.leaves(self.state):
            for shard in leaf.addressable_shards:
                octets: Any = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8)
                found.update(octets)
        return found.hexdigest()


class Orbax(Training):
    def __init__(self, path: Path, layout: str) -> None:
        super().__init__(path, layout)
        import orbax.checkpoint as ocp

        self.args = ocp.args
        self.manager: Any = ocp.CheckpointManager(
            path / "orbax", options=ocp.CheckpointManagerOptions(create=True)
        )

    def save(self, step: int) -> None:
        self.manager.save(step, args=self.args.StandardSave(self.state))

    def finish(self, step: int) -> None:
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()

    def load(self, step: int) -> None:
        restored = self.manager.restore(step, args=self.args.StandardRestore(self.state))
        self.state = jax.block_until_ready(restored)


class Manager(Training):
    is_durable = True

    def __init__(self, path: Path, layout: str) -> None:
        super().__init__(path, layout)
        import perdure

        processes = perdure.initialize_distributed()
        self.manager = perdure.CheckpointManager(
            path / "run", max_to_keep=None, processes=processes, recipe={"seed": 0}
        )

    def save(self, step: int) -> None:
        self.manager.save(step, self.state)

    def finish(self, step: int) -> None:
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()

    def load(self, step: int) -> None:
        restored, _ = self.manager.restore(step, self.state)
        self.state = jax.block_until_ready(restored)


SUBJECTS: dict[str, type[Any]] = {"Orbax": Orbax, "perdure on JAX": Manager}


def main() -> None:
    layout, directory, saves, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, count, rank)

    def barrier() -> None:
        multihost_utils.sync_global_devices("doors")

    def make(name: str, path: Path) -> Training:
        return SUBJECTS[name](path, layout)

    report(measure_each(make, names, Path(directory), barrier, rank == 0, int(saves)))
    barrier()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
