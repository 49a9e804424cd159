"""What the demo does, decided before it starts: recipe, phases, and where the faults hit.

Pure: a function of the options and the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

REPLICAS = 8
BATCH = 128
SAVE_EVERY = 5

GUARDS = {
    "position": "the data position is not restored",
    "rng": "random numbers by device instead of by replica",
    "tree": "the framework's all-reduce instead of the fixed tree",
}


@dataclass(frozen=True)
class Phase:
    """One start of the training program. `stop` is the step after which the fault is sent."""

    name: str
    run: str
    devices: int
    processes: int
    fault: str = ""
    stop: int = 0

    @property
    def topology(self) -> str:
        """`2 processes`, `4 devices`."""
        count, what = (
            (self.processes, "process") if self.processes > 1 else (self.devices, "device")
        )
        return f"{count} {what}{'' if count == 1 else 'es' if what == 'process' else 's'}"


def plan(engine: str, total: int, steps_per_epoch: int, seed: int) -> list[Phase]:
    """The phases of a demo of `total` steps: one undisturbed, three with faults between them."""
    chance = random.Random(seed)
    kill = _between_saves(chance, total // 5, total // 2, steps_per_epoch)
    term = _between_saves(
        chance, max(kill + SAVE_EVERY, total // 2), total - SAVE_EVERY, steps_per_epoch
    )
    four = {"devices": 4, "processes": 1} if engine == "jax" else {"devices": 1, "processes": 4}
    return [
        Phase("uninterrupted", "plain", 1, 1),
        Phase("started", "faulted", **four, fault="SIGKILL", stop=kill),
        Phase("resumed", "faulted", 1, 2, fault="SIGTERM", stop=term),
        Phase("finished", "faulted", 1, 1),
    ]


def _between_saves(chance: random.Random, low: int, high: int, steps_per_epoch: int) -> int:
    """A random step after which neither a save nor the end of an epoch is due for two steps."""
    fit = [
        step
        for step in range(low, high)
        if step % SAVE_EVERY in (1, 2) and 1 <= step % steps_per_epoch < steps_per_epoch - 2
    ]
    return chance.choice(fit)
