"""Reading every byte of a run directory, and reporting what is wrong with it. Changes nothing.

A writer may be at work meanwhile: what it moved or deleted is read again, and not reported. A file that
cannot be read is reported as such and not as damaged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from perdure.errors import (
    CorruptionError,
    FormatVersionError,
    HistoryError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store.failures import DamagedChunk, UnreadChunk, is_gone, read_error
from perdure.store.format import (
    MANIFESTS,
    MARKER,
    PACKS,
    TEMP_SUFFIX,
    manifest_name,
    pack_step,
    step_of,
)
from perdure.store.log import log_place
from perdure.store.manifest import Chunk, Manifest
from perdure.store.manifest_json import UNTIL_VERIFIED
from perdure.store.names import leftovers
from perdure.store.pack_index import TRAILER_BYTES, PackedChunk, decode_pack_index, index_span
from perdure.store.reader import Wanted, check_each, grouped, packed
from perdure.store.rollback import decode_aside
from perdure.store.run import Run
from perdure.store.run_log import LOG, REPAIR_ADVICE, line_references, read_journal
from perdure.store.run_marker import FOLDER_MARK, folder_problem, other_run
from perdure.store.storage import confirmed
from perdure.store.view import View


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `harmful` to a checkpoint, or `unread`: nobody knows."""

    name: str
    what: str
    harmful: bool = True
    unread: bool = False


@dataclass(frozen=True)
class VerifyReport:
    """What a full check found.

    Attributes:
        where: Path or URL of the run directory.
        good: Steps that can be restored.
        bad: Steps that are damaged.
        chunks: How many chunks were read and are good.
        nbytes: Bytes of the packs.
        decoded_nbytes: Bytes of the decoded chunks.
        problems: Everything that is wrong.
        unread: Steps of which a part could not be read, so that it is not known whether they are good.
        foreign: Whether a file is that of another run, so that nothing is restored or repaired.
    """

    where: str
    good: tuple[int, ...]
    bad: tuple[int, ...]
    chunks: int
    nbytes: int
    decoded_nbytes: int
    problems: tuple[Problem, ...]
    unread: tuple[int, ...] = ()
    foreign: bool = False

    @property
    def ok(self) -> bool:
        """True when nothing harmful was found; a run without any checkpoint left is harmed."""
        return not any(problem.harmful for problem in self.problems)


@dataclass
class Packs:
    """The packs of a run: their good chunks, what is damaged, and what could not be read."""

    run: Run
    sizes: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    chunks: int = 0
    decoded_nbytes: int = 0
    _good: dict[str, dict[int, PackedChunk]] = field(default_factory=dict)

    def read_all(self) -> None:
        """Read every pack that is there now."""
        for name in sorted(self.run.storage.list(PACKS)):
            if pack_step(pack := name.removeprefix(PACKS)) >= 0:
                self._read(pack)

    def require(self, manifest: Manifest) -> None:
        """Raise `CorruptionError` unless every chunk is there, `UnreachableError` if unread."""
        where = f"{self.run.where}: step {manifest.step}"
        for pack in manifest.packs:
            if pack.name not in self.sizes:
                self._read(pack.name)
            if pack.name in self.unread:
                continue
            if pack.name not in self.sizes:
                raise CorruptionError(f"{where} needs {pack.name}, which is missing.")
            if self.sizes[pack.name] != pack.size and pack.name not in self.damaged:
                raise CorruptionError(
                    f"{where} expects {pack.name} to have {pack.size} bytes, "
                    f"found {self.sizes[pack.name]}."
                )
        unread: UnreachableError | None = None
        for leaf in manifest.every_leaf():
            for chunk, size in zip(leaf.chunks, leaf.sizes(), strict=True):
                try:
                    self._require_chunk(f"{where}, leaf {leaf.path!r}", manifest, chunk, size)
                except UnreachableError as error:
                    unread = error
        if unread is not None:
            raise unread

    def _require_chunk(self, where: str, manifest: Manifest, chunk: Chunk, size: int) -> None:
        name = manifest.packs[chunk.pack].name
        wanted = (chunk.hash, chunk.length, size)
        if self._good[name].get(chunk.offset) == wanted:
            return
        if name in self.unread:
            raise UnreachableError(f"{where}: {self.unread[name]}")
        # Perhaps only the index of the pack is damaged, which a restore does not need.
        ((_, error),) = _check(self.run, name, chunk.offset, [wanted])
        if isinstance(error, UnreadChunk):
            raise error
        if error is not None:
            raise CorruptionError(
                f"{where}: {name} does not hold chunk {chunk.hash[:16]} at offset {chunk.offset}."
            )
        self._good[name][chunk.offset] = wanted

    def _read(self, name: str) -> None:
        try:
            size = self.run.storage.size(PACKS + name)
        except ConnectionError:
            raise
        except OSError as error:
            if is_gone(error):
                return
            self._good[name] = {}
            self.unread[name] = str(read_error(error, f"{self.run.where}/{PACKS}{name}"))
            return
        self.sizes[name] = size
        good = self._good.setdefault(name, {})
        try:
            for offset, chunk in _read_pack(self.run, name, size):
                if isinstance(chunk, CorruptionError):
                    self.damaged.setdefault(name, str(chunk))
                elif isinstance(chunk, UnreachableError):
                    self.unread.setdefault(name, str(chunk))
                else:
                    good[offset] = chunk
        except CorruptionError as error:
            if _is_missing(error):  # deleted by a prune while it was read
                del self.sizes[name]
            else:
                self.damaged.setdefault(name, str(error))
        except UnreachableError as error:
            self.unread.setdefault(name, str(error))
        self.chunks += len(good)
        self.decoded_nbytes += sum(size for _, _, size in good.values())


