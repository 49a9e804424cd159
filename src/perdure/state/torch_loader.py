"""`ResumableLoader`: a PyTorch `DataLoader` whose position is part of the training state.

Invariant: the indices of a batch, and the random numbers that are drawn while it is made, are
functions of (seed, epoch, batch, rank). Workers, prefetching and interruptions change nothing.
"""

from __future__ import annotations

import copy
import gc
import itertools
import operator
import random
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import count, islice
from types import FrameType
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from perdure.errors import DataError, UnsupportedLeafError
from perdure.state import bits
from perdure.state.attribute_values import mark_of
from perdure.state.extra_members import ended_order
from perdure.state.generators import read_generator
from perdure.state.program_code import held_generators
from perdure.tensorflow_names import names_forms

_END = object()
_MOST_COMPARED = 2**14
"""How many batches of two orders of a sampler are compared before the first batch."""

_numpy: Any = np.random  # its stubs lack two functions
_ORDER_RULE = (
    "The order of a sampler must be a function of the global generators, of its attribute `generator` "
    "and of the epoch given to its `set_epoch`; resume with the same sampler and dataset."
)
Natural = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[int, msgspec.Meta(ge=-1)]
"""A number of elements; -1 if it is not known."""


class _Position(msgspec.Struct, forbid_unknown_fields=True):
    """A position, and what has to be the same at a resume."""

    epoch: Natural
    batch: Natural
    step: Natural
    seed: Natural
    examples: Length
    batches_per_epoch: Length
    order: str


