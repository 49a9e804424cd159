"""A `ResumableLoader` gives the bits of an uninterrupted run from any batch on, with any workers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from noisy_loader import EPOCHS, EXAMPLES, Noisy, batches, loader, mixed, resumed, until
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import DataError, StateError, UnsupportedLeafError
from perdure.state import flatten, process_random, restore
from perdure.torch import ResumableLoader

pytestmark = pytest.mark.usefixtures("generators_stay")


def test_workers_and_interruptions_change_no_bit() -> None:
    whole = batches(loader())
    for workers, options in [(1, {}), (2, {}), (2, {"persistent_workers": True})]:
        data = loader(workers, **options)
        first, position = until(data, 5)  # three batches, an end, and the workers are ahead
        assert (position["epoch"], position["batch"]) == (1, 1)
        for others in (0, 1):
            assert first + batches(resumed(position, lambda n=others: loader(n))) == whole
        more, position = until(data, 1)  # in the same process, after a break
        assert first + more + batches(resumed(position, loader)) == whole


def test_control_a_plain_loader_does_not_continue() -> None:
    plain = loader()._loader
    whole = [batch.numpy().tobytes() for _ in range(EPOCHS) for batch in plain]
    plain = loader()._loader
    first = next(iter(plain)).numpy().tobytes()
    assert [first, *(batch.numpy().tobytes() for batch in plain)] != whole[:4]


class Weights(Sampler[int]):
    """A sampler of a user's, which draws from the global generators at every index."""

    def __len__(self) -> int:
        return EXAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(EXAMPLES):
            yield int(random.random() * EXAMPLES / 2 + torch.rand(()).item() * EXAMPLES / 2)


