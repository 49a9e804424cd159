"""Lightning on run directories; `make proof-doors` has it installed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from plugin_programs import answer_of, run_program
from torch.utils.data import DataLoader, Sampler, TensorDataset

import perdure
from damage import flip
from perdure.errors import CorruptionError, StateError
from perdure.store import Run
from perdure.torch import ResumableLoader

if not all(map(importlib.util.find_spec, ("lightning",))):
    pytest.skip("Lightning is not installed; make proof-doors has it", allow_module_level=True)
# Lightning uses what torch has declared outdated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WORKER = Path(__file__).with_name("lightning_worker.py")
MATRIX = Path(__file__).with_name("lightning_matrix.py")
work = partial(run_program, WORKER)
ended = partial(answer_of, WORKER)


def quiet(directory: Path) -> dict[str, Any]:
    """Arguments of a Trainer on the CPU that prints nothing."""
    return {
        "accelerator": "cpu",
        "default_root_dir": directory,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole = ended("plugin", tmp_path / "whole")
    # Lightning finishes the step after SIGTERM, and saves it; by itself it would end with status 0.
    for fault, status, start in (("SIGKILL", -signal.SIGKILL, 6), ("SIGTERM", 75, 8)):
        assert work(f"plugin-{fault}", tmp_path / fault)[0] == status
        answer = ended("plugin", tmp_path / fault)
        assert answer == {"bits": whole["bits"], "step": 12, "start": start}


def test_fit_resumes_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    whole = ended("fit", tmp_path / "whole")
    assert work("fit-SIGKILL", tmp_path / "run")[0] == -signal.SIGKILL
    saved = sorted((tmp_path / "run").glob("*.ckpt"), key=lambda path: Run(path).steps()[-1])
    assert [Run(path).steps()[-1] for path in saved] == [4, 6]
    (tmp_path / "run" / "begun.ckpt").mkdir()  # a save that was killed before its commit
    for pack in (saved[-1] / "packs").glob("*.pack"):
        pack.chmod(0o600)
        flip(pack, 0)
    status, out, err = work("fit", tmp_path / "run")
    assert status == 0, err
    assert "an older checkpoint" in err
    assert out == {"bits": whole["bits"], "step": 12, "start": 4}
    # Nothing is left to do, and the bits are those that were saved.
    assert ended("fit", tmp_path / "run")["bits"] == whole["bits"]
    for path in (tmp_path / "run").glob("*.ckpt/packs/*.pack"):
        path.chmod(0o600)
        flip(path, 1)  # not the bit that is flipped already
    status, _, err = work("fit", tmp_path / "run")
    assert status == 1
    assert "is whole" in err


def test_every_checkpoint_is_resumed_exactly_and_those_of_resumed_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, MATRIX, tmp_path], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    alone = answers.pop("Lightning alone")
    assert [answer["differing"] for answer in answers.values()] == [[]] * len(answers)
    assert {name: answer["resumes"] for name, answer in answers.items()} == {
        "batches": 37,
        "steps": 25,
        "validation": 37,
        "validations": 20,
        "epochs": 3,
        "epoch ends": 3,
        "epoch ends, steps": 3,
        "accumulation": 13,
        "workers": 6,
        "positioned": 20,
        "positioned, validation": 11,
        "positioned, epochs": 3,
        "positioned, epoch ends": 3,
        "positioned, persistent workers": 6,
        "positioned, three batches": 14,
        "positioned, Lightning alone": 11,
    }
    # The same checkpoints without the generators, and with the loader at the begin of its epoch.
    assert alone["resumes"] == 11
    assert len(alone["differing"]) == 11


def test_checkpoints_are_exact_verified_and_replaced(tmp_path: Path) -> None:
    from perdure.plugins.lightning import CheckpointIO

    plugin = CheckpointIO()
    path = tmp_path / "last.ckpt"
    checkpoint = {
        "global_step": 3,
        "state_dict": {"w": torch.arange(3, dtype=torch.bfloat16)},
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
        ],
        "pair": (1, None, "x"),
        "hyper_parameters": {"size": torch.Size([1]), "kind": slice(1, 2)},
    }
    plugin.save_checkpoint(checkpoint, path)
    plugin.save_checkpoint(checkpoint | {"pair": (2,)}, path)  # the same step again
    assert len(Run(path).steps()) == 1
    loaded = plugin.load_checkpoint(path, weights_only=False, state=None)
    assert list(loaded) == list(checkpoint)
    assert loaded["pair"] == (2,)
    assert torch.equal(loaded["state_dict"]["w"], checkpoint["state_dict"]["w"])
    assert loaded["state_dict"]["w"].dtype == torch.bfloat16
    assert loaded["optimizer_states"] == checkpoint["optimizer_states"]
    assert loaded["hyper_parameters"] == checkpoint["hyper_parameters"]
    for pack in (path / "packs").glob("*.pack"):
        pack.chmod(0o600)
        flip(pack, 0)
    with pytest.raises(CorruptionError):
        plugin.load_checkpoint(path)
    plugin.remove_checkpoint(path)
    assert not path.exists()
    torch.save({"global_step": 1}, tmp_path / "file.ckpt")
    assert plugin.load_checkpoint(tmp_path / "file.ckpt") == {"global_step": 1}


@pytest.mark.parametrize(("how", "most"), [("large", 3), ("large-late", 9)])
def test_of_two_processes_of_a_machine_one_reads_each_chunk(
    tmp_path: Path, how: str, most: int
) -> None:
    from perdure.plugins.lightning import CheckpointIO

    path = tmp_path / "last.ckpt"
    w = torch.arange(3 * 2**20, dtype=torch.int32)
    CheckpointIO().save_checkpoint({"global_step": 1, "state_dict": {"w": w}}, path)

    def load(rank: int) -> Any:
        return subprocess.run(
            [sys.executable, WORKER, how, path],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "RANK": str(rank)},
        )

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(load, range(2)))
    answers = [json.loads(process.stdout.splitlines()[-1]) for process in ended]
    assert all(answer["equal"] for answer in answers), ended
    # Process 0 has read alone before: then each reads all by itself, and none waits for ever.
    assert sum(answer["read"] for answer in answers) == most


def test_a_checkpoint_of_a_manager_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from perdure.plugins.lightning import CheckpointIO

    with perdure.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": torch.ones(2)})
    with pytest.raises(StateError, match="the members w"):
        CheckpointIO().load_checkpoint(tmp_path / "run")


def test_a_loaded_tensor_is_in_the_memory_that_was_read(tmp_path: Path) -> None:
    from perdure.plugins.lightning import CheckpointIO

    large = torch.arange(100_000.0)
    CheckpointIO().save_checkpoint({"global_step": 1, "w": large}, tmp_path / "a.ckpt")
    first, second = (CheckpointIO().load_checkpoint(tmp_path / "a.ckpt")["w"] for _ in range(2))
    assert first.data_ptr() % 4096 == 0, "it was copied"
    first += 1
    assert torch.equal(second, large)


def test_a_checkpoint_is_removed_after_a_save_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`AsyncCheckpointIO` saves in one thread and removes in another."""
    from perdure.plugins.lightning import CheckpointIO

    path = tmp_path / "a.ckpt"
    remover = threading.Thread(target=lambda: CheckpointIO().remove_checkpoint(path))
    save = Run.save

    def interrupted(run: Run, *args: Any, **kwargs: Any) -> Any:
        remover.start()
        remover.join(0.3)  # it ends in this time unless it waits for the save
        return save(run, *args, **kwargs)

    monkeypatch.setattr(Run, "save", interrupted)
    CheckpointIO().save_checkpoint({"global_step": 1, "w": torch.ones(2)}, path)
    remover.join()
    assert not path.exists()


