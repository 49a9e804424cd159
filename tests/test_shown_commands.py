"""Pages that show a session in a shell: their commands run, in order, and print what the page shows.

The programs of these pages are the blocks with a title.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shown_output import missing_lines

DOCS = Path(__file__).parent.parent / "docs"
FIRST_RUN = DOCS / "tutorials" / "first-run.md"
PAGES = {  # with the number of commands
    FIRST_RUN: 7,
    DOCS / "how-to" / "debug-a-difference.md": 4,
    DOCS / "how-to" / "recover-damage.md": 5,
}
PROGRAM = re.compile(r'^```python title="(?P<name>\S+)"\n(?P<code>.*?)^```$', re.M | re.S)
COMMANDS = re.compile(r"^```console\n(?P<text>\$ .*?)^```$", re.M | re.S)


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of the blocks that show a prompt, with the output below it."""
    blocks = "".join(block["text"] for block in COMMANDS.finditer(text))
    return [
        (command, output)
        for shown in re.split(r"^\$ ", blocks, flags=re.M)[1:]
        for command, _, output in [shown.partition("\n")]
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for program in PROGRAM.finditer(FIRST_RUN.read_text() + text):
        (tmp_path / program["name"]).write_text(program["code"])
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    steps = commands(text)
    assert len(steps) == PAGES[page]
    for command, shown in steps:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": tools, "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout)
        assert missing_lines(shown, done.stdout) == [], (command, done.stdout)


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        ("saved step 10, loss 0.5\n...\n", []),
        ("saved  step 3, loss -2e-05\n", []),
        ("a long ...\n", []),
        ("saved step 10\n", ["saved step 10"]),
        ("saved twice\n", ["saved twice"]),
        ("a long line\nsaved step 10, loss 0.5\n", ["saved step 10, loss 0.5"]),
    ],
)
def test_another_line_and_another_order_are_seen(shown: str, missing: list[str]) -> None:
    assert missing_lines(shown, "saved step 20, loss 1.25\na long line\n") == missing
