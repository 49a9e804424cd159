"""A dataset over sources that can only be read from their start.

Owns the virtual shards. Invariant: shard s gives the rows [s * k, (s + 1) * k) of every global batch,
k = batch_size / shards, in the order of its stream. So the place in every stream is a function of the
step, and a logical replica owns whole shards, whoever runs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import blake3
import numpy as np

from perdure.data.augment import Augment
from perdure.data.batches import Batches, Share
from perdure.data.stacking import digest, rows, stack
from perdure.errors import DataError, TopologyError

Open = Callable[[Any, int], Iterable[Any]]


class StreamDataset(Batches):
    """Batches of the examples of streams: iterators, generators, tar files, IterableDatasets.

    `open(shard, epoch)` gives an iterable over the examples of one virtual shard, the same at every
    call with the same arguments. `shards` names the virtual shards and says how many examples each has
    in every epoch: {"train-000.tar": 1281, ...}. Given as a sequence of names they are counted, which
    reads the whole of epoch 0 once. The number of shards is part of the recipe; the number of logical
    replicas must divide it, and it must divide `batch_size`, the size of the *global* batch.

    An epoch ends when its longest shard does. The rows of shards that ended before are padding: the
    first example of the dataset, with weight 0; with `drop_remainder` the epoch ends with the last
    batch that needs none. After a resume a stream is brought to its place by reading up to it, or by
    its `skip(n)` if what `open` gives has one.
    """

    in_order = True

    def __init__(
        self,
        open: Open,
        shards: Mapping[Any, int] | Sequence[Any],
        batch_size: int,
        *,
        seed: int = 0,
        drop_remainder: bool = False,
        augment: Augment | Callable[[Any, Any], Any] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, augment, fingerprint)
        names = list(shards)
        if not names:
            raise DataError("no shards: a stream needs at least one")
        if batch_size % len(names):
            raise DataError(
                f"a global batch of {batch_size} does not divide among {len(names)} virtual shards: "
                f"each gives the same number of rows to every batch"
            )
        self._per_step = batch_size // len(names)
        if isinstance(shards, Mapping):
            lengths = [int(shards[name]) for name in names]
        else:
            lengths = [_Shard(open, name).count() for name in names]
        if min(lengths) < 0 or sum(lengths) == 0:
            raise DataError(f"the streams hold no examples: found the lengths {lengths}")
        self._shards = [
            _Shard(open, name, length) for name, length in zip(names, lengths, strict=True)
        ]
        self.drop_remainder = drop_remainder
        self.num_examples = sum(lengths)
        self.steps_per_epoch = (
            min(lengths) // self._per_step if drop_remainder else -(-max(lengths) // self._per_step)
        )
        if self.steps_per_epoch == 0:
            raise DataError(
                f"drop_remainder leaves no batch: a shard has {min(lengths)} examples and a batch "
                f"takes {self._per_step} from each; use a smaller batch_size or drop_remainder=False"
            )
        self._offsets = np.cumsum([0, *lengths[:-1]])
        self._first: Any = None

    def close(self) -> None:
        """Close the streams. The next batch opens them again."""
        for shard in self._shards:
            shard.close()

    def _share(self, step: int, start: int, size: int) -> Share:
        if size % self._per_step:
            raise TopologyError(
                f"{len(self._shards)} virtual shards do not divide into "
                f"{self.batch_size // size} logical replicas, each of which owns whole shards. The "
                f"number of shards is part of the recipe: choose a multiple of the replicas"
            )
        first = self._reference()
        epoch, within = self.epoch(step)
        at = within * self._per_step
        examples: list[Any] = []
        index = np.zeros(size, np.int64)
        weight = np.zeros(size, np.float32)
        for place in range(0, size, self._per_step):
            number = (start + place) // self._per_step
            shard = self._shards[number]
            found = shard.read(epoch, at, self._per_step)
            index[place : place + len(found)] = self._offsets[number] + at + np.arange(len(found))
            weight[place : place + len(found)] = 1
            examples += found + [first] * (self._per_step - len(found))

        def name(row: int) -> str:
            shard, place = divmod(start + row, self._per_step)
            return f"{self._shards[shard]}, example {at + place}"

        return Share(stack(examples, first, name), index, weight)

    def _reference(self) -> Any:
        """The first example of epoch 0: what all others look like, and what pads."""
        if self._first is None:
            shard = next(shard for shard in self._shards if shard.length)
            first = shard.read(0, 0, 1)
            self._first = next(rows(stack(first, first[0], lambda _: f"{shard}, example 0")))
        return self._first

    def _own_fingerprint(self) -> str:
        """Of the names and lengths of the shards, and of the first example."""
        into = blake3.blake3()
        for shard in self._shards:
            into.update(f"{shard.name!r}\0{shard.length}\0".encode())
        digest(self._reference(), into)
        return f"streams:{len(self._shards)}:{self.num_examples}:{into.hexdigest()}"

    def _own_recipe(self) -> dict[str, str | int | bool]:
        return {"shards": len(self._shards), "drop_remainder": self.drop_remainder}


class _Shard:
    """One stream, opened when it is first read, and the place that it has reached."""

    def __init__(self, open: Open, name: Any, length: int = 0) -> None:
        self.name, self.length = name, length
        self._open = open
        self._lock = threading.Lock()
        self._stream: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._place: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"shard {self.name!r}"

    def read(self, epoch: int, at: int, count: int) -> list[Any]:
        """The examples [at, at + count) of an epoch, as far as the shard has them."""
        stop = min(at + count, self.length)
        if stop <= at:
            return []
        with self._lock:
            try:
                self._go(epoch, at)
                found = [self._next() for _ in range(at, stop)]
                if stop == self.length and self._advance() is not _NOTHING:
                    raise DataError(
                        f"{self}, epoch {epoch}: the stream goes on after {stop} examples. {_LENGTHS}"
                    )
                return found
            except BaseException:
                self._shut()  # where it stands is not known: the next ask starts anew
                raise

    def count(self) -> int:
        """How many examples the stream has in epoch 0."""
        self._go(0, 0)
        while self._advance() is not _NOTHING:
            self.length += 1
        self._shut()
        return self.length

    def close(self) -> None:
        with self._lock:
            self._shut()

    def _go(self, epoch: int, at: int) -> None:
        """Bring the stream to its place; one that is beyond it, or can skip, starts again."""
        if self._place == (epoch, at):
            return
        ahead = self._place is not None and self._place[0] == epoch and self._place[1] < at
        if not ahead or hasattr(self._stream, "skip"):
            self._shut()
            self._start(epoch, at)
        while self._place != (epoch, at):
            self._next()

    def _start(self, epoch: int, at: int) -> None:
        try:
            stream: Any = self._open(self.name, epoch)
            if stream is self._stream and isinstance(stream, Iterator):
                raise DataError(
                    f"{self}, epoch {epoch}: open gave the same iterator as before, which is not at "
                    f"its start. Open the stream anew in every call."
                )
            self._stream = stream
            skips = at > 0 and hasattr(stream, "skip")
            self._iterator = iter(stream.skip(at) if skips else stream)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{self}, epoch {epoch}: cannot be opened: {type(error).__name__}: {error}"
            ) from error
        self._place = (epoch, at if skips else 0)

    def _next(self) -> Any:
        example = self._advance()
        if example is _NOTHING:
            assert self._place is not None
            epoch, at = self._place
            raise DataError(
                f"{self}, epoch {epoch}: the stream ended after {at} examples, expected "
                f"{self.length}. {_LENGTHS}"
            )
        return example

    def _advance(self) -> Any:
        """The next example, or _NOTHING at the end."""
        assert self._place is not None
        epoch, at = self._place
        try:
            example = next(self._iterator, _NOTHING)
        except Exception as error:
            raise DataError(
                f"{self}, epoch {epoch}, example {at}: cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if example is not _NOTHING:
            self._place = (epoch, at + 1)
        return example

    def _shut(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._iterator, self._place = iter(()), None
        if close is not None:
            close()


_NOTHING = object()
_LENGTHS = (
    "Every shard must have the number of examples that was given or counted, in every epoch; cut a "
    "stream that has no fixed end with itertools.islice."
)
