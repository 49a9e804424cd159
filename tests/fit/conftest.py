"""`fit` in this process runs on PyTorch, which has nothing to compile; other backends have their own
processes."""

import os

# Keras reads it once. Programs that other tests of this process start must not inherit it.
_before = os.environ.get("KERAS_BACKEND")
os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402, F401

del os.environ["KERAS_BACKEND"]
if _before is not None:
    os.environ["KERAS_BACKEND"] = _before
