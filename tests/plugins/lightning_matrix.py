"""Resumes of Lightning from every checkpoint of a run, and from those of the resumed runs.

`lightning_matrix.py DIRECTORY`: the last line of the output is JSON, for each variant the number of
resumes, and those whose batches, generators, learning rates or final bits differ from the whole run.
"positioned" variants have a `ResumableLoader`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_worker import Model
from torch.utils.data import DataLoader, Dataset

import perdure.plugins.lightning
import perdure.torch

warnings.simplefilter("ignore")  # Lightning advises on workers, logging and resumable loaders
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


@dataclass(frozen=True)
class Variant:
    """How a run is saved and loaded. `after` picks the checkpoints of resumed runs."""

    every: str = "batch"
    validates: str = ""
    steps: int = -1
    accumulates: int = 1
    workers: int = 0
    exact: bool = True
    positioned: bool = False
    limit: int | None = None
    after: tuple[int, ...] = (1, 2, 4)
    most: int = 99


VARIANTS = {
    "batches": Variant(),
    "steps": Variant(steps=11, after=(1, 4)),
    "validation": Variant(validates="at the end"),
    "validations": Variant(validates="within", after=(2,)),
    "epochs": Variant(every="epoch", validates="at the end"),
    "epoch ends": Variant(every="epoch end"),
    "epoch ends, steps": Variant(every="epoch end", steps=12),
    "accumulation": Variant(accumulates=2),
    "workers": Variant(workers=1, after=(2,), most=3),
    "positioned": Variant(positioned=True, after=(2,)),
    "positioned, validation": Variant(positioned=True, validates="within", after=()),
    "positioned, epochs": Variant(positioned=True, every="epoch", validates="at the end"),
    "positioned, epoch ends": Variant(positioned=True, every="epoch end"),
    "positioned, persistent workers": Variant(positioned=True, workers=1, after=(2,), most=3),
    "positioned, three batches": Variant(positioned=True, limit=3, after=(2,)),
    "Lightning alone": Variant(exact=False, after=()),
}


class Noisy(Dataset[Any]):
    """Eight rows, each loaded with other noise."""

    def __init__(self) -> None:
        self.rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index, :4] + torch.rand(4) / 10, self.rows[index, 4:]


class Hooked(Model):
    """Each hook changes what the next step uses, and the mean loss of an epoch decides on its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def _change(self, factor: float) -> None:
        weight: Any = self.layer[1].weight
        self.mean.mul_(0.9).add_(factor * weight.detach()[0] + torch.rand(()))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step((batch[0] + 0.1 * self.mean, batch[1]), index)
        self.log("train", loss, on_epoch=True, on_step=False)
        self.log("newest", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self._change(0.1)

    def on_train_epoch_end(self) -> None:
        self._change(0.3)

    def configure_optimizers(self) -> Any:
        [optimizer], [scheduler] = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        epochs, steps = (
            plateau(optimizer, patience=0, threshold=x, factor=0.9) for x in (0.2, 0.1)
        )
        return [optimizer], [
            scheduler,
            {"scheduler": epochs, "monitor": "train", "interval": "epoch"},
            {"scheduler": steps, "monitor": "newest", "interval": "step"},
        ]


class Validated(Hooked):
    passes = 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step(batch, index) * (1 + 0.1 * self.passes)

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("loss", (self.layer(x) - y).square().mean())
        if self.trainer.sanity_checking:
            self.passes += 1  # and not later

    def on_validation_end(self) -> None:
        self._change(0.2)

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizers[0], patience=0, threshold=0.2
        )
        return optimizers, [*schedulers, {"scheduler": plateau, "monitor": "loss"}]


class Spy(Callback):
    """What each batch finds."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        generators = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((trainer.global_step, batch_idx, batch[0].tolist(), generators, rate))


def run(variant: Variant, directory: Path, start: Path | None = None) -> Any:
    """What every batch finds, and the final bits. The checkpoints lie in `directory` alone."""
    shutil.rmtree(directory, ignore_errors=True)
    seed_everything(0, verbose=False)
    model = Validated() if variant.validates else Hooked()
    loader: Any = DataLoader(
        Noisy(),
        batch_size=2,
        shuffle=True,
        num_workers=variant.workers,
        persistent_workers=variant.positioned and variant.workers > 0,
    )
    if variant.positioned:
        loader = perdure.torch.ResumableLoader(loader)
    saver = ModelCheckpoint(
        str(directory),
        filename="{step}",
        auto_insert_metric_name=False,
        save_top_k=-1,
        every_n_train_steps=1 if variant.every == "batch" else None,
        every_n_epochs=None if variant.every == "batch" else 1,
        save_on_train_epoch_end=True if variant.every == "epoch end" else None,
    )
    spy = Spy()
    exact = [perdure.plugins.lightning.ExactResume()] if variant.exact else []
    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[saver, spy, *exact],
        plugins=[perdure.plugins.lightning.CheckpointIO()],
        accumulate_grad_batches=variant.accumulates,
        limit_train_batches=variant.limit,
        max_steps=variant.steps,
        val_check_interval=2 if variant.validates == "within" else None,
        num_sanity_val_steps=2 if variant.validates else 0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = DataLoader(Noisy(), batch_size=4) if variant.validates else None
    trainer.fit(model, loader, rows, ckpt_path=None if start is None else str(start))
    return spy.seen, [value.tolist() for value in model.state_dict().values()]


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.ckpt"))


def compare(variant: Variant, base: Path) -> dict[str, Any]:
    whole, bits = run(variant, base / "whole")
    last = steps_in(base / "whole")[-1]
    resumes, differing = 0, []
    for step in steps_in(base / "whole")[:-1][: variant.most]:
        seen, end = run(variant, base / "resumed", base / "whole" / f"{step}.ckpt")
        resumes += 1
        if (seen, end) != (whole[len(whole) - len(seen) :], bits):
            differing.append([step])
        again = {step + more for more in variant.after} & set(steps_in(base / "resumed"))
        for second in sorted(again - {last}):
            seen, end = run(variant, base / "again", base / "resumed" / f"{second}.ckpt")
            resumes += 1
            if (seen, end) != (whole[len(whole) - len(seen) :], bits):
                differing.append([step, second])
    return {"resumes": resumes, "differing": differing}


def compare_batches(base: Path) -> dict[str, Any]:
    """The batches of a `ResumableLoader` without `ExactResume`, and so with other generators."""
    variant = Variant(positioned=True, exact=False)
    whole = [batch[:3] for batch in run(variant, base / "whole")[0]]
    resumes, differing = 0, []
    for step in steps_in(base / "whole")[:-1]:
        seen, _ = run(variant, base / "resumed", base / "whole" / f"{step}.ckpt")
        resumes += 1
        if [batch[:3] for batch in seen] != whole[step:]:
            differing.append([step])
    return {"resumes": resumes, "differing": differing}


def main() -> None:
    answers = {name: compare(variant, Path(sys.argv[1])) for name, variant in VARIANTS.items()}
    answers["positioned, Lightning alone"] = compare_batches(Path(sys.argv[1]))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
