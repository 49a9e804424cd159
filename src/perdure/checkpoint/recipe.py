"""Compares recipes: of a checkpoint and the run that resumes it, or of the processes of a group.

Invariant: a field with two values is refused, or is a warning if the user allowed it ("The recipe"
in docs/STRATEGIES.md). The caller decides which fields a recipe has: see `Strategy.recipe`.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any
from weakref import WeakSet

import msgspec

from perdure import errors
from perdure.checkpoint.arguments import is_unicode, require_name, shown
from perdure.checkpoint.group_call import GroupCall, SentError, capture_error, decoded, together
from perdure.errors import ArgumentError, RecipeMismatchError, warn_caller
from perdure.runtime.environment import process_settings
from perdure.runtime.process_group import Processes
from perdure.store.drill_hook import drill_hook
from perdure.store.manifest import RecipeValue
from perdure.text import few

Recipe = Mapping[str, RecipeValue]

ALLOW = "PERDURE_ALLOW"
"""Environment variable with the fields that may differ, separated by commas."""

# Fields whose value does not change the bits of some models. Differences are refused all the same:
# nobody can tell beforehand. A difference in any other field always changes the result.
ENVIRONMENT_FIELDS = frozenset(
    {"deterministic", "engine_version", "instruction_set", "platform", "settings", "threads"}
)
_MOST_LINES = 20

_strategies_in_use: WeakSet[Any] = WeakSet()


def note_strategy_in_use(strategy: Any) -> None:
    """Note that `strategy` computes in this process: a manager without a recipe then warns."""
    _strategies_in_use.add(strategy)


class NamedRecipe(msgspec.Struct):
    """A recipe, and whose it is."""

    name: str
    recipe: Recipe


class RecipeCheck:
    """The recipe of a manager: compared once in its group, and with every restored checkpoint.

    `given` is the program's recipe. `settings` are the settings of the imported frameworks at the first
    `save`; strategies have them in their recipe.
    """

    def __init__(self, recipe: Recipe | None, allow: Iterable[str], processes: Processes) -> None:
        self.given = checked({} if recipe is None else recipe)
        self.settings: Recipe | None = None
        self._is_missing = recipe is None
        self._allow = allowed(allow)
        self.processes = processes
        self._compared = False
        self._resumed: tuple[str, Recipe] | None = None

    @property
    def recorded(self) -> dict[str, RecipeValue]:
        """What a checkpoint holds: the recipe that was given, and the settings."""
        return {**self.given, **(self.settings or {})}

    def resumed(self, where: str, saved: Recipe) -> None:
        """The run resumes from the checkpoint `where`, whose recipe is `saved`."""
        self._resumed = where, {name: v for name, v in saved.items() if _is_setting(name)}

    def check_settings(self, directory: str) -> None:
        """Compare the settings of the chief with the settings in the checkpoint that the run resumed
        from, at the first `save`, when the program has made its settings. A collective, if the run
        has resumed."""
        if self.settings is None:
            self.settings = {} if "engine" in self.given else process_settings()
            if (hook := drill_hook()) is not None:
                hook.note("recipe", directory, recipe=dict(self.recorded))
        if self._resumed is None:
            return
        where, saved = self._resumed
        # A framework may be imported by one of two runs and not compute anything.
        both = {name: value for name, value in saved.items() if name in self.settings}
        settings = {name: self.settings[name] for name in both}

        def check() -> None:
            if note := check_resume(where, both, settings, self._allow):
                warn_caller(note)

        together(GroupCall(self.processes, "save"), check, by_chief=NoneType)
        self._resumed = None

    def check_group(self, call: str) -> None:
        """Compare the recipes of all processes, at the first call. A collective."""
        if not self._compared:
            note = check_group(GroupCall(self.processes, call), self.given, self._allow)
            self._compared = True
            if note:
                warn_caller(note)

    def warn_if_missing(self, where: str) -> None:
        """Warn once if this manager was given no recipe, and a strategy has one."""
        if self._is_missing and _strategies_in_use:
            self._is_missing = False
            if self.processes.is_chief:
                warn_caller(
                    f"{where}: a strategy computes in this program, and the manager was not given its "
                    f"recipe, so that a resume with another number of replicas, seed or dataset would "
                    f"give other bits without an error. Pass recipe=strategy.recipe(dataset); for a "
                    f"state that no strategy computes, recipe={{}}."
                )

    def check_resume(self, where: str, recipe: Recipe) -> None:
        """Compare with the recipe of the checkpoint `where`; raises or warns as `check_resume`."""
        saved = {name: value for name, value in recipe.items() if not _is_setting(name)}
        note = check_resume(where, saved, self.given, self._allow)
        if note and self.processes.is_chief:
            warn_caller(note)


def checked(recipe: Any) -> dict[str, RecipeValue]:
    """`recipe` with plain Python values; raises `ArgumentError` for one that is not exact."""
    if not isinstance(recipe, Mapping):
        raise ArgumentError(
            f"recipe: expected a mapping from names to values, found {shown(recipe)}."
        )
    fields: dict[str, RecipeValue] = {}
    for name, value in recipe.items():
        require_name("recipe", name)
        is_scalar = getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None))
        plain = _plain(value.item() if is_scalar else value)
        if plain is None:
            raise ArgumentError(
                f"recipe: expected a string, a bool, an integer of at most 64 bits or a finite float "
                f"for {name!r}, found {shown(value)} of type {type(value).__name__}. Convert it, or "
                f"leave it out."
            )
        fields[name] = plain
    return fields


def _plain(value: Any) -> RecipeValue | None:
    """`value` without its subclass; None if a manifest cannot hold it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value) if is_unicode(value) else None
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return None


