"""One of two processes that train in a host: `group_worker.py HOST HOW DIRECTORY` under torchrun.

HOST: `transformers`, `accelerate`, `lightning` or `fabric`. HOW: `ddp`, `fsdp` or `2d`, and `-killed`
for a SIGKILL of rank 1 in the middle of the second epoch (`-killed7`: at step 7), `-terminated` for a
SIGTERM to torchrun. Words in HOW change the rest: `noise` draws numbers while an example is loaded, in
`workers` too; with `held` the sampler and `collate_fn` hold generators, and the Trainer evaluates at
the start; a `stream` has no length and shuffles in a buffer; with `val` there is a validation within an
epoch; with `own` the host resumes in its own way, without perdure; `frozen` trains a parameter from the
second step on. At its end each process writes `DIRECTORY-RANK.json`: the bits of its parameters and the
batches that it saw by step.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

KILLED_AT = 5
SEEN: list[float] = []
RANK = int(os.environ.get("RANK", "0"))


class Rows(torch.utils.data.Dataset[Any]):
    has_length = False

    def __init__(self, noise: bool, count: int = 24) -> None:
        self.source = torch.Generator().manual_seed(1)
        self.rows = torch.randn(count, 5, generator=self.source)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.rows[index, :4]
        if self.noise:
            x = x + torch.randn(4) + torch.randn(4, generator=self.source) + random.random()
        row = {"x": x, "labels": self.rows[index, 4:]}
        return row | {"input_ids": [0] * (1 + index % 5)} if self.has_length else row

    def loader(self, how: str, size: int = 2) -> torch.utils.data.DataLoader[Any]:
        if "stream" in how:
            return torch.utils.data.DataLoader(Stream(self), batch_size=size)
        order = torch.utils.data.RandomSampler(self, generator=torch.Generator().manual_seed(3))
        held: dict[str, Any] = {"sampler": order, "collate_fn": Masking()}
        others: dict[str, Any] = held if "held" in how else {"shuffle": True}
        return torch.utils.data.DataLoader(
            self, batch_size=size, num_workers=int("workers" in how), **others
        )


class Stream(torch.utils.data.IterableDataset[Any]):
    """Its order depends on numbers that are drawn within an epoch, as the training does."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        buffer = []
        for index in range(RANK, len(self.rows), 2):
            buffer.append(self.rows[index])
            if len(buffer) > 4:
                row = buffer.pop(random.randrange(4))
                yield row | {"x": row["x"] + torch.randn(4)}
        yield from buffer


class Masking:
    def __init__(self) -> None:
        self.source = torch.Generator().manual_seed(2)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        x = torch.stack([row["x"] for row in rows])
        mask = torch.rand(x.shape, generator=self.source) > 0.3
        return {"x": x * mask, "labels": torch.stack([row["labels"] for row in rows])}


class Model(torch.nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6) if norm else torch.nn.Identity()
        self.drop, self.out = torch.nn.Dropout(0.5), torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        SEEN.append(float(x.sum()))
        out = self.out(self.drop(self.norm(self.inner(x))))
        return {"loss": (out - labels).square().mean(), "logits": out}


