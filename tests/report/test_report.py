"""`perdure report`: what the page says, that it makes no request, and what damage does to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from reported import KILLED, START, Counting, attempt, flip, record, save, states

import perdure.report
from perdure.cli import main
from perdure.errors import ArgumentError, NotARunError
from perdure.report import report
from perdure.report.figure import page_svg
from perdure.report.layer_changes import layers_of
from perdure.report.panels import Panel, PlotLine
from perdure.report.run_report import duration, render_drill
from perdure.store import LocalStorage, Run, fork_run, verify_run
from perdure.store.log import LogWriter, read_lines
from perdure.supervise.attempts_log import FILE, NAME, timestamp

STEPS = (10, 20, 30)
STYLE = (Path(perdure.report.__file__).parent / "templates" / "style.css").read_text()
TAGS = {"html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "h3", "p"}
TAGS |= {"div", "span", "i", "code", "pre", "strong", "ul", "li", "dl", "dt", "dd", "figure"}
TAGS |= {"figcaption", "table", "thead", "tbody", "tr", "th", "td", "svg", "g", "text", "line"}
TAGS |= {"path", "use", "defs", "clippath", "rect", "wbr"}
ATTRIBUTES = {
    "lang",
    "charset",
    "content",
    "http-equiv",
    "name",
    "class",
    "style",
    "title",
    "scope",
}
ATTRIBUTES |= {"role", "aria-label", "tabindex", "x", "y", "width", "height", "id", "d", "viewbox"}
ATTRIBUTES |= {"clip-path", "transform", "xlink:href"}


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.metas: dict[str, str] = {}
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        values = dict(attrs)
        self.metas[values.get("http-equiv") or ""] = values.get("content") or ""

    def handle_data(self, data: str) -> None:
        self.text += data


def run_report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def require_alone(html: str) -> Page:
    """The page has nothing that a browser fetches or runs, and no character that it obeys."""
    page = Page(html)
    assert page.tags <= TAGS
    assert {name for name, _ in page.attributes} <= ATTRIBUTES
    policy = page.metas["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert not re.search(r"url\((?!#)|@import|<!\[CDATA|expression\(", html, re.IGNORECASE)
    assert all(c.isprintable() or c == "\n" for c in html)
    links = [value or "" for name, value in page.attributes if name == "xlink:href"]
    assert all(link.startswith("#") for link in links)
    return page


def newest_pack(where: Path, step: int) -> str:
    """The pack that the save of a step wrote."""
    return max(pack.name for pack in Run(where).manifest(step).packs)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run that was killed at step 13 and continued from 10, with its record beside it."""
    where = tmp_path / "run"
    recipe = {"seed": 3, "platform": "cpu"}
    metrics = {step: {"loss": 1.0 / step} for step in STEPS}
    save(where, states(STEPS), recipe=recipe, metrics=metrics)
    record(tmp_path / "perdure-logs", KILLED, where)
    return where


def test_the_life_of_a_run_is_on_its_page(killed: Path) -> None:
    done = report(killed)
    life = done.document["runs"][0]["life"]
    assert life["attempts"] == 2
    assert life["repeated_steps"] == 3
    assert life["goodput"] == pytest.approx(30 / 33, abs=0.001)
    page = require_alone(done.html)
    for fact in (
        "worker 0: SIGKILL",
        "exit 0",
        "90.9 %",
        "10\N{EN DASH}30",
        "python train.py",
        "far",
    ):
        assert fact in page.text
    assert "Dashed red lines" in page.text
    assert "not verified" in page.text
    assert f"perdure verify {killed} --json" in page.text
    assert [row["fingerprint"] for row in done.document["runs"][0]["checkpoints"]] == [
        Run(killed).manifest(step).fingerprint for step in STEPS
    ]
    assert done.ok
    assert report(killed).html == done.html, "the same run, the same bytes"
    assert json.loads(json.dumps(done.document)), "plain values"


