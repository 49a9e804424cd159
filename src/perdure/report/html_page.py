"""One HTML file that needs no other file: its frame, and the tables, facts and tiles in it.

Invariant: text reaches a page through `tag` or `text` alone, which escape it. The page forbids every
request by its Content-Security-Policy, and holds no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from perdure.look.tables import printable
from perdure.report.page_style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
VOID = frozenset({"meta", "wbr", "line", "rect", "circle", "polyline", "path"})
_MOST_CHARACTERS = 2000


class Html(str):
    """Markup that is escaped already."""

    __slots__ = ()


def visible(value: object) -> str:
    """The text of a value, with escapes for characters that are not seen or change the order of others.

    A text of more than 2,000 characters is cut, and says so.
    """
    text = str(value)
    cut = f"... ({len(text)} characters)" if len(text) > _MOST_CHARACTERS else ""
    return "\n".join(map(printable, text[:_MOST_CHARACTERS].split("\n"))) + cut


def text(value: object) -> Html:
    """`value` as text of a page; what is `Html` already stays as it is."""
    return value if isinstance(value, Html) else Html(escape(visible(value)))


def tag(name: str, *children: object, **attributes: object) -> Html:
    """An element. `class_` is written as `class`, `aria_label` as `aria-label`; None is left out."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(visible(value))}"')
    start = f"<{' '.join(parts)}>"
    if name in VOID and not children:
        return Html(start if name in ("meta", "wbr") else f"{start[:-1]}/>")
    return Html(f"{start}{joined(children)}</{name}>")


def joined(parts: Iterable[object]) -> Html:
    """Parts of a page one after the other."""
    return Html("".join(text(part) for part in parts if part is not None))


def page(title: str, parts: Iterable[object]) -> str:
    """A whole page."""
    head = joined(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name_="color-scheme", content="light dark"),
            tag("meta", name_="generator", content="perdure"),
            tag("title", title),
            tag("style", Html(STYLE)),
        ]
    )
    main = tag("main", Html("\n".join(text(part) for part in parts if part is not None)))
    body = tag("body", main)
    return f'<!doctype html>\n<html lang="en">{tag("head", head)}\n{body}\n</html>\n'


def section(heading: str, *parts: object, level: int = 2) -> Html:
    """A part of a page with its heading; an empty one if it has no content."""
    content = [part for part in parts if part]
    return tag("section", tag(f"h{level}", heading), *content) if content else Html("")


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], label: str, right: Sequence[str] = ()
) -> Html:
    """A table; numbers stand at the right. A table that is too wide scrolls by itself.

    Args:
        head: The names of the columns.
        rows: The cells.
        label: What the table shows, for readers who do not see it.
        right: Other columns that stand at the right, such as sizes with their unit.
    """
    lines = [list(row) for row in rows]
    is_number = [
        name in right
        or (any(_is_number(row[i]) for row in lines) and all(_fits(row[i]) for row in lines))
        for i, name in enumerate(head)
    ]

    def row(name: str, cells: Sequence[object], **attributes: str) -> Html:
        return tag(
            "tr",
            *[
                tag(name, cell, class_="n" if right else None, **attributes)
                for cell, right in zip(cells, is_number, strict=True)
            ],
        )

    header = tag("thead", row("th", head, scope="col"))
    return scroll(tag("table", header, tag("tbody", *[row("td", cells) for cells in lines])), label)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fits(value: object) -> bool:
    return _is_number(value) or value in ("", "-")


def scroll(content: Html, label: str) -> Html:
    """Content that scrolls sideways where the page is narrow, also by keyboard."""
    return tag("div", content, class_="scroll", role="group", aria_label=label, tabindex="0")


def facts(rows: Mapping[str, object]) -> Html:
    """Names and values in two columns."""
    lines = [joined([tag("dt", name), tag("dd", value)]) for name, value in rows.items()]
    return tag("dl", *lines, class_="facts") if lines else Html("")


def tiles(values: Mapping[str, object]) -> Html:
    """The few figures that a reader looks for first."""
    cells = [
        tag("div", tag("dt", name), tag("dd", value), class_="tile")
        for name, value in values.items()
    ]
    return tag("dl", *cells, class_="tiles")


def badge(word: str, kind: str) -> Html:
    """A word in the colour of its `kind`: good, bad, warn or plain."""
    return tag("span", word, class_=f"badge {kind}")


def code(value: object) -> Html:
    """A value in the type of a terminal."""
    return tag("code", value)


def path_text(path: str) -> Html:
    """The path of a leaf, which a narrow column breaks after a slash."""
    parts = path.split("/")
    return joined([*[joined([part, "/", tag("wbr")]) for part in parts[:-1]], parts[-1]])


def fingerprint(value: str | None) -> Html:
    """The first 16 digits of a fingerprint, in one line."""
    return tag("code", (value or "-")[:16], class_="whole")


def note(value: object) -> Html:
    """A remark below a figure or a table."""
    return tag("p", value, class_="note")


def duration(seconds: float) -> str:
    """A duration as text, such as `3 min 20 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    for unit, length, part, below in (
        ("min", 60, "s", 1),
        ("h", 3600, "min", 60),
        ("d", 86400, "h", 3600),
    ):
        if seconds < length * (60 if unit == "min" else 24) or unit == "d":
            return f"{int(seconds // length)} {unit} {int(seconds % length // below)} {part}"
    raise AssertionError(seconds)


def number(value: float | None) -> str:
    """A metric as text, in few digits."""
    return "not finite" if value is None else f"{value:.4g}"
