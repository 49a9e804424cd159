"""The page of a report, from its document: one run, or several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.look.natural_order import natural_key
from perdure.look.tables import size_text
from perdure.report.heat_map import heat_map
from perdure.report.html_page import (
    Html,
    badge,
    code,
    facts,
    fingerprint,
    joined,
    note,
    number,
    page,
    section,
    table,
    tag,
    tiles,
)
from perdure.report.leaf_changes import DAMAGED
from perdure.report.life_section import goodput, interruptions, life_part
from perdure.report.line_chart import interruption_legend, line_chart, line_key
from perdure.report.replay_section import replay_part
from perdure.text import counted

_MOST_METRICS = 24
_MOST_CHECKPOINTS = 300
_VERDICTS = {"good": ("good", "good"), "bad": ("damaged", "bad"), "unread": ("unread", "warn")}
_Document = Mapping[str, Any]


def render_report(document: _Document) -> str:
    """The HTML of `RunReport.document`."""
    runs = document["runs"]
    names = labels([run["run"] for run in runs])
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    parts: list[object] = [tag("p", "perdure report", class_="kicker"), tag("h1", title)]
    if len(runs) == 1:
        [run] = runs
        parts += [tag("p", code(run["run"])), tiles(_figures(run))]
        parts += [section(heading, part) for heading, part in _run_parts(run, runs, names)]
    else:
        parts += [_comparison(document["comparison"], runs, names)]
        parts += [section("Metrics", _metrics(runs, names))]
        for run, name in zip(runs, names, strict=True):
            sections = [
                section(heading, part, level=3)
                for heading, part in _run_parts(run, runs, names)
                if heading != "Metrics"
            ]
            parts.append(section(name, tag("p", code(run["run"])), tiles(_figures(run)), *sections))
    if document["drills"]:
        from perdure.report.drill_page import drill_section  # it imports the drill

        parts += [drill_section(drill) for drill in document["drills"]]
    else:
        parts.append(
            section("Drill", note("No drill is part of this report; --drill FILE adds one."))
        )
    return page(f"{title} - perdure report", parts)


def labels(where: Sequence[str]) -> list[str]:
    """A short name for each run: the end of its path, as long as they differ."""
    ends = [path.rstrip("/").rpartition("/")[2] or path for path in where]
    return ends if len(set(ends)) == len(ends) else list(where)


def _run_parts(
    run: _Document, runs: Sequence[_Document], names: Sequence[str]
) -> list[tuple[str, Html]]:
    return [
        ("What it is", _recipe(run)),
        ("Its life", life_part(run["life"])),
        ("Metrics", _metrics(runs, names)),
        ("Checkpoints", _checkpoints(run)),
        ("Change of each layer between checkpoints", _changes(run)),
        ("Replays", replay_part(run["replays"])),
    ]


def _figures(run: _Document) -> dict[str, object]:
    """What a reader looks for first."""
    rows = run["checkpoints"]
    whole = [row for row in rows if row["state"] is None]
    count = str(len(rows)) if len(whole) == len(rows) else f"{len(whole)} of {len(rows)} whole"
    figures: dict[str, object] = {
        "newest step": rows[-1]["step"] if rows else "-",
        "checkpoints": count,
        "stored": size_text(run["stored_bytes"]),
    }
    if life := run["life"]:
        figures |= {
            "attempts": life["attempts"],
            "repeated steps": life["repeated_steps"],
            "goodput": goodput(life),
        }
    return figures | {"verified": verified(run)}


def verified(run: _Document) -> Html:
    """What is known of the bytes of all checkpoints."""
    states = [row["verified"] for row in run["checkpoints"]]
    if any(row["state"] == DAMAGED or row["verified"] == "bad" for row in run["checkpoints"]):
        return badge("damaged", "bad")
    if any(row["state"] for row in run["checkpoints"]):
        return badge("unread", "warn")
    if run["verify"] is None or not states:
        return badge("not verified", "plain")
    good = states.count("good")
    return (
        badge("all good", "good")
        if good == len(states)
        else badge(f"{good} of {len(states)}", "warn")
    )


def _recipe(run: _Document) -> Html:
    from perdure.checkpoint.recipe import ENVIRONMENT_FIELDS  # takes long to import

    recipe = run["recipe"]
    what: dict[str, object] = {
        name: _value(recipe[name]) for name in sorted(recipe) if name not in ENVIRONMENT_FIELDS
    }
    where: dict[str, object] = {
        name: _value(recipe[name]) for name in sorted(recipe) if name in ENVIRONMENT_FIELDS
    }
    if life := run["life"]:
        newest = life["starts"][-1]
        where |= {"host": newest["host"] or "-", "directory": code(newest["directory"] or "-")}
    if run["checkpoints"] and "created" in run["checkpoints"][-1]:
        where["newest checkpoint"] = _time(run["checkpoints"][-1]["created"])
    parts: list[object] = [
        section(
            "Recipe", facts(what) if what else note("The checkpoints hold no recipe."), level=3
        ),
        section("Environment", facts(where), level=3) if where else None,
    ]
    parts = [tag("div", *[part for part in parts if part], class_="pair")]
    for change in run["other_recipes"]:
        fields = ", ".join(
            f"{name}: {_or_dash(old)} before, {_or_dash(new)} from then on"
            for name, (old, new) in change["fields"].items()
        )
        parts.append(note(f"The recipe changed at step {change['step']}: {fields}."))
    return joined(parts)


def _value(value: object) -> Html:
    return code(value if isinstance(value, str) else repr(value))


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _time(text: str) -> str:
    return text.replace("T", " ").replace("Z", " UTC")


def _metrics(runs: Sequence[_Document], names: Sequence[str]) -> Html:
    found = sorted({name for run in runs for name in run["metrics"]}, key=natural_key)
    if not found:
        return note("No metric was recorded.")
    cuts = [interruptions(run["life"]) for run in runs]
    charts = [
        line_chart(
            name,
            [
                (label, run["metrics"].get(name, []), steps)
                for label, run, steps in zip(names, runs, cuts, strict=True)
            ],
        )
        for name in found[:_MOST_METRICS]
    ]
    unread = sum(run["unread_metric_lines"] for run in runs)
    more = len(found) - _MOST_METRICS
    return joined(
        [
            _legend(names) if len(names) > 1 else None,
            tag("div", *charts, class_="charts"),
            interruption_legend() if any(cuts) else None,
            note(f"{more} more metrics; perdure plot --metric PATTERN draws them.")
            if more > 0
            else None,
            note(f"{counted(unread, 'line')} of metrics.jsonl cannot be read.") if unread else None,
        ]
    )


def _legend(names: Sequence[str]) -> Html:
    keys = [tag("span", line_key(n), name) for n, name in enumerate(names)]
    return tag("div", *keys, class_="legend")


def _checkpoints(run: _Document) -> Html:
    if not run["checkpoints"]:
        return note("There is no checkpoint yet.")
    metrics = sorted({name for row in run["checkpoints"] for name in row.get("metrics", ())})[:3]
    head = ["step", "saved", "size", "own", "shared", "own part", "fingerprint", *metrics, "state"]
    shown = run["checkpoints"][-_MOST_CHECKPOINTS:]
    earlier = len(run["checkpoints"]) - len(shown)
    rows = [_checkpoint(row, metrics, bool(run["verify"])) for row in shown]
    parts: list[object] = [
        table(head, rows, "Checkpoints", right=("size", "own", "shared", *metrics)),
        note("Own: bytes that no other checkpoint reads; shared: those that others read, too."),
    ]
    if earlier:
        parts.append(note(f"Not shown: {counted(earlier, 'earlier checkpoint')}; --json has all."))
    bad = [row for row in run["checkpoints"] if row["state"]]
    if bad:
        lines = [tag("li", f"step {row['step']}: {row['why']}") for row in bad]
        parts.append(tag("ul", *lines))
    if run["verify"] is None:
        parts.append(
            note(
                f"Not verified; run perdure verify {run['run']} --json > FILE, and add --verify FILE."
            )
        )
    for problem in (run["verify"] or {}).get("problems", []):
        if problem["harmful"]:
            parts.append(note(f"perdure verify: {problem['name']}: {problem['what']}"))
    if run["quarantined"]:
        parts.append(note(f"In quarantine: {counted(run['quarantined'], 'file')}."))
    return joined(parts)


def _checkpoint(row: _Document, metrics: Sequence[str], has_verify: bool) -> list[object]:
    state = []
    if row["state"]:
        state.append(badge(row["state"], "bad"))
    elif row["verified"]:
        state.append(badge(*_VERDICTS[row["verified"]]))
    elif has_verify:
        state.append(badge("not verified", "plain"))
    if row.get("pinned"):
        state.append(badge("pinned", "plain"))
    cell = joined(state) if state else "-"
    if "bytes" not in row:
        return [row["step"], "-", "-", "-", "-", "-", "-", *["-"] * len(metrics), cell]
    own, shared = row["own_bytes"], row["shared_bytes"]
    share = 100 * own / (own + shared) if own + shared else 0.0
    return [
        row["step"],
        _time(row["created"]),
        size_text(row["bytes"]),
        size_text(own),
        size_text(shared),
        tag("span", tag("i", style=f"width:{share:.1f}%"), class_="share"),
        fingerprint(row["fingerprint"]),
        *[number(row["metrics"][name]) if name in row["metrics"] else "-" for name in metrics],
        cell,
    ]


def _changes(run: _Document) -> Html:
    return heat_map(run["changes"]) or note(
        "Two whole checkpoints with floating-point leaves are needed to compare."
    )


def _comparison(comparison: _Document, runs: Sequence[_Document], names: Sequence[str]) -> Html:
    figures = [_figures(run) for run in runs]
    shown = list(dict.fromkeys(name for figure in figures for name in figure))
    rows = [
        [
            joined([line_key(n), " ", name]),
            *[f.get(c, "-") for c in shown],
        ]
        for n, (name, f) in enumerate(zip(names, figures, strict=True))
    ]
    parts: list[object] = [table(["run", *shown], rows, "Runs side by side", right=shown[:-1])]
    if comparison["recipe"]:
        fields = [
            [code(name), *["-" if value is None else _value(value) for value in values]]
            for name, values in comparison["recipe"].items()
        ]
        recipe = table(["field", *names], fields, "Fields of the recipe that differ")
        parts.append(section("Recipe fields that differ", recipe, level=3))
    else:
        parts.append(tag("p", "Their recipes are equal."))
    return section(
        "Side by side", *parts, section("Their checkpoints", _first(comparison), level=3)
    )


def _first(comparison: _Document) -> Html:
    count, first = comparison["common_steps"], comparison["first_different_step"]
    if not count:
        return tag("p", "The runs have no step in common, so their checkpoints cannot be compared.")
    if first is None:
        return tag(
            "p", f"All {count} common steps have equal fingerprints: the same bits in every run."
        )
    more = comparison["different_leaves"] - len(comparison["leaves"])
    leaves = tag("ul", *[tag("li", code(path)) for path in comparison["leaves"]])
    said = (
        f"The first of {count} common steps that differs is step {first}. Leaves that differ there:"
    )
    return joined([tag("p", said), leaves, note(f"and {more} more") if more else None])
