"""Cluster resolvers: every source, their order, and every malformed description."""

from __future__ import annotations

import json
from typing import Any

import pytest

from messages import unnamed
from perdure.distribute import (
    Cluster,
    ClusterOptions,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from perdure.distribute.cluster.sources import expand_hosts, from_kubernetes
from perdure.errors import ClusterError

WORKERS = ["a:1", "b:2", "c:3"]
JAX = {
    "JAX_COORDINATOR_ADDRESS": "j:5",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
TORCHRUN = {"MASTER_ADDR": "t", "MASTER_PORT": "6", "RANK": "1", "WORLD_SIZE": "2"}


SLURM = {
    "SLURM_JOB_ID": "8193",
    "SLURM_STEP_NODELIST": "node[09-10],login",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NTASKS": "9",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
}
POD = {"JOB_COMPLETION_INDEX": "1", "JAX_NUM_PROCESSES": "3", "HOSTNAME": "train-1"}


def tf_config(cluster: Any, task: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_tf_config_without_a_chief() -> None:
    cluster = resolve(environ=tf_config({"worker": WORKERS}, {"type": "worker", "index": 1}))
    assert (cluster.coordinator, cluster.num_processes, cluster.process_id) == ("a:1", 3, 1)
    assert cluster.addresses == ("a:1", "b:2", "c:3")
    assert not cluster.is_chief
    first = resolve(environ=tf_config({"worker": WORKERS}, {"type": "worker", "index": "0"}))
    assert first.is_chief
    assert first.host_port == ("a", 1)


def test_tf_config_with_a_chief_numbers_it_first() -> None:
    cluster = {"chief": ["z:9"], "worker": WORKERS}
    chief = resolve(environ=tf_config(cluster, {"type": "chief", "index": 0}))
    worker = resolve(environ=tf_config(cluster, {"type": "worker", "index": 0}))
    assert (chief.coordinator, chief.process_id, chief.num_processes) == ("z:9", 0, 4)
    assert (worker.coordinator, worker.process_id) == ("z:9", 1)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ({"worker": ["a:1", "b:1"]}, [("worker", 0), ("worker", 1)]),
        (
            {"chief": ["c:1"], "worker": ["a:1", "b:1"]},
            [("chief", 0), ("worker", 0), ("worker", 1)],
        ),
        ({"chief": ["c:1"]}, [("chief", 0)]),
    ],
)
def test_task_type_and_task_id_are_those_of_tensorflow(
    jobs: dict[str, list[str]], expected: list[tuple[str, int]]
) -> None:
    for number, (kind, index) in enumerate(expected):
        config = {"cluster": jobs, "task": {"type": kind, "index": index}}
        resolver = TFConfigClusterResolver({"TF_CONFIG": json.dumps(config)})
        assert (resolver.task_type, resolver.task_id) == (kind, index)
        cluster = resolver.cluster()
        assert (cluster.task_type, cluster.task_id) == (kind, index)
        assert cluster.process_id == number


def test_task_type_and_task_id_come_from_the_environment() -> None:
    simple = SimpleClusterResolver("a:1", 3, 2)
    assert (simple.task_type, simple.task_id) == ("worker", 2)
    for alone in (TFConfigClusterResolver({}), Cluster(None, 1, 0)):
        assert (alone.task_type, alone.task_id) == (None, None)


def test_the_innermost_description_wins() -> None:
    tf = tf_config({"worker": WORKERS}, {"type": "worker", "index": 2})
    jax = {**JAX, "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
    torchrun = {**TORCHRUN, "RANK": "2", "WORLD_SIZE": "3"}
    everything = {**tf, **jax, **torchrun, **SLURM, **OPEN_MPI}
    assert resolve(SimpleClusterResolver("e:7", 2, 1), everything).coordinator == "e:7"
    assert resolve(Cluster("e:7", 2, 1), everything).coordinator == "e:7"
    assert resolve(environ=everything).coordinator == "a:1"
    assert resolve(environ={**jax, **torchrun}) == Cluster("j:5", 3, 2, source="JAX_* variables")
    assert resolve(environ=TORCHRUN) == Cluster("t:6", 2, 1, source="torchrun's variables")
    assert resolve(environ={**TORCHRUN, "MASTER_ADDR": "::1"}).host_port == ("::1", 6)
    # torchrun's agent listens on MASTER_PORT itself.
    agent = {**TORCHRUN, "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert resolve(environ=agent).coordinator == "t:62269"
    # mpirun inside a job of Slurm, torchrun inside that: the innermost counts.
    assert resolve(environ={**SLURM, **OPEN_MPI}).source == "Open MPI"
    assert resolve(environ={**SLURM, **TORCHRUN}).source == "torchrun's variables"


def test_two_launchers_that_contradict_each_other_are_refused() -> None:
    both = {**JAX, **TORCHRUN}
    with pytest.raises(ClusterError) as error:
        resolve(environ=both)
    assert not unnamed(error.value, "process 3 of 4", "process 1 of 2", "PERDURE_CLUSTER=")
    for conflict in (
        resolve("torchrun", both),
        resolve(None, {**both, "PERDURE_CLUSTER": "torchrun"}),
    ):
        assert conflict == Cluster("t:6", 2, 1, source="torchrun's variables")
    assert resolve("jax", {**both, "PERDURE_CLUSTER": "torchrun"}).num_processes == 4
    with pytest.raises(ClusterError) as error:
        resolve("pbs", {})
    assert not unnamed(error.value, "tf_config, jax, torchrun, openmpi, slurm, kubernetes")
    with pytest.raises(ClusterError) as error:
        resolve(environ={"PERDURE_CLUSTER": "slurm"})
    assert not unnamed(error.value, "PERDURE_CLUSTER", "slurm")


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}])
def test_without_a_description_the_group_has_one_process(environ: dict[str, str]) -> None:
    cluster = resolve(environ=environ)
    assert (cluster.num_processes, cluster.process_id, cluster.is_chief) == (1, 0, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{not json", ["TF_CONFIG is not JSON", "{not json"]),
        ("[1]", ["expected a JSON object"]),
        ('{"task": {"type": "worker", "index": 0}}', ['has "task" and no "cluster"']),
        ('{"cluster": {"worker": ["a:1"]}}', ['"task" must be an object', "None"]),
        ('{"cluster": ["a:1"], "task": {}}', ['"cluster" must be an object']),
        ('{"cluster": {"worker": "a:1"}, "task": {}}', ['"worker" must be a list']),
    ],
)
def test_malformed_tf_config_is_refused(text: str, says: list[str]) -> None:
    with pytest.raises(ClusterError) as error:
        TFConfigClusterResolver({"TF_CONFIG": text}).cluster()
    assert all(part in str(error.value) for part in says), str(error.value)


@pytest.mark.parametrize(
    ("cluster", "task", "says"),
    [
        ({"worker": WORKERS}, ("worker", 3), "task index 3 is out of range: the cluster has 3"),
        ({"worker": WORKERS}, ("worker", -1), "task index -1 is out of range"),
        ({"worker": WORKERS}, ("worker", "x"), "expected an integer, found 'x'"),
        ({"worker": WORKERS}, ("chief", 0), 'type "chief" is not in the cluster'),
        (
            {"worker": WORKERS},
            ("evaluator", 0),
            "it reads the run directory. Start it without TF_CONFIG",
        ),
        ({"worker": ["a:1", "a:1"]}, ("worker", 0), "a:1 occurs more than once"),
        ({"chief": ["a:1"], "worker": ["a:1"]}, ("worker", 0), "a:1 occurs more than once"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "at most one chief"),
        ({"worker": ["a:1"], "ps": ["p:1"]}, ("worker", 0), "in the order in which they come"),
        ({"worker": ["a:1"], "gpu": ["p:1"]}, ("worker", 0), 'expected only "chief" and "worker"'),
        ({"worker": []}, ("worker", 0), 'has "task" and no "cluster"'),
        ({"worker": ["a"]}, ("worker", 0), "host:port, found 'a'"),
        ({"worker": ["a:99999"]}, ("worker", 0), "host:port, found 'a:99999'"),
    ],
)
def test_contradictions_in_tf_config_are_refused(cluster: Any, task: Any, says: str) -> None:
    environ = tf_config(cluster, {"type": task[0], "index": task[1]})
    with pytest.raises(ClusterError) as error:
        resolve(environ=environ)
    assert "TF_CONFIG" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("variables", [JAX, TORCHRUN])
def test_an_incomplete_description_is_refused(variables: dict[str, str]) -> None:
    for name in variables:
        rest = {key: value for key, value in variables.items() if key != name}
        with pytest.raises(ClusterError) as error:
            resolve(environ=rest)
        assert f"lacks {name}" in str(error.value)
    with pytest.raises(ClusterError) as error:
        resolve(environ={**TORCHRUN, "RANK": "one"})
    assert "RANK: expected an integer, found 'one'" in str(error.value)


def test_explicit_arguments_are_checked() -> None:
    for arguments in [("a:1", 2, 2), ("a:1", 0, 0), (None, 2, 0), ("nowhere", 2, 0)]:
        with pytest.raises(ClusterError) as error:
            SimpleClusterResolver(*arguments)
        assert str(error.value).startswith("arguments")
    with pytest.raises(ClusterError):
        _ = Cluster(None, 1, 0).host_port


def test_slurm_describes_the_group() -> None:
    cluster = resolve(environ=SLURM)
    assert cluster == Cluster("node09:61441", 3, 2, ("node09", "node10", "login"), "Slurm")
    assert cluster.name(2) == "process 2 (login)"
    # Two tasks to a host: nothing says on which host a task is.
    six = {**SLURM, "SLURM_STEP_NUM_TASKS": "6"}
    assert resolve(environ=six) == Cluster("node09:61441", 6, 2, (), "Slurm")
    older = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NUM_TASKS"}
    assert resolve(environ=older).num_processes == 9
    assert resolve(environ={**SLURM, "JAX_COORDINATOR_PORT": "7"}).coordinator == "node09:7"
    # A batch script is one process, whatever the job asks for; so is a step of one task.
    batch = {key: value for key, value in SLURM.items() if "STEP" not in key}
    assert resolve(environ=batch).source == "the environment"
    one = {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert resolve(environ=one) == Cluster(None, 1, 0, source="Slurm")
    for name in ("SLURM_JOB_ID", "SLURM_PROCID"):
        with pytest.raises(ClusterError) as error:
            resolve(environ={key: value for key, value in SLURM.items() if key != name})
        assert f"Slurm: the environment lacks {name}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", "node7"),
        ("a,b", "a b"),
        ("node[01-03,7]", "node01 node02 node03 node7"),
        ("node[098-101],login", "node098 node099 node100 node101 login"),
        ("r[1-2]n[3,5]-ib", "r1n3-ib r1n5-ib r2n3-ib r2n5-ib"),
        ("gpu-a[1],gpu-b", "gpu-a1 gpu-b"),
    ],
)
def test_slurm_node_lists_are_expanded(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    "text", ["", "a,", "node[1-", "node[3-1]", "node[]", "n[x]", "n]1", "n[0-999999]"]
)
def test_malformed_slurm_node_lists_are_refused(text: str) -> None:
    with pytest.raises(ClusterError) as error:
        expand_hosts(text)
    assert "Slurm: expected a" in str(error.value)
    assert repr(text) in str(error.value)


