"""A loop of your own with `Checkpoint` and a manager that keeps 2.

TensorFlow's guide "Training checkpoints": `tf.train.Checkpoint(step=, optimizer=, net=, iterator=)`, a
`CheckpointManager`, and a training function that is simply called again.

    python examples/custom_loop.py --data PATH --steps 200
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import options, prove
from torch import nn
from torch.nn.functional import cross_entropy

import perdure
from perdure.demo.digits import load_digits

args = options(__doc__, steps=50, save_every=10, batch=64)
digits = load_digits(args.data)
dataset = perdure.ArrayDataset(digits.train, args.batch, seed=0)
FAILS_AT = args.steps // 2 + 3  # not a step that is saved


def members() -> perdure.Checkpoint:
    """All objects with a state. The dataset has none: its batches are a function of the step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2))
    net.append(nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    return perdure.Checkpoint(
        net=net,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5),
        dropout=torch.default_generator,  # PyTorch's random numbers are a state as well
        step=0,
    )


def train_step(checkpoint: perdure.Checkpoint, batch: Any) -> torch.Tensor:
    batch = {name: torch.from_numpy(array) for name, array in batch.items()}
    checkpoint.optimizer.zero_grad()
    losses = cross_entropy(checkpoint.net(batch["image"]), batch["label"].long(), reduction="none")
    loss = (losses * batch["weight"]).sum() / batch["weight"].sum()
    loss.backward()
    checkpoint.optimizer.step()
    checkpoint.schedule.step()
    return loss.detach()


def train_and_checkpoint(directory: Path, fails_at: int | None = None) -> None:
    with perdure.CheckpointManager(
        directory, max_to_keep=2, save_interval_steps=args.save_every, recipe=dataset.recipe()
    ) as manager:
        checkpoint, start = manager.restore_or_initialize(members())
        print(f"restored from step {start}" if start else "initializing from scratch")
        for step in range(start, args.steps):
            if step == fails_at:
                raise RuntimeError(f"interrupted in step {step}")
            loss = train_step(checkpoint, dataset.batch(step))
            checkpoint.step += 1
            if manager.save(step + 1, checkpoint):
                print(f"saved step {step + 1}, loss {loss:.3f}")
        manager.save(args.steps, checkpoint, force=True)


def main() -> None:
    train_and_checkpoint(args.directory / "undisturbed")

    directory = args.directory / "interrupted"
    try:
        train_and_checkpoint(directory, fails_at=FAILS_AT)
    except RuntimeError as error:
        print(error)
    train_and_checkpoint(directory)

    print("kept:", perdure.CheckpointManager(directory).all_steps())
    # A part of a checkpoint as arrays, without the classes that made it:
    bias = perdure.load_checkpoint(directory, leaves="net/4/bias")["net"]["4"]["bias"]
    print("the last layer's bias:", bias.round(3))
    prove(args.directory / "undisturbed", directory)


if __name__ == "__main__":
    main()
