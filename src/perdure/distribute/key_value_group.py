"""Barriers, broadcasts and votes of a group of processes, outside of the training step.

They go through a key-value store in process 0 and not through collectives, so that a save in the
background may wait for the others while the main thread runs steps; two threads could call
collectives in different orders, and hang. Process 0 reads what all send, and answers with one
value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from time import monotonic
from typing import Any, Protocol

from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.distribute.lifeline import GONE, Lifeline
from perdure.errors import ClusterError, WorkerLostError, needs_extra
from perdure.runtime.process_group import ByAgreement, Processes, require_bytes

# gRPC refuses messages above 4 MiB.
_PIECE = 2**20

# How long it may take to find out whether a key is there.
_LOOK_S = 1.0

# Begins the text of an error that all processes raise.
_FAILED = b"\3"

ENGINES = ("jax", "torch")

LOST = (
    "Save nothing: the group is incomplete. Exit now, and restart the whole group from the last "
    "checkpoint"
)


class KeyValueStore(Protocol):
    """A framework's client of a store that all processes of a group reach.

    Its requests raise `error`, with `timeout` in its text for a key that did not come in time.
    """

    error: type[Exception]
    timeout: str

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, seconds: float) -> bytes:
        """Wait so long for the key."""
        ...

    def delete(self, key: str) -> None: ...

    def answers(self, text: str) -> bool:
        """Whether the store itself is there, by the text of an error that is no timeout."""
        ...


class KeyValueProcesses(ByAgreement):
    """A group that communicates through a key-value store.

    Each channel has a connection of its own, because a store's client may hold a lock while it
    waits. A process counts as hung after `limit` seconds; `lifeline` notices that one is gone.
    """

    def __init__(
        self,
        connect: Callable[[], KeyValueStore],
        index: int,
        count: int,
        limit: float = 600,
        lifeline: Lifeline | None = None,
        channel: str = "main",
        members: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.count = count
        self._connect = connect
        self._limit = limit
        self._lifeline = lifeline
        self._name = channel
        self._members = members or range(count)
        self._store = connect()
        self._round = 0
        self._channels: dict[str, KeyValueProcesses] = {}
        self._old: list[str] = []
        self._collected: list[str] = []
        self._waiting: list[str] = []
        self._failure: WorkerLostError | None = None

    @property
    def is_chief(self) -> bool:
        return self.index == 0

    def agree(self, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        sent = self.collect(data)
        if not self.is_chief:
            return self.broadcast(None)
        try:
            answer = decide(sent)
        except BaseException as error:
            self._leave(error)
            raise
        return self.broadcast(answer)

    def collect(self, data: bytes) -> list[bytes]:
        self._next_round()
        if not self.is_chief:
            self._collected += self._write(f"{self.index}", data)
            return []
        # Others that wait long for what follows find out by this key that process 0 waits, too.
        self._waiting = self._write("0", b"")
        values, began = [data], monotonic()
        try:  # one limit for all that are missing
            for process in range(1, self.count):
                values.append(self._read(process, monotonic() - began))
        except BaseException as error:
            self._leave(error)
            raise
        # All processes have entered this round, so they have left the rounds of earlier broadcasts.
        self._delete(self._old)
        self._old = []
        return values

    def broadcast(self, data: bytes | None) -> bytes:
        self._next_round()
        if not self.is_chief:
            value = self._answer()
            # Process 0 has read what it collected before.
            self._delete(self._collected)
            self._collected = []
            return value
        self._old += self._write("0", require_bytes(data))
        self._delete(self._waiting)
        self._waiting = []
        return require_bytes(data)

    def channel(self, name: str) -> KeyValueProcesses:
        if name not in self._channels:
            self._channels[name] = self._group(self.index, self._members, f"{self._name}/{name}")
        return self._channels[name]

    def subgroup(self, members: Sequence[int]) -> KeyValueProcesses:
        """Some processes of this group, including this one, as a group of their own."""
        name = f"{self._name}/of-{'-'.join(map(str, members))}"
        return self._group(members.index(self.index), members, name)

    def _group(self, index: int, members: Sequence[int], name: str) -> KeyValueProcesses:
        count = len(members)
        return KeyValueProcesses(
            self._connect, index, count, self._limit, self._lifeline, name, members
        )

    def _next_round(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._round += 1

    def _leave(self, error: BaseException) -> None:
        """Let the others raise the error of process 0 in the next round, in which they wait for it."""
        lost = error
        if not isinstance(lost, WorkerLostError):
            what = f"process 0 left an operation of the group ({type(error).__name__}: {error})"
            lost = WorkerLostError(f"{what}. End all processes and start all again.")
        self._failure = lost
        self._round += 1
        with suppress(WorkerLostError):  # the store is gone too, which ends their wait
            self._set(self._key(self._round, "0"), _FAILED + str(lost).encode())

    def _answer(self) -> bytes:
        """What process 0 broadcasts. Waited for twice as long if process 0 itself waits for another."""
        try:
            return self._read(0)
        except WorkerLostError:
            before, now = (self._key(number, "0") for number in (self._round - 1, self._round))
            if not self._collected or (
                self._get(before, _LOOK_S) is None and self._get(now, _LOOK_S) is None
            ):
                raise
            return self._read(0)

    def _key(self, number: int, writer: str) -> str:
        return f"perdure/{self._name}/{number}/{writer}"

    def _write(self, writer: str, data: bytes) -> list[str]:
        """Write the pieces first, then the key that readers wait for, which has their number."""
        base = self._key(self._round, writer)
        pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
        if len(pieces) <= 1:
            self._set(base, b"\0" + data)
            return [base]
        for number, piece in enumerate(pieces):
            self._set(f"{base}/{number}", piece)
        self._set(base, b"\1" + str(len(pieces)).encode())
        return [base, *(f"{base}/{number}" for number in range(len(pieces)))]

    def _read(self, process: int, waited: float = 0.0) -> bytes:
        base = self._key(self._round, f"{process}")
        value = self._wait(base, process, waited)
        if value[:1] == b"\0":
            return value[1:]
        if value[:1] == _FAILED:
            self._failure = WorkerLostError(value[1:].decode())
            raise self._failure
        pieces = range(int(value[1:]))
        return b"".join(self._wait(f"{base}/{number}", process) for number in pieces)

    def _wait(self, key: str, process: int, waited: float = 0.0) -> bytes:
        """What `process` writes; `waited` seconds of the limit are over already."""
        number, lifeline = self._members[process], self._lifeline
        left = max(self._limit - waited, min(self._limit, _LOOK_S))
        with nullcontext() if lifeline is None else lifeline.awaiting(key, number):
            value = self._get(key, left)
        if value is None:
            raise late(number, self._limit)
        if value == GONE:
            raise lost(f"waiting for process {number}")
        return value

    def _set(self, key: str, value: bytes) -> None:
        self._request("a message to the other processes", self._store.set, key, value)

    def _get(self, key: str, seconds: float) -> bytes | None:
        return self._request("waiting for the other processes", self._store.get, key, seconds)

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._request("a message to the other processes", self._store.delete, key)

    def _request(self, what: str, request: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of the store; None if a key did not come in time."""
        store = self._store
        try:
            return request(*arguments)
        except store.error as error:
            text = str(error)
            if store.timeout in text:
                return None
            if store.answers(text):
                raise lost(what, error) from error
            server = "process 0 (or the launcher, if that serves the group's messages)"
            raise lost(what, error, server) from error


