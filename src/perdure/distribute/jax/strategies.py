"""The strategies on JAX: which devices, which group.

Owns what has to happen before JAX starts: the size of the thread pool, then the group, then devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.distribute.jax import group
from perdure.distribute.jax.engine import Devices, JaxEngine
from perdure.distribute.jax.threads import pin
from perdure.distribute.strategy import Strategy
from perdure.process_group import SingleProcess


class MirroredStrategy(Strategy):
    """The local devices of one process; each holds the whole state.

    `devices`: all (None), the first n (a number), or a list. `threads` is the size of the CPU's
    thread pool, which is part of the recipe (default: PJRT_NPROC, or 8).
    """

    def __init__(
        self,
        devices: Devices = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        pool = pin(threads)
        super().__init__(JaxEngine(devices, SingleProcess(), pool), replicas, seed=seed)


class OneDeviceStrategy(MirroredStrategy):
    """One device; by default the first."""

    def __init__(
        self,
        device: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        devices = 1 if device is None else [device]
        super().__init__(devices, replicas, seed=seed, threads=threads)


class MultiWorkerMirroredStrategy(Strategy):
    """The devices of a group of processes. Make it before anything else that uses JAX.

    The group is the one that the program has initialized in the framework already, or
    `cluster_resolver` (also the name of a source: "slurm"), or what the environment
    describes: TF_CONFIG, JAX_*, torchrun's, Open MPI's, Slurm's, Kubernetes'; docs/CLUSTER.md has them.
    `options` says how long it waits. Raises ClusterError when a process does not come or comes twice.
    Raises WorkerLostError from a step when another process dies: save nothing, leave with os._exit,
    and let the whole group be started again from the last checkpoint.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | str | None = None,
        replicas: int | None = None,
        *,
        devices: Devices = None,
        seed: int = 0,
        threads: int | None = None,
        local_device_ids: Sequence[int] | None = None,
        options: ClusterOptions | None = None,
    ) -> None:
        cluster = resolve_for("jax", cluster_resolver)
        pool = pin(threads)
        processes = group.join(cluster, local_device_ids, options)
        super().__init__(JaxEngine(devices, processes, pool), replicas, seed=seed)
        self.cluster_resolver = cluster