def rows(size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 5)), batch_size=size, **options)


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


REFUSED: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "persistent workers": (
        lambda: [rows(num_workers=1, persistent_workers=True)],
        "persistent_workers=False",
    ),
    "persistent workers of a validation": (
        lambda: [rows(), rows(num_workers=1, persistent_workers=True)],
        "persistent_workers=False",
    ),
    "a validation with a position": (
        lambda: [rows(), ResumableLoader(rows())],
        "a validation has a ResumableLoader",
    ),
    "one of two positions": (
        lambda: [[rows(), ResumableLoader(rows())]],
        "others have no position",
    ),
    "no length": (
        lambda: [ResumableLoader(rows(sampler=Unsized()))],
        "reads a batch ahead",
    ),
}


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and sanity checks
@pytest.mark.parametrize("sanity", [0, 1])
@pytest.mark.parametrize("kind", REFUSED)
def test_loaders_that_cannot_be_resumed_exactly_are_refused(
    kind: str, sanity: int, tmp_path: Path
) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from perdure.plugins.lightning import fit

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            raise AssertionError("the training has begun")

        def validation_step(self, batch: Any, index: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = Trainer(
        max_epochs=2,
        num_sanity_val_steps=sanity,
        **quiet(tmp_path),
    )
    make, text = REFUSED[kind]
    with pytest.raises(StateError, match=text):
        fit(trainer, tmp_path / "run", Model(), *make())


class Stopped(Exception):
    pass


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
@pytest.mark.parametrize("end", [4, 10])  # with a gradient that no step has used
def test_what_no_state_dict_has_comes_back(tmp_path: Path, end: int) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torchmetrics import MeanSquaredError

    from perdure.plugins.lightning import fit

    class Model(LightningModule):
        """Keeps what no `state_dict` has, and computes with it."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.inner, self.out = torch.nn.Linear(5, 5), torch.nn.Linear(5, 1)
            self.mean, self.place = 0.0, 0
            self.hidden: torch.Tensor | None = None
            self.register_buffer("queue", torch.zeros(3), persistent=False)
            self.error = MeanSquaredError()

        def training_step(self, batch: Any, index: int) -> None:
            inner_adam, out_adam = self.optimizers()  # type: ignore[misc]
            inner = self.inner(batch[0]) + (0 if self.hidden is None else self.hidden)
            loss = (self.out(inner + self.mean) + self.queue.sum()).square().mean()
            seen.append((loss.item().hex(), self.out.bias.requires_grad))
            self.log("error", self.error)  # Lightning then keeps its address in the module
            self.error(inner[:, 0].detach(), batch[0][:, 0])
            self.manual_backward(loss)
            out_adam.step()
            out_adam.zero_grad()
            if index % 2:
                inner_adam.step()
                inner_adam.zero_grad()
            self.hidden, self.mean = 0.1 * inner.detach().mean(0), 0.1 * float(loss)
            self.queue[self.place] = self.mean
            self.place = (self.place + 1) % 3

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(p.parameters(), 0.1) for p in (self.inner, self.out)]

    class Changes(Callback):
        def __init__(self, end: int) -> None:
            self.end, self.batches = end, 0

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, index: int
        ) -> None:
            count = trainer.fit_loop.total_batch_idx + 1
            if count in (2, 6):
                pl_module.out.bias.requires_grad_(count == 6)
            if count == self.end:
                raise Stopped

    def trained(directory: Path, end: int = 0) -> list[Any]:
        torch.manual_seed(0)
        model = Model()
        trainer = Trainer(
            max_epochs=2,
            **quiet(tmp_path),
            callbacks=[Changes(end)],
        )
        rows = DataLoader(TensorDataset(torch.arange(60).view(12, 5) / 60), 2, shuffle=True)
        try:
            fit(trainer, directory, model, rows, every_n_train_steps=1)
        except Stopped:
            assert end
        return [value.tolist() for value in model.parameters()]

    seen: list[Any] = []
    bits = trained(tmp_path / "whole")
    whole = list(seen)
    trained(tmp_path / "run", end)
    seen.clear()
    assert (trained(tmp_path / "run"), seen) == (bits, whole[end - 1 :])


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_what_lightning_changes_where_an_epoch_begins_and_ends_comes_back(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    from perdure.plugins.lightning import fit

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            if (self.current_epoch, index) == self.end:
                raise Stopped
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("v", self.layer(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            adam = torch.optim.Adam(self.parameters(), 0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, threshold=1.0, patience=0)
            return [adam], [{"scheduler": plateau, "monitor": "v", "interval": "epoch"}]

    def trained(directory: Path, end: tuple[int, int] | None = None) -> list[Any]:
        torch.manual_seed(0)
        model = Model()
        model.end = end  # type: ignore[assignment]
        trainer = Trainer(
            max_epochs=4,
            **quiet(tmp_path),
            callbacks=[GradientAccumulationScheduler({1: 2})],
        )
        rows = DataLoader(TensorDataset(torch.arange(60).view(12, 5) / 60), 2)
        try:
            fit(trainer, directory, model, rows, rows, every_n_train_steps=1)
        except Stopped:
            assert end is not None
        state = trainer.lr_scheduler_configs[0].scheduler.state_dict()
        return [trainer.global_step, state, *(value.tolist() for value in model.parameters())]

    whole = trained(tmp_path / "whole")
    assert (
        trained(tmp_path / "run", (1, 3))[0] == 7
    )  # in the middle of an epoch and an accumulation
    assert trained(tmp_path / "run") == whole


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_a_run_that_a_callback_has_stopped_stays_at_its_end(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, OnExceptionCheckpoint

    from perdure.plugins.lightning import fit

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(5, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            if self.trainer.global_step == end:
                raise Stopped
            self.log("step", 0.0)  # the axis of plots; no number of a checkpoint
            self.log("constant", 1.0)
            if within and index == 1:
                self.trainer.save_checkpoint(tmp_path / "within.ckpt")
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.1)

    def trained() -> list[Any]:
        torch.manual_seed(0)
        model = Model()
        trainer = Trainer(
            max_epochs=9,
            **quiet(tmp_path),
            callbacks=[EarlyStopping("constant", patience=2), OnExceptionCheckpoint(tmp_path)],
        )
        rows = DataLoader(TensorDataset(torch.arange(60).view(12, 5) / 60), 4)
        fit(trainer, tmp_path / "run", model, rows, every_n_train_steps=1)
        return [trainer.global_step, *(value.tolist() for value in model.parameters())]

    within, end = False, -1
    whole = trained()
    assert whole[0] == 9
    assert trained() == whole
    names = sorted(path.name for path in (tmp_path / "run").glob("*.ckpt"))
    assert names == ["epoch=2-step=8.ckpt", "epoch=2-step=9.ckpt"]
    shutil.rmtree(tmp_path / "run")
    within = True
    with pytest.warns(UserWarning, match="saved in the middle of a step"):
        assert trained() == whole
    shutil.rmtree(tmp_path / "run")
    within, end = False, 4
    with pytest.warns(UserWarning, match="saved in the middle of a step"), pytest.raises(Stopped):
        trained()
    end = -1
    assert trained() == whole


@dataclass
class Case:
    """A run of three epochs of four batches, stopped in the batch `stop`, or where training ends; or by
    SIGTERM in the validation after the batch `terminated`."""

    stop: int = 99
    every: int = 2
    arguments: dict[str, Any] = field(default_factory=dict)
    skipped: int = 99
    terminated: int = 99


CASES = {
    "the best checkpoint": Case(stop=5, every=4),
    "loaders made again, within": Case(stop=6, arguments={"reload_dataloaders_every_n_epochs": 2}),
    "loaders made again, between": Case(stop=8, arguments={"reload_dataloaders_every_n_epochs": 2}),
    "a batch left out": Case(stop=8, every=6, skipped=5),
    "the end": Case(every=4),
    "the end after a save": Case(every=5),
    "SIGTERM in a validation": Case(every=4, terminated=7),
    "the end within an epoch": Case(every=6, arguments={"max_steps": 6}),
}


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_logs_and_returns_what_the_undisturbed_one_does(
    tmp_path: Path, name: str
) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers.logger import Logger
    from torchmetrics import MeanSquaredError

    from perdure.plugins.lightning import fit

    case = CASES[name]

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.error = torch.nn.Linear(5, 1), MeanSquaredError()

        def train_dataloader(self) -> Any:
            rows = torch.arange(80 + 10.0 * self.current_epoch)[-80:]
            seen.append(("made", self.current_epoch))
            return DataLoader(TensorDataset(rows.view(16, 5) / 80), 4, shuffle=True)

        def val_dataloader(self) -> Any:
            return rows(int(self.current_epoch) + 1)

        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            return -1 if self.trainer.fit_loop.total_batch_idx == case.skipped else None

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch[0]).square().mean()
            if index % 2 == 0:
                self.log("sparse", loss, on_epoch=True, prog_bar=True)
            self.error(self.layer(batch[0])[:, 0].detach(), batch[0][:, 0])
            self.log("error", self.error)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            batches = self.trainer.fit_loop.total_batch_idx
            if stop >= 0 and index == 0 and batches == case.terminated:
                signal.raise_signal(signal.SIGTERM)
            self.log("count", float(len(batch[0])), on_step=True, on_epoch=False)
            self.log("grows", float(self.current_epoch) + float(torch.rand(())))

        def on_train_end(self) -> None:
            stop_at(99)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.1)

    class Lines(Logger):
        name, version = "lines", 0  # type: ignore[assignment]

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            seen.append((step, {key: float(value).hex() for key, value in metrics.items()}))

    class Stop(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            stop_at(trainer.fit_loop.total_batch_idx)

    def stop_at(batch: int) -> None:
        if stop == batch:
            raise Stopped

    def trained(directory: Path) -> Any:
        torch.manual_seed(0)
        best = ModelCheckpoint(directory / "best", monitor="grows", mode="min")
        newest = ModelCheckpoint(directory / "newest", save_last=True)
        trainer = Trainer(
            **{"max_epochs": 3, "log_every_n_steps": 1, **case.arguments},
            **{**quiet(tmp_path), "logger": Lines()},
            num_sanity_val_steps=0,
            callbacks=[best, newest, Stop()],
        )
        fit(trainer, directory / "run", Model(), every_n_train_steps=case.every)
        metrics = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        files = sorted(str(path.relative_to(directory)) for path in directory.glob("[bn]*/*.ckpt"))
        ends = [trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx]
        scores = [best.best_model_score, newest._last_checkpoint_saved.split("/")[-1]]
        weights = [value.tolist() for value in trainer.lightning_module.state_dict().values()]
        return [ends, metrics, files, scores, weights, torch.get_rng_state().tolist()]

    seen: list[Any] = []
    stop = -1
    whole = trained(tmp_path / "whole")
    lines, stop = list(seen), case.stop
    seen.clear()
    with pytest.raises(SystemExit if case.terminated < 99 else Stopped) as stopped:
        trained(tmp_path / "run")
    assert getattr(stopped.value, "code", 75) == 75
    begun, stop = len(seen), -1
    assert trained(tmp_path / "run") == whole
    made_again = next(each for each in seen[begun:] if each[0] == "made")
    assert made_again in seen[:begun]
    seen.remove(made_again)
    repeated = seen[begun:]
    assert repeated == lines[len(lines) - len(repeated) :]


class InPasses:
    """A sampler of batches with an order of its own in each epoch of which it hears."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[(first + self.epoch) % 4] for first in range(4)])


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
@pytest.mark.parametrize("is_inner", [False, True])
def test_samplers_hear_of_an_epoch_as_without_a_resume(tmp_path: Path, is_inner: bool) -> None:
    """Lightning tells the sampler in a sampler of batches, and not that one itself."""
    from lightning.pytorch import LightningModule, Trainer

    from perdure.plugins.lightning import fit

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            if self.trainer.global_step == stop:
                raise Stopped
            seen.append(batch.tolist())
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Outer:
        def __init__(self) -> None:
            self.sampler = InPasses()

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.sampler)

    def train(directory: Path) -> None:
        sampler: Any = Outer() if is_inner else InPasses()
        rows: Any = torch.arange(4.0).view(4, 1)
        trainer = Trainer(max_epochs=3, **quiet(tmp_path))
        loader = DataLoader(rows, batch_sampler=sampler)
        fit(trainer, directory, Model(), loader, every_n_train_steps=2)

    seen: list[Any] = []
    stop = -1
    train(tmp_path / "whole")
    whole, stop = list(seen), 7
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    seen.clear()
    stop = -1
    train(tmp_path / "run")
    assert seen == whole[6:]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