def verify_run(run: Run) -> VerifyReport:
    """Read and hash all manifests, packs and indexes, and compare them with each other.

    Problems are harmful if a manifest or a pack is not exactly what was committed, is missing, or
    cannot be read. Leftovers of a crash, packs that no manifest needs, pins of steps that are not
    there, and what is in quarantine are reported as harmless.

    Args:
        run: The run; no lock is taken.

    Returns:
        What was found.

    Raises:
        FormatVersionError: A newer perdure wrote the run. This does not mean damage.
        UnreachableError: The storage does not answer, or a directory cannot be listed. This does not
            mean damage either.
    """
    try:
        return examine(run)[0]
    except OSError as error:
        raise UnreachableError(f"{run.where}: the check stopped: {error}.") from error


def examine(run: Run) -> tuple[VerifyReport, dict[int, str], dict[str, str], list[str]]:
    """`verify_run`, and what a repair needs: why steps are bad, why packs are damaged, and which
    checkpoints in quarantine are whole again, the last ones first."""
    packs = Packs(run)
    before = run.steps()
    packs.read_all()
    good: list[int] = []
    bad: dict[int, str] = {}
    unread: dict[int, str] = {}
    needed: set[str] = set()
    unreadable = False
    for step in sorted({*before, *run.steps()}):
        manifest, error = _judge(run, step, packs)
        if error is not None:
            reason = str(error).removesuffix(UNTIL_VERIFIED)
            (unread if isinstance(error, UnreachableError) else bad)[step] = reason
        elif manifest is not None:
            good.append(step)
        if manifest is not None:
            needed |= {pack.name for pack in manifest.packs}
        unreadable |= manifest is None and error is not None
    aside = dict(_judge_aside(run, packs))
    view = run.contents()
    for manifest in (*view.manifests.values(), *view.quarantined.values()):
        needed |= {pack.name for pack in manifest.packs}
    damaged = {name: why for name, why in packs.damaged.items() if name in view.packs}
    for name, reason in damaged.items():
        run.directory.distrust_pack(name, reason)
    problems = [Problem(PACKS + name, why) for name, why in sorted(damaged.items())]
    problems += [Problem(f"step {step}", why) for step, why in bad.items()]
    not_read = {name: why for name, why in packs.unread.items() if name in view.packs}
    problems += [Problem(PACKS + name, why, unread=True) for name, why in sorted(not_read.items())]
    problems += [Problem(f"step {step}", why, unread=True) for step, why in unread.items()]
    problems += [
        Problem(name, str(error), unread=isinstance(error, UnreachableError))
        for name, error in aside.items()
    ]
    if why := folder_problem(run.storage, run.log.run) or view.nothing_left():
        problems.append(Problem(MANIFESTS, why))
    whole = _whole_again(packs, view)
    for name in whole:
        what = (
            "`perdure verify --repair` returns it"
            if fits(view, name)
            else "the run went on without"
        )
        problems.append(Problem(name, f"set aside as damaged, and whole again: {what}", False))
    if not unreadable and not view.unknown:
        for name in sorted((packs.sizes.keys() & view.packs.keys()) - needed - damaged.keys()):
            step = pack_step(name)
            lost = f"if step {step} should be there, bring its manifest back before a later save"
            problems.append(Problem(PACKS + name, f"no checkpoint needs this pack; {lost}", False))
    problems += _notes(run, frozenset({*good, *bad, *unread}), {*aside, *whole})
    report = VerifyReport(
        where=run.where,
        good=tuple(good),
        bad=tuple(bad),
        chunks=packs.chunks,
        nbytes=sum(packs.sizes.values()),
        decoded_nbytes=packs.decoded_nbytes,
        problems=tuple(problems),
        unread=tuple(unread),
        foreign=view.foreign is not None,
    )
    return report, bad, damaged, whole


