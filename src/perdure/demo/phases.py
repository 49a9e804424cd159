"""Plans the demo: its recipe, its phases, and where the faults hit. A function of options and seed."""

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
    """One start of the training program; the fault is sent after the step `stop`."""

    name: str
    run: str
    devices: int
    processes: int
    fault: str = ""
    stop: int = 0

    @property
    def topology(self) -> str:
        """The topology as text, such as `2 processes` or `4 devices`."""
        count, what = (
            (self.processes, "process") if self.processes > 1 else (self.devices, "device")
        )
        return f"{count} {what}{'' if count == 1 else 'es' if what == 'process' else 's'}"


def plan(engine: str, total: int, steps_per_epoch: int, seed: int) -> list[Phase]:
    """The phases of a demo of `total` steps: one undisturbed, three with faults between them."""
    rng = random.Random(seed)
    kill = _between_saves(rng, total // 5, total // 2, steps_per_epoch)
    term = _between_saves(
        rng, max(kill + SAVE_EVERY, total // 2), total - SAVE_EVERY, steps_per_epoch
    )
    four = {"devices": 4, "processes": 1} if engine == "jax" else {"devices": 1, "processes": 4}
    return [
        Phase("uninterrupted", "plain", 1, 1),
        Phase("started", "faulted", **four, fault="SIGKILL", stop=kill),
        Phase("resumed", "faulted", 1, 2, fault="SIGTERM", stop=term),
        Phase("finished", "faulted", 1, 1),
    ]


def _between_saves(rng: random.Random, low: int, high: int, steps_per_epoch: int) -> int:
    """A random step after which neither a save nor the end of an epoch is due for two steps."""
    fit = [
        step
        for step in range(low, high)
        if step % SAVE_EVERY in (1, 2) and 1 <= step % steps_per_epoch < steps_per_epoch - 2
    ]
    return rng.choice(fit)
