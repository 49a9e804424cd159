"""Negative controls of `perdure.testing`: the conformance suite and `check_run` find faults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import make_leaves, run_on

from perdure.store import MemoryStorage
from perdure.testing import check_run

BROKEN = {
    "never exclusive": (
        "test_a_name_that_is_taken_is_refused_and_kept",
        "def commit(self): self._storage.objects[self._name] = bytes(self._data)",
    ),
    "visible at once": (
        "test_an_object_is_invisible_until_its_commit",
        (
            "def write(self, data):\n"
            "        self._data += data; self._storage.objects[self._name] = bytes(self._data)"
        ),
    ),
    "keeps the caller's memory": (
        "test_the_memory_of_a_write_may_be_reused",
        (
            "def write(self, data): self.kept = [*getattr(self, 'kept', []), data]\n"
            "    def commit(self): self._storage.objects[self._name] = b''.join(self.kept)"
        ),
    ),
}

SUITE = """
import pytest
from perdure.store import storage
from perdure.testing import StorageConformance

class Sink(storage._MemorySink):
    {change}

class Broken(storage.MemoryStorage):
    def create(self, name, size):
        return Sink(self, name)

class TestBroken(StorageConformance):
    @pytest.fixture
    def storage(self):
        return Broken()
    def raw_read(self, storage, name):
        return storage.objects.get(name)
    def raw_write(self, storage, name, data):
        storage.objects[name] = data
    def raw_names(self, storage):
        return set(storage.objects)
"""


@pytest.mark.parametrize("what", BROKEN)
def test_the_conformance_suite_fails_for_a_storage_that_breaks_a_contract(
    tmp_path: Path, what: str
) -> None:
    test, change = BROKEN[what]
    (tmp_path / "test_broken.py").write_text(SUITE.format(change=change))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", test],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert f"FAILED test_broken.py::TestBroken::{test}" in done.stdout


def test_check_run_lists_every_harmful_problem() -> None:
    storage = MemoryStorage()
    with run_on(storage) as run:
        for step in (1, 2, 3):
            run.save(step, make_leaves(step))
    assert check_run(storage).good == (1, 2, 3)
    first, second, _ = sorted(name for name in storage.objects if name.startswith("packs/"))
    storage.objects[first] = storage.objects[first][:10]
    del storage.objects[second]
    storage.objects["packs/left.pack.tmp"] = b""
    with pytest.raises(AssertionError, match="expected a whole run directory") as caught:
        check_run(storage)
    message = str(caught.value)
    assert f"{first}: memory:/{first}: " in message
    assert "step 1: " in message
    assert (
        f"step 2: memory:: step 2 needs {second.removeprefix('packs/')}, which is missing"
        in message
    )
    assert "left.pack.tmp" not in message
