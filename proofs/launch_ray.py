"""The driver of the Ray Train rows of launch_rows.py: runs train.py and kills its workers.

    python launch_ray.py RUN STEPS WORK FAULT...

Needs examples/cluster and tests/launch in PYTHONPATH. WORK contains Ray's files, the `marks` of faults,
and in `joined` the group of each worker, as the worker sees it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import faulty
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from perdure.plugins.ray import JaxConfig

WORKERS = 2


def loop(config: dict[str, Any]) -> None:
    import jax

    import train

    work = Path(config["work"])
    group = f"{jax.process_index()} of {jax.process_count()}"
    (work / "joined" / str(os.getpid())).write_text(group)
    faulty.install(work / "marks", config["faults"])
    train.main([config["run"], "--steps", config["steps"]])  # pyright: ignore[reportAttributeAccessIssue]


def main(run: str, steps: str, work: str, *faults: str) -> None:
    # No dashboard, and the smallest object store, because nothing uses it.
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        _temp_dir=f"{work}/ray",
    )
    JaxTrainer(
        loop,
        train_loop_config={"run": run, "steps": steps, "work": work, "faults": faults},
        jax_config=JaxConfig(),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="proof",
            storage_path=f"{work}/storage",
            failure_config=FailureConfig(max_failures=len(faults)),
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
