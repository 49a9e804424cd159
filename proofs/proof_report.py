"""Proves in a browser that the page of `perdure report` makes no request. A minute on two cores.

Run by `make proof-report`, where Chromium is installed (`chromium` on the PATH, or ARGS='--browser
FILE'). ARGS='--axe FILE' also checks the pages with axe-core (`axe.min.js` of npm) at two widths,
light and dark. ARGS='--pages FILE...' takes pages that are there, such as those of your own runs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from perdure import CheckpointManager
from perdure.report import report as make_report
from report import Row, finish, row

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PLANTED = '<img src="/x.png"><script src="/x.js"></script><iframe src="/x.html"></iframe>'
PLANTED += '<link rel="stylesheet" href="/x.css"><p style="background:url(/y.png)">'
RUN_AXE = """
<script>AXE</script><script>
axe.run().then(found => { document.title = "axe:" + JSON.stringify(
  found.violations.map(rule => [rule.id, rule.impact, rule.nodes.length])) })
</script>
"""
LOOKS = [(width, scheme) for width in (1400, 400) for scheme in ("light", "dark")]


@contextmanager
def served(html: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a page, and the paths that are asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/page" else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            if self.path == "/page":
                self.wfile.write(html.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/page", asked
    finally:
        server.shutdown()
        server.server_close()


def opened(
    browser: str, html: str, width: int = 1400, scheme: str = "light"
) -> tuple[str, list[str]]:
    """Open a page in a browser: the document as it is then, and the paths that were asked for."""
    dark = int(scheme == "light")
    with served(html) as (address, asked), tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--user-data-dir={profile}", f"--window-size={width},2000"]
        command += [f"--blink-settings=preferredColorScheme={dark}", "--virtual-time-budget=20000"]
        done = subprocess.run([*command, address], capture_output=True, text=True, check=True)
        return done.stdout, list(asked)


def made_pages(where: Path) -> list[str]:
    """A report of one run, and of two."""
    for name, seed in (("one", 0), ("two", 1)):
        rng = np.random.default_rng(seed)
        state = {f"layer{n}": {"kernel": rng.normal(size=(8, 8))} for n in range(4)}
        with CheckpointManager(where / name, recipe={"seed": seed}) as manager:
            for step in range(1, 5):
                state |= {"layer1": {"kernel": rng.normal(size=(8, 8))}}
                manager.save(step, state, metrics={"loss": 1 / step})
    return [make_report(where / "one").html, make_report(where / "one", where / "two").html]


def rows(browser: str, pages: list[str], axe: Path | None) -> Iterator[Row]:
    """What was asked for, and what axe-core found."""
    alone = [opened(browser, page, *look)[1] == ["/page"] for page in pages for look in LOOKS]
    yield row("pages that make no request (two widths, light and dark)", alone)
    planted = [page.replace("<main>", f"<main>{PLANTED}") for page in pages]
    kept = [opened(browser, page)[1] == ["/page"] for page in planted]
    yield row("pages with planted pictures and scripts that still make none", kept)
    free = [len(opened(browser, POLICY.sub("", page))[1]) >= 5 for page in planted]
    yield row("control: the same without the policy, which make five and more", free)
    if axe is not None:
        script = RUN_AXE.replace("AXE", axe.read_text())
        faults = [
            list(violations(opened(browser, POLICY.sub("", page) + script, *look)[0]))
            for page in pages
            for look in LOOKS
        ]
        for found in faults:
            for rule in found:
                print("  axe:", rule)
        yield row("pages in which axe-core finds no fault", [not found for found in faults])
        wrong = pages[0].replace("<main>", '<main><img src="x"><p style="color:#ddd">pale</p>')
        seen = list(violations(opened(browser, POLICY.sub("", wrong) + script)[0]))
        yield row("control: two planted faults, which it finds", [len(seen) >= 2])


def violations(dom: str) -> Iterator[list[object]]:
    """What axe-core found, as [rule, impact, elements]."""
    title = re.search(r"<title>axe:(.*?)</title>", dom, re.DOTALL)
    assert title is not None, "axe-core did not end"
    yield from json.loads(title[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--axe", type=Path)
    parser.add_argument("--pages", type=Path, nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perdure-report-") as scratch:
        given = [path.read_text(encoding="utf-8") for path in options.pages or ()]
        finish("report", rows(options.browser, given or made_pages(Path(scratch)), options.axe))
