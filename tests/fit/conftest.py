"""These tests run `fit` on PyTorch, which compiles nothing; other backends run in new processes."""

import os
from collections.abc import Iterator

# Keras reads the variable once. Programs that other tests of this process start must not inherit it.
_before = os.environ.get("KERAS_BACKEND")
os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402

del os.environ["KERAS_BACKEND"]
if _before is not None:
    os.environ["KERAS_BACKEND"] = _before


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread: the tensors are tiny, and more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
