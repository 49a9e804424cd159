"""`Renaming`: the leaves of a checkpoint under the paths that they have in a target."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TypeVar

from perdure.errors import ArgumentError, MismatchError
from perdure.state.paths import ancestors, join_part
from perdure.store.leaf import Leaves

T = TypeVar("T")


class Renaming:
    """Moves leaves and branches from the paths of a checkpoint to those of a target.

    All renames happen at once, so that two branches may change places. Of several that apply to a leaf,
    the one with the longest stored path counts. The path "" is the state itself.

    Args:
        paths: the path in the target by the path in the checkpoint.

    Raises:
        ArgumentError: `paths` is no mapping from strings to strings.
    """

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
                rest = path[len(old) :].removeprefix("/")
                return join_part(new, rest) if rest else new
        return path

    def rename(self, values: Mapping[str, T]) -> dict[str, T]:
        """`values` by their paths in the target."""
        return {self(path): value for path, value in values.items()} if self else dict(values)

    def check(self, leaves: Collection[str], containers: Collection[str]) -> None:
        """Raise `MismatchError` unless every rename moves something, and no two leaves meet.

        Args:
            leaves: the paths of all leaves of the checkpoint.
            containers: the paths of the values whose container it describes: the states of objects.
        """
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
        for old in leaves:
            if (other := sources.setdefault(self(old), old)) != old:
                raise MismatchError(
                    f"rename: {other!r} and {old!r} of the checkpoint would both become "
                    f"{self(old)!r}; nothing was changed. Rename one of them to another path."
                )
        for new, old in sources.items():
            if above := [path for path in ancestors(new) if path != new and path in sources]:
                raise MismatchError(
                    f"rename: {old!r} would become {new!r}, below {above[0]!r}, which is a leaf; "
                    f"nothing was changed. Rename one of them to another path."
                )

    def leaves(self, leaves: Leaves) -> Leaves:
        """`leaves`, and the containers of the objects in them, by their paths in the target."""
        return Leaves(self.rename(leaves), self.rename(leaves.containers)) if self else leaves
