"""One checkpoint saved by all processes of a group.

Every process writes its share, on orders of the chief, which holds the lock and commits. Invariant:
the checkpoint is committed for all or for none, and an error, also of the prune, is raised in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn

import msgspec

from perdure import errors
from perdure.checkpoint.group_call import SentError, capture_error, decoded
from perdure.checkpoint.group_messages import (
    BEGIN,
    COMPARE,
    END,
    HASH,
    LAYOUT,
    WRITE,
    GroupLayouts,
    SaveAnswer,
    SaveOrder,
    digest_of,
    local_regions,
    merge_layouts,
)
from perdure.checkpoint.slice_exchange import SliceExchange
from perdure.errors import ArgumentError, PerdureError, SaveError, StateError, WorkerLostError
from perdure.runtime.process_group import Processes
from perdure.store import Leaf, Run
from perdure.store.directory import Directory
from perdure.store.entry_builder import StoredChunk
from perdure.store.format import PACKS, chunk_spans, hash_bytes
from perdure.store.leaf import AnyLeaf, Leaves, RemoteLeaf, containers_of
from perdure.store.manifest import RecipeValue
from perdure.store.pack_part import (
    GroupState,
    PackPart,
    ShardCopy,
    WriterShare,
    assemble,
    copy_digests,
    leaf_digests,
    write_pack_part,
)
from perdure.store.pack_writer import Written
from perdure.store.shard_plan import ShardPlan, plan_shards, read_slices, slices_of
from perdure.store.storage import Storage

_MOST_LINES = 20


class SaveCache:
    """What this process keeps from one save to the next: the layouts of the sharded arrays, and the
    manifests that it has read (the chief has the manifests of its `Run`)."""

    def __init__(self) -> None:
        self.layouts = GroupLayouts()
        self.directory: Directory | None = None

    def stored_chunks(self, storage: Storage) -> Mapping[str, StoredChunk]:
        """The chunks that kept checkpoints have."""
        if self.directory is None or self.directory.storage is not storage:
            self.directory = Directory(storage)
        return self.directory.stored_chunks(fresh=True)


class _LaterHashes(RemoteLeaf, frozen=True, gc=True):
    """A sharded array, whose chunks are hashed only if something asks for their hashes."""

    later: Callable[[], list[str]]

    def hashes(self) -> list[str]:
        return self.later()


@contextmanager
def save_in_group(
    run: Run,
    processes: Processes,
    state: GroupState,
    recipe: Mapping[str, RecipeValue],
    metrics: Mapping[str, float],
    cache: SaveCache | None = None,
    declines: BaseException | None = None,
) -> Iterator[None]:
    """Save one checkpoint by all processes, each with its copy of the state; then run the block.

    The block is work of the chief (retention). An error of either is raised in all processes, and
    so is `declines`, why this process has no state. Raises `StateError` if copies differ, and as
    `Run.save`.
    """
    with ExitStack() as stack:
        participant = _SaveParticipant(run, processes, state, cache or SaveCache(), stack, declines)
        if processes.is_chief:
            error: BaseException | None = None
            try:
                _lead(participant, recipe, metrics)
                yield
            except BaseException as raised:  # noqa: BLE001 (raised below in all processes)
                error = raised
            _end(participant, error)
        else:
            _follow(participant)
            yield


def decline_save(run: Run, processes: Processes, step: int, error: BaseException) -> None:
    """Take part in a save without a state, so that every other process learns of `error` at once."""
    try:
        with save_in_group(run, processes, GroupState(step), {}, {}, declines=error):
            pass
    except WorkerLostError:
        raise
    except BaseException as raised:
        if raised is not error and not isinstance(raised, PerdureError):
            raise  # the caller raises `error`


def as_save_error(error: BaseException, where: str, step: int) -> PerdureError:
    """`error` itself if perdure raised it on purpose, else a `SaveError` about it."""
    if isinstance(error, PerdureError):
        return error
    return SaveError(
        f"{where}: the save of step {step} failed: {error!r}. Every earlier checkpoint is still there."
    )


def require_same(processes: Processes, leaves: Mapping[str, Leaf]) -> None:
    """Raise `StateError` naming leaf and process unless all processes hold one state. A collective."""
    digests = leaf_digests(leaves)
    digest = hash_bytes(msgspec.json.encode(digests)).encode()
    if processes.agree(digest, lambda sent: b"%d" % len(set(sent))) != b"1":
        sent = processes.gather(msgspec.json.encode(digests))
        raise _differing([msgspec.json.decode(data) for data in sent], [])


class _SaveParticipant:
    """One process in a save of a group: its state, and the messages of the other processes."""

    def __init__(
        self,
        run: Run,
        processes: Processes,
        state: GroupState,
        cache: SaveCache,
        stack: ExitStack,
        declines: BaseException | None,
    ) -> None:
        self.run, self.processes, self.state = run, processes, state
        self.stored_chunks: Mapping[str, StoredChunk] | None = None
        """In the chief, the chunks that are stored already."""
        self.error: BaseException | None = None
        """The first error of this process."""
        self._declines, self._cache, self._stack = declines, cache, stack
        self._regions = local_regions(state.leaves)
        self._exchange: SliceExchange | None = None
        self._plans: dict[str, ShardPlan] | None = None
        self._hashes: dict[str, list[str]] | None = None
        sent = processes.collect(self.answer(SaveOrder(BEGIN)))
        self.rows = [decoded(data, SaveAnswer) for data in sent]
        """In the chief, the first answer of each process."""

    def _failure(self, error: BaseException) -> SentError:
        """An error for the other processes, with its class if they are to raise the same."""
        if isinstance(error, OSError) and error.filename is None:
            size = sum(leaf.nbytes for leaf in self.state.leaves.values())
            error = SaveError(f"{self.run.where}: {error} (size of the state: {size} bytes)")
        text = str(error) if isinstance(error, (OSError, PerdureError)) else repr(error)
        kind = type(error).__name__ if isinstance(error, (ArgumentError, StateError)) else ""
        return SentError(kind, f"process {self.processes.index}: {text}")

    def _beginning(self) -> SaveAnswer:
        if self._regions:
            self._exchange = SliceExchange(self.processes.index)
            self._stack.callback(self._exchange.close)
        state = self.state
        return SaveAnswer(
            state.step,
            per_rank={path: RemoteLeaf.of(leaf) for path, leaf in state.per_rank.items()},
            containers=containers_of(state.per_rank),
            process_leaves={
                path: RemoteLeaf.of(leaf) for path, leaf in state.process_leaves.items()
            },
            shards=digest_of(self._regions),
            known=self._cache.layouts.digest(),
            address=self._exchange and self._exchange.address,
        )

    def ask(self, what: str) -> list[SaveAnswer]:
        """Give an order, in the chief; returns the answers of all if no process failed."""
        order = SaveOrder(what)
        if what != LAYOUT and self._regions:
            layouts, order.addresses = self._cache.layouts, [row.address for row in self.rows]
            if {row.known for row in self.rows} != {layouts.digest()}:
                order.layouts = layouts
        self.processes.broadcast(msgspec.msgpack.encode(order))
        sent = self.processes.collect(self.answer(order))
        answers = [decoded(data, SaveAnswer) for data in sent]
        _require_answers(self.processes, answers)
        return answers

    def answer(self, order: SaveOrder) -> bytes:
        """Do what an order asks for; the answer to send."""
        answer, error = capture_error(lambda: self._done(order))
        if answer is None:
            error = error or SaveError("no answer")
            self.error = self.error or error
            answer = SaveAnswer(self.state.step, error=self._failure(error))
        return msgspec.msgpack.encode(answer)

    def agree_on_layouts(self) -> None:
        """Learn the layouts of all processes, in the chief, unless no shard has changed."""
        known = self._cache.layouts
        digests = tuple(row.shards for row in self.rows)
        if not any(digests):
            return
        if known.digests != digests or {row.known for row in self.rows} != {known.digest()}:
            answers = self.ask(LAYOUT)
            self._cache.layouts = merge_layouts([answer.regions for answer in answers], digests)
            self._plans = None

    def _done(self, order: SaveOrder) -> SaveAnswer:
        step, leaves, storage = self.state.step, self.state.leaves, self.run.storage
        if self._declines is not None:
            raise self._declines
        if order.what == BEGIN:
            return self._beginning()
        if order.what == LAYOUT:
            return SaveAnswer(step, regions=self._regions)
        share = self._share(order)
        if order.what == HASH:
            return SaveAnswer(step, hashes=share.hashes(leaves))
        if order.what == COMPARE:
            copies = copy_digests(leaves, share.plans)
            return SaveAnswer(step, digests=leaf_digests(leaves), copies=copies)
        known = (
            self._cache.stored_chunks(storage) if self.stored_chunks is None else self.stored_chunks
        )
        part = write_pack_part(storage, self.state, known, share, self.run.encode)
        return SaveAnswer(step, part=part)

    def hashes_of(self, path: str) -> list[str]:
        """The hashes of the chunks of a sharded array, in the chief. All processes compute them."""
        if self._hashes is None:
            hashes: dict[int, str] = {}
            for answer in self.ask(HASH):
                hashes |= answer.hashes
            self._hashes = {}
            first = 0
            for name, leaf in sorted(self.state.leaves.items()):
                if leaf.shards is not None:  # the others have no numbers in `WriterShare.hashes`
                    last = first + len(chunk_spans(leaf.nbytes))
                    self._hashes[name] = [hashes[number] for number in range(first, last)]
                    first = last
        return self._hashes[path]

    def _share(self, order: SaveOrder) -> WriterShare:
        """What this process writes, with the layouts and addresses of an order."""
        index, count = self.processes.index, self.processes.count
        if self._exchange is None:
            return WriterShare(index, count)
        if self._plans is None:
            self._cache.layouts = order.layouts or self._cache.layouts
            layouts = self._cache.layouts.by_path()
            self._plans = plan_shards(layouts, count)
            leaves = [(self._plans[path], path) for path in sorted(self._plans)]

            def read(writer: int, leaf: int, chunk: int, memory: memoryview) -> int:
                plan, path = leaves[leaf]
                shards = self.state.leaves[path].shards
                assert shards is not None
                return read_slices(slices_of(plan, chunk, writer, index), shards, memory)

            self._exchange.begin(order.addresses, read)
        numbers = {path: number for number, path in enumerate(sorted(self._plans))}
        exchange = self._exchange
        return WriterShare(index, count, self._plans, lambda path: exchange.fetch(numbers[path]))


def _lead(
    participant: _SaveParticipant, recipe: Mapping[str, RecipeValue], metrics: Mapping[str, float]
) -> None:
    """The chief's side of a save, up to the commit."""
    run, state, hashes_of = participant.run, participant.state, participant.hashes_of
    _require_rows(participant.processes, participant.rows)
    participant.agree_on_layouts()
    merged: dict[str, AnyLeaf] = {
        path: leaf
        if leaf.shards is None
        else _LaterHashes(leaf.dtype, leaf.shape, leaf.nbytes, (), partial(hashes_of, path))
        for path, leaf in state.leaves.items()
    }
    process_leaves: dict[str, RemoteLeaf] = {}
    containers = containers_of(state.leaves)
    for row in participant.rows:
        merged |= row.per_rank
        containers = containers | row.containers
        process_leaves |= row.process_leaves
    leaves = Leaves(merged, containers)  # type: ignore[arg-type]
    with run.committer.prepare(state.step, leaves, process_leaves) as save:
        written = None
        if not save.is_committed:
            participant.stored_chunks = save.stored_chunks
            written = _write_parts(participant)
        run.committer.commit(save, written, recipe, metrics)


