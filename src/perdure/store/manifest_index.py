"""The folder `index/`: what a writer of a run with many checkpoints needs of their manifests.

It can be deleted at any time. Invariant: no decision that could lose data rests on it alone. The place
of a chunk is taken from the manifest that the index points to, and before anything is deleted the
digest of each summary is compared with the file. So a wrong index costs time, or a chunk that is
written again.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec
from blake3 import blake3
from msgspec import Struct

from perdure.errors import PruneError
from perdure.store.entry_builder import StoredChunk
from perdure.store.format import INDEX, TEMP_SUFFIX, Metric
from perdure.store.gc_pause import gc_paused
from perdure.store.manifest import Manifest
from perdure.store.manifest_json import HEAD_BYTES
from perdure.store.storage import Storage

INDEX_FROM = 64
"""So many manifests are read, rather than written into an index."""

MAX_KEYS = 1024 * 1024
"""A segment points to so many chunks, those of its newest manifests; 12 bytes each."""

FILTER_BYTES = 4
"""Bytes of memory for each key, in a table that most lookups of new chunks need not go beyond."""

_MAGIC = b"perdure-index-1\n"
_HASH_BYTES = 32
_DIGITS = 16
"""The first digits of a hash are its key. Two chunks with one key cost a manifest read in vain."""


class ManifestSummary(Struct, frozen=True, array_like=True, gc=False):
    """What a plan needs to know of a manifest: a run may have more manifests than fit into memory.

    `head` is the start of its file with the digest; `packs` are sizes by name; `version` that of
    its file.
    """

    head: str
    created: str
    metrics: dict[str, Metric]
    packs: dict[str, int]
    version: str = ""


def summarize(manifest: Manifest, data: bytes) -> ManifestSummary:
    """The summary of a manifest; `data` are the first bytes of its file."""
    head = data[:HEAD_BYTES].decode()
    packs = {pack.name: pack.size for pack in manifest.packs}
    return ManifestSummary(head, manifest.created, manifest.metrics, packs)


_Row = tuple[int, ManifestSummary]
_rows = msgspec.json.Decoder(list[_Row])


class Segment:
    """The file of the index: summaries by step, and sorted keys of chunks with their steps."""

    def __init__(self, name: str, data: bytes) -> None:
        """Read a segment; raises `ValueError` if it is damaged."""
        body = memoryview(data)[:-_HASH_BYTES]
        head = len(_MAGIC)
        if data[:head] != _MAGIC or blake3(body).digest() != data[-_HASH_BYTES:]:
            raise ValueError(f"{name}: damaged")
        count = int.from_bytes(body[head : head + 8], "little")
        keys_end = head + 8 + 8 * count
        owners_end = keys_end + 4 * count
        self.name = name
        self.keys = body[head + 8 : keys_end].cast("Q")
        self.owners = body[keys_end:owners_end].cast("I")
        self.summaries: dict[int, ManifestSummary] = dict(_rows.decode(body[owners_end:]))
        self.steps = list(self.summaries)

    def find(self, key: int) -> int | None:
        """The step whose manifest may have the chunk with this key."""
        place = bisect_left(self.keys, key)
        if place < len(self.keys) and self.keys[place] == key:
            return self.steps[self.owners[place]]
        return None


class ManifestIndex:
    """The index of one run directory. Only the writer reads and writes it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._others: list[str] = []

    @cached_property
    def segment(self) -> Segment | None:
        """What was written last; None if there is nothing that can be read."""
        newest: Segment | None = None
        with suppress(OSError), gc_paused():
            for name in sorted(self._storage.list(INDEX)):
                try:
                    if name.endswith(TEMP_SUFFIX) or sys.byteorder != "little":
                        raise ValueError(f"{name}: not a segment")
                    newest, old = Segment(name, self._storage.read(name)), newest
                    self._others += [old.name] if old is not None else []
                except (ValueError, TypeError):
                    self._others.append(name)  # removed by the next write
        return newest

    @cached_property
    def rows(self) -> dict[int, ManifestSummary]:
        """What was written last about the manifest of each step."""
        return {} if self.segment is None else dict(self.segment.summaries)

    def write(
        self,
        summaries: Mapping[int, ManifestSummary],
        fresh: Mapping[int, Manifest | None],
    ) -> None:
        """Write the index again, with `fresh` steps; manifest None: only the summary changed."""
        old = self.segment
        data = _encode(summaries, fresh, old)
        number = 1 if old is None else _number(old.name) + 1
        name = f"{INDEX}{number:012d}-{max(summaries):012d}"
        self._storage.replace(name, data)
        self.segment = Segment(name, data)
        self.rows |= {step: summaries[step] for step in fresh}
        for other in {*self._others, *([] if old is None else [old.name])} - {name}:
            self._storage.delete(other)
        self._others = []


