"""`Restorer`: from the checkpoint that a restore takes, of a run or its mirror, to the state.

Invariant: a damaged checkpoint is skipped and reported, and every process of a group loads the same
one. A checkpoint that cannot be read now is not damaged, and nothing older takes its place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from blake3 import blake3
from msgspec import Struct

from perdure.checkpoint.chunk_sharing import ChunkSharing
from perdure.checkpoint.group_call import (
    GroupCall,
    SentError,
    capture_error,
    gather_failures,
    raise_first,
    together,
)
from perdure.checkpoint.manager_options import Restored
from perdure.checkpoint.mirror import Mirror, disagreement
from perdure.checkpoint.saver import Saver
from perdure.errors import (
    CorruptionError,
    MismatchError,
    NoGoodCheckpointError,
    NotARunError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
    warn_caller,
)
from perdure.runtime.process_group import Processes, framework_group, group_of
from perdure.state.extra_members import Restoring, load_epoch_ends, load_orders, shared_groups
from perdure.state.leaf_spec import LeafSpec
from perdure.state.per_rank import rank_context
from perdure.state.process_random import processes_of
from perdure.state.restore_check import ReplacedMembers
from perdure.state.restore_plan import StoredState, needed_regions
from perdure.state.restore_request import RestoreReport, RestoreRequest
from perdure.state.tree_restore import restore_requested, restore_without_target
from perdure.state.walk import Walk
from perdure.store import Loaded, Manifest, Run
from perdure.store.format import DCP_LAYOUT
from perdure.store.loading import EVERYTHING, ReadRequest
from perdure.store.shard_plan import Region
from perdure.text import counted, few, quoted

_SAVED_BY_DCP = (
    "was saved by perdure.plugins.dcp.Writer, where each shard of a tensor is a leaf, and an optimizer "
    "has DCP's form: load it with "
    "`dcp.load(state_dict, storage_reader=perdure.plugins.dcp.Reader(RUN))`."
)

_MOST_SHOWN = 300
"""So many characters of the arguments of a restore are compared as they are; of more, a digest."""


class Restorer:
    """Restores states from a run directory and its mirror, for a manager."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self._processes = saver.processes
        self._check = saver.restore_check
        self._extras = saver.extras

    def restore(self, step: int | None, like: Any, request: RestoreRequest) -> Restored | None:
        """See `CheckpointManager.restore`. None if there is no checkpoint and `step` is None."""
        wanted = request.wanted()
        if request.is_strict:
            self._arrange_buckets(like)
        run, mirror = self._saver.run, self._saver.mirror
        regions = self._regions(like, request)
        needs = ReadRequest(wanted, regions, has_process_leaves=request.resumes)
        with closing(ChunkSharing()) as sharing:
            call = GroupCall(self._processes, _call(step, request))
            name = sharing.listen() if mirror is None and self._processes.count > 1 else ""
            names = [other.decode() for other in call.gather(name.encode())]
            if name:
                sharing.meet(names)
                needs = needs._replace(sharing=sharing)
            self._saver.recipe.check_group("restore")
            source = load_good(run, step, needs, mirror, self._processes)
        for note in source.notes:
            warn_caller(f"{run.where}: {note}")
        if (loaded := source.loaded) is None:
            return None
        if self._processes.is_chief:
            warn_of_skipped(run.where, loaded, quarantine_skipped(run, loaded, source.readable))
        step = loaded.manifest.step
        where = f"{run.where}: step {step}"
        load_epoch_ends(loaded.leaves, loaded.manifest.process_leaves, where)
        if request.is_strict or request.resumes:
            restoring = self._restoring(where, loaded, request)
            load_orders(restoring, loaded.leaves, loaded.process_leaves)
        replaced = ReplacedMembers()
        state, report, has_shards = together(
            self._processes, lambda: self._rebuild(where, loaded, like, request, replaced)
        )
        self._check.replaced = replaced
        if report.has_differences:
            warn_caller(f"{where}: the target and the checkpoint differ; {report}")
        accepted = None if like is None else request.renaming.rename(loaded.leaves)
        self._check.restored(step, accepted, exactly=report.is_exact)
        if report.is_exact:
            self._saver.journal.resume(step)
            self._saver.recipe.resumed(where, loaded.manifest.recipe)
        if report.is_exact or request.resumes:
            with rank_context(self._processes.index, self._processes.count):
                walk = Walk(state)
            for note in self._extras.restore(self._restoring(where, loaded, request), walk):
                warn_caller(note)
        if report.is_exact and has_shards:
            self._warn_of_other_group(loaded)
        return Restored(state, step, report).watch(replaced)

    def _arrange_buckets(self, like: Any) -> None:
        """Arrange the buckets of gradients in `like` for the whole run. A collective."""
        # That group is known to all of its processes or to none: what follows is a collective.
        if self._processes.count < 3 or like is None or framework_group("torch") is None:
            return
        from perdure.state.torch_buckets import arrange, not_arranged, refuse_fixed

        def found() -> list[Any]:
            with rank_context(self._processes.index, self._processes.count):
                modules = not_arranged(Walk(like).targets)
            refuse_fixed(modules, self._processes.count)
            return [*modules.values()]

        arrange(together(self._processes, found))

    def _restoring(self, where: str, loaded: Loaded, request: RestoreRequest) -> Restoring:
        return Restoring(loaded.process_leaves, request.renaming, where, self._processes)

    def expect(self, like: Any, *, begins: bool = False) -> None:
        """The program may begin with `like`, and later restore into it."""
        with rank_context(self._processes.index, self._processes.count):
            walk = self._check.expect(like, begins=begins)
            if walk is not None:
                self._extras.observe(walk)

    def observe(self, members: Any) -> None:
        """The program begins with these members of its state."""
        with rank_context(self._processes.index, self._processes.count):
            self._extras.observe(members)

    def begin(self, like: Any) -> None:
        """The program begins with the fresh state `like`; random numbers count from here on."""
        self.expect(like, begins=True)
        self._extras.begin()

    def _regions(self, like: Any, request: RestoreRequest) -> Any:
        if self._processes.count == 1 or like is None or request.cast:
            return None

        def regions(manifest: Manifest) -> Mapping[str, tuple[Region, ...]]:
            specs = {leaf.path: LeafSpec.of(leaf) for leaf in manifest.leaves}
            with rank_context(self._processes.index, self._processes.count):
                return needed_regions(like, request, specs)

        return regions

    def _rebuild(
        self,
        where: str,
        loaded: Loaded,
        like: Any,
        request: RestoreRequest,
        replaced: ReplacedMembers,
    ) -> tuple[Any, RestoreReport, bool]:
        """The state, what differs, and whether arrays of the target are sharded over processes."""
        manifest, leaves = loaded.manifest, loaded.leaves
        self._saver.recipe.check_resume(where, manifest.recipe)
        specs = {leaf.path: LeafSpec.of(leaf) for leaf in manifest.leaves}
        stored = StoredState(specs, manifest.containers)
        with rank_context(self._processes.index, self._processes.count) as rank:
            if like is None:
                return *restore_without_target(leaves, request, stored), False
            if request.is_strict:
                self.expect(like)
            try:
                restoring = self._restoring(where, loaded, request)
                state, report = restore_requested(
                    like,
                    leaves,
                    request,
                    stored,
                    takes=True,
                    replaced=replaced,
                    shared=shared_groups(restoring),
                )
            except MismatchError as error:
                if any(leaf.path == DCP_LAYOUT for leaf in manifest.process_leaves):
                    raise MismatchError(f"{error} {where} {_SAVED_BY_DCP}") from error
                raise
            self._warn_of_one_device(state)
            return state, report, rank.has_shards

    def _warn_of_one_device(self, state: Any) -> None:
        jax_state: Any = sys.modules.get("perdure.state.jax_state")
        if jax_state is not None and (paths := jax_state.whole_on_one_device(state)):
            warn_caller(
                f"{self._saver.run.where}: {few(paths)}: restored whole onto one device, as the target "
                f"has them, beside sharded leaves of the same shape. The next step is compiled for "
                f"that, which may change bits. `jax.jit(tx.init)` makes such a target: call tx.init "
                f"without jit, give jit out_shardings, or place the target with jax.device_put."
            )

    def _warn_of_other_group(self, loaded: Loaded) -> None:
        """Warn if another number of processes saved arrays that are now sharded over this group. They
        have the same bits; the next step has other bits, unless a strategy computes it."""
        saved = processes_of(loaded.process_leaves)
        if self._processes.is_chief and saved not in (0, self._processes.count):
            before = counted(saved, "process", "processes")
            warn_caller(
                f"{self._saver.run.where}: step {loaded.manifest.step} was saved by {before}, and this "
                f"run has {self._processes.count}. The state is restored bit for bit, but the next "
                f"steps add gradients and norms in another order, and will not have the bits of an "
                f"uninterrupted run (gradients have with `perdure.torch.LogicalReplicas`). Resume with "
                f"{before}; recipe={{'processes': processes.count}} makes this an error."
            )


