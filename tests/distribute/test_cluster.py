"""Who belongs to the group: every source, its order, and every way to get it wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure.distribute import (
    Cluster,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    resolve,
)
from perdure.errors import ClusterError

WORKERS = ["a:1", "b:2", "c:3"]
JAX = {
    "JAX_COORDINATOR_ADDRESS": "j:5",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
TORCHRUN = {"MASTER_ADDR": "t", "MASTER_PORT": "6", "RANK": "1", "WORLD_SIZE": "2"}


def tf_config(cluster: Any, task: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_workers_without_a_chief() -> None:
    found = resolve(environ=tf_config({"worker": WORKERS}, {"type": "worker", "index": 1}))
    assert (found.coordinator, found.num_processes, found.process_id) == ("a:1", 3, 1)
    assert found.addresses == ("a:1", "b:2", "c:3")
    assert not found.is_chief
    first = resolve(environ=tf_config({"worker": WORKERS}, {"type": "worker", "index": "0"}))
    assert first.is_chief
    assert first.host_port == ("a", 1)


def test_a_chief_comes_first() -> None:
    cluster = {"chief": ["z:9"], "worker": WORKERS}
    chief = resolve(environ=tf_config(cluster, {"type": "chief", "index": 0}))
    worker = resolve(environ=tf_config(cluster, {"type": "worker", "index": 0}))
    assert (chief.coordinator, chief.process_id, chief.num_processes) == ("z:9", 0, 4)
    assert (worker.coordinator, worker.process_id) == ("z:9", 1)


def test_order_of_the_sources() -> None:
    tf = tf_config({"worker": WORKERS}, {"type": "worker", "index": 2})
    everything = {**tf, **JAX, **TORCHRUN}
    assert resolve(SimpleClusterResolver("e:7", 2, 1), everything).coordinator == "e:7"
    assert resolve(Cluster("e:7", 2, 1), everything).coordinator == "e:7"
    assert resolve(environ=everything).coordinator == "a:1"
    assert resolve(environ={**JAX, **TORCHRUN}) == Cluster("j:5", 4, 3, source="JAX_* variables")
    assert resolve(environ=TORCHRUN) == Cluster("t:6", 2, 1, source="torchrun's variables")
    assert resolve(environ={**TORCHRUN, "MASTER_ADDR": "::1"}).host_port == ("::1", 6)


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}])
def test_nothing_described_is_a_group_of_one(environ: dict[str, str]) -> None:
    found = resolve(environ=environ)
    assert (found.num_processes, found.process_id, found.is_chief) == (1, 0, True)


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
def test_malformed_tf_config(text: str, says: list[str]) -> None:
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
        ({"worker": WORKERS}, ("evaluator", 0), 'type "evaluator" is not in the cluster'),
        ({"worker": ["a:1", "a:1"]}, ("worker", 0), "a:1 is there more than once"),
        ({"chief": ["a:1"], "worker": ["a:1"]}, ("worker", 0), "a:1 is there more than once"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "at most one chief"),
        ({"worker": ["a:1"], "ps": ["p:1"]}, ("worker", 0), 'tasks of type "ps"'),
        ({"worker": ["a"]}, ("worker", 0), "host:port, found 'a'"),
        ({"worker": ["a:99999"]}, ("worker", 0), "host:port, found 'a:99999'"),
    ],
)
def test_contradictions_in_tf_config(cluster: Any, task: Any, says: str) -> None:
    environ = tf_config(cluster, {"type": task[0], "index": task[1]})
    with pytest.raises(ClusterError) as error:
        resolve(environ=environ)
    assert "TF_CONFIG" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("variables", [JAX, TORCHRUN])
def test_half_a_description_is_never_a_group_of_one(variables: dict[str, str]) -> None:
    for name in variables:
        rest = {key: value for key, value in variables.items() if key != name}
        with pytest.raises(ClusterError) as error:
            resolve(environ=rest)
        assert f"lacks {name}" in str(error.value)
    with pytest.raises(ClusterError) as error:
        resolve(environ={**TORCHRUN, "RANK": "one"})
    assert "RANK: expected an integer, found 'one'" in str(error.value)


def test_explicit_arguments_are_checked_too() -> None:
    for arguments in [("a:1", 2, 2), ("a:1", 0, 0), (None, 2, 0), ("nowhere", 2, 0)]:
        with pytest.raises(ClusterError) as error:
            SimpleClusterResolver(*arguments)
        assert str(error.value).startswith("arguments")
    with pytest.raises(ClusterError):
        _ = Cluster(None, 1, 0).host_port