def _write_parts(participant: _SaveParticipant) -> Written:
    """Let every process write its part, in the chief, and put the parts together."""
    assert participant.stored_chunks is not None
    parts = [answer.part for answer in participant.ask(WRITE) if answer.part is not None]
    if len({part.state_hash for part in parts}) > 1 or _have_other_copies(parts):
        answers = participant.ask(COMPARE)
        raise _differing(
            [answer.digests for answer in answers], [answer.copies for answer in answers]
        )
    require_visible(participant.run, parts, {c.pack for c in participant.stored_chunks.values()})
    return assemble(participant.state.leaves, parts)


def _end(participant: _SaveParticipant, error: BaseException | None) -> None:
    """Tell all processes how the save ended, in the chief, and raise its error."""
    where, step = participant.run.where, participant.state.step
    agreed = None if error is None else as_save_error(error, where, step)
    order = SaveOrder(END, error=SentError.of(agreed))
    participant.processes.broadcast(msgspec.msgpack.encode(order))
    if agreed is not None:
        _raise_agreed(participant.error or error, agreed)


def _follow(participant: _SaveParticipant) -> None:
    """The side of the other processes: answer orders until the save has ended; raises its error."""
    processes = participant.processes
    while True:
        order = decoded(processes.broadcast(None), SaveOrder)
        if order.what == END:
            break
        processes.collect(participant.answer(order))
    if order.error is not None:
        agreed = order.error.error_of("the chief process")
        assert isinstance(agreed, PerdureError)
        _raise_agreed(participant.error, agreed)


