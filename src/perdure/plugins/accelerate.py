"""For users of Accelerate: a loop over batches that resumes by itself, in the middle of an epoch too.

    for step, batch in perdure.plugins.accelerate.batches(accelerator, loader, "runs/a", epochs=3):

In this module, too, `import accelerate` means the library.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from perdure.checkpoint.manager import CheckpointManager
from perdure.errors import StateError, needs_extra, warn_caller
from perdure.plugins import trainer_library as library
from perdure.state.per_rank import PerRank

library.require_version("accelerate", "accelerate", "1.1", "2")
with needs_extra("accelerate"):
    import torch
    from accelerate import Accelerator, skip_first_batches
    from accelerate.data_loader import SkipBatchSampler
    from accelerate.utils import gather_object
    from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["batches"]


def batches(
    accelerator: Accelerator,
    loader: Any,
    run: str | os.PathLike[str] | CheckpointManager,
    *,
    epochs: int,
) -> Iterator[tuple[int, Any]]:
    """The batches of all epochs, after those that the newest good checkpoint has seen.

    When the loop asks for the next batch, the step that it has finished is saved if it is time: what
    `accelerator.prepare` and `register_for_checkpointing` were given, the gradient scaler, the random
    generators and the position in the data. After SIGTERM it is saved, and the process exits with
    status 75. A step that has only accumulated gradients is not saved, nor one after which no prepared
    optimizer has stepped: the loop may have read its batch ahead. Every process of a group
    (DDP, FSDP2) goes through its own batches. A registered object that has differed between the
    processes at a save is saved by each from then on. The other prepared loaders begin their next pass
    as in the undisturbed run; a save warns if one is within its batches, whose position is not saved,
    and of one that the loop has prepared and goes through again.

    Args:
        accelerator: Has prepared everything that the loop changes.
        loader: The prepared loader.
        run: The run directory, where every 500th step is saved; or a manager.
        epochs: How often the loop sees all batches.

    Yields:
        The number of batches before this one, over all epochs, and the batch.

    Raises:
        StateError: The checkpoint is of another number of processes, of other prepared loaders, or of
            an epoch with another number of batches, the processes have different numbers of batches,
            a loader has `persistent_workers=True`, `loader` is not prepared, or the manager is of
            another number of processes than the Accelerator.
        UnsupportedLeafError: A communication hook of DDP keeps a state, as PowerSGD does.
    """
    if not any(loader is prepared for prepared in accelerator._dataloaders):
        raise StateError(
            f"perdure.plugins.accelerate: expected the loader that `accelerator.prepare` has returned "
            f"for a DataLoader, found a {type(loader).__qualname__} that it has not prepared. Pass the "
            f"prepared loader itself: `batches` skips what the run has seen (no `skip_first_batches`)."
        )
    remedy = "Make each DataLoader with persistent_workers=False."
    library.require_new_workers(library.keeps_workers(accelerator._dataloaders), remedy)
    rank, count = accelerator.process_index, accelerator.num_processes
    is_ddp = accelerator.distributed_type.startswith("MULTI_")  # of which it keeps no reference
    arranges = not getattr(accelerator.ddp_handler, "find_unused_parameters", False)
    if count > 2 and is_ddp and arranges:
        raise StateError(
            f"batches: expected DistributedDataParallelKwargs(find_unused_parameters=True) in the "
            f"`kwargs_handlers` of the Accelerator, because there are {count} processes. Without it "
            f"DDP arranges its buckets after the first backward pass, and the first step after a "
            f"resume would add the gradients in another order."
        )
    if is_ddp:
        library.refuse_hook_states(_wrappers(accelerator))
    with library.manager_of(run, count, save_interval_steps=500) as manager:
        drawn = _Drawn(accelerator)
        hook = register_optimizer_step_post_hook(drawn.on_step)
        try:
            resumed = library.LibraryRun(manager, rank, count)
            yield from _batches(accelerator, loader, resumed, epochs, drawn)
        finally:
            hook.remove()


def _batches(
    accelerator: Any, loader: Any, run: library.LibraryRun, epochs: int, drawn: _Drawn
) -> Iterator[tuple[int, Any]]:
    step = epoch = finished = 0
    told = set[str]()
    position: dict[str, Any] = {}
    if run.resumed is not None:
        step, position = run.resumed.step, run.resumed.state["position"]
        epoch, finished = position["epoch"], position["finished"]
    is_longer = position.get("ended", False) and epoch < epochs
    if is_longer:  # the save knows the number of batches in its last epoch, and not in the next one
        loader.set_epoch(epoch - 1)
        _require_batches(run, position, loader)
    others = [each for each in accelerator._dataloaders if each is not loader]
    if run.resumed is not None and "passes" in run.resumed.state:
        _restore_passes(others, run.process_value("passes"))
    run.load_from(loader, *others)
    batches = _even_count(loader)
    accumulation = accelerator.gradient_accumulation_steps
    # One that has differed stays apart: equal ones may differ again, and each has its place in a state.
    apart = set[int](position.get("apart", {}).values())
    run.begin(_members(accelerator, apart), "position", "passes")
    if run.resumed is not None:
        accelerator.step = position["accumulated"]
        if position["accumulation"] is not None:
            accelerator.gradient_accumulation_steps = position["accumulation"]

    def state() -> dict[str, Any]:
        for note in _loader_warnings(accelerator, loader, others) - told:
            told.add(note)
            warn_caller(note)
        library.share_buffers(accelerator, map(accelerator.unwrap_model, accelerator._models))
        apart.update(_differing(accelerator._custom_objects))
        counts = {"epoch": epoch, "finished": finished, "accumulated": accelerator.step}
        counts |= {"batches": batches, "batches_now": _count(loader), "ended": epoch >= epochs}
        steps = accelerator.gradient_accumulation_steps
        counts["accumulation"] = None if steps == accumulation else steps
        passes = {f"{number}": each.iteration for number, each in enumerate(others)}
        saved = {"position": counts | {"apart": sorted(apart)}, "passes": PerRank(passes)}
        return _members(accelerator, apart) | saved

    while epoch < epochs:
        run.begin_epoch()
        loader.set_epoch(epoch)
        batches = _count(loader)
        if run.resumed is not None and not is_longer:
            _require_batches(run, position, loader)
        for batch in _after(loader, finished, run):
            may_save = accelerator.sync_gradients and drawn.are_trained
            run.between_steps(step, state, may_save=may_save)
            drawn.add()
            yield step, batch
            step, finished = step + 1, finished + 1
        epoch, finished = epoch + 1, 0
    run.begin_epoch()
    run.finish(step, state, may_save=drawn.are_trained)


class _Drawn:
    """The batches that the loop has drawn. A save counts all of them as trained, which is right if a
    prepared optimizer has stepped since the last batch: a loop may draw the batches of an accumulation
    before it trains on the first."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._has_stepped = True

    def on_step(self, optimizer: Any, *_: Any) -> None:
        """After a step of any optimizer: one that a prepared one has inside (SAM) counts as well."""
        if not self._has_stepped:
            prepared = map(_parameters, self._accelerator._optimizers)
            own = {id(each) for parameters in prepared for each in parameters}
            self._has_stepped = any(id(each) in own for each in _parameters(optimizer))

    def add(self) -> None:
        self._has_stepped = False

    @property
    def are_trained(self) -> bool:
        return self._has_stepped or not self._accelerator._optimizers


