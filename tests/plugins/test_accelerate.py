"""Accelerate on run directories; `make proof-doors` has it installed."""

from __future__ import annotations

import importlib.util
import random
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plugin_programs import answer_of, run_program
from torch.utils.data import DataLoader, TensorDataset

from perdure import EXIT_PREEMPTED, CheckpointManager
from perdure.errors import MismatchError, StateError, UnsupportedLeafError
from perdure.store import Run
from perdure.torch import ResumableLoader

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("Accelerate is not installed; make proof-doors has it", allow_module_level=True)
WORKER = Path(__file__).with_name("accelerate_worker.py")
BATCHES = 18
work = partial(run_program, WORKER)
ended = partial(answer_of, WORKER)


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole = ended("plugin", tmp_path / "whole")
    assert whole["steps"] == list(range(BATCHES))
    assert work("plugin-killed", tmp_path / "run")[0] == -signal.SIGKILL
    status, answer, err = work("plugin", tmp_path / "run")
    assert status == 0, err
    assert "only in part" not in err
    assert answer["bits"] == whole["bits"]
    assert answer["steps"][0] in (4, 8)  # the save of step 8 may have been under way
    assert answer["steps"] == list(range(answer["steps"][0], BATCHES))
    assert ended("plugin", tmp_path / "run") == {"bits": whole["bits"], "steps": []}
    assert work("plugin-terminated", tmp_path / "terminated")[0] == EXIT_PREEMPTED
    assert Run(tmp_path / "terminated").steps()[-1] == 10
    assert ended("plugin", tmp_path / "terminated")["bits"] == whole["bits"]


def test_a_signal_in_the_last_step_is_no_end_of_the_program(tmp_path: Path) -> None:
    """What follows the loop would be killed, and a restart begins there."""
    status, answer, err = work(f"plugin-terminated{BATCHES - 1}", tmp_path / "run")
    assert (status, answer) == (EXIT_PREEMPTED, None), err
    whole = ended("plugin", tmp_path / "whole")
    assert ended("plugin", tmp_path / "run") == {"bits": whole["bits"], "steps": []}


def test_accelerate_alone_ends_with_other_bits(tmp_path: Path) -> None:
    whole = ended("own", tmp_path / "whole")
    assert work("own-killed", tmp_path / "run")[0] == -signal.SIGKILL
    answer = ended("own", tmp_path / "run")
    assert answer["steps"][0] == 8
    assert answer["bits"] != whole["bits"]


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_loaders_that_cannot_be_resumed_exactly_are_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator, skip_first_batches

    from perdure.plugins.accelerate import batches

    def plain(**options: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(4, 5)), shuffle=True, **options)

    def refusal(loader: Any, accelerator: Accelerator) -> str:
        with pytest.raises(StateError) as caught:
            next(batches(accelerator, loader, tmp_path / "run", epochs=1))
        return str(caught.value)

    keeping = {"num_workers": 1, "persistent_workers": True}
    accelerator = Accelerator(cpu=True)
    assert "persistent_workers=False" in refusal(accelerator.prepare(plain(**keeping)), accelerator)
    accelerator = Accelerator(cpu=True)
    loader, _ = accelerator.prepare(plain(), plain(**keeping))  # the other for an evaluation
    assert "persistent_workers=False" in refusal(loader, accelerator)
    for loader in (plain(), ResumableLoader(plain())):
        assert "that it has not prepared" in refusal(loader, Accelerator(cpu=True))
    skipping = skip_first_batches((accelerator := Accelerator(cpu=True)).prepare(plain()), 1)
    assert "Pass the prepared loader itself: `batches` skips" in refusal(skipping, accelerator)


