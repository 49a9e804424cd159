"""Taking out one guard of the strategies at a time, so that the demo can be seen to FAIL.

This is what perdure keeps a user from: random numbers that follow the device, and sums whose order
follows the number of devices.
"""

from __future__ import annotations

from typing import Any


def take_out(guard: str, strategy: Any, engine: str) -> None:
    """Damage `strategy` for good."""
    raise NotImplementedError