def test_the_change_of_a_layer_is_its_relative_norm(killed: Path) -> None:
    document = report(killed, leaves="model").document["runs"][0]["changes"]
    assert document["steps"] == [[10, 20], [20, 30]]
    rows = {row["layer"]: row["changes"] for row in document["layers"]}
    assert rows["model/frozen"] == ["same", "same"]
    values = [state["model/moving"] for state in states(STEPS).values()]
    expected = [
        np.linalg.norm(after - before) / np.linalg.norm(before)
        for before, after in pairwise(values)
    ]
    assert rows["model/moving"] == pytest.approx(expected, rel=1e-12)
    assert "count" not in rows, "integers have no norm"


def test_equal_leaves_are_not_read(tmp_path: Path) -> None:
    big = np.arange(3 << 20, dtype="float32")  # three chunks
    changed = big.copy()
    changed[0] = 7.0
    small = np.ones(10)
    save(tmp_path / "run", {1: {"a": big, "b": small}, 2: {"a": big, "b": small + 1}})
    storage = Counting(tmp_path / "run")
    found = report(Run(storage)).document["runs"][0]["changes"]["layers"]
    assert [row["changes"] for row in found] == [["same"], [1.0]]
    assert storage.read_from_packs == 2 * small.nbytes
    # The control: one chunk of three differs, so all of the older leaf is read, and one of the newer.
    save(tmp_path / "other", {1: {"a": big}, 2: {"a": changed}})
    storage = Counting(tmp_path / "other")
    report(Run(storage))
    assert storage.read_from_packs == big.nbytes + (4 << 20)


HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e\0&amp;'\""


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    where = tmp_path / HOSTILE.replace("/", "\\").replace("\0", "")
    metrics = {step: {HOSTILE: 1.0, "]]>": float("nan")} for step in STEPS}
    paths = {step: {HOSTILE: np.ones(2) * step} for step in STEPS}
    save(where, paths, recipe={HOSTILE: HOSTILE, "url(http://x)": 1}, metrics=metrics)
    bad = attempt(1, 0, 13, "killed", HOSTILE, last_line=HOSTILE)
    logs = record(
        tmp_path / "perdure-logs", [bad, KILLED[1]], where, host=HOSTILE, command=[HOSTILE]
    )
    other = shutil.copytree(where, tmp_path / "\udcff", symlinks=True)
    for done in (report(where), report(where, other, logs=[logs.parent])):
        page = Page(done.html)
        assert page.tags <= TAGS
        assert {name for name, _ in page.attributes} <= ATTRIBUTES
        assert not any((value or "").startswith("javascript") for _, value in page.attributes)
        assert all(c.isprintable() or c == "\n" for c in done.html)
        assert "<script>alert(1)</script><img src=x" in page.text, "shown as it is"
        assert r"\x1b[31m\u202e" in page.text
        done.html.encode()
    assert "url(" not in STYLE