def own() -> torch.Generator:
    return torch.Generator().manual_seed(3)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"shuffle": False},
    "drop_last": lambda: {"drop_last": True},
    "generator": lambda: {"generator": own()},
    "replacement": lambda: {"sampler": RandomSampler(Noisy(), True, 40, generator=own())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([0.5, 0.2, 0.1], 11)},
    "subset": lambda: {"sampler": SubsetRandomSampler([4, 2, 7, 9, 1, 0], generator=own())},
    "own sampler": lambda: {"sampler": Weights()},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(Weights(), 3, False)},
    "list of batches": lambda: {"batch_sampler": [[0, 1], [2], [3, 4, 5]]},
    "no batches": lambda: {"batch_size": None},
    "rank 0": lambda: {"sampler": DistributedSampler(Noisy(), 2, 0, seed=9)},
    "rank 1": lambda: {"sampler": DistributedSampler(Noisy(), 2, 1, seed=9)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_continues_and_no_finished_batch_is_read_again(kind: str) -> None:
    make = lambda: loader(dataset=Noisy(), **KINDS[kind]())  # noqa: E731
    whole = batches(make())
    length = len(make())
    for stop in (1, length - 1, length, length + 2):
        data = make()
        first, position = until(data, stop)
        again = resumed(position, make)
        assert first + batches(again) == whole
        assert data.dataset.read + again.dataset.read == _read(make)


def _read(make: Callable[[], ResumableLoader]) -> list[int]:
    data = make()
    batches(data)
    return data.dataset.read


def test_epochs_and_ranks_differ_and_all_ranks_have_one_state() -> None:
    plain = [DataLoader(Noisy(), 4, collate_fn=mixed, **KINDS[f"rank {i}"]()) for i in (0, 1)]
    data = []
    for rank in (0, 1):
        torch.manual_seed(rank)  # as many programs do
        data.append(ResumableLoader(plain[rank]))
    drawn = [batches(part) for part in data]
    numbers = [np.frombuffer(batch) for part in drawn for batch in part if len(batch) > 16]
    seeds = {float(batch[1]) for batch in numbers}
    assert len(seeds) == len(numbers) == 2 * EPOCHS * len(data[0])
    assert data[0].state_dict() == data[1].state_dict()
    orders = [tuple(batch[:-1:5]) for batch in numbers]
    assert len(set(orders)) == len(orders)


def test_the_generators_of_the_program_are_not_touched() -> None:
    generator = own()
    data = loader(generator=generator)
    before = process_random.capture(), generator.get_state().tolist()
    assert len(list(data)) == 3
    assert before == (
        process_random.capture(),
        generator.get_state().tolist(),
    )


def trained(directory: Path, seed: int, stop: int, workers: int) -> tuple[list[bytes], list[int]]:
    """A loop with dropout and a scheduler, which saves after every step; `stop` kills it."""
    random.seed(seed)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    noisy = Noisy()
    plain = DataLoader(noisy, batch_size=4, shuffle=True, num_workers=workers)
    data = ResumableLoader(plain)
    members = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    with CheckpointManager(directory, max_to_keep=None) as manager:
        state, step = manager.restore_or_initialize(members)
        for _ in range(data.epoch, 2):
            for batch in data:
                optimizer.zero_grad()
                model(batch[:, 2:].float()).square().mean().backward()
                optimizer.step()
                step += 1
                manager.save(step, state)
                if step == stop:
                    break
            if step == stop:
                break
            scheduler.step()  # not part of what was saved after the last batch
    values = [*model.parameters(), torch.tensor(scheduler.get_last_lr())]
    return [value.detach().numpy().tobytes() for value in values], noisy.read


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # after a resume at an end
def test_a_loop_that_is_killed_within_an_epoch_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, read = trained(tmp_path / "whole", 1, -1, 0)
    for stop, workers in [(2, 2), (3, 0)]:  # the third batch ends an epoch
        trained(tmp_path / str(stop), 1, stop, workers)
        bits, again = trained(tmp_path / str(stop), 2, -1, 0)
        assert bits == whole
        assert again == read[4 * stop - stop // 3 :]


def test_loops_that_end_with_the_shorter_loader_begin_the_next_epoch_of_both() -> None:
    def pairs(one: ResumableLoader, other: ResumableLoader, stop: int = 0) -> list[bytes]:
        received: list[bytes] = []
        for _ in range(one.epoch, EPOCHS):
            for pair in zip(one, other, strict=False):  # asks `other` for no batch after its last
                received.append(b"".join(batch.numpy().tobytes() for batch in pair))
                if len(received) == stop:
                    return received
        return received

    whole = pairs(loader(), loader(shuffle=False))
    assert len(whole) == EPOCHS * len(loader())
    for stop in (1, 3, 4):
        one, other = loader(), loader(shuffle=False)
        first = pairs(one, other, stop)
        others = resumed(one.state_dict(), loader), loader(shuffle=False)
        others[1].load_state_dict(other.state_dict())
        assert first + pairs(*others) == whole


def test_set_epoch_leaves_an_epoch_early_and_keeps_a_position_within_it() -> None:
    data = loader()
    first = next(iter(data))
    data.set_epoch(0)
    second = next(iter(data))
    assert data.batch == 2
    data.set_epoch(1)
    assert (data.epoch, data.batch) == (1, 0)
    whole = batches(loader())
    assert [first.numpy().tobytes(), second.numpy().tobytes()] == whole[:2]
    assert batches(data) == whole[4:]


def test_attributes_are_those_of_the_loader() -> None:
    data = loader()
    assert len(data.dataset) == EXAMPLES
    assert data.batch_size == 4
    assert len(data) == 3
    with pytest.raises(AttributeError):
        _ = data.missing


def test_a_second_loop_over_the_loader_ends_the_first() -> None:
    data = loader()
    first = iter(data)
    next(first)
    next(iter(data))
    with pytest.raises(DataError, match="another loop"):
        next(first)
    assert (data.epoch, data.batch) == (0, 2)


def test_a_dataset_of_another_length_is_refused_at_the_restore(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"data": loader()})
        manager.wait_until_finished()
        longer = loader(dataset=Noisy(12))
        with pytest.raises(StateError, match=r"data.*examples: expected 11.*found 12"):
            manager.restore(like={"data": longer})
        smaller = loader(batch_size=2)
        with pytest.raises(StateError, match=r"batches_per_epoch: expected 3.*found 6"):
            manager.restore(like={"data": smaller})
        assert (smaller.epoch, smaller.batch) == (0, 0)


def test_a_run_that_changes_its_batch_size_resumes_with_a_loader_for_each_size() -> None:
    def made() -> dict[str, Any]:
        return {"small": loader(batch_size=2, shuffle=True), "large": loader(shuffle=True)}

    def trained(storage: MemoryStorage, state: Any, last: int) -> list[bytes]:
        seen = list[bytes]()
        with CheckpointManager(storage, recipe={}) as manager:
            state, step = manager.restore_or_initialize(state)
            for member, end in (("small", 4), ("large", 6)):
                while step < min(end, last):
                    for batch in state[member]:
                        step += 1
                        seen.append(batch.numpy().tobytes())
                        manager.save(step, state)
                        if step == min(end, last):
                            break
        return seen

    whole, storage = trained(MemoryStorage(), made(), 6), MemoryStorage()
    assert trained(storage, made(), 5) + trained(storage, made(), 6) == whole

    with CheckpointManager(replaced := MemoryStorage(), recipe={}) as manager:
        state, _ = manager.restore_or_initialize({"data": loader(batch_size=2)})
        state["data"] = loader()
        manager.save(1, state)
    with (
        CheckpointManager(replaced, recipe={}) as manager,
        pytest.raises(StateError, match="needs a loader for each size"),
    ):
        manager.restore_or_initialize({"data": loader(batch_size=2)})


def test_a_given_seed_must_be_that_of_the_checkpoint() -> None:
    plain = DataLoader(Noisy(), shuffle=True)
    state = ResumableLoader(plain, seed=1).state_dict()
    with pytest.raises(DataError, match="seed: expected 1"):
        ResumableLoader(plain, seed=2).load_state_dict(state)
    torch.manual_seed(8)
    derived = ResumableLoader(plain)
    derived.load_state_dict(state)
    assert derived.state_dict()["seed"] == 1


@pytest.mark.parametrize("other", [[3, 2, 1], [1, 3, 2], [2, 1, 3]], ids=str)
def test_another_order_than_before_the_interruption_is_refused(other: list[int]) -> None:
    data = loader(sampler=[1, 2, 3], batch_size=1)
    first, position = until(data, 2)
    changed = loader(sampler=other, batch_size=1)
    changed.load_state_dict(position)
    with pytest.raises(DataError, match="used before the interruption, found other indices"):
        next(iter(changed))
    same = loader(sampler=[1, 2, 3], batch_size=1)
    same.load_state_dict(position)
    assert len(first) + len(list(same)) == 3


def test_a_sampler_that_became_shorter_is_refused() -> None:
    sampler = SequentialSampler(range(3))
    data = loader(sampler=sampler, batch_size=1)
    for _ in range(3):
        data._batch += 1  # as in a checkpoint of a longer sampler
    sampler.data_source = range(2)
    with pytest.raises(DataError, match="found only 2 batches"):
        next(iter(data))


class Drifting(Sampler[int]):
    """A sampler with a generator that nobody can seed."""

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(0)

    def __len__(self) -> int:
        return EXAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.permutation(EXAMPLES).tolist())


