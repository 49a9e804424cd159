"""Records `perdure demo` in a terminal, and draws what it wrote as docs/demo.svg: `make recording`.

A browser runs no script of a picture in a page, so rules of CSS show and hide the lines. Without
animation, or if the reader wants none, the last frame stands still.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rich.style import Style
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "demo.svg"
COMMAND = ("perdure", "demo")
TITLE = "A recording of perdure demo"
DESCRIPTION = (
    "A network trains on one device. The same training starts on 4 devices, is killed, resumes on 2 "
    "processes, is preempted, and finishes on one device. Both end with equal fingerprints."
)

COLUMNS = 80
KEY_S = 0.1  # seconds from one typed character to the next
PLAY_S = 15.0  # the longest time that the run may take in the picture
HOLD_S = 6.0  # how long the last frame stays

CHARACTER, LINE, MARGIN, BAR = 8.4, 20, 16, 34
WIDTH = round(COLUMNS * CHARACTER) + 2 * MARGIN
# Name: colour on light, colour on dark. Each has a contrast of at least 4.5 with the background.
PALETTE = {
    "text": ("#1f2328", "#e6edf3"),
    "dim": ("#59636e", "#9198a1"),
    "red": ("#cf222e", "#ff7b72"),
    "green": ("#116329", "#3fb950"),
    "yellow": ("#7d4e00", "#d29922"),
}
ANSI = {1: "red", 2: "green", 3: "yellow"}  # the numbers that terminals give to colours
FONT = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace'
STYLE = """\
text{{font:14px {font}}} .bold{{font-weight:bold}} .window{{stroke-width:1}}
{light}
.window{{fill:#f6f8fa;stroke:#d1d9e0}}
@media (prefers-color-scheme:dark){{
{dark}
.window{{fill:#151b23;stroke:#3d444d}}
}}
.gone{{visibility:hidden}}
g{{animation:{seconds:.2f}s step-end infinite}}
.blink{{animation:blink 1s step-end infinite}}
@keyframes blink{{50%{{opacity:0}}}}
{times}
@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}}}"""


class Frame(NamedTuple):
    """The lines of the terminal from a time on; without `clock` the run has not begun."""

    start: float
    lines: Sequence[Text]
    clock: float | None


class Piece(NamedTuple):
    """SVG that is visible from `start` to `end`; None is the end of the recording."""

    start: float
    end: float | None
    svg: str


def record(command: Sequence[str]) -> list[tuple[float, str]]:
    """Run a command in a terminal; returns the texts that it wrote, with the seconds until then."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    terminal, side_of_command = os.openpty()
    termios.tcsetwinsize(terminal, (24, COLUMNS))
    begin, parts = time.monotonic(), []
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=side_of_command,
            stdout=side_of_command,
            stderr=side_of_command,
            cwd=directory,
            env=environment | {"TERM": "xterm-256color"},
        )
        os.close(side_of_command)
        while part := _read(terminal):
            parts.append((time.monotonic() - begin, part))
        os.close(terminal)
    if process.wait() != 0:
        sys.exit("".join(text for _, text in parts))
    return parts


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 1 << 16).decode()
    except OSError:  # how Linux reports that the other side is closed
        return ""


def frames(command: Sequence[str], parts: Sequence[tuple[float, str]], speed: int) -> list[Frame]:
    """The frames of a recording: the command is typed, its output comes `speed` times as fast."""
    typed = f"$ {' '.join(command)}"
    found = [Frame(n * KEY_S, [Text(typed[: 2 + n])], None) for n in range(len(typed) - 1)]
    begin, last = found[-1].start + 3 * KEY_S, parts[-1][0]
    shown = ""
    events = [*parts, *((float(second), "") for second in range(math.ceil(last)))]
    for seconds, text in sorted(events, key=lambda event: event[0]):
        shown += text
        output = Text.from_ansi(shown.replace("\r\n", "\n")).split("\n") if shown else []
        lines = [Text(typed), *output]
        if wide := [line.plain for line in lines if len(line) > COLUMNS]:
            sys.exit(f"a line has more than {COLUMNS} characters: {wide[0]}")
        found.append(Frame(begin + seconds / speed, lines, seconds))
    return found


