"""A restore does not need memory for the state that it restores and for the copy of the last save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np
import perdure
from perdure.errors import UnreachableError

MIB = 1 << 20
manager = perdure.CheckpointManager(sys.argv[1])
state = manager.restore_or_initialize({"weight": np.ones(256 * MIB, np.uint8)}).state
manager.save(1, state)
manager.wait_until_finished()
del state
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmSize"].split()[0]) * 1024 + int(sys.argv[2]) * MIB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    print(manager.restore(1).state["weight"].sum() // MIB)
except UnreachableError as error:
    print("Free memory and try again" in str(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("spare_mib", "printed"),
    [(128, "256"), pytest.param(-64, "True", id="control: too little even without the copy")],
)
def test_the_copy_of_the_last_save_is_freed(tmp_path: Path, spare_mib: int, printed: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(spare_mib)]
    # One arena, because each thread would reserve addresses for one of its own.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [printed]