def late(process: int, seconds: float) -> WorkerLostError:
    """The error for a process that did not join an operation of the group in time."""
    return WorkerLostError(
        f"process {process} did not come to this operation of the group within {seconds:g} s: it "
        f"hangs, is gone, or does not make the call that waits here. Every process of a group has to "
        f"make the same calls; a save under `if rank == 0` waits for the others. {LOST}"
    )


def lost(
    what: str, error: BaseException | None = None, gone: str = "a process of the group"
) -> WorkerLostError:
    """The error for an operation of the group that failed because `gone` is gone."""
    reason = f" ({str(error).strip().splitlines()[0]})" if error is not None and str(error) else ""
    return WorkerLostError(f"{what} failed: {gone} is gone{reason}. {LOST}")


def initialize_distributed(
    engine: str | None = None,
    resolver: ClusterResolver | str | None = None,
    options: ClusterOptions | None = None,
) -> Processes:
    """Join the group of processes that the environment describes.

    If the program has already called `jax.distributed.initialize` or
    `torch.distributed.init_process_group` (with any backend), this joins that group. Otherwise it reads
    the variables of `perdure run`, another launcher or a scheduler (see `resolve`), waits for the other
    processes, and calls that function with every argument, so that the framework detects nothing by
    itself. A process that is alone gets a process group of one on PyTorch, so that
    `DistributedDataParallel` works there too, and nothing on JAX. May be called twice.

    `MultiWorkerMirroredStrategy` joins its group without this call.

    Args:
        engine: "jax" or "torch"; by default the one that the program has imported.
        resolver: The group, or the name of a source, instead of the environment.
        options: Time limits.

    Returns:
        The group. Pass it on: `CheckpointManager(..., processes=perdure.initialize_distributed())`.

    Raises:
        ClusterError: The description contradicts itself or the group of the framework, or a process did
            not come in time.
    """
    if engine is None:
        imported = [name for name in ENGINES if name in sys.modules]
        if len(imported) != 1:
            state = "both" if imported else "neither"
            raise ClusterError(
                f"initialize_distributed: expected the program to have imported jax or torch, found "
                f'{state}; name the one that trains: perdure.initialize_distributed("jax")'
            )
        (engine,) = imported
    if engine not in ENGINES:
        raise ClusterError(f"initialize_distributed: expected 'jax' or 'torch', found {engine!r}")
    cluster = resolve_for(engine, resolver)
    with needs_extra(engine):
        group = import_module(f"perdure.distribute.{engine}.group")
    return group.initialize(cluster, options)
