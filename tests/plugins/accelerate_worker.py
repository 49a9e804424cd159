"""A loop on Accelerate with dropout and a shuffled loader: `accelerate_worker.py HOW DIRECTORY`.

HOW: `plugin`, or `own` (`save_state`, `load_state` and `skip_first_batches`, as Accelerate's pages
say), and `-killed` for a SIGKILL in the tenth batch, in the middle of the second epoch (`-killed3`: in
that of step 3); `-terminated` for a SIGTERM. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset

import perdure.plugins.accelerate
from perdure import CheckpointManager

EPOCHS, PER_EPOCH, KILLED_AT = 3, 6, 9


def own_batches(accelerator: Any, loader: Any, directory: str) -> Iterator[tuple[int, Any]]:
    newest = max(Path(directory).glob("[0-9]*"), key=lambda path: int(path.name), default=None)
    start = 0
    if newest is not None:
        accelerator.load_state(str(newest))
        start = int(newest.name)
    step = start
    for epoch in range(start // PER_EPOCH, EPOCHS):
        skip = start % PER_EPOCH if epoch == start // PER_EPOCH else 0
        for batch in skip_first_batches(loader, skip) if skip else loader:
            yield step, batch
            step += 1
            if step % 4 == 0:
                accelerator.save_state(f"{directory}/{step}")


def main() -> None:
    how, directory = sys.argv[1:]
    interruption = how.partition("-")[2]
    killed_at = int(interruption.lstrip("adeiklmnrt") or KILLED_AT)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layer = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(12, 5, generator=source)
    adam = torch.optim.Adam(layer.parameters(), lr=0.05)
    model, optimizer, loader, schedule = accelerator.prepare(
        layer,
        adam,
        DataLoader(TensorDataset(rows), batch_size=2, shuffle=True),
        torch.optim.lr_scheduler.StepLR(adam, 3, 0.5),
    )
    steps: list[int] = []

    def train(step: int, rows: torch.Tensor) -> None:
        steps.append(step)
        with accelerator.accumulate(model):
            loss = (model(rows[:, :4]) - rows[:, 4:]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if interruption and step == killed_at:
            killed = interruption.startswith("killed")
            os.kill(os.getpid(), signal.SIGKILL if killed else signal.SIGTERM)

    if how.startswith("own"):
        for step, (batch,) in own_batches(accelerator, loader, directory):
            train(step, batch)
    else:
        with CheckpointManager(directory, save_interval_steps=4) as manager:
            for step, (batch,) in perdure.plugins.accelerate.batches(
                accelerator, loader, manager, epochs=EPOCHS
            ):
                train(step, batch)
    bits = [value.tolist() for value in layer.state_dict().values()]
    print(json.dumps({"bits": bits, "steps": steps}))


if __name__ == "__main__":
    main()
