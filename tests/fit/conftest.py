"""`fit` in this process runs on PyTorch, which has nothing to compile; other backends have their own
processes."""

import os

os.environ["KERAS_BACKEND"] = "torch"
