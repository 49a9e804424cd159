"""The steps of a save: prepare, write chunks, commit. Creating the manifest is the commit.

Invariant: committed checkpoints are one line of steps, and a save only adds to its end.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from perdure.errors import (
    CorruptionError,
    HistoryError,
    LockedError,
    SaveError,
    StepExistsError,
    StoreError,
    UnreachableError,
)
from perdure.store.codec import Encode
from perdure.store.entry_builder import StoredChunk
from perdure.store.failures import DamagedChunk
from perdure.store.format import (
    CHUNK_BYTES,
    EPOCH_ENDS,
    FORMAT,
    MAX_STEP,
    Metric,
    chunk_spans,
    manifest_name,
)
from perdure.store.gc_pause import SHORT_BYTES, gc_paused
from perdure.store.leaf import AnyLeaf, Leaf, containers_of, total_bytes
from perdure.store.loading import list_steps, read_manifest
from perdure.store.manifest import LeafEntry, Manifest, RecipeValue, fingerprint, plain_metrics
from perdure.store.manifest_json import HEAD_BYTES, checked_fingerprint, encode_checked
from perdure.store.names import committed_steps, steps_from
from perdure.store.pack_writer import Written, write_pack
from perdure.store.reader import verify_leaves
from perdure.store.run_events import Saved
from perdure.store.storage import LostLock, Storage, create_whole
from perdure.store.writer_session import WriterSession
from perdure.text import few, quoted

BYTES_PER_ENTRY = 384
"""Space for a leaf in the manifest, or for a chunk there and in the index of its pack."""
BYTES_PER_SAVE = 64 * 1024
"""Space for headers, directories and the file system's own blocks."""


@dataclass(frozen=True)
class PreparedSave:
    """A save that may go ahead: the step continues the run, and the disk has room for it.

    `stored_chunks` are the places of chunks that need not be written; `present` is the manifest of
    the step if the same state is committed, and `is_committed` says that nothing is written.
    """

    step: int
    leaves: Mapping[str, AnyLeaf]
    process_leaves: Mapping[str, AnyLeaf]
    stored_chunks: Mapping[str, StoredChunk]
    nbytes: int
    present: Manifest | None
    is_committed: bool


