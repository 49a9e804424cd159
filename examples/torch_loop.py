"""A PyTorch loop with a shuffled `DataLoader`, interrupted in the middle of an epoch.

The numbered lines are what a plain loop has to add.

    python examples/torch_loop.py --data PATH --epochs 10
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import options, prove
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import perdure.torch  # 1
from perdure.demo.digits import load_digits

args = options(__doc__, epochs=3, batch=64)
digits = load_digits(args.data)
images, labels = torch.from_numpy(digits.train["image"]), torch.from_numpy(digits.train["label"])
dataset = TensorDataset(images, labels.long())


def train(directory: Path, fails_at: int | None = None) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)]
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loader = perdure.torch.ResumableLoader(DataLoader(dataset, args.batch, shuffle=True))  # 2
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}  # 3

    with perdure.CheckpointManager(directory, save_interval_steps=10) as manager:  # 4
        state, start = manager.restore_or_initialize(state)  # 5
        print(f"resuming after step {start}" if start else "starting from scratch")
        for epoch in range(loader.epoch, args.epochs):  # 6
            for image, label in loader:
                if loader.step == fails_at:
                    raise RuntimeError(f"interrupted in step {loader.step}, epoch {epoch + 1}")
                optimizer.zero_grad()
                loss = cross_entropy(model(image), label)
                loss.backward()
                optimizer.step()
                if manager.save(loader.step, state):  # 7
                    print(f"saved step {loader.step}, epoch {epoch + 1}, loss {loss.item():.4f}")
            scheduler.step()


def main() -> None:
    train(args.directory / "undisturbed")

    try:
        train(args.directory / "interrupted", fails_at=len(dataset) // args.batch * 3 // 2 + 3)
    except RuntimeError as error:
        print(error)
    train(args.directory / "interrupted")
    prove(args.directory / "undisturbed", args.directory / "interrupted")


if __name__ == "__main__":
    main()
