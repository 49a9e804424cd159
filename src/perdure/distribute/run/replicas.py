"""The replicas of one `strategy.run`, in their order, and the points where they meet.

When the first replica comes to a collective, each of the others gets a thread, with the settings of
the caller's thread, runs to the same collective and waits there. Only one runs at a time, in the
order of their numbers, so that a run is the same program on any number of devices.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from perdure.distribute.engine import Stream
from perdure.distribute.run import collectives, context
from perdure.distribute.run.context import Meeting, ReplicaContext, Scope
from perdure.distribute.topology import Plan
from perdure.distribute.values import PerReplica, of
from perdure.errors import StateError, WorkerLostError
from perdure.runtime.process_group import gather_values
from perdure.text import few

RULE = "Every replica must call the same collectives in the same order"


class Recorder(Protocol):
    """Takes the values that replicas recorded in one `run`, after all of them have succeeded."""

    def commit(self, rounds: list[PerReplica]) -> None: ...


class RunContext(ReplicaContext):
    """One replica in `run`."""

    def __init__(self, run: ReplicaRun, replica: int) -> None:
        super().__init__(run.plan.replicas)
        self._run = run
        self._replica = replica
        self.eager = run.eager
        self.recorded: dict[Recorder, list[Any]] = {}

    @property
    def replica_id_in_sync_group(self) -> int:
        return self._replica

    def meet(self, meeting: Meeting) -> Any:
        return self._run.meet(self._replica, meeting)

    def record(self, recorder: Recorder, value: Any) -> None:
        """Keep a value for `recorder.commit`, which gets it when all replicas have succeeded."""
        self.recorded.setdefault(recorder, []).append(value)


def current_run() -> RunContext | None:
    """The context of the replica whose code this is; None elsewhere, in `grad` too."""
    found = context.get_replica_context()
    return found if isinstance(found, RunContext) else None


class ReplicaRun:
    """`fn` for the local replicas, once.

    `stream(number)` is the stream of a replica, or, with V, that of a function that joins all
    values.
    """

    def __init__(
        self,
        plan: Plan,
        strategy: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stream: Callable[[int], Stream] | None,
    ) -> None:
        self.plan = plan
        plan.runs += 1
        self.strategy = strategy
        self.eager = plan.engine.eager_run(
            lambda values: collectives.reduce(
                plan, "sum", PerReplica(values, plan.local_replicas), None
            )
        )
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._name = getattr(fn, "__name__", repr(fn))
        self._stream = stream
        self._contexts = {replica: RunContext(self, replica) for replica in plan.local_replicas}
        # The replicas after the first one, from the first meeting on.
        self._followers: dict[int, _Follower] = {}
        self._meetings = 0
        self._failure: BaseException | None = None
        # Whether the other processes wait for a message of this one.
        self._awaited = False
        # Puts the framework's generators back: to the caller's state, and to the end of the last join.
        self._restore_callers: Callable[[], None] | None = None
        self._restore_joined: Callable[[], None] | None = None
        # Settings of the caller that another thread would not have: grad mode, precision, and so on.
        self._settings = self.eager.thread_settings()

    def __call__(self) -> PerReplica:
        """The results of the local replicas."""
        results = []
        try:
            with self._failures_reported():
                for replica in self.plan.local_replicas:
                    results.append(self._in_this_thread(replica))
                    if self._meetings:  # the others have run beside the first one
                        results += self._results_of_followers()
                        break
            self.eager.finish()
            _commit(list(self._contexts.values()))
        finally:
            self._contexts.clear()  # a cycle, which would keep the arguments until it is collected
        return PerReplica(tuple(results), self.plan.local_replicas)

    def _run_replica(self, replica: int) -> Any:
        split = [v for v in (*self._args, *self._kwargs.values()) if isinstance(v, PerReplica)]
        with (
            context.enter(Scope(self.strategy, self._contexts[replica])),
            self.eager.replica(replica, [of(value, replica) for value in split]),
        ):
            return self.eager.call(
                self._fn,
                self.plan.device_of(replica),
                [of(value, replica) for value in self._args],
                {name: of(value, replica) for name, value in self._kwargs.items()},
                self._stream and self._stream(replica),
            )

    def _in_this_thread(self, replica: int) -> Any:
        try:
            result = self._run_replica(replica)
        except Exception as error:
            error.add_note(f"in logical replica {replica}")
            raise
        finally:
            if self._followers and self._stream is not None:
                self._restore_callers = self.eager.random_state()
        if self._failure is not None:  # the function has swallowed it
            raise self._failure
        return result

    # ---------------------------------------------------------------- collectives

    def meet(self, replica: int, meeting: Meeting) -> Any:
        """Called by a replica: wait for all others, and return its part of what the meeting gives."""
        restore = self.eager.random_state() if self._stream is not None else None
        self.eager.leave(replica)
        if replica in self._followers:
            answer = self._followers[replica].wait(meeting)
        else:
            try:
                answer = self._lead(replica, meeting)
            except Exception as error:  # noqa: BLE001  raised when the replicas have ended
                # The handlers of the user's function must not take it for an error of its own.
                self._failure = self._failure or error
                raise _Stop from None
        if restore is not None:
            restore()
        self.eager.resume(replica)
        return answer

    def _lead(self, replica: int, meeting: Meeting) -> Any:
        """The first replica's part: let the others come to the meeting, and combine the values."""
        if self._failure is not None:
            raise self._failure
        first, *others = self.plan.local_replicas
        if replica != first:
            raise StateError(
                f"the replicas of {self._name} diverge: replica {replica} reached {meeting.call}; "
                f"replica {first} ended without it. {RULE}"
            )
        self._awaited = True
        for other in others if not self._followers else ():
            self._followers[other] = _Follower(
                lambda other=other: self._run_replica(other), self._settings
            )
        self._advance_followers(meeting)
        self._agree(meeting.call)
        values = [meeting.value]
        for follower in self._followers.values():
            assert follower.meeting is not None
            values.append(follower.meeting.value)
        joined = self._join(meeting, PerReplica(tuple(values), self.plan.local_replicas))
        self._meetings += 1
        self._awaited = True
        for other, follower in self._followers.items():
            follower.answer = of(joined, other)
        return of(joined, first)

    def _join(self, meeting: Meeting, values: PerReplica) -> Any:
        def join() -> Any:
            if self._restore_joined is not None:
                self._restore_joined()
            joined = meeting.join(self.plan, values)
            self._restore_joined = self.eager.random_state()
            return joined

        with context.enter(Scope(self.strategy)):
            if self._stream is None:
                return meeting.join(self.plan, values)
            stream = self._stream(self.plan.replicas)
            return self.eager.call(join, self.plan.engine.devices[0], (), {}, stream)

    def _results_of_followers(self) -> list[Any]:
        self._advance_followers(None)
        self._agree("the end")
        return [follower.result for follower in self._followers.values()]

    def _advance_followers(self, expected: Meeting | None) -> None:
        """Let each one run to its next meeting or end, and check that it is the expected one."""
        reached: dict[str, list[int]] = {_name(expected): [self.plan.first]}
        for replica, follower in self._followers.items():
            follower.resume()
            if follower.error is not None:
                follower.error.add_note(f"in logical replica {replica}")
                raise follower.error
            reached.setdefault(_name(follower.meeting), []).append(replica)
        if len(reached) > 1:
            parts = "; ".join(f"{_numbers(at)} reached {call}" for call, at in reached.items())
            raise StateError(f"the replicas of {self._name} diverge: {parts}. {RULE}")

    # ---------------------------------------------------------------- other processes

    def _agree(self, call: str, error: str | None = None) -> None:
        """Compare with the other processes, whose replicas must have reached the same call."""
        self._awaited = False
        processes = self.plan.engine.processes
        if processes.count == 1:
            return
        mine = {"call": f"{call} (meeting {self._meetings} of {self._name})", "error": error}
        for process, theirs in enumerate(gather_values(processes.channel("run"), mine)):
            if error is None and theirs["error"] is not None:
                raise StateError(f"{self._name} failed in process {process}: {theirs['error']}")
            if error is None and theirs["call"] != mine["call"]:
                raise StateError(
                    f"process {processes.index} reached {mine['call']} and process {process} reached "
                    f"{theirs['call']}. {RULE}"
                )

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        """Report a failure to the processes that wait in a meeting, and end the followers."""
        try:
            yield
        except BaseException as error:
            failure = self._failure or error
            if self._awaited and isinstance(failure, Exception):
                notes = " ".join(getattr(failure, "__notes__", ()))
                with contextlib.suppress(WorkerLostError):
                    self._agree("a failure", f"{type(failure).__name__}: {failure} {notes}".strip())
            if failure is error:
                raise
            raise failure from failure.__cause__
        finally:
            for follower in self._followers.values():
                follower.stop()
            self._followers.clear()
            if self._restore_callers is not None:
                self._restore_callers()


