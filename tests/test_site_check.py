"""`docs/site/check.py`, which `make docs` runs on the built site, finds what it is there to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parent.parent / "docs" / "site" / "check.py"
GOOD = (
    '<h1 id="top">x</h1><a href="b/#part">y</a><a href="https://example.org">z</a><img src="a.png">'
)


@pytest.mark.parametrize(
    ("page", "style", "wrong"),
    [
        (GOOD, "a { background: url(data:x) }", []),
        ('<a href="c/">y</a>', "", ["index.html: no page c/"]),
        ('<a href="b/#other">y</a>', "", ["index.html: no anchor b/#other"]),
        ('<script src="//example.org/a.js">', "", ["index.html: loads //example.org/a.js"]),
        (
            '<link rel="stylesheet" href="https://example.org/a.css">',
            "",
            ["index.html: loads https://example.org/a.css"],
        ),
        (
            "",
            '@font-face { src: url("https://example.org/f.woff") }',
            ["site.css: loads https://example.org/f.woff"],
        ),
    ],
)
def test_dead_links_and_other_hosts_are_found(
    page: str, style: str, wrong: list[str], tmp_path: Path
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(page)
    (tmp_path / "b" / "index.html").write_text('<h1 id="part">x</h1><a href="../#top">y</a>')
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "site.css").write_text(style)
    done = subprocess.run(
        [sys.executable, CHECK, tmp_path], capture_output=True, text=True, check=False
    )
    found = [line for line in done.stderr.splitlines() if line.startswith(("index", "site"))]
    assert found == wrong
    if page == GOOD:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("2 pages in ")
