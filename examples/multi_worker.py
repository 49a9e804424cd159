"""Two workers, one of which is killed and restarted.

TensorFlow's tutorial "Custom training loop with Keras and MultiWorkerMirroredStrategy": `TF_CONFIG`,
and a checkpoint that holds `epoch` and `step_in_epoch`. Without `TF_CONFIG` this program starts the
workers, as a supervisor or a cluster does:

    python examples/multi_worker.py --data PATH --epochs 3
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import options, prove
from torch import nn
from torch.nn.functional import cross_entropy

import perdure
from perdure.demo.digits import load_digits
from perdure.errors import WorkerLostError
from perdure.torch import MultiWorkerMirroredStrategy, apply_gradients, gradients

REPLICAS = 2  # part of the recipe; the number of workers is not
args = options(__doc__, epochs=2, batch=128, save_every=5, kill_at=17)


def grad(state: Any, batch: Any, key: Any) -> Any:
    """One logical replica: sums, never means. Dropout is a function of (seed, step, replica)."""
    logits = state.model(batch["image"].permute(0, 3, 1, 2))
    losses = cross_entropy(logits, batch["label"].long(), reduction="none")
    loss = (losses * batch["weight"]).sum()
    return {"grads": gradients(loss, state.model), "loss": loss, "weight": batch["weight"].sum()}


def update(state: Any, total: Any) -> Any:
    """Update once for all replicas, with the sum of their results."""
    apply_gradients(state.model, total["grads"], 1 / total["weight"])
    state.optimizer.step()
    return state, total["loss"] / total["weight"]


def train(directory: Path) -> None:
    """The program of every worker."""
    strategy = MultiWorkerMirroredStrategy(replicas=REPLICAS)  # reads TF_CONFIG
    dataset = perdure.ArrayDataset(load_digits(args.data).train, args.batch, seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Dropout(0.2)
    ).append(nn.Linear(16 * 36, 10))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    state = perdure.Checkpoint(model=model, optimizer=optimizer, epoch=0, step_in_epoch=0)
    train_step = strategy.step(grad, update)
    with perdure.CheckpointManager(
        directory,
        save_interval_steps=args.save_every,
        recipe=strategy.recipe(dataset),
        processes=strategy.processes,
    ) as manager:
        state, step = manager.restore_or_initialize(state)
        steps = args.epochs * dataset.steps_per_epoch
        if strategy.is_chief:
            print(f"  starts in epoch {state.epoch}, step_in_epoch {state.step_in_epoch}")
        while state.epoch < args.epochs:
            while state.step_in_epoch < dataset.steps_per_epoch:
                state, loss = train_step(state, strategy.batch(dataset, step))
                state.step_in_epoch += 1
                step += 1
                if step == args.kill_at and not strategy.is_chief:
                    print(f"  worker 1 is killed after step {step}", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                manager.save(step, state, force=step == steps)
                if strategy.is_chief and state.step_in_epoch == dataset.steps_per_epoch:
                    print(f"  epoch {state.epoch + 1} done, loss {loss:.4f}")
            state.epoch, state.step_in_epoch = state.epoch + 1, 0


def workers(count: int, directory: Path, kill_at: int = 0) -> list[int]:
    """Start `count` workers on this machine, wait for all, and return their exit statuses."""
    with contextlib.ExitStack() as held:  # different ports, because all are open at once
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
    print(f"{count} worker(s):", flush=True)
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += ["--directory", f"{directory}", "--kill-at", f"{kill_at}"]
    started = []
    for index in range(count):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        started.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": json.dumps(task)}))
    return [process.wait() for process in started]


def main() -> None:
    if "TF_CONFIG" in os.environ:
        try:
            train(args.directory)
        except WorkerLostError as error:
            print(f"  worker 0 leaves: {error}", flush=True)
            os._exit(1)  # a normal exit would wait for the lost worker
        return
    alone, group = args.directory / "one-worker", args.directory / "two-workers"
    ended = [
        workers(1, alone),
        workers(2, group, kill_at=args.kill_at),
        workers(2, group),  # both are restarted, because a group resumes together
    ]
    print("exit statuses:", ended)
    assert ended == [[0], [1, -signal.SIGKILL], [0, 0]]
    prove(alone, group)


if __name__ == "__main__":
    main()