def _require_rows(processes: Processes, rows: Sequence[SaveAnswer]) -> None:
    """Raise unless every process begins to save the same step."""
    _require_answers(processes, rows)
    if len({row.step for row in rows}) > 1:
        steps = ", ".join(f"process {number}: {row.step}" for number, row in enumerate(rows))
        raise StateError(
            f"the processes of the group save different steps ({steps}). Nothing was saved. All "
            f"processes must call `save` at the same steps, from one thread."
        )


def _require_answers(processes: Processes, answers: Sequence[SaveAnswer]) -> None:
    """Raise what failed, if some processes failed."""
    if not (failed := [answer.error for answer in answers if answer.error is not None]):
        return
    kinds = {error.kind for error in failed}
    kind = getattr(errors, kinds.pop()) if len(kinds) == 1 and all(kinds) else SaveError
    texts = "; ".join(error.text.rstrip(".") for error in failed)
    raise kind(
        f"saving step {answers[0].step} failed in {len(failed)} of {processes.count} processes: "
        f"{texts}. Every earlier checkpoint is unchanged. Save again once the cause is removed."
    )


def _have_other_copies(parts: Sequence[PackPart]) -> bool:
    """Whether two processes hold different bits in copies of a shard."""
    seen: dict[str, str] = {}
    return any(
        seen.setdefault(holders, digest) != digest
        for part in parts
        for holders, digest in part.copies.items()
    )


