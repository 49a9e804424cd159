"""TensorFlow's worked figures: per-example losses [2, 3] and [4, 5] on two replicas, global batch 4.

The custom-training tutorial divides by the global batch size, not by the batch of a replica: 1.25 and
2.25, and 3.5 in all.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import Any

import numpy as np

from perdure.data import ArrayDataset
from perdure.distribute import compute_average_loss

GLOBAL_BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("jax", "torch"), required=True)
    engine = parser.parse_args().engine
    strategy = import_module(f"perdure.{engine}").MirroredStrategy(replicas=2)
    losses = np.array([2.0, 3.0, 4.0, 5.0], np.float32)
    data = ArrayDataset({"loss": losses}, GLOBAL_BATCH, shuffle=False)

    def step(batch: Any) -> Any:
        return compute_average_loss(batch["loss"], global_batch_size=GLOBAL_BATCH)

    losses_by_replica = strategy.run(step, (strategy.batch(data, 0),))
    total = strategy.reduce("sum", losses_by_replica)
    local = [float(loss) for loss in strategy.local_results(losses_by_replica)]
    print(json.dumps({"losses": local, "sum": float(total)}), flush=True)


if __name__ == "__main__":
    main()
