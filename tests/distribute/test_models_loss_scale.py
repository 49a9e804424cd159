"""Dynamic loss scaling: growth, backoff and limits, the same on both engines."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

from perdure.distribute import LossScale
from perdure.distribute.losses import LARGEST
from perdure.state import flatten, restore

FINITE = [True, True, True, False, False, True, True, True, True]
#        scale after each of these steps, growing after 3 finite ones
SCALES = [8.0, 8.0, 16.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
STEPS = [1, 2, 0, 0, 0, 1, 2, 0, 1]


def start(kind: str) -> tuple[Any, Any]:
    if kind == "jax":
        return LossScale(jnp.float32(8), jnp.int32(0)), jnp.asarray
    return LossScale(torch.tensor(8.0), torch.tensor(0)), torch.tensor


@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_the_loss_scale_grows_after_finite_steps_and_halves_at_an_overflow(kind: str) -> None:
    scale, boolean = start(kind)
    dtypes = (scale.scale.dtype, scale.steps.dtype)
    history = []
    for finite in FINITE:
        # A checkpoint at every step: nothing outside it may decide the next scale.
        scale = restore(start(kind)[0], flatten(scale)).after(boolean(finite), growth_steps=3)
        history.append((float(scale.scale), int(scale.steps)))
        assert (scale.scale.dtype, scale.steps.dtype) == dtypes
    assert history == list(zip(SCALES, STEPS, strict=True))


@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_the_loss_scale_stays_within_its_limits(kind: str) -> None:
    scale, boolean = start(kind)
    for _ in range(40):
        scale = scale.after(boolean(False))
    assert float(scale.scale) == 1.0
    for _ in range(40):
        scale = scale.after(boolean(True), growth_steps=1)
    assert float(scale.scale) == LARGEST
