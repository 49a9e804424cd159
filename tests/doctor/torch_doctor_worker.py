"""All kernels of the doctor on PyTorch; then the check of a first step that changes its arguments."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from perdure.data import ArrayDataset
from perdure.distribute import step
from perdure.doctor import torch_kernels
from perdure.doctor.kernels import DETERMINISTIC, compute_kernels
from perdure.torch import MirroredStrategy


def note(event):
    sys.stdout.write(json.dumps(event) + "\n")


def grad(state, batch, key):
    x = batch["x"] * 2
    model = state["model"]
    loss = (model(x).square().mean(1) * batch["weight"]).sum()
    return {"g": list(torch.autograd.grad(loss, list(model.parameters()))), "loss": loss}


def check_step(in_state):
    """The first step; without `in_state`, of a program whose optimizer is outside of the state."""
    strategy = MirroredStrategy(devices=2, replicas=4)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    # A second step with the same gradient is 1.9 times as long. Adam's differs by rounding alone.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(state, total):
        for parameter, value in zip(model.parameters(), total["g"], strict=True):
            parameter.grad = value
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return state, {"loss": total["loss"], "text": object()}

    dataset = ArrayDataset({"x": np.ones((16, 5), np.float32)}, batch_size=16, seed=1)
    train_step = strategy.step(grad, update)
    state = {"model": model, **({"optimizer": optimizer} if in_state else {})}
    train_step(state, strategy.batch(dataset, 0))


HOOK = SimpleNamespace(
    is_doctor=True, checked_step=lambda results: note({"e": "checked", "results": results})
)
patch.object(step, "drill_hook", lambda: HOOK).start()
torch_kernels.prepare(DETERMINISTIC)
note({"e": "described", **torch_kernels.describe()})
compute_kernels(torch_kernels, 2, note)
check_step(in_state=True)
check_step(in_state=False)
