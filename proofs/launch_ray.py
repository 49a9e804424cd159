"""train.py under Ray Train, with workers that are killed: python launch_ray.py RUN STORAGE MARKS FAULT...

The driver of a row in launch_rows.py. It prints what `fit` came to; Ray ends with it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import faulty
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from perdure.ray import JaxConfig


def loop(config: dict[str, Any]) -> None:
    import train

    import jax

    faulty.install(Path(config["marks"]), config["faults"])
    place = Path(config["marks"]) / f"joined-{os.getpid()}"
    place.write_text(f"{jax.process_index()} of {jax.process_count()}")
    train.main([config["run"], *config["arguments"]])


def main(run: str, storage: str, marks: str, *faults: str) -> None:
    # No dashboard, and an object store of the smallest size: nothing goes through it.
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        _temp_dir=os.environ["RAY_PROOF_TEMP"],
    )
    arguments = ["--steps", "60"]
    JaxTrainer(
        loop,
        train_loop_config={"run": run, "marks": marks, "faults": faults, "arguments": arguments},
        jax_config=JaxConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="proof",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=len(faults)),
        ),
    ).fit()
    print(json.dumps({"event": "done"}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