def allowed(names: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """The fields that may differ: `names`, and those in PERDURE_ALLOW."""
    environ = os.environ if environ is None else environ
    names = (names,) if isinstance(names, str) else names
    stated = (name.strip() for name in environ.get(ALLOW, "").split(","))
    return frozenset([*names, *stated]) - {""}


def check_resume(
    where: str,
    saved: Recipe,
    current: Recipe,
    allow: frozenset[str],
    remedy: str = "Use the recipe of the checkpoint",
) -> str | None:
    """Raise `RecipeMismatchError` unless a run of the recipe `current` may resume from the
    checkpoint `where`; `remedy` begins its advice.

    Returns what to warn about: fields that differ and were allowed, and fields that only one side
    has (another release, or no dataset given). A side without any recipe is not compared.
    """
    if not saved or not current:
        return None
    sides = NamedRecipe("the checkpoint", saved), NamedRecipe("this run", current)
    differing = differences(*sides)
    comparable = saved.keys() & current.keys()
    _require_allowed(
        {line: field for line, field in differing.items() if field in comparable},
        allow,
        f"{where} was made by another recipe, so that resuming would not give the bits of an "
        f"uninterrupted run",
        remedy,
    )
    if differing:
        return f"{where} was made by a recipe that is not the same in all:{_lines(differing)}"
    return None


def check_group(processes: Processes, recipe: Recipe, allow: frozenset[str]) -> str | None:
    """Raise the same error in every process unless all have one recipe and one release of perdure,
    which may send other messages. A collective; returns what the chief warns about."""
    if processes.count == 1:
        return None
    name = f"process {processes.index} ({socket.gethostname()}, pid {os.getpid()})"
    release = sys.modules["perdure"].__version__  # it imports this module
    notes: list[str] = []

    def compare(sent: list[bytes]) -> None:
        first, *others = [decoded(data, NamedRecipe) for data in sent]
        differing = {line: f for other in others for line, f in differences(first, other).items()}
        _require_allowed(
            differing,
            allow,
            "the processes of the group do not have one recipe, so that the result would depend on "
            "which of them does what",
            "Start all of them from one program with the same arguments and packages on machines of "
            "one kind",
        )
        if differing:
            notes.append(f"the processes of the group do not have one recipe:{_lines(differing)}")

    def decide(sent: list[bytes]) -> bytes:
        return msgspec.msgpack.encode(SentError.of(capture_error(lambda: compare(sent))[1]))

    mine = NamedRecipe(name, {"perdure": release, **recipe})
    answer = processes.agree(msgspec.msgpack.encode(mine), decide)
    if (error := decoded(answer, SentError | None)) is not None:
        raise getattr(errors, error.kind, RecipeMismatchError)(error.text)
    return notes[0] if notes and processes.is_chief else None


def differences(one: NamedRecipe, other: NamedRecipe) -> dict[str, str]:
    """The fields that differ, by a line on each."""
    lines: dict[str, str] = {}
    for field in sorted(one.recipe.keys() | other.recipe.keys()):
        values = [side.recipe.get(field) for side in (one, other)]
        if not _same(*values):
            sides = [
                f"{side.name} has {'nothing' if value is None else repr(value)}"
                for side, value in zip((one, other), values, strict=True)
            ]
            weight = " (may change bits)" if _bare(field) in ENVIRONMENT_FIELDS else ""
            lines[f"{field}: {', '.join(sides)}{weight}"] = field
    return lines


def _require_allowed(
    differing: Mapping[str, str], allow: frozenset[str], problem: str, remedy: str
) -> None:
    # `threads` allows `torch.threads` too.
    refused = {line: f for line, f in differing.items() if not allow & {f, _bare(f)}}
    if refused:
        fields = sorted({*refused.values()})
        already = f" (allowed so far: {', '.join(sorted(allow))})" if allow else ""
        raise RecipeMismatchError(
            f"{problem}:{_lines(refused)}\n{remedy}, or name what may differ: "
            f"allow={tuple(fields)!r}, or {ALLOW}={','.join(fields)} in the environment{already}."
        )


def _lines(lines: Iterable[str]) -> str:
    return f"\n  {few(lines, _MOST_LINES, chr(10) + '  ')}"


def _same(one: RecipeValue | None, other: RecipeValue | None) -> bool:
    # True is 1 in Python, and not in a recipe; a number is one, however it is written.
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_setting(field: str) -> bool:
    return field.partition(".")[0] in ("jax", "tensorflow", "torch") and "." in field


def _bare(field: str) -> str:
    return field.partition(".")[2] if _is_setting(field) else field
