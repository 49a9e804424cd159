"""A run goes to the Hugging Face Hub with its card, and comes back from it with the same bits.

The hub is `hub_server`, the client is the library `huggingface_hub` in processes of its own, because
it reads HF_ENDPOINT when it is imported.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from hub_server import TOKEN, Hub, hub_server

from perdure import CheckpointManager, load_checkpoint
from perdure.convert import export, import_run
from perdure.errors import ArgumentError, CorruptionError, MissingExtraError
from perdure.look import origin
from perdure.store import Run

# With an engine in the recipe, the settings of frameworks that other tests import are not added.
RECIPE = {"engine": "numpy", "seed": 3, "note": "```\n---", "threads": 2, "torch.allow_tf32": False}
STEPS = (2, 4)

UPLOAD = """
import sys
from huggingface_hub import HfApi
HfApi().create_repo("me/model", exist_ok=True)
print(HfApi().upload_folder(repo_id="me/model", folder_path=sys.argv[1]).oid)
"""

# Several commands in one process: the import of the library takes most of the time.
COMMANDS = """
import json, sys
from click.testing import CliRunner
from perdure.cli.main import main
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    print(json.dumps([done.exit_code, done.output]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of four steps in which the weights depend on all steps."""
    directory = tmp_path_factory.mktemp("hub") / "digits"
    weights, bias = np.zeros((4, 3), np.float32), np.zeros(3, np.float32)
    rng = np.random.default_rng(3)
    with CheckpointManager(directory, recipe=RECIPE) as manager:
        for step in range(1, STEPS[-1] + 1):
            inputs = rng.normal(size=(8, 4)).astype(np.float32)
            error = inputs @ weights + bias - np.float32(step)
            weights = weights - np.float32(0.01) * inputs.T @ error
            bias = bias - np.float32(0.01) * error.sum(axis=0)
            if step in STEPS:
                state = {"model": {"a.b": weights, "bias": bias}, "examples": 32 * step}
                manager.save(step, state)
    return directory


def perform(words: list[str], home: Path, endpoint: str) -> str:
    """What a Python program prints that reaches the hub at `endpoint`; its cache is below `home`."""
    pytest.importorskip("huggingface_hub", reason="install the extra `test`")
    # Storage by Xet has another protocol; the Hub still takes and gives files by LFS.
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": TOKEN}
    given |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", *words],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def perdure(home: Path, endpoint: str, *commands: list[str]) -> list[tuple[int, str]]:
    """Exit status and output of each command."""
    printed = perform([COMMANDS, json.dumps(commands)], home, endpoint)
    return [tuple(json.loads(line)) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def hub(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with a commit for each step, the second one in shards."""
    base = tmp_path_factory.mktemp("folders")
    with hub_server() as hub:
        for step, most in zip(STEPS, (None, 50), strict=True):
            export(f"{run}@{step}", "safetensors", base / str(step), shard_bytes=most, verify=True)
            perform([UPLOAD, str(base / str(step))], base / "home", hub.endpoint)
            if most is not None:  # one model in a repository: `upload_folder` leaves what was there
                hub.newest("me/model")[1].pop("model.safetensors")
        yield hub


def test_a_run_comes_back_with_the_same_bits(run: Path, hub: Hub, tmp_path: Path) -> None:
    first, second = list(hub.commits["me/model"])[1:]
    names = [
        "README.md",
        *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)),
        "model.safetensors.index.json",
    ]
    assert sorted(hub.commits["me/model"][second]) == names
    sources = {"hf://me/model": (4, second), f"hf://me/model@{first}": (2, first)}
    commands = [
        ["import", source, str(tmp_path / str(step))] for source, (step, _) in sources.items()
    ]
    for (source, (step, commit)), (status, output) in zip(
        sources.items(), perdure(tmp_path / "home", hub.endpoint, *commands), strict=True
    ):
        assert status == 0, output
        expected, back = Run(run).manifest(step), Run(tmp_path / str(step)).manifest(0)
        assert back.fingerprint == expected.fingerprint
        assert f"fingerprint {expected.fingerprint}" in output
        there, here = load_checkpoint(f"{run}@{step}"), load_checkpoint(tmp_path / str(step))
        for name, array in there["model"].items():
            assert here["model"][name].tobytes() == array.tobytes(), source
        assert here["examples"] == 32 * step
        assert (origin(back) or {})["source"] == f"hf://me/model@{commit}"


