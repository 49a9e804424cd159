"""A model of a training run of many workers: what failures and saves cost, and what saturates first.

`simulate` goes through one run from event to event: saves, commits, failures, restarts. `save_parts`
and `restore_parts` compute its times from measured constants and from what is assumed of a cluster.
Times are in seconds, sizes in bytes. Random numbers come from the caller's generator only.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

# (time of the last failure, time at which the workers train again) -> time of the next failure
Failures = Callable[[float, float], float]


# ---------------------------------------------------------------- one run


@dataclass(frozen=True)
class Plan:
    """One run, as the simulation needs it.

    Attributes:
        steps: How many steps the run has.
        step_s: Duration of a step.
        save_every: A step whose number is a multiple of this is saved, and the last one.
        stall_s: What the loop loses by each save, also by steps that are slower meanwhile.
        durable_s: From the end of the snapshot to the commit. A save that is due earlier waits.
        start_s: From the start of the run to its first step.
        recover_s: From a failure to the first step after it.
        end_s: From the last step to the end of the run.
        longest_wait_s: Attempts without progress wait 1, 2, 4, ... seconds before a restart, at most
            this long; 0 for no wait.
    """

    steps: int
    step_s: float
    save_every: int
    stall_s: float = 0.0
    durable_s: float = 0.0
    start_s: float = 0.0
    recover_s: float = 0.0
    end_s: float = 0.0
    longest_wait_s: float = 30.0


class Outcome(NamedTuple):
    """What became of a run. The four kinds of seconds add up to `seconds`."""

    seconds: float
    useful_s: float
    stalled_s: float
    repeated_s: float
    down_s: float
    repeated_steps: int
    failures: int

    @property
    def goodput(self) -> float:
        """Useful share of the whole time: each step once."""
        return self.useful_s / self.seconds


class _Attempt(NamedTuple):
    """`kept` is the newest durable step; `useful_s` and `stalled_s` include what is repeated later."""

    reached: int
    kept: int
    seconds: float
    stalled_s: float
    is_done: bool


def simulate(plan: Plan, failures: Failures) -> Outcome:
    """The run of `plan` under `failures`."""
    clock = plan.start_s
    step = best = fruitless = count = repeated = 0
    stalled = trained = 0.0
    failure = failures(0.0, clock)
    while True:
        if failure >= clock:
            attempt = _train(plan, step, failure - clock)
            stalled += attempt.stalled_s
            trained += attempt.seconds
            if attempt.is_done:
                break
            fruitless = 0 if attempt.reached > best else fruitless + 1
            best = max(best, attempt.reached)
            repeated += attempt.reached - attempt.kept
            step = attempt.kept
        else:  # while the workers started
            fruitless += 1
        count += 1
        clock = failure + plan.recover_s + _wait(plan, fruitless)
        failure = failures(failure, clock)
    seconds = clock + attempt.seconds + plan.end_s
    useful = plan.steps * plan.step_s
    return Outcome(
        seconds=seconds,
        useful_s=useful,
        stalled_s=stalled,
        repeated_s=trained - useful - stalled,
        down_s=seconds - trained,
        repeated_steps=repeated,
        failures=count,
    )


def _train(plan: Plan, first: int, limit: float) -> _Attempt:
    """Train from step `first` for at most `limit` seconds."""
    time = stalled = 0.0
    step = kept = first
    under_way: tuple[int, float] | None = None  # the step that is saved, and when it is durable
    while True:
        due = min(plan.steps, (step // plan.save_every + 1) * plan.save_every)
        if time + (due - step) * plan.step_s > limit:
            break
        time += (due - step) * plan.step_s
        step = due
        if step == plan.steps:
            return _Attempt(step, step, time, stalled, True)
        wait = max(0.0, under_way[1] - time) if under_way else 0.0
        if time + wait + plan.stall_s > limit:
            stalled += limit - time
            time = limit
            break
        kept = under_way[0] if under_way else kept
        time += wait + plan.stall_s
        stalled += wait + plan.stall_s
        # All but the last of the next saves find the same: they are taken in one leap.
        training = plan.save_every * plan.step_s
        cycle = max(training, plan.durable_s) + plan.stall_s
        leap = int(min((limit - time) / cycle, (plan.steps - step) // plan.save_every)) - 1
        if leap > 0:
            step += leap * plan.save_every
            time += leap * cycle
            stalled += leap * (cycle - training)
            kept = step - plan.save_every
        under_way = (step, time + plan.durable_s)
    if under_way and under_way[1] <= limit:
        kept = under_way[0]
    return _Attempt(step + int((limit - time) / plan.step_s), kept, limit, stalled, False)


def _wait(plan: Plan, fruitless: int) -> float:
    """As `perdure run` waits (docs/RUN.md): not after one attempt without progress, then longer."""
    return 0.0 if fruitless < 2 else min(plan.longest_wait_s, 2.0 ** min(fruitless - 2, 30))


# ---------------------------------------------------------------- failures


def never(last: float, ready: float) -> float:
    """No failure at all."""
    return math.inf


def lives(seconds: Iterable[float]) -> Failures:
    """Failures after given times of training; none when they are used up."""
    left = iter(seconds)
    return lambda last, ready: ready + next(left, math.inf)


def renewals(workers: int, mean_s: float, shape: float, chance: random.Random) -> Failures:
    """Each worker fails by itself, with Weibull times of `shape` and mean `mean_s` between failures.

    Shape 1 is the exponential law. A worker that failed is replaced by a new one; the others grow
    older. At the beginning the workers are in the middle of their lives, so that the number of failures
    a day is the same from the first day on.
    """
    if shape == 1:  # all together have the same law, with a shorter mean
        return lambda last, ready: last + chance.expovariate(workers / mean_s)
    scale = mean_s / math.gamma(1 + 1 / shape)

    def rest() -> float:
        # What is left of a life at a random moment: a uniform part of a life drawn by its length.
        return chance.random() * scale * chance.gammavariate(1 + 1 / shape, 1) ** (1 / shape)

    ends = [rest() for _ in range(workers)]
    heapq.heapify(ends)

    def next_failure(last: float, ready: float) -> float:
        return heapq.heapreplace(ends, ends[0] + chance.weibullvariate(scale, shape))

    return next_failure


# ---------------------------------------------------------------- costs


@dataclass(frozen=True)
class Constants:
    """What was measured of perdure; proofs/SCALE.md has the value and the source of each."""

    stall_s: float
    write_bps: float
    read_bps: float
    commit_s: float
    message_s: float
    messages: Sequence[float]  # of a save with W workers: [0] + [1] W
    restart_s: float


@dataclass(frozen=True)
class Cluster:
    """What is assumed of a cluster and of a job on it.

    Attributes:
        workers: Processes, one for each device.
        state: Bytes of the sharded state, divided equally between the workers.
        storage_write_bps: Bandwidth of the storage as a whole.
        storage_read_bps: The same for reading.
        failures_s: Mean time between failures of one worker.
        outside_s: What a failure costs outside of perdure: to notice it, to find another machine, to
            start the containers, the collectives and the compiler.
        slowed: By which share steps are slower while a save is written.
        shape: Of the Weibull law of the times between failures; 1 is the exponential law.
    """

    workers: int
    state: float
    storage_write_bps: float
    storage_read_bps: float
    failures_s: float
    outside_s: float
    slowed: float = 0.02
    shape: float = 1.0

    @property
    def between_failures_s(self) -> float:
        """Mean time between two failures of any worker."""
        return self.failures_s / self.workers


def save_parts(constants: Constants, cluster: Cluster) -> dict[str, float]:
    """How long each part takes to make one checkpoint durable."""
    return {
        "processes": cluster.state / cluster.workers / constants.write_bps,
        "storage": cluster.state / cluster.storage_write_bps,
        "chief": constants.commit_s + constants.message_s * messages(constants, cluster.workers),
    }


def messages(constants: Constants, workers: int) -> float:
    """How many messages the chief's store answers in one save."""
    none, each = constants.messages
    return none + each * workers