class Committer:
    """Commits checkpoints to the run directory whose writer `session` is."""

    def __init__(self, session: WriterSession, encode: Encode | None) -> None:
        self._session, self._damage = session, session.damage
        self._directory = session.directory
        self._storage, self._log = self._directory.storage, self._directory.log
        self._encode = encode

    @contextmanager
    def prepare(
        self, step: int, leaves: Mapping[str, AnyLeaf], process_leaves: Mapping[str, AnyLeaf]
    ) -> Iterator[PreparedSave]:
        """Begin a save whose chunks one process or several write; arguments and errors as of
        `Run.save`.

        In the `with` block the caller makes the chunks durable that `stored_chunks` lacks, and
        commits.
        """
        if not 0 <= step <= MAX_STEP:
            raise StoreError(
                f"{self._storage.where}: a step is an integer from 0 to {MAX_STEP}, found {step}."
            )
        size = total_bytes(leaves.values())
        with gc_paused(len(leaves) if size <= SHORT_BYTES else 0):
            try:
                self._session.begin()
                present, is_committed = self._committed(step, leaves, process_leaves)
                held = self._directory.stored_chunks()
                if not is_committed:
                    ensure_free_space(self._storage, leaves, size, process_leaves, held)
                yield PreparedSave(step, leaves, process_leaves, held, size, present, is_committed)
            except FileExistsError as error:
                self._directory.forget()
                raise LockedError(
                    f"{self._storage.where}: step {step} was committed by another writer while this "
                    f"one was saving it ({error}). Nothing was overwritten; stop one of the two."
                ) from error
            except SaveError:
                self._directory.forget()  # a group failed, perhaps because a pack is gone
                raise
            except (OSError, UnreachableError) as error:
                self._directory.forget()
                raise SaveError(self._failed(step, size, error)) from error

    def write_pack(
        self, step: int, leaves: Mapping[str, Leaf], process_leaves: Mapping[str, Leaf]
    ) -> Written:
        """Write the chunks that are not held, as one durable pack of this process."""
        while True:
            held = self._directory.stored_chunks()
            try:
                written = write_pack(
                    self._storage, step, leaves, held, self._encode, process_leaves
                )
            except DamagedChunk as error:  # a pack is gone: its chunks are written again
                self._directory.distrust(error)
                continue
            if self._directory.agrees(written.packs):
                return written
            # A pack has another size than when it was last looked at.
            self._directory.forget()

    def commit(
        self,
        save: PreparedSave,
        written: Written | None,
        recipe: Mapping[str, RecipeValue] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Manifest:
        """Commit a save whose chunks are durable; the returned manifest survives power loss.

        `written` is None if the save is committed already; then only missing `metrics` are added.
        """
        plain = plain_metrics(metrics or {})
        if written is None:
            present = save.present
            assert present is not None, "a save without chunks is of a committed step"
            if (merged := self._merged_metrics(present, plain)) != present.metrics:
                present = msgspec.structs.replace(present, metrics=merged)
                self.commit_manifest(present, {}, replace=True)
            return present
        if not self._directory.agrees(written.packs):
            raise OSError("a pack has another size than its checkpoints say")
        manifest = self._manifest(save, written, dict(recipe or {}), plain)
        self.commit_manifest(manifest, written.located, replace=save.present is not None)
        self._directory.durable.add(save.step)
        if save.present is None:
            self._damage.check_shared(manifest, save.leaves, save.nbytes)
        return manifest

    def commit_manifest(
        self, manifest: Manifest, located: Mapping[str, StoredChunk], *, replace: bool = False
    ) -> None:
        """Commit a manifest of this run whose chunks are durable; it survives power loss on return.

        With `replace` it takes the place of the manifest of that step, which must have its
        fingerprint.
        """
        name = manifest_name(manifest.step)
        with gc_paused(len(manifest.leaves)):
            # Constructors check nothing: what cannot be read back must never be committed.
            parts = encode_checked(manifest, f"{self._storage.where}: the manifest of this save")
        if replace:
            self._storage.replace(name, b"".join(parts))
        else:
            create_whole(self._storage, name, *parts)
        self._directory.added(manifest, bytes(parts[0][:HEAD_BYTES]), located)
        # What a later start has to know; the checkpoint counts without.
        if self._log.view.saved is None and self._log.view.problem is None and not replace:
            with suppress(OSError):
                self._log.append(Saved(step=manifest.step))
        self._session.committed_again(manifest.step)

    def _manifest(
        self,
        save: PreparedSave,
        written: Written,
        recipe: dict[str, RecipeValue],
        metrics: dict[str, Metric],
    ) -> Manifest:
        containers = containers_of(save.leaves)
        name = f"{self._storage.where}: the manifest of this save"
        created = self._session.now()
        if (present := save.present) is not None:
            # Saved again with other process leaves, as after an evaluation that drew random numbers:
            # everything else stays what it was.
            created, recipe = present.created, present.recipe
            metrics = self._merged_metrics(present, metrics)
        last_line = None
        try:
            last_line = self._log.sync()
        except OSError as error:
            note = f"{self._storage.where}: the log could not be made durable: {error}"
            self._damage.notes.append(note)
        assert self._log.run is not None, "a writer has written the marker"
        return Manifest(
            format=FORMAT,
            run=self._log.run,
            step=save.step,
            created=created,
            fingerprint=checked_fingerprint(written.packs, written.leaves, name),
            recipe=recipe,
            metrics=metrics,
            packs=tuple(written.packs),
            leaves=tuple(written.leaves),
            containers=containers,
            process_leaves=tuple(written.process_leaves),
            log=last_line,
        )

    def _committed(
        self, step: int, leaves: Mapping[str, AnyLeaf], process_leaves: Mapping[str, AnyLeaf]
    ) -> tuple[Manifest | None, bool]:
        """The manifest of `step` if it is committed, and whether it has all of these bits; else
        `HistoryError`.

        Other bits are allowed for a step that the last iteration of an epoch saved: what follows
        the loop may change the state, and this save takes the place of that one.
        """
        if not (later := steps_from(self._storage, step)):
            refused = None if self._session.starts_over else self._session.refusal
            if refused and (self._log.unfinished or not committed_steps(self._storage)):
                raise HistoryError(refused)
            return None, False
        steps = committed_steps(self._storage)
        if later[0] != step:
            reason = f"step {step} cannot be saved: the newest checkpoint is step {steps[-1]}"
            raise HistoryError(self._refused(step, reason, steps))
        try:
            present = read_manifest(self._storage, step, self._log.run)
        except CorruptionError as error:
            if step < steps[-1]:
                reason = f"step {step} is older than step {steps[-1]}, and damaged ({error})"
                raise HistoryError(self._refused(step, reason, steps)) from error
            self._damage.quarantine(step, str(error))
            return None, False
        rows = [(path, leaf.dtype, leaf.shape, leaf.hashes()) for path, leaf in leaves.items()]
        actual = fingerprint(rows)
        if actual != present.fingerprint and not self._follows(present, process_leaves):
            raise StepExistsError(self._other_bits(present, leaves, actual, steps))
        if not self._made_durable(present):
            return None, False
        kept = _bits((leaf.path, leaf) for leaf in present.process_leaves)
        is_same = not process_leaves or kept == _bits(process_leaves.items())
        return present, is_same and actual == present.fingerprint

    def _follows(self, present: Manifest, process_leaves: Mapping[str, AnyLeaf]) -> bool:
        """Whether an epoch has ended since this process has saved or read `present`."""
        known = present.step in self._directory.durable or present.step in self._directory.loaded
        ended = {leaf.path for leaf in present.process_leaves if leaf.path.endswith(EPOCH_ENDS)}
        return known and not ended and any(path.endswith(EPOCH_ENDS) for path in process_leaves)

    def _made_durable(self, present: Manifest) -> bool:
        """Verify a committed checkpoint and make it durable; False if it was damaged and set aside."""
        step = present.step
        if step in self._directory.durable:
            return True
        try:  # the manifest says what should be there; "saved" means that it is
            verify_leaves(self._storage, present)
        except CorruptionError as error:
            self._directory.distrust(error)
            self._damage.quarantine(step, str(error))
            return False
        # Its writer may have been killed, or failed, before the name was durable.
        name = manifest_name(step)
        self._storage.replace(name, self._storage.read(name))
        self._directory.durable.add(step)
        return True

    def _merged_metrics(
        self, present: Manifest, metrics: Mapping[str, Metric]
    ) -> dict[str, Metric]:
        """The metrics of a committed step, completed by new ones; a note on metrics that differ."""
        merged = dict(metrics) | present.metrics
        differing = [
            f"{name} is {merged[name]} there and {value} in this save"
            for name, value in sorted(metrics.items())
            if merged[name] != value
        ]
        if differing:
            self._damage.notes.append(
                f"{self._storage.where}: step {present.step} is committed with other metrics: "
                f"{', '.join(differing)}. Those of the checkpoint stay, and retention and @best judge "
                f"by them. Give a metric another name, or give it to the first save of the step."
            )
        return merged

    def _other_bits(
        self, present: Manifest, leaves: Mapping[str, AnyLeaf], actual: str, steps: list[int]
    ) -> str:
        """Why a save of `leaves` is refused: the step has other bits."""
        step = present.step
        stored = _bits((leaf.path, leaf) for leaf in present.leaves)
        mine = _bits(leaves.items())
        differing = sorted({path for path, _ in stored.items() ^ mine.items()})
        reason = (
            f"step {step} is committed with fingerprint {present.fingerprint[:16]}, this save has "
            f"{actual[:16]}; other bits at {few(differing, 3)}"
        )
        is_own = step in self._directory.durable
        if step < steps[-1] or not (is_own or step in self._directory.loaded):
            return self._refused(
                step,
                f"{reason}. A run that resumes exactly gives equal bits, so the recipe or the code "
                f"changed, or this run started elsewhere",
                steps,
            )
        before = "saved" if is_own else "read"
        return (
            f"{self._storage.where}: {reason}. This process has {before} step {step} before, and the "
            f"state has changed since. The checkpoint stays as it is, and a resume continues from it. "
            f"Save once per step, after the last change of the state, and under the number of steps "
            f"that are finished: `save(i + 1, state)` at the end of step i."
        )

    def _refused(self, step: int, reason: str, steps: list[int]) -> str:
        """Why a save of `step` is refused, and what to do instead."""
        where = self._storage.where
        older = [other for other in steps if other < step]
        advice = "save into another run directory"
        if older:
            advice = (
                f"either set the newer checkpoints aside: `manager.rollback({older[-1]})` or `perdure "
                f"rollback {where}@{older[-1]}`; or continue from step {older[-1]} in another run "
                f"directory: `perdure fork {quoted(where)}@{older[-1]} NEW`"
            )
        return (
            f"{where}: {reason}. The checkpoints of a run are one line of steps; nothing was changed. "
            f"A program that resumes begins its loop at the step that `restore_or_initialize` returns. "
            f"To train from elsewhere, {advice}."
        )

    def _failed(self, step: int, size: int, error: Exception) -> str:
        """Why a save failed, what is left, and what to do."""
        message = f"{self._storage.where}: saving step {step} failed: {error}."
        if isinstance(error, LostLock):
            return f"{message} It was not committed."
        try:
            steps = [other for other in list_steps(self._storage) if other != step]
            free = self._storage.free_bytes()
        except (OSError, UnreachableError):
            return (
                f"{message} Every earlier checkpoint is unchanged. Save again once the storage "
                f"answers."
            )
        room = "" if free is None else f", free space: {free} bytes"
        newest = (
            f"last good checkpoint is step {steps[-1]}" if steps else "run has no checkpoint yet"
        )
        return (
            f"{message} Size of the state: {size} bytes{room}; the {newest}. Free space or correct "
            f"the permissions, then save again."
        )


def _bits(leaves: Iterable[tuple[str, LeafEntry | AnyLeaf]]) -> dict[str, tuple[object, ...]]:
    """By path what is compared of leaves."""
    return {path: (leaf.dtype, tuple(leaf.shape), tuple(leaf.hashes())) for path, leaf in leaves}


def ensure_free_space(
    storage: Storage,
    leaves: Mapping[str, AnyLeaf],
    nbytes: int,
    process_leaves: Mapping[str, AnyLeaf],
    known: Collection[str],
) -> None:
    """Raise `OSError` (ENOSPC), with the bytes needed and free, if a save cannot fit.

    Known chunks are not written again, and only hashing tells which: so the whole state is compared
    first, and hashed only if that does not fit.
    """
    own = sum(leaf.nbytes for leaf in process_leaves.values())
    count = len(leaves) + len(process_leaves)
    chunks = (nbytes + own) // CHUNK_BYTES + count
    overhead = BYTES_PER_SAVE + BYTES_PER_ENTRY * (count + chunks)
    free = storage.free_bytes()
    if free is not None and nbytes + own + overhead > free:
        ensure_free_bytes(storage, _new_bytes(leaves, known) + own + overhead)


def ensure_free_bytes(storage: Storage, needed: int) -> None:
    """Raise `OSError` (ENOSPC) if there is less free space, and the storage knows how much it has."""
    free = storage.free_bytes()
    if free is not None and needed > free:
        raise OSError(
            errno.ENOSPC,
            f"no room for it: {needed} bytes are needed, {free} are free; nothing was written",
        )


def _new_bytes(leaves: Mapping[str, AnyLeaf], known: Collection[str]) -> int:
    """Bytes of the chunks that `known` lacks, each once, and of the scalars."""
    fresh: dict[str, int] = {}
    text = 0
    for leaf in leaves.values():
        if leaf.is_scalar:
            text += leaf.nbytes
            continue
        for digest, (start, stop) in zip(leaf.hashes(), chunk_spans(leaf.nbytes), strict=True):
            if digest not in known:
                fresh[digest] = stop - start
    return sum(fresh.values()) + text