class ResumableLoader:
    """A `DataLoader` that continues where a checkpoint was taken, also in the middle of an epoch.

    Put it into the state that is saved, and iterate it instead of the `DataLoader`. After a
    restore, the `for` loop over it gets the batches of the epoch that were not used yet, in the
    same order. A batch counts as used once the loop has received it. What the dataset, its
    transforms and `collate_fn` draw from `torch`, `numpy.random` and `random` is seeded for each
    batch, and the generators of this process are not touched. Attributes of the `DataLoader` can be
    read here, too.

    Args:
        loader: A `DataLoader` of a map-style dataset, with any sampler, `batch_sampler`,
            `collate_fn` and number of workers. The order of a sampler must be a function of the
            global generators, of its `generator`, and of the epoch that its `set_epoch` is called
            with.
        seed: Decides the order of every epoch and the random numbers of every batch. By default
            that of the generator of `loader`, of its distributed sampler, or else of
            `torch.manual_seed`; a restore then replaces it. At least -2**63 and below 2**63.

    Raises:
        DataError: `loader` is something else, or has an `IterableDataset`, a state of its own, an
            iterator of its own or `in_order=False`; or `seed` is no such number.
    """

    @names_forms("ResumableLoader")
    def __init__(self, loader: DataLoader[Any], seed: int | None = None) -> None:
        _check(loader)
        self._loader = loader
        self._has_own_seed = seed is not None
        seed = _default_seed(loader) if seed is None else _whole_number("seed", seed, -(2**63))
        self._seed = seed % 2**63
        self._epoch = self._batch = self._step = 0
        self._digest = ""
        self._pass: object = None
        self._loaded = -1  # the step of the position that was loaded last
        self._is_part = False  # whether the loop has begun where an earlier one left the epoch
        self._taken = -1  # the step of a state taken within such a loop at the last batch
        self._has_warned = self._has_ended = False
        self._order = _Order(self)
        self._inner = copy.copy(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        # A `DataLoader` refuses the assignment of these attributes.
        vars(self._inner).update({name: self._order, "_iterator": None})
        self._bits = np.random.MT19937(0)
        batches = loader.batch_sampler
        parts = loader, loader.sampler, batches, getattr(batches, "sampler", None)
        found = [torch.default_generator, *(getattr(part, "generator", None) for part in parts)]
        generators = {id(each): each for each in found if isinstance(each, torch.Generator)}
        self._generators = list(generators.values())

    @property
    def epoch(self) -> int:
        """The number of finished epochs: `for epoch in range(loader.epoch, epochs)`."""
        return self._epoch

    @property
    def batch(self) -> int:
        """The number of batches of this epoch that the loop has received."""
        return self._batch

    @property
    def step(self) -> int:
        """The number of batches that the loop has received in all epochs: the step of a save."""
        return self._step

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of `epoch`; in that epoch already, stay where it is. Only needed
        after a `break`, because the next `for` loop continues the epoch otherwise."""
        epoch = _whole_number("epoch", epoch)
        self._taken = -1  # the program follows the epochs itself
        if epoch == self._epoch + 1:
            self._end_epoch()
        elif epoch != self._epoch:
            self._go_to(epoch, 0, "")

    def __len__(self) -> int:
        """The number of batches of a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch that were not used yet. Raises `DataError` if the sampler gives
        other indices than before, or another loop over this loader has begun."""
        if self._is_at_last_batch():
            self._end_epoch()  # a loop that is kept has received the last batch
        is_empty_after_resume = self._taken == self._step and not _is_lightning(sys._getframe(1))
        if is_empty_after_resume and not self._has_warned:
            self._has_warned = True
            # A loop over `islice` has left the epoch at its last batch, with a checkpoint from within.
            warnings.warn(
                f"step {self._step}: the state of this ResumableLoader was saved inside a loop that "
                f"was left at the last batch of epoch {self._epoch - 1}, and the program goes on with "
                f"the next epoch. A checkpoint of that step resumes with the end of that epoch: its "
                f"first loop is empty. If the loop is one of a number of batches (`itertools.islice`, "
                f"`break`) and not of an epoch, save after that loop.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._taken = -1
        # Loops that are left at the last batch of a whole epoch (by `zip`) resume rightly.
        self._is_part = self._batch > 0 and self._step != self._loaded
        batches = self._batches()
        self._loop = weakref.ref(batches)
        next(batches)  # begun, so that its end is noticed even if the loop asks for no batch
        return batches

    def _batches(self) -> Iterator[Any]:
        self._pass = current = object()
        is_finished = False
        try:
            yield
            with self._own_generators():
                self._seed_all("workers")
                batches = iter(self._inner)
            held = list(held_generators([self._loader.dataset, self._loader.collate_fn]))
            before = list(map(read_generator, held))
            while True:
                with self._own_generators():
                    batch = next(batches, _END)
                if held and not bits.same(before, list(map(read_generator, held))):
                    raise DataError(
                        f"loading a batch has drawn from a random generator that the dataset or "
                        f"`collate_fn` holds (there are {len(held)}), which a resume in the middle of "
                        f"an epoch does not repeat. Draw from the global generators (`torch.rand`, "
                        f"`random`, `numpy.random`), which are seeded for each example, or make a "
                        f"generator from the index of the example."
                    )
                if self._pass is not current:
                    raise DataError(
                        "another loop over this ResumableLoader has begun, or its position was set. "
                        "Use one loop at a time; a second loader over the same dataset is independent."
                    )
                if is_finished := batch is _END:
                    self._taken = -1
                    if not self._has_ended:
                        self._has_ended = True
                        _warn_of_cycle(self._loop())
                    return
                if not self._order.ahead:
                    raise _own_iterator(self._loader)
                self._batch += 1
                self._step += 1
                self._digest = self._order.ahead.popleft()
                yield batch
        finally:
            # A loop may end without asking for another batch after the last one (`zip` does).
            if self._pass is current and (is_finished or self._batch == _length(self._loader)):
                self._end_epoch()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what has to be the same at a resume."""
        if self._is_part and self._is_at_last_batch():
            self._taken = self._step
        examples, batches = _length(self._loader.dataset), _length(self._loader)
        at = self._epoch, self._batch, self._step, self._seed
        return msgspec.structs.asdict(_Position(*at, examples, batches, self._digest))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position in the next `for` loop. Raises `DataError` if the dataset, the
        number of batches or a given seed differ, or `state` is no position."""
        present, stored = self.state_dict(), _position_of(state)
        for name in ("examples", "batches_per_epoch", *(("seed",) if self._has_own_seed else ())):
            if (expected := getattr(stored, name)) != present[name]:
                raise DataError(
                    f"{name}: expected {expected}, which the checkpoint was saved with, found "
                    f"{present[name]}. Resume with the same dataset, batch size, seed and number of "
                    f"processes. A run that changes its batch size needs a loader for each size, all "
                    f"members of the state from the start. To begin an epoch instead, restore the "
                    f"other members alone: "
                    f"`manager.restore(like=state, leaves=['model', 'optimizer'])`."
                )
        self._seed, self._step, self._taken = stored.seed, stored.step, -1
        self._loaded = self._step
        self._go_to(stored.epoch, stored.batch, stored.order)
        if stored.batch == stored.batches_per_epoch and _is_lightning(sys._getframe(1)):
            self._end_epoch()  # an empty rest makes no batches

    def _is_at_last_batch(self) -> bool:
        """Whether a loop has received the last batch of its epoch, and has not ended."""
        return self._pass is not None and self._batch == _length(self._loader)

    def _go_to(self, epoch: int, batch: int, digest: str) -> None:
        self._epoch, self._batch, self._digest = epoch, batch, digest
        self._pass = None

    def _end_epoch(self) -> None:
        """Go to the next epoch; `order` says until its first batch where this one has ended."""
        self._go_to(self._epoch + 1, 0, ended_order(self._batch, self._digest))

    def _key(self, *purpose: str | int) -> int:
        """A seed of 63 bits for one purpose in this epoch."""
        text = repr((self._seed, self._epoch, *purpose)).encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1

    def _seed_all(self, *purpose: str | int) -> None:
        _seed_process(key := self._key(*purpose))
        for generator in self._generators:
            generator.manual_seed(key)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Whatever is drawn inside changes no generator of the program. NumPy's is replaced,
        because a copy of its state takes 0.4 ms."""
        python, numpy = random.getstate(), _numpy.get_bit_generator()
        states = [generator.get_state() for generator in self._generators]
        _numpy.set_bit_generator(self._bits)
        try:
            yield
        finally:
            random.setstate(python)
            _numpy.set_bit_generator(numpy)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


class _Order:
    """The index sampler of the inner `DataLoader`: the loader's own, from the position on. `ahead`
    has the digest of all indices up to each batch that was handed out and not received yet."""

    def __init__(self, owner: ResumableLoader) -> None:
        self._owner = weakref.proxy(owner)  # without a cycle, workers end with the last reference
        self.ahead: deque[str] = deque()
        self.begun: dict[tuple[int, str], Any] = {}
        """The marks of the samplers' attributes from which this epoch was drawn."""
        self.computed: set[tuple[int, str]] = set()
        """The attributes that a sampler of the program sets itself whenever it is iterated."""
        self._is_checked = False

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        owner, sampler = self._owner, self._sampler
        self.ahead.clear()
        for part in (sampler, owner._loader.sampler):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(owner.epoch)
        if not self._is_checked:
            self._is_checked = True
            self._check_sampler()
        self.begun = sampler_marks(owner)
        rank, ranks = _rank(owner._loader)
        has_workers, skip, expected = owner._loader.num_workers > 0, owner.batch, owner._digest
        digest, found = "", 0
        for number, index in enumerate(self._indices()):
            found += 1
            if ranks == 1:  # else the loader would have another state in each process
                digest = blake2b(f"{digest}{index!r}".encode(), digest_size=8).hexdigest()
            if number < skip:
                if number == skip - 1 and digest != expected:
                    raise _other_order(owner.epoch, skip, "other indices")
                continue
            self.ahead.append(digest)
            seed = owner._key("batch", number, rank)
            if has_workers:
                yield _SeededIndex(index, seed)
            else:
                yield _begin_batch(index, seed)
        if found < skip:
            raise _other_order(owner.epoch, skip, f"only {found} batches")

    def _indices(self) -> Iterator[Any]:
        """The indices of this epoch, each drawn from global generators that are seeded for it."""
        indices = None
        for number in count():
            self._owner._seed_all("order", number)
            indices = indices or iter(self._sampler)
            if (index := next(indices, _END)) is _END:
                return
            yield index

    def _check_sampler(self) -> None:
        """Refuse a sampler that gives another order the second time. Up to `_MOST_COMPARED` batches
        are compared: it may begin every epoch alike and draw the rest from a generator of its own.
        """
        sampler = self._sampler
        parts = (sampler, getattr(sampler, "sampler", None))
        # Of a sampler or a list of indices without code of the user's.
        built_in = ("torch.", "builtins")
        own = [part for part in parts if not type(part).__module__.startswith(built_in)]
        before = sampler_marks(self._owner) if own else {}
        is_other = bool(own) and self._whole_order() != self._whole_order()
        after = sampler_marks(self._owner) if own else {}
        self.computed = {key for key, mark in after.items() if before.get(key) != mark}
        if is_other:
            raise DataError(
                f"{type(own[-1]).__qualname__} gives another order when it is iterated again with the "
                f"same seeds, so that a resume could not find its place. {_ORDER_RULE}"
            )

    def _whole_order(self) -> bytes:
        digest = blake2b()
        for index in islice(self._indices(), _MOST_COMPARED):
            digest.update(f"{index!r};".encode())
        return digest.digest()

    @property
    def _sampler(self) -> Any:
        loader = self._owner._loader
        return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def samplers_of(loader: ResumableLoader) -> dict[str, Any]:
    """The samplers of a loader that have attributes, by name."""
    plain: Any = loader._loader
    parts = {"sampler": plain.sampler, "batch_sampler": plain.batch_sampler}
    parts["batch_sampler.sampler"] = getattr(plain.batch_sampler, "sampler", None)
    by_id = {id(part): (name, part) for name, part in reversed(parts.items())}
    return {name: part for name, part in by_id.values() if hasattr(part, "__dict__")}


def sampler_values(loader: ResumableLoader, sampler: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a sampler that a run may change: without the data, what the loader sets for
    each epoch (generators, `epoch`) and what the sampler computes whenever it is iterated."""
    skipped = [loader._loader.dataset, *samplers_of(loader).values()]
    for name, value in list(vars(sampler).items()):
        is_set = name == "epoch" and hasattr(sampler, "set_epoch")
        is_data = isinstance(value, (Dataset, torch.Generator)) or any(
            value is each for each in skipped
        )
        if not (is_set or is_data or (id(sampler), name) in loader._order.computed):
            yield name, value


def sampler_marks(loader: ResumableLoader) -> dict[tuple[int, str], Any]:
    parts = samplers_of(loader).values()
    pairs = ((part, name, value) for part in parts for name, value in sampler_values(loader, part))
    return {(id(part), name): mark_of(value) for part, name, value in pairs}


def require_sampler_as_begun(loader: ResumableLoader, path: str) -> None:
    """Refuse a save within an epoch whose sampler has changed since its order was drawn."""
    begun = loader._order.begun if loader.batch else {}
    for key, mark in sampler_marks(loader).items() if begun else ():
        if begun.get(key) != mark:
            raise UnsupportedLeafError(
                f"{path}: the run has changed the attribute {key[1]!r} of this sampler in an epoch, "
                "whose order was drawn before that: a resume within the epoch would draw another one. "
                "Change the sampler before or after the loop over an epoch, or save only after it."
            )


class _SeededIndex:
    """The index of a batch on its way to a worker, which seeds its generators when it unpickles it.
    So the dataset gets the plain index."""

    def __init__(self, index: Any, seed: int) -> None:
        self._contents = index, seed

    def __reduce__(self) -> Any:
        return _begin_batch, self._contents


def _begin_batch(index: Any, seed: int) -> Any:
    _seed_process(seed)
    return index


def _seed_process(seed: int) -> None:
    """Seed what a transform on the CPU draws from. (`torch.manual_seed` takes 50 times as long.)"""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that transforms share)
    torch.default_generator.manual_seed(seed)


def _whole_number(name: str, value: Any, least: int = 0) -> int:
    """`value` as an `int`, NumPy's included; raises `DataError` for anything else."""
    number = None
    if not isinstance(value, (bool, np.bool_)):
        with suppress(TypeError):
            number = operator.index(value)
    if number is None or not least <= number < 2**63:
        bound = least if least > -2 else "-2**63"
        raise DataError(
            f"{name}: expected an integer of at least {bound} and below 2**63, found {value!r}."
        )
    return number


def _position_of(state: Any) -> _Position:
    try:
        position = msgspec.convert(state, _Position)
        if -1 < position.batches_per_epoch < position.batch:
            raise ValueError(f"more than {position.batches_per_epoch} batches - at `$.batch`")
    except ValueError as error:  # also of msgspec
        raise DataError(
            f"the state of a ResumableLoader: expected what `state_dict` returns, found {state!r}: "
            f"{error}. Give `load_state_dict` what `state_dict` returned."
        ) from error
    return position


def _own_iterator(loader: Any) -> DataError:
    return DataError(
        f"a {type(loader).__qualname__} keeps an iterator of its own for all epochs, so that its "
        f"position cannot be set. Give ResumableLoader a plain DataLoader with the same arguments; "
        f"`persistent_workers=True` keeps the workers between epochs as well."
    )


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise DataError(f"expected a torch DataLoader, found a {type(loader).__qualname__}.")
    if hasattr(loader, "state_dict"):
        raise DataError(
            f"a {type(loader).__qualname__} has a state of its own. Put it into the saved state itself."
        )
    attributes = vars(loader).items()
    if any(isinstance(v, _BaseDataLoaderIter) for name, v in attributes if name != "_iterator"):
        raise _own_iterator(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"expected a dataset that is read by index, found the IterableDataset "
            f"{type(loader.dataset).__qualname__}, which nothing shows to give the same examples "
            f"again. Use a map-style dataset, perdure.data.StreamDataset, or torchdata's "
            f"StatefulDataLoader with a dataset that has a state_dict."
        )
    if not loader.in_order:
        raise DataError(
            "in_order=False gives the batches in an order that depends on time, so that no position is "
            "reached again. Use in_order=True."
        )


def _default_seed(loader: DataLoader[Any]) -> int:
    if loader.generator is not None:
        return loader.generator.initial_seed()
    if _rank(loader)[1] > 1:  # the same in all ranks, which `torch.manual_seed` may not be
        return getattr(loader.sampler, "seed", 0)
    return torch.initial_seed()


def _rank(loader: DataLoader[Any]) -> tuple[int, int]:
    part: Any
    for part in (loader.sampler, loader.batch_sampler):
        if hasattr(part, "num_replicas") and hasattr(part, "rank"):
            return part.rank, part.num_replicas
    return 0, 1


def _length(value: Any) -> int:
    try:
        return len(value)
    except (TypeError, NotImplementedError):  # of a sampler or a dataset without a length
        return -1


def _other_order(epoch: int, batch: int, found: str) -> DataError:
    return DataError(
        f"epoch {epoch}: expected from the sampler the {batch} batches that were used before the "
        f"interruption, found {found}. {_ORDER_RULE}"
    )


def _is_lightning(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").endswith("pytorch.utilities.combined_loader")


def _warn_of_cycle(batches: Any) -> None:
    """Warn if an `itertools.cycle` has all of `batches`: all objects of the process are searched."""
    if any(type(referrer) is itertools.cycle for referrer in gc.get_referrers(batches)):
        warnings.warn(
            "itertools.cycle keeps the batches of its first pass over this ResumableLoader and gives "
            "them again. The position does not count those, so that a resumed run gets other "
            "batches. Iterate the loader again instead, in a generator: "
            "`while True: yield from loader`.",
            RuntimeWarning,
            stacklevel=3,
        )
