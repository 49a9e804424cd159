"""Rows of `proof_inspect.py`: `export_rows.py ROW FOLDER` runs one, and fails if a comparison does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from perdure import CheckpointManager
from perdure.convert import average, export
from perdure.store import Run

COST_BYTES = 2 << 30


def hf(folder: Path) -> None:
    """transformers' `from_pretrained`, and the bytes of the safetensors library."""
    import safetensors
    import safetensors.torch
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    model = BertModel(config)
    with CheckpointManager(folder / "run") as manager:
        manager.save(1, {"model": model.to(torch.bfloat16), "step": 1})
    out = folder / "hf"
    export(folder / "run", "safetensors", out, leaves="model", shard_bytes=30_000, verify=True)
    config.save_pretrained(out)
    loaded = BertModel.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    same = all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    check("from_pretrained gives the bits", same and len(loaded) == len(model.state_dict()))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    ordered = dict(sorted(model.state_dict().items()))
    split = split_torch_state_dict_into_shards(ordered, max_shard_size=30_000)
    check("shards are those of huggingface_hub", split.tensor_to_filename == index["weight_map"])
    equal = []
    for file in out.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        equal.append(file.read_bytes() == safetensors.torch.save(tensors, {"format": "pt"}))
    check(f"{len(equal)} files are byte for byte those of the library", all(equal))
    with safetensors.safe_open(next(out.glob("*.safetensors")), "np") as opened:
        check("safe_open reads the metadata", opened.metadata() == {"format": "pt"})


def mean(folder: Path) -> None:
    """Accuracy on scikit-learn's digits: checkpoints of a constant learning rate, and their means."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images, labels = digits.data.astype(np.float32) / 16, digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    train, test = slice(0, 1200), slice(1200, None)
    generator = np.random.default_rng(1)
    params = {
        "w1": (generator.normal(size=(64, 64)) / 8).astype(np.float32),
        "w2": (generator.normal(size=(64, 10)) / 8).astype(np.float32),
    }
    with CheckpointManager(folder / "run") as manager:
        for step in range(1, 2001):
            picked = generator.integers(0, 1200, 32)
            x, y = images[train][picked], labels[train][picked]
            hidden = np.maximum(x @ params["w1"], 0)
            error = softmax(hidden @ params["w2"])
            error[np.arange(32), y] -= 1
            back = (error @ params["w2"].T) * (hidden > 0)
            params["w2"] -= np.float32(1.0 / 32) * (hidden.T @ error)
            params["w1"] -= np.float32(1.0 / 32) * (x.T @ back)
            if step > 1000 and step % 100 == 0:
                manager.save(step, params)

    def accuracy(values: Any) -> float:
        hidden = np.maximum(images[test] @ values["w1"], 0)
        return float(((hidden @ values["w2"]).argmax(1) == labels[test]).mean())

    from perdure import load_checkpoint

    steps = Run(folder / "run").steps()
    each = [accuracy(load_checkpoint(folder / "run", step)) for step in steps]
    print(f"   the 10 checkpoints: {min(each):.4f} to {max(each):.4f}, mean {np.mean(each):.4f}")
    named = [f"{folder}/run@{','.join(map(str, steps))}"]
    methods: dict[str, dict[str, Any]] = {
        "uniform": {},
        "linear": {"weights": range(1, len(steps) + 1)},
    }
    for name, options in methods.items():
        average(named, folder / name, **options)
        print(f"   {name}: {accuracy(load_checkpoint(folder / name)):.4f}")


def softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def cost(folder: Path) -> None:
    """Peak memory and seconds of the commands on a checkpoint of 2 GiB."""
    count = 16
    size = COST_BYTES // count // 4
    with Run(folder / "run", create=True) as run:
        from perdure.state import flatten

        for step in (1, 2):
            values = np.random.default_rng(step).random(size, np.float32)
            state = {f"layer{i}": values + np.float32(i) for i in range(count)}
            run.save(step, flatten({"model": state}))
    del values, state
    at = f"{folder}/run@2"
    command("average", f"{folder}/run@1,2", "-o", f"{folder}/mean")
    for to in ("safetensors", "torch", "npz"):
        command("export", at, f"{folder}/{to}", "--to", to)
        remove(folder / to)
    command("export", at, f"{folder}/safetensors", "--to", "safetensors", "--verify")
    command("import", f"{folder}/safetensors", f"{folder}/imported")
    same = Run(folder / "imported").manifest(0).leaves
    hashes = {chunk.hash for leaf in same for chunk in leaf.chunks}
    original = Run(folder / "run").manifest(2).leaves
    check("the import has the chunks", hashes == {c.hash for leaf in original for c in leaf.chunks})


def command(*words: str) -> None:
    """Run a command in a process of its own, and print its seconds and its memory.

    Of the memory the most that was resident, and what of it at the end was no mapped file.
    """
    program = (
        "import sys; from perdure.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally:\n"
        "    status = open('/proc/self/status').read()\n"
        "    for kind in ('VmHWM:', 'RssAnon:'):\n"
        "        print(status.partition(kind)[2].split()[0], file=sys.stderr)\n"
    )
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)
    seconds = time.perf_counter() - before
    peak, own = (int(kilobytes) // 1024 for kilobytes in done.stderr.split()[-2:])
    name = " ".join(word for word in words if "/" not in word)
    print(f"   {name}: {seconds:.1f} s, at most {peak} MiB, {own} MiB of it its own", flush=True)


def remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path) if path.is_dir() else os.remove(path)


def check(what: str, holds: bool) -> None:
    print(f"   {'ok' if holds else 'FAIL'}: {what}", flush=True)
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    {"hf": hf, "mean": mean, "cost": cost}[sys.argv[1]](Path(sys.argv[2]))