class LongestFirst(Sampler[list[int]]):
    """Every epoch begins with the same batch; the others come from a generator that nobody seeds."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        others = [[2 * i, 2 * i + 1] for i in range(1, 5)] + [[10]]
        self.numbers.shuffle(others)
        return iter([[0, 1], *others])


class Cached(LongestFirst):
    """The same orders as a function of the epoch, which is no reason to refuse it."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.numbers.seed(self.epoch)
        return super().__iter__()


def test_a_sampler_is_compared_to_the_end_of_its_order() -> None:
    with pytest.raises(
        DataError, match="LongestFirst gives another order when it is iterated again"
    ):
        next(iter(loader(batch_sampler=LongestFirst(4))))
    whole = batches(loader(batch_sampler=Cached(0)))
    first, position = until(loader(batch_sampler=Cached(0)), 8)
    data = loader(batch_sampler=Cached(1))
    data.load_state_dict(position)
    assert first + batches(data) == whole


class Repeated:
    """Batches without an end, as the loaders of timm and YOLO have them."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class MultiEpochs(DataLoader[Any]):
    def __init__(self, *args: Any, early: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.own = [super().__iter__()]
        if early:
            self.iterator = self.own[0]

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        for _ in range(3):
            yield next(self.own[0])


@pytest.mark.parametrize("early", [True, False])
def test_a_loader_with_an_iterator_for_all_epochs_is_refused(early: bool) -> None:
    with pytest.raises(DataError, match=r"MultiEpochs keeps an iterator.*persistent_workers"):
        next(iter(ResumableLoader(MultiEpochs(Noisy(), 4, early=early))))


def test_arguments_that_are_no_numbers_are_refused() -> None:
    plain = DataLoader(Noisy(), shuffle=True)
    for seed in ("7", 1.5, 2**70, 2**63, True):
        with pytest.raises(DataError, match="seed: expected an integer"):
            ResumableLoader(plain, seed=seed)  # pyright: ignore[reportArgumentType]
    seeded = ResumableLoader(plain, seed=np.int64(3))  # pyright: ignore[reportArgumentType]
    assert batches(seeded) == batches(ResumableLoader(plain, seed=3))
    data = loader()
    epoch: Any
    for epoch in (-1, 1.5, 2.0, "1", None, False):
        with pytest.raises(DataError, match="epoch: expected an integer of at least 0"):
            data.set_epoch(epoch)
    data.set_epoch(np.int64(2))  # pyright: ignore[reportArgumentType]
    assert (data.epoch, type(data.epoch)) == (2, int)


def test_a_state_that_is_no_position_is_refused() -> None:
    data = loader()
    position = data.state_dict()
    state: Any
    changes: list[Any] = [{"batch": 100}, {"epoch": -1}, {"epoch": 1.0}, {"order": None}]
    for state in ({}, None, [], *({**position, **change} for change in changes)):
        with pytest.raises(DataError, match=r"expected.*found"):
            data.load_state_dict(state)
        assert data.state_dict() == position
    data.load_state_dict({**position, "batch": 3})  # the end of the epoch
    assert data.batch == 3


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Positioned(DataLoader[Any]):
    """A loader with a state of its own, as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_a_loader_that_cannot_be_resumed_is_refused() -> None:
    with pytest.raises(DataError, match="another order when it is iterated again"):
        next(iter(loader(sampler=Drifting())))
    with pytest.raises(DataError, match="IterableDataset Stream"):
        ResumableLoader(DataLoader(Stream()))
    with pytest.raises(DataError, match="in_order"):
        ResumableLoader(DataLoader(Noisy(), in_order=False))
    with pytest.raises(DataError, match="a state of its own"):
        ResumableLoader(Positioned(Noisy()))
    with pytest.raises(StateError, match=r"a: a DataLoader has no position.*ResumableLoader"):
        flatten({"a": DataLoader(Noisy())})
    with pytest.raises(DataError, match="expected a torch DataLoader"):
        ResumableLoader([1, 2])  # pyright: ignore[reportArgumentType]


