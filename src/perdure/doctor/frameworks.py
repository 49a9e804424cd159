"""Runs the kernels of each framework in processes of their own, and compares what they computed.

Invariant: a framework that crashes, hangs or cannot be imported is a row of the result; the others are
still checked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perdure.doctor.comparison import Computed, ResultComparison, compare
from perdure.doctor.file_system import FileSystemCheck
from perdure.doctor.kernel import AS_IT_IS, DETERMINISTIC, ONE_THREAD

FRAMEWORKS = {"jax": "perdure.doctor.jax_kernels", "torch": "perdure.doctor.torch_kernels"}
"""The module of the kernels of each framework, by the name under which the framework is imported."""

CONDITIONS = (AS_IT_IS, AS_IT_IS, DETERMINISTIC, DETERMINISTIC, ONE_THREAD)
"""The processes of a framework. Two of one condition, because compilers may choose by their speed."""

LIMIT_S = 300.0
_TAIL = 2000


@dataclass
class FrameworkResult:
    """What was found out about a framework.

    Attributes:
        name: The framework.
        settings: Its versions and settings, by name.
        comparisons: One for each kernel and condition.
        by_threads: Kernels whose bits are others with one thread; None if that could not be compared.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    comparisons: list[ResultComparison] = field(default_factory=list)
    by_threads: tuple[str, ...] | None = None


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


def installed_frameworks() -> list[str]:
    """The names of the frameworks that can be imported here."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def check_framework(
    name: str,
    repeats: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
    only: Collection[str] = (),
    conditions: Sequence[str] | None = None,
    limit_s: float = LIMIT_S,
) -> FrameworkResult:
    """Compute the kernels of a framework in several processes, and compare the bits.

    Args:
        name: A key of `FRAMEWORKS`.
        repeats: How often each kernel is computed on each device of each process.
        progress: Is called at the beginning of each process.
        only: Names of kernels; empty for all.
        conditions: The condition of each process; by default `CONDITIONS`.
        limit_s: Seconds after which a process counts as hung.
    """
    conditions = CONDITIONS if conditions is None else conditions
    result = FrameworkResult(name)
    computed: list[Computed] = []
    problems: list[ResultComparison] = []
    for number, condition in enumerate(conditions, 1):
        progress(f"{name}, {condition} (process {number} of {len(conditions)})")
        request = {"module": FRAMEWORKS[name], "condition": condition, "repeats": repeats}
        events, problem = _run({**request, "only": list(only)}, limit_s)
        for event in events:
            group = f"{name} on {event.get('kind')}, {condition}"
            if event["e"] == "described":
                result.settings = result.settings or event["settings"]
            elif event["e"] == "computed":
                what, device = event["what"], event["device"]
                computed.append(Computed(group, what, device, number, event["leaves"]))
            elif event["e"] in ("refused", "failed"):
                text = f"{event['e']}: {event['text']}"
                is_refusal = event["e"] == "refused"
                row = ResultComparison(group, event["what"], problem=text, is_refusal=is_refusal)
                problems += [row] if row not in problems else []
        if problem:
            problems.append(
                ResultComparison(f"{name}, {condition}", "the process", problem=problem)
            )
    result.comparisons = [*compare(computed), *problems]
    result.by_threads = _by_threads(computed)
    return result


def _run(request: Mapping[str, Any], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """The events of a process, and what went wrong with it; empty if nothing did."""
    with tempfile.TemporaryDirectory(prefix="perdure-doctor-") as directory:
        file, log = Path(directory, "events.jsonl"), Path(directory, "log")
        asked = json.dumps({**request, "file": str(file)})
        with log.open("wb") as output:
            process = subprocess.Popen(
                # Not the working directory, in which a file may have the name of a module.
                [sys.executable, "-P", "-m", "perdure.doctor.kernel_process", asked],
                stdin=subprocess.PIPE,  # ends with this process
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                problem = _problem(process.wait(limit_s))
            except subprocess.TimeoutExpired:
                problem = f"no result after {limit_s:g} s"
            finally:
                _end(process)
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith(b"\n")]
        tail = log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
    if not problem:
        return events, ""
    begun = [event["what"] for event in events if event["e"] == "begin"]
    where = f" in {begun[-1]}" if begun else " before the first kernel"
    said = f": {tail[-1]}" if tail else ""
    return events, f"{problem}{where}{said}"


def _problem(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and those that it started, if they are there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _by_threads(computed: list[Computed]) -> tuple[str, ...] | None:
    """The computations whose result with one thread is not that of the environment as it is.

    Those that give several results as it is are left out: threads may not be the reason.
    """
    by_key: dict[tuple[str, str], dict[str, set[Any]]] = {}
    for result in computed:
        framework, _, condition = result.group.rpartition(", ")
        found = by_key.setdefault((framework, result.what), {})
        found.setdefault(condition, set()).add(result.bits())
    pairs = [
        (what, found[AS_IT_IS], found[ONE_THREAD])
        for (_, what), found in by_key.items()
        if AS_IT_IS in found and ONE_THREAD in found
    ]
    if not pairs:
        return None
    differ = [what for what, one, other in pairs if len(one) == 1 and one != other]
    return tuple(dict.fromkeys(differ))
