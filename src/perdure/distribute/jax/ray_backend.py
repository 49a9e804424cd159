"""The workers of Ray Train as one group of JAX processes, a new one for each attempt of Ray.

Ray's own `JaxConfig` joins workers only if they have TPUs or GPUs: CPU workers would run alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from ray.train.backend import Backend, BackendConfig

from perdure.distribute.cluster import Cluster, ClusterOptions
from perdure.distribute.cluster.sources import ADDRESS, COUNT, INDEX, join_address
from perdure.errors import ClusterError
from perdure.runtime.ports import free_ports

# Without Ray, type checkers would take perdure.plugins.ray for it.
ray: Any = importlib.import_module("ray")

logger = logging.getLogger(__name__)


@dataclass
class JaxConfig(BackendConfig):
    """Workers that are one group of JAX processes: rank r of Ray is process r of P.

    Before the training function is called, each worker has JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
    and JAX_PROCESS_ID in its environment, all workers have come, and `jax.distributed` is initialized;
    a `MultiWorkerMirroredStrategy()` joins that group. JAX_PLATFORMS, if it is not set, becomes
    "cuda,cpu" for a worker to which Ray gave a GPU, and "cpu" for the others.

    Args:
        start_timeout: Seconds for all workers to come.
        heartbeat: Seconds of silence before a worker counts as dead.

    Raises:
        ClusterError: In the workers, if one of them does not come, or has a GPU and no JAX for it.
    """

    start_timeout: float = ClusterOptions.start_timeout
    heartbeat: float = ClusterOptions.heartbeat

    def __post_init__(self) -> None:
        ClusterOptions(self.start_timeout, self.heartbeat)  # refuses limits that are none

    @property
    def backend_cls(self) -> type[Backend]:
        return _JaxBackend

    def to_dict(self) -> dict[str, Any]:
        return {"start_timeout": self.start_timeout, "heartbeat": self.heartbeat}


class _JaxBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        coordinator = worker_group.execute_single(0, _free_address)
        count = len(worker_group)
        ray.get(
            [
                worker_group.execute_single_async(
                    index, _join, Cluster(coordinator, count, index, source="Ray"), backend_config
                )
                for index in range(count)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """After the last step, or when a worker is gone, and the others cannot leave in order."""
        leaving = worker_group.execute_async(_leave)
        done, late = ray.wait(
            leaving, num_returns=len(leaving), timeout=ClusterOptions.leave_timeout
        )
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                logger.info("a worker did not leave the group of JAX in order: %s", error)
        if late:
            logger.info("%d workers did not leave the group of JAX in time", len(late))


def prepare(cluster: Cluster, gpus: int, environ: MutableMapping[str, str], plugin: bool) -> None:
    """Set the variables for a worker with this number of GPUs, before it imports JAX.

    Raises ClusterError for a worker with a GPU that JAX, without a `plugin`, would leave unused.
    """
    platforms = environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if gpus else "cpu")
    if gpus and not plugin and platforms != "cpu":
        raise ClusterError(
            f"Ray gave worker {cluster.process_id} {gpus} GPU(s), and the JAX that is installed there "
            'knows the CPU alone; install the one for your GPU (pip install "jax[cuda12]"), or set '
            "JAX_PLATFORMS=cpu"
        )
    environ[ADDRESS] = cluster.coordinator or ""
    environ[COUNT] = str(cluster.num_processes)
    environ[INDEX] = str(cluster.process_id)


def _free_address() -> str:
    """An address for this worker to listen at: its node's, and a port that was free a moment ago."""
    host = ray.util.get_node_ip_address()
    (port,) = free_ports(1, "::" if ":" in host else "")
    return join_address(host, str(port))


def _join(cluster: Cluster, config: JaxConfig) -> None:
    # Ray gives a worker its GPUs by CUDA_VISIBLE_DEVICES; what JAX sees is all its own.
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    plugin = importlib.util.find_spec("jax_plugins") is not None
    prepare(cluster, len(gpus), os.environ, plugin)
    from perdure.distribute.jax import group, xla_settings

    # What JAX reads once, before the loop can use it; a strategy finds it set.
    xla_settings.pin()
    xla_settings.ask_for_determinism()
    group.join(cluster, options=ClusterOptions(config.start_timeout, config.heartbeat))


def _leave() -> None:
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
