"""The little of ml_collections that Flax's example uses."""

from typing import Any


class ConfigDict(dict[str, Any]):
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]
