"""Whether there is a GPU for `proof_gpu.py` and `bench_gpu.py`."""

from __future__ import annotations

import argparse
import importlib.util
import sys


def engines(parser: argparse.ArgumentParser, platform: str) -> list[str]:
    """The engines that find an accelerator of this `platform` (all that are installed for "cpu"); exits
    with a sentence if none does."""
    found: list[str] = []
    seen: list[str] = []
    if importlib.util.find_spec("torch") is not None:
        import torch

        is_there = torch.cuda.is_available()
        seen.append(f"torch {torch.__version__} finds {'a GPU' if is_there else 'none'}")
        found += ["torch"] if is_there or platform == "cpu" else []
    if importlib.util.find_spec("jax") is not None:
        import jax

        kind = jax.devices()[0].platform
        seen.append(f"jax {jax.__version__} finds {kind}")
        found += ["jax"] if kind == platform else []
    if not found:
        parser.exit(
            2,
            f"{parser.prog}: expected an NVIDIA GPU, found none ({'; '.join(seen) or 'no engine'}). "
            f"Run it on a machine with one, with its builds of torch and jax; `--platform cpu` only "
            f"tries the code of this program.\n",
        )
    print(f"{sys.executable}: {'; '.join(seen)}", flush=True)
    return found
