"""Descriptions that a scheduler puts into the environment: Open MPI, Slurm, Kubernetes.

The coordinator is a function of the environment alone, the same in every process, without a request
over the network. A coordinator (JAX_COORDINATOR_ADDRESS, or MASTER_ADDR and MASTER_PORT) or a number
of processes (JAX_NUM_PROCESSES, WORLD_SIZE) in the environment comes first, and must not contradict
the scheduler.

Ports are derived as JAX does (jax.distributed): the last 4096 below 65536, by the number of the job;
55527 on Kubernetes, where every pod has its own address.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Mapping

from perdure.distribute.cluster.cluster_spec import Cluster, integer
from perdure.distribute.cluster.variables import (
    COUNT,
    join_address,
    stated_coordinator,
    stated_count,
)
from perdure.errors import ClusterError

_PORTS = 4096
_KUBERNETES_PORT = 55527

# Copied by the manifest from the labels of JobSet (examples/cluster/jobset.yaml).
_JOB_NAME = "JOBSET_REPLICATEDJOB_NAME"
_JOBS = "JOBSET_REPLICATEDJOB_REPLICAS"
_JOB_INDEX = "JOBSET_JOB_INDEX"

# A limit, for a Slurm node list with a typing error or a huge range.
_MOST_HOSTS = 100_000


def from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """A process that `srun` started. None in a batch script itself."""
    if "SLURM_STEP_NODELIST" not in environ:
        return None
    count = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    values = _all_of("Slurm", ("SLURM_JOB_ID", "SLURM_PROCID", count), environ)
    job, index, tasks = (integer(name, text) for name, text in values.items())
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    return _cluster(
        environ,
        "Slurm",
        (count, tasks),
        index,
        lambda: (hosts[0], _port(job)),
        # With several tasks on a host, their hosts depend on --distribution.
        hosts if len(hosts) == tasks else (),
    )


def from_open_mpi(environ: Mapping[str, str]) -> Cluster | None:
    """A process that Open MPI's `mpirun` started."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    values = _all_of("Open MPI", ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), environ)
    count, index = (integer(name, text) for name, text in values.items())

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

    return _cluster(environ, "Open MPI", ("OMPI_COMM_WORLD_SIZE", count), index, coordinator)


def from_kubernetes(
    environ: Mapping[str, str], full_name: Callable[[], str] = socket.getfqdn
) -> Cluster | None:
    """A pod of an indexed Job, or of a JobSet of them. `full_name` gives this host's with domain.

    In a JobSet the processes are counted through its Jobs: the pods of Job 0, then those of Job 1.
    """
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    index = integer("JOB_COMPLETION_INDEX", environ["JOB_COMPLETION_INDEX"])
    count = stated_count(environ)
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

    return _cluster(environ, "Kubernetes", count, job * pods + index, coordinator, hosts)


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
    values = _all_of("Kubernetes", (_JOBS, _JOB_INDEX), environ)
    jobs, job = (integer(variable, text) for variable, text in values.items())
    if not 0 <= job < jobs or count[1] % jobs or not 0 <= index < count[1] // jobs:
        raise ClusterError(
            f"Kubernetes: expected {count[0]} to be the Jobs of the JobSet times the completions of "
            f"each, found {count[0]}={count[1]} for pod {index} of Job {job} of {jobs}"
        )
    return jobs, job


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a Slurm node list: `node[01-03,7],login` is node01, node02, node03, node7, login.

    Numbers keep the zeros in front of the first of a range. Raises ClusterError for another text.
    """
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


def _cluster(
    environ: Mapping[str, str],
    source: str,
    count: tuple[str, int],
    index: int,
    derived: Callable[[], tuple[str, int]],
    addresses: tuple[str, ...] = (),
) -> Cluster:
    """The group of `count` = (variable, number); `derived` gives the coordinator if nothing else."""
    stated = stated_count(environ)
    if stated is not None and stated[1] != count[1]:
        raise ClusterError(
            f"{source} contradicts the environment: {count[0]} is {count[1]}, {stated[0]} is "
            f"{stated[1]}; unset {stated[0]}, or set it to the number of processes"
        )
    if count[1] == 1:
        return Cluster(None, 1, index, source=source)
    coordinator = stated_coordinator(environ)
    if coordinator is None:
        host, port = derived()
        coordinator = join_address(host, environ.get("JAX_COORDINATOR_PORT") or str(port))
    return Cluster(coordinator, count[1], index, addresses, source)


def _all_of(source: str, names: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise ClusterError(
            f"{source}: the environment lacks {', '.join(missing)}; a process that "
            "the scheduler started would have them"
        )
    return {name: environ[name] for name in names}


def _port(job: int) -> int:
    return 65536 - _PORTS + job % _PORTS
