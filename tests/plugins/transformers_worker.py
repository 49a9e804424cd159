"""A Hugging Face Trainer with a model of one layer and dropout: `transformers_worker.py HOW DIRECTORY`.

HOW: `plugin`, `own` (the Trainer's own checkpoints) or `no-random` (the plug-in without the random
generators), and `-killed` for a SIGKILL in the fifth step, in the middle of the second epoch;
`-terminated` for a SIGTERM. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from plugin_programs import trainer_settings
from transformers import Trainer, TrainerCallback, TrainingArguments

import perdure.plugins.transformers
from perdure import CheckpointManager, ManagerOptions

KILLED_AT = 5


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(self.drop(x))
        return {"loss": (out - labels).square().mean(), "logits": out}


class Killer(TrainerCallback):
    def __init__(self, signum: int) -> None:
        self.signum = signum

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == KILLED_AT - 1:
            os.kill(os.getpid(), self.signum)


def main() -> None:
    how, directory = sys.argv[1:]
    torch.manual_seed(0)
    model = Model()
    source = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(4, generator=source), "labels": torch.randn(1, generator=source)}
        for _ in range(12)
    ]
    own = how.startswith("own")
    args = TrainingArguments(
        per_device_train_batch_size=4 if "batch4" in how else 2,
        save_strategy="steps" if own else "no",
        **trainer_settings(directory),
    )
    killer = [Killer(signal.SIGKILL)] if how.endswith("killed") else []
    if how.endswith("terminated"):
        killer = [Killer(signal.SIGTERM)]
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=killer)  # type: ignore[arg-type]
    if own:
        folders = [*Path(f"{directory}-own").glob("checkpoint-*")]
        trainer.train(resume_from_checkpoint=bool(folders))
    elif how.startswith("no-random"):
        options = ManagerOptions(save_random_state=False)
        with CheckpointManager(directory, save_interval_steps=2, options=options) as manager:
            perdure.plugins.transformers.train(trainer, manager)
    else:
        perdure.plugins.transformers.train(trainer, directory)
    assert not killer, "the kill did not happen"
    bits = [value.tolist() for value in model.state_dict().values()]
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    print(json.dumps({"bits": bits, "step": trainer.state.global_step, "losses": losses}))


if __name__ == "__main__":
    main()
