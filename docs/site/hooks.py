"""The parts of the site that are made when it is built.

- One page for each module that users import, from the docstrings of its public names.
- The help of every command, in place of `<!-- help of every command -->`.
- A page for each file outside of docs/ that a page links to (a test, an example, a proof), so that
  links which work in a clone work on the site.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import click
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
HELP = "<!-- help of every command -->"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the public names, and those of the linked files."""
    for module, names in public_names().items():
        uri = f"reference/api/{module}.md"
        files.append(File.generated(config, uri, content=api_page(module, names)))
    waiting = [page for page in files.documentation_pages() if page.generated_by is None]
    while waiting:
        page = waiting.pop()
        for target in targets(page.content_string, repository_path(page.src_uri)):
            if files.get_file_from_path(uri := site_uri(target)) or not (ROOT / target).is_file():
                continue
            shown = File.generated(
                config, uri, content=file_page(target), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(shown)
            waiting.append(shown)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files outside of docs/ into links to their pages, and put in the help."""
    here = PurePosixPath(page.file.src_uri)
    base = repository_path(here.as_posix())

    def moved(link: re.Match[str]) -> str:
        uri = site_uri(resolve(base, link["path"]))
        if uri.startswith("source/") or here.parts[0] == "source":
            return os.path.relpath(uri, here.parent) + (link["anchor"] or "")
        return link[0]

    parts, end = [], 0
    for fence in FENCED.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    text = "".join([*parts, LINK.sub(moved, markdown[end:])])
    return text.replace(HELP, all_help()) if HELP in text else text


# ---------------------------------------------------------------- links to files of the repository


def repository_path(uri: str) -> str:
    """The file of the repository that a page of the site shows."""
    if uri.startswith("source/"):
        return uri.removeprefix("source/").removesuffix(".page.md")
    return f"docs/{uri}"


def site_uri(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.page.md"


def resolve(base: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(base), link))


def targets(text: str, base: str) -> list[str]:
    """The files outside of docs/ to which the page of the file `base` links."""
    paths = (resolve(base, link["path"]) for link in LINK.finditer(FENCED.sub("", text)))
    return [path for path in paths if not path.startswith(("docs/", ".."))]


def file_page(path: str) -> str:
    hidden = "---\nsearch: {exclude: true}\n---\n\n"
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return hidden + text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"{hidden}# {Path(path).name}\n\n`{path}`\n\n~~~~~{language}\n{text}~~~~~\n"


# ---------------------------------------------------------------- the public names


@cache
def public_names() -> dict[str, list[str]]:
    """Module -> names, as tests/frozen/names.txt has them; a test compares that with the source.

    A module that is itself such a name, as `perdure.jax.metrics`, has the names of its `__all__`.
    """
    names: dict[str, list[str]] = {}
    for line in (ROOT / "tests/frozen/names.txt").read_text().splitlines():
        module, _, name = line.partition(": ")
        names.setdefault(module, []).append(name)
    homes = [home(module, name) for module in names for name in names[module]]
    for module in sorted({module for module, original in homes if not original} - names.keys()):
        names[module] = exported(module)
    return names


def exported(module: str) -> list[str]:
    """The names of its `__all__`."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


@cache
def parsed(module: str) -> ast.Module:
    """The source of a module, which is not imported: no framework is installed where this runs."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


@cache
def home(module: str, name: str) -> tuple[str, str]:
    """The module that defines `name`, and its name there; for a module itself, and an empty name."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perdure"):
            for alias in node.names:
                if (alias.asname or alias.name) != name:
                    continue
                if node.module == module:
                    return f"{module}.{name}", ""
                return home(str(node.module), alias.name)
    return module, name


@cache
def documented_at() -> dict[tuple[str, str], str]:
    """Definition -> the module on whose page it is documented: the first, `perdure` last."""
    places: dict[tuple[str, str], str] = {}
    modules = sorted(public_names(), key=lambda module: module == "perdure")
    for module in modules:
        for name in public_names()[module]:
            places.setdefault(home(module, name), module)
    return places


def has_private_base(module: str, name: str) -> bool:
    """Whether a class inherits from one of perdure that has no place in the reference."""
    for node in parsed(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [home(module, base.id) for base in node.bases if isinstance(base, ast.Name)]
            return any(b not in documented_at() and is_class(*b) for b in bases)
    return False


def is_class(module: str, name: str) -> bool:
    return any(isinstance(n, ast.ClassDef) and n.name == name for n in parsed(module).body)


def api_page(module: str, names: list[str]) -> str:
    """The docstring of the module, and of each of its names; a name of another page is a link."""
    lines = [f"# {module}", "", ast.get_docstring(parsed(module)) or "", ""]
    rows, sections = [], []
    for name in names:
        place, (defined_in, original) = documented_at()[home(module, name)], home(module, name)
        if not original:
            rows.append(f"| `{name}` | [{defined_in}]({defined_in}.md) |")
        elif place != module:
            rows.append(f"| `{name}` | [{place}][{place}.{original}] |")
        else:
            sections += [f"::: {module}.{name}", ""]
            if has_private_base(defined_in, original):
                sections[-1:] = ["    options: {inherited_members: true}", ""]
    if rows:
        lines += ["| name | described in |", "|---|---|", *rows, ""]
    return "\n".join([*lines, *sections])


# ---------------------------------------------------------------- the command line


def all_help() -> str:
    """The help of `perdure` and of each command, as they print it on a terminal of 88 columns."""
    from perdure.cli.main import main

    sections = [help_of(main, "perdure", None)]
    context = click.Context(main, info_name="perdure", **main.context_settings)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        sections.append(help_of(command, name, context))
    return "\n".join(sections)


def help_of(command: click.Command, name: str, parent: click.Context | None) -> str:
    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=88, **command.context_settings
    )
    title = name if parent is None else f"perdure {name}"
    return f"## {title}\n\n~~~text\n{command.get_help(context)}\n~~~\n"
