"""Programs with one hidden fault each, and programs without one, for `proof_drill.py`.

Each is a head that it shares with others, what it prepares, and the body of its loop. The comment in a
program says what is wrong in it. SEED decides its data.
"""

from __future__ import annotations

from drill_programs import planted_frameworks, planted_hidden, planted_numpy, planted_places
from drill_programs.planted_numpy import Program

WRONG: dict[str, Program] = {
    **planted_numpy.WRONG,
    **planted_places.WRONG,
    **planted_hidden.WRONG,
    **planted_frameworks.WRONG,
}
RIGHT: dict[str, Program] = {
    **planted_numpy.RIGHT,
    **planted_places.RIGHT,
    **planted_hidden.RIGHT,
    **planted_frameworks.RIGHT,
}