def test_open_mpi_describes_the_group() -> None:
    # 61440 + 1531576320 / 4096 % 4096
    assert resolve(environ=OPEN_MPI) == Cluster("10.96.0.1:62624", 2, 1, source="Open MPI")
    six = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"
    cluster = resolve(environ={**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": six})
    assert cluster.host_port == ("fe80::b9b:ac5d:9cf0:b858", 62880)
    newer = {key: value for key, value in OPEN_MPI.items() if "hnp" not in key}
    with pytest.raises(ClusterError) as error:
        resolve(environ=newer)
    assert (
        "found no OMPI_MCA_orte_hnp_uri. Name the coordinator: mpirun -x MASTER_ADDR=HOST"
        in str(error.value)
    )
    stated = {**newer, "MASTER_ADDR": "m", "MASTER_PORT": "8"}
    assert resolve(environ=stated) == Cluster("m:8", 2, 1, source="Open MPI")
    with pytest.raises(ClusterError) as error:
        resolve(environ={"OMPI_COMM_WORLD_RANK": "0"})
    assert "lacks OMPI_COMM_WORLD_SIZE" in str(error.value)


def test_an_indexed_job_describes_the_group() -> None:
    def pod(environ: dict[str, str], full_name: str = "train-1.pods.team.svc.cluster.local") -> Any:
        return from_kubernetes(environ, lambda: full_name)

    hosts = tuple(f"train-{n}.pods.team.svc.cluster.local" for n in range(3))
    assert pod(POD) == Cluster(f"{hosts[0]}:55527", 3, 1, hosts, "Kubernetes")
    jobset = pod({**POD, "JOBSET_NAME": "run"}, "run-workers-0-1")
    assert jobset.coordinator == "run-workers-0-0.run:55527"
    with pytest.raises(ClusterError) as error:
        pod(POD, "train-1")
    assert "expected a host called JOB-1.SERVICE, found 'train-1'" in str(error.value)
    assert "set `subdomain`" in str(error.value)
    # The pod's own variables come first; only the index comes from the Job.
    stated = {**POD, "JAX_COORDINATOR_ADDRESS": "train-0.pods:9"}
    assert resolve(environ=stated).coordinator == "train-0.pods:9"
    torch = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "m", "MASTER_PORT": "8"}
    assert resolve(environ=torch).coordinator == "m:8"
    with pytest.raises(ClusterError) as error:
        resolve(environ={"JOB_COMPLETION_INDEX": "1"})
    assert "pods is missing. Set JAX_NUM_PROCESSES" in str(error.value)


JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JAX_NUM_PROCESSES": "4",
    "JOBSET_NAME": "run",
    "JOBSET_REPLICATEDJOB_NAME": "workers",
    "JOBSET_REPLICATEDJOB_REPLICAS": "2",
    "JOBSET_JOB_INDEX": "1",
}


