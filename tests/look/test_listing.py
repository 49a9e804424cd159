"""`tree` and `ls`: what manifests say, without reading a pack."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from perdure import CheckpointManager, ManagerOptions, Retention
from perdure.checkpoint.retention import RecordedRetention, record_retention
from perdure.errors import ArgumentError, StepNotFoundError
from perdure.look import list_run, open_checkpoint, tree
from perdure.look.listing import age_text
from perdure.state.leaf_values import array_leaf, scalar_leaf
from perdure.store import MemoryStorage, Run
from perdure.store.format import CHUNK_BYTES, seconds_of


def make(storage: object, steps: int = 3) -> Run:
    """Checkpoints whose first chunk and frozen leaf are always the same."""
    run = Run(storage, create=True)  # type: ignore[arg-type]
    with run:
        for step in range(1, steps + 1):
            large = np.zeros(CHUNK_BYTES // 8 + 1000)
            large[-1] = step
            leaves = {
                "model/large": array_leaf(large),
                "model/frozen": array_leaf(np.arange(1000.0)),
                "step": scalar_leaf(step),
                "before": scalar_leaf(step - 1),  # the text that `step` had
                "name": scalar_leaf("digits"),
            }
            run.save(step, leaves, metrics={"loss": 1 / step})
    return run


def without_packs(storage: MemoryStorage) -> MemoryStorage:
    for name in list(storage.list("packs/")):
        storage.delete(name)
    return storage


def test_a_tree_has_sizes() -> None:
    storage = MemoryStorage()
    make(storage)
    result = tree(without_packs(storage))
    nodes = {node.path: node for node in result.nodes}
    assert list(nodes) == ["", "before", "model", "model/frozen", "model/large", "name", "step"]
    whole = CHUNK_BYTES + 16_000 + len("digits") + 2
    assert (nodes[""].nbytes, nodes[""].leaf_count) == (whole, 5)
    assert nodes["model"].nbytes == CHUNK_BYTES + 16_000
    assert nodes["model/frozen"].nbytes == 8000
    assert nodes["name"].describe() == "str digits"
    assert nodes["model/frozen"].describe() == "float64[1000]"


def test_a_tree_of_a_part_and_of_few_levels() -> None:
    storage = MemoryStorage()
    run = make(storage, 1)
    result = tree(run, depth=1)
    assert [node.path for node in result.nodes] == ["", "before", "model", "name", "step"]
    assert [node.path for node in tree(run, leaves="**/frozen").nodes] == [
        "",
        "model",
        "model/frozen",
    ]
    assert [node.path for node in tree(run, depth=0).nodes] == [""]
    with pytest.raises(ArgumentError):
        tree(run, leaves="nothing/*")
    for depth in (-1, "1", 1.0):
        with pytest.raises(ArgumentError, match="depth"):
            tree(run, depth=depth)  # type: ignore[arg-type]
    with pytest.raises(StepNotFoundError):
        tree(f"{storage}@3" if isinstance(storage, str) else Run(MemoryStorage(), create=True))


def test_the_state_may_be_one_leaf_and_a_damaged_step_is_left_out(tmp_path: Path) -> None:
    with Run(tmp_path, create=True) as run:
        for step in (1, 2):
            run.save(step, {"": array_leaf(np.full(3, float(step)))})
    manifest = tmp_path / "checkpoints" / "000000000001.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    [node] = tree(tmp_path).nodes
    assert (node.path, node.nbytes) == ("", 24)
    listing = list_run(tmp_path)
    assert [row.step for row in listing.checkpoints] == [2]
    assert listing.damaged.keys() == {1}


def test_a_listing_has_age_and_why_a_step_is_kept() -> None:
    storage = MemoryStorage()
    run = make(storage)
    run.pin(1)
    now = seconds_of(run.manifest(3).created) + 7200.0
    listing = list_run(without_packs(storage), now=now)
    rows = {row.step: row for row in listing.checkpoints}
    assert [row.kept for row in rows.values()] == ["pinned", "not recorded", "the newest"]
    assert [row.pinned for row in rows.values()] == [True, False, False]
    assert rows[3].age_s == 7200
    assert rows[3].metrics == {"loss": 1 / 3}
    assert "2 h" in str(listing)


def test_a_listing_names_the_rules_that_a_manager_recorded(tmp_path: Path) -> None:
    rules = Retention(keep_period=4, best_metric="loss", best_mode="min")
    options = ManagerOptions(retention=rules)
    with CheckpointManager(tmp_path, max_to_keep=2, options=options) as manager:
        for step in range(1, 8):
            manager.save(step, {"w": step}, metrics={"loss": abs(step - 3.0)})
    assert {row.step: row.kept for row in list_run(tmp_path).checkpoints} == {
        3: "best loss (0)",
        4: "a multiple of 4",
        6: "one of the newest 2",
        7: "one of the newest 2",
    }
    assert open_checkpoint(f"{tmp_path}@best").step == 3
    with Run(tmp_path) as run:
        record_retention(run, RecordedRetention(1))
    kept = [row.kept for row in list_run(tmp_path).checkpoints]
    assert kept == ["until the next save: older than the newest 1"] * 3 + ["one of the newest 1"]
    with pytest.raises(ArgumentError, match="names no metric to keep the best of"):
        open_checkpoint(f"{tmp_path}@best")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (-3, "0 s"), (-300, "in the future"), (59, "59 s"), (61, "1 min"), (7200, "2 h")],
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_a_terminal_obeys_no_name(tmp_path: Path) -> None:
    where = tmp_path / "run\x1b[2J\udcff"
    make(where, 1)
    for text in (str(tree(where)), repr(tree(where))):
        assert "\x1b" not in text
        assert text.isprintable() or all(line.isprintable() for line in text.splitlines())


def test_a_notebook_shows_tables() -> None:
    storage = MemoryStorage()
    with Run(storage, create=True) as run:
        run.save(1, {"a/<b>": scalar_leaf("x & y")})
    html = tree(storage)._repr_html_()
    table = ET.fromstring(html[html.index("<table>") :])
    cells = [[cell.text for cell in row] for row in table]
    assert cells[0] == ["leaf", "value", "size", "share"]
    assert cells[-1][:2] == ["    <b>", "str x & y"]
    sides = [cell.attrib["style"].partition(";")[0] for cell in table[1]]
    assert sides == ["text-align:left"] * 2 + ["text-align:right"] * 2
    assert html.startswith("<pre>")
    assert list_run(storage)._repr_html_().startswith("<table>")
