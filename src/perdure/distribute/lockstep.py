"""The replicas of `run` in turns, so that they can meet in the middle of the function.

Owns the batons. Invariant: one replica runs at a time, in the order of their numbers between any two
meetings, so that a run is the same program on any number of devices.

The first replica runs in the thread of the caller, and the others follow there when it has ended: a
function without collectives starts no thread. When the first one comes to a collective, each of the
others gets a thread of its own, with the settings of the caller's, runs until it stands there too,
and waits.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.distribute.engine import Guard, Stream
from perdure.distribute.replica_context import standing
from perdure.distribute.values import PerReplica, of
from perdure.errors import StateError, WorkerLostError

if TYPE_CHECKING:
    from perdure.distribute.strategy import Strategy

RULE = "Every replica must call the same collectives in the same order"


class Meeting(NamedTuple):
    """What one replica came to: the call as a user reads it, its value, what joins the values."""

    call: str
    value: Any
    join: Callable[[PerReplica], Any]


class _Stop(BaseException):
    """Ends a replica because another one failed. No `except Exception` of a user's takes it."""


class _Follower:
    """A replica in a thread of its own, which runs only between `resume` and its return."""

    def __init__(self, work: Callable[[], Any], settings: Callable[[], Any]) -> None:
        context = contextvars.copy_context()
        self.meeting: Meeting | None = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.stopped = False
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(
            target=lambda: context.run(self._run, work, settings),
            name="perdure-replica",
            daemon=True,
        )
        self._thread.start()

    def _run(self, work: Callable[[], Any], settings: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            if not self.stopped:
                with settings():
                    self.result = work()
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001  it is raised in the caller's thread
            self.error = error
        finally:
            self.meeting = None
            self._back.release()

    def resume(self) -> None:
        """Let it run to its next meeting, or to its end."""
        self._go.release()
        self._back.acquire()

    def wait(self, meeting: Meeting) -> Any:
        """Called by the replica itself: the answer of the meeting."""
        if not self.stopped:
            self.meeting = meeting
            self._back.release()
            self._go.acquire()
        if self.stopped:
            raise _Stop
        return self.answer

    def stop(self) -> None:
        """End it wherever it stands."""
        self.stopped = True
        self._go.release()
        self._thread.join()


class Lockstep:
    """One `run` over the local replicas. `body(replica)` is the function for one of them.

    With `stream` each replica has random numbers of its own, and what joins their values draws from
    `stream`, which none of them has: not from where the last local one stopped.
    """

    def __init__(
        self,
        strategy: Strategy,
        body: Callable[[int], Any],
        *,
        name: str,
        guard: Guard,
        stream: Stream | None = None,
    ) -> None:
        self._strategy = strategy
        self._engine = strategy.engine
        self._body = body
        self._name = name
        self._guard = guard
        self._stream = stream
        self._switch = stream is not None
        # Where the last join stopped drawing: the next one goes on from there.
        self._drawn: Any = None
        self._first, *self._others = strategy.local_replicas
        self._followers: dict[int, _Follower] = {}
        self._meetings = 0
        self._failure: BaseException | None = None
        # The state of the framework's generators as the caller has it.
        self._outside: Any = None
        # Whether the other processes wait for a word of this one.
        self._owing = False
        # What a thread would not have of the caller's: grad mode, precision, and so on.
        self._settings = self._engine.settings()

    def __call__(self) -> list[Any]:
        """The results in the order of the replicas."""
        try:
            results = self._lead()
        except BaseException as error:
            failure = self._failure or error
            self._tell(failure)
            if failure is error:
                raise
            raise failure from failure.__cause__
        finally:
            for follower in self._followers.values():
                follower.stop()
            self._followers.clear()
            if self._outside is not None:
                self._engine.set_random_state(self._outside)
        return results

    def _lead(self) -> list[Any]:
        try:
            results = [self._alone(self._first)]
        finally:
            if self._followers and self._switch:
                self._outside = self._engine.random_state()
        if not self._owing:  # no meeting
            return results + [self._alone(replica) for replica in self._others]
        self._gather_followers(None)
        self._agree("its end")
        return results + [follower.result for follower in self._followers.values()]

    def _alone(self, replica: int) -> Any:
        try:
            result = self._body(replica)
        except Exception as error:
            error.add_note(f"in logical replica {replica}")
            raise
        if self._failure is not None:  # the function has swallowed it
            raise self._failure
        return result

    def meet(self, replica: int, meeting: Meeting) -> Any:
        """Called by a replica: wait for all others, and get its part of what the meeting gives."""
        random = self._engine.random_state() if self._switch else None
        self._guard.leave(replica)
        if replica in self._followers:
            answer = self._followers[replica].wait(meeting)
        else:
            try:
                answer = self._chair(replica, meeting)
            except Exception as error:  # noqa: BLE001  raised when the replicas have ended
                # Past the handlers of the function, which must not take it for its own.
                self._failure = self._failure or error
                raise _Stop from None
        if self._switch:
            self._engine.set_random_state(random)
        self._guard.resume(replica)
        return answer

    def _chair(self, replica: int, meeting: Meeting) -> Any:
        if self._failure is not None:
            raise self._failure
        if replica != self._first:
            raise StateError(
                f"the replicas of {self._name} part: replica {replica} came to {meeting.call}; "
                f"replica {self._first} ended without it. {RULE}"
            )
        self._owing = True
        for other in self._others if not self._followers else ():
            self._followers[other] = _Follower(
                lambda other=other: self._body(other), self._settings
            )
        self._gather_followers(meeting)
        self._agree(meeting.call)
        values = [meeting.value]
        for follower in self._followers.values():
            assert follower.meeting is not None
            values.append(follower.meeting.value)
        joined = self._join(meeting, PerReplica(tuple(values), self._strategy.local_replicas))
        self._meetings += 1
        self._owing = True
        for other, follower in self._followers.items():
            follower.answer = of(joined, other)
        return of(joined, self._first)

    def _join(self, meeting: Meeting, values: PerReplica) -> Any:
        def join() -> Any:
            if self._drawn is not None:
                self._engine.set_random_state(self._drawn)
            joined = meeting.join(values)
            self._drawn = self._engine.random_state()
            return joined

        with standing(self._strategy, None):
            if self._stream is None:
                return meeting.join(values)
            return self._engine.call(join, self._engine.devices[0], (), {}, self._stream)

    def _gather_followers(self, expected: Meeting | None) -> None:
        """Let each one run to its next meeting or end, and check that it is the expected one."""
        came: dict[str, list[int]] = {}
        came.setdefault(_call(expected), []).append(self._first)
        for replica, follower in self._followers.items():
            follower.resume()
            if follower.error is not None:
                follower.error.add_note(f"in logical replica {replica}")
                raise follower.error
            came.setdefault(_call(follower.meeting), []).append(replica)
        if len(came) > 1:
            parts = "; ".join(f"{_replicas(who)} came to {call}" for call, who in came.items())
            raise StateError(f"the replicas of {self._name} part: {parts}. {RULE}")

    def _agree(self, call: str, error: str | None = None) -> None:
        """Compare with the other processes, whose replicas must have come to the same call."""
        self._owing = False
        processes = self._strategy.processes
        if processes.count == 1:
            return
        mine = {"call": f"{call} (meeting {self._meetings} of {self._name})", "error": error}
        for process, text in enumerate(processes.channel("run").gather(json.dumps(mine).encode())):
            theirs = json.loads(text)
            if error is None and theirs["error"] is not None:
                raise StateError(f"{self._name} failed in process {process}: {theirs['error']}")
            if error is None and theirs["call"] != mine["call"]:
                raise StateError(
                    f"process {processes.index} came to {mine['call']} and process {process} to "
                    f"{theirs['call']}. {RULE}"
                )

    def _tell(self, failure: BaseException) -> None:
        """Let the processes that wait in a meeting know why this one does not come."""
        if self._owing and isinstance(failure, Exception):
            notes = " ".join(getattr(failure, "__notes__", ()))
            with contextlib.suppress(WorkerLostError):
                self._agree("a failure", f"{type(failure).__name__}: {failure} {notes}".strip())


def _call(meeting: Meeting | None) -> str:
    return "its end" if meeting is None else meeting.call


def _replicas(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"replica {shown}" if len(numbers) == 1 else f"replicas {shown}"
