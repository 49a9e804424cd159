"""The strategies on PyTorch: which devices, which group."""

from __future__ import annotations

from typing import Any

from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.distribute.strategy import Strategy
from perdure.distribute.torch import group
from perdure.distribute.torch.engine import TorchEngine
from perdure.process_group import SingleProcess


class MirroredStrategy(Strategy):
    """The devices of one process; they share its memory and the state.

    `devices`: None (the CPU), a number of CPU devices, each of which is a thread, a device, or a list.
    For more accelerators than one start more processes, with MultiWorkerMirroredStrategy. With several
    devices `grad` runs in several threads at once and must not write to what they share. `threads` is
    the number of threads inside an operation, for each device; it is part of the recipe (default 1).
    """

    def __init__(
        self,
        devices: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        super().__init__(TorchEngine(devices, SingleProcess(), threads), replicas, seed=seed)


class OneDeviceStrategy(MirroredStrategy):
    """One device; by default the CPU."""

    def __init__(
        self,
        device: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        super().__init__(device, replicas, seed=seed, threads=threads)


class MultiWorkerMirroredStrategy(Strategy):
    """The devices of a group of processes; `devices` as in MirroredStrategy.

    The group is the one that the program has initialized in the framework already, or
    `cluster_resolver` (also the name of a source: "slurm"), or what the environment
    describes: TF_CONFIG, JAX_*, torchrun's, Open MPI's, Slurm's, Kubernetes'; docs/CLUSTER.md has them.
    `options` says how long it waits. Raises ClusterError when a process does not come or comes twice.
    Raises WorkerLostError from a step when another process dies: save nothing, leave, and let the
    whole group be started again from the last checkpoint.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | str | None = None,
        replicas: int | None = None,
        *,
        devices: Any = None,
        seed: int = 0,
        threads: int | None = None,
        options: ClusterOptions | None = None,
    ) -> None:
        cluster = resolve_for("torch", cluster_resolver)
        processes = group.join(cluster, options)
        super().__init__(TorchEngine(devices, processes, threads), replicas, seed=seed)
        self.cluster_resolver = cluster
