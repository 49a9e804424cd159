"""What the text of an error must name, whatever its wording."""

from __future__ import annotations


def unnamed(error: object, *parts: str) -> list[str]:
    """The steps, paths, values and key phrases that the text of an error does not contain."""
    return [part for part in parts if part not in str(error)]
