"""A group of workers: what they say, how they end, and that none is left behind."""

from __future__ import annotations

import json
import os
import sys

import pytest

from perdure.errors import ClusterError
from perdure.supervise import Ended, WorkerGroup

SAYS = """
import json, os, sys
print("not json")
config = json.loads(os.environ.get("TF_CONFIG", "null"))
print("half a line {of", end="", file=sys.stderr, flush=True)
print(json.dumps({"event": "env", "config": config}), flush=True)
print("a complaint", file=sys.stderr, flush=True)
sys.exit(int(sys.argv[1]))
"""
WAITS = """
import json, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(json.dumps({"event": "ready"}), flush=True)
signal.pause()
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_get_a_cluster_and_are_heard() -> None:
    with WorkerGroup([sys.executable, "-c", SAYS, "0"], workers=2) as group:
        events = dict(group.events())
        assert group.wait() == Ended((0, 0))
        assert "a complaint" in group.log(1)
    configs = [events[worker]["config"] for worker in (0, 1)]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert len(set(configs[0]["cluster"]["worker"])) == 2
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]


def test_a_single_worker_gets_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {}}))
    with WorkerGroup([sys.executable, "-c", SAYS, "0"]) as group:
        assert [event["config"] for _, event in group.events()] == [None]


def test_an_unexpected_end_shows_the_log() -> None:
    with WorkerGroup([sys.executable, "-c", SAYS, "3"]) as group:
        list(group.events())
        with pytest.raises(
            ClusterError, match=r"worker 0 of 1 ended with 3, expected 0 or 75"
        ) as caught:
            group.require(group.wait(), (0, 75))
    assert "a complaint" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "status", "text"), [("kill", -9, "SIGKILL"), ("terminate", 75, "exit 75")]
)
def test_signals_reach_every_worker(how: str, status: int, text: str) -> None:
    with WorkerGroup([sys.executable, "-c", WAITS], workers=3) as group:
        for number, _ in enumerate(group.events(), 1):
            if number == 3:
                getattr(group, how)()
        ended = group.wait()
        assert ended.statuses == (status,) * 3
        assert ended.describe() == text


def test_leaving_the_block_by_an_error_leaves_no_worker_behind() -> None:
    group = WorkerGroup([sys.executable, "-c", WAITS], workers=2)

    def leave() -> None:
        with group:
            next(group.events())
            raise KeyError

    with pytest.raises(KeyError):
        leave()
    assert not any(alive(worker.pid) for worker in group._workers)


def test_the_status_that_tells_most_is_reported() -> None:
    assert Ended((0, 75)).status == 75
    assert Ended((75, 1)).status == 1
    assert Ended((0, -9, 1)).status == -9
    assert Ended((0, 0)).status == 0
