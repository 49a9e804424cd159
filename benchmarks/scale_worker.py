"""One process that saves a sharded state, and loads it onto another sharding, with one of four ways.

    scale_worker.py SUBJECT CUT MIB SAVES DIRECTORY     with the environment of torchrun

The state is eight arrays of float32, cut along their rows or columns over all processes. The last line
of the output has the figures of this process as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from doors_measure import leave_cache
from store_probe import sync_tree

ARRAYS, COLUMNS = 8, 2048


class MemoryPeak:
    """The most memory of some kinds (`/proc/self/status`) above what the process had at the start."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        gc.collect()
        self._start = self._most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return (self._most - self._start) / 2**10

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._most = max(self._most, self._now())

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(self._kinds))


class _Jax:
    def __init__(self, cut: str, shape: tuple[int, int]) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("x",))
        self._jax = jax
        self._specs = {
            "rows": NamedSharding(mesh, PartitionSpec("x")),
            "columns": NamedSharding(mesh, PartitionSpec(None, "x")),
        }
        self._cut, self._shape = cut, shape

    def state(self, step: int) -> dict[str, Any]:
        sharding = self._specs[self._cut]

        def part(number: int) -> Callable[[Any], np.ndarray]:
            def values(index: Any) -> np.ndarray:
                size = [len(range(*span.indices(n))) for span, n in zip(index, self._shape)]  # noqa: B905
                offset = index[0].start or 0, index[1].start or 0
                source = np.random.default_rng([step, number, *offset])
                return source.random(size, np.float32)

            return values

        made = {
            f"w{number}": self._jax.make_array_from_callback(self._shape, sharding, part(number))
            for number in range(ARRAYS)
        }
        return self._jax.block_until_ready(made)

    def target(self, cut: str) -> dict[str, Any]:
        shape = self._jax.ShapeDtypeStruct(self._shape, np.float32, sharding=self._specs[cut])
        return {f"w{number}": shape for number in range(ARRAYS)}

    def ready(self, state: Any) -> None:
        self._jax.block_until_ready(state)

    def total(self, state: Any) -> float:
        shards = [shard for array in state.values() for shard in array.addressable_shards]
        return float(sum(np.asarray(shard.data).astype(np.float64).sum() for shard in shards))