class Curriculum:
    """A sampler whose length is a part of the training."""

    def __init__(self) -> None:
        self.most = 4

    def __len__(self) -> int:
        return self.most

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.most))


@pytest.mark.parametrize("first", ["loader", "sampler"])
def test_a_sampler_in_the_state_has_its_length_before_the_loader_is_loaded(first: str) -> None:
    def state() -> dict[str, Any]:
        sampler = Curriculum()
        data = ResumableLoader(DataLoader(Noisy(), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
        members = {"loader": data, "sampler": sampler}
        return {name: members[name] for name in sorted(members, reverse=first == "sampler")}

    saved = state()
    saved["sampler"].most = 8
    assert len(list(saved["loader"])) == 4
    restored = restore(state(), flatten(saved))
    assert (restored["sampler"].most, restored["loader"].epoch) == (8, 1)
    other = {**state(), "loader": loader()}
    with pytest.raises(StateError, match="Every object has the state"):
        restore(other, flatten(saved))
    assert other["sampler"].most == 4


class Own(torch.utils.data.Dataset[Any]):
    """Examples with noise from a generator of the dataset's own."""

    def __init__(self, seed: int | None) -> None:
        self.source = {} if seed is None else [np.random.default_rng(seed)]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return index + (self.source[0].random() if self.source else random.random())


def test_a_generator_of_the_dataset_which_no_resume_repeats_is_refused_at_the_first_batch() -> None:
    loader = ResumableLoader(torch.utils.data.DataLoader(Own(0), batch_size=2))
    with pytest.raises(
        DataError, match="a random generator that the dataset or `collate_fn` holds"
    ):
        list(loader)
    source = torch.Generator().manual_seed(0)

    def noisy(rows: list[float]) -> torch.Tensor:
        return torch.tensor(rows) + torch.rand((), generator=source)

    loader = ResumableLoader(DataLoader(Own(None), batch_size=2, collate_fn=noisy))
    with pytest.raises(
        DataError, match="a random generator that the dataset or `collate_fn` holds"
    ):
        list(loader)
    list(ResumableLoader(torch.utils.data.DataLoader(Own(None), batch_size=2)))  # the control


MODULE_GENERATOR = np.random.default_rng(0)


def drawn_elsewhere() -> float:
    return MODULE_GENERATOR.random()


@cache
def made_once() -> random.Random:
    return random.Random(0)


class Source:
    """Where a dataset may have its generator."""

    of_class = random.Random(0)

    def __init__(self) -> None:
        self.of_object = random.Random(0)
        self.queue = deque([[{"inside": SimpleNamespace(each=[random.Random(0)])}]])
        self.objects = np.array([random.Random(0)], object)

    def bound(self) -> float:
        return self.of_object.random()


SOURCES: dict[str, Callable[[Any], float]] = {
    "a method uses a global": lambda _: MODULE_GENERATOR.random(),
    "a method calls a function": lambda _: drawn_elsewhere(),
    "a class has it": lambda self: self.source.of_class.random(),
    "an object has it": lambda self: self.source.of_object.random(),
    "a bound method": lambda self: self.source.bound(),
    "containers": lambda self: self.source.queue[0][0]["inside"].each[0].random(),
    "an array of objects": lambda self: self.source.objects[0].random(),
    "a cache of results": lambda _: made_once().random(),
    "none": lambda _: random.random(),
}


@pytest.mark.parametrize("place", SOURCES)
def test_a_generator_is_found_wherever_a_dataset_has_it(place: str) -> None:
    class Rows:
        def __init__(self) -> None:
            self.source = Source()

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return index + draw(self)

    draw = SOURCES[place]
    made_once()
    loader = ResumableLoader(DataLoader(Rows(), batch_size=2))  # type: ignore[arg-type]
    if place == "none":  # the control
        assert len(list(loader)) == 2
        return
    with pytest.raises(
        DataError, match="a random generator that the dataset or `collate_fn` holds"
    ):
        list(loader)


class Rising(Sampler[int]):
    """Draws from the first examples; computes a table whenever it is iterated."""

    def __init__(self, examples: int) -> None:
        self.examples, self.share, self.counts = examples, 0.3, {"raised": 0}

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        self.table = torch.randint(int(self.share * self.examples), (12,))
        yield from self.table.tolist()


class InBatches(Sampler[list[int]]):
    """Draws batches of a size that the run raises, from a sampler inside."""

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler, self.size = sampler, 3

    def __len__(self) -> int:
        return 12 // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)[: len(self) * self.size]
        yield from (order[at : at + self.size] for at in range(0, len(order), self.size))


def _adapted(kind: str, storage: MemoryStorage, epochs: int, every: int, stop: int = 999) -> Any:
    """Train with a sampler that is changed after each epoch; save there, or within epochs too."""
    torch.manual_seed(0)
    x = torch.rand(20, 2)
    weighted, curriculum = WeightedRandomSampler([1.0] * 20, 12), Rising(20)
    sampler: Any = weighted if kind == "weighted" else curriculum
    data = torch.utils.data.TensorDataset(x, torch.arange(20))
    inner = (
        DataLoader(data, batch_sampler=InBatches(sampler))
        if kind == "batches"
        else DataLoader(data, batch_size=3, sampler=sampler)
    )
    loader = ResumableLoader(inner)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    state, seen = {"loader": loader, "model": model, "optimizer": optimizer}, []
    with CheckpointManager(storage, recipe={}, save_interval_steps=every) as manager:
        manager.restore_or_initialize(state)
        for _ in range(loader.epoch, epochs):
            for batch, numbers in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                seen += [loader.step, numbers.tolist()]
                if every < 99:
                    manager.save(loader.step, state)
                if loader.step >= stop:
                    return seen
            with torch.no_grad():
                weighted.weights = model(x).square().flatten().double()
            curriculum.share = min(1.0, curriculum.share + 0.2)
            curriculum.counts["raised"] += 1
            manager.save(loader.step, state, force=True)
    return seen, model.weight.tolist(), curriculum.share, curriculum.counts


@pytest.mark.parametrize("kind", ["weighted", "curriculum", "batches"])
@pytest.mark.parametrize(("every", "stop"), [(99, 8), (99, 12), (3, 7), (1, 8), (1, 10)])
def test_a_sampler_that_the_run_changes_is_resumed(kind: str, every: int, stop: int) -> None:
    whole = _adapted(kind, MemoryStorage(), 4, every)
    _adapted(kind, storage := MemoryStorage(), 4, every, stop)
    found = _adapted(kind, storage, 4, every)
    assert found[0] == whole[0][-len(found[0]) :]
    assert len(found[0]) < len(whole[0])
    assert found[1] == whole[1]
    assert kind == "weighted" or found[2:] == whole[2:]


def test_control_with_the_first_weights_the_order_differs() -> None:
    whole = _adapted("weighted", MemoryStorage(), 4, 99)
    _adapted("weighted", storage := MemoryStorage(), 4, 99, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perdure.state.torch_loader.samplers_of", lambda _: {})
        found = _adapted("weighted", storage, 4, 99)
    assert found[0] != whole[0][-len(found[0]) :]


def test_a_sampler_that_the_run_changes_within_an_epoch_is_refused_there() -> None:
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    loader = ResumableLoader(DataLoader(Noisy(8), batch_size=2, sampler=sampler))
    with CheckpointManager(MemoryStorage(), recipe={}) as manager:
        manager.restore_or_initialize({"loader": loader})
        for _ in loader:
            if loader.step == 2:
                manager.save(2, {"loader": loader})
                sampler.weights = torch.rand(8)
            elif loader.step == 3:
                with pytest.raises(UnsupportedLeafError, match=r"loader/sampler: .* 'weights'"):
                    manager.save(3, {"loader": loader})
        assert manager.save(4, {"loader": loader})
