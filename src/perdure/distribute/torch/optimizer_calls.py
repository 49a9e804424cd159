"""PyTorch's optimizers, schedulers, scalers and `backward` in the function of `strategy.run`."""

from __future__ import annotations

from typing import Any

import torch

from perdure.distribute.run.calls import with_subclasses, wrap
from perdure.distribute.run.replicas import RunContext, current_run
from perdure.distribute.torch.eager import TorchEagerRun, run_of_this_thread
from perdure.errors import StateError


def install() -> None:
    """Wrap the methods, for calls by a replica. Called at every `run`, for classes that are new."""
    wrap(torch.autograd, "backward", _backward)
    for cls in with_subclasses(torch.optim.Optimizer):
        wrap(cls, "step", _optimizer_step)
    for cls in with_subclasses(torch.optim.lr_scheduler.LRScheduler):
        wrap(cls, "step", _scheduler_step)
    for cls in with_subclasses(torch.amp.GradScaler):  # pyright: ignore[reportPrivateImportUsage]
        wrap(cls, "step", _scaler_step)


def _current() -> tuple[RunContext, TorchEagerRun] | None:
    """The context of the replica that calls, in a run on PyTorch."""
    context = current_run()
    if context is not None and isinstance(context.eager, TorchEagerRun):
        return context, context.eager
    return None


def _backward(old: Any) -> Any:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if (current := _current()) is None:
            return old(tensors, *args, **kwargs)
        context, eager = current
        replica = context.replica_id_in_sync_group
        leaves = _leaves(tensors)
        eager.before_backward(replica, leaves)
        result = old(tensors, *args, **kwargs)
        eager.after_backward(replica, leaves)
        return result

    return backward


def _leaves(tensors: Any) -> list[torch.Tensor]:
    """The tensors whose `.grad` a backward pass from `tensors` may change."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    leaves = {id(t): t for t in roots if t.grad_fn is None and t.requires_grad}
    nodes = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list(leaves.values())


def _optimizer_step(old: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (current := _current()) is None:
            if (eager := run_of_this_thread()) is not None:
                eager.check_merged(self)
            return old(self, *args, **kwargs)
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise StateError(
                f"{type(self).__name__}.step(closure) in a replica: it would compute the loss of one "
                "replica again after others have changed the parameters. Use strategy.step, whose "
                "`update` gets the sum of the gradients"
            )
        context, eager = current
        return eager.step(context, self, lambda: old(self, *args, **kwargs))

    return step


def _scheduler_step(old: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current() is not None:
            raise StateError(
                f"{type(self).__name__}.step() in a replica would be made once for each replica. Call "
                "it once, after strategy.run"
            )
        return old(self, *args, **kwargs)

    return step


def _scaler_step(old: Any) -> Any:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _current() is not None and self.is_enabled():
            raise StateError(
                "GradScaler.step() in a replica: one replica would step and another one not, because "
                "each looks for overflows in its own gradients. Use strategy.step with "
                "perdure.distribute.LossScale, or bfloat16, which needs no scale"
            )
        return old(self, *args, **kwargs)

    return step
