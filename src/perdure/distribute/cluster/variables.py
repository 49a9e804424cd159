"""Descriptions that a launcher or a person wrote into the environment: JAX's and torchrun's variables.

Either set of variables is complete, or a ClusterError names the missing ones. Only the number of the
process may be left to the scheduler, which then uses the other variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from perdure.distribute.cluster.cluster_spec import Cluster, integer
from perdure.errors import ClusterError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HOST, PORT, RANK, SIZE = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"
AGENT = "TORCHELASTIC_USE_AGENT_STORE"

# Variables of schedulers, which also set the number of a process.
SCHEDULED = ("OMPI_COMM_WORLD_RANK", "SLURM_STEP_NODELIST", "JOB_COMPLETION_INDEX")


def from_jax(environ: Mapping[str, str]) -> Cluster | None:
    """JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""
    if not _complete((ADDRESS, COUNT, INDEX), INDEX, environ):
        return None
    return Cluster(
        environ[ADDRESS],
        integer(COUNT, environ[COUNT]),
        integer(INDEX, environ[INDEX]),
        source="JAX_* variables",
    )


def from_torchrun(environ: Mapping[str, str]) -> Cluster | None:
    """MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; another port if torchrun itself uses that one."""
    if not _complete((HOST, PORT, RANK, SIZE), RANK, environ):
        return None
    port = integer(PORT, environ[PORT])
    if environ.get(AGENT) == "True":
        # torchrun itself listens on that port, in the agent on the first host.
        port = 61440 + (port + 1) % 4096
    return Cluster(
        join_address(environ[HOST], str(port)),
        integer(SIZE, environ[SIZE]),
        integer(RANK, environ[RANK]),
        source="torchrun's variables",
    )


def stated_coordinator(environ: Mapping[str, str]) -> str | None:
    """The coordinator that the environment names, whatever the launcher."""
    if environ.get(ADDRESS):
        return environ[ADDRESS]
    if environ.get(HOST) and environ.get(PORT):
        return join_address(environ[HOST], environ[PORT])
    return None


def stated_count(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """(variable, number of processes) that the environment names, whatever the launcher."""
    for name in (COUNT, SIZE):
        if environ.get(name):
            return name, integer(name, environ[name])
    return None


def join_address(host: str, port: str) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _complete(names: tuple[str, ...], index: str, environ: Mapping[str, str]) -> bool:
    missing = [name for name in names if name not in environ]
    if len(missing) == len(names):
        return False
    if index in missing and any(name in environ for name in SCHEDULED):
        return False
    if missing:
        present = [f"{name}={environ[name]}" for name in names if name in environ]
        raise ClusterError(
            f"the environment has {', '.join(present)} and lacks {', '.join(missing)}; set all of "
            "them or none"
        )
    return True
