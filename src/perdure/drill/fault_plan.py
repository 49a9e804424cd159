"""Plans the faults: a function of the seed and of what an undisturbed run has shown.

Every kind of fault draws its own points. A kind that cannot happen to the program gives the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perdure.drill.observed import Observed
from perdure.drill.probes import PLANTS
from perdure.drill.scenario import Fault, Launch, Scenario

AFTER_COMMIT = "kill-after-commit"
LAST = "the last checkpoint of a run directory"
"""The place of a restore after which nothing is left to do in that directory."""
MOST_LAST = 8
MOST_PHASES = 8
FAR_JUMP_S = 40 * 86400.0
_RESTART_S = 0.2  # from the end of an attempt to the start of the next one


class Impossible(Exception):
    """A kind of fault cannot happen to this program; the message is the reason."""


def plan(observed: Observed, kinds: Sequence[str], runs: int, seed: int) -> list[Scenario]:
    """The restores that every drill tries, then `runs` scenarios that take the `kinds` in turn.

    In its first turn a kind hits after the first commit, so that a restore follows; then anywhere.
    """
    required = required_restores(observed)
    drawn = [
        draw_scenario(
            observed,
            kinds[number % len(kinds)],
            len(required) + number + 1,
            seed,
            anywhere=number // len(kinds) % 2 == 1,
        )
        for number in range(runs)
    ]
    return [*required, *drawn]


def required_restores(observed: Observed) -> list[Scenario]:
    """One restore from each kind of place, whatever the options say.

    The program is killed right after a commit, which is counted and not timed: the first one, one
    in the middle, the last one before the end; one of each other phase (up to `MOST_PHASES`, those
    with the fewest checkpoints first); and the last one of each run directory (up to `MOST_LAST`).
    """
    usable = observed.restorable
    chosen: dict[int, str] = {}
    if usable:
        chosen[usable[0]] = "the first checkpoint"
        chosen.setdefault(usable[len(usable) // 2], "one in the middle")
        chosen.setdefault(usable[-1], "the last one before the end")
    phases: dict[object, list[int]] = {}
    for number in usable:
        phases.setdefault(observed.phase(number), []).append(number)
    for nth in chosen:
        phases.pop(observed.phase(nth), None)
    for numbers in sorted(phases.values(), key=len)[:MOST_PHASES]:
        chosen[numbers[len(numbers) // 2]] = "another phase of the program"
    last = [number for number in observed.last_commits if number not in usable]
    for index in range(min(MOST_LAST, len(last))):
        chosen[last[(index + 1) * len(last) // min(MOST_LAST, len(last)) - 1]] = LAST
    return [
        Scenario(number, AFTER_COMMIT, (kill_after_commit(nth),), place)
        for number, (nth, place) in enumerate(chosen.items(), 1)
    ]


def estimated_seconds(scenarios: Sequence[Scenario], observed: Observed) -> float:
    """How long faulted runs take: each is as long as an undisturbed one, and starts again."""
    starts = sum(len(scenario.attempts) for scenario in scenarios)
    return len(scenarios) * observed.seconds + starts * (observed.first_step_s + _RESTART_S)


def kill_after_commit(nth: int) -> Launch:
    """SIGKILL once the `nth` checkpoint has its name, before anything else happens to it."""
    return Launch((Fault("manifest.sync", "kill", nth=nth),))


def draw_scenario(
    observed: Observed,
    kind: str,
    number: int,
    seed: int,
    retry: int = 0,
    *,
    anywhere: bool = True,
) -> Scenario:
    """One faulted run; a larger `retry` draws earlier places, after a fault that did not fire.

    Without `anywhere`, the fault hits after the first commit if the kind can.
    """
    rng = random.Random(f"{seed}/{number}/{retry}")
    places = _Places(observed, rng, 0.5**retry, not anywhere and retry == 0)
    return Scenario(number, kind, tuple(KINDS[kind](places)))


def possible_kinds(observed: Observed, wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The kinds that can happen to this program, and why the others cannot."""
    can, cannot = [], {}
    for kind in wanted:
        try:
            draw_scenario(observed, kind, 1, 0)
            can.append(kind)
        except Impossible as error:
            cannot[kind] = str(error)
    return can, cannot


