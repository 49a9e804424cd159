"""The folder `quarantine/`: manifests and packs that were set aside. The log says why.

Invariant: the line that says why is durable before an object moves.
"""

from __future__ import annotations

from collections.abc import Collection

from perdure.store.format import QUARANTINE, TEMP_SUFFIX
from perdure.store.run_log import RunLog, SetAside
from perdure.store.storage import Storage


def quarantined(storage: Storage) -> list[str]:
    """Names of what is in quarantine: manifests, packs and logs that a repair set aside."""
    return sorted(name for name in storage.list(QUARANTINE) if not name.endswith(TEMP_SUFFIX))


def free_name(taken: Collection[str], stem: str, suffix: str) -> str:
    """A name in quarantine, `quarantine/STEM-NUMBER` and `suffix`, that is not in `taken`."""
    names = (f"{QUARANTINE}{stem}-{number}{suffix}" for number in range(len(taken) + 1))
    return next(name for name in names if name not in taken)


def set_aside(storage: Storage, log: RunLog, name: str, reason: str, time: str) -> str:
    """Move `name` to quarantine because of damage; returns its new name, durable on return.

    Raises:
        CorruptionError: The log is damaged.
        OSError: The object cannot be moved.
    """
    stem, _, suffix = name.rpartition("/")[2].partition(".")
    target = free_name([*storage.list(QUARANTINE)], stem, f".{suffix}")
    log.append(SetAside(name=name, to=target, reason=reason, time=time))
    storage.move(name, target)
    return target
