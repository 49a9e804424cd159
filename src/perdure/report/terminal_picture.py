"""Shows a PNG in a terminal that can: the protocols of kitty and of iTerm2."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

_PART = 4096


def picture_protocol(environment: Mapping[str, str]) -> str | None:
    """ "kitty" or "iterm2", as the variables of the terminal say; None if it shows no pictures."""
    if environment.get("TMUX") or environment.get("TERM", "").startswith(("screen", "tmux")):
        return None  # it would take the sequence for text
    if environment.get("KITTY_WINDOW_ID") or environment.get("TERM") in (
        "xterm-kitty",
        "xterm-ghostty",
    ):
        return "kitty"
    if environment.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm"):
        return "iterm2"
    return None


def picture_sequence(png: bytes, protocol: str) -> str:
    """The text that makes a terminal draw `png` at the cursor."""
    data = b64encode(png).decode()
    if protocol == "iterm2":
        return f"\x1b]1337;File=inline=1;size={len(png)};preserveAspectRatio=1:{data}\x07\n"
    parts = [data[start : start + _PART] for start in range(0, len(data), _PART)]
    sequence = []
    for number, part in enumerate(parts, 1):
        keys = "f=100,a=T," if number == 1 else ""
        sequence.append(f"\x1b_G{keys}m={int(number < len(parts))};{part}\x1b\\")
    return "".join(sequence) + "\n"