def interrupt(how: str, step: int) -> None:
    kind = how.partition("-")[2]
    place = kind.lstrip("abcdefghijklmnopqrstuvwxyz")
    if RANK != 1 or not kind or step != (int(place) if place else KILLED_AT):
        return
    if kind.startswith("killed"):
        # A run that has saved nothing rightly begins again; the host's own way has no manifest.
        while "own" not in how and not any(Path(sys.argv[-1]).glob("**/checkpoints/*.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getppid(), signal.SIGTERM)


def on_transformers(how: str, directory: str, model: Model) -> torch.nn.Module:
    import accelerate.accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from plugin_programs import trainer_settings
    from torch.distributed.tensor import DTensor
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )

    import perdure.plugins.transformers

    class Sharding(AcceleratorState):
        """Accelerate (1.15) shards on no CPU: it takes DDP in silence."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            if (plugin := named.get("fsdp_plugin")) is not None:
                forced = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
                self._shared_state.update(forced)

    class Interruption(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            interrupt(how, state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "held" in how:
                kwargs["optimizer"].param_groups[0]["weight_decay"] += 0.1

    others: dict[str, Any] = {"save_strategy": "no", "dataloader_num_workers": "workers" in how}
    if "held" in how:
        others |= {"accelerator_config": {"use_seedable_sampler": False}, "eval_on_start": True}
    if "fsdp" in how:
        others |= {"fsdp": True, "fsdp_config": {"version": 2}}
    if "own" in how:
        others |= {"save_strategy": "steps"}
    if "length" in how:
        others |= {"train_sampling_strategy": "group_by_length"}
    if "eval" in how:
        others |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
        others |= {"load_best_model_at_end": True, "max_steps": 14}
    args = TrainingArguments(
        per_device_train_batch_size=2,
        **trainer_settings(directory),
        **others,
    )
    accelerate.accelerator.AcceleratorState = Sharding  # type: ignore[misc]
    rows = Rows("noise" in how)
    rows.has_length = "length" in how
    masking = Masking()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows if "eval" in how or "held" in how else None,
        data_collator=masking
        if "held" in how
        else lambda each: default_data_collator(
            [{name: row[name] for name in ("x", "labels")} for row in each]
        ),
        callbacks=[Interruption()],
    )
    if "own" in how:
        trainer.train(resume_from_checkpoint=bool([*Path(f"{directory}-own").glob("*-*")]))
    else:
        perdure.plugins.transformers.train(trainer, directory)
    is_sharded = {isinstance(value, DTensor) for value in trainer.model.parameters()}  # type: ignore[union-attr]
    assert is_sharded == {"fsdp" in how}
    return trainer.model  # type: ignore[return-value]


def on_accelerate(how: str, directory: str, model: Model) -> torch.nn.Module:
    from accelerate import (
        Accelerator,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
    )
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from torch.distributed.tensor import DTensor

    import perdure.plugins.accelerate
    from perdure import CheckpointManager
    from perdure.torch import process_group

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "fsdp" in how else None
    split = DataLoaderConfiguration(
        split_batches="split" in how, dispatch_batches="dispatch" in how
    )
    keeps_buckets = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        fsdp_plugin=plugin,
        dataloader_config=split,
        kwargs_handlers=[keeps_buckets] * (int(os.environ["WORLD_SIZE"]) > 2),
    )
    if plugin is not None:  # on the CPU Accelerate leaves it out silently, and wraps in DDP
        forced = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
        AcceleratorState._shared_state.update(forced)
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    wrapped, optimizer, loader, schedule = accelerator.prepare(
        model,
        adam,
        Rows("noise" in how).loader(how, 4 if "split" in how else 2),
        torch.optim.lr_scheduler.StepLR(adam, 3, 0.5),
    )
    assert isinstance(next(wrapped.parameters()), DTensor) == ("fsdp" in how)

    def train(batches: Iterator[tuple[int, Any]]) -> None:
        for step, batch in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(**batch)["loss"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            interrupt(how, step - 2)

    if "own" in how:
        train(own_batches(accelerator, loader, Path(directory), epochs=3))
    else:
        with CheckpointManager(
            directory, save_interval_steps=2, processes=process_group()
        ) as manager:
            train(perdure.plugins.accelerate.batches(accelerator, loader, manager, epochs=3))
    return accelerator.unwrap_model(wrapped)


def own_batches(
    accelerator: Any, loader: Any, directory: Path, epochs: int
) -> Iterator[tuple[int, Any]]:
    """As Accelerate's guide to checkpoints has it: `save_state`, `load_state`, `skip_first_batches`."""
    start = max((int(path.name) for path in directory.glob("*")), default=0)
    if start:
        accelerator.load_state(f"{directory}/{start}")
    step, skipped = start, start % len(loader)
    for _ in range(start // len(loader), epochs):
        for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            step += 1
            yield step, batch
            if step % 2 == 0:
                accelerator.save_state(f"{directory}/{step}")
        skipped = 0


def on_lightning(how: str, directory: str, model: Model) -> torch.nn.Module:
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    import perdure.plugins.lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.late = 0.0

        def configure_model(self) -> None:
            if "2d" in how:
                plan = {"inner": ColwiseParallel(), "out": RowwiseParallel()}
                parallelize_module(model, self.device_mesh["tensor_parallel"], plan)
            if sharded:
                for layer in (model.inner, model):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            random.random()
            return self.model(**batch)["loss"] * (1 + mean.value + self.late)

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.late = (
                0.5 * self.late + 0.1 * random.random()
            )  # after the callbacks have been called

        def validation_step(self, batch: Any, _: int) -> None:
            self.model(**batch)
            torch.rand(1)  # which an exact resume has to count

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    class Mean(Callback):
        """The mean of the loss of this process, which the next step uses."""

        value = 0.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.value = 0.9 * self.value + 0.1 * float(outputs["loss"])

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.value = state_dict["value"]

    class Interruption(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            model.inner.requires_grad_()
            interrupt(how, trainer.global_step - 4)

    mean = Mean()
    model.inner.requires_grad_("frozen" not in how)
    own = Path(f"{directory}/last.ckpt")
    savers = [ModelCheckpoint(directory, every_n_train_steps=2, save_last=True, save_top_k=-1)]
    savers = savers if "own" in how else []
    count = int(os.environ["WORLD_SIZE"])
    sharded, tensor = "fsdp" in how or "2d" in how, 2 if "2d" in how else 1
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=count // nodes,
        num_nodes=nodes,
        strategy=ModelParallelStrategy(count // tensor, tensor) if sharded else "ddp",
        max_epochs=3,
        callbacks=[mean, Interruption(), *savers],
        val_check_interval=3 if "val" in how else None,
        logger=False,
        default_root_dir=f"{directory}-own",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = Rows("noise" in how).loader(how)
    loaders = [loader, Rows(False, 8).loader("")] if "val" in how else [loader]
    if "own" in how:
        trainer.fit(Module(), *loaders, ckpt_path=own if own.exists() else None)
    else:
        perdure.plugins.lightning.fit(trainer, directory, Module(), *loaders, every_n_train_steps=2)
    return model


def on_fabric(how: str, directory: str, model: Model) -> torch.nn.Module:
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from perdure import CheckpointManager
    from perdure.torch import PerRank, ResumableLoader, process_group

    strategy: Any = "ddp"
    devices = int(os.environ["WORLD_SIZE"])
    if "fsdp" in how:

        def shard(module: Any, mesh: Any) -> Any:
            fully_shard(module.inner, mesh=mesh["data_parallel"])
            return fully_shard(module, mesh=mesh["data_parallel"])

        strategy = ModelParallelStrategy(shard, devices, 1, process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    wrapped = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.05))
    assert isinstance(next(wrapped.parameters()), DTensor) == ("fsdp" in how)
    rows = Rows("noise" in how)
    sampler = torch.utils.data.DistributedSampler(rows, fabric.world_size, fabric.global_rank)
    loader = ResumableLoader(torch.utils.data.DataLoader(rows, batch_size=2, sampler=sampler))
    member = wrapped if "fsdp" in how else PerRank(wrapped)
    state = {"model": member, "optimizer": optimizer, "loader": PerRank(loader)}
    with CheckpointManager(directory, save_interval_steps=2, processes=process_group()) as manager:
        start = manager.restore_or_initialize(state)
        step = start.step
        while loader.epoch < 3:
            for batch in loader:
                optimizer.zero_grad()
                fabric.backward(wrapped(**fabric.to_device(batch))["loss"])
                optimizer.step()
                step += 1
                manager.save(step, state)
                if manager.reached_preemption(step):
                    manager.save_and_exit(step, state)
                interrupt(how, step - 4)
    return model


def main() -> None:
    host, how, directory = sys.argv[1:]
    faulthandler.dump_traceback_later(240, exit=True)  # before the test gives up
    # Python 3.11.7 stops a forked process if a thread of gloo asks for Python's lock at that moment,
    # also without perdure (https://github.com/python/cpython/issues/112275). After a pause none does.
    os.register_at_fork(before=partial(time.sleep, 0.02))
    torch.manual_seed(RANK if "own-seed" in how else 0)
    random.seed(0)
    torch.set_num_threads(1)
    model = Model(norm="fsdp" not in how and "2d" not in how)
    hosts = {
        "transformers": on_transformers,
        "accelerate": on_accelerate,
        "lightning": on_lightning,
        "fabric": on_fabric,
    }
    trained = hosts[host](how, directory, model)
    found = trained.state_dict().values()
    values = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]
    answer = {"bits": [value.tolist() for value in values], "seen": SEEN}
    Path(f"{directory}-{RANK}.json").write_text(json.dumps(answer))
    if (
        torch.distributed.is_initialized()
    ):  # a thread of gloo that works while Python ends aborts it
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