class Model(torch.nn.Module):
    """Keeps what no `state_dict` has, and computes with it."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.mean, self.place = 0.0, 0
        self.hidden: torch.Tensor | None = None
        self.register_buffer("queue", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x) + (0 if self.hidden is None else self.hidden)
        loss = (self.out(inner + self.mean) + self.queue.sum()).square().mean()
        self.hidden, self.mean = 0.1 * inner.detach().mean(0), 0.1 * float(loss)
        self.queue[self.place] = self.mean
        self.place = (self.place + 1) % 3
        return loss


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize("end", [2, 6])
def test_what_no_state_dict_has_comes_back(tmp_path: Path, end: int) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, end: int = 0) -> tuple[list[Any], list[Any]]:
        class Counting(Model):
            count = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                type(self).count += 1
                return super().forward(x * (1 + 0.1 * type(self).count))

        torch.manual_seed(0)
        model, seen = Counting(), list[Any]()
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        rows = DataLoader(TensorDataset(torch.arange(48).view(12, 4) / 48), 2, shuffle=True)
        accelerator = Accelerator(cpu=True)
        wrapped, optimizer, loader = accelerator.prepare(model, adam, rows)
        with CheckpointManager(directory, save_interval_steps=2) as manager:
            for step, (batch,) in batches(accelerator, loader, manager, epochs=2):
                if end and step == end:
                    break
                with accelerator.accumulate(wrapped):
                    accelerator.backward(loss := wrapped(batch))
                    optimizer.step()
                    optimizer.zero_grad()
                if step in (0, 2, 4, 8):
                    model.inner.requires_grad_(step in (2, 8))
                if step == 1:
                    accelerator.gradient_accumulation_steps = 2
                seen.append((loss.item().hex(), model.inner.weight.requires_grad))
        return seen, [value.tolist() for value in model.parameters()]

    whole, bits = trained(tmp_path / "whole")
    trained(tmp_path / "run", end)
    assert Run(tmp_path / "run").steps()[-1] == end
    assert trained(tmp_path / "run") == (whole[end:], bits)


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize("is_within", [True, False])
def test_a_second_loader_within_its_batches_is_warned_of(tmp_path: Path, is_within: bool) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    rows = [DataLoader(TensorDataset(torch.zeros(4, 4)), 1) for _ in range(2)]
    accelerator = Accelerator(cpu=True)
    loader, other = accelerator.prepare(*rows)
    drawn = iter(other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CheckpointManager(tmp_path / "run", recipe={}) as manager:
            for _ in batches(accelerator, loader, manager, epochs=1):
                _ = next(drawn) if is_within else [*other]
    found = [each for each in caught if "another prepared loader" in str(each.message)]
    assert len(found) == is_within


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_loader_that_the_loop_prepares_and_keeps_is_warned_of(
    tmp_path: Path, is_kept: bool
) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    accelerator = Accelerator(cpu=True)
    rows = [DataLoader(TensorDataset(torch.zeros(4, 4)), 1) for _ in range(2)]
    loader, late = accelerator.prepare(rows[0]), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with CheckpointManager(tmp_path / "run", save_interval_steps=1, recipe={}) as manager:
            for _ in batches(accelerator, loader, manager, epochs=1):
                late = late if late and is_kept else accelerator.prepare(rows[1])
                assert len([*late]) == 4
    found = [each for each in caught if "prepared within the loop" in str(each.message)]
    assert len(found) == is_kept


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from NumPy's generator and from one of its own, which it makes late if it `is_late`."""

    def __init__(self, drawn: list[float], is_late: bool) -> None:
        self.drawn, self.source = drawn, None if is_late else np.random.default_rng(1)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        self.source = self.source or np.random.default_rng(1)
        self.drawn += [np.random.rand(), self.source.random()]  # noqa: NPY002
        return torch.tensor(self.drawn[-2:])


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_examples_draw_other_numbers_in_each_epoch(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, *, epochs: int = 3, size: int = 2, late: bool = False) -> Any:
        np.random.seed(0)  # noqa: NPY002
        drawn = list[float]()
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Noisy(drawn, late), size))
        with CheckpointManager(directory, save_interval_steps=1, recipe={}) as manager:
            found = [batch for _, batch in batches(accelerator, loader, manager, epochs=epochs)]
        return drawn, found

    drawn, _ = trained(tmp_path / "whole")
    assert len(drawn) == len(set(drawn)) == 36
    with pytest.raises(StateError, match="has made a random generator for its first batch"):
        trained(tmp_path / "late", late=True)
    trained(tmp_path / "run", epochs=1)
    with pytest.raises(StateError, match="expected 3 batches in an epoch, as the run had, found 2"):
        trained(tmp_path / "run", size=3)
    assert len(trained(tmp_path / "run", epochs=2)[1]) == 3  # the control


