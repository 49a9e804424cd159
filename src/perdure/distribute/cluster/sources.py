"""Finds the description of the group in the arguments and the environment.

Explicit arguments come first, then the variables of a launcher, then those of a scheduler. Two
launchers that contradict each other are an error. Of a scheduler the coordinator is a function of
the environment alone; one that a person has set comes before it.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Callable, Mapping

from perdure.distribute.cluster.cluster_spec import (
    Cluster,
    ClusterResolver,
    from_tf_config,
    integer,
)
from perdure.errors import ClusterError
from perdure.runtime.process_group import framework_group

# Names one of several sources, for a program that takes no argument.
SOURCE = "PERDURE_CLUSTER"

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HOST, PORT, RANK, SIZE = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"

# Variables of schedulers, which also set the number of a process.
_SCHEDULED = ("OMPI_COMM_WORLD_RANK", "SLURM_STEP_NODELIST", "JOB_COMPLETION_INDEX")

# Ports are derived as JAX does (jax.distributed): the last 4096 below 65536, by the number of the job;
# a constant on Kubernetes, where every pod has its own address.
_PORTS, _KUBERNETES_PORT = 4096, 55527

# Copied by the manifest from the labels of JobSet (examples/cluster/jobset.yaml).
_JOB_NAME = "JOBSET_REPLICATEDJOB_NAME"
_JOBS, _JOB_INDEX = "JOBSET_REPLICATEDJOB_REPLICAS", "JOBSET_JOB_INDEX"

# A limit, for a Slurm node list with a typing error or a huge range.
_MOST_HOSTS = 100_000

# In place of an address that the framework does not have: nothing connects to it again.
_JOINED = "joined:1"


def resolve(
    resolver: ClusterResolver | str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Cluster:
    """The group to join: that of `resolver`, else the one in the environment, else a group of one.

    Args:
        resolver: A resolver, or the name of a source (see SOURCES), as in PERDURE_CLUSTER.
        environ: The environment; by default that of this process.

    Raises:
        ClusterError: A description is incomplete, malformed, or contradicts another one.
    """
    if resolver is not None and not isinstance(resolver, str):
        if not callable(getattr(resolver, "cluster", None)):
            raise ClusterError(
                f"cluster_resolver: expected a ClusterResolver, the name of a source or None, found "
                f"{resolver!r}"
            )
        return resolver.cluster()
    environ = os.environ if environ is None else environ
    if name := resolver or environ.get(SOURCE):
        where = "cluster_resolver" if resolver else SOURCE
        if name not in SOURCES:
            raise ClusterError(f"{where}: expected one of {', '.join(SOURCES)}, found {name!r}")
        if (cluster := SOURCES[name](environ)) is None:
            raise ClusterError(f"{where} names {name}, and the environment has nothing of it")
        return cluster
    clusters = [c for name in _LAUNCHERS if (c := SOURCES[name](environ)) is not None]
    for other in clusters[1:]:
        _require_equal(clusters[0], other)
    # A launcher may run inside a scheduler's job, with more processes than the job has tasks.
    for name in SOURCES if not clusters else ():
        if (cluster := SOURCES[name](environ)) is not None:
            return cluster
    return clusters[0] if clusters else Cluster(None, 1, 0, source="the environment")


def resolve_for(
    engine: str,
    resolver: ClusterResolver | str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Cluster:
    """`resolve`, or the group that the program has already initialized in the framework.

    An incomplete environment is then no error: MASTER_ADDR and MASTER_PORT, with the rank as an
    argument, are a usual way to call `init_process_group`.
    """
    environ = os.environ if environ is None else environ
    try:
        cluster = resolve(resolver, environ)
    except ClusterError:
        if resolver is not None or environ.get(SOURCE) or framework_group(engine) is None:
            raise
        cluster = Cluster(None, 1, 0, source="the environment")
    return with_existing(cluster, engine)


def with_existing(cluster: Cluster, engine: str) -> Cluster:
    """`cluster`, or the framework's group if `cluster` describes one process without an argument.

    Raises ClusterError if both describe several processes and contradict each other.
    """
    existing = framework_group(engine)
    if existing is None or (existing.count == 1 and cluster.num_processes == 1):
        return cluster
    if cluster.num_processes == 1 and cluster.source != "arguments":
        address = existing.address or _JOINED
        return Cluster(address, existing.count, existing.index, source=existing.source)
    if (cluster.process_id, cluster.num_processes) != (existing.index, existing.count):
        raise ClusterError(
            f"{existing.source} is initialized as process {existing.index} of {existing.count}; "
            f"{cluster.source} says {cluster.process_id} of {cluster.num_processes}. Unset the wrong "
            f"one"
        )
    return cluster


def _require_equal(one: Cluster, other: Cluster) -> None:
    """Ports may differ, as TensorFlow's and JAX's services do."""
    numbers = [(c.process_id, c.num_processes) for c in (one, other)]
    if numbers[0] != numbers[1]:
        raise ClusterError(
            f"two descriptions of the group contradict each other: {one.source} says process "
            f"{numbers[0][0]} of {numbers[0][1]}, {other.source} says process {numbers[1][0]} of "
            f"{numbers[1][1]}. Unset the wrong one, or name the right one: {SOURCE}="
            f"{'|'.join(_LAUNCHERS)}"
        )


# ---------------------------------------------------------------- launchers


def from_jax(environ: Mapping[str, str]) -> Cluster | None:
    """JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""
    if not _is_complete((ADDRESS, COUNT, INDEX), INDEX, environ):
        return None
    count, index = (integer(name, environ[name]) for name in (COUNT, INDEX))
    return Cluster(environ[ADDRESS], count, index, source="JAX_* variables")


