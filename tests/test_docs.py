"""The documentation works as it is shown: its Python blocks run, and its make targets exist.

The Python blocks of one file run in order in one process, in an empty directory; a traceback names the
line of the document. A block that must not run says why on the line before it:
`<!-- not run: the reason -->`. The processes of a document with a framework are forks of one that has
imported it.

Every run directory that the blocks write is also copied in the middle, as a kill would leave it: before
its third commit, or before its last one if it has fewer. The blocks then run again, in a new process,
in a directory with these copies, and have to end with the same fingerprints.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from forked import run_forked

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

PYTHON = {"py", "python", "python3"}
SHELL = {"bash", "console", "sh", "shell"}
FENCE = re.compile(r"^\s*(?P<fence>`{3,}|~{3,})\s*(?P<language>\w*)")
INCLUDED = re.compile(r'^--8<-- "(?P<path>[^"]+)"$', re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)(?P<path>[^)#\s]+)[^)]*\)")
NOT_RUN = re.compile(r"^\s*<!--\s*not run:(?P<reason>.*)-->\s*$")

# Keras would import TensorFlow for its own checks, which takes longer than the blocks.
# The warning is ignored in pyproject.toml, too: Keras swallows it as an error, and leaves tensors among
# the logs of `fit`.
RUNNER = """
import json, os, sys, warnings
warnings.filterwarnings("ignore", "__array__ implementation doesn't accept", DeprecationWarning)
sys.modules["tensorflow"] = None
scope = sys.modules["__main__"].__dict__
os.chdir(sys.argv[2])
with open(sys.argv[1]) as file:
    path, blocks = json.load(file)
for line, code in blocks:
    exec(compile("\\n" * line + code, path, "exec", dont_inherit=True), scope)
"""

# Runs before the blocks. An audit hook sees the link that commits a manifest before it is made.
WATCHER = """
import os, shutil, sys
commits = {}
def copy(event, args):
    if event != "os.link" or os.path.basename(os.path.dirname(args[1])) != "checkpoints":
        return
    run = os.path.relpath(os.path.dirname(os.path.dirname(args[1])))
    commits[run] = commits.get(run, 0) + 1
    if commits[run] <= 3:
        target = os.path.join(KILLED, run)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(run, target, ignore=shutil.ignore_patterns("lock", "*.tmp"))
sys.addaudithook(copy)
"""

# Documents whose second process cannot continue from the copies, with the reason.
NOT_KILLED = {
    "CLOUD.md": "its bucket is on a server that ends with the block",
    "DRILL.md": "the drill kills its script itself, and compares",
}


PROVED_GUIDES = {
    "PLUGINS.md": {"Lightning's example transformer"},
    "JAX.md": {"Orbax's guide checkpoint_101"},
    "TORCH.md": {"nanoGPT", "PyTorch examples, mnist"},
}
"""The programs whose diffs a page shows; `make proof-doors` runs, kills and compares them."""

FRAMEWORKS = {
    "CLUSTER.md": "documents",
    "JAX.md": "documents",
    "JOURNAL.md": "jax",
    "KERAS.md": "keras-torch",
    "LOOPS.md": "documents",
    "MODELS.md": "documents",
    "PLUGINS.md": "documents",
    "RUN.md": "documents",
    "STRATEGIES.md": "documents",
    "TORCH.md": "documents",
    "keras-fit.ipynb": "keras-torch",
    "torch-loop.ipynb": "torch",
}
"""The server to fork for each document that imports a framework, which takes a new process seconds."""


@dataclass(frozen=True)
class Block:
    """A fenced block: the line of its fence (from 1), language, code, why it is not run."""

    line: int
    language: str
    code: str
    not_run: str | None


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document. Raises `ValueError` for one that is not closed."""
    fenced: list[Block] = []
    lines = text.splitlines()
    end = -1
    while (start := end + 1) < len(lines):
        opening = FENCE.match(lines[start])
        if opening is None:
            end = start
            continue
        closing = (
            n for n in range(start + 1, len(lines)) if lines[n].strip().startswith(opening["fence"])
        )
        if (end := next(closing, -1)) < 0:
            raise ValueError(f"line {start + 1}: this block is not closed")
        reason = NOT_RUN.match(lines[start - 1]) if start else None
        fenced.append(
            Block(
                line=start + 1,
                language=opening["language"].lower(),
                code=textwrap.dedent("\n".join(lines[start + 1 : end]) + "\n"),
                not_run=None if reason is None else reason["reason"].strip(),
            )
        )
    return fenced


