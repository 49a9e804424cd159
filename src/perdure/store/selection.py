"""`Selection`: the leaves that a partial restore takes, by path, branch or pattern."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import NamedTuple

from perdure.errors import ArgumentError

MOST_SHOWN = 10


class WantedLeaves(NamedTuple):
    """Which leaves of a checkpoint are read, and the words of the caller that say so."""

    matches: Callable[[str], bool]
    text: str
    asked: tuple[str, ...] = ()
    """The paths that were asked for, for an error that names similar ones."""

    def __call__(self, path: str) -> bool:
        return self.matches(path)


def held_instead(paths: Iterable[str], asked: Iterable[str]) -> str:
    """What a checkpoint with the leaves `paths` has at the top, and what is most like `asked`."""
    tops: dict[str, None] = {}
    held: dict[str, None] = {}
    for path in paths:
        parts = path.split("/")
        tops[parts[0] + "/" * (len(parts) > 1)] = None
        held |= dict.fromkeys("/".join(parts[:end]) for end in range(1, len(parts) + 1))
    shown = list(tops)[:MOST_SHOWN]
    text = ", ".join(shown) + (", ..." if len(tops) > len(shown) else "")
    near = [close for path in asked for close in get_close_matches(path, held, 1)]
    return f"{text}. Did you mean {', '.join(map(repr, near))}?" if near else f"{text}."


class Selection:
    """The leaves at some paths or patterns, and below them.

    `*` matches any text within one part of a path, the part `**` any number of parts: `*/bias`,
    `model/**/kernel`. Raises `ArgumentError` for no path or an empty one.
    """

    def __init__(self, leaves: str | Iterable[str]) -> None:
        several = isinstance(leaves, Iterable) and not isinstance(leaves, str)
        patterns: tuple[str, ...] = tuple(leaves) if several else (leaves,)  # type: ignore[assignment]
        if not patterns or not all(isinstance(each, str) and each for each in patterns):
            raise ArgumentError(
                f"leaves: expected the path of a leaf or of a branch, a pattern such as 'model/**', or "
                f"several of them, found {leaves!r}."
            )
        self.patterns = tuple(dict.fromkeys(patterns))
        self._regex = re.compile("|".join(map(_regex, self.patterns)), re.DOTALL)
        self._prefixes = [_leading_parts(pattern) for pattern in self.patterns]

    def matches(self, path: str) -> bool:
        """Whether the leaf or the branch at `path` is selected as a whole."""
        return self._regex.fullmatch(path) is not None

    def may_hold(self, path: str) -> bool:
        """Whether something below `path` may be selected."""
        parts = path.split("/") if path else []
        return any(
            all(
                re.fullmatch(regex, part, re.DOTALL)
                for regex, part in zip(prefix, parts, strict=False)
            )
            for prefix in self._prefixes
        )

    def unused(self, paths: Iterable[str]) -> list[str]:
        """The patterns that select none of `paths`."""
        paths = list(paths)
        return [
            pattern
            for pattern in self.patterns
            if not any(map(re.compile(_regex(pattern), re.DOTALL).fullmatch, paths))
        ]


def _part(pattern: str) -> str:
    return "[^/]*".join(map(re.escape, pattern.split("*")))


def _regex(pattern: str) -> str:
    """The regular expression of what `pattern` selects."""
    parts = pattern.split("/")
    while parts and parts[-1] == "**":
        parts.pop()
    if not parts:
        return ".*"
    above = "".join("(?:[^/]+/)*" if part == "**" else f"{_part(part)}/" for part in parts[:-1])
    return f"{above}{_part(parts[-1])}(?:/.*)?"


def _leading_parts(pattern: str) -> list[str]:
    """The regular expressions of the parts in front of the first `**`."""
    parts = pattern.split("/")
    return [_part(part) for part in (parts[: parts.index("**")] if "**" in parts else parts)]