def test_a_jobset_describes_the_group() -> None:
    def pod(full_name: str = "node7", **changes: str | None) -> Cluster | None:
        environ = {**JOBSET, **changes}
        return from_kubernetes({k: v for k, v in environ.items() if v}, lambda: full_name)

    # The labels are enough. On the host's network the host name is of no use.
    hosts = tuple(f"run-workers-{job}-{pod}.run" for job in (0, 1) for pod in (0, 1))
    assert pod() == Cluster("run-workers-0-0.run:55527", 4, 3, hosts, "Kubernetes")
    inside = pod(JOBSET_SUBDOMAIN="net")
    assert inside is not None
    assert inside.coordinator == "run-workers-0-0.net:55527"
    # Without the name of the Jobs, the host name is used.
    named = pod("run-workers-1-1.run.team.svc.cluster.local", JOBSET_REPLICATEDJOB_NAME=None)
    assert named is not None
    assert named.process_id == 3
    assert named.coordinator == "run-workers-0-0.run.team.svc.cluster.local:55527"
    # One Job, the usual case.
    one = {"JOBSET_REPLICATEDJOB_REPLICAS": "1", "JOBSET_JOB_INDEX": "0"}
    single = tuple(f"run-workers-0-{pod}.run" for pod in range(4))
    assert pod(**one) == Cluster("run-workers-0-0.run:55527", 4, 1, single, "Kubernetes")
    assert pod(JOBSET_REPLICATEDJOB_REPLICAS=None, JOBSET_JOB_INDEX=None) == pod(**one)
    # A subdomain of the network counts before the name of the JobSet.
    unnamed = {**JOBSET, "JOBSET_REPLICATEDJOB_NAME": "", **one}
    custom = from_kubernetes(unnamed, lambda: "run-workers-0-1.net.team.svc")
    assert custom is not None
    assert custom.coordinator == "run-workers-0-0.net.team.svc:55527"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"JOBSET_JOB_INDEX": None}, "Kubernetes: the environment lacks JOBSET_JOB_INDEX"),
        ({"JOBSET_JOB_INDEX": "2"}, "JAX_NUM_PROCESSES=4 for pod 1 of Job 2 of 2"),
        (
            {"JAX_NUM_PROCESSES": "3"},
            "expected JAX_NUM_PROCESSES to be the Jobs of the JobSet times",
        ),
        ({"JOB_COMPLETION_INDEX": "2"}, "JAX_NUM_PROCESSES=4 for pod 2 of Job 1 of 2"),
        ({"JOBSET_REPLICATEDJOB_REPLICAS": "two"}, "expected an integer, found 'two'"),
        (
            {"JOBSET_REPLICATEDJOB_REPLICAS": None, "JOBSET_JOB_INDEX": None},
            "run-workers-1-1 is in Job 1 of the JobSet run, and each of its Jobs counts its pods",
        ),
    ],
)
def test_jobs_of_a_jobset_that_do_not_add_up_are_refused(
    changes: dict[str, str | None], says: str
) -> None:
    environ = {k: v for k, v in {**JOBSET, **changes}.items() if v}
    with pytest.raises(ClusterError) as error:
        from_kubernetes(environ, lambda: "run-workers-1-1.run.team.svc.cluster.local")
    assert says in str(error.value)


