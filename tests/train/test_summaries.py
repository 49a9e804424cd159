"""The records of a run: event files, rows of metrics, the save interval, console lines."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from problem import STEPS, Spy, config, console_text, rows, trainer

from perdure import RunConfig
from perdure.errors import ArgumentError, MissingExtraError
from perdure.train import AutoInterval, CheckpointConfig, OutputConfig
from perdure.train.interval import SaveTimer, optimum_interval
from perdure.train.summaries import METRICS, cut, read


def fields(data: bytes) -> dict[int, list[Any]]:
    """An independent reader of the protocol buffer fields that events use."""
    by_number: dict[int, list[Any]] = {}
    offset = 0

    def number() -> int:
        nonlocal offset
        value = shift = 0
        while True:
            byte = data[offset]
            offset += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while offset < len(data):
        key = number()
        size = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 0:
            by_number.setdefault(key >> 3, []).append(number())
            continue
        if size is None:
            assert key & 7 == 2
            size = number()
        by_number.setdefault(key >> 3, []).append(data[offset : offset + size])
        offset += size
    assert offset == len(data)
    return by_number


def events(path: Path) -> list[dict[int, list[Any]]]:
    data, offset, listed = path.read_bytes(), 0, []
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        listed.append(fields(data[offset + 12 : offset + 12 + length]))
        offset += 16 + length
    return listed


def shown(where: Path) -> dict[str, list[tuple[int, float]]]:
    """Points by tag as TensorBoard shows them: files in the order of their names; a START event drops
    points of its step and later ones."""
    points: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((where / "summaries").iterdir()):
        for number, event in enumerate(events(path)):
            step = event.get(2, [0])[0]
            if number == 0:
                assert event[3] == [b"brain.Event:2"]
            if 7 in event:
                assert fields(event[7][0]) == {1: [1]}
                points = {tag: [p for p in tagged if p[0] < step] for tag, tagged in points.items()}
            for summary in event.get(5, []):
                for value in fields(summary)[1]:
                    parts = fields(value)
                    if 2 in parts:
                        point = step, struct.unpack("<f", parts[2][0])[0]
                        points.setdefault(parts[1][0].decode(), []).append(point)
    return points


def tensorboard_steps(where: Path) -> list[int]:
    """The steps of the loss that TensorBoard's own reader shows."""
    # TensorBoard's own switch: without this module it imports TensorFlow, which is slow.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(where / "summaries"), size_guidance={"scalars": 0})
    reader.Reload()
    return [point.step for point in reader.Scalars("loss")]


def test_a_resumed_run_shows_each_point_once(tmp_path: Path) -> None:
    trainer(tmp_path / "whole").train(STEPS)
    where = tmp_path / "parts"
    for step in (3, 7, 11):
        with pytest.raises(RuntimeError):
            trainer(where, [Spy(fail_after=step)]).train(STEPS)
    trainer(where).train(STEPS)
    assert shown(where) == shown(tmp_path / "whole")
    assert [step for step, _ in shown(where)["loss"]] == [2, 4, 6, 8, 10, 12]
    assert len(list((where / "summaries").iterdir())) == 4
    assert tensorboard_steps(where) == [2, 4, 6, 8, 10, 12]
    assert [row.step for row in read(where / "metrics.jsonl")] == [2, 4, 6, 8, 10, 12]
    # Negative control: abandoned points are in the files, and only the START event hides them.
    every = [e for path in (where / "summaries").iterdir() for e in events(path) if 5 in e]
    assert len(every) > 6


