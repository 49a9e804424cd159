"""One process of one topology: trains every cell and prints the fingerprint of each as a JSON line.

Many cells share a process, because starting one costs more than training a small model.
"""

from __future__ import annotations

import argparse
import json
import os
from importlib import import_module
from typing import Any

from training_case import FIRST, REPLICAS, STEPS, dataset

from perdure.state import flatten
from perdure.store import MemoryStorage, Run


def fingerprint(state: Any) -> str:
    """The fingerprint of a checkpoint of the state."""
    with Run(MemoryStorage(), create=True) as run:
        return run.save(0, flatten(state)).fingerprint[:12]


def train(strategy: Any, cell: Any, data: Any = None) -> str:
    """Train a few steps, starting in the middle of an epoch; return the fingerprint."""
    state, train_step = cell.init(), strategy.step(cell.grad, cell.update)
    logs: Any = {}
    data = data or dataset()
    for step in range(FIRST, FIRST + STEPS):
        state, logs = train_step(state, strategy.batch(data, step))
    return fingerprint({"state": state, "logs": logs})


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("jax", "torch"), required=True)
    parser.add_argument("--devices", default="1", help="numbers of devices, or reversed; by comma")
    parser.add_argument("--models", help="a part of the models, by semicolon")
    parser.add_argument("--optimizers", help="a part of the optimizers, by comma")
    parser.add_argument("--compile", help="a backend of torch.compile")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every second model")
    options = parser.parse_args()
    engine = import_module(f"matrix_{options.engine}")
    group = "TF_CONFIG" in os.environ
    how = {"compile": options.compile} if options.compile else {}
    strategies = {
        devices: engine.make_strategy(devices, REPLICAS, group, **how)
        for devices in options.devices.split(",")
    }
    models = options.models.split(";") if options.models else list(engine.MODELS)
    optimizers = options.optimizers.split(",") if options.optimizers else engine.OPTIMIZERS
    for model in models if options.half is None else models[options.half :: 2]:
        cells = engine.MODELS[model](REPLICAS)
        for name in optimizers:
            for devices, strategy in strategies.items():
                digest = train(strategy, cells[name])
                tell(event="cell", model=model, optimizer=name, devices=devices, fingerprint=digest)


if __name__ == "__main__":
    main()