class _Stop(BaseException):
    """Ends a replica because another one failed. A user's `except Exception` does not catch it."""


class _Follower:
    """A replica in a thread of its own, which runs only between `resume` and its return."""

    def __init__(self, work: Callable[[], Any], settings: Callable[[], Any]) -> None:
        variables = contextvars.copy_context()
        self.meeting: Meeting | None = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.stopped = False
        self._may_run = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._thread = threading.Thread(
            target=lambda: variables.run(self._run, work, settings),
            name="perdure-replica",
            daemon=True,
        )
        self._thread.start()

    def _run(self, work: Callable[[], Any], settings: Callable[[], Any]) -> None:
        self._may_run.acquire()
        try:
            if not self.stopped:
                with settings():
                    self.result = work()
        except _Stop:
            pass
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            self.error = error
        finally:
            self.meeting = None
            self._paused.release()

    def resume(self) -> None:
        """Let the replica run to its next meeting, or to its end."""
        self._may_run.release()
        self._paused.acquire()

    def wait(self, meeting: Meeting) -> Any:
        """Called by the replica itself: the answer of the meeting."""
        if not self.stopped:
            self.meeting = meeting
            self._paused.release()
            self._may_run.acquire()
        if self.stopped:
            raise _Stop
        return self.answer

    def stop(self) -> None:
        """End the replica, wherever it waits."""
        self.stopped = True
        self._may_run.release()
        self._thread.join()


def _commit(replicas: Sequence[RunContext]) -> None:
    """Hand over what the replicas recorded: for each recorder, a PerReplica of each round."""
    first, numbers = replicas[0], tuple(each.replica_id_in_sync_group for each in replicas)
    for recorder in dict.fromkeys(recorder for each in replicas for recorder in each.recorded):
        columns = [each.recorded.get(recorder, []) for each in replicas]
        for number, column in zip(numbers, columns, strict=True):
            if len(column) != len(columns[0]):
                raise StateError(
                    f"{recorder}: logical replica {first.replica_id_in_sync_group} updated it "
                    f"{len(columns[0])} times and replica {number} {len(column)} times in one run; "
                    "every replica must do so equally often"
                )
        recorder.commit([PerReplica(row, numbers) for row in zip(*columns, strict=True)])


def _name(meeting: Meeting | None) -> str:
    return "the end" if meeting is None else meeting.call


def _numbers(replicas: Sequence[int]) -> str:
    return f"{'replica' if len(replicas) == 1 else 'replicas'} {few(replicas, 8)}"
