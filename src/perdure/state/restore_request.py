"""`RestoreRequest`: what the caller of a restore asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from perdure.errors import ArgumentError
from perdure.state.renaming import Renaming
from perdure.store.selection import Selection, WantedLeaves


class RestoreRequest(NamedTuple):
    """The keyword arguments of a restore, checked. Paths in `selection` are those of the target."""

    selection: Selection | None = None
    strict: bool = True
    renaming: Renaming = Renaming(None)
    cast: bool = False

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
