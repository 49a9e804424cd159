"""Members of TensorFlow: variables, tensors, modules, generators, iterators of `tf.data`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_loop_of_tensorflows_guide_resumes_with_the_same_bits(tmp_path: Path) -> None:
    program = Path(__file__).with_name("tensorflow_worker.py")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, program, tmp_path], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["resumed"] is True
    assert found["control"] is False
    assert found["calls"] == 6
    # TensorFlow reads ahead, so that the bytes of one place differ with the timing.
    assert all(place == found["places"][0] for place in found["places"])
    operation, order, state, *kept = found["refused"]
    assert operation.startswith("data: TensorFlow cannot save this iterator: RandomUniform")
    assert "order of later epochs of a pipeline with `map` between `shuffle` and `repeat`" in order
    assert "does not restore this iterator to the state that it had saved" in state
    assert kept == ["", ""], "controls"
