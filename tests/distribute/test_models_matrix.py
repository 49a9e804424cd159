"""A part of the matrix of `make proof-distribute`: modules of every kind, one fingerprint each."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest

from perdure.supervise import WorkerGroup

WORKER = Path(__file__).parent / "matrix_worker.py"

# (processes, devices); the cells of one engine share the processes.
TOPOLOGIES = {"jax": [(1, "1"), (2, "1")], "torch": [(1, "1"), (3, "1")]}
MODELS = {
    "jax": ["Keras", "Equinox"],
    "torch": ["transformer, clipping, EMA", "Keras", "torch module, bfloat16", "MLP, float16"],
}


def fingerprints(engine: str) -> dict[str, list[str]]:
    by_model: dict[str, list[str]] = defaultdict(list)
    models = ";".join(MODELS[engine])
    for processes, devices in TOPOLOGIES[engine]:
        command = [sys.executable, "-W", "error", str(WORKER), "--engine", engine]
        command += ["--devices", devices, "--models", models, "--optimizers", "adamw"]
        environment = {"JAX_NUM_CPU_DEVICES": "1", "KERAS_BACKEND": engine}
        with WorkerGroup(command, processes, environment) as group:
            for _, event in group.events():
                by_model[event["model"]].append(event["fingerprint"])
            group.require(group.wait(), [0])
    return by_model


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_one_fingerprint_for_each_model(engine: str) -> None:
    by_model = fingerprints(engine)
    cases = sum(processes * len(d.split(",")) for processes, d in TOPOLOGIES[engine])
    assert {model: len(prints) for model, prints in by_model.items()} == dict.fromkeys(
        MODELS[engine], cases
    )
    assert [model for model, prints in by_model.items() if len(set(prints)) > 1] == []
    # The control: no two models have the same fingerprint.
    assert len({prints[0] for prints in by_model.values()}) == len(MODELS[engine])
