"""The group that TF_CONFIG describes, as TensorFlow's launchers write it.

See tf.distribute.cluster_resolver.TFConfigClusterResolver. The chief is process 0; without a chief,
worker 0 is. Tasks that cannot take part raise a ClusterError with the reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from perdure.distribute.cluster.cluster_spec import Cluster, Task, check_address, integer
from perdure.errors import ClusterError

NAME = "TF_CONFIG"

_REFUSED = {
    "ps": "a parameter server applies gradients in the order in which they come, so no two runs are "
    "alike; every worker holds the whole state here. Start workers only",
    "evaluator": "an evaluator is no part of the group: it reads the run directory. Start it without "
    "TF_CONFIG, and restore the checkpoints there",
}


def from_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """The group; None if TF_CONFIG is not set, is empty, or has neither cluster nor task."""
    text = environ.get(NAME, "")
    try:
        config = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}): {text[:120]!r}") from error
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG: expected a JSON object, found {text[:120]!r}")
    jobs = _jobs(config)
    if not jobs:
        if "task" in config:
            raise ClusterError('TF_CONFIG has "task" and no "cluster"; expected both')
        return None
    kind, index = _task(config, jobs)
    addresses = (*jobs.get("chief", ()), *jobs.get("worker", ()))
    before = len(jobs.get("chief", ())) if kind == "worker" else 0
    chief = bool(jobs.get("chief"))
    return Cluster(addresses[0], len(addresses), before + index, addresses, NAME, chief)


class TFConfigClusterResolver(Task):
    """The group in TF_CONFIG; a group of one if it describes none."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ

    def cluster(self) -> Cluster:
        return from_tf_config(self._environ) or Cluster(None, 1, 0, source=NAME)


def _jobs(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    cluster = config.get("cluster") or {}
    if not isinstance(cluster, dict):
        raise ClusterError(f'TF_CONFIG: "cluster" must be an object, found {cluster!r}')
    jobs: dict[str, tuple[str, ...]] = {}
    for kind, addresses in cluster.items():
        if kind not in ("chief", "worker"):
            why = _REFUSED.get(kind, 'expected only "chief" and "worker"')
            raise ClusterError(f'TF_CONFIG: cluster has tasks of type "{kind}"; {why}')
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ClusterError(
                f'TF_CONFIG: "{kind}" must be a list of host:port strings, found {addresses!r}'
            )
        for address in addresses:
            check_address(address, f'TF_CONFIG: "{kind}"')
        if addresses:
            jobs[kind] = tuple(addresses)
    if len(jobs.get("chief", ())) > 1:
        raise ClusterError(f"TF_CONFIG: expected at most one chief, found {jobs['chief']}")
    return jobs


def _task(config: dict[str, Any], jobs: dict[str, tuple[str, ...]]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise ClusterError(
            f'TF_CONFIG: "task" must be an object with "type" and "index", found {task!r}'
        )
    kind, index = task["type"], task["index"]
    if kind in _REFUSED:
        raise ClusterError(f'TF_CONFIG: this task is of type "{kind}"; {_REFUSED[kind]}')
    if kind not in jobs:
        raise ClusterError(
            f'TF_CONFIG: task type "{kind}" is not in the cluster, which has {sorted(jobs)}'
        )
    # Schedulers often write the index as a string; TensorFlow takes it too.
    index = integer("TF_CONFIG task index", str(index))
    if not 0 <= index < len(jobs[kind]):
        raise ClusterError(
            f"TF_CONFIG: task index {index} is out of range: the cluster has {len(jobs[kind])} "
            f'of type "{kind}"'
        )
    return kind, index
