"""A local run directory whose every change follows to an object store in the background.

Invariant: what the remote holds is what the local directory held at some earlier instant, because
one thread carries the changes over in their order. So each of the two is a whole run directory at
any time, also after a crash of either.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from perdure.errors import CorruptionError
from perdure.store.carry import Carrier
from perdure.store.codec import is_intact
from perdure.store.format import (
    MANIFESTS,
    MARKER,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    TRAILER_BYTES,
    PackedChunk,
    decode_manifest,
    decode_pack_index,
    index_span,
    step_of,
)
from perdure.store.storage import Sink, Storage, StreamingStorage, create_whole

_INDEXES_KEPT = 64
_CARRIED = (MANIFESTS, PACKS, PINS, QUARANTINE)

Chunks = dict[int, PackedChunk]
"""The chunks of a pack by their offsets."""


class StagedStorage:
    """Commits to `local`, then uploads to `remote` in the background; reads whichever is good.

    A commit is durable locally on return, and remotely once `wait` or the end of the lock returns.
    A failed upload is kept, raised by the next save or by the end of the lock, and tried again.
    What a crash left undone is uploaded by the next writer. Local bytes are checked against their
    hashes as they are read; damaged or missing ones come from the remote.

    Both are locked, so that the remote has one writer whatever machine it is on; opening for
    writing needs the remote, going on does not.
    """

    def __init__(self, local: Storage, remote: Storage) -> None:
        self.local = local
        self.remote = remote
        self.where = f"{local.where} (staged for {remote.where})"
        if isinstance(remote, StreamingStorage):
            self.streams = remote.streams  # and this is one, too; see StreamingStorage
        self._carrier = Carrier(local, remote, self._refusal)
        self._indexes: OrderedDict[str, Chunks | None] = OrderedDict()
        # By directory, the names of the remote while this is its writer: it is not asked then, so
        # that an outage delays uploads and stops nothing.
        self._there: dict[str, set[str]] = {}

    # ------------------------------------------------------------ changes

    def create(self, name: str, size: int) -> Sink:
        if name.startswith(PACKS):
            # At the beginning of a save, before it has written anything.
            self._carrier.check()
        return _StagedSink(
            self.local.create(name, size),
            partial(self._is_taken, name),
            partial(self._put, name),
            f"{self.remote.where}/{name}",
        )

    def replace(self, name: str, data: bytes) -> None:
        self.local.replace(name, data)
        self._forget(name)
        self._put(name, replace=True)

    def move(self, name: str, target: str) -> None:
        if not self._is_local(name):
            self._copy_here(name)
        if self._is_remote(target):
            raise FileExistsError(errno.EEXIST, "exists already", f"{self.remote.where}/{target}")
        self.local.move(name, target)
        self._forget(name)
        self._put(target)
        self._take_away(name)

    def delete(self, name: str) -> None:
        self.local.delete(name)
        self._forget(name)
        self._take_away(name)

    @contextmanager
    def lock(self, name: str, owner: bytes) -> Iterator[None]:
        """Hold both; on leaving, wait until everything is uploaded, and raise what failed."""
        with ExitStack() as held:
            held.enter_context(self.local.lock(name, owner))
            held.enter_context(self.remote.lock(name, owner))
            held.callback(self._there.clear)
            self.catch_up()
            yield
            self._carrier.wait()

    def wait(self) -> None:
        """Wait until the remote holds every change; raises what an upload raised."""
        self._carrier.wait()

    def catch_up(self) -> None:
        """Queue what the remote lacks, packs before the manifests that need them."""
        there = {at: set(self.remote.list(at)) for at in _CARRIED}
        here = {at: _finished(self.local.list(at)) for at in _CARRIED}
        self._there = {at: set(names) for at, names in there.items()}
        self._there[""] = {MARKER} if _exists(self.remote, MARKER) else set()
        if _exists(self.local, MARKER) and not self._there[""]:
            self._put(MARKER, replace=True)
        sent: set[str] = set()
        for at in (QUARANTINE, MANIFESTS):
            for name in sorted(here[at] - there[at]):
                packs = self._packs_of(name)
                if packs is None and at == MANIFESTS:
                    continue  # damaged: the checker says so
                for pack in packs or ():
                    if pack in here[PACKS] and pack not in sent | there[PACKS]:
                        self._put(pack)
                        sent.add(pack)
                self._put(name)
        for name in sorted(here[PINS] - there[PINS]):
            self._put(name)

    # ------------------------------------------------------------ reads

    def read(self, name: str) -> bytes:
        if self._is_local(name) and self._is_good(name):
            with contextlib.suppress(OSError):  # a failing disk, and the remote may have it
                return self.local.read(name)
        return self._from_remote(name).read(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if self._is_local(name) and (not name.startswith(PACKS) or self._chunks(name) is not None):
            with contextlib.suppress(OSError):
                got = self.local.read_into(name, offset, target)
                whole = got == len(target) and self._matches(name, offset, target)
                if whole or not name.startswith(PACKS):
                    return got
        return self._from_remote(name).read_into(name, offset, target)

    def read_each(self, name: str, offset: int, targets: Sequence[memoryview]) -> Iterator[int]:
        """By one request where the local copy is missing or unreadable, else from here one by one."""
        if not self._is_local(name) or (name.startswith(PACKS) and self._chunks(name) is None):
            there = self._from_remote(name)
            if isinstance(there, StreamingStorage):
                yield from there.read_each(name, offset, targets)
                return
        for target in targets:
            yield self.read_into(name, offset, target)
            offset += len(target)

    def size(self, name: str) -> int:
        if self._is_local(name) and self._is_good(name):
            return self.local.size(name)
        return self._from_remote(name).size(name)

    def list(self, prefix: str) -> Iterator[str]:
        names = set(self.local.list(prefix))
        if prefix in self._there:
            return iter(names | self._there[prefix])
        try:
            there = set(self.remote.list(prefix))
        except ConnectionError as error:
            if not names:
                raise
            warnings.warn(f"{self.where}: only what is here can be listed: {error}", stacklevel=2)
            there = set()
        return iter(names | (there - self._carrier.leaving()))

    def free_bytes(self) -> int | None:
        return self.local.free_bytes()

    # ------------------------------------------------------------ which of the two

    def _is_local(self, name: str) -> bool:
        return _exists(self.local, name)

    def _is_remote(self, name: str) -> bool:
        """Whether the remote holds an object that is to stay there."""
        known = self._there.get(_place(name))
        if known is not None:
            return name in known
        return name not in self._carrier.leaving() and _exists(self.remote, name)

    def _from_remote(self, name: str) -> Storage:
        """The remote, or for its own error the local one where the remote cannot help."""
        if self._is_local(name):
            return self.local if name in self._carrier.coming() else self._if_remote(name)
        if not self._is_remote(name):
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.where}/{name}")
        return self.remote

    def _if_remote(self, name: str) -> Storage:
        return self.remote if self._is_remote(name) else self.local

    def _put(self, name: str, replace: bool = False) -> None:
        self._carrier.put(name, replace)
        if (known := self._there.get(_place(name))) is not None:
            known.add(name)

    def _take_away(self, name: str) -> None:
        self._carrier.delete(name)
        if (known := self._there.get(_place(name))) is not None:
            known.discard(name)

    def _is_taken(self, name: str) -> bool:
        try:
            return self._is_remote(name)
        except ConnectionError:
            return False  # the creation over there settles it

    def _copy_here(self, name: str) -> None:
        create_whole(self.local, name, self._from_remote(name).read(name))

    # ------------------------------------------------------------ good

    def _is_good(self, name: str) -> bool:
        """Whether the local object is what it was: manifests and packs carry their own hashes."""
        if name.startswith(PACKS) and not name.endswith(TEMP_SUFFIX):
            return self._chunks(name) is not None
        step = step_of(name)
        if step is None:
            return True
        try:
            decode_manifest(self.local.read(name), name, step)
        except (CorruptionError, OSError):
            return False
        return True

    def _chunks(self, name: str) -> Chunks | None:
        """The index of a local pack; None when it does not match its own hash or its size."""
        if name not in self._indexes:
            try:
                chunks = _read_index(self.local, name)
            except (CorruptionError, OSError):
                return None
            self._indexes[name] = chunks
            if len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
        return self._indexes[name]

    def _matches(self, name: str, offset: int, data: memoryview) -> bool:
        """Whether every whole chunk in `data`, read at `offset` of a local pack, has its hash."""
        chunks = self._chunks(name) or {}
        at = 0
        while at < len(data) and (known := chunks.get(offset + at)) is not None:
            digest, length, size = known
            part = data[at : at + length]
            if len(part) == length and not is_intact(part, digest, size):
                return False
            at += length
        return True

    def _refusal(self, name: str) -> str | None:
        """Why a local object must not be uploaded: it is damaged, or what it needs is not there."""
        if name.startswith(PACKS):
            if not (chunks := self._chunks(name)):
                return "the local copy is damaged"
            for offset, (digest, length, size) in chunks.items():
                if not is_intact(_read_part(self.local, name, offset, length), digest, size):
                    return "the local copy is damaged"
        if step_of(name) is not None:
            packs = self._packs_of(name)
            if packs is None:
                return "the local copy is damaged"
            for pack in packs:
                if not _exists(self.remote, pack):
                    return f"it needs {pack}, which is not there"
        return None

    def _packs_of(self, name: str) -> list[str] | None:
        try:
            manifest = decode_manifest(self.local.read(name), name)
        except (CorruptionError, OSError):
            return None
        return [PACKS + pack.name for pack in manifest.packs]

    def _forget(self, name: str) -> None:
        self._indexes.pop(name, None)


class _StagedSink:
    """Written locally; its commit also queues the upload."""

    def __init__(
        self, sink: Sink, is_taken: Callable[[], bool], uploaded: Callable[[], None], where: str
    ) -> None:
        self._sink = sink
        self._is_taken = is_taken
        self._upload = uploaded
        self._where = where

    def write(self, data: memoryview) -> None:
        self._sink.write(data)

    def commit(self) -> None:
        if self._is_taken():
            self._sink.abort()
            raise FileExistsError(errno.EEXIST, "exists already", self._where)
        self._sink.commit()
        self._upload()

    def abort(self) -> None:
        self._sink.abort()


def _read_index(storage: Storage, name: str) -> Chunks:
    size = storage.size(name)
    trailer = _read_part(storage, name, max(0, size - TRAILER_BYTES), min(size, TRAILER_BYTES))
    start, length = index_span(trailer, size, name)
    chunks: Chunks = {}
    at = 0
    for chunk in decode_pack_index(_read_part(storage, name, start, length), trailer, start, name):
        chunks[at] = chunk
        at += chunk[1]
    return chunks


def _read_part(storage: Storage, name: str, offset: int, length: int) -> bytes:
    target = bytearray(length)
    return bytes(target[: storage.read_into(name, offset, memoryview(target))])


def _exists(storage: Storage, name: str) -> bool:
    try:
        storage.size(name)
    except FileNotFoundError:
        return False
    return True


def _place(name: str) -> str:
    """The directory of a name, with its slash."""
    return name[: name.rfind("/") + 1]


def _finished(names: Iterator[str]) -> set[str]:
    return {name for name in names if not name.endswith(TEMP_SUFFIX)}
