"""Runs a drilled program again with one thing changed, as often as a diagnosis asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from perdure.drill.compare import RunDifference, compare
from perdure.drill.execution import DEVICES, DrilledProgram, execute
from perdure.drill.probes import probe_environment
from perdure.drill.scenario import Launch, Observed, Outcome

UNTRIED = "could not be tried"


class ProbeRunner:
    """Runs the program again with one thing changed, each time in a new directory."""

    def __init__(
        self,
        program: DrilledProgram,
        directory: Path,
        plain: Outcome,
        observed: Observed,
        progress: Callable[[str, None], None] = lambda *_: None,
    ) -> None:
        self.plain = plain
        self.observed = observed
        self._program = program
        self._directory = directory
        self._progress = progress
        self._count = 0

    def undisturbed(
        self, *probes: str, devices: int | None = None, workers: int | None = None
    ) -> Outcome:
        """Run the program without a fault, under `probes`, on other devices or workers if given."""
        program = self._program
        if devices is not None:
            environment = {**program.environment, DEVICES: str(devices)}
            program = replace(program, environment=environment)
        if workers is not None:
            program = replace(program, workers=workers)
        return self._run(program, (), probes, ())[0]

    def faulted(
        self, attempts: Sequence[Launch], *probes: str, put: Sequence[str] = ()
    ) -> tuple[Outcome, Path]:
        """Run the program under `attempts` and `probes`; returns the directory of the run, too."""
        return self._run(self._program, attempts, probes, put)

    def difference(self, outcome: Outcome) -> RunDifference | None:
        """Where a run differs from the undisturbed one; None if it ended with the same bits."""
        return compare(self.plain, outcome)[1]

    def _run(
        self,
        program: DrilledProgram,
        attempts: Sequence[Launch],
        probes: Sequence[str],
        put: Sequence[str],
    ) -> tuple[Outcome, Path]:
        self._count += 1
        directory = self._directory / f"probe-{self._count:03d}"  # of one length
        self._progress(f"further run {self._count}", None)
        environment = (
            probe_environment(self._directory, probes, program.environment, put) if probes else {}
        )
        outcome = execute(program, directory, attempts, self.observed, environment)
        outcome.hash_exports(self.plain.exports)
        return outcome, directory