def _raise_agreed(error: BaseException | None, agreed: PerdureError) -> NoReturn:
    """Raise the error that the group agreed on, or an interrupt that only this process has."""
    if error is not None and not isinstance(error, Exception):
        raise error
    raise agreed from (None if error is agreed else error)


def require_visible(run: Run, parts: Sequence[PackPart], held: AbstractSet[str]) -> None:
    """Raise `SaveError` unless the chief sees every pack that another process names, in full: hosts
    may have directories of their own under one path. The chief knows those in `held` already."""
    seen = {*held, *parts[0].packs}
    for number, part in enumerate(parts):
        for name, size in part.packs.items():
            if name in seen:
                continue
            seen.add(name)
            try:
                actual = f"{run.storage.size(PACKS + name)} bytes"
            except FileNotFoundError:
                actual = "no such file"
            if actual != f"{size} bytes":
                raise SaveError(
                    f"{run.where}: process {number} wrote {PACKS}{name} with {size} bytes, and process "
                    f"0 finds {actual}. All processes need one shared directory: a path on a file "
                    f"system that all hosts mount, or a bucket. Nothing was committed; every earlier "
                    f"checkpoint is still there."
                )


def _differing(
    gathered: Sequence[Mapping[str, str]], copies: Sequence[Mapping[str, ShardCopy]]
) -> StateError:
    """Which leaves differ between the processes, by the hashes of the leaves and copies of each."""
    first = gathered[0]
    lines = [
        f"  {path}: process {number} holds other bits than process 0"
        if path in first and path in other
        else f"  {path}: process {0 if path in other else number} has no such leaf, and process "
        f"{number if path in other else 0} has one"
        for number, other in enumerate(gathered)
        for path in sorted(first.keys() | other.keys())
        if other.get(path) != first.get(path)
    ]
    seen: dict[str, tuple[int, str]] = {}
    for number, shards in enumerate(copies):
        for name, copy in shards.items():
            holder, digest = seen.setdefault(name, (number, copy.digest))
            if digest != copy.digest:
                lines.append(
                    f"  {copy.path}: process {number} holds other bits than process {holder}"
                )
    return StateError(
        "the processes of the group hold different states:\n"
        + "\n".join([*dict.fromkeys(lines)][:_MOST_LINES])
        + "\nAll processes must save the same members, start from the same state and run the same "
        "steps: give them one seed, and restore in all of them; a parameter that was frozen when "
        "DistributedDataParallel wrapped the module gets the gradient of one process alone. What each "
        "process has for itself (buffers of BatchNorm under DistributedDataParallel, the position in "
        "its shard of the data) must be made equal before the save (dist.broadcast from rank 0) or be "
        "wrapped: "
        "perdure.checkpoint.PerRank(member)."
    )
