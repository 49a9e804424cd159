"""Every error that perdure raises on purpose; the bases are what a caller would catch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class PerdureError(Exception):
    """Base of every error raised on purpose by perdure."""


class StoreError(PerdureError):
    """A run directory cannot be used as asked."""


class NotARunError(StoreError):
    """The path holds no run directory."""


class FormatVersionError(StoreError):
    """The run directory needs a newer perdure than this one."""


class StepNotFoundError(StoreError):
    """The run directory holds no checkpoint of that step."""


class HistoryError(StoreError):
    """A save at or below the newest committed step, or a rollback that cannot be done or undone."""


class StepExistsError(HistoryError):
    """That step is already committed, with other bits."""


class LockedError(StoreError):
    """Another writer writes to this run directory, or this process was forked from the writer."""


class CorruptionError(StoreError):
    """Bytes were read that do not match their hash or their schema."""


class NoGoodCheckpointError(CorruptionError):
    """Checkpoints exist, and none of them is readable."""


class UnreachableError(StoreError):
    """The storage cannot be read, retries included. Its contents are unknown; nothing was changed."""


class SaveError(StoreError):
    """A save did not commit. Every earlier checkpoint is still there."""


class PruneError(StoreError):
    """Deleting or compacting failed or stopped in the middle. What stays is readable."""


class StateError(PerdureError):
    """The live objects and the checkpoint do not fit together."""


class UnsupportedLeafError(StateError):
    """A value in the state has no exact form on disk."""


class MismatchError(StateError):
    """Structure, dtype or shape differ between the target and the checkpoint."""


class LeafNotFoundError(StepNotFoundError, MismatchError):
    """A checkpoint has none of the leaves that were asked for."""


class NonFiniteError(PerdureError):
    """A logical replica computed NaN or infinity; the state has not changed."""


class RecipeMismatchError(PerdureError):
    """The recipe of the run differs from that of the checkpoint, or between processes of a group."""


class JournalMismatchError(PerdureError):
    """A step was computed again, and its digest is not the one that the journal of the run has.

    Attributes:
        step: The step.
        what: What differs first, in the order of the computation: "batch", "total" or "state".
        expected: The digest in the journal.
        found: The digest of this process.
    """

    def __init__(
        self, text: str, step: int = -1, what: str = "", expected: str = "", found: str = ""
    ) -> None:
        super().__init__(text)
        self.step, self.what, self.expected, self.found = step, what, expected, found


class CorruptDevice(NamedTuple):
    """A device that an audit suspects; its number is the one in PERDURE_EXCLUDED_DEVICES."""

    host: str
    process: int
    device: int
    name: str

    def __str__(self) -> str:
        return f"device {self.device} ({self.name}) of process {self.process} on {self.host}"


class SilentCorruptionError(PerdureError):
    """Devices computed other bits for the same logical replica; the state has not changed.

    Attributes:
        step: The step, which is not in the state.
        replica: The logical replica.
        devices: The devices that were wrong; all that computed, if no majority decided.
        is_decided: Whether a majority named the devices that were wrong.
        leaf: Path of the first leaf that differs, in the contribution.
        bits: How many bits of this leaf differ.
    """

    def __init__(
        self,
        text: str,
        step: int = -1,
        replica: int = -1,
        devices: tuple[CorruptDevice, ...] = (),
        is_decided: bool = False,
        leaf: str = "",
        bits: int = 0,
    ) -> None:
        super().__init__(text)
        self.step, self.replica, self.devices = step, replica, devices
        self.is_decided, self.leaf, self.bits = is_decided, leaf, bits


class TopologyError(PerdureError):
    """Replicas, devices, processes or batch size do not fit together."""


class ClusterError(PerdureError):
    """The description of the cluster is incomplete or contradicts itself."""


class WorkerLostError(ClusterError):
    """A process of the group is gone; nothing was saved after it left."""


class LaunchError(PerdureError):
    """A run cannot be started or watched as asked."""


class DataError(PerdureError):
    """A dataset cannot be read, or cannot be addressed as asked."""


class TrainError(PerdureError):
    """The training loop cannot do what it was asked for."""


class ArgumentError(PerdureError, ValueError):
    """An argument has a value that cannot be used."""


class CommandError(LaunchError, ArgumentError):
    """The program that was named after `--` is not there, or cannot be executed."""


class MissingExtraError(PerdureError, ModuleNotFoundError):
    """A package that an extra of perdure brings is not installed."""


def missing_extra(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What to raise in place of `error`: the same with the extra to install."""
    if (error.name or "perdure").partition(".")[0] == "perdure":
        return error
    return MissingExtraError(
        f"{error.name} is not installed. Install the extra: pip install 'perdure[{extra}]'.",
        name=error.name,
    )


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import in the block what `extra` brings; MissingExtraError if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_extra(extra, error) from error


def warn_caller(text: str) -> None:
    """Issue a `UserWarning` at the innermost line of the stack that is not in perdure."""
    package = __name__.partition(".")[0]
    level = 2
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