@dataclass(frozen=True)
class _Places:
    """Draws points for faults from the first `share` of an observed run."""

    observed: Observed
    rng: random.Random
    share: float
    after_commit: bool

    def nth(self, *points: str, first: int = 1, late: bool = False) -> tuple[str, int]:
        """One of the `points`, and which occurrence; `late` leaves out those before step 1."""
        seen = self.observed
        if late:
            first += max((seen.early.get(point, 0) for point in points), default=0)
        reached = [point for point in points if seen.points.get(point, 0) >= first]
        if not reached:
            when = " after its first step" if late else ""
            raise Impossible(f"the undisturbed run never reaches {' or '.join(points)}{when}")
        later = {point: max(first, seen.before_commit.get(point, 0) + 1) for point in reached}
        usable = [point for point in reached if later[point] <= seen.points[point]]
        if self.after_commit and usable:
            point = self.rng.choice(usable)
            return point, self.rng.randint(later[point], seen.points[point])
        point = self.rng.choice(reached)
        most = int(seen.points[point] * self.share)
        return point, self.rng.randint(first, max(first, most))

    def step(self) -> int:
        """A step that the program reports, but not the last one."""
        if not self.observed.steps:
            raise Impossible(
                "the program reports no steps; perdure.heartbeat(step) in its loop does, and so does a "
                "CheckpointManager"
            )
        steps, saves = self.observed.steps[:-1] or self.observed.steps, self.observed.sequence
        # The second save waits for the first, which is committed once the step after is reported.
        for saved in (*saves[1:2], saves[0] + 1) if self.after_commit and saves else ():
            if later := [step for step in steps if step > saved]:
                return self.rng.choice(later)
        return self.rng.choice(steps[: max(1, int(len(steps) * self.share))])

    def moment(self, low: float, high: float) -> float:
        """Seconds after the start."""
        if self.after_commit and low < self.observed.first_commit_s < high:
            low = self.observed.first_commit_s
        return self.share * (low + (high - low) * self.rng.random())

    def restorable(self) -> list[int]:
        """The commits, counted from 1, after which something is left to do."""
        if not self.observed.restorable:
            raise Impossible("no checkpoint is committed before the last step")
        return self.observed.restorable

    def victim(self) -> int:
        """A worker."""
        return self.rng.randrange(self.observed.workers)

    def at(self, act: str, *points: str, late: bool = False) -> Launch:
        """A fault inside of the program, at one of the points."""
        point, nth = self.nth(*points, late=late)
        return Launch((Fault(point, act, nth=nth),))

    def at_step(self, act: str, worker: int | None = None) -> Launch:
        """A fault of one worker at a step."""
        worker = self.victim() if worker is None else worker
        return Launch((Fault("step", act, step=self.step(), worker=worker),))

    def signal(self, name: str, victim: int | None) -> Launch:
        """A signal at a moment, to one worker or to all."""
        seen = self.observed
        moment = self.moment(0.6 * seen.first_step_s, seen.seconds)
        return Launch(signal=name, after_s=moment, victim=victim)

    def kill_with_two(self) -> Launch:
        """SIGKILL of the chief once at least two checkpoints exist."""
        if len(self.observed.commits) < 2:
            raise Impossible("there is never a second checkpoint to fall back to")
        point, nth = self.nth("manifest.sync", first=2)
        return Launch((Fault(point, "kill", nth=nth),))


Kind = Callable[[_Places], list[Launch]]
"""Draws the attempts of a faulted run."""


def _kill_in_startup(places: _Places) -> list[Launch]:
    # One half during imports and compilation, the other when the run directory is opened; of a start
    # with a checkpoint if there can be one.
    usable = places.observed.restorable if places.after_commit else []
    begin = [kill_after_commit(places.rng.choice(usable))] if usable else []
    if places.rng.random() < 0.5:
        return [*begin, Launch((Fault("open", "kill"),))]
    moment = places.moment(0.0, places.observed.first_step_s)
    return [*begin, Launch(signal="SIGKILL", after_s=moment)]