def _call(step: int | None, request: RestoreRequest) -> str:
    """The call with what decides about the result, which all processes of a group have to ask for."""
    asked = [] if step is None else [str(step)]
    if request.selection is not None:  # sorted, as a set is not
        asked.append(f"leaves={sorted(request.selection.patterns)}")
    if request.renaming:
        asked.append(f"rename={dict(sorted(request.renaming.paths.items()))}")
    asked += [] if request.strict else ["strict=False"]
    asked += ["cast=True"] if request.cast else []
    text = ", ".join(asked)
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]}... ({blake3(text.encode()).hexdigest()[:16]})"
    return f"restore({text})" if text else "restore"


def quarantine_skipped(run: Run, loaded: Loaded, readable: Collection[int]) -> dict[int, str]:
    """Move the damaged steps that a restore has skipped to quarantine, if this is the writer;
    returns what became of each. Those in `readable` are damaged for another process only."""
    places: dict[int, str] = {}
    for step, reason in loaded.skipped:
        if step in readable:
            places[step] = "It stays where it is, because process 0 can read it."
        elif not run.is_writer:
            # A process that only reads, beside a trainer, never takes the lock for this.
            run.damage.deferred.add(step)
            places[step] = "It stays where it is; the first save moves it to quarantine."
        else:
            try:
                places[step] = f"It was moved to {run.quarantine(step, reason)}."
            except StoreError as error:
                places[step] = f"It stays where it is: {error}"
    return places


