"""What a user chooses about a run, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from perdure.errors import LaunchError


@dataclass(frozen=True)
class Limits:
    """Seconds that a worker may give no heartbeat in each phase before it counts as hung.

    None, the default, follows what was measured (`perdure.supervise.silence`); `math.inf` takes the
    limit away. The first limit begins with the first heartbeat, which the import of perdure gives in
    the phase `start`. A program that never imports perdure never counts as hung. `stopped` is for a
    process that SIGSTOP holds, in any phase.
    """

    start: float | None = None
    restore: float | None = None
    compile: float | None = None
    step: float | None = None
    save: float | None = None
    evaluate: float | None = None
    end: float | None = None
    stopped: float = 10

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not value > 0:
                raise LaunchError(f"limit {each.name}: expected more than 0 seconds, found {value}")


@dataclass(frozen=True)
class RunOptions:
    """How a run is started, watched and restarted.

    `workers` are started on this machine, each with `devices_per_worker` devices where that is given.
    A run gives up at the failure behind `max_restarts` restarts; an exit with 75 is none. `elastic` =
    (fewest, most) lets it go on without a worker that does not come back, and return to all after
    `return_s`; `workers` is its most. `log_directory` is made; by default
    perdure-logs/DATE-TIME-PID. A worker that was asked to leave is killed after `grace` seconds.
    `environment` is added to that of every worker. `compilation_cache` is where JAX keeps compiled
    programs; None leaves JAX alone. `warm` names modules: while workers train, a spare process beside
    each has imported them already, and takes its place after a failure. Heartbeats are read every
    `poll` seconds.
    """

    workers: int = 1
    devices_per_worker: int | None = None
    max_restarts: int = 100
    elastic: tuple[int, int] | None = None
    log_directory: Path | None = None
    limits: Limits = field(default_factory=Limits)
    grace: float = 60
    return_s: float = 60
    environment: Mapping[str, str] = field(default_factory=dict)
    compilation_cache: Path | None = None
    warm: tuple[str, ...] = ()
    poll: float = 0.1

    def __post_init__(self) -> None:
        at_least = {"workers": 1, "max_restarts": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise LaunchError(f"{name}: expected at least {least}, found {getattr(self, name)}")
        if self.devices_per_worker is not None and self.devices_per_worker < 1:
            raise LaunchError(
                f"devices_per_worker: expected at least 1, found {self.devices_per_worker}"
            )
        if not self.grace >= 0:
            raise LaunchError(f"grace: expected 0 seconds or more, found {self.grace}")
        cache = self.compilation_cache
        if cache is not None and cache.exists() and not cache.is_dir():
            raise LaunchError(f"{cache}: expected a directory for compiled programs, found a file")
        if self.elastic is not None:
            fewest, most = self.elastic
            if not 1 <= fewest <= most == self.workers:
                raise LaunchError(
                    f"elastic: expected fewest:most with 1 <= fewest <= most, and as many workers as "
                    f"most, found {fewest}:{most} and {self.workers} workers"
                )
