"""Calls that all processes of a group make together.

Invariant: every process returns from a call with the same outcome. An error in one process is
raised in all of them, as the same class.
"""

from __future__ import annotations

import builtins
import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, cast

import msgspec
from msgspec import Struct

from perdure import errors
from perdure.errors import ClusterError, CorruptionError, StoreError, WorkerLostError
from perdure.runtime.process_group import ATTEMPT, ByAgreement, Processes, framework_group

_MOST_CALLS = 20

R = TypeVar("R")


class SentError(Struct):
    """An error as the other processes get it: the name of its class, and its text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException | None) -> SentError | None:
        if error is None:
            return None
        # The other processes raise the public class that a private one derives from.
        public = (
            kind for kind in type(error).__mro__ if kind.__module__ in ("builtins", errors.__name__)
        )
        return cls(next(public).__name__, str(error))

    def is_a(self, public: type[Exception]) -> bool:
        """Whether its class is `public` or derived from it."""
        kind = getattr(errors, self.kind, None)
        return isinstance(kind, type) and issubclass(kind, public)

    def error_of(self, process: str) -> Exception:
        """The error as one of this process: of the same class if a text is enough to make it."""
        kind = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(Exception):
                return kind(f"{process}: {self.text}")
        return StoreError(f"{process}: {self.kind}: {self.text}")


class _Outcome(Struct):
    """How a call ended in the chief: with an error, or with an answer for all processes."""

    error: SentError | None = None
    answer: Any = None


class _Message(Struct):
    """The bytes of one process in a collective, and the call of the user that they belong to."""

    call: str
    data: bytes


class GroupCall(ByAgreement):
    """The group during one call: collectives of two different calls are an error in every process.
    Otherwise a process that restores could take the bytes of a `save` for its own collective."""

    def __init__(self, processes: Processes, call: str) -> None:
        self._processes = processes
        self._call = call
        self.index = processes.index
        self.count = processes.count
        self.is_chief = processes.is_chief

    def agree(self, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        if self.count == 1:
            return decide([data])

        def answer(sent: list[bytes]) -> bytes:
            messages = [_message(part) for part in sent]
            differ = [n for n, message in enumerate(messages) if message.call != messages[0].call]
            outcome = _Outcome()
            if differ:
                calls = [f"process {number} {messages[number].call}" for number in (0, *differ)]
                outcome.error = SentError("StoreError", ", ".join(calls[:_MOST_CALLS]))
            else:
                outcome.answer = decide([message.data for message in messages])
            return msgspec.msgpack.encode(outcome)

        sent = self._processes.agree(msgspec.msgpack.encode(_Message(self._call, data)), answer)
        try:
            outcome = decoded(sent, _Outcome)
        except msgspec.MsgspecError:
            calls = f"process 0 {_message(b'').call}, process {self.index} {self._call}"
            outcome = _Outcome(SentError("StoreError", calls))
        if outcome.error is not None:
            raise StoreError(
                f"the processes of the group made different calls: {outcome.error.text}. Nothing was "
                f"changed. In a group every process makes the same calls with the same arguments, in "
                f"the same order."
            )
        return outcome.answer

    def collect(self, data: bytes) -> list[bytes]:
        return self._processes.collect(data)

    def broadcast(self, data: bytes | None) -> bytes:
        return self._processes.broadcast(data)

    def channel(self, name: str) -> Processes:
        return self._processes.channel(name)


def together(
    processes: Processes,
    action: Callable[[], R],
    *,
    by_chief: type[R] | None = None,
    call: str = "",
) -> R:
    """Run `action`, with the same outcome in every process. A collective. With `by_chief`, the type
    of its result, only the chief runs it, and all return that. Processes have to name the same
    `call`."""
    if processes.count == 1:
        return action()
    if call:
        GroupCall(processes, call).barrier()
    if by_chief is None:
        result, error = capture_error(action)
        if failed := gather_failures(processes, error):
            raise_first(processes, failed, error)
        return cast(R, result)
    if processes.is_chief:
        result, error = capture_error(action)
        outcome = _Outcome(SentError.of(error), result)
        processes.broadcast(msgspec.msgpack.encode(outcome))
        if error is not None:
            raise error
        return cast(R, result)
    outcome = decoded(processes.broadcast(None), _Outcome)
    if outcome.error is not None:
        raise outcome.error.error_of("the chief process")
    return msgspec.convert(outcome.answer, by_chief)


_channels = itertools.count()
"""The numbers of the channels in which this process is the chief."""


def save_channel(processes: Processes, where: str) -> Processes:
    """A channel for the saves of one manager, which overlap in threads with saves of other managers. A
    collective. No number is used twice, because messages of a failed save may still be unread."""
    name = where.rstrip("/").rpartition("/")[2]
    number = next(_channels) if processes.is_chief else 0
    call = GroupCall(processes, f"save into {name}")
    return processes.channel(f"save-{int(call.agree(b'%d' % number, lambda sent: sent[0]))}")


def require_group(where: str) -> None:
    """Raise `ClusterError` if the framework knows of other processes, and a manager was given none:
    each of them would take itself for the only writer. So would the workers of `perdure run`."""
    group = framework_group()
    count = os.environ.get("WORLD_SIZE", "")
    if group is None and ATTEMPT in os.environ and count.isdigit() and int(count) > 1:
        raise ClusterError(
            f"{where}: `perdure run` has started {count} workers, and the manager was not given their "
            f"group, so that each would train alone. Call perdure.initialize_distributed('torch') (or "
            f"'jax') before the first array, and pass what it returns as "
            f"CheckpointManager(..., processes=group). For a directory that this worker alone uses, "
            f"pass processes=perdure.checkpoint.SingleProcess()."
        )
    if group is not None and group.count > 1:
        call = "perdure.initialize_distributed('jax')"
        if group.engine == "torch":
            call = "perdure.torch.process_group()"
        raise ClusterError(
            f"{where}: {group.source} says that this is process {group.index} of {group.count}, and "
            f"the manager was not given the group. Make it in every process as "
            f"CheckpointManager(..., processes={call}), or with strategy.processes. For a directory "
            f"that this process alone uses, pass processes=perdure.checkpoint.SingleProcess()."
        )


def capture_error(action: Callable[[], R]) -> tuple[R | None, BaseException | None]:
    """The result of `action`, or its error, so that the other processes can be informed of it."""
    try:
        return action(), None
    except WorkerLostError:
        raise  # a process of the group is gone: the others cannot agree any more
    except BaseException as error:  # noqa: BLE001 (raised again after the others are informed)
        return None, error


def gather_failures(processes: Processes, error: BaseException | None) -> dict[int, SentError]:
    """The errors of processes that have one, by process. A collective. The chief gets all of them,
    the others the first one, and the first that is no damage."""
    failed: dict[int, SentError] = {}

    def decide(sent: list[bytes]) -> bytes:
        found = enumerate(decoded(data, SentError | None) for data in sent)
        failed.update((number, error) for number, error in found if error is not None)
        others = (number for number, error in failed.items() if not error.is_a(CorruptionError))
        shared = {*list(failed)[:1], *itertools.islice(others, 1)}
        return msgspec.msgpack.encode({number: failed[number] for number in shared})

    answer = processes.agree(msgspec.msgpack.encode(SentError.of(error)), decide)
    if processes.is_chief:
        return failed
    return msgspec.msgpack.decode(answer, type=dict[int, SentError])


def raise_first(
    processes: Processes, failed: Mapping[int, SentError], error: BaseException | None
) -> NoReturn:
    """Raise the error of the first process that has one; an interrupt of this process stays one."""
    first = min(failed)
    if error is not None and (first == processes.index or not isinstance(error, Exception)):
        raise error
    raise failed[first].error_of(f"process {first}") from error


def decoded(data: bytes, kind: Any) -> Any:
    """The value that another process sent."""
    return msgspec.msgpack.decode(data, type=kind)


def _message(data: bytes) -> _Message:
    try:
        return decoded(data, _Message)
    except msgspec.MsgspecError:
        return _Message("an operation of its own", data)
