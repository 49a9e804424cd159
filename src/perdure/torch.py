"""For users of PyTorch: data loaders, strategies, metrics, losses, and gradients as values.

Inside the package this module is `perdure.torch`; `import torch` still means the framework.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perdure.checkpoint import PerRank
from perdure.checkpoint.checkpoint import load_verified
from perdure.distribute import (
    AutoShardPolicy,
    InputContext,
    ReduceOp,
    compute_average_loss,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    metrics,
    scale_regularization_loss,
)
from perdure.distribute.cluster import ClusterOptions, ClusterResolver, resolve_for
from perdure.distribute.key_value_group import initialize_distributed
from perdure.distribute.strategy import Strategy
from perdure.errors import ClusterError, StateError, needs_extra
from perdure.runtime.process_group import Processes, SingleProcess
from perdure.store import Storage
from perdure.store.selection import WantedLeaves
from perdure.tensorflow_names import missing, names_forms

with needs_extra("torch"):
    import torch

    from perdure.distribute.torch.engine import TorchEngine
    from perdure.distribute.torch.group import join, subgroup
    from perdure.distribute.torch.logical_replicas import LogicalReplicas
    from perdure.distribute.torch.state_view import named_parameters
    from perdure.state.object_restore import module_tensors
    from perdure.state.torch_loader import ResumableLoader

__all__ = [
    "AutoShardPolicy",
    "InputContext",
    "LogicalReplicas",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PerRank",
    "ReduceOp",
    "ResumableLoader",
    "apply_gradients",
    "compute_average_loss",
    "get_replica_context",
    "get_strategy",
    "gradients",
    "has_strategy",
    "in_cross_replica_context",
    "metrics",
    "process_group",
    "scale_regularization_loss",
    "state_dict",
]


class MirroredStrategy(Strategy):
    """The devices of one process; they share its memory and the state.

    Their replicas are computed one after another. To use several cores or accelerators at once, start
    a process for each, with MultiWorkerMirroredStrategy (`perdure run --workers 2`): the same bits.

    Args:
        devices: None (the CPU), a number of CPU devices, a device ("cuda:0" or "/gpu:0"), or a list.
        replicas: V, the number of logical replicas; by default the number of devices.
        seed: 0 to 2**63 - 1.
        threads: The number of threads inside an operation, which is part of the recipe; by default 1.
        compile: A backend of `torch.compile` ("inductor") for the `grad` of `step`, which is part of
            the recipe; by default None.

    Raises:
        TopologyError: The devices or the backend do not exist, or are several accelerators.
    """

    @names_forms("Strategy")
    def __init__(
        self,
        devices: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        compile: str | None = None,
    ) -> None:
        super().__init__(
            TorchEngine(devices, SingleProcess(), threads, compile), replicas, seed=seed
        )


class OneDeviceStrategy(MirroredStrategy):
    """One device; by default the CPU."""

    @names_forms("Strategy")
    def __init__(
        self,
        device: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        compile: str | None = None,
    ) -> None:
        super().__init__(device, replicas, seed=seed, threads=threads, compile=compile)


class MultiWorkerMirroredStrategy(Strategy):
    """The devices of a group of processes.

    The group is, in this order: the one that the program has already initialized in the framework, that
    of `cluster_resolver`, or the one that the environment describes (docs/CLUSTER.md). A step raises
    WorkerLostError when another process dies: save nothing, leave, and restart the whole group.

    Args:
        cluster_resolver: The group, or the name of a source ("slurm").
        options: Time limits.

    The other arguments are those of `MirroredStrategy`; `devices` are the local ones.

    Raises:
        ClusterError: A process does not come or comes twice, or descriptions contradict each other.
        RecipeMismatchError: The processes have different recipes.
    """

    @names_forms("Strategy")
    def __init__(
        self,
        cluster_resolver: ClusterResolver | str | None = None,
        replicas: int | None = None,
        *,
        devices: Any = None,
        seed: int = 0,
        threads: int | None = None,
        compile: str | None = None,
        options: ClusterOptions | None = None,
    ) -> None:
        cluster = resolve_for("torch", cluster_resolver)
        processes = join(cluster, options)
        super().__init__(TorchEngine(devices, processes, threads, compile), replicas, seed=seed)
        self.cluster_resolver = cluster


def process_group(group: Any = None) -> Processes:
    """The processes of a `torch.distributed` group that exists, for a `CheckpointManager`.

    For scripts that call `init_process_group`: `CheckpointManager(..., processes=process_group())`.
    Messages go through the store of the default group, and not through its collectives.

    Args:
        group: The group; None for the default one. For others, every process of the default group makes
            this call with a group to which it belongs, before the first manager.

    Raises:
        ClusterError: There is no default group, or this process does not belong to `group`.
    """
    if not torch.distributed.is_initialized():
        raise ClusterError(
            "process_group: expected torch.distributed to be initialized. Call "
            "torch.distributed.init_process_group first, or perdure.initialize_distributed('torch'), "
            "which does that."
        )
    processes = initialize_distributed("torch")
    return processes if group is None else subgroup(processes, group)


def gradients(
    loss: torch.Tensor, module: torch.nn.Module, *, unused: str = "error"
) -> dict[str, torch.Tensor]:
    """Gradients of a loss, for every parameter of a module that requires one.

    Args:
        loss: A scalar tensor.
        module: The module whose parameters are meant.
        unused: For a parameter that the loss does not depend on: "error", or "zeros" for a gradient of
            zeros, with which an optimizer still decays and moves the parameter.

    Returns:
        The gradients by parameter name, with the shapes and dtypes of the parameters.

    Raises:
        StateError: The loss does not depend on a parameter, and `unused` is "error".
    """
    if unused not in ("error", "zeros"):
        raise StateError(f'unused: expected "error" or "zeros", found {unused!r}')
    parameters = {n: p for n, p in named_parameters(module).items() if p.requires_grad}
    found = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    grads = dict(zip(parameters, found, strict=True))
    missing = [name for name, grad in grads.items() if grad is None]
    if missing and unused == "error":
        raise StateError(
            f"the loss does not depend on {', '.join(missing)}; freeze them with "
            'requires_grad_(False), or pass unused="zeros"'
        )
    return grads | {name: torch.zeros_like(parameters[name]) for name in missing}


def apply_gradients(
    module: torch.nn.Module, grads: Mapping[str, torch.Tensor], scale: Any = 1.0
) -> None:
    """Set the `.grad` of every parameter to grads * scale; call `optimizer.step()` next.

    Args:
        module: The module whose parameters are meant. A parameter without an entry gets no gradient.
        grads: The gradients by parameter name, summed over all replicas.
        scale: A factor, such as 1 / weight; a number or a scalar tensor.

    Raises:
        StateError: A name is not that of a parameter.
    """
    parameters = named_parameters(module)
    if unknown := sorted(grads.keys() - parameters.keys()):
        raise StateError(
            f"grads: expected names of parameters of the module, found {', '.join(unknown)} as well; "
            "take them from module.named_parameters()"
        )
    for parameter in parameters.values():
        parameter.grad = None  # not alive beside the new one
    with torch.no_grad():
        scaled = torch._foreach_mul(list(grads.values()), scale) if grads else ()  # pyright: ignore[reportPrivateImportUsage]
    new = dict(zip(grads, scaled, strict=True))
    for name, parameter in parameters.items():
        parameter.grad = new.get(name)


def state_dict(
    directory: str | os.PathLike[str] | Storage, branch: str, step: int | None = None
) -> dict[str, Any]:
    """The tensors of one module in a checkpoint, as its `load_state_dict` takes them.

    Needs none of the code of the model, reads only this branch, and changes nothing.

    Args:
        directory: The run directory or one checkpoint of it, as for `perdure.load_checkpoint`.
        branch: The path of the module in the state, such as "model"; "" if the module is the state.
        step: The step; None for the newest good checkpoint, with a warning of newer damaged ones.

    Returns:
        Tensors on the CPU by dotted name (`encoder.0.weight`), each with memory and dtype of its own.
        The arrays of a state that was saved from JAX or NumPy become tensors too.

    Raises:
        StepNotFoundError: There is no such checkpoint.
        LeafNotFoundError: It has nothing at `branch`.
        MismatchError: At `branch` is the state of an optimizer or of another object.
        CorruptionError, UnreachableError: As `perdure.load_checkpoint`.
    """
    prefix = f"{branch}/" if branch else ""
    wanted = WantedLeaves(
        lambda path: path.startswith(prefix) or path == branch, f"the branch {branch!r}", (branch,)
    )
    loaded = load_verified(directory, step, wanted)
    return module_tensors(loaded.leaves, branch)


if not TYPE_CHECKING:  # a type checker reports such names itself

    def __getattr__(name: str) -> Any:
        raise missing("perdure.torch", name)
