"""A training for `proof_gpu.py`, on the first accelerator: gpu_program.py ENGINE RUN STEPS.

It has what is exact on a CPU and needs care on a GPU: convolutions, attention, the gradient of an
embedding (additions to few places from many rows), dropout from the device's generator. JAX trains
under a strategy, with fast steps where `PERDURE_FAST_ON` names the platform; PyTorch in a loop of its
own, with deterministic algorithms. The last line that it prints says on what it ran.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from perdure import CheckpointManager, ManagerOptions

CLASSES, WIDTH, TOKENS, SIDE, BATCH = 10, 64, 32, 16, 32


def manager_of(run: Path, **more: Any) -> CheckpointManager:
    options = ManagerOptions(journal_every=1)
    return CheckpointManager(run, save_interval_steps=5, max_to_keep=None, options=options, **more)


def train_torch(run: Path, steps: int) -> str:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy, scaled_dot_product_attention

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.names = nn.Embedding(50, WIDTH)
            self.image = nn.Sequential(
                nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Flatten(2)
            )
            self.mix = nn.Linear(WIDTH, 3 * WIDTH)
            self.end = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, CLASSES))

        def forward(self, images: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
            rows = torch.cat([self.image(images).transpose(1, 2), self.names(names)], 1)
            heads = self.mix(rows).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
            mixed = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            return self.end(mixed.mean(1))

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with manager_of(run) as manager:
        for step in range(manager.restore_or_initialize(state).step, steps):
            images = torch.randn(BATCH, 3, SIDE, SIDE, device=device)
            names = torch.randint(50, (BATCH, TOKENS), device=device)
            classes = torch.randint(CLASSES, (BATCH,), device=device)
            optimizer.zero_grad()
            cross_entropy(model(images, names), classes).backward()
            optimizer.step()
            manager.save(step + 1, state)
    return str(device)


def train_jax(run: Path, steps: int) -> str:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from perdure.data import ArrayDataset
    from perdure.jax import MirroredStrategy

    adam = optax.adamw(1e-3)

    def init() -> dict[str, Any]:
        keys = iter(jax.random.split(jax.random.key(0), 4))
        normal = jax.nn.initializers.normal(0.1)
        params = {
            "names": normal(next(keys), (50, WIDTH)),
            "image": normal(next(keys), (3, 3, 3, WIDTH)),
            "mix": normal(next(keys), (WIDTH, 3 * WIDTH)),
            "end": normal(next(keys), (WIDTH, CLASSES)),
        }
        return {"params": params, "adam": adam.init(params)}

    def losses(params: Any, batch: Any, key: Any) -> Any:
        axes = ("NHWC", "HWIO", "NHWC")
        convolved = jax.lax.conv_general_dilated(
            batch["image"], params["image"], (1, 1), "SAME", dimension_numbers=axes
        )
        rows = convolved.reshape(len(convolved), -1, WIDTH)
        rows = jnp.concatenate([jax.nn.relu(rows), params["names"][batch["names"]]], 1)
        q, k, v = jnp.split((rows @ params["mix"]).reshape(*rows.shape[:2], 4, -1), 3, -1)
        mixed = jax.nn.dot_product_attention(q, k, v).reshape(*rows.shape).mean(1)
        kept = jax.random.bernoulli(key, 0.8, mixed.shape) / 0.8
        logits = (mixed * kept) @ params["end"]
        of_each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["class"])
        return (of_each * batch["weight"]).sum()

    def grad(state: Any, batch: Any, key: Any) -> Any:
        return {"g": jax.grad(losses)(state["params"], batch, key), "n": batch["weight"].sum()}

    def update(state: Any, total: Any) -> Any:
        grads = jax.tree.map(lambda g: g / total["n"], total["g"])
        changes, moments = adam.update(grads, state["adam"], state["params"])
        return {"params": optax.apply_updates(state["params"], changes), "adam": moments}, {}

    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.normal(size=(8 * BATCH, SIDE, SIDE, 3)).astype(np.float32),
        "names": rng.integers(50, size=(8 * BATCH, TOKENS), dtype=np.int32),
        "class": rng.integers(CLASSES, size=8 * BATCH, dtype=np.int32),
    }
    data = ArrayDataset(arrays, BATCH, seed=0)
    strategy = MirroredStrategy(replicas=4, seed=0)
    train_step = strategy.step(grad, update)
    with manager_of(run, recipe=strategy.recipe(data)) as manager:
        state, start = manager.restore_or_initialize(init)
        for step in range(start, steps):
            state, _ = train_step(state, strategy.batch(data, step))
            manager.save(step + 1, state)
    return f"{jax.devices()[0].platform}; {strategy.explain(train_step)}"


if __name__ == "__main__":
    train = {"jax": train_jax, "torch": train_torch}[sys.argv[1]]
    print(train(Path(sys.argv[2]), int(sys.argv[3])), flush=True)
