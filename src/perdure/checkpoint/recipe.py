"""Whether two runs have one recipe: a checkpoint and who resumes it, or the processes of a group.

Owns that comparison (docs/RECIPE.md). Invariant: a field with two values is refused unless it was
named, and then it is a warning; nothing that differs goes without a word. What a recipe holds is the
affair of who makes it: `Strategy.recipe`.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from perdure.checkpoint.arguments import is_text, shown
from perdure.errors import ArgumentError, RecipeMismatchError
from perdure.process_group import Processes
from perdure.store.manifest import RecipeValue

Recipe = Mapping[str, RecipeValue]

# Fields that may differ, by comma, for a program that takes no argument.
ALLOW = "PERDURE_ALLOW"

# Where another value leaves the bits of some models as they are. Refused all the same: nobody can
# tell beforehand. A difference in any other field changes the result for sure.
_PERHAPS = frozenset(
    {"deterministic", "engine_version", "instruction_set", "platform", "settings", "threads"}
)
_MOST_LINES = 20


class _Bearer(msgspec.Struct):
    """A recipe, and the process that has it."""

    who: str
    recipe: dict[str, RecipeValue]


def checked(recipe: Any) -> dict[str, RecipeValue]:
    """`recipe` with plain Python values; NumPy scalars and 0-d arrays are converted exactly.

    Raises `ArgumentError` that names a field which a manifest cannot hold exactly: None, NaN,
    an infinity, an integer of more than 64 bits, a list.
    """
    if not isinstance(recipe, Mapping):
        raise ArgumentError(
            f"recipe: expected a mapping from names to values, found {shown(recipe)}."
        )
    fields: dict[str, RecipeValue] = {}
    for name, given in recipe.items():
        if not is_text(name):
            raise ArgumentError(f"recipe: expected strings as names, found {shown(name)}.")
        value = given
        if getattr(given, "ndim", None) == 0 and callable(getattr(given, "item", None)):
            value = given.item()
        plain = _plain(value)
        if plain is None:
            raise ArgumentError(
                f"recipe: expected a string, a bool, an integer of at most 64 bits or a finite float "
                f"for {name!r}, found {shown(given)} of type {type(given).__name__}. Convert it, or "
                f"leave it out."
            )
        fields[name] = plain
    return fields


def _plain(value: Any) -> RecipeValue | None:
    """`value` without its subclass; None if a manifest cannot hold it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value) if is_text(value) else None
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


def check_resume(where: str, there: Recipe, here: Recipe, allow: frozenset[str]) -> str | None:
    """Raise unless a run of the recipe `here` may go on from a checkpoint of the recipe `there`.

    `where` names the checkpoint. Returns what to warn about: fields that differ and were allowed,
    and fields that only one side has (another release of perdure, or no dataset given), which cannot
    be compared. A side without any recipe is not compared.
    """
    if not there or not here:
        return None
    refused, noted = [], []
    for field in sorted(there.keys() | here.keys()):
        if field not in there or field not in here:
            side, value = ("checkpoint", there) if field in there else ("run", here)
            noted.append(f"{field}: only the {side} has it ({value[field]!r})")
        elif not _same(there[field], here[field]):
            line = f"{field}: the checkpoint has {there[field]!r}, this run has {here[field]!r}"
            (noted if field in allow else refused).append(line + _weight(field))
    if refused:
        raise RecipeMismatchError(
            f"{where} was made by another recipe, so that going on would not give the bits of an "
            f"uninterrupted run:{_lines(refused)}\nUse the recipe of the checkpoint, or "
            f"{_how_to_allow(refused, allow)}"
        )
    if noted:
        return f"{where} was made by a recipe that is not the same in all:{_lines(noted)}"
    return None


def check_group(processes: Processes, recipe: Recipe, allow: frozenset[str]) -> str | None:
    """Raise the same error in every process unless all have one recipe. A collective.

    Returns what the chief warns about, as `check_resume`. Here a field that one process lacks differs,
    because all run one program.
    """
    if processes.count == 1:
        return None
    who = f"process {processes.index} ({socket.gethostname()}, pid {os.getpid()})"
    mine = msgspec.msgpack.encode(_Bearer(who, dict(recipe)))
    first, *others = [msgspec.msgpack.decode(data, type=_Bearer) for data in processes.gather(mine)]
    refused, noted = [], []
    for other in others:
        for field in sorted(first.recipe.keys() | other.recipe.keys()):
            values = [bearer.recipe.get(field) for bearer in (first, other)]
            if not _same(*values):
                has = [
                    f"{bearer.who} has {'nothing' if value is None else repr(value)}"
                    for bearer, value in zip((first, other), values, strict=True)
                ]
                line = f"{field}: {', '.join(has)}{_weight(field)}"
                (noted if field in allow else refused).append(line)
    if refused:
        raise RecipeMismatchError(
            f"the processes of the group do not have one recipe, so that the result would depend on "
            f"which of them does what:{_lines(refused)}\nStart all of them from one program with the "
            f"same arguments on machines of one kind, or {_how_to_allow(refused, allow)}"
        )
    if noted and processes.is_chief:
        return f"the processes of the group do not have one recipe:{_lines(noted)}"
    return None


def _same(one: RecipeValue | None, other: RecipeValue | None) -> bool:
    # True is 1 in Python, and not in a recipe; a number is one, however it is written.
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _weight(field: str) -> str:
    return " (may change bits)" if field in _PERHAPS else ""


def _lines(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MOST_LINES], *more])


def _how_to_allow(refused: Sequence[str], allow: frozenset[str]) -> str:
    fields = sorted({line.partition(":")[0] for line in refused})
    already = f" (allowed so far: {', '.join(sorted(allow))})" if allow else ""
    return (
        f"name what may differ: allow={tuple(fields)!r}, or {ALLOW}={','.join(fields)} in the "
        f"environment{already}."
    )
