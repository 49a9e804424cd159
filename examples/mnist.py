"""MNIST or Fashion-MNIST from its files, with PyTorch: a small CNN, interrupted in the second epoch.

python examples/mnist.py --data data/MNIST/raw
python examples/mnist.py --data ~/.keras/datasets/mnist.npz
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from common import options, prove
from torch import nn
from torch.nn.functional import cross_entropy

import perdure
from perdure.data import load_images
from perdure.demo.digits import save_scans

args = options(__doc__, epochs=3, batch=64)
if args.data is None:  # no files: scikit-learn's 1,797 digits, in such a file
    args.data = args.directory / "digits.npz"
    args.directory.mkdir(parents=True, exist_ok=True)
    save_scans(args.data)

images, labels = load_images(args.data)  # uint8[n, 28, 28] and integers[n]
images = images[:, None].astype(np.float32) / 255  # PyTorch wants [n, channels, height, width]
labels = labels.astype(np.int64)
tests = len(images) // 7  # of MNIST the last 10,000, which are its test images
train_data = perdure.ArrayDataset(
    {"image": images[:-tests], "label": labels[:-tests]}, args.batch, drop_remainder=True
)


def train(directory: Path, fails_at: int | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(8 * 12 * 12, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}  # no position: a batch follows from its step

    with perdure.CheckpointManager(
        directory, save_interval_steps=10, recipe=train_data.recipe()
    ) as manager:
        state, start = manager.restore_or_initialize(state)
        print(f"resuming after step {start}" if start else "starting from scratch")
        steps = args.epochs * train_data.steps_per_epoch
        for step in range(start, steps):
            if step == fails_at:
                raise RuntimeError(f"interrupted in step {step}")
            batch = train_data.batch(step)
            optimizer.zero_grad()
            scores = model(torch.from_numpy(batch["image"]))
            cross_entropy(scores, torch.from_numpy(batch["label"])).backward()
            optimizer.step()
            manager.save(step + 1, state)
            if (step + 1) % train_data.steps_per_epoch == 0:
                print(f"epoch {train_data.epoch(step)[0] + 1}: accuracy {accuracy(model):.3f}")
        manager.save(steps, state, force=True)  # the last step, which no interval ends


def accuracy(model: nn.Module) -> float:
    """The share of the test images that the model recognizes."""
    with torch.inference_mode():
        guesses = model(torch.from_numpy(images[-tests:])).argmax(1)
    return float((guesses == torch.from_numpy(labels[-tests:])).float().mean())


def main() -> None:
    print(f"{len(images) - tests} images to train on, {tests} to test")
    train(args.directory / "undisturbed")

    try:
        train(args.directory / "interrupted", fails_at=train_data.steps_per_epoch * 3 // 2 + 3)
    except RuntimeError as error:
        print(error)
    train(args.directory / "interrupted")
    prove(args.directory / "undisturbed", args.directory / "interrupted")


if __name__ == "__main__":
    main()
