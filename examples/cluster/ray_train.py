"""train.py under Ray Train: after a lost worker the run repeats the steps since the last checkpoint.

    python ray_train.py /shared/runs/mine --workers 4             (--gpu: one GPU for each)

The run directory is perdure's own, and has to be where all workers reach it; Ray's storage holds
nothing but Ray's records. The arguments after `--` go to train.py.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

from perdure.plugins.ray import JaxConfig


def loop(config: dict[str, Any]) -> None:
    import train

    train.main(config["arguments"])  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run directory or URL, reached by all workers")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--storage", help="where Ray keeps its records (default: ~/ray_results)")
    options, rest = parser.parse_known_args()
    if rest[:1] == ["--"]:  # argparse keeps it before the first unknown argument
        rest = rest[1:]
    # Ray calls the loop in another directory.
    run = options.run if "://" in options.run else os.path.abspath(options.run)
    JaxTrainer(
        loop,
        train_loop_config={"arguments": [run, *rest]},
        jax_config=JaxConfig(),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name="perdure",
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=10),
        ),
    ).fit()


if __name__ == "__main__":
    main()