class _Managed:
    """What saves and restores by a manager, whatever the arrays are."""

    is_durable = True
    target: Any

    def _open(self, path: Path, group: Any) -> None:
        import perdure

        self._manager: Any = perdure.CheckpointManager(
            path, max_to_keep=None, processes=group, recipe={}
        )

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, state)

    def finish(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def load(self, step: int, cut: str) -> Any:
        return self._manager.restore(step, self.target(cut))[0]


class PerdureJax(_Managed, _Jax):
    def __init__(self, path: Path, cut: str, shape: tuple[int, int]) -> None:
        super().__init__(cut, shape)
        import perdure

        group = perdure.initialize_distributed() if int(os.environ["WORLD_SIZE"]) > 1 else None
        self._open(path, group)


class Orbax(_Jax):
    is_durable = False

    def __init__(self, path: Path, cut: str, shape: tuple[int, int]) -> None:
        super().__init__(cut, shape)
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._manager: Any = ocp.CheckpointManager(
            path / "orbax", options=ocp.CheckpointManagerOptions(create=True)
        )

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=self._args.StandardSave(state))

    def finish(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def load(self, step: int, cut: str) -> Any:
        return self._manager.restore(step, args=self._args.StandardRestore(self.target(cut)))


class _Torch:
    def __init__(self, cut: str, shape: tuple[int, int]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        self._cut, self._shape = cut, shape

    def _tensors(self, cut: str, make: Callable[[int, list[int]], Any]) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor, Shard

        axis = int(cut == "columns")
        local = list(self._shape)
        local[axis] //= int(os.environ["WORLD_SIZE"])
        return {
            f"w{number}": DTensor.from_local(
                make(number, local), self._mesh, [Shard(axis)], run_check=False
            )
            for number in range(ARRAYS)
        }

    def state(self, step: int) -> dict[str, Any]:
        import torch

        def values(number: int, local: list[int]) -> Any:
            source = np.random.default_rng([step, number, int(os.environ["RANK"])])
            return torch.from_numpy(source.random(local, np.float32))

        return self._tensors(self._cut, values)

    def target(self, cut: str) -> dict[str, Any]:
        import torch

        return self._tensors(cut, lambda _, local: torch.empty(local))

    def ready(self, state: Any) -> None:
        return None

    def total(self, state: Any) -> float:
        return float(sum(array.to_local().double().sum() for array in state.values()))


class PerdureTorch(_Managed, _Torch):
    def __init__(self, path: Path, cut: str, shape: tuple[int, int]) -> None:
        super().__init__(cut, shape)
        import perdure
        import perdure.torch

        group = perdure.torch.process_group() if int(os.environ["WORLD_SIZE"]) > 1 else None
        self._open(path, group)


class Dcp(_Torch):
    is_durable = False

    def __init__(self, path: Path, cut: str, shape: tuple[int, int]) -> None:
        super().__init__(cut, shape)
        self._path = path

    def save(self, step: int, state: Any) -> None:
        import torch.distributed.checkpoint as dcp

        self._future: Any = dcp.async_save(  # pyright: ignore[reportPrivateImportUsage]
            state, checkpoint_id=self._path / f"{step}"
        )

    def finish(self) -> None:
        self._future.result()

    def close(self) -> None:
        return None

    def load(self, step: int, cut: str) -> Any:
        import torch.distributed.checkpoint as dcp

        state = self.target(cut)
        dcp.load(  # pyright: ignore[reportPrivateImportUsage]
            state, checkpoint_id=self._path / f"{step}"
        )
        return state


SUBJECTS = {"perdure-jax": PerdureJax, "Orbax": Orbax, "perdure-torch": PerdureTorch, "DCP": Dcp}


def join(subject: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Join the group of the framework; returns a barrier, and how to leave it."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if SUBJECTS[subject] in (PerdureTorch, Dcp):
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=count)
        return dist.barrier, dist.destroy_process_group
    if count == 1:
        return lambda: None, lambda: None
    import jax
    from jax.experimental import multihost_utils

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, rank)
    return lambda: multihost_utils.sync_global_devices("scale"), jax.distributed.shutdown


def count_received() -> list[int]:
    """The bytes that each save of perdure gets from other processes."""
    from perdure.checkpoint.slice_exchange import SliceExchange

    received: list[int] = []
    close = SliceExchange.close

    def counted(exchange: SliceExchange) -> None:
        received.append(exchange.received)
        close(exchange)

    SliceExchange.close = counted  # type: ignore[method-assign]
    return received


def main() -> None:
    name, cut, mib, saves, directory = sys.argv[1:]
    warnings.simplefilter("ignore")
    barrier, leave = join(name)
    path, is_chief = Path(directory), os.environ["RANK"] == "0"
    shape = int(mib) * 2**20 // (4 * ARRAYS * COLUMNS), COLUMNS
    received = count_received()
    subject: Any = SUBJECTS[name](path, cut, shape)
    out: dict[str, Any] = {"stall": [], "write": [], "save peak": [], "load": [], "load peak": []}
    out["load cpu"] = []
    expected = 0.0
    for step in range(1, int(saves) + 2):
        state = subject.state(step)
        expected = subject.total(state)
        memory = MemoryPeak("RssAnon")  # it collects garbage, which takes each process another time
        barrier()
        start = time.perf_counter()
        subject.save(step, state)
        stall = time.perf_counter() - start
        subject.finish()
        if not subject.is_durable:
            barrier()
            if is_chief:
                sync_tree(path)
        write = time.perf_counter() - start  # of peers, the chief's is the longest
        barrier()
        peak = memory.end()
        out["save peak"].append(peak)
        if step > 1:  # the first one allocates memory that the others use again
            out["stall"].append(stall)
            out["write"].append(write)
        del state
    out["received"] = max(received, default=0)
    for onto in ("rows", "columns"):
        if is_chief:
            leave_cache(path)
        memory = MemoryPeak("RssAnon", "RssShmem")
        barrier()
        start, used = time.perf_counter(), time.process_time()
        state = subject.load(int(saves) + 1, onto)
        subject.ready(state)
        barrier()
        out["load"].append(time.perf_counter() - start)
        out["load cpu"].append(time.process_time() - used)
        out["load peak"].append(memory.end())
        out["total"] = [*out.get("total", []), subject.total(state)]
        del state
    out["expected"] = expected
    print("\n" + json.dumps(out), flush=True)
    subject.close()
    barrier()
    leave()


if __name__ == "__main__":
    main()
