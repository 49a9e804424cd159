"""`fit` under a strategy, which Keras would ignore, is refused; elsewhere it is that of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from perdure.errors import TopologyError
from perdure.torch import MirroredStrategy

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)


class Wide(keras.Model):
    """A subclass of the user, made before any scope."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: object) -> object:
        return self.dense(inputs)


def compiled(model: keras.Model) -> Any:
    model.compile(optimizer="sgd", loss="mse")
    return model


@pytest.mark.parametrize("make", [lambda: keras.Sequential([keras.layers.Dense(1)]), Wide])
def test_fit_under_a_strategy_is_refused(make: type[keras.Model]) -> None:
    strategy = MirroredStrategy(1, 2)
    before = compiled(make())
    with strategy.scope():
        for train in (before.fit, before.train_on_batch):
            with pytest.raises(TopologyError, match=r"strategy\.step"):
                train(X, Y)
        model = compiled(make())
        model.evaluate(X, Y, verbose=0)
    with pytest.raises(TopologyError, match="compiled in strategy"):
        model.fit(X, Y, verbose=0)  # the manner of TensorFlow

    assert before.fit(X, Y, verbose=0).history["loss"], "the control"
    assert compiled(model).fit(X, Y, verbose=0).history["loss"]
