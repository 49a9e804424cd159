"""The recording of the demo, docs/demo.svg, is safe to show and shows what this version prints.

`make recording` makes it again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from perdure.cli import main
from perdure.demo.driver import DemoOptions, Phase

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = (DOCS / "demo.svg").read_text()
SVG = "{http://www.w3.org/2000/svg}"
# Directories of a machine, and what would load something or run a program.
UNWANTED = re.compile(
    r"/(tmp|home|root|work|usr|Users)\b|https?:|href|url\(|@import|\bon\w+=|javascript"
)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(DOCS / "drawings")
    return import_module("recording")


def last_screen(recording: Any, picture: str) -> list[str]:
    """The lines of the last frame, without the bar above them."""
    rows: defaultdict[int, str] = defaultdict(str)
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        if "gone" not in group.attrib["class"]:
            for text in group.iter(f"{SVG}text"):
                row = (float(text.attrib["y"]) - recording.BAR) // recording.LINE
                column = (float(text.attrib["x"]) - recording.MARGIN) / recording.CHARACTER
                rows[int(row)] = rows[int(row)].ljust(round(column)) + str(text.text)
    return [rows[row] for row in range(max(rows) + 1)]


def test_the_picture_is_small_and_loads_and_runs_nothing() -> None:
    root = ET.fromstring(PICTURE)
    used = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert used == {"svg", "title", "desc", "style", "rect", "g", "text"}
    assert UNWANTED.findall(PICTURE.replace('xmlns="http://www.w3.org/2000/svg"', "")) == []
    assert len(PICTURE.encode()) < 150_000
    assert all(root.findtext(f"{SVG}{name}") for name in ("title", "desc"))
    assert "prefers-color-scheme:dark" in PICTURE
    assert "prefers-reduced-motion:reduce" in PICTURE
    (seconds,) = re.findall(r"g\{animation:([\d.]+)s", PICTURE)
    assert 15 <= float(seconds) <= 25


@pytest.mark.parametrize(
    ("drawn", "changed"),
    [("", ""), (">repeated<", ">again<"), (">exit 75<", ">exit 76<"), (">PASS<", ">FAIL<")],
)
def test_the_picture_shows_what_the_demo_of_this_version_prints(
    recording: Any, monkeypatch: pytest.MonkeyPatch, drawn: str, changed: str
) -> None:
    """The figures come from the recording, all words and the phases from the program.

    A picture with another word is found.
    """
    assert drawn in PICTURE
    command, *lines = last_screen(
        recording, PICTURE.replace(drawn, changed, 1) if drawn else PICTURE
    )
    (header,) = (n for n, line in enumerate(lines) if line.startswith("phase "))
    rows = iter([re.split(" {2,}", line) for line in lines[header + 1 : header + 5]])
    first, last = (float(share) / 100 for share in re.findall(r"([\d.]+)%", lines[header + 5]))
    ends: dict[str, str] = {}

    def run_phase(_: DemoOptions, phase: Phase, total: int, finals: list[Any]) -> dict[str, Any]:
        name, topology, steps, ended, resumed, _repeated, fingerprint = next(rows)
        assert (name, topology) == (phase.name, phase.topology)
        start, stop = map(int, steps.split("-"))
        assert total == 72
        assert stop >= phase.stop
        if stop == total:
            finals.append({"accuracy": last if ends else first, "examples": 360})
        ends[phase.run] = fingerprint
        return {
            "phase": phase.name,
            "topology": phase.topology,
            "from": start,
            "to": stop,
            "ended": ended,
            "resumed_from": None if resumed == "-" else int(resumed),
            "repeated": 0,
            "fingerprint": fingerprint,
        }

    scans = SimpleNamespace(train={"label": range(1437)})
    monkeypatch.setattr("perdure.demo.digits.save_scans", lambda _: None)
    monkeypatch.setattr("perdure.demo.digits.load_digits", lambda _: scans)
    monkeypatch.setattr("perdure.demo.driver._run_phase", run_phase)
    monkeypatch.setattr("perdure.demo.driver._fingerprint", lambda run, _: ends[run.name])
    assert command == "$ perdure demo"
    done = CliRunner().invoke(main, command.split()[2:])
    assert done.exit_code == 0, done.output
    assert (done.output.splitlines() == lines) == (not drawn), "`make recording` draws it again"


def test_a_recording_keeps_columns_colours_and_the_last_text_of_a_line(recording: Any) -> None:
    parts = [(1.0, "one  \x1b[31mred\x1b[0m <x>\r\n1 of 2\r"), (40.0, "2 of 2\r\n")]
    picture = recording.draw(recording.frames(("a", "b"), parts, 4), 4)
    assert last_screen(recording, picture) == ["$ a b", "one  red <x>", "2 of 2"]
    assert 'class="red"' in picture
    with pytest.raises(SystemExit):
        recording.frames(("a",), [(1.0, "x" * 81)], 1)


def test_a_command_is_recorded_in_a_terminal(recording: Any) -> None:
    assert "".join(text for _, text in recording.record(["platform"])).endswith("\r\n")
    with pytest.raises(SystemExit) as caught:
        recording.record(["no_such_module"])
    assert "no_such_module" in str(caught.value)
