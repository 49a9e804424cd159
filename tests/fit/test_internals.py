"""Only `fit_internals.py` knows private details of Keras, and `tf_pipeline.py` those of `tf.data`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import perdure

KERAS = Path(perdure.__file__).parent / "keras"


def private_uses(source: str) -> list[str]:
    """Imports of `keras.src`, and private attributes of other objects."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src"):
            uses.append(str(node.module))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner != "self" and not node.attr.endswith("__"):
                uses.append(f"{owner}.{node.attr}")
    return uses


@pytest.mark.parametrize("path", sorted(KERAS.glob("*.py")), ids=lambda path: path.name)
def test_no_other_module_knows_any(path: Path) -> None:
    uses = private_uses(path.read_text())
    assert bool(uses) == (path.name in ("fit_internals.py", "tf_pipeline.py")), uses
