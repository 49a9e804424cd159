"""Imports from Orbax, which needs JAX. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from perdure import CheckpointManager, load_checkpoint
from perdure.convert import import_run
from perdure.errors import PerdureError
from perdure.store import Run


def kind_of_error(call: Any) -> str:
    try:
        call()
    except PerdureError as error:
        return type(error).__name__
    return "none"


def orbax(folder: Path) -> dict[str, Any]:
    state = {
        "params": {
            "w": np.arange(6, dtype=np.float32).reshape(2, 3),
            "b": np.arange(3).astype(ml_dtypes.bfloat16),
            "scale": np.array(2.5),
        },
        "step": 3,
        "name": "x",
    }
    run = folder / "arrays"
    with CheckpointManager(run) as manager:
        manager.save(1, state)
    fingerprint = Run(run).manifest(1).fingerprint
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "orbax", load_checkpoint(run, leaves=["params", "step", "name"]))
    back = import_run(folder / "orbax", folder / "back")
    sharded = {"params": {"w": jax.numpy.ones((4, 2), "bfloat16")}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "standard", sharded)
    standard = import_run(folder / "standard", folder / "from-standard", branch="train")
    return {
        "back": [[leaf.path, leaf.dtype, list(leaf.shape)] for leaf in back.leaves],
        "same": back.fingerprint == fingerprint,
        "standard": [[leaf.path, leaf.dtype, list(leaf.shape)] for leaf in standard.leaves],
        "no such": kind_of_error(lambda: import_run(folder, folder / "y", kind="orbax")),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    sys.stdout.write(json.dumps(orbax(place)) + "\n")
