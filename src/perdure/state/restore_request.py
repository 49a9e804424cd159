"""What the caller of a restore asked for, with renames, and the report of what a restore did."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from perdure.errors import ArgumentError, MismatchError
from perdure.state.paths import ancestors, below, join_part
from perdure.store.selection import Selection, WantedLeaves

T = TypeVar("T")


class Renaming:
    """Moves leaves and branches from paths of a checkpoint to paths of a target, all at once. The
    longest stored path that fits a leaf counts; "" is the state itself."""

    def __init__(self, paths: Mapping[str, str] | None) -> None:
        paths = {} if paths is None else paths
        if not isinstance(paths, Mapping) or not all(
            isinstance(path, str) for pair in paths.items() for path in pair
        ):
            raise ArgumentError(
                f"rename: expected a mapping from paths of the checkpoint to paths of the target, "
                f"found {paths!r}."
            )
        self.paths = dict(paths)

    def __bool__(self) -> bool:
        return bool(self.paths)

    def __call__(self, path: str) -> str:
        """The path in the target."""
        for old in ancestors(path) if self.paths else ():
            if (new := self.paths.get(old)) is not None:
                return join_part(new, below(path, old))
        return path

    def rename(self, values: Mapping[str, T]) -> dict[str, T]:
        """`values` by their paths in the target."""
        return {self(path): value for path, value in values.items()} if self else dict(values)

    def check(self, leaves: Collection[str], containers: Collection[str]) -> None:
        """Raise `MismatchError` unless every rename moves something, no object is split and no
        leaves meet."""
        branches = {branch for path in leaves for branch in ancestors(path)}.union(containers)
        objects = {self(path) for path in containers}
        for old, new in self.paths.items():
            if old not in branches:
                close = difflib.get_close_matches(old, branches, 3)
                raise MismatchError(
                    f"rename: the checkpoint has no leaf or branch {old!r}; nothing was changed. "
                    + (f"Did you mean {' or '.join(map(repr, close))}? " if close else "")
                    + "`perdure show` and `manager.metadata()` list what it has."
                )
            inside = [above for above in ancestors(old) if above in containers and above != old]
            inside += [above for above in ancestors(new) if above in objects and above != new]
            if inside and old != new:
                raise MismatchError(
                    f"rename: {old!r} to {new!r} would change the inside of the object at "
                    f"{inside[-1]!r}, which is restored as a whole; nothing was changed. Rename only "
                    f"the object itself."
                )
        sources: dict[str, str] = {}
        meeting: list[str] = []
        for old in leaves:
            if (other := sources.setdefault(self(old), old)) != old:
                meeting.append(f"{other!r} and {old!r} would both become {self(old)!r}")
        for new, old in sources.items():
            if above := [path for path in ancestors(new) if path != new and path in sources]:
                meeting.append(f"{old!r} would become {new!r}, below {above[0]!r}, which is a leaf")
        if meeting:
            raise MismatchError(
                f"rename: {meeting[0]}; nothing was changed. Rename one of them to another path."
            )


class RestoreRequest(NamedTuple):
    """The keyword arguments of a restore, checked. Paths in `selection` are paths of the target."""

    selection: Selection | None = None
    strict: bool = True
    renaming: Renaming = Renaming(None)
    cast: bool = False
    resumes: bool = False
    """Whether a run resumes with these members, while other code restores the rest: then the extra
    members are restored as well."""

    @classmethod
    def of(
        cls,
        like: Any,
        leaves: str | Iterable[str] | None,
        strict: bool,
        rename: Mapping[str, str] | None,
        cast: bool,
    ) -> RestoreRequest:
        """Raises `ArgumentError` for a value that cannot be used."""
        if like is None and not (strict and not cast):
            raise ArgumentError(
                f"{'cast=True' if strict else 'strict=False'}: expected a target to compare the "
                f"checkpoint with, found none; give `like`."
            )
        selection = None if leaves is None else Selection(leaves)
        return cls(selection, bool(strict), Renaming(rename), bool(cast))

    @property
    def is_strict(self) -> bool:
        """Whether the whole target and the whole checkpoint have to be equal in all but names."""
        return self.selection is None and self.strict and not self.cast

    def wanted(self) -> WantedLeaves | None:
        """The leaves of the checkpoint that have to be read; None for all."""
        if self.selection is None:
            return None
        text = f"leaves={', '.join(map(repr, self.selection.patterns))}"
        if self.renaming:
            text += f", which are paths of the target, after rename={self.renaming.paths}"
        return WantedLeaves(self.wants, text, self.selection.patterns)

    def wants(self, path: str) -> bool:
        """Whether the leaf at `path` of the checkpoint has to be read."""
        return self.selection is None or self.selection.matches(self.renaming(path))


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did with the leaves that it could not restore as they are; `str` of it is for
    people.

    Attributes:
        missing: Leaves and objects of the target that the checkpoint lacks. They keep their value.
        unexpected: Leaves of the checkpoint that the target lacks. They were ignored.
        mismatched: Leaves with another shape or dtype in the checkpoint, and objects that cannot
            take the state that was stored. They keep their value.
        kept_whole: Objects, such as optimizers, that keep their whole state, because a part of it
            or their parameters are in one of the fields above.
        renamed: Leaves that have another path in the checkpoint. All paths are those of the target.
        cast: Leaves that were converted to the dtype of the target.
        leaves: The patterns that were asked for; empty if everything was.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    kept_whole: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    text: str = field(default="", repr=False)
    """A line for each path, except those in `renamed`; of many, the first."""

    @property
    def is_exact(self) -> bool:
        """Whether the state is that of the whole checkpoint, bit for bit."""
        return not (self.leaves or self.cast or self.has_differences)

    @property
    def has_differences(self) -> bool:
        """Whether target and checkpoint differ, so that `strict=True` would have raised."""
        return bool(self.missing or self.unexpected or self.mismatched or self.kept_whole)

    def __str__(self) -> str:
        if self.is_exact and not self.renamed:
            return "every leaf was restored."
        counts = {
            "other shape or dtype, value kept": self.mismatched,
            "not in the checkpoint, value kept": self.missing,
            "not in the target, ignored": self.unexpected,
            "kept as a whole": self.kept_whole,
            "cast": self.cast,
            "renamed": self.renamed,
        }
        parts = [f"{what}: {len(paths):,}" for what, paths in counts.items() if paths]
        if self.leaves:
            parts.insert(0, f"asked for {', '.join(self.leaves)} only")
        return "; ".join(parts) + (f":\n{self.text}" if self.text else ".")