class Exchanging(torch.utils.data.Dataset[Any]):
    """Has another generator in each epoch, or for each example."""

    def __init__(self, *, within: bool = False) -> None:
        self.within, self.source = within, random.Random(0)

    def set_epoch(self, epoch: int) -> None:
        self.source = random.Random(epoch)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.within:
            self.source = random.Random(index)
        return torch.tensor([index + self.source.random()])


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_a_generator_may_be_exchanged_where_an_epoch_begins(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, end: int = 0, *, within: bool = False) -> list[list[float]]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(Exchanging(within=within), 2, shuffle=True))
        seen = []
        with CheckpointManager(directory, save_interval_steps=2, recipe={}) as manager:
            for step, batch in batches(accelerator, loader, manager, epochs=3):
                if end and step == end:
                    break
                seen.append(batch.flatten().tolist())
        return seen

    whole = trained(tmp_path / "whole")
    for end in (3, 7, 11):
        trained(tmp_path / f"{end}", end)
        assert trained(tmp_path / f"{end}") == whole[end - 1 :]
    with pytest.raises(StateError, match="has exchanged a random generator within an epoch"):
        trained(tmp_path / "within", within=True)


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize("seedable", [True, False])
def test_other_loaders_begin_their_next_pass_as_they_would_have(
    tmp_path: Path, seedable: bool
) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, end: int = 0, *, late: bool = False) -> list[list[float]]:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)
        )
        seeds = [torch.Generator().manual_seed(seed) for seed in range(3)]
        rows = TensorDataset(torch.arange(6))
        loaders = [DataLoader(rows, 2, shuffle=True, generator=each) for each in seeds]
        loader, other, evaluation, noisy = accelerator.prepare(
            *loaders, DataLoader(Noisy([], late), 6)
        )
        seen, drawn = [], iter(other)
        with CheckpointManager(directory, save_interval_steps=3, recipe={}) as manager:
            for step, (batch,) in batches(accelerator, loader, manager, epochs=3):
                if end and step == end:
                    break
                drawn = drawn if step % 3 else iter(other)
                seen.append(batch.tolist() + next(drawn)[0].tolist())
                if step % 3 == 2:
                    assert next(drawn, None) is None
                for (rows,) in evaluation if step % 2 else ():
                    seen[-1] += rows.tolist()
                seen[-1] += [each for rows in noisy for each in rows.flatten().tolist()]
        # As after the run, if it has ended before.
        return [*seen, [each for (rows,) in [*other, *evaluation] for each in rows.tolist()]]

    whole = trained(tmp_path / "whole")
    for end in (3, 6):
        trained(tmp_path / f"{end}", end)
        assert trained(tmp_path / f"{end}") == whole[end:]
    assert trained(tmp_path / "whole") == whole[-1:]
    with pytest.raises(StateError, match="has made a random generator for its first batch"):
        trained(tmp_path / "late", late=True)


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_another_number_of_other_loaders_is_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(count: int) -> None:
        accelerator = Accelerator(cpu=True)
        rows = [DataLoader(TensorDataset(torch.zeros(4, 4)), 1) for _ in range(count)]
        loader, *_ = map(accelerator.prepare, rows)
        with CheckpointManager(tmp_path / "run", recipe={}) as manager:
            list(batches(accelerator, loader, manager, epochs=1))

    trained(3)
    with pytest.raises(StateError, match=r"expected 2 prepared loaders .*, found 1\. Prepare"):
        trained(2)


