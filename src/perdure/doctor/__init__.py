"""Results of the doctor, which computes things several times, and what differs in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Computed:
    """One result: digests by leaf of computation `what` on a device; compared within its `group`."""

    group: str
    what: str
    device: str
    process: int
    leaves: Mapping[str, str]

    def bits(self) -> frozenset[tuple[str, str]]:
        """Equal for equal results."""
        return frozenset(self.leaves.items())


@dataclass(frozen=True)
class Deviation:
    """Results of one device in one process that are not those of most devices."""

    device: str
    process: int
    count: int
    of: int
    leaves: tuple[str, ...]


@dataclass(frozen=True)
class ResultComparison:
    """All results of one computation, and those that differ from the result of most devices.

    Of equally many counts that which was found first: two devices do not say which is wrong.
    `problem` is why there is nothing to compare; a refusal, for want of a deterministic form, keeps
    the promise.
    """

    group: str
    what: str
    results: int = 0
    devices: tuple[str, ...] = ()
    processes: int = 0
    deviations: tuple[Deviation, ...] = ()
    problem: str = ""
    is_refusal: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether nothing speaks against the promise that these bits come back."""
        return not self.deviations and (not self.problem or self.is_refusal)


def compare(results: Iterable[Computed]) -> list[ResultComparison]:
    """A comparison for each computation, in the order of their first results."""
    by_key: dict[tuple[str, str], list[Computed]] = {}
    for result in results:
        by_key.setdefault((result.group, result.what), []).append(result)
    return [_compare(group, what, found) for (group, what), found in by_key.items()]


def _compare(group: str, what: str, results: list[Computed]) -> ResultComparison:
    # A device that computes more often than the others has no more votes.
    votes = Counter(bits for _, bits in {(result.device, result.bits()) for result in results})
    counts = Counter(result.bits() for result in results)
    expected = max(results, key=lambda result: (votes[result.bits()], counts[result.bits()]))
    by_place: dict[tuple[str, int], list[Computed]] = {}
    for result in results:
        by_place.setdefault((result.device, result.process), []).append(result)
    deviations = []
    for (device, process), found in by_place.items():
        others = [result for result in found if result.bits() != expected.bits()]
        leaves = {path for each in others for path, _ in expected.bits() ^ each.bits()}
        if others:
            place = Deviation(device, process, len(others), len(found), tuple(sorted(leaves)))
            deviations.append(place)
    return ResultComparison(
        group,
        what,
        len(results),
        tuple(dict.fromkeys(device for device, _ in by_place)),
        len({process for _, process in by_place}),
        tuple(deviations),
    )


# ---------------------------------------------------------------- the report


class Check(NamedTuple):
    """An operation of a file system: whether it did what the store relies on, and what was found."""

    name: str
    is_right: bool
    found: str


@dataclass
class FrameworkResult:
    """A framework's settings and comparisons; `by_threads` kernels differ on one thread."""

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    comparisons: list[ResultComparison] = field(default_factory=list)
    by_threads: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DoctorReport:
    """All that was found: the machine, the file system of a run, kernels or a program."""

    machine: Mapping[str, str]
    file_system: Sequence[Check] = ()
    frameworks: Sequence[FrameworkResult] = ()
    program: Sequence[ResultComparison] = ()

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
