"""Plants single-bit errors into contributions of a strategy, and says what its audit made of them.

Each trial flips one bit in one computation of one contribution, of a replica that the step audits: in
that which is added, or in that which is compared with it. Run alone or as one of several processes;
process 0 writes the result.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from perdure.data import ArrayDataset
from perdure.distribute import audit
from perdure.distribute.audit import draw
from perdure.distribute.engine import Stream
from perdure.errors import SilentCorruptionError

REPLICAS = 12
FEATURES, CLASSES = 16, 5
WORD_BITS = 32


class Fault:
    """The bit that is flipped next, and how often it was."""

    def __init__(self) -> None:
        self.at: tuple[int, int, int] | None = None  # step, replica, number of the computation
        self.element = self.bit = 0
        self.computed: dict[tuple[int, int], int] = {}
        self.fired = 0

    def plant(self, step: int, replica: int, number: int, element: int, bit: int) -> None:
        """Flip `bit` of `element` of the weights when `replica` is computed for that time."""
        self.at, self.element, self.bit = (step, replica, number), element, bit
        self.computed.clear()

    def due(self, stream: Stream) -> bool:
        """Count a computation; whether it is the one that is wrong."""
        key = (stream.step, stream.replica)
        number = self.computed.get(key, 0)
        self.computed[key] = number + 1
        if self.at == (*key, number):
            self.fired += 1
            return True
        return False


def jax_case(devices: int, processes: int) -> tuple[Any, Any, Any, Any, Any]:
    import jax
    import jax.numpy as jnp

    from perdure.jax import MirroredStrategy, MultiWorkerMirroredStrategy

    if processes > 1:
        strategy: Any = MultiWorkerMirroredStrategy(replicas=REPLICAS, devices=devices, seed=7)
    else:
        strategy = MirroredStrategy(devices, REPLICAS, seed=7)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        def loss(parameters: Any) -> Any:
            logits = batch["x"] @ parameters["w"] + parameters["b"]
            return (jnp.tanh(logits) ** 2).sum() + jax.random.normal(key, ()) * logits.sum()

        return {"grads": jax.grad(loss)(state), "count": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        new = jax.tree.map(lambda p, g: p - 0.01 * g / total["count"], state, total["grads"])
        return new, {}

    def flip(value: Any, element: int, bit: int) -> Any:
        weights = np.array(value["grads"]["w"])
        weights.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
        (device,) = value["grads"]["w"].devices()
        return {**value, "grads": {**value["grads"], "w": jax.device_put(weights, device)}}

    state = {"w": jnp.ones((FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)}
    return strategy, grad, update, state, flip


def torch_case(devices: int, processes: int) -> tuple[Any, Any, Any, Any, Any]:
    import torch

    from perdure.torch import MirroredStrategy, MultiWorkerMirroredStrategy

    if processes > 1:
        strategy: Any = MultiWorkerMirroredStrategy(
            replicas=REPLICAS, devices=["cpu"] * devices, seed=7
        )
    else:
        strategy = MirroredStrategy(devices, REPLICAS, seed=7)

    def grad(state: Any, batch: Any, key: Any) -> Any:
        logits = state["net"](batch["x"])
        noise = torch.randn((), generator=key)
        loss = (logits**2).sum() + noise * logits.sum()
        grads = torch.autograd.grad(loss, list(state["net"].parameters()))
        return {"grads": {"w": grads[0], "b": grads[1]}, "count": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        with torch.no_grad():
            parameters = state["net"][0].parameters()
            for parameter, name in zip(parameters, ("w", "b"), strict=True):
                parameter -= 0.01 * total["grads"][name] / total["count"]
        return state, {}

    def flip(value: Any, element: int, bit: int) -> Any:
        weights = value["contributions"]["grads"]["w"].clone()
        words = weights.view(-1).view(torch.int32).numpy().view(np.uint32)
        words[element] ^= np.uint32(1 << bit)
        value["contributions"]["grads"]["w"] = weights
        return value

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES), torch.nn.Dropout(0.2))
    return strategy, grad, update, {"net": net}, flip


def blame_the_owner() -> None:
    """The negative control: no third computation, and the device that runs the replica is blamed."""
    module: Any = audit
    module.further = lambda _: ()
    module.judge = lambda computed: audit.Judgement((computed[0].device,), 1, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--engine", choices=["jax", "torch"], required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--errors", type=int, default=0)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--two-computations", action="store_true")
    options = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    make = jax_case if options.engine == "jax" else torch_case
    strategy, grad, update, state, flip = make(options.devices, processes)
    if options.two_computations:
        blame_the_owner()

    fault, engine = Fault(), strategy.engine
    honest = type(engine).grad

    def faulty(self: Any, fn: Any, placed: Any, share: Any, stream: Stream) -> Any:
        value = honest(self, fn, placed, share, stream)
        return flip(value, fault.element, fault.bit) if fault.due(stream) else value

    type(engine).grad = faulty
    rows = np.random.default_rng(1).random((4096, FEATURES), np.float32)
    dataset = ArrayDataset({"x": rows}, batch_size=2 * REPLICAS)
    train_step = strategy.step(grad, update, audit=options.rate)
    state, _ = train_step(state, strategy.batch(dataset, 0))  # compiles
    result = {"clean": 0, "alarms": 0, "planted": 0, "found": 0, "named": 0, "drawn": 0}
    for step in range(1, options.clean + 1):
        try:
            state, _ = train_step(state, strategy.batch(dataset, step))
        except SilentCorruptionError:
            result["alarms"] += 1
        result["clean"] += 1

    random = np.random.default_rng(2)
    parts = strategy._plan.parts
    places = [(p, d) for p, ranges in enumerate(parts) for d in range(len(ranges))]
    for step in range(options.clean + 1, options.clean + options.errors + 1):
        candidates = draw(7, step, 1.0, parts)
        drawn = candidates[random.integers(len(candidates))]
        number = int(random.integers(2))
        # In two processes each counts its own computations: the second is another process's first.
        culprit = (*drawn.devices, drawn.devices[0])[number]
        process, device = places[culprit]
        same = process == places[drawn.devices[0]][0]
        mine = process == strategy.processes.index
        element = int(random.integers(FEATURES * CLASSES))
        bit = int(random.integers(WORD_BITS))
        if mine:
            fault.plant(step, drawn.replica, number if same else 0, element, bit)
        result["planted"] += 1
        result["drawn"] += bool(draw(7, step, options.rate, parts))
        try:
            train_step(state, strategy.batch(dataset, step))
        except SilentCorruptionError as error:
            result["found"] += 1
            named = [(found.process, found.device) for found in error.devices]
            right = (error.step, error.replica, error.bits) == (step, drawn.replica, 1)
            result["named"] += right and error.is_decided and named == [(process, device)]
    fired = sum(int(text) for text in strategy.processes.gather(str(fault.fired).encode()))
    if strategy.is_chief:
        options.result.write_text(json.dumps({**result, "fired": fired}))


if __name__ == "__main__":
    main()
