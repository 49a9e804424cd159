"""Opens what a person names: a run directory, `RUN`, or checkpoints of it, `RUN@STEP`."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perdure.checkpoint.arguments import step_number
from perdure.checkpoint.retention import candidates, ranked, recorded_retention
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    HistoryError,
    NotARunError,
    StepNotFoundError,
    UnreachableError,
)
from perdure.store import Run
from perdure.store.format import manifest_name, steps_text
from perdure.store.manifest import Manifest
from perdure.store.storage import Storage
from perdure.store.urls import name_at_step
from perdure.text import few, quoted

FORMS = "RUN@STEP, RUN@latest, RUN@best, RUN@best:max:METRIC or RUN@best:min:METRIC"

_STEPS = re.compile(r"(?P<run>.+)@(?P<which>latest|best|best:[^@/]*|\d+(?:,\d+)*)", re.DOTALL)
_BEST = re.compile(r"(?P<run>.+?)@(?P<which>best:(?:max|min):.+)", re.DOTALL)


@dataclass(frozen=True)
class StoredCheckpoint:
    """One committed checkpoint, opened for reading, and its name in output: `RUN@STEP`."""

    run: Run = field(repr=False)
    manifest: Manifest = field(repr=False)
    name: str

    @property
    def step(self) -> int:
        """Its step."""
        return self.manifest.step


Where = str | os.PathLike[str] | Storage | Run | StoredCheckpoint
"""A run directory, or checkpoints of one: `RUN` or `RUN@...` as text, a path, or an open one."""


class Address(NamedTuple):
    """A run directory, and the text after its `@`; None for the run directory itself."""

    run: Run
    given: str
    which: str | None

    def steps(self) -> list[int]:
        """The steps that the address names; the newest if it names none."""
        if self.which is not None and self.which[0].isdigit():
            return [int(step) for step in self.which.split(",")]
        steps = self.run.steps()
        if not steps:
            self.run.require_not_lost()
            raise StepNotFoundError(f"{self.run.where}: expected a checkpoint, found none yet.")
        return steps[-1:] if self.which in (None, "latest") else [_best(self.run, str(self.which))]

    def step(self) -> int:
        """The one step that the address names."""
        steps = self.steps()
        if len(steps) > 1:
            raise ArgumentError(
                f"expected RUN@STEP with one step, found {self.given}@{self.which}."
            )
        return steps[0]


def open_run(where: Where) -> Run:
    """Open a run directory; text that names a checkpoint is an `ArgumentError`."""
    address = find_run(where)
    if address.which is not None:
        raise ArgumentError(
            f"expected a run directory, found one of its checkpoints: {address.given}@"
            f"{address.which}. Leave out @{address.which}."
        )
    return address.run


def open_checkpoint(where: Where) -> StoredCheckpoint:
    """Open one checkpoint.

    Args:
        where: `RUN@STEP`, `RUN@latest`, `RUN@best:max:METRIC` (the highest value of a metric; the
            newer of two equal ones), `RUN@best:min:METRIC`, `RUN@best` (by the metric of the
            retention), or `RUN` alone for the newest. `RUN` is a path or a URL and may have an `@`
            in it. An open checkpoint is returned as it is.

    Raises:
        NotARunError: There is no run directory.
        StepNotFoundError: It holds no such checkpoint; the text names the nearest step.
        HistoryError: It has none any more: they were lost or set aside.
        CorruptionError: The manifest of the checkpoint is damaged; with `@best` any manifest,
            because the best checkpoint may be the damaged one.
        UnreachableError: It cannot be read; with `@best` any manifest.
        ArgumentError: `where` names several checkpoints, or a best one without its metric.
    """
    if isinstance(where, StoredCheckpoint):
        return where
    address = find_run(where)
    return checkpoint_at(address.run, address.step(), address.given)


def open_checkpoints(where: Where) -> list[StoredCheckpoint]:
    """The checkpoints that `RUN@100,200` names, in that order, or all; as `open_checkpoint`."""
    if isinstance(where, StoredCheckpoint):
        return [where]
    address = find_run(where)
    steps = address.steps()
    if address.which is None:
        steps = address.run.steps()
    return [checkpoint_at(address.run, step, address.given) for step in steps]


def checkpoint_at(run: Run, step: int, given: str | None = None) -> StoredCheckpoint:
    """The checkpoint of a step, with `given` as the name of its run; raises as `open_checkpoint`."""
    try:
        manifest = run.manifest(step)
    except CorruptionError as error:
        raise CorruptionError(with_advice(error, run)) from error
    return StoredCheckpoint(run, manifest, name_at_step(given or run.where, step))


def with_advice(error: CorruptionError, run: Run) -> str:
    """The text of an error about damage, with what to do; errors about a manifest say so already."""
    text = str(error)
    if "perdure verify" in text:
        return text
    return (
        f"{text} `perdure verify {quoted(run.where)}` lists all damage; an older step may be whole."
    )


def find_run(where: Where) -> Address:
    """Open the run directory of `where`, which may name checkpoints of it. The whole text is tried
    as the name of a run directory too, and first if it is a directory here."""
    if isinstance(where, StoredCheckpoint):
        return Address(where.run, where.run.where, str(where.step))
    if isinstance(where, Run):
        return Address(where, where.where, None)
    if not isinstance(where, (str, os.PathLike)):
        run = Run(where)
        return Address(run, run.where, None)
    text = os.fsdecode(os.fspath(where))
    readings: list[tuple[str, str | None]] = [(text, None)]
    if match := _parse(text):
        readings.insert(1 if os.path.isdir(text) else 0, (match["run"], match["which"]))
    errors: list[NotARunError] = []
    for run, which in readings:
        try:
            return Address(Run(run), run, which)
        except NotARunError as error:
            errors.append(error)
    name, _, which = text.rpartition("@")
    if name and match is None and "/" not in which:
        with suppress(NotARunError):
            Run(name)
            raise StepNotFoundError(f"{name}: expected {FORMS}, found @{which}.")
    raise errors[0]


def refuse_checkpoint_name(directory: object) -> None:
    """Raise `ArgumentError` for `RUN@STEP` where a run directory is expected: a program that would
    take it for an empty one would start over."""
    if not isinstance(directory, (str, os.PathLike)):
        return
    text = os.fsdecode(os.fspath(directory))
    if (match := _parse(text)) is None or os.path.isdir(text):
        return
    with suppress(NotARunError):
        Run(match["run"])
        raise ArgumentError(
            f"directory: expected a run directory, found the name of a checkpoint, {text!r}. Give "
            f"{match['run']!r}; `restore({text!r})` restores that checkpoint, and `perdure fork` "
            f"begins another run from it."
        )


def _parse(text: str) -> re.Match[str] | None:
    return _BEST.fullmatch(text) or _STEPS.fullmatch(text)


def find_step(where: Where, step: Any = None) -> tuple[Run, int | None]:
    """The run directory of `where`, and the step to load; None for the newest good checkpoint.
    `where` may name one step, which `step` must not contradict."""
    address = find_run(where)
    run, given, which = address
    wanted = None if step is None else step_number(step)
    if which is None:
        return run, wanted
    named = None if which == "latest" else step_number(address.step())
    if wanted is not None and named != wanted:
        raise ArgumentError(
            f"step: expected {'None' if named is None else f'{named} or None'}, because the checkpoint "
            f"is named as `{given}@{which}`, found {wanted}."
        )
    return run, named


def step_or_name(step: Any, run: Run) -> int | None:
    """The step of a number, or of a name such as `RUN@STEP`; None for the newest good checkpoint."""
    if not isinstance(step, str):
        return None if step is None else step_number(step)
    match = _parse(step)
    name = match["run"] if match else ""
    if match and (name == run.where or os.path.realpath(name) == os.path.realpath(run.where)):
        address = Address(run, run.where, match["which"])
        return None if address.which == "latest" else address.step()
    raise ArgumentError(
        f"step: expected a step, or a name such as {name_at_step(run.where, 120)!r} (with @latest, "
        f"@best, @best:max:METRIC or @best:min:METRIC for a step), found {step!r}. For another run "
        f"directory use `perdure.load_checkpoint`."
    )


def read_manifests(run: Run) -> tuple[dict[int, Manifest], dict[int, str], dict[int, str]]:
    """The manifests of a run by step, and the errors of damaged ones (or another run's) and of
    unreadable ones."""
    manifests: dict[int, Manifest] = {}
    damaged: dict[int, str] = {}
    unread: dict[int, str] = {}
    for step in run.steps():
        try:
            manifests[step] = run.manifest(step)
        except StepNotFoundError:  # deleted since it was listed
            continue
        except (CorruptionError, HistoryError) as error:  # or another run's
            damaged[step] = str(error)
        except UnreachableError as error:
            unread[step] = str(error)
    return manifests, damaged, unread


def _best(run: Run, which: str) -> int:
    manifests, damaged, unread = read_manifests(run)
    names = sorted({name for manifest in manifests.values() for name in manifest.metrics})
    held = f"the metrics of this run are {', '.join(names)}" if names else "this run has no metrics"
    _, *parts = which.split(":", 2)
    without = ""
    if which == "best":
        rules = recorded_retention(run)
        if rules is not None and rules.retention.best_metric is not None:
            parts = [rules.retention.best_mode, rules.retention.best_metric]
        else:
            without = ", and its retention names no metric to keep the best of"
    if len(parts) < 2 or parts[0] not in ("max", "min") or not parts[1]:
        raise ArgumentError(
            f"{run.where}: expected @best:max:METRIC or @best:min:METRIC, found @{which}{without}; "
            f"{held}."
        )
    mode, metric = parts
    if damaged or unread:
        names = [manifest_name(step) for step in sorted(damaged | unread)]
        what_next = f"or set the damaged ones aside: `perdure verify {quoted(run.where)} --repair`."
        if cause := run.contents().foreign or (None if damaged else next(iter(unread.values()))):
            what_next = f"or remove the cause: {cause}"
        raise (CorruptionError if damaged else UnreachableError)(
            f"{run.where}: expected to compare the metrics of all checkpoints, found manifests that "
            f"cannot be read, of which one may be the best: {few(names)}. "
            f"Name a step, RUN@STEP, {what_next}"
        )
    best = ranked(candidates(manifests, ()), metric, mode)
    if not best:
        raise StepNotFoundError(
            f"{run.where}: expected a checkpoint with a finite metric {metric!r}, found none in "
            f"steps {steps_text(sorted(manifests))}; {held}."
        )
    return best[0].step