def from_torchrun(environ: Mapping[str, str]) -> Cluster | None:
    """MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; another port if torchrun itself uses that one."""
    if not _is_complete((HOST, PORT, RANK, SIZE), RANK, environ):
        return None
    port, count, index = (integer(name, environ[name]) for name in (PORT, SIZE, RANK))
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens on that port, in the agent on the first host.
        port = 61440 + (port + 1) % 4096
    address = join_address(environ[HOST], str(port))
    return Cluster(address, count, index, source="torchrun's variables")


def _is_complete(names: tuple[str, ...], index: str, environ: Mapping[str, str]) -> bool:
    """False if the variables are not there, or only `index`, which a scheduler sets too."""
    missing = [name for name in names if name not in environ]
    if len(missing) == len(names):
        return False
    if index in missing and any(name in environ for name in _SCHEDULED):
        return False
    if missing:
        present = [f"{name}={environ[name]}" for name in names if name in environ]
        raise ClusterError(
            f"the environment has {', '.join(present)} and lacks {', '.join(missing)}; set all of "
            "them or none"
        )
    return True


def join_address(host: str, port: str) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---------------------------------------------------------------- schedulers


def _stated_count(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """(variable, number of processes) that a person has set."""
    for name in (COUNT, SIZE):
        if environ.get(name):
            return name, integer(name, environ[name])
    return None


def _scheduled(
    environ: Mapping[str, str],
    source: str,
    count: tuple[str, int],
    index: int,
    derived: Callable[[], tuple[str, int]],
    addresses: tuple[str, ...] = (),
) -> Cluster:
    """The group of `count` = (variable, number); `derived` gives the coordinator if nothing else."""
    stated = _stated_count(environ)
    if stated is not None and stated[1] != count[1]:
        raise ClusterError(
            f"{source} contradicts the environment: {count[0]} is {count[1]}, {stated[0]} is "
            f"{stated[1]}; unset {stated[0]}, or set it to the number of processes"
        )
    if count[1] == 1:
        return Cluster(None, 1, index, source=source)
    if not (coordinator := environ.get(ADDRESS)):
        if environ.get(HOST) and environ.get(PORT):
            coordinator = join_address(environ[HOST], environ[PORT])
        else:
            host, port = derived()
            coordinator = join_address(host, environ.get("JAX_COORDINATOR_PORT") or str(port))
    return Cluster(coordinator, count[1], index, addresses, source)


def _integers(source: str, names: tuple[str, ...], environ: Mapping[str, str]) -> list[int]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise ClusterError(
            f"{source}: the environment lacks {', '.join(missing)}; a process that "
            "the scheduler started would have them"
        )
    return [integer(name, environ[name]) for name in names]


def _port(job: int) -> int:
    return 65536 - _PORTS + job % _PORTS


def from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """A process that `srun` started. None in a batch script itself."""
    if "SLURM_STEP_NODELIST" not in environ:
        return None
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    job, index, tasks = _integers("Slurm", ("SLURM_JOB_ID", "SLURM_PROCID", count), environ)
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    # With several tasks on a host, their hosts depend on --distribution.
    addresses = hosts if len(hosts) == tasks else ()
    return _scheduled(
        environ, "Slurm", (count, tasks), index, lambda: (hosts[0], _port(job)), addresses
    )


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list: `node[01-02,7],login` is node01, node02, node7, login."""
    hosts: list[str] = []
    # Commas inside brackets are not between names.
    for name in re.split(r",(?![^\[\]]*\])", text):
        parts = re.split(r"\[([^\[\]]*)\]", name)
        # Text and ranges in turn; several brackets multiply.
        choices = [
            _numbers(part, text) if number % 2 else [part] for number, part in enumerate(parts)
        ]
        hosts += ("".join(choice) for choice in itertools.product(*choices))
        if not name or any(mark in part for part in parts[::2] for mark in "[]"):
            raise ClusterError(
                f"Slurm: expected a list of hosts like node[01-03,7], found {text!r}"
            )
    return tuple(hosts)


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first or last - first >= _MOST_HOSTS:
            raise ClusterError(
                f"Slurm: expected a range of hosts like 01-03 in {text!r}, found {part!r}"
            )
        numbers += (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return numbers


def from_open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    """A process that Open MPI's `mpirun` started."""
    names = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    if names[1] not in environ:
        return None
    count, index = _integers("Open MPI", names, environ)

    def coordinator() -> tuple[str, int]:
        uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
        job = re.match(r"(\d+)\.", uri)
        host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
        if job and host:
            # Numbers of jobs are multiples of 4096.
            return host[1] or host[2], _port(int(job[1]) // _PORTS)
        actual = f"OMPI_MCA_orte_hnp_uri={uri!r}" if uri else "no OMPI_MCA_orte_hnp_uri"
        raise ClusterError(
            f"Open MPI: expected the address of mpirun in OMPI_MCA_orte_hnp_uri (releases up to 4 "
            f"set it), found {actual}. Name the coordinator: mpirun -x MASTER_ADDR=HOST -x "
            "MASTER_PORT=PORT, with the host on which rank 0 runs"
        )

    return _scheduled(environ, "Open MPI", (names[0], count), index, coordinator)


def from_kubernetes(
    environ: Mapping[str, str], full_name: Callable[[], str] = socket.getfqdn
) -> Cluster | None:
    """A pod of an indexed Job, or of a JobSet, whose processes are counted through its Jobs."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    index = integer("JOB_COMPLETION_INDEX", environ["JOB_COMPLETION_INDEX"])
    count = _stated_count(environ)
    if count is None:
        raise ClusterError(
            f"Kubernetes: JOB_COMPLETION_INDEX={index} marks a pod of an indexed Job, and the number "
            f"of its pods is missing. Set {COUNT} in the pod's env to the Job's completions"
        )
    name, _, domain = full_name().partition(".")
    jobs, job = _jobs(environ, name, index, count)
    pods = count[1] // jobs
    # Without a name of the Jobs in the environment, that of this host is used.
    suffix = f"-{job}-{index}" if jobs > 1 else f"-{index}"
    domain = environ.get("JOBSET_SUBDOMAIN") or domain or environ.get("JOBSET_NAME", "")
    base = name.removesuffix(suffix) if name.endswith(suffix) else ""
    if environ.get("JOBSET_NAME") and environ.get(_JOB_NAME):
        # On the host's network the name of the host is not that of the pod.
        domain = environ.get("JOBSET_SUBDOMAIN") or environ["JOBSET_NAME"]
        base = f"{environ['JOBSET_NAME']}-{environ[_JOB_NAME]}" + ("" if jobs > 1 else f"-{job}")
    hosts: tuple[str, ...] = ()
    if base and domain:
        numbers = (f"{j}-{p}" if jobs > 1 else str(p) for j in range(jobs) for p in range(pods))
        hosts = tuple(f"{base}-{n}.{domain}" for n in itertools.islice(numbers, _MOST_HOSTS))

    def coordinator() -> tuple[str, int]:
        if not hosts:
            raise ClusterError(
                f"Kubernetes: expected a host called JOB-{index}.SERVICE, found {full_name()!r}: the "
                "pods of a Job find each other through a headless service. Make one, and set "
                "`subdomain` in the pod's spec to its name; or set JAX_COORDINATOR_ADDRESS"
            )
        return hosts[0], _KUBERNETES_PORT

    return _scheduled(environ, "Kubernetes", count, job * pods + index, coordinator, hosts)


def _jobs(
    environ: Mapping[str, str], name: str, index: int, count: tuple[str, int]
) -> tuple[int, int]:
    """How many Jobs the group has, and in which of them this pod is; (1, 0) without a JobSet."""
    jobset = environ.get("JOBSET_NAME", "")
    if _JOBS not in environ and _JOB_INDEX not in environ:
        match = re.fullmatch(rf"{re.escape(jobset)}-.+-(\d+)-{index}", name) if jobset else None
        if match and int(match[1]) > 0:
            raise ClusterError(
                f"Kubernetes: {name} is in Job {match[1]} of the JobSet {jobset}, and each of its Jobs "
                f"counts its pods from 0. Set {_JOBS} and {_JOB_INDEX} in the pod's env, from the "
                "labels jobset.sigs.k8s.io/replicatedjob-replicas and jobset.sigs.k8s.io/job-index"
            )
        return 1, 0
    jobs, job = _integers("Kubernetes", (_JOBS, _JOB_INDEX), environ)
    if not 0 <= job < jobs or count[1] % jobs or not 0 <= index < count[1] // jobs:
        raise ClusterError(
            f"Kubernetes: expected {count[0]} to be the Jobs of the JobSet times the completions of "
            f"each, found {count[0]}={count[1]} for pod {index} of Job {job} of {jobs}"
        )
    return jobs, job


# In the order in which they count: launchers, then schedulers.
SOURCES: dict[str, Callable[[Mapping[str, str]], Cluster | None]] = {
    "tf_config": from_tf_config,
    "jax": from_jax,
    "torchrun": from_torchrun,
    "openmpi": from_open_mpi,
    "slurm": from_slurm,
    "kubernetes": from_kubernetes,
}
_LAUNCHERS = ("tf_config", "jax", "torchrun")