class Growing(torch.utils.data.Dataset[Any]):
    """Grows with the epoch if it `follows`, or by the loop."""

    def __init__(self, follows: bool) -> None:
        self.follows, self.count = follows, 4

    def set_epoch(self, epoch: int) -> None:
        self.count = 4 + 2 * epoch if self.follows else self.count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_epochs_may_differ_in_length_if_set_epoch_says_so(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(
        directory: Path, end: int = 0, *, follows: bool = True, grown: int = -1, epochs: int = 3
    ) -> list[Any]:
        torch.manual_seed(0)
        dataset, accelerator, seen = Growing(follows), Accelerator(cpu=True), list[Any]()
        loader = accelerator.prepare(DataLoader(dataset, 2, shuffle=True))
        with CheckpointManager(directory, save_interval_steps=1, recipe={}) as manager:
            for step, batch in batches(accelerator, loader, manager, epochs=epochs):
                if end and step == end:
                    break
                dataset.count += 4 * (step == grown)
                seen.append(batch.tolist())
        return seen

    whole = trained(tmp_path / "whole")
    assert len(whole) == 2 + 3 + 4
    for end in (1, 2, 4):
        trained(tmp_path / f"{end}", end)
        assert trained(tmp_path / f"{end}") == whole[end:]
    trained(tmp_path / "longer", epochs=2)
    assert trained(tmp_path / "longer") == whole[5:]
    for grown, end in ((0, 1), (1, 2), (1, 3)):  # within the epoch of the save, or before it
        where = tmp_path / f"grown{end}"
        trained(where, end, follows=False, grown=grown)
        with pytest.raises(StateError, match=r"expected 4 batches .* found 2"):
            trained(where, follows=False)


class Counter:
    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_what_differs_between_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered object is saved for each, another number of batches is refused."""
    from accelerate import Accelerator

    from perdure.plugins import accelerate as plugin

    def trained(epochs: int) -> list[float]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4)), 2))
        accelerator.register_for_checkpointing(same := Counter(), other := Counter())
        with CheckpointManager(tmp_path / "run", recipe={}) as manager:
            for _, (batch,) in plugin.batches(accelerator, loader, manager, epochs=epochs):
                same.count, other.count = same.count + 1, other.count + batch.sum()
        return [same.count.item(), other.count.item()]

    def gathered(own: list[Any]) -> list[Any]:
        return [*own, [own[0][0], "other"] if isinstance(own[0], list) else own[0]]

    monkeypatch.setattr(plugin, "gather_object", gathered)
    assert trained(1) == [2.0, 4.0]
    leaves = {path for path in Run(tmp_path / "run").load(2).leaves if path.startswith("objects")}
    assert leaves == {"objects/0/count", "objects/1/rank0/count"}
    assert trained(2) == [4.0, 8.0]
    monkeypatch.setattr(plugin, "gather_object", lambda own: [*own, own[0] - 1])
    with pytest.raises(
        StateError, match=r"same number of batches .* found 1 and 2\. .*even_batches=True"
    ):
        trained(3)


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_an_object_that_has_differed_between_processes_stays_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no other object when it is equal in all of them again."""
    from accelerate import Accelerator

    from perdure.plugins import accelerate as plugin

    class Local(Counter):
        """No restore can make one, so that the save would refuse another one in its place."""

    def trained(directory: Path, end: int = 0) -> list[float]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12.0)), 2))
        accelerator.register_for_checkpointing(same := Local(), other := Local())
        with CheckpointManager(directory, save_interval_steps=1, recipe={}) as manager:
            for step, (batch,) in plugin.batches(accelerator, loader, manager, epochs=1):
                if end and step == end:
                    break
                differs[:] = [step in (1, 3)]
                same.count, other.count = same.count + 1, other.count + batch.sum()
        return [same.count.item(), other.count.item()]

    def gathered(own: list[Any]) -> list[Any]:
        differ = isinstance(own[0], list) and differs[0]
        return [*own, [own[0][0], "other"] if differ else own[0]]

    differs = [False]
    monkeypatch.setattr(plugin, "gather_object", gathered)
    whole = trained(tmp_path / "whole")
    for end in (1, 2, 3, 4):
        trained(tmp_path / f"{end}", end)
        leaves = Run(tmp_path / f"{end}").load(end).leaves
        assert ("objects/1/rank0/count" in leaves) == (end >= 2)
        assert trained(tmp_path / f"{end}") == whole


