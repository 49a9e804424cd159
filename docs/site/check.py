"""Checks the pages of a built site: `python docs/site/check.py build/site`.

Every link to a page of the site, with its anchor, has to exist, and no page may load anything from
another host: scripts, styles, fonts and pictures are files of the site.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
LOADING_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "manifest"}
REMOTE = re.compile(r"^(https?:)?//")
STYLE_LOADS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and LOADING_LINKS & set(values.get("rel", "").split()):
            self.loads.append(values.get("href", ""))
        elif LOADED.get(tag, "") in values:
            self.loads.append(values[LOADED[tag]])
        self.loads += STYLE_LOADS.findall(values.get("style", ""))


def check(site: Path) -> list[str]:
    """What is wrong, one line for each place."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        where = path.relative_to(site)
        wrong += [f"{where}: loads {url}" for url in page.loads if REMOTE.match(url)]
        if where.name == "404.html":  # its links are absolute, for a site at the root of a host
            continue
        for url in [*page.links, *page.loads]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append(f"{where}: no page {url}")
            elif parts.fragment and target.suffix == ".html":
                known = pages[site / target.relative_to(site.resolve())].anchors
                if unquote(parts.fragment) not in known and parts.fragment != "__skip":
                    wrong.append(f"{where}: no anchor {url}")
    for path in sorted(site.rglob("*.css")):
        remote = STYLE_LOADS.findall(path.read_text())
        wrong += [f"{path.relative_to(site)}: loads {url}" for url in remote]
    return wrong


def main() -> None:
    site = Path(sys.argv[1])
    if wrong := check(site):
        sys.exit("\n".join([*wrong, f"{len(wrong)} errors in {site}"]))
    print(
        f"{len(list(site.rglob('*.html')))} pages in {site}: every link leads to a page of the site"
    )


if __name__ == "__main__":
    main()
