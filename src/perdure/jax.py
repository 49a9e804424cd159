"""For users of JAX: strategies, metrics, losses and members that differ between processes.

Before JAX starts, the strategies fix the size of its thread pool and join the group.

Inside the package this module is `perdure.jax`; `import jax` still means the framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perdure.checkpoint import PerRank
from perdure.distribute import (
    AutoShardPolicy,
    InputContext,
    ReduceOp,
    compute_average_loss,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    metrics,
    scale_regularization_loss,
)
from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.distribute.strategy import Strategy
from perdure.errors import needs_extra
from perdure.runtime.process_group import SingleProcess
from perdure.tensorflow_names import missing, names_forms

with needs_extra("jax"):
    from perdure.distribute.jax import group
    from perdure.distribute.jax.engine import Devices, JaxEngine
    from perdure.distribute.jax.xla_settings import pin

__all__ = [
    "AutoShardPolicy",
    "InputContext",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PerRank",
    "ReduceOp",
    "compute_average_loss",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "metrics",
    "scale_regularization_loss",
]


class MirroredStrategy(Strategy):
    """The local devices of one process; each holds the whole state.

    Args:
        devices: All (None), the first n (a number), or a list; also names such as "/gpu:0".
        replicas: V, the number of logical replicas; by default the number of devices.
        seed: 0 to 2**63 - 1.
        threads: The size of the CPU's thread pool, which is part of the recipe; by default PJRT_NPROC,
            or 8.

    Raises:
        TopologyError: The devices do not exist, or `threads` contradicts a pool that is fixed already.
    """

    @names_forms("Strategy")
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

    @names_forms("Strategy")
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

    The group is, in this order: the one that the program has already initialized in the framework, that
    of `cluster_resolver`, or the one that the environment describes (docs/CLUSTER.md). A step raises
    WorkerLostError when another process dies: save nothing, leave with os._exit, and restart the group.

    Args:
        cluster_resolver: The group, or the name of a source ("slurm").
        local_device_ids: The accelerators that JAX gives to this process.
        options: Time limits.

    The other arguments are those of `MirroredStrategy`; `devices` are the local ones.

    Raises:
        ClusterError: A process does not come or comes twice, or descriptions contradict each other.
        RecipeMismatchError: The processes have different recipes.
    """

    @names_forms("Strategy")
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
        processes = group.join(cluster, options, local_device_ids)
        super().__init__(JaxEngine(devices, processes, pool), replicas, seed=seed)
        self.cluster_resolver = cluster


if not TYPE_CHECKING:  # a type checker reports such names itself

    def __getattr__(name: str) -> Any:
        raise missing("perdure.jax", name)