def _whole_again(packs: Packs, view: View) -> list[str]:
    """The names of checkpoints that were set aside as damaged and are whole, the last ones first."""
    whole: dict[str, int] = {}
    for name, manifest in view.quarantined.items():
        if (why := view.log.aside.get(name)) is not None and why.rolled_back_to is None:
            with suppress(CorruptionError, UnreachableError):
                packs.require(manifest)
                whole[name] = why.line
    return sorted(whole, key=lambda name: -whole[name])


def fits(view: View, name: str) -> bool:
    """Whether a checkpoint that was set aside as damaged still is of the one line of steps.

    Then all that is there was saved before it was set aside, and no rollback went below it since.
    """
    log, manifest = view.log, view.quarantined[name]
    step, line = manifest.step, log.aside[name].line
    for other in reversed(view.steps):  # a newer one, if any, decides without reading the others
        reference = view.manifest(other).log if other in view.readable else None
        if other == step or reference is None or reference.number >= line:
            return False
    rollbacks = (why.rolled_back_to for why in log.aside.values() if why.line > line)
    is_cut = any(last >= step for _, last in log.journal.steps_aside())
    is_below = any(target is not None and target < step for target in rollbacks)
    return not (is_cut or is_below or log.lost(line_references([manifest])))


def _judge(run: Run, step: int, packs: Packs) -> tuple[Manifest | None, StoreError | None]:
    """The manifest of a step if it can be read, and what is wrong; (None, None) if the step is gone."""
    manifest: Manifest | None = None
    problem: StoreError | None = None
    while True:
        try:
            again = run.manifest(step)
        except StepNotFoundError:
            return None, None
        except (CorruptionError, HistoryError, UnreachableError) as error:
            if isinstance(error.__cause__, ConnectionError):
                raise  # the next file could not be read either
            return None, error
        if again == manifest:
            return manifest, problem
        manifest, problem = again, None
        try:
            packs.require(manifest)
            return manifest, None
        except (CorruptionError, UnreachableError) as error:
            # A prune may have moved the chunks; then the manifest has changed.
            problem = error


def _judge_aside(run: Run, packs: Packs) -> Iterator[tuple[str, StoreError]]:
    """The checkpoints that rollbacks set aside and that cannot return: their names, and why."""
    view = run.log.view
    for name in filter(view.is_rolled_back, run.quarantined()):
        what = f"{view.aside[name].reason}, and does not return"
        try:
            manifest = decode_aside(run.storage, name)
            if (problem := other_run(manifest, run.log.run, name)) is not None:
                raise CorruptionError(problem)
            packs.require(manifest)
        except FileNotFoundError:
            continue  # a prune removed it
        except ConnectionError:
            raise
        except OSError as error:
            yield name, read_error(error, f"{what}: {run.where}/{name}")
        except UnreachableError as error:
            yield name, UnreachableError(f"{what}: {error}")
        except (CorruptionError, FormatVersionError) as error:
            if name not in run.quarantined():
                continue  # it returned, or a prune removed it
            reason = str(error).removesuffix(UNTIL_VERIFIED)
            advice = f"Bring the file back from a copy, or remove {name} if you do not need it."
            yield name, CorruptionError(f"{what}: {reason} {advice}")