def _torn_write(places: _Places) -> list[Launch]:
    # After the link, a committed checkpoint is torn, so there has to be an older one.
    targets = [("pack.fsync", "", 1), ("manifest.fsync", "", 1)]
    if len(places.observed.commits) > 1:
        targets += [("manifest.sync", "pack.link", 2), ("manifest.sync", "manifest.link", 2)]
    # A state of scalars has no pack; whether the fault is possible must not depend on the draw.
    points = places.observed.points
    reached = [target for target in targets if points.get(target[0], 0) >= target[2]]
    point, of, first = places.rng.choice(reached or targets)
    point, nth = places.nth(point, first=first)
    return [Launch((Fault(point, "torn", nth=nth, of=of, value=places.rng.random()),))]


def _lost_pack(places: _Places) -> list[Launch]:
    places.nth("pack.link", first=2)
    return [places.kill_with_two(), Launch(damage="delete")]


def _worker_lost(places: _Places) -> list[Launch]:
    if places.observed.workers < 2:
        raise Impossible("there is one worker; give --workers")
    return [places.at_step("kill", places.rng.randrange(1, places.observed.workers))]


def _other_devices(places: _Places) -> list[Launch]:
    if not (others := places.observed.may_devices):
        raise Impossible("only JAX on CPU devices can run on another number of devices")
    return [places.at_step("kill"), Launch(devices=places.rng.choice(others))]


def _other_workers(places: _Places) -> list[Launch]:
    if not (others := places.observed.may_workers):
        raise Impossible(
            "a run of one worker cannot change their number; give --workers, and replicas for more"
        )
    return [places.at_step("kill"), Launch(workers=places.rng.choice(others))]


def _clock_jump(places: _Places) -> list[Launch]:
    near, far = places.rng.choice((90.0, 3700.0)), FAR_JUMP_S
    jump, other = (places.rng.choice((-1, 1)) * seconds for seconds in (near, far))
    first, second = sorted((places.step(), places.step()))
    ahead = Fault("step", "clock", step=first, worker=0, value=jump)
    # What follows the first jump may be lost with the kill. The far one is before all that is repeated,
    # and before the script can read a date once and for all.
    return [
        Launch((ahead, Fault("step", "kill", step=second))),
        Launch((Fault("open", "clock", worker=0, value=other),)),
    ]


def _double_kill(places: _Places) -> list[Launch]:
    # At the latest before the second attempt has finished its first new step.
    point = places.rng.choice(("open", "restoring", "restored", "step"))
    return [places.at_step("kill"), Launch((Fault(point, "kill", worker=places.victim()),))]


_SAVING = ("pack.open", "pack.write", "pack.fsync", "pack.link")
_WRITING = ("pack.open", "pack.write", "manifest.open", "manifest.write")
_SYNCING = ("pack.fsync", "pack.sync", "manifest.fsync", "manifest.sync")

KINDS: Mapping[str, Kind] = {
    AFTER_COMMIT: lambda places: [kill_after_commit(places.rng.choice(places.restorable()))],
    "sigkill": lambda places: [places.signal("SIGKILL", places.victim())],
    "sigterm": lambda places: [places.signal("SIGTERM", None)],
    "sigkill-at-step": lambda places: [places.at_step("kill")],
    "sigterm-at-step": lambda places: [places.at_step("term")],
    "kill-in-startup": _kill_in_startup,
    "kill-in-save": lambda places: [places.at("kill", *_SAVING)],
    "kill-before-manifest": lambda places: [places.at("kill", "manifest.open", "manifest.link")],
    "kill-in-prune": lambda places: [places.at("kill", "manifest.delete", "pack.delete")],
    "torn-write": _torn_write,
    "bit-flip": lambda places: [
        places.kill_with_two(),
        Launch(damage="flip", place=places.rng.random()),
    ],
    "lost-pack": _lost_pack,
    "disk-full": lambda places: [places.at("full", *_WRITING, late=True)],
    "fsync-fails": lambda places: [places.at("io", *_SYNCING, late=True)],
    "worker-lost": _worker_lost,
    "stopped": lambda places: [places.at_step("stop")],
    "other-devices": _other_devices,
    "other-workers": _other_workers,
    # After the first commit, so that the other machine does as many steps as possible.
    "other-machine": lambda places: [
        kill_after_commit(places.restorable()[0]),
        Launch(plants=PLANTS),
    ],
    "clock-jump": _clock_jump,
    "double-kill": _double_kill,
}
"""Every kind of fault, by the name that `--faults` takes."""