def test_a_scheduler_that_contradicts_the_environment_is_refused() -> None:
    with pytest.raises(ClusterError) as error:
        resolve(environ={**SLURM, "WORLD_SIZE": "4"})
    assert "Slurm contradicts the environment: SLURM_STEP_NUM_TASKS is 3, WORLD_SIZE is 4" in str(
        error.value
    )
    with pytest.raises(ClusterError) as error:
        resolve(environ={**SLURM, "SLURM_PROCID": "3"})
    assert "Slurm: process index 3 is out of range" in str(error.value)


def test_cluster_options_come_from_the_environment() -> None:
    assert ClusterOptions() == ClusterOptions.from_environment({})
    environ = {"PERDURE_START_TIMEOUT": "20", "PERDURE_HEARTBEAT": "4.5"}
    assert ClusterOptions.from_environment(environ) == ClusterOptions(20, 4.5)
    for environ, says in [
        ({"PERDURE_HEARTBEAT": "soon"}, "PERDURE_HEARTBEAT: expected seconds, found 'soon'"),
        (
            {"PERDURE_START_TIMEOUT": "-1"},
            "PERDURE_START_TIMEOUT: expected seconds above 0, found -1",
        ),
    ]:
        with pytest.raises(ClusterError) as error:
            ClusterOptions.from_environment(environ)
        assert says in str(error.value)
    with pytest.raises(ClusterError) as error:
        ClusterOptions(operation_timeout=float("inf"))
    assert "operation_timeout: expected seconds above 0, found inf" in str(error.value)
