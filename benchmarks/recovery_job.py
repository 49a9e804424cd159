"""The job that `bench_recovery.py` kills: the demo's network on images that a seed makes.

    python recovery_job.py KIND DIRECTORY STEPS

KIND: `jax` and `torch` save and restore by perdure; `plain` is PyTorch as its tutorials have it
(torch.save, init_process_group, all_reduce of the gradients), for torchrun and Ray Train; `trainer` is
perdure's Trainer on JAX, with `save_interval_secs="auto"`. Every worker appends `time pid rank step` to
DIRECTORY/progress after each step, when its result is computed; times are of the monotonic clock.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import perdure

EXAMPLES, BATCH, REPLICAS, SAVE_EVERY = 1438, 128, 2, 10


def images() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        "image": draw.random((EXAMPLES, 28, 28, 1), np.float32),
        "label": draw.integers(0, 10, EXAMPLES).astype(np.int32),
    }


class Progress:
    def __init__(self, where: Path) -> None:
        self._file = os.open(where / "progress", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._who = f"{os.getpid()} {os.environ.get('RANK', '0')}"

    def step(self, number: int) -> None:
        os.write(self._file, f"{time.monotonic():.6f} {self._who} {number}\n".encode())
        if (
            "PERDURE_HEARTBEAT_FILE" in os.environ
        ):  # else `plain` would be restarted ever more slowly
            perdure.heartbeat(number)


def perdure_job(kind: str, where: Path, steps: int) -> None:
    import importlib

    from perdure import ArrayDataset, CheckpointManager

    program = importlib.import_module(f"perdure.demo.train_{kind}")
    strategy = program.make_strategy(1, REPLICAS, 0, int(os.environ.get("WORLD_SIZE", "1")) > 1)
    data = ArrayDataset(images(), BATCH, seed=0)
    train = strategy.step(program.grad, program.update)
    progress = Progress(where)
    with CheckpointManager(
        where / "run", save_interval_steps=SAVE_EVERY, processes=strategy.processes
    ) as manager:
        state, start = manager.restore_or_initialize(lambda: program.init(0))
        for step in range(start, steps):
            state, logs = train(state, strategy.batch(data, step))
            float(logs["sum"])
            progress.step(step + 1)
            manager.save(step + 1, state)


def trainer_job(where: Path, steps: int) -> None:
    from perdure import ArrayDataset, RunConfig, Trainer
    from perdure.demo import train_jax as program
    from perdure.train import AutoInterval, Hook, OutputConfig

    progress = Progress(where)

    class Tell(Hook):
        def after_step(self, trainer: Any, logs: Any) -> None:
            float(logs["sum"])
            progress.step(trainer.step)

    strategy = program.make_strategy(1, REPLICAS, 0, False)
    auto = AutoInterval(mean_time_between_failures=float(os.environ["BENCH_FAILURES_S"]))
    config = RunConfig(
        where / "run", save_checkpoints_secs=auto, output=OutputConfig(progress="off")
    )
    data = ArrayDataset(images(), BATCH, seed=0)
    step = strategy.step(program.grad, program.update)
    Trainer(step, lambda: program.init(0), data, config, [Tell()], strategy=strategy).train(steps)


def plain_job(where: Path, steps: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if group and not dist.is_initialized():
        dist.init_process_group("gloo")
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    saved, start = where / "checkpoint.pt", 0
    if saved.exists():
        checkpoint = torch.load(saved)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["step"]
    data = images()
    rank = int(os.environ.get("RANK", "0"))
    share = BATCH // (2 if group else 1)
    progress = Progress(where)
    for step in range(start, steps):
        first = (step * BATCH + rank * share) % (EXAMPLES - share)
        image = torch.from_numpy(data["image"][first : first + share]).permute(0, 3, 1, 2)
        label = torch.from_numpy(data["label"][first : first + share]).long()
        optimizer.zero_grad()
        cross_entropy(model(image), label).backward()
        if group:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        progress.step(step + 1)
        if (step + 1) % SAVE_EVERY == 0 and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, where / "checkpoint.tmp")
            os.replace(where / "checkpoint.tmp", saved)


def ray_job(where: Path, steps: int) -> None:
    """`plain` under Ray Train, one worker."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    folder = str(Path(__file__).parent)

    def loop(config: dict[str, Any]) -> None:
        sys.path.insert(0, folder)
        import recovery_job

        recovery_job.plain_job(Path(config["where"]), config["steps"])

    TorchTrainer(
        loop,
        train_loop_config={"where": str(where), "steps": steps},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            storage_path=str(where / "ray"), failure_config=FailureConfig(max_failures=50)
        ),
    ).fit()


if __name__ == "__main__":
    kind, place, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if kind == "plain":
        plain_job(place, count)
    elif kind == "ray":
        ray_job(place, count)
    elif kind == "trainer":
        trainer_job(place, count)
    else:
        perdure_job(kind, place, count)
