"""Runs programs of others: counts their training steps, interrupts one of them, hashes their end.

    python observe.py PROGRAM [ARGUMENT ...]
    python observe.py --serve MODULE [...]

A program is run as `__main__`, unchanged. As a server it imports the modules, which takes seconds,
reads a line of JSON for each program, `{argv, cwd, environment, output, ranks}`, runs it in a fork,
under torchrun's launcher if there are several ranks, and answers with its exit status. Environment:

- OBSERVE_OUT: a folder. `fired-RANK` is written before the fault, `end-RANK.json` at the end.
- OBSERVE_STEP: what counts as a step. Empty: each `Tensor.backward` of PyTorch.
  `MODULE.DECORATOR:NAME`: each call of the function NAME that the program decorates so.
- OBSERVE_FAULT: `SIGKILL:17` or `SIGTERM:17` sends that signal at the 17th step of this process.
- OBSERVE_RANK: the rank that is interrupted (0).
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


class Observer:
    """The steps of this process, and what will be hashed at its end."""

    def __init__(self) -> None:
        self.steps = 0
        self.out = Path(os.environ["OBSERVE_OUT"])
        self.rank = os.environ.get("RANK", "0")
        self.held: list[Any] = []
        self.first_weights = ""
        name, _, step = os.environ.get("OBSERVE_FAULT", "").partition(":")
        self._signal = signal.Signals[name] if name else None
        self._at = int(step or 0)

    def step(self) -> None:
        self.steps += 1
        is_due = self._signal is not None and self.steps == self._at
        if is_due and os.environ.get("OBSERVE_RANK", "0") == self.rank:
            assert self._signal is not None
            (self.out / f"fired-{self.rank}").write_text(str(self._at))
            os.kill(os.getpid(), self._signal)

    def watch_torch(self) -> None:
        """Count `Tensor.backward`; hold the modules and optimizers that exist at the first one."""
        import torch

        backward = torch.Tensor.backward

        def counted(tensor: Any, *args: Any, **kwargs: Any) -> None:
            if not self.held:
                kinds = (torch.nn.Module, torch.optim.Optimizer)
                self.held = [value for value in gc.get_objects() if isinstance(value, kinds)]
                self.first_weights = self.weights()
            backward(tensor, *args, **kwargs)
            self.step()

        setattr(torch.Tensor, "backward", counted)  # noqa: B010

    def watch_jax(self, decorator: str, name: str) -> None:
        """Count the calls of `name` under `decorator`; hold its last arguments and result."""
        module, _, attribute = decorator.rpartition(".")
        host = importlib.import_module(module)
        original = getattr(host, attribute)

        def decorate(function: Any = None, **options: Any) -> Any:
            if function is None:
                return lambda inner: decorate(inner, **options)
            compiled = original(function, **options)
            if getattr(function, "__name__", "") != name:
                return compiled

            def counted(*args: Any, **kwargs: Any) -> Any:
                result = compiled(*args, **kwargs)
                self.held = [args, result]
                self.first_weights = self.first_weights or self.weights()
                self.step()
                return result

            return counted

        setattr(host, attribute, decorate)

    def digest(self) -> str:
        """A hash of all weights and moments."""
        return _digest_all(self.held)

    def weights(self) -> str:
        """A hash without what has a learning rate, so without optimizers of PyTorch."""
        return _digest_all([part for part in self.held if not hasattr(part, "param_groups")])


def _leaves(value: Any) -> list[tuple[str, str, bytes]]:
    """Path, type and bytes of each array in `value`."""
    if "torch" in sys.modules and hasattr(value, "state_dict"):
        return _torch_leaves("", value.state_dict())
    return _jax_leaves(value)


def _torch_leaves(path: str, value: Any) -> list[tuple[str, str, bytes]]:
    import torch

    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _torch_leaves(f"{path}/{k}", v)]
    if isinstance(value, (list, tuple)):
        return [leaf for k, v in enumerate(value) for leaf in _torch_leaves(f"{path}/{k}", v)]
    if isinstance(value, torch.Tensor):
        local = getattr(value, "to_local", lambda: value)()  # of a DTensor: the shard of this rank
        data = local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return [(path, f"{local.dtype}{tuple(local.shape)}", data)]
    return [(path, "", repr(value).encode())] if isinstance(value, (int, float)) else []


def _jax_leaves(value: Any) -> list[tuple[str, str, bytes]]:
    import jax
    import numpy as np

    if "flax.nnx" in sys.modules:
        from flax import nnx

        def is_node(part: Any) -> bool:
            return isinstance(part, nnx.Pytree)

        value = jax.tree.map(lambda v: nnx.state(v) if is_node(v) else v, value, is_leaf=is_node)
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, (jax.Array, np.ndarray)):
            array = np.asarray(leaf)
            leaves.append(
                (jax.tree_util.keystr(path), f"{array.dtype}{array.shape}", array.tobytes())
            )
    return leaves


def _digest_all(values: list[Any]) -> str:
    """A hash in an order that does not depend on addresses."""
    parts = sorted(_digest(leaves) for leaves in map(_leaves, values) if leaves)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _digest(leaves: list[tuple[str, str, bytes]]) -> str:
    digest = hashlib.sha256()
    for path, kind, data in leaves:
        digest.update(f"{path} {kind} {len(data)} ".encode() + data)
    return digest.hexdigest()


def observe(argv: list[str]) -> None:
    """Run the program of `argv` in this process."""
    observer = Observer()
    decorator, _, name = os.environ.get("OBSERVE_STEP", "").partition(":")
    if decorator:
        observer.watch_jax(decorator, name)
    else:
        observer.watch_torch()
    program = os.path.abspath(argv[0])
    sys.argv = argv
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")
    end = {
        "steps": observer.steps,
        "digest": observer.digest(),
        "trained": observer.weights() != observer.first_weights,
    }
    (observer.out / f"end-{observer.rank}.json").write_text(json.dumps(end))


def become(order: dict[str, Any]) -> None:
    """Run the program of `order` in this fork."""
    os.setsid()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT)
    for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(target, number)
    if order["ranks"] == 1:
        observe(order["argv"])
        return
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=order["ranks"],
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, observe)(order["argv"])


def serve(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(json.loads(line))
            return
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2:])
    else:
        observe(sys.argv[1:])