def test_buffers_that_a_run_makes_or_changes_come_back(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from perdure.plugins.lightning import fit

    class Model(LightningModule):
        rows: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.normal = torch.nn.Linear(5, 1), torch.nn.LazyBatchNorm1d()
            self.inner.register_buffer("bank", torch.zeros(0, 5))
            self.register_buffer("rows", torch.zeros(1, 5))
            self.register_buffer("mean", None)
            self.register_buffer("first", torch.zeros(5))
            self.register_buffer("wide", torch.zeros(5))

        def training_step(self, batch: Any, index: int) -> Any:
            x = self.normal(batch[0])
            self.inner.bank = torch.cat([cast(Any, self.inner.bank), x.detach()])[-3:]
            self.rows = torch.cat([self.rows, x.detach()])
            mean = x.detach().mean(0)
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros(5))
            self.late += mean
            self.first = None
            self.wide = self.wide.double() + mean / 3
            scale = 1 + 0.1 * (self.inner.bank.sum() + self.rows.sum() + self.mean.sum())
            loss = self.inner(x + self.late + self.wide.float()).square().mean() * scale
            if self.trainer.global_step == stop:
                raise Stopped
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    def trained(directory: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Model()
        model.normal(torch.ones(2, 5))
        trainer = Trainer(max_epochs=3, **quiet(tmp_path))
        rows = DataLoader(TensorDataset(torch.arange(40).view(8, 5) / 40), 2)
        fit(trainer, directory, model, rows, every_n_train_steps=1)
        assert model.first is None
        return {name: (value.dtype, value.tolist()) for name, value in model.state_dict().items()}

    stop = -1
    whole = trained(tmp_path / "whole")
    stop = 2
    with pytest.raises(Stopped):
        trained(tmp_path / "run")
    stop = 5
    with pytest.raises(Stopped):
        trained(tmp_path / "run")
    stop = -1
    assert trained(tmp_path / "run") == whole
    assert trained(tmp_path / "run") == whole


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_module_that_lightning_converts_comes_back_with_all_bits(
    tmp_path: Path, precision: Any
) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from perdure.plugins.lightning import fit

    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.normal = torch.nn.BatchNorm1d(32)

        def training_step(self, batch: Any, index: int) -> Any:
            if self.trainer.global_step == stop:
                raise Stopped
            return self(self.normal(batch)).square().mean()

    def trained(directory: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Model()
        trainer = Trainer(max_epochs=2, precision=precision, **quiet(tmp_path))
        rows = DataLoader(cast(Any, torch.randn(8, 32)), 2)
        fit(trainer, directory, model, rows, every_n_train_steps=1)
        return {name: (value.dtype, value.tolist()) for name, value in model.state_dict().items()}

    stop = -1
    whole = trained(tmp_path / "whole")
    stop = 3
    with pytest.raises(Stopped):
        trained(tmp_path / "run")
    stop = -1
    assert trained(tmp_path / "run") == whole


@pytest.mark.parametrize("way", ["group", "sharded"])
def test_each_process_gets_its_own_buffers_back(tmp_path: Path, way: str) -> None:
    """DDP gives all processes those of the first only after a step that exchanges gradients."""

    def processes(how: str, directory: Path) -> tuple[int, list[str], str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*launcher, "--nproc-per-node=2", WORKER, how, directory],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found = [Path(f"{directory}-{rank}.json") for rank in range(2)]
        return done.returncode, [each.read_text() for each in found if each.exists()], done.stderr

    status, whole, err = processes(way, tmp_path / "whole")
    assert status == 0, err
    assert whole[0] != whole[1]
    assert processes(f"{way}-SIGKILL", tmp_path / "run")[0] != 0
    status, resumed, err = processes(way, tmp_path / "run")
    assert status == 0, err
    assert resumed == whole


def test_every_checkpoint_knows_all_saves_of_its_step(tmp_path: Path) -> None:
    """A run may resume from any of them."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    from perdure.plugins.lightning import CheckpointIO, ExactResume

    savers: list[Any] = [
        ModelCheckpoint(tmp_path / "a", every_n_train_steps=3, save_last=True),
        ModelCheckpoint(tmp_path / "b", monitor="step", mode="max", every_n_train_steps=3),
        ModelCheckpoint(tmp_path / "c", mode="max", every_n_train_steps=3, save_last="link"),
    ]
    trainer = Trainer(
        max_steps=3,
        limit_val_batches=0,
        **quiet(tmp_path),
        callbacks=[*savers, ExactResume()],
        plugins=[CheckpointIO()],
    )
    trainer.fit(BoringModel())
    states = {saver.state_key: saver.state_dict() for saver in savers}
    paths = list(tmp_path.glob("[abc]/*.ckpt"))
    assert len(paths) == 5
    for path in paths:
        callbacks = CheckpointIO().load_checkpoint(path)["callbacks"]
        assert {key: callbacks[key] for key in states} == states


@pytest.mark.parametrize("name", ["LearningRateFinder", "BatchSizeFinder"])
def test_callbacks_that_train_at_each_start_are_refused(name: str, tmp_path: Path) -> None:
    from lightning.pytorch import Trainer, callbacks
    from lightning.pytorch.demos.boring_classes import BoringModel

    from perdure.plugins.lightning import fit

    trainer = Trainer(
        max_epochs=1,
        callbacks=[getattr(callbacks, name)()],
        **quiet(tmp_path),
    )
    model = BoringModel()
    model.batch_size = 4  # type: ignore[assignment]
    with pytest.raises(StateError, match=f"the callback {name} runs at each start"):
        fit(trainer, tmp_path / "run", model)


def test_several_processes_of_another_strategy_are_refused() -> None:
    from types import SimpleNamespace

    from perdure.plugins.lightning import ExactResume

    trainer: Any = SimpleNamespace(world_size=2, strategy=None)
    with pytest.raises(StateError, match=r"lightning\.fit.*; found 2 processes with NoneType"):
        ExactResume().setup(trainer, None, "fit")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # of the import of lightning
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("StochasticWeightAveraging", [0.1], "average checkpoints afterwards"),
        ("ModelPruning", ["l1_unstructured"], "ModelPruning gives layers masks"),
    ],
)
def test_callbacks_that_change_what_is_trained_are_refused_before_the_first_step(
    tmp_path: Path, name: str, arguments: list[Any], reason: str
) -> None:
    import lightning
    from lightning.pytorch import callbacks
    from lightning.pytorch.demos.boring_classes import BoringModel

    from perdure.plugins.lightning import fit

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[getattr(callbacks, name)(*arguments)],
    )
    with pytest.raises(StateError, match=reason):
        fit(trainer, tmp_path / "run", BoringModel())
    assert trainer.global_step == 0