def test_a_checkpoint_with_a_damaged_chunk_is_named(killed: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run_report(killed, "-o", out).exit_code == 0
    flip(killed, 20, "model/moving")
    done = run_report(killed, "-o", out)
    assert done.exit_code == 1, done.output
    assert "step 20 is damaged" in done.stderr
    assert "step 10" not in done.stderr
    assert ">damaged</span>" in out.read_text()
    rows = json.loads(run_report(killed, "--json").stdout)["runs"][0]["checkpoints"]
    assert [row["state"] for row in rows] == [None, "damaged", None]


@pytest.mark.parametrize("damage", ["manifest", "pack is gone", "pack is short"])
def test_other_damage_is_named_and_the_rest_is_reported(damage: str, killed: Path) -> None:
    pack = killed / "packs" / newest_pack(killed, 30)
    if damage == "manifest":
        [manifest] = (killed / "checkpoints").glob("*30.json")
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif damage == "pack is gone":
        pack.unlink()
    else:
        pack.write_bytes(pack.read_bytes()[:-1])
    done = report(killed)
    assert not done.ok
    rows = done.document["runs"][0]["checkpoints"]
    assert [row["state"] for row in rows] == [None, None, "damaged"]
    assert done.document["runs"][0]["changes"]["steps"] == [[10, 20]]
    assert "damaged" in require_alone(done.html).text


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    with Run(tmp_path / "run", create=True) as run:
        run.begin_writing()
    logs = record(tmp_path / "elsewhere", KILLED)
    text = require_alone(report(tmp_path / "run").html).text
    assert "There is no checkpoint yet." in text
    assert "No record of perdure run covers these checkpoints." in text
    named = report(tmp_path / "run", logs=[logs.parent])
    assert named.document["runs"][0]["life"]["attempts"] == 2


def test_what_is_no_run_is_a_usage_error(killed: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run_report(tmp_path / "nowhere", "-o", out).exit_code == 2
    assert run_report(killed).exit_code == 2, "neither -o nor --json"
    assert run_report("-o", out).exit_code == 2
    assert run_report(killed, "--log-dir", tmp_path / "nowhere", "-o", out).exit_code == 2
    assert not out.exists()
    with pytest.raises(ArgumentError, match="expected a run directory"):
        report()
    with pytest.raises(NotARunError):
        report(tmp_path / "nowhere")
    with pytest.raises(ArgumentError, match="no leaf matches"):
        report(killed, leaves="nothing/*")


def the_log(killed: Path) -> Path:
    [path] = (killed.parent / "perdure-logs").glob(f"*/{FILE}")
    return path


def test_lines_of_a_log_that_cannot_be_believed_are_counted(killed: Path) -> None:
    path = the_log(killed)
    *lines, _, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + b"[1]\n" * 3)
    done = report(killed)
    assert done.document["runs"][0]["life"]["attempts"] == 1
    assert "3 lines of the record cannot be read." in require_alone(done.html).text


def test_a_run_takes_the_record_in_which_it_was_saved(killed: Path, tmp_path: Path) -> None:
    logs = tmp_path / "perdure-logs"
    other = [attempt(1, 0, 900, "done", "at the same time")]
    record(logs, other, tmp_path / "other", directory="/other")
    life = report(killed).document["runs"][0]["life"]
    assert [start["directory"] for start in life["starts"]] == ["/jobs/mine"]
    # Steps that a second start of the same program repeats count, too.
    record(logs, [attempt(1, 20, 40, "done", "exit 0")], killed, began=START + 40)
    life = report(killed).document["runs"][0]["life"]
    assert len(life["starts"]) == 2
    assert life["repeated_steps"] == 3 + 10
    # The control: without the right record none is taken.
    shutil.rmtree(logs)
    record(logs, other, tmp_path / "other", directory="/other")
    assert report(killed).document["runs"][0]["life"] is None
    # A run that was moved is known by its name.
    record(logs, KILLED, Path("/moved/from/run"), directory="/moved")
    [start] = report(killed).document["runs"][0]["life"]["starts"]
    assert start["directory"] == "/moved"


def test_a_start_that_ended_without_a_word(killed: Path) -> None:
    path = the_log(killed)
    with path.open("rb") as file:
        _, last, *_ = read_lines(file, "")
    log = LogWriter(LocalStorage(path.parent), NAME, last)  # which cuts off what follows
    time = timestamp(START + 27)
    log.append({"kind": "attempt", "time": time, "attempt": 2, "workers": 4})
    step = {"attempt": 2, "step": 27, "phase": "step", "saved": {}}
    log.append({"kind": "progress", "time": time, **step})
    log.close()
    done = report(killed)
    [start] = done.document["runs"][0]["life"]["starts"]
    assert start["state"] == "unknown", "it was on another machine"
    text = require_alone(done.html).text
    assert "step 27" in text
    assert "not known here whether it runs" in text


def test_two_runs_stand_side_by_side(killed: Path, tmp_path: Path) -> None:
    fork_run(killed, 20, tmp_path / "fork")
    same = report(killed, tmp_path / "fork")
    assert same.document["comparison"]["first_different_step"] is None
    assert same.document["comparison"]["recipe_fields"] == ["platform", "seed"]
    assert "the same platform, seed" in same.html
    assert "All 1 common steps have equal fingerprints" in same.html
    mixed = states(STEPS) | {30: states(STEPS, seed=1)[30]}
    save(tmp_path / "other", mixed, recipe={"seed": 4, "platform": "cpu"})
    done = report(killed, tmp_path / "other")
    comparison = done.document["comparison"]
    assert comparison["recipe"] == {"seed": [3, 4]}
    assert comparison["common_steps"] == 3
    assert comparison["first_different_step"] == 30
    assert comparison["leaves"] == ["model/frozen", "model/moving"]
    text = require_alone(done.html).text
    assert "The first of 3 common steps that differs is step 30." in text
    assert text.index("Side by side") < text.index("Metrics") < text.index("Its life")


@pytest.mark.parametrize("recipe", [None, {"seed": 1}])
def test_runs_of_two_learning_rates_are_never_called_equal(
    recipe: dict[str, Any] | None, tmp_path: Path
) -> None:
    for name, rate in (("one", 0.1), ("two", 0.2)):
        metrics = {step: {"rate": rate, "same": 1.0} for step in STEPS}
        save(tmp_path / name, states(STEPS), recipe=recipe, metrics=metrics)
    done = report(tmp_path / "one", tmp_path / "two")
    comparison = done.document["comparison"]
    assert comparison["metrics"] == {"rate": {"step": 10, "values": [0.1, 0.2]}}
    assert comparison["recipe_fields"] == sorted(recipe or {})
    part = require_alone(done.html).text.partition("What differs")[2].partition("Metrics")[0]
    assert re.search(r"rate\s*metric at step 10\s*0.1\s*0.2", part)
    assert "are equal" not in part
    assert ("the same seed" in part) == (recipe is not None)
    assert ("not compared" in part) == (recipe is None)


def test_the_keys_of_a_legend_have_the_dashes_of_their_lines(tmp_path: Path) -> None:
    for n in range(8):
        save(tmp_path / f"r{n}", states((1, 2)), metrics={1: {"loss": 1.0}, 2: {"loss": 2.0 + n}})
    page = report(*(tmp_path / f"r{n}" for n in range(8))).html
    require_alone(page)
    legend = page.split('class="legend"')[1].split("</div>")[0]
    assert re.findall(r"border-top-style:(\w+)", legend) == ["solid"] * 6 + ["dashed"] * 2
    drawing = page.split("<svg")[1].split("</svg>")[0]
    lines = re.findall(r'<path[^>]*style="([^"]*stroke: var\(--s\d\)[^"]*)"', drawing)
    assert [("stroke-dasharray" in style) for style in lines] == [False] * 6 + [True] * 2


def test_two_runs_without_a_common_step(killed: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", states((5, 15)))
    done = report(killed, tmp_path / "other")
    assert done.document["comparison"]["common_steps"] == 0
    assert "The runs have no step in common" in require_alone(done.html).text


def test_what_verify_found_is_shown(killed: Path, tmp_path: Path) -> None:
    path = tmp_path / "verify.json"
    path.write_text(CliRunner().invoke(main, ["verify", str(killed), "--json"]).stdout)
    done = report(killed, verified=[path])
    assert "all good" in done.html
    assert [row["verified"] for row in done.document["runs"][0]["checkpoints"]] == ["good"] * 3
    # A checkpoint that was saved since is not verified.
    arrays = states((*STEPS, 40))
    with Run(killed) as run:
        run.save(40, {"model/moving": run.load(30).leaves["model/moving"]})
    later = report(killed, verified=[path])
    assert arrays.keys() == {10, 20, 30, 40}
    assert "3 of 4" in later.html
    assert later.document["runs"][0]["checkpoints"][-1]["verified"] is None
    # A bit flips in a leaf that both checkpoints share: no value is read, and verify finds it.
    flip(killed, 10, "model/frozen")
    assert report(killed).ok
    assert not verify_run(Run(killed)).ok
    path.write_text(CliRunner().invoke(main, ["verify", str(killed), "--json"]).stdout)
    assert not report(killed, verified=[path]).ok


def test_two_verifications_of_one_run_are_refused(killed: Path, tmp_path: Path) -> None:
    text = CliRunner().invoke(main, ["verify", str(killed), "--json"]).stdout
    older, newer = tmp_path / "older.json", tmp_path / "newer.json"
    for path in (older, newer):
        path.write_text(text)
    page = tmp_path / "page.html"
    words = ["report", str(killed), "-o", str(page), "--verify", str(older)]
    done = CliRunner().invoke(main, [*words, "--verify", str(newer)])
    assert done.exit_code == 2
    assert str(older) in done.stderr
    assert str(newer) in done.stderr
    assert not page.exists()
    assert CliRunner().invoke(main, words).exit_code == 0, "negative control"


@pytest.mark.parametrize("option", ["--verify", "--drill"])
@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"where": 3, "good": [], "bad": [], "unread": [], "problems": [1]}']
)
def test_a_file_that_is_no_such_document(
    option: str, text: str, killed: Path, tmp_path: Path
) -> None:
    path = tmp_path / "document.json"
    path.write_text(text)
    done = run_report(killed, option, path, "--json")
    assert done.exit_code in (1, 2)
    assert f"{path}: expected the document of" in done.stderr
    assert json.loads(done.stdout)["kind"] == "ArgumentError"


