"""The change of an example is a function of (seed, epoch, index)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from messages import unnamed
from perdure.data import ArrayDataset, Augment, Dataset, StreamDataset
from perdure.data.dataset import example_keys
from perdure.errors import DataError

N = 50


def jitter(example: Any, rng: np.random.Generator) -> Any:
    return {"n": example["n"], "noise": rng.integers(2**63)}


def keys_only(batch: Any, keys: Any) -> Any:
    return {"n": batch["n"], "noise": keys[:, 0].astype(np.uint64) << np.uint64(32) | keys[:, 1]}


def arrays(batch: int, augment: Any = jitter, seed: int = 1, **kwargs: Any) -> ArrayDataset:
    return ArrayDataset({"n": np.arange(N)}, batch, augment=augment, seed=seed, **kwargs)


def by_example(data: Any, epoch: int, replicas: int = 1) -> dict[int, int]:
    drawn: dict[int, int] = {}
    steps = data.steps_per_epoch
    for step in range(epoch * steps, (epoch + 1) * steps):
        for replica in range(replicas):
            batch = data.batch(step, replica, replicas)
            for n, noise in zip(batch["n"].tolist(), batch["noise"].tolist(), strict=True):
                assert drawn.setdefault(n, noise) == noise  # padding repeats an example as it is
    return drawn


@pytest.mark.parametrize("fn", [jitter, Augment(keys_only, batched=True)])
def test_a_change_does_not_depend_on_batch_replica_order_or_source(fn: Any) -> None:
    wanted = by_example(arrays(10, fn), 1)
    assert len(set(wanted.values())) == N
    assert by_example(arrays(16, fn), 1, 4) == wanted
    assert by_example(arrays(12, fn, shuffle=False), 1, 2) == wanted
    assert by_example(Dataset([{"n": n} for n in range(N)], 10, augment=fn, seed=1), 1) == wanted
    streams = StreamDataset(
        lambda shard, _: ({"n": n} for n in range(shard * 10, shard * 10 + 10)),
        dict.fromkeys(range(5), 10), 15, augment=fn, seed=1,
    )  # fmt: skip
    assert by_example(streams, 1) == wanted
    # Controls: another epoch, another seed.
    assert not set(by_example(arrays(10, fn), 0).values()) & set(wanted.values())
    assert not set(by_example(arrays(10, fn, seed=2), 1).values()) & set(wanted.values())


def test_keys_never_collide_and_never_change() -> None:
    keys = example_keys(np.arange(10**5), (0, 0))
    assert len(np.unique(keys[:, 0])) == 10**5
    # seed + index, the usual shortcut, would give example 0 of seed 1 what example 1 of seed 0 gets.
    assert (example_keys(np.arange(1), (1, 0)) != keys[1]).all()
    # Change these and every run that has begun ends with other bits.
    assert example_keys(np.array([0, 1, 10**9]), (3, 2)).tolist() == [
        [16910108064804877590, 6475838710219801425],
        [15144323250275276793, 13405477823552376462],
        [8224937596078429679, 15201912995249227690],
    ]


def test_keys_are_threefry_keys_of_jax() -> None:
    import jax

    def flip(batch: Any, keys: Any) -> Any:
        draw = jax.vmap(lambda k: jax.random.uniform(jax.random.wrap_key_data(k)))
        return {"n": batch["n"], "noise": np.asarray(draw(keys))}

    assert by_example(arrays(10, Augment(flip, batched=True)), 0) == by_example(
        arrays(25, Augment(flip, batched=True)), 0
    )


def test_the_recipe_names_the_change() -> None:
    assert "augment" not in arrays(10, None).recipe()
    assert arrays(10).recipe()["augment"] == "jitter"
    assert arrays(10).recipe()["numpy"] == np.__version__
    named = arrays(10, Augment(keys_only, batched=True, name="flip v2")).recipe()
    assert named["augment"] == "flip v2"
    assert "numpy" not in named


def test_an_error_names_the_step_and_the_example() -> None:
    def broken(example: Any, rng: Any) -> Any:
        if example["n"] == 12:
            raise ValueError("no such angle")
        return example["n"] if example["n"] == 21 else example

    data = arrays(10, broken, shuffle=False)
    with pytest.raises(DataError) as error:
        data.batch(1)
    assert not unnamed(error.value, "step 1", "example 12", "ValueError: no such angle")
    with pytest.raises(DataError) as error:
        data.batch(2)
    assert not unnamed(error.value, "step 2", "example 21", "augment", "expected dict of ['n']")
    with pytest.raises(DataError) as error:
        arrays(10, Augment(lambda *_: 1 / 0, batched=True), shuffle=False).batch(0)
    assert not unnamed(error.value, "step 0", "examples 0 to 9", "ZeroDivisionError")
