"""Names of leaves in files of other tools: from paths, back to paths, and by the patterns of a user."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from perdure.convert.formats import LeafNote, NamedLeaf
from perdure.errors import ArgumentError
from perdure.look.leaf_reader import KEY_PREFIX, element_shape, is_scalar, scalar_value
from perdure.store.format import WEAK_PREFIX, escape, unescape
from perdure.store.manifest import LeafEntry


class NameMap:
    """Renames by patterns: in `old=new`, `*` is any text without a separator and `**` any text.

    Each wildcard of `new` stands for what the same one of `old`, counted from the left, has matched.
    The first pattern that matches the whole text counts; without one, the text has no new name.

    Args:
        lines: `old=new`; empty lines and lines that begin with `#` are ignored.
        where: The name of the file, for errors.

    Raises:
        ArgumentError: A line has another form, or its two sides have different wildcards.
    """

    def __init__(self, lines: Iterable[str], where: str = "names") -> None:
        self.where = where
        self._rules: list[tuple[str, re.Pattern[str], list[str]]] = []
        self._used: set[str] = set()
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            old, equals, new = (part.strip() for part in text.partition("="))
            old_parts, new_parts = re.split(r"(\*\*?)", old), re.split(r"(\*\*?)", new)
            if not (equals and old and new) or len(old_parts) != len(new_parts):
                raise ArgumentError(
                    f"{where}, line {number}: expected old=new with as many wildcards on both sides, "
                    f"found {text!r}."
                )
            regex = "".join(map(_regex, old_parts))
            self._rules.append((text, re.compile(regex, re.DOTALL), new_parts[::2]))

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> NameMap:
        """The patterns of a file in UTF-8; raises `ArgumentError` if it cannot be read."""
        try:
            with open(file, encoding="utf-8-sig") as lines:
                return cls(lines, os.fspath(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"{os.fspath(file)}: the names cannot be read: {error}.") from error

    def __call__(self, text: str) -> str | None:
        """The new name; None if no pattern matches."""
        for rule, regex, literals in self._rules:
            if match := regex.fullmatch(text):
                self._used.add(rule)
                groups = [*match.groups(), ""]
                return "".join(a + b for a, b in zip(literals, groups, strict=True))
        return None

    def refuse_unused(self) -> None:
        """Raise `ArgumentError` if a pattern has matched nothing."""
        if unused := [rule for rule, _, _ in self._rules if rule not in self._used]:
            raise ArgumentError(
                f"{self.where}: {unused[0]!r} matches no leaf that is selected. Left of the = stands "
                f"the whole name before the change."
            )


def branch_of(leaves: Iterable[str] | None) -> str:
    """The branch that is left out of names: that of the only pattern, if it is a plain path."""
    patterns = list(leaves or ())
    branch = patterns[0].removesuffix("/**") if len(patterns) == 1 else ""
    return "" if "*" in branch else branch


def named_leaves(
    entries: Iterable[LeafEntry], dotted: bool, branch: str, names: NameMap | None
) -> list[NamedLeaf]:
    """The leaves with their names: of `names`, or the path inside `branch`, `dotted` or not.

    Raises `ArgumentError` if two have one name, or a pattern of `names` matches nothing.
    """
    named: dict[str, NamedLeaf] = {}
    for entry in entries:
        inside = entry.path.removeprefix(f"{branch}/") if branch else entry.path
        name = ".".join(map(unescape, inside.split("/"))) if dotted else inside
        noted_path = None if path_of(name) == inside else inside
        if names is not None and (renamed := names(entry.path)):
            name, noted_path = renamed, None
        if (other := named.get(name)) is not None:
            raise ArgumentError(
                f"leaves {other.entry.path!r} and {entry.path!r} would both be called {name!r}; give "
                f"one of them another name: `--names`."
            )
        if is_scalar(entry):
            note = LeafNote(path=noted_path)
            named[name] = NamedLeaf(name, entry, entry.dtype, (), note, scalar_value(entry))
            continue
        dtype = entry.dtype.removeprefix(WEAK_PREFIX)
        dtype = "uint32" if dtype.startswith(KEY_PREFIX) else dtype
        note = LeafNote(entry.dtype if entry.dtype != dtype else None, noted_path)
        named[name] = NamedLeaf(name, entry, dtype, element_shape(entry), note)
    if names is not None:
        names.refuse_unused()
    return list(named.values())


def path_of(name: str) -> str:
    """The path that a name in a file means: one with `/` is a path (`%2F` for `/`), others split at
    dots.
    """
    if "/" in name:
        return "/".join(escape(unescape(part)) for part in name.split("/"))
    return "/".join(map(escape, name.split(".")))


def _regex(part: str) -> str:
    if part == "**":
        return "(.*)"
    return "([^/.]*)" if part == "*" else re.escape(part)