def warn_of_skipped(where: str, loaded: Loaded, places: Mapping[int, str] | None = None) -> None:
    """Warn about each damaged step that `loaded` is restored instead of, and where it is now."""
    newest = loaded.manifest.step
    for step, reason in loaded.skipped:
        instead = f"step {newest}" if step != newest else "its copy in the mirror"
        place = (places or {}).get(step, "It stays where it is.")
        warn_caller(
            f"{where}: step {step} is damaged and was skipped; {instead} was restored instead: "
            f"{reason} {place}"
        )


class Picked(Struct):
    """The checkpoint that the chief has picked, and whether it is read from the mirror."""

    step: int | None = None
    fingerprint: str = ""
    mirrored: bool = False


class RestoreSource(NamedTuple):
    """The verified checkpoint, None without one; what to warn about besides skipped steps; and the
    skipped ones that the chief itself can read."""

    loaded: Loaded | None
    notes: list[str]
    readable: Collection[int] = ()


def load_good(
    run: Run,
    step: int | None = None,
    needs: ReadRequest = EVERYTHING,
    mirror: Mirror | None = None,
    processes: Processes | None = None,
) -> RestoreSource:
    """Read and verify `step`, or the newest good checkpoint, of `run` or else of its mirror.

    All processes of a group get the same one: the chief picks, and picks the next one if its bytes
    are damaged for some process. If there are checkpoints and all are damaged, a fresh start would
    silently throw a run away: `NoGoodCheckpointError`. `UnreachableError` if one cannot be read
    now, or the mirror does not answer.
    """
    processes = group_of(processes)
    copies = _Copies(run, mirror, step, processes)
    failure: StoreError | None = None
    while True:
        picked = together(processes, partial(copies.in_order.send, failure), by_chief=Picked)
        if picked.step is None:
            return RestoreSource(None, copies.notes)
        loaded, error = capture_error(partial(copies.load, picked, needs))
        if needs.sharing is not None:
            needs.sharing.close()  # the others may wait for it
            needs = needs._replace(sharing=None)
        failed = gather_failures(processes, error)
        if not failed and loaded is not None:
            loaded = replace(loaded, skipped=tuple(copies.skipped.items()))
            return RestoreSource(loaded, copies.notes, copies.readable)
        is_damaged = all(sent.is_a(CorruptionError) for sent in failed.values())
        if not is_damaged and not (0 in failed and failed[0].is_a(StoreError)):
            raise_first(processes, failed, error)
        del loaded  # before the next one takes as much memory
        if processes.is_chief:
            failure = copies.failure_of(picked, needs, error, failed)


