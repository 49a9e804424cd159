"""Lists the objects of a run directory: committed steps, pins, and the quarantine."""

from __future__ import annotations

import re

from perdure.store.format import (
    MANIFESTS,
    PACKS,
    PINS,
    QUARANTINE,
    TEMP_SUFFIX,
    is_temporary,
    manifest_name,
    step_of,
)
from perdure.store.storage import Storage

# What users copy to other names there has no line.
_MOVED = re.compile(
    re.escape(QUARANTINE) + r"[0-9]{12}(-[0-9]+\.json|-[0-9]{5}-[0-9a-f]{8}-[0-9]+\.pack)"
)


def committed_steps(storage: Storage) -> list[int]:
    """Steps that have a manifest, oldest first."""
    return sorted(step for name in storage.list(MANIFESTS) if (step := step_of(name)) is not None)


def steps_from(storage: Storage, step: int) -> list[int]:
    """Committed steps that are not below `step`, oldest first. Costs no more than those."""
    names = storage.entries(MANIFESTS, manifest_name(step - 1) if step else "")
    return sorted(other for name in names if (other := step_of(name)) is not None)


def newest_step(storage: Storage) -> int | None:
    """The newest committed step."""
    return max(committed_steps(storage), default=None)


def pinned_steps(storage: Storage) -> frozenset[int]:
    """Steps that no deletion may touch."""
    names = (name.removeprefix(PINS) for name in storage.list(PINS))
    return frozenset(int(name) for name in names if name.isdecimal())


def quarantined(storage: Storage) -> list[str]:
    """Names of the objects in quarantine: manifests, packs and logs that a repair set aside."""
    return sorted(name for name in storage.list(QUARANTINE) if not name.endswith(TEMP_SUFFIX))


def moved_aside(storage: Storage) -> list[str]:
    """Names of the manifests and packs in quarantine. The log has a line before one moves there."""
    return sorted(filter(_MOVED.fullmatch, storage.list(QUARANTINE)))


def step_aside(name: str) -> int | None:
    """The step of a manifest in quarantine, by its name."""
    digits, _, rest = name.removeprefix(QUARANTINE).partition("-")
    return int(digits) if digits.isdecimal() and rest.endswith(".json") else None


def leftovers(storage: Storage) -> list[str]:
    """Temporary files of writers that did not finish."""
    folders = (MANIFESTS, PACKS, PINS, QUARANTINE)
    return sorted(name for folder in folders for name in storage.list(folder) if is_temporary(name))
