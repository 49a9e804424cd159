"""One process of a group that saves a state under several shardings, or restores it under them.

`--action save` saves under each sharding of this number of processes. `--action restore` restores every
saved checkpoint under each of them, compares what this process has, and saves again. `--action
kill-save` and `kill-restore` kill a process ahead of one of its operations on the disk.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "distribute"))

from worker_program import answer, arguments  # noqa: E402

from perdure import CheckpointManager, LocalStorage  # noqa: E402
from perdure.checkpoint import SingleProcess  # noqa: E402
from perdure.errors import PerdureError  # noqa: E402
from perdure.store import Run  # noqa: E402

JAX: dict[int, list[tuple[tuple[int, ...], Any]]] = {
    1: [((1,), None), ((2,), ("a",))],
    2: [((2, 2), ("a",)), ((2, 2), (None, "b")), ((2, 2), ("b", "a")), ((2, 2), (("a", "b"),))],
    3: [((3,), ("a",)), ((3,), (None, "a"))],
    4: [((2, 2), ("b",)), ((2, 2), ("a", "b")), ((4,), (None, "a")), ((2, 2), (("b", "a"),))],
}
"""By the number of processes: shapes of meshes, and the axes of a mesh along which arrays are cut."""

TORCH: dict[int, list[tuple[tuple[int, ...], Any]]] = {
    1: [((), None), ((1,), (0,))],
    2: [((2,), (0,)), ((2,), (1,))],
    3: [((3,), (0,)), ((3,), (1,))],
    4: [
        ((4,), (0,)),
        ((4,), (1,)),
        ((2, 2), (0, 1)),
        ((2, 2), (None, 0)),
        ((2, 2), (1, 0)),
        ((2, 2), (0, 0)),
    ],
}
"""By the number of processes: shapes of meshes, and the axis that each dimension of a mesh cuts."""

DEVICES = {1: 2, 2: 2, 3: 1, 4: 1}
"""The devices of each process of JAX."""

SHARDINGS = {"jax": JAX, "torch": TORCH}


def names(engine: str, processes: int | None = None) -> list[str]:
    """The name of each sharding, of all numbers of processes or of one."""
    return [
        f"{count}-{number}"
        for count, shardings in SHARDINGS[engine].items()
        for number in range(len(shardings))
        if processes in (None, count)
    ]


class JaxStates:
    shapes = {"w": (12, 99_996), "wide": (24, 61_440), "small": (12, 24), "keys": (12,)}  # noqa: RUF012

    def __init__(self, options: Any) -> None:
        from perdure.distribute.cluster import SimpleClusterResolver
        from perdure.jax import MultiWorkerMirroredStrategy

        resolver = SimpleClusterResolver(options.coordinator, options.processes, options.process)
        self.processes = MultiWorkerMirroredStrategy(resolver).processes
        self._count = options.processes

    def value(self, name: str) -> Any:
        import jax

        if name == "keys":
            return jax.random.split(jax.random.key(3), 12)
        values = np.random.default_rng(len(name)).normal(size=self.shapes[name])
        return values.astype("bfloat16" if name == "wide" else np.float32)

    def state(self, number: int, fill: bool) -> dict[str, Any]:
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh_shape, axes = JAX[self._count][number]
        devices = np.array(jax.devices()[: math.prod(mesh_shape)]).reshape(mesh_shape)
        mesh = Mesh(devices, ("a", "b")[: len(mesh_shape)])
        state: dict[str, Any] = {"step": 3}
        for name, shape in self.shapes.items():
            spec = P() if axes is None else P(*axes[: len(shape)])
            sharding = NamedSharding(mesh, spec)
            whole = self.value(name)
            if name == "keys":
                words = np.asarray(jax.random.key_data(whole)) * fill
                placed = jax.make_array_from_callback(
                    words.shape, NamedSharding(mesh, P(*spec, None)), lambda i, w=words: w[i]
                )
                state[name] = jax.random.wrap_key_data(placed)
                continue
            whole = whole if fill else np.zeros_like(whole)
            state[name] = jax.make_array_from_callback(shape, sharding, lambda i, w=whole: w[i])
        return state

    def same(self, found: Any, wanted: Any) -> bool:
        import jax

        if jax.numpy.issubdtype(found.dtype, jax.dtypes.prng_key):
            found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
        pairs = zip(found.addressable_shards, wanted.addressable_shards, strict=True)
        return all(
            one.index == other.index
            and np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()
            for one, other in pairs
        )


class TorchStates:
    shapes = {"w": (7, 300_001), "wide": (1030, 1100), "small": (5, 3), "row": (1, 5)}  # noqa: RUF012

    def __init__(self, options: Any) -> None:
        import torch.distributed as dist

        from perdure.torch import process_group

        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{options.coordinator}",
            rank=options.process,
            world_size=options.processes,
        )
        self.processes = process_group() if options.processes > 1 else SingleProcess()
        self._count = options.processes

    def value(self, name: str) -> Any:
        import torch

        source = torch.Generator().manual_seed(len(name))
        values = torch.randn(self.shapes[name], generator=source)
        return values.to(torch.bfloat16) if name == "wide" else values

    def state(self, number: int, fill: bool) -> dict[str, Any]:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh_shape, axes = TORCH[self._count][number]
        mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
        state: dict[str, Any] = {"step": 3}
        for name in self.shapes:
            value = self.value(name) if fill else torch.zeros_like(self.value(name))
            if mesh is not None:
                placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
                value = distribute_tensor(value, mesh, placements)
            state[name] = value
        return state

    def same(self, found: Any, wanted: Any) -> bool:
        import torch

        if hasattr(found, "to_local"):
            found, wanted = found.to_local(), wanted.to_local()
        return torch.equal(found, wanted) and type(found) is type(wanted)


def outcomes(states: Any, options: Any) -> Iterator[tuple[str, bool, str]]:
    """(saved under, restored under; equal leaves; fingerprint) of each pair."""
    root, shardings = Path(options.root), SHARDINGS[options.engine][options.processes]
    for number in range(len(shardings)):
        own = f"{options.processes}-{number}"
        wanted = states.state(number, fill=True)
        if options.action == "save":
            with CheckpointManager(root / own, processes=states.processes) as manager:
                manager.save(1, wanted)
            yield own, True, Run(root / own).manifest(1).fingerprint
            continue
        for saved in names(options.engine):
            with CheckpointManager(root / saved, processes=states.processes) as manager:
                found, _ = manager.restore(1, states.state(number, fill=False))
            equal = all(states.same(found[name], wanted[name]) for name in states.shapes)
            again = root / f"{saved}-to-{own}"
            with CheckpointManager(again, processes=states.processes) as manager:
                manager.save(1, found)
            yield f"{saved} to {own}", equal, Run(again).manifest(1).fingerprint


class Deadly(LocalStorage):
    """A run directory: its process is killed ahead of operation `at`, counted from `arm` on."""

    def __init__(self, path: Path, at: int) -> None:
        super().__init__(path, self._count)
        self._left = at
        self.is_armed = False

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self._count("read", name)
        return super().read_into(name, offset, target)

    def _count(self, _operation: str, _path: str) -> None:
        if self.is_armed:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def killed(states: Any, options: Any) -> dict[str, Any]:
    """Save one step, and then save or restore while a process is killed; how that ended here."""
    is_victim = options.process == options.victim
    storage = Deadly(Path(options.root), options.at if is_victim else 0)
    number = [axes for _, axes in SHARDINGS[options.engine][options.processes]].index((1,))
    manager = CheckpointManager(storage, processes=states.processes)
    manager.save(1, states.state(number, fill=True))
    manager.wait_until_finished()
    states.processes.barrier()
    storage.is_armed = True
    start, error = time.monotonic(), ""
    try:
        if options.action == "kill-restore":
            manager.restore(1, states.state(0, fill=False))
        else:
            changed = {**states.state(number, fill=True), "step": 4}
            changed["w"] = changed["w"] * 2
            manager.save(2, changed)
            manager.wait_until_finished()
    except PerdureError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "seconds": time.monotonic() - start}


def main() -> None:
    options = arguments(engine=str, action=str, root=str, victim=-1, at=0)
    warnings.simplefilter("ignore")
    states: Any = (JaxStates if options.engine == "jax" else TorchStates)(options)
    if options.action.startswith("kill"):
        answer(killed(states, options))
        return  # process 0, which serves the messages of the others, waits for them at its exit
    answer({"outcomes": list(outcomes(states, options))})
    if options.engine == "torch":
        import torch.distributed as dist

        with contextlib.suppress(Exception):
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