def test_a_flipped_byte_on_the_hub_is_found(hub: Hub, tmp_path: Path) -> None:
    name = "model-00002-of-00002.safetensors"
    oid = hub.newest("me/model")[1][name].lfs
    assert oid is not None
    whole = hub.objects[oid]
    hub.objects[oid] = whole[:-1] + bytes([whole[-1] ^ 1])
    out = tmp_path / "out"
    try:
        [(status, output)] = perdure(
            tmp_path / "home", hub.endpoint, ["import", "hf://me/model", str(out)]
        )
    finally:
        hub.objects[oid] = whole
    assert status == 1
    assert "hf://me/model: expected the fingerprint" in output
    assert str(tmp_path / "home") in output, "the copy to remove"
    assert not out.exists()


def test_what_cannot_be_fetched_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    hub.commits |= {"me/closed": {"1" * 40: {}}, "me/empty": {"2" * 40: {}}}
    hub.gated.add("me/closed")
    expected = {
        "hf://me/nothing": (1, "there is no such model"),
        "hf://me/closed": (1, "its owner has to give you access"),
        "hf://me/model@no-branch": (1, "it has no such branch"),
        "hf://me/empty": (1, "expected a .safetensors file"),
        "hf://model": (2, "expected hf://OWNER/REPO"),
        "hf://me/model/file": (2, "expected hf://OWNER/REPO"),
        "hf://me/model@../main": (2, "expected hf://OWNER/REPO"),
        f"hf://me/model@{tmp_path}/mine": (2, "expected hf://OWNER/REPO"),
    }
    out = tmp_path / "out"
    commands = [["import", source, str(out)] for source in expected]
    found = perdure(tmp_path / "home", hub.endpoint, *commands)
    # Nothing listens there any more.
    with hub_server() as gone:
        pass
    expected["hf://me/model"] = (1, "cannot be fetched")
    found += perdure(tmp_path / "home", gone.endpoint, ["import", "hf://me/model", str(out)])
    for (source, (status, phrase)), (ended, output) in zip(expected.items(), found, strict=True):
        assert ended == status, output
        assert output.startswith("perdure: ")
        assert len(output.splitlines()) == 1
        assert source in output
        assert phrase in output
    assert not out.exists()


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[hub\]'"):
        import_run("hf://me/model", tmp_path / "out")
    with pytest.raises(ArgumentError, match="kind: expected safetensors"):
        import_run("hf://me/model", tmp_path / "out", kind="torch")
    assert not (tmp_path / "out").exists()


def front_and_body(card: str) -> tuple[dict[str, object], str]:
    empty, front, body = card.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(front), body


def test_the_card_says_what_it_is_and_how_to_check_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(f"{run}@4", "safetensors", tmp_path / "folder")
    front, body = front_and_body((tmp_path / "folder" / "README.md").read_text())
    assert front == {"library_name": "perdure", "tags": ["perdure", "safetensors"]}
    fingerprint = Run(run).manifest(4).fingerprint
    code = [line[4:] for line in body.splitlines() if line.startswith("    ")]
    assert fingerprint in code
    assert "# `digits`, step 4" in body
    assert str(run.parent) not in body, "no path of the machine"
    fields = json.loads(body.partition("## Recipe and environment")[2])
    assert fields["recipe"] == {name: RECIPE[name] for name in ("engine", "seed", "note")}
    assert fields["environment"] == {"threads": 2, "torch.allow_tf32": False}
    # The command of the card, where the card says that it is called.
    [command] = [line for line in code if line.startswith("perdure import")]
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=tmp_path / "folder",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"fingerprint {fingerprint}" in done.stdout.splitlines()
    assert Run(tmp_path / "checked").manifest(0).fingerprint == fingerprint


def test_the_fingerprint_of_a_part_is_that_of_its_import(run: Path, tmp_path: Path) -> None:
    export(run, "safetensors", tmp_path / "part", leaves="model")
    text = (tmp_path / "part" / "README.md").read_text()
    whole = Run(run).manifest(4).fingerprint
    assert f"From a checkpoint with the fingerprint `{whole}`." in text
    found = re.search(r"^    ([0-9a-f]{64})$", text, re.MULTILINE)
    assert found is not None
    assert import_run(tmp_path / "part", tmp_path / "back").fingerprint == found[1] != whole
    # Other paths do not matter to the check, and other bytes do.
    import_run(tmp_path / "part", tmp_path / "below", branch="model")
    file = tmp_path / "part" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for branch in ("", "model"):
        with pytest.raises(CorruptionError, match=found[1]):
            import_run(tmp_path / "part", tmp_path / "changed", branch=branch)
    # Negative control: without the note nothing says which bytes it had.
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]["perdure_fingerprint"]
    text = json.dumps(header)
    file.write_bytes(
        len(text).to_bytes(8, "little") + text.encode() + file.read_bytes()[8 + size :]
    )
    assert import_run(tmp_path / "part", tmp_path / "other").fingerprint != found[1]
