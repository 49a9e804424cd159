"""One of several processes of a trainer made like that of torchtitan: `titan_worker.py HOW DIRECTORY`.

HOW: `fsdp` (FSDP2 over all processes) or `2d` (data and tensor parallel, two by two), and as in
`group_worker.py` an interruption. `Checkpointer` takes the place of torchtitan's `CheckpointManager`.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from group_worker import RANK, SEEN, interrupt
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from perdure import CheckpointManager, initialize_distributed
from perdure.torch import PerRank, process_group

STEPS, VOCABULARY, LENGTH = 12, 16, 8


class Checkpointer:
    """Save and load, with the arguments of torchtitan's."""

    def __init__(self, folder: str, interval: int, **states: Any) -> None:
        states["dataloader"] = PerRank(states["dataloader"])
        self.states = states
        self.manager = CheckpointManager(
            folder, save_interval_steps=interval, processes=process_group()
        )

    def load(self) -> int:
        return self.manager.restore_or_initialize(self.states).step

    def save(self, step: int, last_step: bool = False) -> None:
        self.manager.save(step, self.states, force=last_step)


class OwnCheckpointer:
    """What torchtitan's own does: model and optimizers as DCP flattens them, and the rest."""

    def __init__(self, folder: str, interval: int, **states: Any) -> None:
        self.folder, self.interval, self.states = Path(folder), interval, states

    def _state(self) -> dict[str, Any]:
        (model,), (optimizer,) = self.states["model"], self.states["optimizer"]
        values, moments = get_state_dict(model, optimizer)
        (schedule,), trained = self.states["lr_scheduler"], self.states["train_state"]
        loader = {f"dataloader-{RANK}": self.states["dataloader"].state_dict()}
        rest = {"schedule": schedule.state_dict(), "trained": trained.state_dict(), **loader}
        return {"model": values, "optimizer": moments, **rest}

    def load(self) -> int:
        steps = [int(path.parent.name) for path in self.folder.glob("*/.metadata")]
        if steps:
            dcp.load(state := self._state(), checkpoint_id=self.folder / str(max(steps)))
            (model,), (optimizer,) = self.states["model"], self.states["optimizer"]
            values, moments = state["model"], state["optimizer"]
            set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=moments)
            self.states["lr_scheduler"][0].load_state_dict(state["schedule"])
            self.states["train_state"].load_state_dict(state["trained"])
            self.states["dataloader"].load_state_dict(state[f"dataloader-{RANK}"])
        return max(steps, default=0)

    def save(self, step: int, last_step: bool = False) -> None:
        if step % self.interval == 0 or last_step:
            dcp.save(self._state(), checkpoint_id=self.folder / str(step))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.drop, self.output = nn.Dropout(0.2), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers.values():
            x = self.drop(layer(x))
        return self.output(x)


class TokenLoader:
    """Reads the documents of one data parallel rank; its position is its state."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.sample = rank, count, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            seed = self.sample * self.count + self.rank
            self.sample += 1
            source = torch.Generator().manual_seed(seed)
            yield torch.randint(VOCABULARY, (2, LENGTH + 1), generator=source)

    def state_dict(self) -> dict[str, Any]:
        return {"sample": self.sample}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sample = state["sample"]


class Trainer:
    """The loop of torchtitan in short: parallel dimensions, model parts, optimizers, schedulers."""

    def __init__(self, how: str, folder: str) -> None:
        processes = initialize_distributed("torch")
        sizes = (2, 2) if how.startswith("2d") else (processes.count, 1)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = Transformer()
        for layer in model.layers.values():
            if sizes[1] > 1:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, mesh["tp"], plan)  # type: ignore[arg-type]
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        self.model_parts = [model]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)]
        self.lr_schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], STEPS)]
        self.dataloader = TokenLoader(mesh["dp"].get_local_rank(), sizes[0])
        torch.manual_seed(100 + mesh["dp"].get_local_rank())  # of the dropout
        self.step = self.ntokens_seen = 0
        self.checkpointer = (OwnCheckpointer if "own" in how else Checkpointer)(
            folder,
            2,
            dataloader=self.dataloader,
            model=self.model_parts,
            optimizer=self.optimizers,
            lr_scheduler=self.lr_schedulers,
            train_state=self,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, how: str) -> None:
        self.checkpointer.load()
        manager: Any = getattr(self.checkpointer, "manager", None)
        batches = iter(self.dataloader)
        while self.step < STEPS:
            self.step += 1
            tokens = next(batches)
            SEEN.append(float(tokens.sum()))
            self.ntokens_seen += tokens[:, 1:].numel()
            logits = self.model_parts[0](tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            for optimizer, scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
            if manager is not None and manager.reached_preemption(self.step):
                manager.save_and_exit(self.step, self.checkpointer.states)
            interrupt(how, self.step - 1)
        if manager is not None:
            manager.close()


def main() -> None:
    how, directory = sys.argv[1:]
    faulthandler.dump_traceback_later(240, exit=True)  # before the test gives up
    torch.set_num_threads(1)
    trainer = Trainer(how, directory)
    trainer.train(how)
    found = trainer.model_parts[0].state_dict().values()
    values = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
    answer = {
        "bits": [value.tolist() for value in values],
        "seen": SEEN,
        "tokens": trainer.ntokens_seen,
    }
    Path(f"{directory}-{RANK}.json").write_text(json.dumps(answer))
    torch.distributed.destroy_process_group()  # a thread of gloo that works while Python ends aborts it


if __name__ == "__main__":
    main()
