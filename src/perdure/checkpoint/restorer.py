"""`Restorer`: from the checkpoint that a restore takes to the state of the program."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any

from blake3 import blake3

from perdure.checkpoint.chunk_sharing import ChunkSharing
from perdure.checkpoint.group_call import GroupCall, together
from perdure.checkpoint.manager_options import Restored
from perdure.checkpoint.restore_source import load_in_group
from perdure.checkpoint.saver import Saver
from perdure.errors import MismatchError, StoreError, warn_caller
from perdure.state.extra_members import Restoring, load_epoch_ends, shared_groups
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
from perdure.store.gc_pause import gc_paused
from perdure.store.loading import Needs
from perdure.store.shard_plan import Region
from perdure.text import counted, few

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
        with gc_paused():  # one pause for all of it, because each one ends in a collection
            return self._restore(step, like, request)

    def _restore(self, step: int | None, like: Any, request: RestoreRequest) -> Restored | None:
        wanted = request.wanted()
        run, mirror = self._saver.run, self._saver.mirror
        needs = Needs(wanted, self._regions(like, request))
        with closing(ChunkSharing(self._processes.index, self._processes.count)) as sharing:
            call = GroupCall(self._processes, _call(step, request))
            token = call.agree(secrets.token_bytes(32), lambda sent: sent[0])
            if needs.regions is not None and mirror is None:
                sharing.listen(token)
                needs = needs._replace(sharing=sharing)
            call.barrier()
            self._saver.recipe.check_group("restore")
            source, readable = load_in_group(run, self._processes, step, needs, mirror)
        for note in source.notes:
            warn_caller(f"{run.where}: {note}")
        if (loaded := source.loaded) is None:
            return None
        if self._processes.is_chief:
            warn_of_skipped(run.where, loaded, quarantine_skipped(run, loaded, readable))
        step = loaded.manifest.step
        where = f"{run.where}: step {step}"
        load_epoch_ends(loaded.leaves, loaded.manifest.process_leaves, where)
        replaced = ReplacedMembers()
        state, report, has_shards = together(
            self._processes, lambda: self._rebuild(where, loaded, like, request, replaced)
        )
        self._check.replaced = replaced
        if report.has_differences:
            warn_caller(f"{where}: the target and the checkpoint differ; {report}")
        if report.is_exact:
            self._check.restored_exactly(step)
            self._saver.journal.resume(step)
            self._saver.recipe.resumed(where, loaded.manifest.recipe)
            with rank_context(self._processes.index, self._processes.count):
                walk = Walk(state)
            for note in self._extras.put(self._restoring(where, loaded, request), walk):
                warn_caller(note)
            if has_shards:
                self._warn_of_other_group(loaded)
        else:
            self._check.restored_in_part(step)
        return Restored(state, step, report).watch(replaced)

    def _restoring(self, where: str, loaded: Loaded, request: RestoreRequest) -> Restoring:
        return Restoring(loaded.process_leaves, request.renaming, where, self._processes)

    def expect(self, like: Any, *, begins: bool = False) -> None:
        """The program may begin with `like`, and later restore into it."""
        with rank_context(self._processes.index, self._processes.count):
            walk = self._check.expect(like, begins=begins)
            if walk is not None:
                self._extras.see(walk)

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
                shared = shared_groups(self._restoring(where, loaded, request))
                state, report = restore_requested(
                    like, leaves, request, stored, takes=True, replaced=replaced, shared=shared
                )
            except MismatchError as error:
                if any(leaf.path == DCP_LAYOUT for leaf in manifest.process_leaves):
                    raise MismatchError(f"{error} {where} {_SAVED_BY_DCP}") from error
                raise
            self._warn_of_one_device(state)
            if report.is_exact:
                self._check.restored(request.renaming.rename(leaves))
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
        """Warn if another number of processes saved arrays that are now sharded over these. Their
        bits are the same; those of the next step are not, unless a strategy computes it."""
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
            run.defer_quarantine(step)
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
