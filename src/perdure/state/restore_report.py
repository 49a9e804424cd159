"""`RestoreReport`: how a restored state differs from the checkpoint that it came from."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RestoreReport:
    """What a restore did with the leaves that it could not restore as they are.

    Every path is one of the target, after a `rename`. `str` of the report is text for people.

    Attributes:
        missing: Leaves and objects of the target that the checkpoint lacks. They keep their value.
        unexpected: Leaves of the checkpoint that the target lacks. They were ignored.
        mismatched: Leaves with another shape or dtype in the checkpoint, and objects that cannot take
            the state that was stored. They keep their value.
        kept_whole: Optimizers, generators and other objects that keep their whole state, because a part
            of it is in one of the fields above, or the parameters of the optimizer are.
        renamed: Leaves that have another path in the checkpoint.
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
