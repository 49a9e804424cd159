"""A Lightning module with dropout and a shuffled DataLoader: `lightning_worker.py HOW DIRECTORY`.

HOW: `plugin` or `fit` (`perdure.plugins.lightning.fit`); with `-SIGKILL` or `-SIGTERM` for that signal
in the eighth step, in the second epoch of four steps.
`group` is `fit` in two processes with DDP, BatchNorm and accumulation, `sharded` the same with FSDP2;
each process writes its answer to `DIRECTORY-RANK.json`.
`large RANK` loads a large checkpoint as one of two processes, `large-late` in process 0 alone first.
The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import perdure.plugins.lightning
from perdure.state.torch_tensors import local_tensor
from perdure.store import reader

KILLED_AT = 8
warnings.filterwarnings("ignore", ".*does not have many workers.*")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Normalizing(Model):
    """Validates with statistics of each process, and has a buffer that grows."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.layer.insert(0, torch.nn.BatchNorm1d(4))
        self.register_buffer("losses", torch.zeros(0))
        self.seen: list[str] = []
        self._is_sharded = is_sharded

    def configure_model(self) -> None:
        if self._is_sharded:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.losses = torch.cat([self.losses, loss.detach()[None]])
        return loss * self.losses.mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(float(super().training_step(batch, index)).hex())


class Begin(Callback):
    """Notes the step at which this process begins to train."""

    step: int | None = None

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.step = trainer.global_step


class Killer(Callback):
    def __init__(self, name: str) -> None:
        self._signal = signal.Signals[name]

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == KILLED_AT - 1:
            os.kill(os.getpid(), self._signal)


def load_large(how: str, directory: str) -> None:
    """Load 12 MiB, in chunks of 4 MiB; the answer is how many of them this process has read."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}-group", rank=rank, world_size=2
    )
    read: list[int] = []
    fault = reader.first_fault
    reader.first_fault = lambda one, *rest: read.append(one.nbytes) or fault(one, *rest)
    plugin = perdure.plugins.lightning.CheckpointIO()
    if how == "large-late" and rank == 0:
        plugin.load_checkpoint(directory)
    torch.distributed.barrier()
    loaded = plugin.load_checkpoint(directory)
    expected = torch.arange(3 * 2**20, dtype=torch.int32)
    is_equal = torch.equal(loaded["state_dict"]["w"], expected)
    torch.distributed.destroy_process_group()
    print(json.dumps({"read": sum(nbytes >= 2**20 for nbytes in read), "equal": is_equal}))


def in_group(how: str, directory: str) -> None:
    seed_everything(0)
    way, _, fault = how.partition("-")
    model = Normalizing(way == "sharded")
    rows = torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows[:, :4], rows[:, 4:])
    trainer = Trainer(
        max_epochs=2,
        default_root_dir=directory,
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1) if way == "sharded" else "ddp",
        accumulate_grad_batches=3,
        val_check_interval=5,  # also where the last forward pass was without an exchange
        callbacks=[Killer(fault)] if fault else [],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = DataLoader(data, 2, shuffle=True), DataLoader(data, 8)
    perdure.plugins.lightning.fit(trainer, directory, model, *loaders, every_n_train_steps=1)
    values = [local_tensor(value) for value in model.state_dict().values()]
    bits = [value.tolist() for value in values]
    answer = Path(f"{directory}-{trainer.global_rank}.json")
    answer.write_text(json.dumps({"bits": bits, "seen": model.seen[-6:]}))


def main() -> None:
    how, directory = sys.argv[1:]
    if how.startswith(("group", "sharded")):
        in_group(how, directory)
        return
    if how.startswith("large"):
        load_large(how, directory)
        return
    seed_everything(0)
    model = Model()
    source = torch.Generator().manual_seed(1)
    rows = torch.randn(8, 5, generator=source)
    loader = DataLoader(TensorDataset(rows[:, :4], rows[:, 4:]), batch_size=2, shuffle=True)
    saver = ModelCheckpoint(directory, every_n_train_steps=2, save_last=True)
    begin = Begin()
    callbacks: list[Callback] = [saver, perdure.plugins.lightning.ExactResume(), begin]
    way, _, fault = how.partition("-")
    if way == "fit":
        callbacks = [begin]
    if fault:
        callbacks.append(Killer(fault))
    trainer = Trainer(
        max_epochs=3,
        default_root_dir=directory,
        accelerator="cpu",
        callbacks=callbacks,
        plugins=[perdure.plugins.lightning.CheckpointIO()] if way == "plugin" else None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if way == "fit":
        perdure.plugins.lightning.fit(trainer, directory, model, loader, every_n_train_steps=2)
    else:
        trainer.fit(model, loader, ckpt_path="last")
    assert not fault, "the signal did not end the run"
    bits = [value.tolist() for value in model.state_dict().values()]
    print(json.dumps({"bits": bits, "step": trainer.global_step, "start": begin.step}))


if __name__ == "__main__":
    main()
