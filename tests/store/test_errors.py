"""Every exception of the package survives pickle and copy, as groups of processes and pools need it."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import pickle
from pathlib import Path
from typing import Any

import perdure
from perdure.errors import CorruptionError, StateError, StoreError
from perdure.store.failures import DamagedChunk

ENDS = ("Error", "Exception", "Interrupt", "Warning", "DamagedChunk", "PathInErrors")


def exceptions() -> list[type[BaseException]]:
    """All classes of exceptions in the source, without importing modules that have none."""
    root = Path(perdure.__file__).parent
    found = []
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                if any(base.endswith(ENDS) for base in bases):
                    parts = file.relative_to(root).with_suffix("").parts
                    module = importlib.import_module(".".join(("perdure", *parts)))
                    found.append(getattr(module, node.name))
    return [kind for kind in found if issubclass(kind, BaseException)]


def made(kind: type[BaseException]) -> BaseException:
    values: dict[str, Any] = {"str": "some text", "int": 7}
    if (method := vars(kind).get("__init__")) is None:
        return kind("what happened")
    _, *parameters = inspect.signature(method).parameters.values()
    return kind(*(values.get(parameter.annotation, ["other"]) for parameter in parameters))


def test_exceptions_survive_pickle_and_copy() -> None:
    kinds = exceptions()
    assert len(kinds) > 30
    assert {DamagedChunk, CorruptionError} <= set(kinds)
    for kind in kinds:
        error = made(kind)
        if isinstance(error, (StateError, StoreError)):  # code adds to the message of such an error
            error.args = (f"{error} And more.",)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind
            assert (str(again), again.args) == (str(error), error.args)
            assert vars(again) == vars(error)
