"""The planted programs in PyTorch, JAX and Keras; see `planted`."""

from __future__ import annotations

from textwrap import dedent, indent

from drill_programs.planted_numpy import OPEN, Program

_TORCH = """\
import os

import torch

from perdure import CheckpointManager, ManagerOptions

SEED = int(os.environ.get("SEED", "0"))
STEPS, EVERY = 8, 2
torch.set_num_threads(1)
torch.manual_seed(SEED)
examples = torch.randn(64, 12)
layers = [torch.nn.Linear(12, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)]

"""


def torch_program(
    before: str, state: str, body: str, *causes: str, save: str = "", options: str = ""
) -> Program:
    """A loop in PyTorch; `state` is what is saved."""
    lines = (
        f"state, start = manager.restore_or_initialize({state})\nfor step in range(start, STEPS):\n"
    )
    step = """
    batch = examples[step * 8 :][:8]
    loss = ((model(batch)[:, 0] - batch.sum(1)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    """
    inner = dedent(step) + dedent(body).strip("\n") + "\n"
    inner += dedent(save or f"manager.save(step + 1, {state})").strip("\n") + "\n"
    lines += indent(inner, "    ")
    return Program(
        _TORCH
        + dedent(before).strip("\n")
        + "\n\n"
        + OPEN.format(options=options)
        + indent(lines, "    "),
        causes,
    )


_MODEL = "model = torch.nn.Sequential(*layers)\n"
_ADAM = _MODEL + "optimizer = torch.optim.Adam(model.parameters(), 0.01)\n"
_SCHEDULER = _ADAM + "scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)\n"

WRONG: dict[str, Program] = {
    "torch_optimizer": torch_program(
        _ADAM, '{"model": model}', "optimizer.step()  # wrong: not in the state", "unsaved state"
    ),
    "torch_scheduler": torch_program(
        _MODEL
        + """\
optimizer = torch.optim.SGD(model.parameters(), 0.05)
rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)  # wrong: not saved
""",
        '{"model": model}',
        "optimizer.step()\nrates.step()",
        "unsaved state",
        "several",
    ),
    "torch_scheduler_early": torch_program(
        _SCHEDULER,
        '{"model": model, "optimizer": optimizer, "scheduler": scheduler}',
        "optimizer.step()",
        "unsaved state",
        save="""
        manager.save(step + 1, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        scheduler.step()  # wrong: after the save
        """,
    ),
    "torch_generator": torch_program(
        _ADAM + "noise = torch.Generator().manual_seed(SEED)  # wrong: not in the state\n",
        '{"model": model, "optimizer": optimizer}',
        """
        for parameter in model.parameters():
            parameter.grad *= torch.rand(parameter.shape, generator=noise)
        optimizer.step()
        """,
        "random generator",
    ),
}

_JAX = """\
import os

import jax
import jax.numpy as jnp

from perdure import CheckpointManager

SEED = int(os.environ.get("SEED", "0"))
STEPS, EVERY = 8, 2
examples = jax.random.normal(jax.random.key(SEED), (64, 12))


@jax.jit
def gradient(w, batch):
    return 0.01 * (batch.T @ (batch @ w - batch.sum(1)))

"""


def jax_program(
    before: str, body: str, *causes: str, init: str = '{"w": jnp.zeros(12)}'
) -> Program:
    """A loop in JAX."""
    lines = (
        f"state, start = manager.restore_or_initialize({init})\nfor step in range(start, STEPS):\n"
    )
    inner = "batch = examples[step * 8 :][:8]\n" + dedent(body).strip("\n") + "\n"
    lines += indent(inner + "manager.save(step + 1, state)\n", "    ")
    return Program(
        _JAX
        + dedent(before).strip("\n")
        + "\n\n"
        + OPEN.format(options="")
        + indent(lines, "    "),
        causes,
    )


WRONG |= {
    "jax_key": jax_program(
        "key = jax.random.key(SEED + 1)  # wrong: split in the loop, and not in the state",
        """
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.9, (12,))
        state = {"w": state["w"] - kept * gradient(state["w"], batch)}
        """,
        "unsaved state",
        "random generator",
    ),
    "jax_momentum": jax_program(
        "velocity = {'w': jnp.zeros(12)}  # wrong: not in the state",
        """
        velocity = {"w": 0.9 * velocity["w"] + gradient(state["w"], batch)}
        state = {"w": state["w"] - velocity["w"]}
        """,
        "unsaved state",
    ),
}

WRONG |= {
    "jax_stale_trace": jax_program(
        """
        rate = 1.0


        @jax.jit
        def update(w, batch):
            return w - rate * gradient(w, batch)  # wrong: of the step in which it is traced

        """,
        """
        rate = 0.8**step
        state = {"w": update(state["w"], batch)}
        """,
        "stale value",
    ),
    "torch_default_dtype": torch_program(
        _ADAM,
        '{"model": model, "optimizer": optimizer}',
        """
        for parameter in model.parameters():
            parameter.grad += torch.linspace(0, 0.1, 7).sum().float() / 3
        optimizer.step()
        torch.set_default_dtype(torch.float64)  # wrong: not in a resumed process at first
        """,
        "unsaved state",
        "several",
    ),
}

_KERAS = """\
import os

import keras
import numpy as np

import perdure.keras

SEED = int(os.environ.get("SEED", "0"))
keras.utils.set_random_seed(SEED)
x = np.random.default_rng(SEED).normal(size=(64, 6)).astype("float32")
y = x.sum(1)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
backup = perdure.keras.BackupAndRestore("runs/planted", save_freq=2, delete_checkpoint=False)
"""

WRONG |= {
    "keras_callback": Program(
        _KERAS
        + """

rates = [0.05]  # wrong: not in the state (an attribute of the callback would be)


class Decay(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        rates.append(rates[-1] * 0.8)
        self.model.optimizer.learning_rate = rates[-1]


model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[Decay(), backup])
""",
        ("unsaved state",),
    ),
}

RIGHT: dict[str, Program] = {
    "torch_all": torch_program(
        _SCHEDULER,
        '{"model": model, "optimizer": optimizer, "scheduler": scheduler}',
        "optimizer.step()\nscheduler.step()",
    ),
    "jax_all": jax_program(
        "",
        """
        key, now = jax.random.split(state["key"])
        kept = jax.random.bernoulli(now, 0.9, (12,))
        state = {"w": state["w"] - kept * gradient(state["w"], batch), "key": key}
        """,
        init='{"w": jnp.zeros(12), "key": jax.random.key(SEED)}',
    ),
    "keras_all": Program(
        _KERAS + "model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[backup])\n"
    ),
}
