"""examples/cluster/jobset.yaml and the description of its fields in the tests, against a CRD of JobSet.

$PERDURE_JOBSET_CRD names the file config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of a release
of JobSet, or several of them with a colon between. A part of `make proof-nodes`.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from report import Row, row

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "tests" / "launch"


def rows() -> Iterator[Row]:
    """The rows; none without a CRD, which is printed."""
    named = os.environ.get("PERDURE_JOBSET_CRD")
    if not named:
        print("       JobSet: left out, $PERDURE_JOBSET_CRD names no published CRD")
        return
    sys.path.insert(0, str(LAUNCH))
    from manifest_schema import differences, errors

    manifest = yaml.safe_load((ROOT / "examples" / "cluster" / "jobset.yaml").read_text())
    described = yaml.safe_load((LAUNCH / "jobset_fields.yaml").read_text())
    wrong: Any = copy.deepcopy(manifest)
    del wrong["spec"]["failurePolicy"]["rules"][0]["name"]
    schemas = [_schema(Path(path)) for path in named.split(":")]
    # A difference in what we describe, and an error in what we apply, would each be a row not met.
    yield row(
        "JobSet: the manifest has its fields", [not list(errors(s, manifest)) for s in schemas]
    )
    same = [not list(differences(described, schema)) for schema in schemas]
    yield row("JobSet: our description of the fields agrees", same)
    refused = [bool(list(errors(schema, wrong))) for schema in schemas]
    yield row("JobSet: control: a rule without a name is refused", refused)


def _schema(path: Path) -> Any:
    [version] = [
        version
        for version in yaml.safe_load(path.read_text())["spec"]["versions"]
        if version["name"] == "v1alpha2"
    ]
    return version["schema"]["openAPIV3Schema"]