def python_blocks(text: str) -> list[Block]:
    """The Python blocks to run. Raises `ValueError` for one that is excluded without a reason.

    A block that shows a file of examples/ is left out: `test_examples.py` runs the file.
    """
    python = [block for block in blocks(text) if block.language in PYTHON]
    python = [block for block in python if not INCLUDED.match(block.code)]
    for block in python:
        if block.not_run == "":
            raise ValueError(f"line {block.line}: `not run` needs a reason")
    return [block for block in python if block.not_run is None]


def run_python(
    directory: Path, path: Path, code: list[Block], before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the blocks of the document `path` in order in `directory`, after the code in `before`.

    A warning is an error.
    """
    variables = {**os.environ, **environment}
    with tempfile.TemporaryDirectory() as scratch:
        program, given = Path(scratch, "runner.py"), Path(scratch, "blocks.json")
        program.write_text(before + RUNNER)
        given.write_text(json.dumps([str(path), [(block.line, block.code) for block in code]]))
        arguments = [str(given), str(directory)]
        if engine := FRAMEWORKS.get(path.name):
            [ended] = run_forked(engine, program, [arguments], [variables])
            return subprocess.CompletedProcess(arguments, *ended)
        return subprocess.run(
            [sys.executable, "-W", "error", program, *arguments],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )


def make_commands(text: str) -> list[list[str]]:
    """Targets and variables of every `make` command in the shell blocks of a document."""
    commands = []
    for block in blocks(text):
        if block.language not in SHELL:
            continue
        lines = block.code.splitlines()
        typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
        for line in typed:
            words = shlex.split(line, comments=True)
            while words:
                end = next((n for n, word in enumerate(words) if word in {"&&", "||", ";"}), None)
                command, words = words[:end], [] if end is None else words[end + 1 :]
                while command and re.match(r"\w+=", command[0]):
                    command = command[1:]
                if command[:1] == ["make"]:
                    commands.append([word for word in command[1:] if not word.startswith("-")])
    return commands


def dry_run(make: str, goals: list[str]) -> subprocess.CompletedProcess[str]:
    """What `make` would do for these goals, by this repository's Makefile."""
    outer_make = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
    return subprocess.run(
        [make, "--dry-run", "--no-print-directory", *goals],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in outer_make},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def make() -> str:
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not installed here")
    return program


def newest(directory: Path) -> dict[str, tuple[int, str]]:
    """Step and fingerprint of the newest checkpoint of every run directory, by its path."""
    checkpoints = {}
    for marker in directory.rglob("perdure.json"):
        manifests = sorted((marker.parent / "checkpoints").glob("*.json"))
        if manifests:
            manifest = json.loads(manifests[-1].read_text())
            run = str(marker.parent.relative_to(directory))
            checkpoints[run] = (manifest["step"], manifest["fingerprint"])
    return checkpoints


def kill_and_resume(directory: Path, path: Path, code: list[Block]) -> tuple[dict[str, Any], ...]:
    """Run the blocks undisturbed, and again from what a kill would have left of each run.

    Returns the newest checkpoints of the undisturbed run, of the copies, and of the resumed run.
    """
    whole, killed = directory / "whole", directory / "killed"
    whole.mkdir()
    killed.mkdir()
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    done = run_python(whole, path, code, f"KILLED = {str(killed)!r}{WATCHER}", **cache)
    assert done.returncode == 0, done.stderr
    expected, copies = newest(whole), newest(killed)
    copied = {str(marker.parent.relative_to(killed)) for marker in killed.rglob("perdure.json")}
    assert copied >= expected.keys(), "a run directory was not copied in the middle"
    if copied and path.name not in NOT_KILLED:
        done = run_python(killed, path, code, **cache)
        assert done.returncode == 0, done.stderr
    return expected, copies, newest(killed)


# Runs that are in the middle when they are copied. The other runs have one checkpoint.
RESUMED = {
    "README.md": {"runs/first"},
    "JAX.md": {"runs/jit"},
    "LOOPS.md": {"runs/trainer", "runs/hooks", "runs/preemptible", "runs/watched"},
    "MODELS.md": {
        f"runs/{name}" for name in ("nnx", "equinox", "keras-jax", "ema", "float16", "torch")
    },
    "PLUGINS.md": {"runs/dcp"},
    "STRATEGIES.md": {"runs/jax", "runs/torch", "runs/digits"},
    "TORCH.md": {"runs/torch", "runs/amp"},
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_run_and_resume(tmp_path: Path, path: Path) -> None:
    if code := python_blocks(path.read_text()):
        expected, copies, resumed = kill_and_resume(tmp_path, path, code)
        in_the_middle = {run for run in copies if copies[run] != expected.get(run)}
        assert in_the_middle >= RESUMED.get(path.name, set())
        if path.name not in NOT_KILLED:
            assert resumed == expected


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(make: str, path: Path) -> None:
    for goals in make_commands(path.read_text()):
        done = dry_run(make, goals)
        assert done.returncode == 0, done.stderr


def missing_files(text: str, document: Path) -> list[str]:
    """The files to which a document links, or that it includes, and that do not exist."""
    plain = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    plain = re.sub(r"`[^`\n]*`", "", plain)
    paths = [(document.parent, found["path"]) for found in LINK.finditer(plain)]
    paths += [(ROOT, found["path"]) for found in INCLUDED.finditer(text)]
    return [path for base, path in paths if not (base / path).exists()]


MADE_BY_THE_SITE = "api/"
"""The pages of the reference that the build of the site makes: mkdocs checks the links to them."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_linked_and_included_files_exist(path: Path) -> None:
    missing = missing_files(path.read_text(), path)
    assert [link for link in missing if MADE_BY_THE_SITE not in link] == []


def test_a_missing_file_is_seen() -> None:
    text = '[a](no.md#b) [c](README.md) `[d](e.md)`\n```text\n[f](g.md)\n```\n--8<-- "h.svg"\n'
    assert missing_files(text, README) == ["no.md", "h.svg"]


@pytest.mark.parametrize(("guide", "programs"), PROVED_GUIDES.items())
def test_the_diffs_of_a_guide_are_those_that_the_proof_tries(
    guide: str, programs: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "proofs")
    known = (*import_module("real_torch").PROGRAMS, *import_module("real_jax").PROGRAMS)
    edits = [edit for program in known if program.name in programs for edit in program.edits]
    shown = blocks((ROOT / "docs" / guide).read_text().partition("## Move from")[2])
    diff = [line for block in shown if block.language == "diff" for line in block.code.splitlines()]
    added = [line for line in diff if line.startswith("+")]
    lines = [line for edit in edits for line in edit.lines]
    assert [line for line in lines if not any(line in found for found in added)] == []
    assert len(added) == len(lines) > 0


def test_the_diff_of_the_guide_from_keras_is_the_example() -> None:
    example = (ROOT / "examples" / "keras_fit.py").read_text()
    shown = blocks((ROOT / "docs" / "KERAS.md").read_text().partition("## Move from")[2])
    (diff,) = (block.code for block in shown if block.language == "diff")
    lines = [line for line in diff.splitlines() if line[:1] in "+ " and line.strip() != "..."]
    assert [line for line in lines if f"{line[1:]}\n" not in example] == []
    assert any(line[0] == "+" for line in lines)


def test_every_error_has_a_row_with_its_cause_and_remedy() -> None:
    names = (ROOT / "tests" / "frozen" / "names.txt").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.M)
    errors = re.findall(r"^perdure\.errors: (\w+Error)$", names, re.MULTILINE)
    assert sorted(rows) == sorted(errors)


def test_the_readme_shows_something_that_runs() -> None:
    text = README.read_text()
    assert python_blocks(text)
    assert {goals[0] for goals in make_commands(text) if goals} >= {"demo", "test"}


def missing_paths(text: str) -> list[str]:
    """The paths of the table "To add something" that do not exist, in the order of the rows."""
    section = text.partition("## To add something")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:4] for line in section.splitlines() if line.startswith("| a")]
    assert len(rows) >= 9
    return [
        path
        for row in rows
        for base, cell in zip(("src/perdure", "tests"), row, strict=True)
        for path in re.findall(r"`([\w./]+(?:/|\.py|\.txt))`", cell)
        if not (ROOT / base / path).exists()
    ]


def test_the_paths_in_the_table_of_contributing_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert missing_paths(text) == []
    assert missing_paths(text.replace("retention.py", "keeping.py")) == [
        "checkpoint/keeping.py",
        "checkpoint/test_keeping.py",
    ]


def missing_answers(text: str) -> list[str]:
    """The paths and the quoted headings of the table "To find something" that do not exist."""
    section = text.partition("## To find something")[2].partition("\n## ")[0]
    answers = re.findall(r"`([\w./]+/\w+\.(?:py|md))`(?:, \"([^\"]+)\")?", section)
    assert len(answers) >= 12
    missing = []
    for path, heading in answers:
        file = ROOT / path if path.startswith("docs/") else ROOT / "src/perdure" / path
        if not file.exists():
            missing.append(path)
        elif (
            not re.search(rf"^(#+ |\*\*){re.escape(heading)}", file.read_text(), re.MULTILINE)
            and heading
        ):
            missing.append(heading)
    return missing


def test_the_answers_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert missing_answers(text) == []
    changed = text.replace("store/file_lock.py", "store/hire.py").replace(
        '"One writer"', '"No writer"'
    )
    assert missing_answers(changed) == ["No writer", "store/hire.py"]


# ---------------------------------------------------------------- negative controls

SAMPLE = """
```python
import pathlib
answer = 41
```
    ```py
    answer += 1
    pathlib.Path("answer").write_text(str(answer))
    ```
<!-- not run: needs a cluster -->
```python
raise SystemExit("this must not run")
```
"""


def test_blocks_run_in_order_and_share_their_names(tmp_path: Path) -> None:
    done = run_python(tmp_path, Path("sample.md"), python_blocks(SAMPLE))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answer").read_text() == "42"


LOOP = """
```python
import perdure
total = 0
with perdure.CheckpointManager("run") as manager:
    state, start = manager.restore_or_initialize({"n": 0, "total": 0})
    for step in range(start, 6):
        total = PREVIOUS + step
        state = {"n": step, "total": total}
        manager.save(step + 1, state)
        manager.wait_until_finished()
```
"""


def test_a_loop_that_does_not_resume_is_seen(tmp_path: Path) -> None:
    for name, previous, same in [("good", 'state["total"]', True), ("bad", "total", False)]:
        (tmp_path / name).mkdir()
        code = python_blocks(LOOP.replace("PREVIOUS", previous))
        expected, copies, resumed = kill_and_resume(tmp_path / name, Path("sample.md"), code)
        assert (copies["run"][0], expected["run"][0], resumed["run"][0]) == (2, 6, 6)
        assert (resumed == expected) == same


def test_a_block_that_fails_is_seen_with_its_line(tmp_path: Path) -> None:
    text = "# Title\n\n```python\nfine = 1\n1 / 0\n```\n"
    done = run_python(tmp_path, Path("sample.md"), python_blocks(text))
    assert done.returncode == 1
    assert 'File "sample.md", line 5' in done.stderr
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("comment", ["<!-- not run: -->", "<!--not run:-->"])
def test_a_block_excluded_without_a_reason_is_seen(comment: str) -> None:
    with pytest.raises(ValueError) as caught:
        python_blocks(f"{comment}\n```python\n1\n```\n")
    assert str(caught.value) == "line 2: `not run` needs a reason"


def test_a_block_that_is_not_closed_is_seen() -> None:
    with pytest.raises(ValueError) as caught:
        blocks("```python\n1\n")
    assert str(caught.value) == "line 1: this block is not closed"


def test_make_commands_are_found_in_every_form() -> None:
    text = (
        "```console\n$ cd x && CI=1 make -j2 demo ENGINE=torch  # comment\nmake: output\n```\n"
        "```bash\nmake test\nmaketest\n```\n```python\nmake = 1\n```\n"
    )
    assert make_commands(text) == [["demo", "ENGINE=torch"], ["test"]]


def test_a_target_that_does_not_exist_is_seen(make: str) -> None:
    assert dry_run(make, ["test"]).returncode == 0
    done = dry_run(make, ["no-such-target"])
    assert done.returncode == 2
    assert "no-such-target" in done.stderr