class IndexedPlaces(dict[str, StoredChunk]):
    """Places of chunks by hash, which reads the manifest to which the index points for a chunk."""

    def __init__(
        self, segment: Segment, places: Callable[[int], Iterable[tuple[str, StoredChunk]]]
    ) -> None:
        super().__init__()
        self._segment = segment
        self._places = places
        self._table = _filter_of(segment.keys)
        self._mask = len(self._table) - 1
        self._read: set[int] = set()
        self._turn = threading.RLock()  # threads that encode ask, too

    def get(self, key: str, default: Any = None) -> Any:
        place = dict.get(self, key)
        # A save asks for each of its chunks, and nearly all of them are new.
        if place is None and self._table[int(key[:_DIGITS], 16) & self._mask]:
            place = self._look_up(key)
        return default if place is None else place

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __missing__(self, key: str) -> StoredChunk:
        place = self.get(key)
        if place is None:
            raise KeyError(key)
        return place

    def _look_up(self, key: str) -> StoredChunk | None:
        with self._turn:
            step = self._segment.find(int(key[:_DIGITS], 16))
            if step is not None and step not in self._read:
                self._read.add(step)
                # What cannot be read is no place to depend on.
                with suppress(PruneError):
                    self.update(self._places(step))
            return dict.get(self, key)


def _number(name: str) -> int:
    digits = name.removeprefix(INDEX)[:12]
    return int(digits) if digits.isdecimal() else 0


def _filter_of(keys: memoryview) -> bytes:
    """A table whose length is a power of two: 0 at a key modulo its length if no one has the key."""
    import numpy as np  # not needed to list a run

    size = 1 << (FILTER_BYTES * len(keys)).bit_length()
    table = np.zeros(size, np.uint8)
    table[np.frombuffer(keys, np.uint64) & np.uint64(size - 1)] = 1
    return table.tobytes()


def _encode(
    summaries: Mapping[int, ManifestSummary],
    fresh: Mapping[int, Manifest | None],
    old: Segment | None,
) -> bytes:
    import numpy as np  # not needed to list a run

    known = set() if old is None else set(old.steps)
    ordered = sorted((known | fresh.keys()) & summaries.keys())
    numbers = {step: number for number, step in enumerate(ordered)}
    keys: list[Any] = []
    owners: list[Any] = []
    if old is not None:
        # Of a step that is written again, or gone, no chunk is taken over.
        lasting = [
            -1 if fresh.get(step) is not None else numbers.get(step, -1) for step in old.steps
        ]
        of_key = np.asarray(lasting, np.int64)[np.frombuffer(old.owners, np.uint32)]
        keys.append(np.frombuffer(old.keys, np.uint64)[of_key >= 0])
        owners.append(of_key[of_key >= 0])
    for step, manifest in fresh.items():
        if manifest is not None and step in numbers:
            digits = [
                chunk.hash[:_DIGITS] for leaf in manifest.every_leaf() for chunk in leaf.chunks
            ]
            keys.append(np.frombuffer(bytes.fromhex("".join(digits)), ">u8").astype(np.uint64))
            owners.append(np.full(len(digits), numbers[step], np.int64))
    every_key = np.concatenate(keys) if keys else np.empty(0, np.uint64)
    every_owner = np.concatenate(owners) if owners else np.empty(0, np.int64)
    # Of the manifests that have one chunk, the newest, which retention keeps for longest.
    order = np.lexsort((every_owner, every_key))
    every_key, every_owner = every_key[order], every_owner[order]
    last = np.append(every_key[1:] != every_key[:-1], True)[: len(every_key)]
    every_key, every_owner = every_key[last], every_owner[last]
    if len(every_key) > MAX_KEYS:
        newest = np.sort(np.argsort(every_owner, kind="stable")[-MAX_KEYS:])
        every_key, every_owner = every_key[newest], every_owner[newest]
    body = b"".join(
        [
            _MAGIC,
            len(every_key).to_bytes(8, "little"),
            every_key.tobytes(),
            every_owner.astype(np.uint32).tobytes(),
            msgspec.json.encode([(step, summaries[step]) for step in ordered]),
        ]
    )
    return body + blake3(body).digest()