def _parameters(optimizer: Any) -> Iterator[Any]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _wrappers(accelerator: Any) -> list[Any]:
    """The DDP modules around the models of an Accelerator, which keeps no reference to them."""
    kind = torch.nn.parallel.DistributedDataParallel
    own = {id(each) for model in accelerator._models for each in model.parameters()}
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return [each for each in found if not own.isdisjoint(map(id, each.parameters()))]


def _count(loader: Any) -> int:
    return len(loader) if hasattr(loader.dataset, "__len__") else -1


def _even_count(loader: Any) -> int:
    """The number of batches in an epoch, which is the same in all processes."""
    counts = sorted(set(gather_object([_count(loader)])))
    if len(counts) > 1:
        raise StateError(
            f"batches: expected the same number of batches in each process, because all save the same "
            f"steps; found {' and '.join(map(str, counts))}. Make the Accelerator with "
            f"`even_batches=True`, the default of DataLoaderConfiguration."
        )
    return counts[0]


def _require_batches(run: library.LibraryRun, position: dict[str, Any], loader: Any) -> None:
    """Refuse an epoch that is not as it was when it began, nor as it was at the save."""
    found, began = _count(loader), position["batches"]
    for expected in (began, position["batches_now"]):
        if expected != found:
            raise StateError(
                f"{run.manager.directory}: expected {expected} batches in an epoch, as the run had, "
                f"found {found} (-1: a dataset without a length). With another dataset or batch size "
                f"the steps would have other examples. Make the loader as before (a dataset whose "
                f"length changes does so in its `set_epoch`), or begin in another directory."
            )