def test_numbers_of_any_size_are_encoded(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.summaries.open(0)
    made.summaries.scalars(2**40, {"big": 1e300, "nan": float("nan"), "less": -1e300})
    made.summaries.close()
    (path,) = (tmp_path / "summaries").iterdir()
    _, _, numbers = events(path)
    assert numbers[2] == [2**40]
    seen = {p[1][0]: struct.unpack("<f", p[2][0])[0] for p in map(fields, fields(numbers[5][0])[1])}
    assert (seen[b"big"], seen[b"less"]) == (float("inf"), float("-inf"))
    assert seen[b"nan"] != seen[b"nan"]
    assert read(tmp_path / METRICS)[0].metrics == {"big": 1e300, "nan": "NaN", "less": -1e300}


def test_without_tensorboard_a_run_has_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    hidden = {"tensorboard", *(name for name in sys.modules if name.startswith("tensorboard."))}
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "tensorboard" else find(name, *rest),
    )
    trainer(tmp_path).train(STEPS)
    assert [step for step, _ in rows(tmp_path)] == [2, 4, 6, 8, 10, 12]
    assert not (tmp_path / "summaries").exists()
    output = OutputConfig(progress="off", tensorboard=True)
    with pytest.raises(MissingExtraError, match=r"perdure\[tensorboard\]"):
        trainer(tmp_path / "asked", output=output).train(STEPS)
    monkeypatch.undo()
    trainer(tmp_path / "off", output=OutputConfig(progress="off", tensorboard=False)).train(STEPS)
    assert not (tmp_path / "off" / "summaries").exists()


@pytest.mark.parametrize("torn", [b"", b'{"step":12,"ti', b"\x00\x00\n", b"{}\n"])
def test_rows_after_the_restored_step_are_removed(tmp_path: Path, torn: bytes) -> None:
    lines = [b'{"step":%d,"time":1.0,"metrics":{"loss":0.5}}\n' % step for step in (2, 4, 6)]
    path = tmp_path / METRICS
    path.write_bytes(b"".join(lines) + torn)
    assert [row.step for row in read(path)] == [2, 4, 6]
    cut(path, 9)
    assert path.read_bytes() == b"".join(lines)
    cut(path, 5)
    assert path.read_bytes() == b"".join(lines[:2])
    cut(path, 0)
    assert path.read_bytes() == b""
    cut(tmp_path / "not there", 3)


def test_the_automatic_interval_is_dalys_optimum() -> None:
    # Young's sqrt(2 d M) is the first term. The optimum minimises the loss of Daly 2006, eq. 20.
    from math import exp

    def lost(every: float, cost: float, mean: float) -> float:
        return mean * exp(cost / mean) * (exp((every + cost) / mean) - 1) / every

    for cost, mean in ((1.0, 3600.0), (60.0, 3600.0), (10.0, 86400.0)):
        best = optimum_interval(cost, mean)
        assert lost(best, cost, mean) < min(lost(best * f, cost, mean) for f in (0.9, 1.1))
    assert optimum_interval(100.0, 50.0) == 50.0


