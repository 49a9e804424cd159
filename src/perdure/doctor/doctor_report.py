"""`DoctorReport`: all that the doctor found, as one document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from perdure.doctor.comparison import ResultComparison
from perdure.doctor.file_system import FileSystemCheck
from perdure.doctor.frameworks import FrameworkResult


@dataclass(frozen=True)
class DoctorReport:
    """All that was found.

    Attributes:
        machine: Processor, cores, memory, versions and variables.
        file_system: What was tried where a run directory is; empty if none was named.
        frameworks: The results of their kernels; empty if a program was checked.
        program: The results of a program; empty if none was given.
    """

    machine: Mapping[str, str]
    file_system: Sequence[FileSystemCheck] = ()
    frameworks: Sequence[FrameworkResult] = ()
    program: Sequence[ResultComparison] = field(default=())

    @property
    def comparisons(self) -> list[ResultComparison]:
        """Those of the frameworks and of the program."""
        kernels = [found for result in self.frameworks for found in result.comparisons]
        return [*kernels, *self.program]

    @property
    def is_equal(self) -> bool:
        """Whether all bits were equal, and the file system did what the store relies on."""
        is_right = all(check.is_right for check in self.file_system)
        return is_right and all(comparison.is_equal for comparison in self.comparisons)

    def document(self) -> dict[str, Any]:
        """The whole as JSON can hold it."""
        return {
            "verdict": "equal" if self.is_equal else "differs",
            "machine": dict(self.machine),
            "file_system": [check._asdict() for check in self.file_system],
            "frameworks": {
                result.name: {"settings": dict(result.settings), "by_threads": result.by_threads}
                for result in self.frameworks
            },
            "comparisons": [
                {**asdict(comparison), "is_equal": comparison.is_equal}
                for comparison in self.comparisons
            ],
        }