def _restore_passes(loaders: list[Any], passes: dict[str, Any]) -> None:
    """Let the loaders that were not passed begin their next pass as they would have."""
    if len(passes) != len(loaders):
        raise StateError(
            f"batches: expected {len(passes)} prepared loaders beside the one that is passed, as "
            f"the run had, found {len(loaders)}. Prepare the same ones before the loop."
        )
    for number, each in enumerate(loaders):
        each.iteration = passes[f"{number}"]


_OTHER_LOADER = (
    "perdure.plugins.accelerate.batches: another prepared loader is within its batches at a save. Only "
    "the loader that was passed keeps its position; a resumed run begins the other one again, and has "
    "other batches. Make its iterator at the begin of each epoch and resume there, or write the loop "
    "with a CheckpointManager and a `perdure.torch.ResumableLoader` for each loader. If the loop has "
    "left it (`break`, `next(iter(loader))`), call `loader.end()` there: Accelerate counts it as "
    "within its batches until then, also when it accumulates gradients."
)


_LATE_LOADER = (
    "perdure.plugins.accelerate.batches: a loader that was prepared within the loop has been iterated "
    "more than once. A resumed run prepares it again, so that it begins with its first order: if it "
    "shuffles, its batches are other ones. Prepare it before the loop."
)


def _loader_warnings(accelerator: Any, loader: Any, known: list[Any]) -> set[str]:
    """What to warn of at a save: the other prepared loaders that a resume does not continue."""
    prepared = {id(each): each for each in accelerator._dataloaders if each is not loader}
    within = set(map(id, accelerator.gradient_state.dataloader_references))
    notes = set[str]() if within.isdisjoint(prepared) else {_OTHER_LOADER}
    # One that the loop prepares for each evaluation has one pass, in every run.
    late = (prepared[each] for each in prepared.keys() - set(map(id, known)))
    return notes | ({_LATE_LOADER} if any(each.iteration > 1 for each in late) else set())


_PLACE = ("end_of_dataloader", "remainder", "iteration")
_END = object()


def _after(loader: Any, finished: int, run: library.LibraryRun) -> Iterator[Any]:
    """The batches of an epoch after the first `finished` ones, which a resumed run has trained on."""
    loaded = finished if finished and run.must_load_again(loader) else 0
    source = _skipped(loader, finished) if finished > loaded else loader
    batches = iter(source)
    for number in itertools.count():
        batch = run.loading.apart(partial(next, batches, _END))
        for name in _PLACE if source is not loader else ():
            setattr(loader, name, getattr(source, name))  # what the program has says where it is
        if batch is _END:
            return
        if number >= loaded:
            yield batch


def _skipped(loader: Any, count: int) -> Any:
    """`loader` without its first batches, which says the same of its batches: `gather_for_metrics` asks
    their size, to leave out the examples with which the last one was filled."""
    skipped = skip_first_batches(loader, count)
    skipped._drop_last = getattr(loader, "_drop_last", False)
    for part in (skipped.sampler, skipped.batch_sampler):
        if isinstance(part, SkipBatchSampler):
            whole = part.batch_sampler
            names = ("batch_size", "split_batches", "num_processes")
            vars(part).update({n: getattr(whole, n) for n in names if hasattr(whole, n)})
    return skipped


def _members(accelerator: Any, apart: Collection[int]) -> dict[str, Any]:
    """What Accelerate's own `save_state` saves, without its wrappers, which add nothing. Each process
    has its own of the registered objects with these numbers."""
    objects = enumerate(accelerator._custom_objects)
    members = {
        "models": [accelerator.unwrap_model(model) for model in accelerator._models],
        "optimizers": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "schedulers": [scheduler.scheduler for scheduler in accelerator._schedulers],
        "scaler": accelerator.scaler,
        "objects": [PerRank(each) if number in apart else each for number, each in objects],
    }
    return {name: member for name, member in members.items() if member}


def _differing(objects: list[Any]) -> list[int]:
    """The numbers of the objects that have another state in another process."""
    by_process = zip(*gather_object([list(map(library.digest_of, objects))]), strict=True)
    return [number for number, found in enumerate(by_process) if len(set(found)) > 1]
