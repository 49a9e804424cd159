"""`ManagerOptions` and `Restored`: what a manager is given and what a restore returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsIndex

from perdure.checkpoint.arguments import (
    integer,
    require_choice,
    require_kind,
    require_number,
    shown,
)
from perdure.checkpoint.preemption import SIGNALS
from perdure.checkpoint.retention import Retention
from perdure.errors import ArgumentError
from perdure.state.restore_check import ReplacedMembers
from perdure.state.restore_request import RestoreReport
from perdure.tensorflow_names import refuse_arguments


class _Pair(NamedTuple):
    state: Any
    step: int


class Restored(_Pair):
    """The result of a restore, a pair: `state, step = manager.restore(...)`, with step 0 for a
    fresh state. The `report` says how the state differs from the checkpoint."""

    report: RestoreReport = RestoreReport()
    _replaced: ReplacedMembers | None = None

    def __new__(cls, state: Any, step: int, report: RestoreReport | None = None) -> Restored:
        pair = super().__new__(cls, state, step)
        if report is not None:
            pair.report = report
        return pair

    def watch(self, replaced: ReplacedMembers) -> Restored:
        """Returns this pair; unpacking it ends the check that the program uses the returned state."""
        self._replaced = replaced
        return self

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self[0]

    def __getitem__(self, key: SupportsIndex | slice) -> Any:  # type: ignore[override]
        if key not in (1, -1):
            self._take()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self._take()
        return super().__iter__()

    def _take(self) -> None:
        if self._replaced is not None:
            self._replaced.forget()
            self._replaced = None


@dataclass(frozen=True)
class ManagerOptions:
    """What a manager does beyond saving at an interval and keeping the newest checkpoints.

    Attributes:
        retention: Which checkpoints stay besides the newest `max_to_keep`. None takes over the
            rules of the run's last manager, so that what it kept as the best is not lost;
            `Retention()` is no further rule.
        on_error: What happens after a save that does not commit (disk full, no permission): "raise"
            its error at the next call, or "continue" with a warning and try again at the next save.
            The last good checkpoint stays in both cases.
        codec: "shuffle-zstd" stores chunks in fewer bytes where it can, for slow or expensive
            storage. It needs the extra `zstd` and may change between sessions; fingerprints do not
            depend on it.
        clock: Gives the seconds since 1970.
        save_random_state: Save the random generators that the code of a process shares with every
            checkpoint, and put them back at the end of a restore: Python's `random`,
            `numpy.random`, PyTorch's (CPU and the devices in use) and Keras's. Each process of a
            group has its own. They are not part of the fingerprint. Turn this off for a manager
            that only reads the checkpoints of another run.
        mirror_wait: Seconds that `close` waits at most for the mirror.
        preemption_signals: Names of the signals that ask for a save: "SIGTERM", "SIGINT" (Ctrl-C; a
            second one raises `KeyboardInterrupt`) and "SIGUSR1" (which Slurm can be told to send).
        journal_every: Record a digest of the state in the journal of the run at each call of `save`
            that passes a multiple of this, also at those that save nothing; a resumed run compares
            the steps that it repeats (`manager.journal`). None records only what the program
            records itself. The run directory must be local.

    Raises:
        ArgumentError: A value cannot be used.
    """

    retention: Retention | None = None
    on_error: Literal["raise", "continue"] = "raise"
    codec: Literal["shuffle-zstd"] | None = None
    clock: Callable[[], float] = time.time
    save_random_state: bool = True
    mirror_wait: float = 300.0
    preemption_signals: tuple[str, ...] = ("SIGTERM",)
    journal_every: int | None = None

    def __new__(cls, *_arguments: Any, **named: Any) -> ManagerOptions:
        refuse_arguments("ManagerOptions", named, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        require_kind("retention", self.retention, Retention, optional=True)
        if not callable(self.clock):
            raise ArgumentError(f"clock: expected a function, found {shown(self.clock)}.")
        require_number("mirror_wait", self.mirror_wait, lambda s: s >= 0, "at least 0 seconds")
        require_choice("on_error", self.on_error, ("raise", "continue"))
        every = integer("journal_every", self.journal_every, optional=True)
        object.__setattr__(self, "journal_every", every)
        names = self.preemption_signals
        if isinstance(names, str) or not names or not set(names) <= set(SIGNALS):
            raise ArgumentError(
                f"preemption_signals: expected a tuple with one or more of {', '.join(SIGNALS)}, found "
                f"{names!r}."
            )