def pieces(shown: Sequence[Frame]) -> Iterator[Piece]:
    """What each line, the clock and the cursor show, and when."""
    height = max(len(frame.lines) for frame in shown)
    for row in range(height):
        yield from _spans(
            (f.start, _line(f.lines[row], row) if row < len(f.lines) else "") for f in shown
        )
    yield from _spans((frame.start, _clock(frame.clock)) for frame in shown)
    cursors = [(frame.start, _cursor(frame)) for frame in shown[:-1]]
    yield from _spans([*cursors, (shown[-1].start, "")])


def _spans(drawn: Iterable[tuple[float, str]]) -> Iterator[Piece]:
    since, svg = 0.0, ""
    for start, new in drawn:
        if new != svg:
            if svg:
                yield Piece(since, start, svg)
            since, svg = start, new
    if svg:
        yield Piece(since, None, svg)


def _line(line: Text, row: int) -> str:
    """Each run of words has its own column, so that the font of the reader moves nothing."""
    cuts = {0, len(line), *(end for span in line.spans for end in (span.start, span.end))}
    for gap in re.finditer(" {2,}", line.plain):
        cuts |= {*gap.span()}
    drawn = []
    for start, end in pairwise(sorted(cuts)):
        part = line[start:end]
        if text := part.plain.strip():
            column = start + part.plain.index(text)
            drawn.append(_text(text, column, row, _classes(part)))
    return "".join(drawn)


def _classes(part: Text) -> str:
    styles = [span.style for span in part.spans if isinstance(span.style, Style)]
    numbers = [style.color.number or 0 for style in styles if style.color is not None]
    color = ANSI[numbers[-1]] if numbers else "text"
    return f"{color} bold" if any(style.bold for style in styles) else color


def _text(text: str, column: float, row: float, classes: str) -> str:
    x, y = MARGIN + column * CHARACTER, BAR + LINE * row + 15
    length = f'textLength="{len(text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="{classes}" x="{x:.1f}" y="{y:g}" {length}>{escape(text)}</text>'


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(int(seconds), 60)
    text = f"{minutes}:{rest:02}"
    return _text(text, COLUMNS - len(text), -1.25, "dim")


def _cursor(frame: Frame) -> str:
    is_typing = frame.clock is None
    row, column = (0, len(frame.lines[0])) if is_typing else (len(frame.lines), 0)
    x, y = MARGIN + column * CHARACTER, BAR + LINE * row + 2
    return f'<rect class="blink dim" x="{x:.1f}" y="{y}" width="8" height="16"/>'


def draw(shown: Sequence[Frame], speed: int) -> str:
    """The whole picture."""
    seconds = shown[-1].start + HOLD_S
    times: dict[tuple[float, float | None], str] = {}
    body = []
    for start, end, svg in pieces(shown):
        name = times.setdefault((start, end), f"t{len(times)}")
        body.append(f'<g class="{"gone " if end is not None else ""}{name}">{svg}</g>')
    rules = (_rule(name, seconds, *span) for span, name in times.items())
    light, dark = (
        "\n".join(f".{name}{{fill:{colors[n]}}}" for name, colors in PALETTE.items())
        for n in (0, 1)
    )
    style = STYLE.format(font=FONT, light=light, dark=dark, seconds=seconds, times="\n".join(rules))
    height = BAR + LINE * max(len(frame.lines) for frame in shown) + MARGIN
    title = f"{' '.join(COMMAND)}, {speed} times as fast"
    box = f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title description"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {box}>',
            f'<title id="title">{TITLE}</title>',
            f'<desc id="description">{DESCRIPTION}</desc>',
            f"<style>{style}</style>",
            f'<rect class="window" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
            _text(title, 0, -1.25, "dim"),
            *body,
            "</svg>\n",
        ]
    )


def _rule(name: str, seconds: float, start: float, end: float | None) -> str:
    """The keyframes of what is visible from `start` to `end`."""
    first = f"{100 * start / seconds:.2f}%"
    hidden, visible = "{visibility:hidden}", "{visibility:visible}"
    steps = f"0%{hidden}" if start else ""
    if end is None:
        steps += f"{first},100%{visible}"
    else:
        steps += f"{first}{visible}{100 * end / seconds:.2f}%,100%{hidden}"
    return f".{name}{{animation-name:{name}}}@keyframes {name}{{{steps}}}"


def main() -> None:
    parts = record(COMMAND)
    speed = math.ceil(parts[-1][0] / PLAY_S)
    shown = frames(COMMAND, parts, speed)
    PICTURE.write_text(draw(shown, speed), encoding="utf-8")
    print(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes, {shown[-1].start + HOLD_S:.1f} s")


if __name__ == "__main__":
    main()
