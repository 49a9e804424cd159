"""`perdure report --plot`: what is drawn, as text and as a picture, and what cannot be drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner, Result
from reported import KILLED, Counting, flip, record, save, states

from perdure.cli import main
from perdure.errors import ArgumentError, MissingExtraError
from perdure.look import stats
from perdure.report import plot, report
from perdure.report.figure import BLOCKS, PLAIN, draw_figure, figure_bytes, save_plot, text_graph
from perdure.report.panels import Panel, PlotLine, PlottedAttempt, plot_drawing
from perdure.store import Run
from perdure.store.format import manifest_name

STEPS = (10, 20, 30)
HOSTILE = "_$\\frac$\x1b[31m<script>\u202e"


def run_plot(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["plot", *map(str, arguments)])


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    where = tmp_path / "run"
    metrics = {step: {"loss": 1.0 / step, HOSTILE: step} for step in STEPS}
    save(where, states(STEPS), metrics=metrics)
    record(tmp_path / "perdure-logs", KILLED, where)
    return where


def test_metrics_are_lines_of_text_with_their_interruptions(killed: Path) -> None:
    done = run_plot(killed, "--metric", "loss")
    assert done.exit_code == 0
    graph, marks = done.stdout.splitlines()
    assert graph.startswith("loss")
    assert f"0.1 {BLOCKS[7]}" in graph
    assert graph.endswith(f"{BLOCKS[0]} 0.03333")
    assert marks.endswith("interrupted at 13")
    # Step 13 is in the fourth of 21 columns.
    assert marks.index("^") - graph.index(BLOCKS[7]) == 3
    everything = run_plot(killed)
    assert "\x1b" not in everything.stdout
    assert r"_$\frac$\x1b[31m<script>\u202e" in everything.stdout.replace("\\\\", "\\")


def test_the_document_has_the_values_and_the_attempts(killed: Path) -> None:
    [panel] = json.loads(run_plot(killed, "--metric", "loss", "--json").stdout)["panels"]
    assert panel["title"] == "loss"
    [line] = panel["lines"]
    assert line["points"] == [[step, 1 / step] for step in STEPS]
    assert line["interrupted_at"] == [13]


def test_several_runs_share_a_panel(killed: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", states(STEPS), metrics={10: {"loss": 5.0}})
    [panel] = plot_drawing(killed, tmp_path / "other", metrics="loss").panels
    assert [line.label for line in panel.lines] == ["run", "other"]
    assert panel.lines[1].points == [(10, 5.0)]
    assert [line for line in text_graph([panel], 60) if "other" in line]


def test_norms_are_those_of_the_leaves(killed: Path) -> None:
    norm, change = plot_drawing(killed, norms=True, leaves="model").panels
    lines = {line.label: line.points for line in norm.lines}
    values = states(STEPS)
    for path in ("model/frozen", "model/moving"):
        expected = [np.linalg.norm(values[step][path].astype("float64")) for step in STEPS]
        assert [step for step, _ in lines[path]] == list(STEPS)
        assert [value for _, value in lines[path]] == pytest.approx(expected, rel=1e-12)
    ratios = {line.label: line.points for line in change.lines}
    assert ratios["model/frozen"] == [(20, None), (30, None)], "no change has no logarithm"
    before, after = (values[step]["model/moving"] for step in (10, 20))
    expected = np.linalg.norm(after - before) / np.linalg.norm(before)
    assert ratios["model/moving"][0] == (20, pytest.approx(expected, rel=1e-12))


def test_a_leaf_that_did_not_change_is_read_once(tmp_path: Path) -> None:
    one, two = np.ones(1000), np.full(1000, 2.0)
    values = {1: {"a": one, "b": one}, 2: {"a": one, "b": one}, 3: {"a": two, "b": one}}
    save(tmp_path / "run", values)
    storage = Counting(tmp_path / "run")
    norm, _ = plot_drawing(Run(storage), norms=True).panels
    assert [[value for _, value in line.points] for line in norm.lines] == [
        pytest.approx([n * 1000**0.5 for n in row]) for row in ([1, 1, 2], [1, 1, 1])
    ]
    assert storage.read_from_packs == 2 * one.nbytes, "each array once"


def test_a_damaged_leaf_has_no_norm_and_is_named(killed: Path) -> None:
    flip(killed, 10, "model/frozen")
    drawing = plot_drawing(killed, norms=True)
    assert [line.label for line in drawing.panels[0].lines] == ["model/moving"]
    assert [
        f"step {step} is damaged" in text
        for step, text in zip(STEPS, drawing.problems, strict=True)
    ]
    assert all("model/frozen" in text for text in drawing.problems)
    alone = plot_drawing(killed, leaves="model/moving")
    assert [len(line.points) for line in alone.panels[0].lines] == [3]
    assert not alone.problems


def test_a_damaged_leaf_that_changed_lacks_its_point_alone(killed: Path) -> None:
    assert run_plot(killed, "--norms").exit_code == 0
    flip(killed, 20, "model/moving")
    done = run_plot(killed, "--norms", "--json")
    assert done.exit_code == 1
    assert f"{killed}: step 20 is damaged: " in done.stderr
    norm, _ = json.loads(done.stdout)["panels"]
    lines = {line["label"]: [step for step, _ in line["points"]] for line in norm["lines"]}
    assert lines == {"model/moving": [10, 30], "model/frozen": [10, 20, 30]}
    text = run_plot(killed, "--leaves", "model/moving").stdout
    assert "no value that can be read" in text
    pytest.importorskip("matplotlib", reason="matplotlib (the extra report) is not installed here")
    with pytest.warns(UserWarning, match="step 20 is damaged"):
        plot(killed, norms=True)


def test_a_chunk_that_several_checkpoints_share_is_damaged_in_each(tmp_path: Path) -> None:
    one, two = np.ones(100), np.full(100, 2.0)
    save(tmp_path / "run", {1: {"a": one}, 2: {"a": one}, 3: {"a": two}, 4: {"a": two}})
    flip(tmp_path / "run", 1, "a")
    done = run_plot(tmp_path / "run", "--norms", "--json")
    assert done.exit_code == 1
    assert [f"step {step} is damaged" in done.stderr for step in (1, 2, 3, 4)] == [
        *[True] * 2,
        *[False] * 2,
    ]
    [line] = json.loads(done.stdout)["panels"][0]["lines"]
    assert line["points"] == [[3, 20.0], [4, 20.0]]


@pytest.mark.parametrize("size", [1e-140, 1.0, 1e140])
def test_norms_neither_overflow_nor_vanish(tmp_path: Path, size: float) -> None:
    first = np.array([1.0, -1.0, 1.0, -1.0]) * size
    save(tmp_path / "run", {1: {"w": first}, 2: {"w": 1.5 * first}, 3: {"w": -1.5 * first}})
    norm, change = plot_drawing(tmp_path / "run", norms=True).panels
    figures = [stats(f"{tmp_path / 'run'}@{step}").rows[0].norm for step in (1, 2, 3)]
    assert norm.lines[0].points == list(zip((1, 2, 3), figures, strict=True))
    assert [value for _, value in change.lines[0].points] == pytest.approx([0.5, 2.0])
    [layer] = report(tmp_path / "run").document["runs"][0]["changes"]["layers"]
    assert layer["changes"] == pytest.approx([0.5, 2.0])


def test_a_norm_above_the_largest_number_is_not_finite(tmp_path: Path) -> None:
    values = {
        step: {"w": np.array([size, 1.0])} for step, size in ((1, 1.0), (2, 1.5e308), (3, 2.0))
    }
    save(tmp_path / "run", values)
    norm, change = plot_drawing(tmp_path / "run", norms=True).panels
    assert [value is None for _, value in norm.lines[0].points] == [False, True, False]
    assert change.lines[0].points == [(2, None), (3, None)]


def test_the_line_of_a_run_has_its_name_and_its_colour(killed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other, states((1, 2)), metrics={1: {"only": 1.0}, 2: {"only": 2.0}})
    panels = plot_drawing(killed, other).panels
    [panel] = [panel for panel in panels if panel.title == "only"]
    assert [(line.label, line.colour) for line in panel.lines] == [("other", 1)]
    assert [line.split()[0] for line in text_graph([panel], 80)] == ["only,", "other"]
    assert text_graph(plot_drawing(other).panels, 80)[0].startswith("only "), (
        "a single run needs no name"
    )
    pytest.importorskip("matplotlib", reason="matplotlib (the extra report) is not installed here")
    [axes] = draw_figure([panel]).axes
    assert [text.get_text().strip() for text in cast(Any, axes.get_legend()).get_texts()] == [
        "other"
    ]
    [both, _] = draw_figure(plot_drawing(killed, other, metrics=["loss", "only"]).panels).axes
    assert axes.get_lines()[0].get_color() != both.get_lines()[0].get_color()


def test_the_lines_of_a_metric_share_their_steps_and_their_scale() -> None:
    long: Any = [(step, step / 10) for step in range(11)]
    short: Any = [(5, 0.0), (10, 0.1)]
    panel = Panel("loss", [PlotLine("a", long), PlotLine("b", short, colour=1)], named=True)
    title, *lines = text_graph([panel], 80)
    assert title == "loss, steps 0 to 10"
    graphs = [line[len("  a ") + 11 :] for line in lines]
    assert graphs[0] == "".join(BLOCKS[min(7, int(n / 10 * 8))] for n in range(11)) + " 1"
    assert graphs[1] == " " * 5 + BLOCKS[0] * 6 + " 0.1"
    apart = Panel("norm", panel.lines, logarithmic=True)
    assert text_graph([apart], 80)[2].endswith(f"{' ' * 5}{BLOCKS[0] * 5}{BLOCKS[7]} 0.1")
    early = Panel("loss", [PlotLine("a", long), PlotLine("b", [(2, 1.0), (3, 1.0)])])
    assert text_graph([early], 80)[2].endswith(f"{' ' * 2}{BLOCKS[7] * 2}{' ' * 7} 1")


def test_a_norm_of_zero_and_a_leaf_that_did_not_change(tmp_path: Path) -> None:
    values = {step: {"bias": np.full(2, step - 1.0), "same": np.ones(2)} for step in (1, 2, 3)}
    save(tmp_path / "run", values)
    done = run_plot(tmp_path / "run", "--norms")
    assert [line.split() for line in done.stdout.splitlines()][-1] == ["same", "no", "change"]
    pytest.importorskip("matplotlib", reason="matplotlib (the extra report) is not installed here")
    panels = plot_drawing(tmp_path / "run", norms=True).panels
    norm, change = draw_figure(panels).axes
    assert (norm.get_yscale(), change.get_yscale()) == ("symlog", "log")
    zero, least = norm.transData.transform([(1, 0.0), (1, 2**0.5)])[:, 1]
    assert zero < least
    assert norm.get_ylim()[0] <= 0
    for axes in (norm, change):
        assert all(float(step).is_integer() for step in axes.get_xticks())
        assert figure_bytes(cast(Any, axes.figure), "png")


def test_a_run_without_a_checkpoint_does_not_hide_the_others(killed: Path, tmp_path: Path) -> None:
    with Run(tmp_path / "new", create=True) as run:
        run.begin_writing()
    done = run_plot(tmp_path / "new", killed, "--norms", "--json")
    assert done.exit_code == 0
    assert f"{tmp_path / 'new'}: nothing is drawn of it" in done.stderr
    assert [panel["title"][:5] for panel in json.loads(done.stdout)["panels"]] == ["run: "] * 2
    done = run_plot(tmp_path / "new", killed)
    assert (done.exit_code, f"{tmp_path / 'new'}: nothing is drawn" in done.stderr) == (0, True)


def test_what_cannot_be_drawn_is_said(killed: Path, tmp_path: Path) -> None:
    save(tmp_path / "bare", {1: {"count": np.array(3)}})
    save(tmp_path / "many", states((1,)), metrics={1: {f"m{n}": 1.0 for n in range(30)}})
    with Run(tmp_path / "empty", create=True) as run:
        run.begin_writing()
    for arguments, phrase in (
        (["bare"], "expected metrics"),
        (["bare", "--norms"], "expected floating-point leaves"),
        (["empty", "--norms"], "expected a checkpoint"),
        (["many"], "expected at most 24 metrics"),
        (["run", "--metric", "los"], "no metric matches 'los'"),
        (["run", "--metric", "loss", "--norms"], "found both"),
        (["run", "-o", "x.pdf"], "ends in .png or .svg"),
        (["nowhere"], "nowhere"),
    ):
        done = run_plot(tmp_path / arguments[0], *arguments[1:])
        assert done.exit_code in (1, 2), arguments
        assert phrase in done.stderr
    with pytest.raises(ArgumentError, match="expected a run directory"):
        plot()


def test_without_matplotlib_the_extra_is_named(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'perdure\[report\]'"):
        plot(killed)
    done = run_plot(killed, "-o", tmp_path / "loss.png")
    assert done.exit_code == 1
    assert "perdure[report]" in done.stderr
    assert not (tmp_path / "loss.png").exists()
    assert run_plot(killed).exit_code == 0, "text needs none"


ATTEMPTS = [PlottedAttempt(1, 0, 13, True), PlottedAttempt(2, 10, 30, False)]
PANELS = [
    Panel("loss", [PlotLine("_a$", [(10, 1.0), (20, None), (30, 0.5)], ATTEMPTS)]),
    Panel(HOSTILE, [PlotLine(f"run{n}", [(1, 1.0 + n), (2, 2.0)]) for n in range(9)], True),
]


def test_a_picture_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (the extra report) is not installed here")
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        save_plot(PANELS, tmp_path / name)
        first = (tmp_path / name).read_bytes()
        save_plot(PANELS, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
        assert first.startswith(start)
    text = (tmp_path / "a.svg").read_text()
    assert "<dc:date>" not in text
    save_plot(PANELS[:1], tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() != text


def test_a_picture_of_a_run_is_written(killed: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (the extra report) is not installed here")
    figure = plot(killed)
    assert len(figure.axes) == 2
    assert run_plot(killed, "--norms", "-o", tmp_path / "norms.svg").exit_code == 0
    assert (tmp_path / "norms.svg").read_text().endswith("</svg>\n")
    assert run_plot(killed, "-o", tmp_path / "nowhere" / "a.png").exit_code in (1, 2)


LARGEST = sys.float_info.max


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize(
    "values", [(1.7e308, 1.0), (LARGEST, -LARGEST), (1.7e308, 5e-324), (1e151, 1e-320)]
)
def test_the_largest_numbers_are_drawn(values: tuple[float, float], logarithmic: bool) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (the extra report) is not installed here")
    panel = Panel("loss", [PlotLine("run", list(enumerate(values)))], logarithmic)
    figure = draw_figure([panel])
    assert figure_bytes(figure, "png").startswith(b"\x89PNG")
    drawn = list(cast(Any, figure.axes[0].get_lines()[0].get_ydata()))
    assert drawn == [max(-1e150, min(1e150, value)) for value in values]


def test_a_damaged_checkpoint_is_named(killed: Path, tmp_path: Path) -> None:
    assert run_plot(killed, "--metric", "loss").exit_code == 0
    manifest = killed / manifest_name(20)
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    for words in ([], ["--json"]):
        done = run_plot(killed, "--metric", "loss", *words)
        assert done.exit_code == 1
        assert f"{killed}: step 20 is damaged" in done.stderr
        assert done.stdout, "the other checkpoints are drawn"
    page = CliRunner().invoke(main, ["report", str(killed), "-o", str(tmp_path / "page.html")])
    assert (page.exit_code, page.stderr.splitlines()[1:]) == (1, done.stderr.splitlines())
    pytest.importorskip("matplotlib", reason="matplotlib (the extra report) is not installed here")
    with pytest.warns(UserWarning, match="step 20 is damaged"):
        plot(killed)
    done = run_plot(killed, "--metric", "loss", "-o", tmp_path / "a.svg")
    assert done.exit_code == 1
    assert ": 1 panel\n" in done.stderr
    assert (tmp_path / "a.svg").exists()


def test_text_for_a_terminal_without_blocks() -> None:
    [line, _] = text_graph(PANELS[:1], 40, PLAIN)
    assert line.isascii()
    flat = text_graph([Panel("flat", [PlotLine("run", [(1, 2.0), (2, 2.0)])])], 80)
    assert flat == [f"flat {2:>10.4g} {BLOCKS[4] * 2} 2"]
    none = text_graph([Panel("none", [PlotLine("run", [(1, None)])])], 80)
    assert none == ["none  no finite value"]
