"""Which faults hit where: a function of the seed and of what an undisturbed run has shown.

Every kind draws its own places. One that cannot happen to this program says why, and is not drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from perdure.drill.scenario import Fault, Launch, Observed, Scenario
from perdure.errors import LaunchError


class Impossible(Exception):
    """A kind of fault cannot happen to this program; the text says why."""


def plan(
    observed: Observed,
    kinds: Sequence[str],
    runs: int,
    seed: int,
    impossible: Mapping[str, str] | None = None,
) -> list[Scenario]:
    """`runs` scenarios that go through all `kinds` in turns, each in an order of its own.

    `impossible` has the kinds that are left out, and why; all of it is said where no kind is left.
    """
    if not kinds:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in (impossible or {}).items())
        raise LaunchError(f"no kind of fault can happen to this program: {reasons}.")
    return [
        scenario(observed, kinds[number % len(kinds)], number + 1, seed) for number in range(runs)
    ]


def scenario(observed: Observed, kind: str, number: int, seed: int, again: int = 0) -> Scenario:
    """One faulted run. `again` draws other, earlier places for one whose fault did not fire."""
    chance = random.Random(f"{seed}/{number}/{again}")
    return Scenario(number, kind, tuple(KINDS[kind](_Places(observed, chance, 0.5**again))))


def possible(observed: Observed, wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The kinds that can happen to this program, and why the others cannot."""
    can, cannot = [], {}
    for kind in wanted:
        try:
            scenario(observed, kind, 1, 0)
            can.append(kind)
        except Impossible as error:
            cannot[kind] = str(error)
    return can, cannot


class _Places:
    """Draws places in a program from what was seen of it; `share` of it from the beginning on."""

    def __init__(self, observed: Observed, chance: random.Random, share: float) -> None:
        self.seen = observed
        self.chance = chance
        self._share = share

    def nth(self, *points: str, first: int = 1, late: bool = False) -> tuple[str, int]:
        """One of the `points`, and which time that the program comes there; `late`: behind its first
        step, because a program that fails before it is not started again."""
        if late:
            first += max((self.seen.early.get(point, 0) for point in points), default=0)
        there = [point for point in points if self.seen.points.get(point, 0) >= first]
        if not there:
            when = " behind its first step" if late else ""
            raise Impossible(f"the undisturbed run never comes to {' or '.join(points)}{when}")
        point = self.chance.choice(there)
        most = self.seen.points[point]
        return point, self.chance.randint(first, max(first, int(most * self._share)))

    def step(self) -> int:
        """A step that the program tells, not the last."""
        if not self.seen.steps:
            raise Impossible(
                "the program tells no steps; perdure.heartbeat(step) in its loop does, and so does a "
                "CheckpointManager"
            )
        steps = self.seen.steps[:-1] or self.seen.steps
        return self.chance.choice(steps[: max(1, int(len(steps) * self._share))])

    def moment(self, low: float, high: float) -> float:
        """Seconds behind the start."""
        return self._share * (low + (high - low) * self.chance.random())

    def victim(self) -> int:
        """A worker."""
        return self.chance.randrange(self.seen.workers)

    def kill(self) -> Launch:
        """SIGKILL at a step, to one worker."""
        return Launch((Fault("step", "kill", step=self.step(), worker=self.victim()),))

    def kill_with_two(self) -> Launch:
        """SIGKILL of the chief at a moment when at least two checkpoints are there."""
        if len(self.seen.commits) < 2:
            raise Impossible("there is never a second checkpoint to fall back to")
        point, nth = self.nth("manifest.sync", first=2)
        return Launch((Fault(point, "kill", nth=nth),))


def _sigkill(at: _Places) -> list[Launch]:
    return [
        Launch(
            signal="SIGKILL",
            after_s=at.moment(0.6 * at.seen.first_step_s, at.seen.seconds),
            victim=at.victim(),
        )
    ]


def _sigterm(at: _Places) -> list[Launch]:
    return [
        Launch(signal="SIGTERM", after_s=at.moment(0.6 * at.seen.first_step_s, at.seen.seconds))
    ]


def _sigkill_at_step(at: _Places) -> list[Launch]:
    return [at.kill()]


def _sigterm_at_step(at: _Places) -> list[Launch]:
    return [Launch((Fault("step", "term", step=at.step(), worker=at.victim()),))]


def _startup(at: _Places) -> list[Launch]:
    # Half of them in imports and compilation, half when the run directory is opened.
    if at.chance.random() < 0.5:
        return [Launch((Fault("open", "kill"),))]
    return [Launch(signal="SIGKILL", after_s=at.moment(0.0, at.seen.first_step_s))]


def _in_save(at: _Places) -> list[Launch]:
    point, nth = at.nth("pack.open", "pack.write", "pack.fsync", "pack.link")
    return [Launch((Fault(point, "kill", nth=nth),))]


