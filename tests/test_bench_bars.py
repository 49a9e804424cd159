"""The drawing that a benchmark writes beside its figures."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_bars_have_one_scale_for_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    rows = [
        {"what": "a save", "value": 2.0, "unit": "ms", "against": "peer", "limit": 8.0},
        {"what": "a <load>", "value": 4.0, "unit": "ms", "against": "", "limit": None},
        {"what": "speed", "value": 3.0, "unit": "GB/s", "against": "", "limit": None},
        {"what": "not measured", "value": None, "unit": "ms", "against": "", "limit": 100.0},
        {"what": "nothing", "value": float("nan"), "unit": "ms", "against": "", "limit": None},
    ]
    drawing = import_module("bars").draw(rows)
    widths = [float(width) for width in re.findall(r'class="value"[^>]* width="([\d.]+)"', drawing)]
    assert widths == [70.0, 140.0, 280.0]
    assert drawing.count('class="limit"') == 1
    assert "a &lt;load&gt;" in drawing
    assert "<title>peer 8 ms</title>" in drawing
