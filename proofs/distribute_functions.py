"""Random functions in eight settings of JAX: a strategy gives each output the bits of plain `jit`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "distribute"))

from test_jax_generated import SETTINGS, both_ways

IN_A_GROUP = 25


def main() -> None:
    for group in range(len(SETTINGS)):
        expected, actual = both_ways(group, IN_A_GROUP)
        pairs = list(zip(expected, actual, strict=True))
        assert len(pairs) > 2 * IN_A_GROUP
        equal = [wanted == given for wanted, given in pairs]
        print(json.dumps({"equal": equal}), flush=True)


if __name__ == "__main__":
    main()
