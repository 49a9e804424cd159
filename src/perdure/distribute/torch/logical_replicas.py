"""`LogicalReplicas`: the gradients of logical replicas under DDP or FSDP2, added in the fixed tree.

A communication hook keeps the gradients of each local replica as a leaf of the tree. After the last
one the partial sums travel as bytes. No collective adds numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perdure.distribute.reduction_tree import TreeNode, TreeSum, merge, partial_roots
from perdure.errors import StateError, TopologyError


class LogicalReplicas:
    """Makes the gradients of a DDP or FSDP2 model the same bits on any number of processes.

    A step is computed by `count` logical replicas. Loop over those of this process, with one
    `backward` for each, on examples and random numbers that depend on the step and the replica only:

        replicas = LogicalReplicas(ddp, 12)
        for step in range(steps):
            optimizer.zero_grad()
            for replica in replicas:
                torch.manual_seed(12 * step + replica)  # for dropout
                loss(ddp(batch(step, replica))).backward()
            optimizer.step()

    After the loop, the mean over all replicas has been added to the gradient of each parameter, so that
    several loops before one `optimizer.step()` accumulate their means. To accumulate within a replica
    of DDP, use `ddp.no_sync()` for all but its last `backward`.

    Args:
        model: A `DistributedDataParallel` without another communication hook, or the root of modules to
            which `fully_shard` was applied, with one mesh of one dimension.
        count: The number of logical replicas; a multiple of the number of processes.

    Raises:
        TopologyError: `count` is no multiple of the number of processes.
        StateError: The model is neither, or DDP was made with `find_unused_parameters` or
            `static_graph` or has a communication hook, or FSDP2 has another mesh. Later, in a step: a
            `backward` outside of the loop, or a replica with none or several; or, in the step after it,
            a loop that was left early.
    """

    def __init__(self, model: torch.nn.Module, count: int) -> None:
        is_ddp = isinstance(model, DistributedDataParallel)
        self._group = model.process_group if is_ddp else _fsdp_group(model)
        self._processes = dist.get_world_size(self._group)
        index = dist.get_rank(self._group)
        if count < 1 or count % self._processes:
            raise TopologyError(
                f"LogicalReplicas: expected a multiple of the {self._processes} processes, found "
                f"{count!r}. Choose a number that all numbers of processes divide which you may use, "
                f"such as 12 for 1, 2, 3, 4 and 6."
            )
        self.count = count
        local = count // self._processes
        self._local = range(index * local, (index + 1) * local)
        self._roots = [
            partial_roots(process * local, (process + 1) * local, count)
            for process in range(self._processes)
        ]
        self._current: int | None = None
        self._sums: dict[Hashable, TreeSum[torch.Tensor]] = {}
        self._pushed: set[Hashable] = set()
        self._model, self._is_ddp = model, is_ddp
        self._left_at: int | None = None
        if is_ddp:
            _register_with_ddp(model, self)
        else:
            _register_with_fsdp(model, self)

    def __iter__(self) -> Iterator[int]:
        """The numbers of the replicas of this process, in one step."""
        self._require_finished()
        self._sums = {}
        earlier = self._take_gradients()
        try:
            for replica in self._local:
                self._current, self._pushed = replica, set()
                yield replica
                if len(self._pushed) != max(1, len(self._sums)):
                    raise StateError(
                        f"LogicalReplicas: expected one backward() for replica {replica}, found "
                        f"{len(self._pushed)} gradients for {len(self._sums)} parameters (or groups "
                        f"of them). Call it once for each replica, outside of no_sync()."
                    )
            for parameter, gradient in earlier:
                if parameter.grad is not None:
                    gradient += parameter.grad
                parameter.grad = gradient
        except GeneratorExit:  # a `break`: the model has no gradients of this step
            self._left_at = self._current
            raise
        finally:
            self._current = None
            self._sums = {}
            if self._left_at is not None:
                for parameter in self._model.parameters():
                    parameter.grad = None  # so that `optimizer.step()` changes nothing

    def _take_gradients(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The gradients of earlier loops, which the means of this loop are added to.

        DDP gives its hook the whole `.grad`; FSDP2 gives only what a backward computed.
        """
        if not self._is_ddp:
            return []
        found = [(p, p.grad) for p in self._model.parameters() if p.grad is not None]
        nonzero = [
            gradient.any() for _, gradient in found
        ]  # all kernels start before a value is read
        taken = []
        for (parameter, gradient), flag in zip(found, nonzero, strict=True):
            if flag:
                taken.append((parameter, gradient.detach().clone()))  # it may be a view of a bucket
                parameter.grad = None
        return taken

    def _require_finished(self) -> None:
        if (replica := self._left_at) is not None:
            self._left_at = None
            raise StateError(
                f"LogicalReplicas: expected all replicas in each step, found a loop that was left at "
                f"replica {replica}. The gradients of that step were removed. Compute all replicas, "
                f"also if their examples have weight 0."
            )

    def reduce_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The communication hook of DDP: takes the gradients of a bucket for the current replica."""
        gradients = bucket.gradients()
        # A bucket may have other parameters than in the backward before, so each has its own tree.
        trees = [
            self._push(parameter, leaf)
            for parameter, leaf in zip(bucket.parameters(), _canonical(gradients), strict=True)
        ]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self._current != self._local[-1]:
            done.set_result(bucket.buffer().zero_())  # the next replica adds to this
            return done
        rows = [
            torch.cat([value.reshape(-1) for _, value in values])
            for values in zip(*(tree.roots() for tree in trees), strict=True)
        ]
        size = -(-rows[0].numel() // self._processes)
        part = self._mean_slice(rows, size)
        line = part.new_empty(self._processes, size)
        work = dist.all_gather(list(line), part, self._group, async_op=True)
        assert work is not None

        def unpack(_: Any) -> torch.Tensor:
            start = 0
            for gradient in gradients:  # views of the buffer, which may have other strides
                stop = start + gradient.numel()
                gradient.copy_(line.view(-1)[start:stop].view(gradient.shape))
                start = stop
            return bucket.buffer()

        return work.get_future().then(unpack)

    def reduce_scatter(self, key: Hashable, gradients: torch.Tensor, out: torch.Tensor) -> None:
        """The communication of FSDP2: takes the gradients of a group of parameters.

        Args:
            key: The group.
            gradients: Those of the current replica, as one slice for each process.
            out: Is set to the slice of this process, which FSDP2 adds to the gradients.
        """
        (leaf,) = _canonical([gradients])
        tree = self._push(key, leaf)
        if self._current != self._local[-1]:
            out.zero_()
            return
        # FSDP2 sets or adds this, and only one of them keeps -0.0.
        (total,) = _canonical([self._mean_slice([row for _, row in tree.roots()], out.numel())])
        out.copy_(total)

    def _push(self, key: Hashable, leaf: torch.Tensor) -> TreeSum[torch.Tensor]:
        """Add a gradient of the current replica to the tree of its parameter."""
        if self._current is None:
            raise StateError(
                "LogicalReplicas: expected backward() inside of `for replica in replicas`, found one "
                "outside of it."
            )
        if key in self._pushed:
            raise StateError(
                f"LogicalReplicas: expected one backward() for replica {self._current}, found a second "
                f"one. Add up the losses of the replica and call backward() once, or, under DDP, call "
                f"all but the last one in no_sync()."
            )
        tree = self._sums.get(key)
        if tree is None:
            tree = self._sums[key] = TreeSum(self.count, torch.add)
        tree.push(TreeNode(0, self._current), leaf)
        self._pushed.add(key)
        return tree

    def _mean_slice(self, rows: list[torch.Tensor], size: int) -> torch.Tensor:
        """This process's slice of `size` elements (the last is padded) of the mean of all.

        A collective.
        """
        sent = rows[0].new_zeros(self._processes, len(rows), size)
        for number, row in enumerate(rows):
            for process, part in enumerate(row.split(size)):
                sent[process, number, : part.numel()] = part
        counts = [len(roots) for roots in self._roots]
        received = sent.new_empty(sum(counts), size)
        dist.all_to_all_single(
            received.view(-1),
            sent.view(-1),
            [count * size for count in counts],
            [len(rows) * size] * self._processes,
            self._group,
        )
        nodes = [node for roots in self._roots for node in roots]
        ((_, total),) = merge(zip(nodes, received, strict=True), self.count, torch.add)
        return total / self.count


class _TreeReduceScatter:
    """The reduce-scatter of one group of parameters of FSDP2 (`torch.distributed.fsdp` calls it)."""

    def __init__(self, replicas: LogicalReplicas) -> None:
        self._replicas = replicas

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._replicas.reduce_scatter(self, input_tensor, output_tensor)

    def alone(self, gradients: torch.Tensor) -> None:
        """FSDP2 reduces nothing in a group of one process, and calls this hook instead."""
        self._replicas.reduce_scatter(self, gradients, gradients)


def _register_with_ddp(ddp: DistributedDataParallel, replicas: LogicalReplicas) -> None:
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(ddp, option):
            raise StateError(
                f"LogicalReplicas: expected a DistributedDataParallel without {option}=True, with "
                f"which it leaves out gradients that only some replicas have."
            )
    try:
        # A function, whose annotations would be strings, which DDP refuses.
        ddp.register_comm_hook(replicas, lambda replicas, bucket: replicas.reduce_bucket(bucket))
    except RuntimeError as error:
        raise StateError(
            f"LogicalReplicas: expected a DistributedDataParallel without a communication hook, found "
            f"one that DDP adds no other hook to ({error}). Remove that hook; for one model make "
            f"LogicalReplicas once."
        ) from error


def _register_with_fsdp(model: torch.nn.Module, replicas: LogicalReplicas) -> None:
    for module in _fsdp_modules(model):
        comm = _TreeReduceScatter(replicas)
        if replicas._processes == 1:
            module.set_all_reduce_hook(comm.alone)
        module.set_custom_reduce_scatter(comm)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _fsdp_modules(model: torch.nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [m for m in model.modules() if fsdp is not None and isinstance(m, fsdp.FSDPModule)]


def _fsdp_group(model: torch.nn.Module) -> Any:
    """The processes over which `fully_shard` has sharded all parameters of a model."""
    if not _fsdp_modules(model):
        raise StateError(
            f"LogicalReplicas: expected a DistributedDataParallel, or a module after `fully_shard`, "
            f"found a {type(model).__name__}."
        )
    meshes = set()
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if parameter.requires_grad and (mesh is None or mesh.ndim != 1):
            raise StateError(
                f"LogicalReplicas: expected all parameters to be sharded over one mesh of one "
                f"dimension, found {name} with {'no mesh' if mesh is None else mesh}."
            )
        meshes.add(mesh)
    if len(meshes - {None}) != 1:
        raise StateError(f"LogicalReplicas: expected one mesh, found {len(meshes - {None})}.")
    return (meshes - {None}).pop().get_group()


def _canonical(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in which each -0.0 is 0.0: the fate of -0.0 depends on the earlier .grad."""
    return list(torch._foreach_add(values, 0.0))  # pyright: ignore[reportPrivateImportUsage]
