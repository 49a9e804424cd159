"""When a silent worker counts as hung: after a given limit, or one that follows what was measured."""

from __future__ import annotations

import math

import pytest

from perdure.runtime.heartbeats import Beat
from perdure.supervise.options import Limits
from perdure.supervise.silence import BUSY, DEFAULT_S, WINDOW_S, Silence


class Process:
    """A worker that computes at a constant share of one core."""

    def __init__(self, share: float, accelerated: bool = False) -> None:
        self.share, self.now, self.accelerated = share, 0.0, accelerated

    def cpu_seconds(self) -> float:
        return self.share * self.now

    def uses_accelerator(self) -> bool:
        return self.accelerated


def beat(time: float, phase: str = "step", step: int | None = None, pid: int = 1) -> Beat:
    return Beat(phase, step, time, pid)


def hung_at(silence: Silence, process: Process, last: Beat, until: float = 1e6) -> float:
    """Seconds of silence at which `process` counts as hung, asked once a second."""
    second = 0.0
    while second < until:
        second += 1.0
        process.now = last.time + second
        if silence.exceeded_limit(process, last, process.now) is not None:
            return second
    return math.inf


def test_a_given_limit_holds_as_given() -> None:
    silence = Silence(Limits(step=60))
    silence.heard(worker := Process(1.0), beat(0, step=1), beat(500, step=2))
    assert hung_at(silence, worker, beat(500, step=2)) == 61
    assert hung_at(Silence(Limits(step=math.inf)), Process(0), beat(0), 1e5) == math.inf


def test_time_without_a_watch_counts_as_no_silence() -> None:
    silence, worker = Silence(Limits(step=60)), Process(0.0)
    silence.skip(110, 130)
    silence.skip(130, 150)
    silence.skip(190, 195)
    assert hung_at(silence, worker, beat(100, step=1)) == 61 + 40 + 5
    assert hung_at(silence, worker, beat(140, step=1)) == 61 + 10 + 5
    assert hung_at(silence, worker, beat(200, step=1)) == 61
    measured = Silence(Limits())
    measured.skip(110, 150)
    measured.heard(worker, beat(100, step=1), beat(200, step=2))
    assert measured.longest["step"] == 60


def test_an_idle_worker_counts_as_hung_after_the_default_limit() -> None:
    for phase, limit in DEFAULT_S.items():
        expected = limit + 1 + WINDOW_S
        assert hung_at(Silence(Limits()), Process(0.01), beat(0, phase), 1e4) == expected


def test_the_limit_follows_the_longest_silence_between_steps() -> None:
    silence, worker = Silence(Limits()), Process(0.0)
    # One heartbeat an epoch: the first epoch is spent in the phase `compile`.
    silence.heard(worker, beat(0, "compile", 0), beat(1000, "step", 100))
    assert silence.limit("step") == 2000
    assert silence.limit("save") == DEFAULT_S["save"]
    silence.heard(worker, beat(1000, "step", 100), beat(2500, "step", 200))
    assert hung_at(silence, worker, beat(2500, step=200)) == 3000 + 1 + WINDOW_S


def test_a_beat_of_another_process_measures_nothing() -> None:
    silence = Silence(Limits())
    silence.heard(Process(0), beat(0, step=1, pid=1), beat(5000, step=2, pid=2))
    silence.heard(Process(0), None, beat(5000, step=2))
    assert silence.limit("step") == DEFAULT_S["step"]


def test_a_worker_that_computes_gets_several_limits() -> None:
    worker = Process(1.0)
    after_steps = Silence(Limits())
    after_steps.heard(worker, beat(0, step=1), beat(1, step=2))
    assert hung_at(after_steps, worker, beat(1, step=2)) == BUSY * DEFAULT_S["step"] + 1


def test_a_first_step_has_no_limit_while_the_worker_computes() -> None:
    """Nothing says how long a step is: the first epoch may take a day."""
    day = 86400.0
    for worker in (Process(1.0), Process(0.0, accelerated=True)):
        assert hung_at(Silence(Limits()), worker, beat(0, "compile", 0), day) == math.inf
    # The control: neither computes nor waits for a device that may; and a limit that was given holds.
    idle, limit = Process(0.0), DEFAULT_S["compile"]
    assert hung_at(Silence(Limits()), idle, beat(0, "compile", 0), day) == limit + 1 + WINDOW_S
    assert hung_at(Silence(Limits(compile=60)), Process(1.0), beat(0, "compile", 0)) == 61


def test_a_busy_pause_may_last_as_long_as_the_training_before_it() -> None:
    silence, worker = Silence(Limits()), Process(1.0)
    for step in range(100):
        silence.heard(worker, beat(60.0 * step, step=step), beat(60.0 * (step + 1), step=step + 1))
    assert silence.limit("step") == DEFAULT_S["step"]
    assert hung_at(silence, worker, beat(6000, step=100)) == 6000 + 1
    # The control: after a short training the limit is that of a worker that computes.
    short = Silence(Limits())
    short.heard(worker, beat(0, step=1), beat(60, step=2))
    assert hung_at(short, worker, beat(60, step=2)) == BUSY * DEFAULT_S["step"] + 1


def test_a_later_run_of_the_program_knows_its_silences() -> None:
    first, second = Silence(Limits()), Silence(Limits())
    first.heard(Process(0.0), beat(0, step=1), beat(5000, step=2))
    second.learn(first.longest)
    assert second.limit("step") == first.limit("step") == 10000


def test_after_a_kill_the_same_place_gets_more_time() -> None:
    silence = Silence(Limits())
    first = hung_at(silence, Process(0), beat(0, "compile", 0))
    second = hung_at(silence, Process(0), beat(0, "compile", 0))
    assert second >= 2 * first


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_worker_that_stops_computing_is_found(share: float) -> None:
    silence, worker = Silence(Limits()), Process(share)
    last = beat(0, step=3)
    worker.now = 700.0
    assert silence.exceeded_limit(worker, last, 700.0) is None  # the first sample
    worker.now = 711.0
    assert silence.exceeded_limit(worker, last, 711.0) == (None if share else DEFAULT_S["step"])
    if share:
        worker.share = worker.cpu_seconds() / 722.0  # no more from here on
        worker.now = 722.0
        assert silence.exceeded_limit(worker, last, 722.0) == DEFAULT_S["step"]


def test_the_limit_that_was_applied_is_returned() -> None:
    measured = beat(0, step=1), beat(1, step=2)
    for share, applied in ((0.0, DEFAULT_S["step"]), (1.0, BUSY * DEFAULT_S["step"])):
        silence, worker = Silence(Limits()), Process(share)
        silence.heard(worker, *measured)
        found = None
        while found is None:
            worker.now += 1.0
            found = silence.exceeded_limit(worker, measured[1], worker.now)
        assert found == applied
    # Nothing is known of a worker that is looked at only once, so late that no limit would allow it.
    silence, worker = Silence(Limits()), Process(1.0)
    silence.heard(worker, *measured)
    assert silence.exceeded_limit(worker, measured[1], 1e6) == DEFAULT_S["step"]