def _notes(run: Run, steps: frozenset[int], reported: Collection[str] = ()) -> Iterator[Problem]:
    for name in leftovers(run.storage):
        yield Problem(name, "left by a writer that did not finish", False)
    if (origin := run.log.unfinished) is not None:
        yield Problem(MARKER, f"the run was to be made from {origin}, which did not end", False)
    place = log_place(run.storage, LOG)
    try:
        aside = run.log.view.aside
        for name in sorted({*run.quarantined()}.difference(reported)):
            yield Problem(name, aside[name].reason if name in aside else "in quarantine", False)
        problem = _log_problem(run)
        if problem is not None and (problem := _log_problem(run)) is not None:
            yield Problem(place, problem)  # a training may have written both since they were listed
    except UnreachableError as error:
        yield Problem(place, str(error), unread=True)
    for step in sorted(run.pinned() - steps):
        advice = f"bring {manifest_name(step)} back from a copy, or call `manager.unpin({step})`"
        yield Problem(f"step {step}", f"is pinned, and is not there: {advice}")
    for name in sorted(run.storage.list(MANIFESTS)):
        is_ours = name.endswith(TEMP_SUFFIX) or name == f"{MANIFESTS}{FOLDER_MARK}"
        if step_of(name) is None and not is_ours:
            yield Problem(name, "not a manifest's name; remove it by hand", False)


def _log_problem(run: Run) -> str | None:
    """What is wrong with the log, whose lines are all read and decoded; None for nothing."""
    references = line_references(run.contents().manifests.values())
    if problem := run.log.view.problem_with(references):
        return problem
    try:
        for _ in read_journal(run.storage):
            pass
    except CorruptionError as error:
        return f"{error}{REPAIR_ADVICE}"
    return None


def _read_pack(
    run: Run, pack: str, size: int
) -> Iterator[tuple[int, PackedChunk | DamagedChunk | UnreadChunk]]:
    """(offset, chunk) of every chunk of a pack that is what its hash says; the error for another."""

    def read_index() -> tuple[PackedChunk, ...]:
        where = f"{run.where}/{PACKS}{pack}"
        trailer = _read(run, pack, max(0, size - TRAILER_BYTES), min(size, TRAILER_BYTES))
        start, length = index_span(trailer, size, where)
        return decode_pack_index(_read(run, pack, start, length), trailer, start, where)

    index = confirmed(run.storage, PACKS + pack, read_index)
    for chunk, error in _check(run, pack, 0, index):
        if error is not None and _is_missing(error):
            raise error
        yield chunk.offset, error or (chunk.hash, chunk.length, chunk.size)


def _check(
    run: Run, pack: str, offset: int, chunks: Iterable[PackedChunk]
) -> Iterator[tuple[Wanted, DamagedChunk | UnreadChunk | None]]:
    """Each chunk, and why a restore could not use it; an outage stops the whole check."""
    wanted = packed(pack, offset, chunks)
    for chunk, error in check_each(run.storage, grouped(run.where, wanted)):
        if error is not None and isinstance(error.__cause__, ConnectionError):
            raise error.__cause__
        yield chunk, error


def _read(run: Run, pack: str, offset: int, length: int) -> bytes:
    """A part of a pack that is no chunk."""
    data = bytearray(length)
    try:
        got = run.storage.read_into(PACKS + pack, offset, memoryview(data))
    except ConnectionError:
        raise
    except OSError as error:
        raise read_error(error, f"{run.where}/{PACKS}{pack} at offset {offset}") from error
    if got != length:
        raise CorruptionError(
            f"{run.where}/{PACKS}{pack}: expected {length} bytes at offset {offset}, found {got}."
        )
    return bytes(data)


def _is_missing(error: StoreError) -> bool:
    """Whether a pack is gone, rather than damaged."""
    return isinstance(error.__cause__, FileNotFoundError)
