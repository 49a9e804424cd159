"""The writer's lock on an object store: an object with its owner, renewed while it is held.

One holder at a time as long as clocks run at the same rate. A holder that could not renew for
`lease_seconds` may be replaced; it notices that before its next change. A request in progress then
may still have an effect, but a manifest is only created where there is none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from perdure.runtime.process_stat import START, STATE, stat_fields
from perdure.store.bucket import Bucket, version_of
from perdure.store.format import TEMP_SUFFIX
from perdure.store.storage import LostLock

RENEWALS_PER_LEASE = 3


class Holder(Struct, frozen=True):
    """The contents of a lock object. `renewals` makes the bytes of every version differ."""

    owner: str
    nonce: str
    lease_seconds: float
    renewals: int = 0
    process: tuple[str, str, str, int, str] | None = None
    """Host, boot, process name space, process id and start: equal for one process only."""


class Lease:
    """A lock object `name`, held from `acquire` to `release`.

    `now` is the time that the age of a lock is judged by: the clock of the store, so that those of
    hosts do not matter.
    """

    def __init__(
        self, bucket: Bucket, name: str, owner: bytes, now: Callable[[], float] | None = None
    ) -> None:
        self._bucket = bucket
        self._name = name
        self._now = now or self._store_time
        self._mine = Holder(
            owner=owner.decode(errors="replace"),
            nonce=secrets.token_hex(8),
            lease_seconds=bucket.options.lease_seconds,
            process=_this_process(),
        )
        self._version: Mapping[str, str] = {}
        self._renewed = 0.0
        self._lost: str | None = None
        self._busy = threading.Lock()
        self._released = threading.Event()
        self._pid = os.getpid()

    def acquire(self) -> None:
        """Take the lock; raises `BlockingIOError` with the owner text of a live holder."""
        started = _steady()
        data = msgspec.json.encode(self._mine) + b"\n"
        for _ in range(3):  # the holder may let go between two requests
            try:
                self._version = self._bucket.create(self._name, data)
                break
            except FileExistsError:
                pass
            try:
                version = version_of(before := self._bucket.head(self._name))
                holder = self._holder()
            except FileNotFoundError:
                continue
            if not self._is_stale(holder, before["last_modified"].timestamp()):
                raise self._held_by(holder)
            self._version = self._take_over(holder, data, version)
            break
        else:
            raise BlockingIOError(errno.EAGAIN, "its holder changed several times", self._where)
        self._renewed = started
        # While Python exits no thread can begin. Then `check` renews the lock, or finds it lost.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._keep, name="perdure-lock", daemon=True).start()

    def check(self) -> None:
        """Raise `LostLock` if this process lost the lock; the store is asked only if in doubt."""
        if self._lost is None and _steady() - self._renewed > self._mine.lease_seconds:
            self.renew()
        if self._lost is not None:
            raise LostLock(
                errno.ESTALE,
                f"the lock was taken over by {self._lost.strip()} when this process had not renewed "
                f"it for {self._mine.lease_seconds:g} s; nothing more is written. Stop one of the two",
                self._where,
            )

    def renew(self) -> None:
        """Renew the lock, or notice that it is lost; raises `ConnectionError` if there is no answer."""
        with self._busy:
            if self._lost is not None or self._released.is_set():
                return
            started = _steady()
            following = msgspec.structs.replace(self._mine, renewals=self._mine.renewals + 1)
            data = msgspec.json.encode(following) + b"\n"
            try:
                self._version = self._bucket.put_over(self._name, data, self._version)
            except (BlockingIOError, FileNotFoundError):
                self._look(started)
                return
            except OSError as error:
                if error.errno != errno.ENOTSUP:
                    raise
                # This store has no conditional writes, so nobody takes over; the object must only
                # exist.
                self._look(started)
                return
            self._mine = following
            self._renewed = started

    def release(self) -> None:
        """Release the lock. In a forked child, where it is the parent's, do nothing."""
        if os.getpid() != self._pid:
            return
        self._released.set()
        with self._busy, contextlib.suppress(ConnectionError):  # then it expires
            if self._lost is None and _steady() - self._renewed < self._mine.lease_seconds:
                self._bucket.delete(self._name)

    @property
    def _where(self) -> str:
        return f"{self._bucket.url}/{self._name}"

    def _keep(self) -> None:
        while not self._released.wait(self._mine.lease_seconds / RENEWALS_PER_LEASE):
            try:
                self.renew()
            except OSError:
                continue  # the next renewal may succeed; until then `check` raises

    def _look(self, started: float) -> None:
        """After a refused renewal: find out whether this process or another one holds the lock."""
        try:
            version = version_of(self._bucket.head(self._name))
            holder = self._holder()
        except FileNotFoundError:
            self._lost = "a process that removed it"
            return
        if holder.nonce == self._mine.nonce:
            self._version, self._renewed, self._mine = version, started, holder
        else:
            self._lost = holder.owner

    def _holder(self) -> Holder:
        data = self._bucket.get(self._name)
        try:
            return msgspec.json.decode(data, type=Holder)
        except (ValueError, RecursionError):  # `msgspec.DecodeError` is one
            return Holder(data.decode(errors="replace"), "", self._mine.lease_seconds)

    def _is_stale(self, holder: Holder, modified: float) -> bool:
        return _is_dead(holder.process) or self._now() - modified > holder.lease_seconds

    def _take_over(
        self, holder: Holder, data: bytes, version: Mapping[str, str]
    ) -> Mapping[str, str]:
        try:
            return self._bucket.put_over(self._name, data, version)
        except (BlockingIOError, FileNotFoundError):
            raise self._held_by(self._holder()) from None
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            raise BlockingIOError(
                errno.EAGAIN,
                f"{holder.owner.strip()}, whose lease ran out; this store cannot replace an object "
                f"on a condition, so remove the lock by hand once that process is gone",
                self._where,
            ) from error

    def _held_by(self, holder: Holder) -> BlockingIOError:
        return BlockingIOError(errno.EAGAIN, holder.owner, self._where)

    def _store_time(self) -> float:
        """The clock of the store, from the time of an object that is written for that."""
        probe = f"{self._name}.{self._mine.nonce}{TEMP_SUFFIX}"
        self._bucket.put(probe, b"")
        try:
            return self._bucket.head(probe)["last_modified"].timestamp()
        finally:
            self._bucket.delete(probe)


def _steady() -> float:
    """Seconds of a clock that also runs while the machine sleeps, like that of the store."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _this_process() -> tuple[str, str, str, int, str] | None:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        pid = os.getpid()
        return socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"), pid, _started(pid)
    except OSError:
        return None


def _is_dead(process: tuple[str, str, str, int, str] | None) -> bool:
    """Whether a process of this host, boot and name space has ended; False for any other process."""
    this = _this_process()
    if process is None or this is None or process[:3] != this[:3]:
        return False
    try:
        return _started(process[3]) != process[4]
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot."""
    fields = stat_fields(pid)
    if fields[STATE] in "ZX":
        raise FileNotFoundError(errno.ENOENT, "has ended", f"/proc/{pid}")
    return fields[START]