class Kept(torch.nn.Module):
    """Has no `state_dict`, as a metric of torchmetrics has none."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mean = 0, torch.zeros(2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean = self.mean * 0.9 + batch.mean() * self.count
        return self.mean


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize("count", [1, 2])
def test_registered_modules_without_a_state_dict_come_back(tmp_path: Path, count: int) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, end: int = 0, *others: Any) -> list[Any]:
        accelerator, seen = Accelerator(cpu=True), list[Any]()
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12.0)), 2))
        kept = [Kept() for _ in range(count)]
        accelerator.register_for_checkpointing(*kept, *others)
        with CheckpointManager(directory, save_interval_steps=1, recipe={}) as manager:
            for step, (batch,) in batches(accelerator, loader, manager, epochs=2):
                if end and step == end:
                    break
                seen.append([each(batch).tolist() for each in kept])
        return seen

    whole = trained(tmp_path / "whole")
    for end in (1, 6, 8):
        trained(tmp_path / f"{end}", end)
        assert trained(tmp_path / f"{end}") == whole[end:]
    for other in (Counter(), torch.nn.Linear(1, 1)):  # which the run had not
        with pytest.raises(MismatchError, match=f"objects/{count}"):
            trained(tmp_path / "whole", 0, other)


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_resumed_epoch_knows_how_many_examples_its_last_batch_has(
    tmp_path: Path, drop_last: bool
) -> None:
    """`gather_for_metrics` leaves out the others, with which the processes fill it."""
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, end: int = 0) -> list[Any]:
        accelerator, seen = Accelerator(cpu=True), list[Any]()
        rows = DataLoader(TensorDataset(torch.arange(10)), 4, drop_last=drop_last)
        loader = accelerator.prepare(rows)
        with CheckpointManager(directory, save_interval_steps=1, recipe={}) as manager:
            for step, (batch,) in batches(accelerator, loader, manager, epochs=2):
                if end and step == end:
                    break
                state = accelerator.gradient_state
                seen.append((batch.tolist(), state.remainder, state.end_of_dataloader))
        return seen

    whole = trained(tmp_path / "whole")
    assert whole[0][1] == (-1 if drop_last else 2)
    for end in (1, 2, len(whole) // 2 + 1):
        trained(tmp_path / f"{end}", end)
        assert trained(tmp_path / f"{end}") == whole[end:]


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize(("split", "as_sampler"), [(False, False), (True, False), (False, True)])
def test_a_skipped_loader_knows_the_batches_of_all_processes(split: bool, as_sampler: bool) -> None:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    from perdure.plugins.accelerate import _skipped

    Accelerator(cpu=True)
    rows = TensorDataset(torch.arange(36))
    order = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(rows), 4, False)
    loader = DataLoader(rows, batch_sampler=order)
    if as_sampler:
        loader = DataLoader(rows, batch_size=None, sampler=order)
    prepared: Any = prepare_data_loader(
        loader, num_processes=2, process_index=1, split_batches=split, dispatch_batches=False
    )
    found = []
    for each in (prepared, _skipped(prepared, 2)):
        *_, (batch,) = each
        found.append((batch.tolist(), each.total_batch_size, each.remainder))
    assert found[0] == found[1]
    assert found[0][1] == (4 if split else 8)


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate, and of one process in DDP
def test_a_communication_hook_with_a_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    from perdure.plugins import trainer_library as library
    from perdure.plugins.accelerate import batches

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.zeros(4, 2)), 2))
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.MULTI_CPU)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(model)  # as `prepare` in several processes
        begun = batches(accelerator, loader, tmp_path / "run", epochs=1)
        assert next(begun)[0] == 0  # the control
        begun.close()  # type: ignore[attr-defined]
        ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
        with pytest.raises(UnsupportedLeafError, match="PowerSGDState, which keeps errors"):
            next(batches(accelerator, loader, tmp_path / "run", epochs=1))
        with pytest.raises(UnsupportedLeafError, match="PowerSGDState, which keeps errors"):
            library.arrange_buckets([ddp])  # of the Trainer
    finally:
        torch.distributed.destroy_process_group()


def drawn(batches: Any, how: str) -> Any:
    """Lists of batches to train on together, drawn from `batches` in another way than a plain loop."""
    if how == "two":  # the batches of one update, before the first of them is used
        while got := [each for _, each in zip(range(2), batches, strict=False)]:
            yield got
    else:
        for each in batches:
            yield [each]


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
@pytest.mark.parametrize("how", ["two", "hand", "skips", "own", "plain"])
def test_a_save_counts_no_batch_as_trained_that_the_loop_only_holds(
    tmp_path: Path, how: str
) -> None:
    """Nor does it miss one of a loop that leaves out some steps, or steps by an optimizer inside."""
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, end: int = -1) -> tuple[list[int], list[Any]]:
        torch.manual_seed(0)
        accelerator, seen = Accelerator(cpu=True), list[int]()
        layer = torch.nn.Linear(4, 1)
        adam = torch.optim.Adam(layer.parameters(), lr=0.05)
        rows = DataLoader(TensorDataset(torch.arange(56).view(14, 4) / 56), 2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(layer, adam, rows)
        stepped = torch.optim.SGD(layer.parameters(), lr=0.1) if how == "own" else optimizer
        with CheckpointManager(directory, save_interval_steps=1) as manager:
            for group in drawn(batches(accelerator, loader, manager, epochs=3), how):
                for number, (batch,) in group:
                    accelerator.backward(model(batch).square().mean())
                    seen.append(number)
                if end in seen:
                    return seen, []
                step = seen[-1]
                if not (how == "skips" and step in (0, 1, 8, 20)) and not (
                    how == "hand" and step % 3
                ):
                    stepped.step()
                stepped.zero_grad() if how != "hand" or step % 3 == 0 else None
        return seen, [value.tolist() for value in layer.parameters()]

    whole, bits = trained(tmp_path / "whole")
    assert whole == list(range(21))
    for end in (5, 9, 14, 20):
        trained(where := tmp_path / f"{end}", end)
        assert Run(where).steps(), "no save"
        again, ended = trained(where)
        assert ended == bits, end
        assert end - 3 <= again[0] <= end
    assert trained(tmp_path / "whole")[1] == bits


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_the_loader_says_in_a_resumed_epoch_where_it_is(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def trained(directory: Path, end: int = 0) -> list[Any]:
        torch.manual_seed(0)
        accelerator, seen = Accelerator(cpu=True), list[Any]()
        rows = DataLoader(TensorDataset(torch.arange(10)), 4, shuffle=True)
        loader = accelerator.prepare(rows)
        with CheckpointManager(directory, save_interval_steps=1, recipe={}) as manager:
            for step, _ in batches(accelerator, loader, manager, epochs=2):
                if end and step == end:
                    return seen
                seen.append((loader.end_of_dataloader, loader.remainder, loader.iteration))
        return [*seen, loader.iteration, [batch.tolist() for (batch,) in loader]]

    whole = trained(tmp_path / "whole")
    assert whole[2:4] == [(True, 2, 0), (False, 2, 1)]
    for end in (1, 2, 4, 5):
        trained(tmp_path / f"{end}", end)
        assert trained(tmp_path / f"{end}") == whole[end:]


def test_a_manager_of_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    """Accelerate counts one in each if `PartialState()` was made before `Accelerator(cpu=True)`."""
    from perdure.plugins import trainer_library as library

    with CheckpointManager(tmp_path / "run", recipe={}) as manager:
        with library.manager_of(manager, 1) as found:
            assert found is manager
        with pytest.raises(
            StateError, match=r"of 2 processes, .*, found 1\. .* make the Accelerator"
        ):
            library.manager_of(manager, 2).__enter__()
