"""The buckets in which `DistributedDataParallel` (DDP) adds gradients: one arrangement for a whole run.

After its first backward pass DDP arranges them again, in the order in which gradients became ready. A
restarted process would have the first buckets for one step more, and a sum over three or more processes
depends on where an element lies in its bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perdure.errors import StateError
from perdure.state.paths import join_dotted

_arranged: WeakSet[DistributedDataParallel] = WeakSet()


def ddp_modules(
    objects: Iterable[tuple[str, Any]],
) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Path and module of each DDP in objects with their paths."""
    for path, module in objects:
        if isinstance(module, torch.nn.Module):
            for name, part in module.named_modules():
                if isinstance(part, DistributedDataParallel):
                    yield join_dotted(path, name) if name else path, part


def not_arranged(objects: Mapping[str, Any]) -> dict[str, DistributedDataParallel]:
    """The DDP modules in objects, by path, whose buckets may still change, and with them the bits."""
    return {
        path or "the state": part
        for path, part in ddp_modules(objects.items())
        if part not in _arranged and _depends_on_buckets(part)
    }


def refuse_fixed(
    found: Mapping[str, DistributedDataParallel], processes: int | None = None
) -> None:
    """Raise StateError for a DDP whose buckets cannot be arranged before its first step, by a manager
    with so many processes."""
    for path, ddp in found.items():
        if reason := _reason(ddp, processes):
            raise StateError(
                f"{path}: expected a DistributedDataParallel whose buckets can be arranged before "
                f"the first step, found {reason}. DDP arranges them after its first backward pass, so "
                f"that the first step after a resume would add the gradients of "
                f"{_size(ddp)} processes in another order than an uninterrupted run. "
                f"Make it with find_unused_parameters=True and static_graph=False, which keeps the "
                f"first buckets, or add the gradients with `perdure.torch.LogicalReplicas(ddp, n)`."
            )


def arrange(found: Iterable[DistributedDataParallel]) -> None:
    """Let DDP arrange its buckets now, in the reverse order of the parameters. A collective of each
    group. No gradient, parameter or hook of a parameter takes part."""
    for ddp in found:
        _arranged.add(ddp)
        # After a backward pass of the program they are arranged already, or in this call.
        if not ddp.reducer._rebuild_buckets():
            _rehearse(ddp)


def _rehearse(ddp: DistributedDataParallel) -> None:
    """A backward pass of zeros, as DDP runs it, in which the gradients become ready in that order."""
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    if ddp.gradient_as_bucket_view:  # the pass writes into the buckets
        gradients = [None if each is None else each.clone() for each in gradients]
    for parameter in parameters:
        parameter.grad = None
    count = ddp._get_ddp_logging_data()["num_parameter_tensors"]
    start = torch.zeros((), device=parameters[0].device, requires_grad=True)
    with torch.enable_grad():
        end = _Ready.apply(start, ddp.reducer, count)
    ddp.reducer.prepare_for_backward([])
    end.backward()
    ddp.reducer._rebuild_buckets()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


class _Ready(torch.autograd.Function):
    """Reports gradients as ready in its backward pass, at whose end DDP waits for the sums."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, reducer: Any, count: int) -> torch.Tensor:
        ctx.reducer, ctx.count = reducer, count
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for number in reversed(range(ctx.count)):
            ctx.reducer._autograd_hook(number)
        return *gradients, None, None


def _size(ddp: DistributedDataParallel) -> int:
    return dist.get_world_size(ddp.process_group)


def _depends_on_buckets(ddp: DistributedDataParallel) -> bool:
    keeps_first = ddp.find_unused_parameters and not ddp.static_graph
    adds_by_itself = getattr(ddp, "reducer", None) is None or getattr(
        ddp, "_use_python_reducer", False
    )
    of_perdure = any(
        type(held).__module__.startswith("perdure.") for _, held in getattr(ddp, "_comm_hooks", ())
    )
    # Two addends commute; order matters above two processes.
    return _size(ddp) > 2 and not (keeps_first or adds_by_itself or of_perdure)


def _reason(ddp: DistributedDataParallel, processes: int | None) -> str:
    if ddp.static_graph:
        return "static_graph=True"
    if getattr(ddp, "mixed_precision", None) is not None:
        return "mixed_precision"
    if any(getattr(part, "sparse", False) for part in ddp.modules()):
        return "a layer with sparse gradients"
    if processes is not None and (size := _size(ddp)) > processes:
        return f"a group of {size} processes, of which the manager has {processes}"
    return ""