def test_the_verdict_of_another_run_is_refused(killed: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", states((1,)))
    path = tmp_path / "verify.json"
    path.write_text(CliRunner().invoke(main, ["verify", str(tmp_path / "other"), "--json"]).stdout)
    with pytest.raises(ArgumentError, match="found one of"):
        report(killed, verified=[path])


DRILLED: dict[str, Any] = {
    "command": ["python", "<i>.py"],
    "pass": True,
    "stopped": False,
    "restored": {"runs": 1, "of": 1, "steps": [4]},
    "tried": {"checkpoints": [1, 2], "phases": [1, 1], "kinds": [1, 21]},
    "exports": [],
    "not_looked_at": ["what it prints"],
    "not_tested": {"torn-write": "<b>none</b>"},
    "limits": ["one"],
    "date": "today",
    "seconds": 80.0,
    "host": "far",
    "versions": {"numpy": "2"},
    "recipe": {},
    "seed": 0,
    "workers": 1,
    "undisturbed": {
        "seconds": 1.0,
        "steps": 8,
        "checkpoints": 2,
        "fingerprint": "ab" * 32,
        "difference": None,
        "diagnosis": None,
    },
    "faults": {"sigkill": {"runs": 1, "fired": 1, "restored": 1, "pass": 1}},
    "runs": [
        {
            "number": 1,
            "kind": "sigkill",
            "place": None,
            "faults": 1,
            "fired": ["SIGKILL after 0.5 s"],
            "all_fired": True,
            "verdict": "pass",
            "attempts": [
                {
                    "ended": "worker 0: SIGKILL",
                    "seconds": 0.5,
                    "began_s": 0.0,
                    "restored": None,
                    "recomputed": None,
                    "faults": [{"at_s": 0.5, "what": "SIGKILL"}],
                }
            ],
            "repeated_steps": 2,
            "lost_seconds": 0.3,
            "seconds": 1.0,
            "fingerprint": "ab" * 32,
            "problem": "",
            "log": "",
            "difference": None,
            "diagnosis": None,
        }
    ],
}


def test_a_drill_is_a_part_of_the_report_and_a_page_of_its_own(
    killed: Path, tmp_path: Path
) -> None:
    path = tmp_path / "drill.json"
    path.write_text(json.dumps(DRILLED))
    inside = require_alone(report(killed, drills=[path]).html)
    alone = require_alone(render_drill(DRILLED))
    for page in (inside, alone):
        for fact in ("PASS: 1 faulted run,", "<b>none</b>", "SIGKILL after 0.5 s", "1 min 20 s"):
            assert fact in page.text
    assert STYLE.strip() in report(killed).html
    assert STYLE.strip() in render_drill(DRILLED)


def test_an_older_page_is_replaced_and_another_file_is_kept(killed: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("<!doctype html>an older page")
    out.chmod(0o640)
    link = tmp_path / "link.html"
    link.symlink_to(out)
    assert run_report(killed, "-o", link).exit_code == 0
    assert "an older page" not in out.read_text()
    assert link.is_symlink()
    assert out.stat().st_mode & 0o777 == 0o640
    program = tmp_path / "train.py"
    program.write_text("print('mine')")
    for at, phrase in (
        (program, "found a file with other contents"),
        (tmp_path, "cannot be written"),
        (tmp_path / "nowhere" / "report.html", "a directory that exists"),
    ):
        done = run_report(killed, "-o", at)
        assert done.exit_code in (1, 2)
        assert f"{at}: " in done.stderr
        assert phrase in done.stderr
    assert program.read_text() == "print('mine')"


def test_a_page_that_cannot_be_finished_leaves_the_older_one(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pages" / "report.html"
    out.parent.mkdir()
    out.write_text("<!doctype html>an older page")

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perdure.report.run_report.os.replace", fails)
    with pytest.raises(ArgumentError, match="No space left"):
        report(killed).save(out)
    assert out.read_text() == "<!doctype html>an older page"
    assert os.listdir(out.parent) == ["report.html"]


def test_metrics_of_the_loop_and_of_checkpoints_meet(killed: Path) -> None:
    rows = [{"step": s, "time": 1.0, "metrics": {"loss": s / 100, "speed": "NaN"}} for s in (5, 10)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (killed / "metrics.jsonl").write_text(lines + '{"step": 15, "ti')
    document = report(killed).document["runs"][0]
    assert document["metrics"]["loss"] == [(5, 0.05), (10, 0.1), (20, 0.05), (30, 1 / 30)]
    assert document["metrics"]["speed"] == [(5, None), (10, None)]
    assert document["unread_metric_lines"] == 1


def test_a_change_of_the_recipe_is_shown(tmp_path: Path) -> None:
    first = states(STEPS)
    with Run(tmp_path / "run", create=True) as run:
        saved = save(tmp_path / "other", first)
        for step in STEPS:
            run.save(step, saved.load(step).leaves, {"threads": 8 if step < 30 else 2})
    text = Page(report(tmp_path / "run").html).text
    assert "The recipe changed at step 30: threads: 8 before, 2 from then on." in text


def test_a_long_series_is_thinned_without_losing_a_peak() -> None:
    series: list[tuple[int, float | None]] = [(step, 0.0) for step in range(100_000)]
    series[54_321] = (54_321, 9.0)
    chart = page_svg(Panel("loss", [PlotLine("run", series)]), 0)
    assert len(chart) < 20_000
    flat = page_svg(Panel("loss", [PlotLine("run", [(0, 0.0), (9, 9.0)])]), 0)
    tops = []
    for drawing in (chart, flat):
        [path] = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--s0\)', drawing)
        tops.append(min(float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)))
    assert tops[0] == tops[1], "the peak touches the same height as a line to it"
    extreme: list[tuple[int, float | None]] = [(0, -1.7e308), (1, 1.7e308), (2, None), (3, 5e-324)]
    assert "nan" not in page_svg(Panel("loss", [PlotLine("run", extreme)]), 0)


def test_layers_are_as_deep_as_a_page_has_room_for() -> None:
    few = [f"model/layer{n}/kernel" for n in range(20)]
    assert layers_of(few)["model/layer7/kernel"] == "model/layer7/kernel"
    many = [f"model/layer{n}/{part}" for n in range(30) for part in ("kernel", "bias")]
    assert layers_of(many)["model/layer7/kernel"] == "model/layer7"


def test_many_checkpoints_and_layers_are_cut_with_a_word(tmp_path: Path) -> None:
    names = [f"layer{n}" for n in range(50)]
    found = {step: {name: np.full(2, step + 1.0) for name in names} for step in range(30)}
    save(tmp_path / "run", found)
    done = report(tmp_path / "run")
    changes = done.document["runs"][0]["changes"]
    assert len(changes["steps"]) == 24
    assert changes["steps"][0][0] == 0
    assert changes["steps"][-1][1] == 29
    assert [row["layer"] for row in changes["layers"]] == names[:40], "in the order of the numbers"
    assert "25 of 30 checkpoints are compared." in done.html
    assert "10 more layers are left out" in done.html


def test_durations() -> None:
    seconds = (0.04, 9.96, 59.4, 60, 3599, 3600, 90_000, 10**8)
    assert [duration(each) for each in seconds] == [
        "0.0 s",
        "10.0 s",
        "59 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "1 d 1 h",
        "1157 d 9 h",
    ]


def contrast(text: str, ground: str) -> float:
    """The contrast of two colours (`#rrggbb`), by WCAG 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(text), luminance(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_the_contrast_of_wcag_aa(dark: bool) -> None:
    light, _, rest = STYLE.partition("prefers-color-scheme: dark")
    names = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if dark:
        names |= dict(re.findall(r"--([\w-]+): (#\w{6})", rest))
    pairs = [("ink", ground) for ground in ("ground", "sheet", "plain-ground")]
    pairs += [("soft", ground) for ground in ("ground", "sheet")]
    pairs += [(word, f"{word}-ground") for word in ("good", "bad", "warn")] + [("bar-ink", "bar")]
    for text, ground in pairs:
        assert contrast(names[text], names[ground]) >= 4.5, (text, ground)
    for level in range(10):
        text = names["pale-ink" if level < 6 else "deep-ink"]
        assert contrast(text, names[f"l{level}"]) >= 4.5, level
    assert all(contrast(names[f"s{line}"], names["sheet"]) >= 3 for line in range(6))


def test_a_pipe_in_place_of_metrics_is_not_waited_for(killed: Path) -> None:
    os.mkfifo(killed / "metrics.jsonl")
    assert set(report(killed).document["runs"][0]["metrics"]) == {"loss"}


def test_a_leaf_that_came_later_is_new(tmp_path: Path) -> None:
    one, two = {"a": np.ones(2)}, {"a": np.ones(2), "b": np.zeros(3)}
    save(tmp_path / "run", {1: one, 2: two, 3: {"a": np.ones(3), "b": np.ones(3)}})
    [row] = report(tmp_path / "run", leaves="b").document["runs"][0]["changes"]["layers"]
    assert row == {"layer": "b", "changes": ["new", "from zero"]}
    rows = report(tmp_path / "run").document["runs"][0]["changes"]["layers"]
    assert [row["changes"] for row in rows] == [["same", "new"], ["new", "from zero"]]


def test_a_log_that_is_none_is_left_alone_or_refused(killed: Path) -> None:
    path = the_log(killed)
    path.unlink()
    path.mkdir()
    assert report(killed).document["runs"][0]["life"] is None
    with pytest.raises(NotARunError, match=r"attempts\.jsonl"):
        report(killed, logs=[path.parent])


def test_a_report_loads_no_framework(killed: Path, tmp_path: Path) -> None:
    path = tmp_path / "drill.json"
    path.write_text(json.dumps(DRILLED))
    program = (
        "import sys\n"
        "from perdure.report import report\n"
        "from perdure.report.panels import plot_drawing\n"
        "report(sys.argv[1], drills=[sys.argv[2]]).document\n"
        "plot_drawing(sys.argv[1], norms=True)\n"
        "names = 'flax jax jinja2 keras matplotlib tensorflow torch'.split()\n"
        "found = {*names} & {*sys.modules}\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    command = [sys.executable, "-c", program, str(killed), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