def test_the_cost_of_a_save_includes_the_stall_and_the_slower_steps() -> None:
    meter = SaveTimer(AutoInterval(3600.0, 0.001), 0.0)
    for _ in range(5):
        meter.step(1.0, False)
    assert meter.seconds == 10.0
    meter.saved(0.0, 0.25)
    meter.step(1.5, True)
    meter.step(1.5, True)
    assert meter.seconds == 10.0
    meter.step(1.0, False)
    assert meter.seconds == 1250.0  # a save costs 1.25 seconds, at most a thousandth of the time
    timer = SaveTimer(5.0, 0.0)
    assert (timer.due(4.9), timer.due(5.0)) == (False, True)
    timer.saved(5.0, 0.0)
    assert not timer.due(9.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"save_checkpoints_steps": 5, "save_checkpoints_secs": 60},
            (
                "expected one of save_checkpoints_steps and save_checkpoints_secs, found both "
                "(5 and 60); leave one out."
            ),
        ),
        (
            {"save_checkpoints_steps": 0},
            "save_checkpoints_steps: expected None or an integer of at least 1, found 0.",
        ),
        ({"save_checkpoints_steps": 1.5}, "expected None or an integer of at least 1, found 1.5."),
        (
            {"save_checkpoints_secs": 0},
            "save_checkpoints_secs: expected more than 0, 'auto' or an AutoInterval, found 0.",
        ),
        (
            {"save_checkpoints_secs": "often"},
            "save_checkpoints_secs: expected more than 0, 'auto' or an AutoInterval, found 'often'.",
        ),
        (
            {"save_checkpoints_secs": True},
            "save_checkpoints_secs: expected more than 0, 'auto' or an AutoInterval, found True.",
        ),
        (
            {"keep_checkpoint_every_n_hours": 0},
            "keep_checkpoint_every_n_hours: expected more than 0, found 0.",
        ),
        ({"checkpoint": None}, "checkpoint: expected a CheckpointConfig, found None."),
        ({"output": "off"}, "output: expected an OutputConfig, found 'off'."),
        ({"keep_checkpoint_max": -1}, "keep_checkpoint_max: expected None or an integer"),
        ({"save_summary_steps": None}, "save_summary_steps: expected an integer of at least 1"),
        ({"steps_per_execution": True}, "steps_per_execution: expected an integer"),
    ],
)
def test_an_invalid_run_config_is_refused(options: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        RunConfig("runs/x", **options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("group", "options", "text"),
    [
        (CheckpointConfig, {"allow": "fit"}, "allow: expected a tuple of names, found 'fit'."),
        (CheckpointConfig, {"termination": 5}, "termination: expected a TerminationConfig"),
        (
            CheckpointConfig,
            {"nan_metrics": "stop"},
            "nan_metrics: expected one of 'save', 'skip', 'raise', found 'stop'.",
        ),
        (
            CheckpointConfig,
            {"on_error": "ignore"},
            "on_error: expected one of 'raise', 'continue', found",
        ),
        (
            OutputConfig,
            {"progress": "on"},
            "progress: expected one of 'lines', 'off', found 'on'.",
        ),
    ],
)
def test_an_invalid_group_of_a_run_config_is_refused(group: Any, options: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        group(**options)
    assert text in str(caught.value)


def test_an_invalid_auto_interval_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="max_overhead: expected more than 0 and at most 1, found 2"
    ):
        AutoInterval(max_overhead=2)
    with pytest.raises(ArgumentError, match="mean_time_between_failures: expected more than 0"):
        AutoInterval(0)


def test_a_run_prints_few_lines(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train(STEPS)
    assert console_text(made) == f"{tmp_path}: a new run\n"
    made = trainer(tmp_path, log_step_count_steps=5)
    made.train(STEPS + 4)
    lines = console_text(made).splitlines()
    assert lines[0] == f"{tmp_path}: resuming after step 12"
    assert lines[1].startswith("step 15/16  loss ")
    assert "steps/s  left 0:0" in lines[1]
    assert lines[1].endswith("saved 12")
    made = trainer(tmp_path, progress="off")
    made.train(STEPS + 5)
    assert console_text(made) == ""


@pytest.mark.parametrize("kernel", [True, False])
def test_a_notebook_has_one_output_that_is_updated(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kernel: bool,
) -> None:
    """IPython in a terminal, which has no kernel, gets lines."""
    outputs: list[list[dict[str, str]]] = []

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert (raw, display_id) == (True, True)
        outputs.append([data])
        return SimpleNamespace(update=lambda data, **_: outputs[-1].append(data))

    shell = SimpleNamespace(kernel=None) if kernel else SimpleNamespace()
    parts = {"IPython": {"get_ipython": lambda: shell}, "IPython.display": {"display": display}}
    for name, members in parts.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__dict__.update(members)
    trainer(tmp_path, output=OutputConfig(), log_step_count_steps=5).train(STEPS)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"{tmp_path}: a new run"
    if not kernel:
        assert (outputs, len(lines)) == ([], 3)
        return
    ((first, *_, last),) = outputs
    assert len(lines) == 1
    assert first["text/plain"].startswith("step 5/12  loss ")
    assert first["text/html"].startswith(
        '<progress value="5" max="12"></progress> step 5/12  loss '
    )
    assert last["text/plain"].startswith("step 12/12  loss ")
    assert last["text/plain"].endswith("saved 12")


def test_the_first_summary_is_written_at_the_first_interval(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_summary_steps=4)
    made.train(6)
    assert [step for step, _ in rows(tmp_path)] == [4]
    assert config(tmp_path).save_interval_secs is None
    assert RunConfig(tmp_path).save_interval_secs == 600.0