def durable_s(parts: dict[str, float]) -> float:
    """Processes and storage work at the same time; the commit follows."""
    return max(parts["processes"], parts["storage"]) + parts["chief"]


def restore_s(constants: Constants, cluster: Cluster) -> float:
    """Every process reads its part of the state, all at the same time."""
    return max(
        cluster.state / cluster.workers / constants.read_bps,
        cluster.state / cluster.storage_read_bps,
    )


def plan(
    constants: Constants, cluster: Cluster, steps: int, step_s: float, save_every: int
) -> Plan:
    """The run of a job on `cluster`."""
    durable = durable_s(save_parts(constants, cluster))
    recover = constants.restart_s + restore_s(constants, cluster) + cluster.outside_s
    return Plan(
        steps=steps,
        step_s=step_s,
        save_every=save_every,
        stall_s=constants.stall_s + cluster.slowed * durable,
        durable_s=durable,
        start_s=recover,
        recover_s=recover,
        end_s=durable,
    )


# ---------------------------------------------------------------- answers


def young_s(cost: float, between_failures_s: float) -> float:
    """Young's interval: seconds of training between two saves that cost `cost` each."""
    return math.sqrt(2 * cost * between_failures_s)


def daly_seconds(plan: Plan, between_failures_s: float) -> float:
    """Daly's expected duration of a run whose saves stop the loop and fail exponentially.

    Daly (2006), equation 13, for saves that are durable at once (`durable_s` of 0).
    """
    mean = between_failures_s
    interval = plan.save_every * plan.step_s + plan.stall_s
    segments = plan.steps / plan.save_every
    return mean * math.exp(plan.recover_s / mean) * math.expm1(interval / mean) * segments


def goodput(
    constants: Constants,
    cluster: Cluster,
    save_every: int,
    step_s: float,
    seeds: Iterable[int] = range(3),
    failures: float = 100.0,
) -> float:
    """Mean goodput of runs long enough for about `failures` failures each."""
    steps = max(10 * save_every, math.ceil(failures * cluster.between_failures_s / step_s))
    job = plan(constants, cluster, steps, step_s, save_every)
    return fmean(simulate(job, renewals_of(cluster, seed)).goodput for seed in seeds)


def renewals_of(cluster: Cluster, seed: int) -> Failures:
    """The failures of the workers of `cluster`."""
    return renewals(cluster.workers, cluster.failures_s, cluster.shape, random.Random(seed))


def intervals(most: int, ratio: float = 1.3) -> Iterator[int]:
    """Numbers of steps to try, each `ratio` times the one before."""
    steps, exact = 0, 1.0
    while exact <= most:
        if round(exact) > steps:
            steps = round(exact)
            yield steps
        exact *= ratio


def best_interval(
    constants: Constants, cluster: Cluster, step_s: float, most: int
) -> tuple[int, float]:
    """The number of steps between two saves with the highest goodput, and that goodput."""
    tried = {
        save_every: goodput(constants, cluster, save_every, step_s)
        for save_every in intervals(most)
    }
    best = max(tried, key=lambda save_every: tried[save_every])
    return best, tried[best]


def solve(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a falling `function` has the value `wanted`, between two positive numbers."""
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) > wanted else (low, middle)
    return math.sqrt(low * high)
