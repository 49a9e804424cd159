"""What a checkpoint has about the journal: step and hash of the last line up to its step.

Lines are durable before the checkpoint that follows them is committed. So a journal that lacks the
line to which a checkpoint refers has lost lines, or is another one. Its own hashes cannot show that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from perdure.errors import CorruptionError
from perdure.store.journal_file import JOURNAL, REPAIR_ADVICE, JournalLine, read_journal
from perdure.store.leaf import Leaf
from perdure.store.local import LocalStorage
from perdure.store.manifest import Manifest
from perdure.store.storage import Storage

JOURNAL_LEAF = "journal"
"""The path of the reference among the process leaves of a manifest."""


class LineReference(NamedTuple):
    """Step and hash of a line."""

    step: int
    hash: str


def reference_leaf(line: LineReference) -> Leaf:
    """A reference as a process leaf of a checkpoint."""
    text = msgspec.json.encode({"step": line.step, "hash": line.hash})
    return Leaf("py:str", (), memoryview(text), frozen=True)


def line_reference(manifest: Manifest) -> LineReference | None:
    """The line to which a checkpoint refers; None if it was saved without a journal."""
    for leaf in manifest.process_leaves:
        if leaf.path == JOURNAL_LEAF and leaf.text is not None:
            try:
                fields = msgspec.json.decode(leaf.text, type=dict[str, int | str])
                return LineReference(int(fields["step"]), str(fields["hash"]))
            except (ValueError, KeyError):
                return None  # what another program has put there
    return None


def without_reference(manifest: Manifest) -> Manifest:
    """The same checkpoint for a run directory whose journal lacks the line, or that has none."""
    leaves = tuple(leaf for leaf in manifest.process_leaves if leaf.path != JOURNAL_LEAF)
    if len(leaves) == len(manifest.process_leaves):
        return manifest
    return msgspec.structs.replace(manifest, process_leaves=leaves)


def checked_lines(
    lines: Iterable[JournalLine], where: str, references: Mapping[int, LineReference]
) -> Iterator[JournalLine]:
    """The lines of a journal, which must be those to which checkpoints refer.

    Args:
        lines: All lines.
        where: The run directory, for the error.
        references: The references by the step of their checkpoint.

    Raises:
        CorruptionError: At the end, if a line is not there.
    """
    wanted = {line: step for step, line in references.items()}
    steps = {line.step for line in wanted}
    newest = -1
    for line in lines:
        newest = line.entry.step
        if newest in steps:
            wanted.pop(LineReference(newest, line.hash), None)
        yield line
    if wanted:
        (step, _), checkpoint = min(wanted.items())
        found = "has another line there, or none: it is the journal of another run"
        if newest < step:
            ends = f"ends with step {newest}" if newest >= 0 else "is empty or gone"
            found = f"{ends}: the lines up to step {max(wanted).step} are lost"
        raise CorruptionError(
            f"{where}/{JOURNAL}: the checkpoint of step {checkpoint} was saved after the line of step "
            f"{step}, and the journal {found}.{REPAIR_ADVICE}"
        )


def journal_lines(
    storage: Storage, references: Mapping[int, LineReference]
) -> Iterator[JournalLine]:
    """The `checked_lines` of a run directory; one in a bucket has no journal.

    Read the references before: those of a running training refer to lines that are there.

    Raises:
        CorruptionError: A line was changed, or a line to which a checkpoint refers is not there.
    """
    if isinstance(storage, LocalStorage):
        yield from checked_lines(read_journal(storage), storage.where, references)


def journal_problem(storage: Storage, references: Mapping[int, LineReference]) -> str | None:
    """What is wrong with the journal of a run directory; None for nothing.

    Args:
        storage: The run directory.
        references: As for `checked_lines`.

    Raises:
        UnreachableError: The journal cannot be read.
    """
    try:
        for _ in journal_lines(storage, references):
            pass
    except CorruptionError as error:
        return str(error)
    return None


def lost_references(storage: Storage, references: Mapping[int, LineReference]) -> list[int]:
    """The steps of the checkpoints that refer to lines which the readable part of a journal lacks."""
    if not isinstance(storage, LocalStorage):
        return []
    lines: set[LineReference] = set()
    wanted = set(references.values())
    try:
        for line in read_journal(storage):
            lines |= wanted & {LineReference(line.entry.step, line.hash)}
    except CorruptionError:
        pass
    return sorted(step for step, line in references.items() if line not in lines)


def line_references(manifests: Iterable[Manifest]) -> dict[int, LineReference]:
    """The references of checkpoints by step, of those that have one."""
    found = ((manifest.step, line_reference(manifest)) for manifest in manifests)
    return {step: line for step, line in found if line is not None}
