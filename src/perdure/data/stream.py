"""`StreamDataset`: batches from sources that can only be read from their start.

Invariant: virtual shard s has the rows [s * k, (s + 1) * k) of every global batch, with
k = batch_size / shards. So the position in every stream is a function of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import blake3
import numpy as np

from perdure.data.dataset import Augment, DatasetBase
from perdure.data.sources import stack, unstack, update_hash
from perdure.errors import DataError, TopologyError

Open = Callable[[Any, int], Iterable[Any]]


class StreamDataset(DatasetBase):
    """Batches of the examples of streams: iterators, generators, tar files, IterableDatasets.

    The number of virtual shards is part of the recipe; the number of logical replicas must divide it.
    After a resume, every stream is read up to its position.

    Args:
        open: `open(shard, epoch)` returns an iterable over the examples of one virtual shard, the same
            examples at every call with the same arguments. If the iterable has a method `skip(n)` that
            returns an iterable from example n on, that is used instead of reading n examples.
        shards: the names of the virtual shards and how many examples each has in every epoch:
            {"train-000.tar": 1281, ...}. The examples of a sequence of names are counted, which reads
            all of epoch 0 once.
        batch_size: rows of the *global* batch, a multiple of the number of shards.
        seed: decides what `augment` draws.
        drop_remainder: whether an epoch ends with the last batch that all shards can fill. Otherwise
            it ends with the longest shard, and the rows of the others are padding of weight 0.
        augment: a function (example, rng) or an `Augment`.
        fingerprint: a name and version of the data, in place of the computed fingerprint.

    Raises:
        DataError: there are no shards or no examples, the batch size does not fit, or a stream that is
            counted cannot be read.
    """

    sequential = True

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
        if not names or batch_size % len(names):
            raise DataError(
                f"a global batch of {batch_size} does not divide among {len(names)} virtual shards."
            )
        self._rows_per_shard = batch_size // len(names)
        given = shards if isinstance(shards, Mapping) else {}
        self._shards = [_Shard(open, name, given.get(name)) for name in names]
        lengths = [shard.length for shard in self._shards]
        if min(lengths) < 0 or sum(lengths) == 0:
            raise DataError(f"the streams hold no examples: found the lengths {lengths}.")
        self._settings = {"shards": len(names), "drop_remainder": drop_remainder}
        self.num_examples = sum(lengths)
        shorter, longer = min(lengths), max(lengths) + self._rows_per_shard - 1
        self.steps_per_epoch = (shorter if drop_remainder else longer) // self._rows_per_shard
        if self.steps_per_epoch == 0:
            raise DataError(
                f"drop_remainder leaves no batch: a shard has {min(lengths)} examples, and a batch "
                f"takes {self._rows_per_shard} from each; use a smaller batch_size."
            )
        self._offsets = np.cumsum([0, *lengths[:-1]])
        self._first: Any = None

    def close(self) -> None:
        """Close the streams. The next call of `batch` opens them again."""
        for shard in self._shards:
            shard.close()

    def _rows(self, step: int, start: int, size: int) -> Any:
        if size % self._rows_per_shard:
            raise TopologyError(
                f"{len(self._shards)} virtual shards do not divide into {self.batch_size // size} "
                f"logical replicas. Choose a multiple of the replicas; it is part of the recipe."
            )
        first = self._reference()
        epoch, within = self.epoch(step)
        position = within * self._rows_per_shard
        examples: list[Any] = []
        index = np.zeros(size, np.int64)
        weight = np.zeros(size, np.float32)
        for row in range(0, size, self._rows_per_shard):
            number = (start + row) // self._rows_per_shard
            read = self._shards[number].read(epoch, position, self._rows_per_shard)
            filled = slice(row, row + len(read))
            index[filled] = self._offsets[number] + position + np.arange(len(read))
            weight[filled] = 1
            examples += read + [first] * (self._rows_per_shard - len(read))

        def name(row: int) -> str:
            number, offset = divmod(start + row, self._rows_per_shard)
            return f"{self._shards[number]}, example {position + offset}"

        return stack(examples, first, name), index, weight

    def _reference(self) -> Any:
        """The first example of epoch 0: the reference for all others, and the padding."""
        if self._first is None:
            shard = next(shard for shard in self._shards if shard.length)
            first = shard.read(0, 0, 1)
            self._first = next(unstack(stack(first, first[0], lambda _: f"{shard}, example 0")))
        return self._first

    def _compute_fingerprint(self) -> str:
        hasher = blake3.blake3()
        for shard in self._shards:
            hasher.update(f"{shard.name!r}\0{shard.length}\0".encode())
        update_hash(hasher, self._reference())
        return f"streams:{len(self._shards)}:{self.num_examples}:{hasher.hexdigest()}"


class _Shard:
    """One virtual shard: its stream, opened at the first read, and (epoch, next example)."""

    def __init__(self, open: Open, name: Any, length: int | None) -> None:
        self.name = name
        self._open = open
        self._lock = threading.Lock()
        self._stream: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._position: tuple[int, int] | None = None
        if length is None:  # counted in epoch 0
            self._seek(0, 0)
            length = 0
            while self._advance() is not _END:
                length += 1
            self._close()
        self.length = int(length)

    def __str__(self) -> str:
        return f"shard {self.name!r}"

    def read(self, epoch: int, start: int, count: int) -> list[Any]:
        """The examples [start, start + count) of an epoch, fewer at the end of the shard."""
        stop = min(start + count, self.length)
        if stop <= start:
            return []
        with self._lock:
            try:
                self._seek(epoch, start)
                examples = [self._next() for _ in range(start, stop)]
                if stop == self.length and self._advance() is not _END:
                    raise DataError(
                        f"{self}, epoch {epoch}: the stream has more than {stop} examples. {_LENGTHS}"
                    )
                return examples
            except BaseException:
                self._close()  # its position is not known, so the next read starts again
                raise

    def close(self) -> None:
        with self._lock:
            self._close()

    def _seek(self, epoch: int, example: int) -> None:
        """Move the stream to an example. A stream that is past it, or can skip, is opened again."""
        if self._position == (epoch, example):
            return
        at = self._position
        is_before = at is not None and at[0] == epoch and at[1] < example
        if not is_before or hasattr(self._stream, "skip"):
            self._close()
            self._start(epoch, example)
        while self._position != (epoch, example):
            self._next()

    def _start(self, epoch: int, example: int) -> None:
        """Open the stream, at `example` if it can skip and at its start otherwise."""
        try:
            stream: Any = self._open(self.name, epoch)
            if stream is self._stream and isinstance(stream, Iterator):
                raise ValueError(
                    "`open` returned the same iterator as before, which is not at its start; open the "
                    "stream again in every call"
                )
            self._stream = stream
            skips = example > 0 and hasattr(stream, "skip")
            self._iterator = iter(stream.skip(example) if skips else stream)
        except Exception as error:
            raise DataError(
                f"{self}, epoch {epoch}: cannot be opened: {type(error).__name__}: {error}"
            ) from error
        self._position = (epoch, example if skips else 0)

    def _next(self) -> Any:
        example = self._advance()
        if example is _END:
            assert self._position is not None
            epoch, count = self._position
            raise DataError(
                f"{self}, epoch {epoch}: the stream ended after {count} examples, expected "
                f"{self.length}. {_LENGTHS}"
            )
        return example

    def _advance(self) -> Any:
        assert self._position is not None
        epoch, number = self._position
        try:
            example = next(self._iterator, _END)
        except Exception as error:
            raise DataError(
                f"{self}, epoch {epoch}, example {number}: cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
        if example is not _END:
            self._position = (epoch, number + 1)
        return example

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._iterator, self._position = iter(()), None
        if close is not None:
            close()


_END = object()
_LENGTHS = (
    "Every shard must have the number of examples that was given or counted, in every epoch. Limit a "
    "stream without a fixed end with itertools.islice."
)
