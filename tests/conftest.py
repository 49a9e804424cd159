"""What every test runs under, whatever machine and shell it is started from, and in which order.

Set before the first import of JAX, and inherited by every process that a test starts. The number of
virtual CPU devices is left alone: a test that needs several says so to its own process.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
# The size of XLA's thread pool decides bits of convolutions, and follows the machine if not pinned.
os.environ["PJRT_NPROC"] = "8"
# Else each of some 300 processes that the tests start would compile the whole of perdure again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A thread of PyTorch that waits for others waits without computing. This changes no result.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A cluster that the surrounding job belongs to is not the one that a test describes.
os.environ.pop("TF_CONFIG", None)

# Keras imports them if it can, for parts that no test uses: 2 s of CPU in each process of pytest. They
# can be imported again after the collection.
UNUSED_BY_KERAS = ("sklearn", "matplotlib")
for _name in UNUSED_BY_KERAS:
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

# The same examples in every run: a failure that is seen once is seen again.
settings.register_profile("perdure", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("perdure")

# The files that take 10 s of processor time or more, the longest first. `make test` hands whole files
# to the workers in this order: a long one that starts last would leave a core idle.
LONGEST_FIRST = (
    "drill/test_drill.py",
    "test_demo.py",
    "distribute/test_jax_invariance.py",
    "test_docs.py",
    "fit/test_fit_backends.py",
    "test_examples.py",
    "distribute/test_jax_generated.py",
    "distribute/test_models_matrix.py",
    "launch/test_launchers.py",
    "state/test_jax_training.py",
    "distribute/test_torch_invariance.py",
    "distribute/test_torchrun.py",
    "distribute/test_optimizer_in_run.py",
    "store/test_machine.py",
    "distribute/test_surface.py",
    "distribute/test_logical_replicas.py",
    "checkpoint/test_random_walk.py",
    "distribute/test_sharded_torch.py",
    "distribute/test_exchange.py",
)


@pytest.fixture(autouse=True)
def no_strategy_of_an_earlier_test() -> None:
    """A manager without a recipe warns if a strategy is in use; that of another test is not meant."""
    if recipe := sys.modules.get("perdure.checkpoint.recipe"):
        recipe._strategies_in_use.clear()


@pytest.fixture
def generators_stay() -> Iterator[None]:
    """The random generators that all tests of a process share are afterwards as they were."""
    from perdure.state import process_random

    before = process_random.capture()
    yield
    for name, state in before.items():
        process_random.restore_generator(name, state)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    if missing := [name for name in LONGEST_FIRST if not (root / name).is_file()]:
        raise pytest.UsageError(f"LONGEST_FIRST in {__file__} names {missing}, which do not exist")
    rank = {root / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Import the tests without garbage collections: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave all imported modules out of every later garbage collection.

    With JAX, PyTorch and Keras imported a full collection takes 0.4 s, and a second manager of a run
    directory makes one: the random walks took 53 s instead of 7.
    """
    for name in UNUSED_BY_KERAS:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one checkpoint: of the state that `make(1)` of the test's file returns."""
    from perdure import CheckpointManager

    directory = tmp_path_factory.mktemp("run")
    with CheckpointManager(directory) as manager:
        manager.save(1, request.module.make(1))
    return directory


@pytest.fixture
def manager(run: Path) -> Iterator[Any]:
    """A manager of that run."""
    from perdure import CheckpointManager

    with CheckpointManager(run) as manager:
        yield manager


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """S3 as moto speaks it, one server for all tests of this process.

    moto is a test dependency, so that it is never left out.
    """
    from object_stores import moto_server

    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables by which JAX keeps its compiled programs for later processes of this test run.

    For tests of anything but compilation. A limit of the size makes JAX lock the directory, so that no
    process reads what another one has written half.
    """
    from perdure.supervise.worker_environment import cache_variables

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return {**cache_variables(base / "compiled"), "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**32)}
