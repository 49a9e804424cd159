"""The files that releases carry beside the package agree with `pyproject.toml`.

Nothing is built: the container file and the conda recipe are compared as text.
"""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml

import perdure
from test_docs import ROOT, missing_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTAINER = (ROOT / "Containerfile").read_text()
RECIPE = yaml.safe_load((ROOT / "packaging/conda/meta.yaml").read_text())


def requirements(lines: list[str]) -> dict[str, str]:
    """Name -> version, of `name>=1.0` as in pyproject.toml and of `name >=1.0` as in a recipe."""
    found = (re.fullmatch(r"([\w-]+) ?(\S*)", line) for line in lines)
    return {match[1]: match[2] for match in found if match is not None}


def test_the_conda_recipe_is_that_of_the_project() -> None:
    project = PROJECT["project"]
    python = {"python": project["requires-python"]}
    built_with = requirements(PROJECT["build-system"]["requires"])
    assert len(needed := requirements(project["dependencies"])) == len(project["dependencies"])
    assert requirements(RECIPE["requirements"]["run"]) == {**python, **needed}
    assert requirements(RECIPE["requirements"]["host"]) == {**python, "pip": "", **built_with}
    assert RECIPE["package"] == {"name": project["name"], "version": perdure.__version__}
    scripts = [f"{name} = {target}" for name, target in project["scripts"].items()]
    assert RECIPE["build"]["entry_points"] == scripts
    assert RECIPE["build"]["noarch"] == "python"
    about = (RECIPE["about"]["license"], RECIPE["about"]["summary"], RECIPE["about"]["home"])
    assert about == (project["license"], project["description"], project["urls"]["Repository"])


def test_the_container_installs_the_clone_and_runs_the_demo_as_a_user() -> None:
    [python] = re.findall(r"^FROM python:(\S+)-slim$", CONTAINER, re.M)
    assert PROJECT["project"]["requires-python"] == f">={python}"
    assert f'image.version="{perdure.__version__}"' in CONTAINER
    [extras] = re.findall(r'pip install --no-cache-dir "/source\[(\S+)\]"', CONTAINER)
    assert (
        {"jax", "demo"}
        == set(extras.split(","))
        <= PROJECT["project"]["optional-dependencies"].keys()
    )
    [command] = re.findall(r"^CMD (.*)$", CONTAINER, re.M)
    assert json.loads(command) == [*PROJECT["project"]["scripts"], "demo"]
    assert CONTAINER.index("USER perdure") < CONTAINER.index("CMD")


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "MAINTAINERS.md", "SECURITY.md"])
def test_the_links_of_the_pages_at_the_root_exist(name: str) -> None:
    assert missing_files((ROOT / name).read_text(), ROOT / name) == []


def test_another_version_of_a_dependency_is_seen() -> None:
    assert requirements(["blake3 >=1.0"]) == requirements(["blake3>=1.0"])
    assert requirements(["blake3 >=1.1"]) != requirements(["blake3>=1.0"])
