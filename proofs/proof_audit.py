"""What digest, audit, journal, replay and bisect promise: about half an hour on two cores.

Run by `make proof-audit`; ARGS='--only bisect digest' picks parts.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Callable, Iterator

import audit_bisect_rows
import audit_digest_rows
import audit_journal_rows
import audit_replay_rows
import audit_rows
from audit_runs import ENVIRONMENT

from report import Row, finish, row

PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "digest": audit_digest_rows.rows,
    "audit": audit_rows.audit_rows,
    "bisect": audit_bisect_rows.rows,
    "replay": audit_replay_rows.rows,
    "journal": audit_journal_rows.rows,
}


def rows(names: list[str]) -> Iterator[Row]:
    """Every line of the parts. A part that breaks is a row that is not met; the others are tried."""
    for name in names:
        try:
            yield from PARTS[name]()
        except Exception as error:  # noqa: BLE001 (whatever it was, it is in the row)
            traceback.print_exc()
            yield row(f"{name}: broken off, {type(error).__name__}: {error}"[:300], [False])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    finish("audit", rows(given.only))
