"""The strategies on PyTorch."""

from __future__ import annotations

from typing import Any

from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.distribute.strategy import Strategy
from perdure.distribute.torch import group
from perdure.distribute.torch.engine import TorchEngine
from perdure.runtime.process_group import SingleProcess


class MirroredStrategy(Strategy):
    """The devices of one process; they share its memory and the state.

    Their replicas are computed one after another. To use several cores or accelerators at once, start
    a process for each, with MultiWorkerMirroredStrategy (`perdure run --workers 2`): the same bits.

    Args:
        devices: None (the CPU), a number of CPU devices, a device, or a list.
        replicas: V, the number of logical replicas; by default the number of devices.
        seed: 0 to 2**63 - 1.
        threads: The number of threads inside an operation, which is part of the recipe; by default 1.
        compile: A backend of `torch.compile` ("inductor") for the `grad` of `step`. It is part of the
            recipe, so that no run resumes what was compiled in another way; by default None.

    Raises:
        TopologyError: The devices do not exist, or are several accelerators, or there is no such
            backend.
    """

    def __init__(
        self,
        devices: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        compile: str | None = None,
    ) -> None:
        super().__init__(
            TorchEngine(devices, SingleProcess(), threads, compile), replicas, seed=seed
        )


class OneDeviceStrategy(MirroredStrategy):
    """One device; by default the CPU."""

    def __init__(
        self,
        device: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        compile: str | None = None,
    ) -> None:
        super().__init__(device, replicas, seed=seed, threads=threads, compile=compile)


class MultiWorkerMirroredStrategy(Strategy):
    """The devices of a group of processes.

    The group is, in this order: the one that the program has already initialized in the framework, that
    of `cluster_resolver`, or the one that the environment describes (docs/CLUSTER.md).

    A step raises WorkerLostError when another process dies: save nothing, leave, and restart the whole
    group from the last checkpoint.

    Args:
        cluster_resolver: The group, or the name of a source ("slurm").
        replicas: V, the number of logical replicas; by default the number of devices in the group.
        devices: The local devices, as in MirroredStrategy.
        seed: 0 to 2**63 - 1.
        threads: The number of threads inside an operation, as in MirroredStrategy.
        compile: A backend of `torch.compile`, as in MirroredStrategy.
        options: Time limits.

    Raises:
        ClusterError: A process does not come or comes twice, or descriptions contradict each other.
        RecipeMismatchError: The processes have different recipes.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | str | None = None,
        replicas: int | None = None,
        *,
        devices: Any = None,
        seed: int = 0,
        threads: int | None = None,
        compile: str | None = None,
        options: ClusterOptions | None = None,
    ) -> None:
        cluster = resolve_for("torch", cluster_resolver)
        processes = group.join(cluster, options)
        super().__init__(TorchEngine(devices, processes, threads, compile), replicas, seed=seed)
        self.cluster_resolver = cluster