class _Copies:
    """The copies of checkpoints that one restore may read, and what it found out about them."""

    def __init__(
        self, run: Run, mirror: Mirror | None, step: int | None, processes: Processes
    ) -> None:
        self.notes: list[str] = []
        """What to warn about."""
        self.skipped: dict[int, str] = {}
        """Why steps of the run directory were not taken, if they are damaged."""
        self.readable: set[int] = set()
        """Those that are damaged for other processes only."""
        self._run, self._mirror, self._step, self._group = run, mirror, step, processes
        self._damaged: list[str] = []
        self._silent: UnreachableError | None = None
        """The error of a mirror that does not answer for a step that only it may have undamaged."""
        self._target: Run | None = None
        self._mirrored: list[int] = []
        self.in_order = self._in_order()
        """The copies to load, the last without a step. It is sent why one was not taken."""

    def load(self, picked: Picked, needs: ReadRequest) -> Loaded:
        step = picked.step
        assert step is not None
        if self._group.is_chief:
            return self._source(picked.mirrored).load(step, needs)
        storage = self._run.storage
        if picked.mirrored:
            assert self._mirror is not None
            storage = self._mirror.storage
        try:
            loaded = Run(storage).load(step, needs)
        except NotARunError as error:
            raise StoreError(
                f"it does not see the run directory that the chief restores from; all processes need "
                f"one shared directory. {error}"
            ) from error
        if loaded.manifest.fingerprint != picked.fingerprint:
            raise StoreError(
                f"{storage.where}: it finds another checkpoint of step {step} (fingerprint "
                f"{loaded.manifest.fingerprint[:16]}) than process 0 does "
                f"({picked.fingerprint[:16]}); all processes need one shared directory. Nothing was "
                f"restored."
            )
        return loaded

    def failure_of(
        self,
        picked: Picked,
        needs: ReadRequest,
        error: BaseException | None,
        failed: Mapping[int, SentError],
    ) -> StoreError:
        """Why the chief does not take a copy; it looks itself at what only others have read."""
        if error is None and needs.regions is not None:
            _, error = capture_error(partial(self.load, picked, needs._replace(verifies_all=True)))
        if isinstance(error, StoreError):
            return error
        assert picked.step is not None
        self.readable.add(picked.step)
        texts = (f"process {number}: {sent.text}" for number, sent in failed.items())
        return CorruptionError("; ".join(texts))

    def _source(self, mirrored: bool) -> Run:
        source = self._target if mirrored else self._run
        assert source is not None
        return source

    def _in_order(self) -> Generator[Picked, StoreError | None, None]:
        if self._step is not None:
            if self._mirror is not None:
                self._find()
            error = yield from self._copies_of_step(self._step)
            raise self._silent or error
        self._run.require_finished()
        tried = set[int]()
        # Steps that a prune deletes meanwhile are not damaged; there are newer ones then.
        while untried := self._find() - tried:
            for step in sorted(untried, reverse=True):
                tried.add(step)
                error = yield from self._copies_of_step(step)
                is_gone = isinstance(error, StepNotFoundError) and step not in self._run.steps()
                if not is_gone and not isinstance(error, CorruptionError):
                    raise error
        if self._silent is not None:
            raise self._silent
        if self._damaged:
            where = self._run.where
            both = where if self._mirror is None else f"{where} and {self._mirror.name}"
            reasons = "\n".join(self._damaged)
            raise NoGoodCheckpointError(
                f"{both}: expected a readable checkpoint, found {len(self._damaged)} damaged:\n"
                f"{reasons}\nNothing was changed. Run `perdure verify {quoted(where)}`, bring back the "
                f"files from a copy, or start in another run directory."
            )
        yield Picked()

    def _copy(self, step: int, mirrored: bool) -> Generator[Picked, StoreError | None, StoreError]:
        """One copy; returns why it was not taken."""
        try:
            # Alone, nobody compares the fingerprint.
            is_alone = self._group.count == 1
            found = "" if is_alone else self._source(mirrored).manifest(step).fingerprint
        except StoreError as error:
            return error
        error = yield Picked(step, found, mirrored)
        assert error is not None
        return error

    def _copies_of_step(self, step: int) -> Generator[Picked, StoreError | None, StoreError]:
        """The copies of one step; returns why none was taken."""
        error = yield from self._copy(step, False)
        reason = str(error)
        if isinstance(error, CorruptionError):
            self.skipped[step] = reason
            self._damaged.append(f"  step {step}: {reason}")
            reason = f"it is damaged in {self._run.where}."
        elif isinstance(error, StepNotFoundError):
            reason = f"{self._run.where} does not hold it."
        if (mirror := self._mirror) is None or step not in self._mirrored:
            return error
        self.notes.append(f"step {step} is restored from {mirror.name}: {reason}")
        other = yield from self._copy(step, True)
        self.notes.pop()
        if isinstance(other, UnreachableError):
            if isinstance(error, (StepNotFoundError, CorruptionError)):
                self._silent = mirror.holds_neither(step, other)
                self._note(f"{mirror.name} does not answer for step {step}: {other}")
        elif isinstance(other, CorruptionError):
            if step not in self.readable:
                mirror.quarantine(step, str(other))
            self._damaged.append(f"  step {step} of {mirror.name}: {other}")
            self._note(f"step {step} of {mirror.name} is damaged: {other}")
            return other if isinstance(error, StepNotFoundError) else error
        elif not isinstance(other, StepNotFoundError):
            return other
        return error

    def _find(self) -> set[int]:
        """The steps that the run directory and the mirror hold now. A mirror that does not answer is
        an error only if the run directory lacks the step of the restore, or any checkpoint."""
        step, mirror, steps = self._step, self._mirror, self._run.steps()
        if mirror is None:
            return set(steps)
        try:
            self._target, self._mirrored, note = mirror.readable_steps()
        except UnreachableError as error:
            if not (steps if step is None else step in steps):
                raise mirror.holds_neither(step, error) from error
            note = f"{mirror.name} does not answer, so only {self._run.where} is used: {error}"
        self._note(note)
        shared = set(steps) & set(self._mirrored)
        if step is None and shared and self._target is not None:
            self._note(disagreement(self._run, self._target, max(shared)))
        return {*steps, *self._mirrored}

    def _note(self, note: str | None) -> None:
        if note and note not in self.notes:
            self.notes.append(note)
