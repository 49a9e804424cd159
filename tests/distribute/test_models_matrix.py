"""A part of the matrix of `make proof-distribute`: modules of every kind, one fingerprint each."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from forked import TOPOLOGY, events, run_forked
from perdure.runtime.ports import free_ports
from perdure.supervise.worker_environment import tf_config

WORKER = Path(__file__).parent / "matrix_worker.py"

# (processes, devices); the cells of one engine share the processes.
TOPOLOGIES = {"jax": [(1, "1"), (2, "1")], "torch": [(1, "1"), (3, "1")]}
MODELS = {
    "jax": ["Equinox", "MLP, float16"],
    "torch": ["transformer, clipping, EMA", "Keras", "torch module, bfloat16", "MLP, float16"],
}


def fingerprints(engine: str, compiled: dict[str, str]) -> dict[str, list[str]]:
    by_model: dict[str, list[str]] = defaultdict(list)
    models = ";".join(MODELS[engine])
    for processes, devices in TOPOLOGIES[engine]:
        options = ["--engine", engine, "--devices", devices]
        options += ["--models", models, "--optimizers", "adamw"]
        common = {name: value for name, value in os.environ.items() if name not in TOPOLOGY}
        common |= {"JAX_NUM_CPU_DEVICES": "1", **compiled}
        ports = free_ports(processes)
        environments = [
            common | ({"TF_CONFIG": tf_config(ports, index)} if processes > 1 else {})
            for index in range(processes)
        ]
        for status, out, err in run_forked(
            f"keras-{engine}", WORKER, [options] * processes, environments
        ):
            assert status == 0, err
            for event in events(out):
                by_model[event["model"]].append(event["fingerprint"])
    return by_model


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_one_fingerprint_for_each_model(engine: str, compiled: dict[str, str]) -> None:
    by_model = fingerprints(engine, compiled)
    cases = sum(processes * len(d.split(",")) for processes, d in TOPOLOGIES[engine])
    assert {model: len(prints) for model, prints in by_model.items()} == dict.fromkeys(
        MODELS[engine], cases
    )
    assert [model for model, prints in by_model.items() if len(set(prints)) > 1] == []
    # The control: no two models have the same fingerprint.
    assert len({prints[0] for prints in by_model.values()}) == len(MODELS[engine])