def _between(at: _Places) -> list[Launch]:
    point, nth = at.nth("manifest.open", "manifest.link")
    return [Launch((Fault(point, "kill", nth=nth),))]


def _in_prune(at: _Places) -> list[Launch]:
    point, nth = at.nth("manifest.delete", "pack.delete")
    return [Launch((Fault(point, "kill", nth=nth),))]


def _torn(at: _Places) -> list[Launch]:
    # Behind the name, a committed checkpoint is torn: there has to be an older one.
    where = [("pack.fsync", "", 1), ("manifest.fsync", "", 1)]
    if len(at.seen.commits) > 1:
        where += [("manifest.sync", "pack.link", 2), ("manifest.sync", "manifest.link", 2)]
    # Without leaves of any size there is no pack; that must not depend on what is drawn.
    there = [each for each in where if at.seen.points.get(each[0], 0) >= each[2]]
    point, of, first = at.chance.choice(there or where)
    point, nth = at.nth(point, first=first)
    return [Launch((Fault(point, "torn", nth=nth, of=of, value=at.chance.random()),))]


def _flip(at: _Places) -> list[Launch]:
    return [at.kill_with_two(), Launch(damage="flip", place=at.chance.random())]


def _lost_pack(at: _Places) -> list[Launch]:
    at.nth("pack.link", first=2)
    return [at.kill_with_two(), Launch(damage="delete")]


def _full(at: _Places) -> list[Launch]:
    point, nth = at.nth("pack.open", "pack.write", "manifest.open", "manifest.write", late=True)
    return [Launch((Fault(point, "full", nth=nth),))]


def _fsync(at: _Places) -> list[Launch]:
    point, nth = at.nth("pack.fsync", "pack.sync", "manifest.fsync", "manifest.sync", late=True)
    return [Launch((Fault(point, "io", nth=nth),))]


def _worker(at: _Places) -> list[Launch]:
    if at.seen.workers < 2:
        raise Impossible("there is one worker; give --workers")
    worker = at.chance.randrange(1, at.seen.workers)
    return [Launch((Fault("step", "kill", step=at.step(), worker=worker),))]


def _stop(at: _Places) -> list[Launch]:
    return [Launch((Fault("step", "stop", step=at.step(), worker=at.victim()),))]


def _devices(at: _Places) -> list[Launch]:
    if not (others := at.seen.may_devices):
        raise Impossible("only JAX on CPU devices gets another number of them")
    return [at.kill(), Launch(devices=at.chance.choice(others))]


def _workers(at: _Places) -> list[Launch]:
    if not (others := at.seen.may_workers):
        raise Impossible("a run of one worker stays one; give --workers, and replicas for more")
    return [at.kill(), Launch(workers=at.chance.choice(others))]


def _clock(at: _Places) -> list[Launch]:
    jump = at.chance.choice((-1, 1)) * at.chance.choice((90.0, 3700.0, 40 * 86400.0))
    first, second = sorted((at.step(), at.step()))
    ahead = Fault("step", "clock", step=first, worker=0, value=jump)
    return [
        Launch((ahead, Fault("step", "kill", step=second))),
        Launch((Fault("restored", "clock", worker=0, value=-jump),)),
    ]


def _double(at: _Places) -> list[Launch]:
    # At the latest before the first new step of the second attempt is over.
    point = at.chance.choice(("open", "restoring", "restored", "step"))
    return [at.kill(), Launch((Fault(point, "kill", worker=at.victim()),))]


KINDS: Mapping[str, Callable[[_Places], list[Launch]]] = {
    "sigkill": _sigkill,
    "sigterm": _sigterm,
    "sigkill-at-step": _sigkill_at_step,
    "sigterm-at-step": _sigterm_at_step,
    "kill-in-startup": _startup,
    "kill-in-save": _in_save,
    "kill-before-manifest": _between,
    "kill-in-prune": _in_prune,
    "torn-write": _torn,
    "bit-flip": _flip,
    "lost-pack": _lost_pack,
    "disk-full": _full,
    "fsync-fails": _fsync,
    "worker-lost": _worker,
    "stopped": _stop,
    "other-devices": _devices,
    "other-workers": _workers,
    "clock-jump": _clock,
    "double-kill": _double,
}
"""Every kind of fault, by the name that `--faults` takes."""


def other_devices(observed: Observed) -> list[int]:
    """Numbers of devices that this program may be moved to."""
    if "jax" not in observed.modules:
        return []
    most = min(4, (observed.replicas or 4) // observed.workers)
    return [count for count in range(1, most + 1) if count != observed.devices]


def other_workers(observed: Observed) -> list[int]:
    """Numbers of workers that this program may be moved to."""
    if observed.workers < 2:
        return []
    most = min(observed.workers + 1, observed.replicas or observed.workers)
    return [count for count in range(1, most + 1) if count != observed.workers]
