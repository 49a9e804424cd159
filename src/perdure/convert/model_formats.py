"""Exports that need the code of the model: it is built, restored from the checkpoint, and written."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from perdure.checkpoint.address import StoredCheckpoint
from perdure.errors import ArgumentError
from perdure.state import restore
from perdure.state.paths import insert, split_path


def write_model(
    checkpoint: StoredCheckpoint,
    to: str,
    path: str,
    branch: str,
    model: str | Callable[[], Any],
    *,
    verify: bool,
) -> list[str]:
    """Write the Keras model that `model` returns with the values of the checkpoint at `branch`.

    Returns the paths of generators, which the format does not hold. Raises ArgumentError,
    MismatchError (each leaf that does not fit), and as `perdure.keras.model_export.write_model`.
    """
    if verify and to != "keras":
        raise ArgumentError(
            f"verify: {to} files hold a program, in which no single array can be compared; leave it "
            f"out."
        )
    # Before the code of the model, because it names the extra to install if Keras is missing.
    from perdure.keras import model_export

    built = _built(model)
    prefix = f"{branch}/"
    leaves = checkpoint.run.load(checkpoint.step, lambda name: name.startswith(prefix)).leaves
    target: dict[str, Any] = {}
    insert(target, split_path(branch), built)
    restore(target, leaves)
    # Keras asks for this ending.
    written = f"{path}.{to}" if to in ("keras", "onnx") else path
    try:
        model_export.write_model(built, to, written)
        if verify:
            inside = {name.removeprefix(prefix): leaf for name, leaf in leaves.items()}
            model_export.check_keras_file(written, inside)
        if written != path:
            os.rename(written, path)
        return [name for name in leaves if model_export.is_seed(name)]
    finally:
        if written != path and os.path.exists(written):
            os.remove(written)


def _built(model: str | Callable[[], Any]) -> Any:
    """The model that a function returns; raises `ArgumentError` if that is no built Keras model."""
    function = load_function(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else getattr(model, "__qualname__", repr(model))
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ArgumentError(
            f"model: expected a function without arguments that returns the built Keras model, and "
            f"{name} needs an argument: {error}."
        ) from error
    except ValueError:  # one of C, whose signature is not known
        pass
    built = function()
    keras = sys.modules.get("keras")  # without it the function has made no model
    if keras is None or not isinstance(built, keras.Model):
        found = type(built).__name__
    elif not built.built:
        found = "one that is not built; call build() or give it an Input"
    else:
        return built
    raise ArgumentError(f"model: {name} returned {found}, expected a built Keras model.")


def load_function(text: str) -> Callable[[], Any]:
    """The function that `file.py:function` names, or ArgumentError. Runs the file."""
    file, colon, name = text.rpartition(":")
    if not (colon and name and os.path.isfile(file)):
        raise ArgumentError(
            f"model: expected file.py:function with a file that exists, found {text!r}."
        )
    module_name = os.path.splitext(os.path.basename(file))[0]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"model: {file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module_name, module)
    sys.path.insert(
        0, os.path.dirname(os.path.abspath(file))
    )  # for what the file imports beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        raise ArgumentError(f"model: {file} has no function {name!r}.")
    return function
