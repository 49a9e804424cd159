"""A `ResumableLoader` of examples with noise, and the batches that a loop over it receives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from perdure.torch import ResumableLoader

EXAMPLES, EPOCHS = 11, 3


class Noisy(Dataset[Any]):
    """Examples with noise from every generator that a transform may draw from."""

    def __init__(self, length: int = EXAMPLES) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        noise = [random.gauss(0, 1), np.random.normal(), torch.rand(()).item()]  # noqa: NPY002
        return torch.tensor([index, torch.initial_seed() % 2**40, *noise], dtype=torch.float64)


def mixed(examples: list[torch.Tensor]) -> torch.Tensor:
    """A `collate_fn` that draws as well."""
    return torch.cat([torch.stack(examples).reshape(-1), torch.rand(1, dtype=torch.float64)])


def loader(workers: int = 0, **options: Any) -> ResumableLoader:
    if "batch_sampler" not in options:
        options = {"batch_size": 4, **options}
        options["shuffle"] = options.get("shuffle", "sampler" not in options)
    torch.manual_seed(5)
    dataset = options.pop("dataset", Noisy())
    collate = None if options.get("batch_size", 1) is None else mixed
    return ResumableLoader(DataLoader(dataset, num_workers=workers, collate_fn=collate, **options))


def batches(data: ResumableLoader) -> list[bytes]:
    """The batches up to the end."""
    return until(data, -1)[0]


def until(data: ResumableLoader, stop: int) -> tuple[list[bytes], dict[str, Any]]:
    """`stop` batches, and the position in the loop that has received the last one."""
    received: list[bytes] = []
    for _ in range(data.epoch, EPOCHS):
        for batch in data:
            received.append(batch.numpy().tobytes())
            torch.rand(2)  # of the program, such as dropout
            if len(received) == stop:
                return received, data.state_dict()
        received.append(b"end of an epoch")
    return received, data.state_dict()


def resumed(state: dict[str, Any], make: Callable[[], ResumableLoader]) -> ResumableLoader:
    data = make()
    torch.manual_seed(77)  # a resumed process has drawn other numbers
    data.load_state_dict(state)
    assert data.state_dict() == state
    return data
