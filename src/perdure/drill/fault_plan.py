"""Plans the faults: a function of the seed and of what an undisturbed run has shown.

Every kind of fault draws its own places. A kind that cannot happen to the program gives the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from perdure.drill.probes import PLANTS
from perdure.drill.scenario import Fault, Launch, Observed, Scenario
from perdure.errors import LaunchError

AFTER_COMMIT = "kill-after-commit"
LAST = "the last checkpoint of a run directory"
"""The place of a restore after which nothing is left to do in that directory."""
MOST_LAST = 8
MOST_PHASES = 8
FAR_JUMP_S = 40 * 86400.0
_RESTART_S = 0.2  # from the end of an attempt to the start of the next one


class Impossible(Exception):
    """A kind of fault cannot happen to this program; the message is the reason."""


def plan(
    observed: Observed,
    kinds: Sequence[str],
    runs: int,
    seed: int,
    impossible: Mapping[str, str] | None = None,
) -> list[Scenario]:
    """The restores that every drill tries, then `runs` scenarios that take the `kinds` in turn.

    In its first turn a kind hits after the first commit, so that a restore follows it; in its second
    anywhere, and so on.

    Args:
        observed: What an undisturbed run showed.
        kinds: Names of `KINDS` that can happen to the program.
        runs: How many scenarios to draw.
        seed: Decides the places and times of all faults.
        impossible: The reason for each kind that is left out, for the error message.

    Raises:
        LaunchError: If `kinds` is empty.
    """
    if not kinds:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in (impossible or {}).items())
        raise LaunchError(f"no kind of fault can happen to this program: {reasons}.")
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

    The program is killed right after a commit, which is counted and not timed: after the first one, one
    in the middle, the last one before the program ends; one of each other phase (of up to
    `MOST_PHASES`, those with the fewest checkpoints first); and the last one of each run directory (of
    up to `MOST_LAST`), after which the program has to end as it did.
    """
    usable = observed.restorable
    places: dict[str, int] = {}
    if usable:
        places = {"the first checkpoint": usable[0], "one in the middle": usable[len(usable) // 2]}
        places["the last one before the end"] = usable[-1]
    chosen: dict[int, str] = {}
    for place, nth in places.items():
        chosen.setdefault(nth, place)
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
    """One faulted run. A larger `retry` draws earlier places, after a fault that did not fire.

    Without `anywhere`, the fault hits after the first commit if the kind can.
    """
    rng = random.Random(f"{seed}/{number}/{retry}")
    places = _Places(observed, rng, 0.5**retry, after_commit=not anywhere and retry == 0)
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


class _Places:
    """Draws places for faults from the first `share` of what was observed of a program."""

    def __init__(
        self, observed: Observed, rng: random.Random, share: float, *, after_commit: bool = False
    ) -> None:
        self.observed = observed
        self.rng = rng
        self._share = share
        self._after_commit = after_commit

    def nth(self, *points: str, first: int = 1, late: bool = False) -> tuple[str, int]:
        """One of the `points`, and which occurrence of it: 1 for the first.

        `late` leaves out everything before the first step, because a program that fails before its
        first step is not started again.
        """
        if late:
            first += max((self.observed.early.get(point, 0) for point in points), default=0)
        reached = [point for point in points if self.observed.points.get(point, 0) >= first]
        if not reached:
            when = " after its first step" if late else ""
            raise Impossible(f"the undisturbed run never reaches {' or '.join(points)}{when}")
        if self._after_commit:
            later = {point: self.observed.before_commit.get(point, 0) + 1 for point in reached}
            usable = [point for point in reached if later[point] <= self.observed.points[point]]
            if usable:
                point = self.rng.choice(usable)
                return point, self.rng.randint(
                    max(first, later[point]), self.observed.points[point]
                )
        point = self.rng.choice(reached)
        most = self.observed.points[point]
        return point, self.rng.randint(first, max(first, int(most * self._share)))

    def step(self) -> int:
        """A step that the program reports, but not the last one."""
        if not self.observed.steps:
            raise Impossible(
                "the program reports no steps; perdure.heartbeat(step) in its loop does, and so does a "
                "CheckpointManager"
            )
        steps = self.observed.steps[:-1] or self.observed.steps
        if self._after_commit and self.observed.sequence:
            # The second save waits for the first, which is committed once the step after is reported.
            for saved in (*self.observed.sequence[1:2], self.observed.sequence[0] + 1):
                if later := [step for step in steps if step > saved]:
                    return self.rng.choice(later)
        return self.rng.choice(steps[: max(1, int(len(steps) * self._share))])

    def moment(self, low: float, high: float) -> float:
        """Seconds after the start."""
        if self._after_commit and low < self.observed.first_commit_s < high:
            low = self.observed.first_commit_s
        return self._share * (low + (high - low) * self.rng.random())

    def after_a_commit(self) -> list[Launch]:
        """A kill after a drawn commit; empty if the kind may hit anywhere, or there is no commit."""
        usable = self.observed.restorable
        if not self._after_commit or not usable:
            return []
        return [kill_after_commit(self.rng.choice(usable))]

    def restorable(self) -> list[int]:
        """The commits, counted from 1, after which something is left to do."""
        if not self.observed.restorable:
            raise Impossible("no checkpoint is committed before the last step")
        return self.observed.restorable

    def victim(self) -> int:
        """A worker."""
        return self.rng.randrange(self.observed.workers)

    def kill(self) -> Launch:
        """SIGKILL at a step, to one worker."""
        return Launch((Fault("step", "kill", step=self.step(), worker=self.victim()),))

    def kill_with_two(self) -> Launch:
        """SIGKILL of the chief once at least two checkpoints exist."""
        if len(self.observed.commits) < 2:
            raise Impossible("there is never a second checkpoint to fall back to")
        point, nth = self.nth("manifest.sync", first=2)
        return Launch((Fault(point, "kill", nth=nth),))


Kind = Callable[["_Places"], list[Launch]]
"""Draws the attempts of a faulted run."""


def _at(act: str, *points: str, late: bool = False) -> Kind:
    """A fault inside of the program, at one of the points."""

    def draw(places: _Places) -> list[Launch]:
        point, nth = places.nth(*points, late=late)
        return [Launch((Fault(point, act, nth=nth),))]

    return draw


def _signal(name: str, *, to_one: bool) -> Kind:
    """A signal at a moment, to one worker or to all."""

    def draw(places: _Places) -> list[Launch]:
        seen = places.observed
        moment = places.moment(0.6 * seen.first_step_s, seen.seconds)
        victim = places.victim() if to_one else None
        return [Launch(signal=name, after_s=moment, victim=victim)]

    return draw


def _at_step(act: str) -> Kind:
    return lambda places: [
        Launch((Fault("step", act, step=places.step(), worker=places.victim()),))
    ]


def _kill_after_commit(places: _Places) -> list[Launch]:
    return [kill_after_commit(places.rng.choice(places.restorable()))]


def _other_machine(places: _Places) -> list[Launch]:
    # The first, so that the other machine does as many steps as possible.
    return [kill_after_commit(places.restorable()[0]), Launch(plants=PLANTS)]


def _kill_in_startup(places: _Places) -> list[Launch]:
    # One half during imports and compilation, the other when the run directory is opened; of a start
    # with a checkpoint if there can be one.
    begin = places.after_a_commit()
    if places.rng.random() < 0.5:
        return [*begin, Launch((Fault("open", "kill"),))]
    return [
        *begin,
        Launch(signal="SIGKILL", after_s=places.moment(0.0, places.observed.first_step_s)),
    ]


def _torn_write(places: _Places) -> list[Launch]:
    # After the link, a committed checkpoint is torn, so there has to be an older one.
    targets = [("pack.fsync", "", 1), ("manifest.fsync", "", 1)]
    if len(places.observed.commits) > 1:
        targets += [("manifest.sync", "pack.link", 2), ("manifest.sync", "manifest.link", 2)]
    # A state of scalars has no pack; whether the fault is possible must not depend on the draw.
    reached = [
        target for target in targets if places.observed.points.get(target[0], 0) >= target[2]
    ]
    point, of, first = places.rng.choice(reached or targets)
    point, nth = places.nth(point, first=first)
    return [Launch((Fault(point, "torn", nth=nth, of=of, value=places.rng.random()),))]


def _bit_flip(places: _Places) -> list[Launch]:
    return [places.kill_with_two(), Launch(damage="flip", place=places.rng.random())]


def _lost_pack(places: _Places) -> list[Launch]:
    places.nth("pack.link", first=2)
    return [places.kill_with_two(), Launch(damage="delete")]


def _worker_lost(places: _Places) -> list[Launch]:
    if places.observed.workers < 2:
        raise Impossible("there is one worker; give --workers")
    worker = places.rng.randrange(1, places.observed.workers)
    return [Launch((Fault("step", "kill", step=places.step(), worker=worker),))]


def _other_devices(places: _Places) -> list[Launch]:
    if not (others := places.observed.may_devices):
        raise Impossible("only JAX on CPU devices can run on another number of devices")
    return [places.kill(), Launch(devices=places.rng.choice(others))]


def _other_workers(places: _Places) -> list[Launch]:
    if not (others := places.observed.may_workers):
        raise Impossible(
            "a run of one worker cannot change their number; give --workers, and replicas for more"
        )
    return [places.kill(), Launch(workers=places.rng.choice(others))]


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
    return [places.kill(), Launch((Fault(point, "kill", worker=places.victim()),))]


KINDS: Mapping[str, Kind] = {
    AFTER_COMMIT: _kill_after_commit,
    "sigkill": _signal("SIGKILL", to_one=True),
    "sigterm": _signal("SIGTERM", to_one=False),
    "sigkill-at-step": lambda places: [places.kill()],
    "sigterm-at-step": _at_step("term"),
    "kill-in-startup": _kill_in_startup,
    "kill-in-save": _at("kill", "pack.open", "pack.write", "pack.fsync", "pack.link"),
    "kill-before-manifest": _at("kill", "manifest.open", "manifest.link"),
    "kill-in-prune": _at("kill", "manifest.delete", "pack.delete"),
    "torn-write": _torn_write,
    "bit-flip": _bit_flip,
    "lost-pack": _lost_pack,
    "disk-full": _at(
        "full", "pack.open", "pack.write", "manifest.open", "manifest.write", late=True
    ),
    "fsync-fails": _at(
        "io", "pack.fsync", "pack.sync", "manifest.fsync", "manifest.sync", late=True
    ),
    "worker-lost": _worker_lost,
    "stopped": _at_step("stop"),
    "other-devices": _other_devices,
    "other-workers": _other_workers,
    "other-machine": _other_machine,
    "clock-jump": _clock_jump,
    "double-kill": _double_kill,
}
"""Every kind of fault, by the name that `--faults` takes."""


def other_devices(observed: Observed) -> list[int]:
    """Other numbers of devices to try the program on."""
    if "jax" not in observed.modules:
        return []
    most = min(4, (observed.replicas or 4) // observed.workers)
    return [count for count in range(1, most + 1) if count != observed.devices]


def other_workers(observed: Observed) -> list[int]:
    """Other numbers of workers to try the program on."""
    if observed.workers < 2:
        return []
    most = min(observed.workers + 1, observed.replicas or observed.workers)
    return [count for count in range(1, most + 1) if count != observed.workers]
