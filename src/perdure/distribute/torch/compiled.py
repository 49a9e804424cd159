"""`compile=` of the strategies: `torch.compile` of the function of one replica.

Invariant: which program computes a replica depends on function, backend and shapes alone. By itself
torch.compile changes programs after the second shape and gives up after eight; what a process has
seen depends on topology and interruptions.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Hashable
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import _python_dispatch, _pytree

from perdure.distribute import pytree
from perdure.distribute.engine import Grad
from perdure.distribute.run.context import ReplicaFunction
from perdure.errors import StateError, TopologyError


class CompiledGrads:
    """Compiles each `grad` once; TopologyError without torch.compile or for its backend."""

    def __init__(self, backend: str) -> None:
        import torch._dynamo as dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit

        names = dynamo.list_backends(exclude_tags=())
        if backend not in names:
            raise TopologyError(
                f"compile: expected None or a backend of torch.compile ({', '.join(names)}), found "
                f"{backend!r}"
            )
        if dynamo.config.disable:
            raise TopologyError(
                f"compile={backend!r}: torch.compile is switched off (TORCH_COMPILE_DISABLE or "
                "torch._dynamo.config.disable), so that the recipe would name a compiler that does "
                "not run. Switch it on, or leave compile out"
            )
        _configure()
        self._error = FailOnRecompileLimitHit
        self._backend = backend
        self._programs: dict[Grad, Grad] = {}
        self._seen: set[Hashable] = set()
        self._first = threading.Lock()

    def __call__(self, fn: Grad, state: Any, share: Any, key: Any) -> Any:
        """`fn(state, share, key)`, compiled."""
        if _under_a_mode():
            raise StateError(
                f"{fn.__name__}: expected no TorchDispatchMode (FlopCounterMode), found one, or "
                "PyTorch's flag for one, which two threads under modes at once can leave set: "
                "torch.compile does not compile then, and the bits would be others. Leave the mode "
                "before the step, start the process again, or leave compile out"
            )
        if not torch._dynamo.config.fail_on_recompile_limit_hit:  # each thread has its own
            _configure()
        if (program := self._programs.get(fn)) is None:
            program = self._programs[fn] = self._compiled(fn)
        leaves, structure = pytree.leaves_and_structure(share)
        form = (program, structure, tuple([getattr(leaf, "shape", None) for leaf in leaves]))
        try:
            if form in self._seen:
                return program(state, share, key)
            with self._first:  # threads that compile at the same time would make a program each
                result = program(state, share, key)
            self._seen.add(form)
            return result
        except self._error as error:
            limit = torch._dynamo.config.recompile_limit
            raise StateError(
                f"{fn.__name__}: expected at most {limit} programs, one for each "
                "shape of the batch, found more. A number of Python that changes with the step "
                '(state["step"], an attribute of a module) and a hook are parts of the program: keep '
                "the number in a tensor, and the hook registered. For more shapes set "
                "torch._dynamo.config.recompile_limit before the first step"
            ) from error

    def describe(self, kind: str) -> str:
        """What the recipe says of it, for a type of device: the backend and the compiler it calls."""
        return f"compile={self._backend}" + (_compiler(kind) if self._backend == "inductor" else "")

    def _compiled(self, fn: Grad) -> Grad:
        user_function = fn.fn if isinstance(fn, ReplicaFunction) else fn

        # Detached inside of the program: it has the backward pass in it, so that no tensor that it
        # returns can have a gradient.
        @functools.wraps(user_function)
        def detached(state: Any, share: Any, key: Any) -> Any:
            contributions = user_function(state, share, key)
            return _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, contributions)

        # PyTorch counts the programs of a code object: one for each function, in all strategies.
        function: Any = detached
        function.__code__ = _codes.setdefault(user_function, function.__code__.replace())
        compiled = torch.compile(detached, backend=self._backend, dynamic=False)
        if isinstance(fn, ReplicaFunction):
            return ReplicaFunction(compiled, fn.replicas, fn.kind)
        return compiled


_codes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _configure() -> None:
    """What cannot be compiled is an error; changed hooks make another program."""
    config = torch._dynamo.config
    config.fail_on_recompile_limit_hit = True
    config.suppress_errors = False
    config.skip_nnmodule_hook_guards = False
    if hasattr(config, "trace_autograd_ops"):
        config.trace_autograd_ops = True


# A flag of the process. Older releases of PyTorch do not have it.
_under_a_mode = getattr(
    _python_dispatch, "is_in_any_mode_without_ignore_compile_internals", lambda: False
)


@functools.cache
def _compiler(kind: str) -> str:
    """What makes the programs of inductor, such as " (gcc version 12.2.0)"."""
    if kind != "cpu":
        return f" (triton {metadata.version('triton')})"
    from torch._inductor import cpp_builder

    text = cpp_builder.get_compiler_version_info(cpp_builder.get_cpp_compiler())
    found = re.search(r"(gcc|clang) version \S+", text)
    return f" ({found[0]})" if found else ""


def is_compiled(value: Any) -> bool:
    """Whether the user has compiled a function or a module."""
    attributes = getattr(value, "__dict__", {})
    marks = ("_torchdynamo_orig_callable", "_compiled_call_impl")
    return any(attributes.get(mark) is not None for mark in marks)


def warn_of_compiled(name: str, compiled: Any) -> None:
    """Warn about a function or a module that the user has compiled."""
    if is_compiled(compiled):
        warnings.warn(
            f"{name} is compiled by torch.compile, and the recipe does not say so. A run that resumes "
            "without it, or that sees the shapes of its batches in another order, gets other bits. "
            "Leave it as it is, and give the strategy compile='inductor'",
            RuntimeWarning,
            stacklevel=2,
        )
