"""Recipes for programs on JAX: Flax NNX, Equinox, a guide of Orbax."""

from __future__ import annotations

from pathlib import Path

from real_program import Program, after, before, replace


def _start_flax(target: Path) -> None:
    (target / "start.py").write_text(
        "import train\nfrom configs import default\n\nconfig = default.get_config()\n"
        "config.batch_size, config.num_epochs = 16, 3\ntrain.train_and_evaluate(config, 'out')\n"
    )


FLAX_MNIST = Program(
    name="Flax examples, mnist (NNX)",
    is_standing_in=True,
    folder="flax/examples/mnist",
    file="train.py",
    main="start.py",
    needs=("flax", "optax", "tensorflow", "tensorboard"),
    imports=("perdure", "flax.nnx", "optax", "tensorflow"),
    small=(before("# Export the model to a SavedModel", "return"),),
    prepare=_start_flax,
    steps="flax.nnx.jit:train_step",
    edits=(
        after("import tensorflow_datasets as tfds", "import perdure"),
        # A step is 1,000 times the epoch and the batch.
        after(
            "rngs = nnx.Rngs(0)",
            'state = {"model": model, "optimizer": optimizer, "metrics": metrics, "rngs": rngs}',
            'manager = perdure.CheckpointManager("run", save_interval_steps=4)',
            "_, start = manager.restore_or_initialize(state)",
            # Each pass over the dataset has the next order; finished epochs have begun one.
            "for _ in range(1, start // 1000): next(iter(train_ds))",
        ),
        replace("in range(1, config", "in range(max(1, start // 1000), config"),
        replace(
            "for batch in train_ds.as_numpy_iterator()",
            "for step, batch in enumerate(train_ds.skip(max(0, start - 1000 * epoch))"
            ".as_numpy_iterator(), max(start, 1000 * epoch) + 1)",
        ),
        after("train_step(model, optimizer, metrics, batch, rngs)", "manager.save(step, state)"),
    ),
)

EQUINOX_RNN = Program(
    name="Equinox examples, train_rnn",
    folder="equinox/docs/examples",
    file="train_rnn.ipynb",
    cells=(1, 3, 5, 7, 9),
    needs=("equinox", "optax"),
    imports=("perdure", "equinox", "optax"),
    small=(
        replace("dataset_size=10000", "dataset_size=320"),
        replace("steps=200", "steps=30"),
    ),
    steps="equinox.filter_jit:make_step",
    edits=(
        after("import numpy as np", "import perdure"),
        after("indices = np.arange(dataset_size)", "source = np.random.default_rng(0)"),
        replace("np.random.permutation(indices)", "source.permutation(indices)"),
        after(
            "opt_state = optim.init(",
            'manager = perdure.CheckpointManager("run", save_interval_steps=4)',
            "(model, opt_state), start = manager.restore_or_initialize((model, opt_state))",
        ),
        before("loss, model, opt_state = make_step(", "if step < start: continue"),
        after(
            "loss, model, opt_state = make_step(",
            "manager.save(step + 1, (model, opt_state))",
        ),
    ),
)

EQUINOX_MNIST = Program(
    name="Equinox examples, mnist",
    is_standing_in=True,
    folder="equinox/docs/examples",
    file="mnist.ipynb",
    cells=(1, 2, 4, 5, 8, 12, 21, 22, 25, 26, 27),
    needs=("equinox", "optax", "torch", "jaxtyping"),
    imports=("perdure.torch", "equinox", "optax"),
    small=(
        replace("STEPS = 300", "STEPS = 30"),
        replace("PRINT_EVERY = 30", "PRINT_EVERY = 10"),
        replace("BATCH_SIZE = 64", "BATCH_SIZE = 16"),
    ),
    steps="equinox.filter_jit:make_step",
    edits=(
        after("import torchvision", "import perdure.torch"),
        before(
            "# Always wrap everything",
            "trainloader = perdure.torch.ResumableLoader(trainloader, seed=0)",
            'manager = perdure.CheckpointManager("run", save_interval_steps=4)',
            "(model, opt_state, _), start = manager.restore_or_initialize("
            "(model, opt_state, trainloader))",
        ),
        replace("zip(range(steps), infinite", "zip(range(start, steps), infinite"),
        after(
            "model, opt_state, train_loss = make_step(",
            "manager.save(step + 1, (model, opt_state, trainloader))",
        ),
    ),
)

ORBAX = Program(
    name="Orbax's guide checkpoint_101",
    folder="orbax/docs/guides/checkpoint/v1",
    file="orbax_checkpoint_101.ipynb",
    cells=(3, 6, 8, 17, 18, 19),
    needs=("jax", "orbax.checkpoint", "etils"),
    imports=("perdure", "jax", "orbax.checkpoint"),
    small=(
        replace("epath.Path('/tmp/101/my-checkpoints')", "epath.Path('my-checkpoints').resolve()"),
        replace(
            "ocp.save(directory / checkpoint_name, pytree)",
            "ocp.save(directory / checkpoint_name, pytree, overwrite=True)",
        ),
        replace("total_steps = 10", "total_steps = 20"),
    ),
    steps="jax.jit:train_step",
    edits=(
        after("import itertools", "import perdure"),
        replace(
            "with ocp.training.Checkpointer(directory / 'experiment')",
            "with perdure.CheckpointManager('run')",
        ),
        replace("if ckptr.latest is None", "if ckptr.latest_step() is None"),
        replace("train_state = ckptr.load()", "train_state = ckptr.restore().state"),
        replace("start_step = ckptr.latest.step", "start_step = ckptr.latest_step()"),
        replace("ckptr.save(step, train_state)", "ckptr.save(step + 1, train_state)"),
    ),
    first=5,
    own="its Checkpointer",
)

PROGRAMS = (FLAX_MNIST, EQUINOX_RNN, EQUINOX_MNIST, ORBAX)
