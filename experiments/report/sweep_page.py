"""The report of a sweep: what it is about, its figures, its numbers, and what was published beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsim.errors import InputError
from dsim.profile import Profile
from experiments.compare import Comparison, closeness, compare
from experiments.plots.labels import quantity
from experiments.plots.spec import PlotSpec
from experiments.report.evidence import evidence, shipped_hashes, sweep_assumptions
from experiments.report.figures import Figure
from experiments.report.finding import finding
from experiments.report.markup import Content, Html, bullets, definitions, details, element, joined, number, table
from experiments.report.page import figures, page, picture
from experiments.report.sections import profile_evidence
from experiments.report.sweep_figures import interactive, numbers
from experiments.report.words import count_of
from experiments.settings import Measure
from experiments.store import SWEEP_FILE, SweepResults, load_sweep, records_of
from experiments.sweepfile import read_sweep

#: Failed tasks that are listed one by one.
_MOST_FAILED = 20
#: A placement, which is not broken in a table.
_POOLS = r"[0-9]+x[PDC]:tp[0-9]+pp[0-9]+( \+ [0-9]+x[PDC]:tp[0-9]+pp[0-9]+)*"


def render_sweep(folder: Path) -> str:
    """Return the page of the sweep in a folder; the same files give the same bytes.

    Raises:
        InputError: it holds no results, or not all yet.
    """
    results = load_sweep(folder)
    results.check_complete(folder)
    drawn: list[Figure] = []
    parts = [
        ("plots", "Figures", _figures(results, folder, drawn)),
        ("published", "Beside what was published", _published(results)),
        ("numbers", "Numbers", _numbers(results)),
        ("failed", "Failed tasks", _failed(results)),
        *_basis(results, folder),
        ("reproduce", "How to get this again", _reproduce(results)),
    ]
    return page(
        title=f"Sweep {results.name}",
        heading=f"Sweep {results.name}",
        lead=[element("p", finding(results), class_="verdict"), element("p", results.about)],
        sections=[(identity, heading, joined(content)) for identity, heading, content in parts if content],
        figures=drawn,
    )


def _figures(results: SweepResults, folder: Path, drawn: list[Figure]) -> list[Html]:
    """Return the figures as the sweep has drawn them; lines and points are added to `drawn`, for the script."""
    found: list[Html] = []
    summary, published = results.summary, results.published
    for spec in results.plots:
        path, title = folder / f"{spec.file}.svg", spec.title or spec.file
        if path.is_file():
            panels = interactive(spec, summary, published, summary_text=f"{title}: {_described(spec)}")
            drawn += panels
            described = f"{title}: {_described(spec)}"
            still = picture(path.read_bytes(), kind="image/svg+xml", description=described, class_="static")
            listing = numbers(panels)
            caption = title if panels else f"{title}; its numbers are in the table below"
            found.append(figures(panels, still, listing, caption=caption))
        else:
            found.append(element("p", f"{path.name} is missing; dsim plot draws it.", class_="note"))
    return found


def _described(spec: PlotSpec) -> str:
    """Return what a figure shows, for those who do not see it."""
    shown = " and ".join(
        quantity(spec.value or column).axis for column in (spec.y if spec.value is None else spec.y[:1])
    )
    text = f"{spec.kind.value} plot of {shown}"
    over = [spec.x, *(spec.y if spec.value is not None else ())]
    against = [quantity(column).axis for column in over if column is not None]
    text += f" against {' and '.join(against)}" if against else ""
    return text + (f", by {quantity(spec.series).label}" if spec.series is not None else "")


def _basis(results: SweepResults, folder: Path) -> list[tuple[str, str, list[Html]]]:
    """Return what the numbers take for granted and rest on, as far as the sweep can still be read."""
    ran = {sha256 for row in results.rows for sha256 in row.profiles.values()}
    try:
        settings = [task.setting for task in read_sweep(folder / SWEEP_FILE).tasks]
    except InputError as error:
        gone = "What the sweep was made of cannot be read any more, so nothing is said of it: "
        return [("evidence", "Evidence", [element("p", gone, str(error), class_="note")])]
    roles: dict[str, dict[str, Profile]] = {}
    for setting in settings:
        for role, profile in setting.used.items():
            roles.setdefault(profile.sha256, {})[role.name.lower()] = profile
    simulated = any(setting.measure not in {Measure.STEP, Measure.QUEUEING} for setting in settings)
    found: list[Html] = []
    if ran - set(roles):
        changed = f"Changed since the runs, and so not shown: {count_of(len(ran - set(roles)), 'latency profile')}."
        found.append(element("p", changed, class_="note"))
    shipped = shipped_hashes({profile.name for used in roles.values() for profile in used.values()})
    known = [used for sha256, used in sorted(roles.items()) if sha256 in ran]
    found += [profile_evidence(each) for used in known for each in evidence(used, shipped=shipped)]
    taken = bullets(sweep_assumptions(results.outline.replications, simulated=simulated))
    return [("assumptions", "Assumptions", [taken]), ("evidence", "Evidence", found)]


def _published(results: SweepResults) -> list[Html]:
    comparisons = compare(results)
    if not comparisons:
        return []
    near = [
        [c.column, str(c.points), _value(c.mean), _value(c.worst), _value(c.mean_ratio)] for c in closeness(comparisons)
    ]
    headings = ["Number", "Points", "Mean difference", "Largest", "Simulated / published"]
    found = [element("p", "Published: ", results.outline.published.source)]
    if near:
        found.append(table("How near the simulated numbers are to the published ones", headings, near))
    keys = results.outline.keys
    rows = [_compared(comparison, keys) for comparison in comparisons]
    columns = [*keys, "number", "published", "simulated", "interval", "difference", "note"]
    everything = table("Every published number", columns, rows, texts=(*range(len(keys) + 1), len(columns) - 1))
    found.append(everything if len(rows) <= 15 else details(f"All {len(rows)} published numbers", everything))
    return found


def _compared(found: Comparison, keys: tuple[str, ...]) -> list[Content]:
    interval: Content = "–"
    if found.low is not None and found.high is not None:
        interval = element("span", _value(found.low), "–", _value(found.high), class_="range")
    return [
        *(_value(found.factors[key]) for key in keys),
        found.column,
        _value(found.published),
        _value(found.simulated),
        interval,
        _value(found.difference),
        found.note or "–",
    ]


def _numbers(results: SweepResults) -> list[Html]:
    keys, shown = results.outline.keys, results.shown
    rows = [
        [*(_value(record[key]) for key in keys), *(_metric(record, name) for name in shown)]
        for record in records_of(results.summary)
    ]
    records = records_of(results.summary)
    named = [i for i, name in enumerate(shown, len(keys)) if any(isinstance(r.get(name), str) for r in records)]
    caption = "One row for each combination of factors; in brackets 95 % intervals"
    return [table(caption, [*keys, *shown], rows, texts=[*range(len(keys)), *named])]


def _metric(record: Mapping[str, Any], name: str) -> Content:
    best = record.get(name, record.get(f"{name}.best"))
    low, high = record.get(f"{name}.low"), record.get(f"{name}.high")
    if low is None or high is None:
        return _value(best)
    return element("span", _value(best), " (", _value(low), "–", _value(high), ")", class_="range")


def _value(value: object) -> Content:
    if value is None:
        return "–"
    if isinstance(value, str) and re.fullmatch(_POOLS, value):
        return element("code", value)
    return number(value, f"{value:.4g}") if isinstance(value, float) else str(value)


def _failed(results: SweepResults) -> list[Html]:
    failed = results.failed
    if not failed:
        return []
    rows = [
        [
            ", ".join(f"{key}={value}" for key, value in row.factors.items()) or "the only one",
            str(row.replication),
            row.error,
        ]
        for row in failed[:_MOST_FAILED]
    ]
    more = len(failed) - len(rows)
    found = [element("p", f"{count_of(len(failed), 'task')} of {len(results.rows):,} failed.")]
    found.append(table("Failed tasks", ["Factors", "Replication", "Error"], rows, texts=(2,)))
    return [*found, *([element("p", f"{more:,} more are in rows.jsonl.")] if more else [])]


def _reproduce(results: SweepResults) -> list[Html]:
    versions = sorted({row.version for row in results.rows})
    hashes = sorted({(role, sha256) for row in results.rows for role, sha256 in row.profiles.items()})
    seeds = sorted({row.seed for row in results.rows})
    command = "dsim sweep RESULT/sweep.yaml -o ANOTHER\ndsim report ANOTHER -o report.html"
    pairs: list[tuple[Content, Content]] = [
        ("dsim", ", ".join(versions)),
        ("Seeds", ", ".join(map(str, seeds)) if len(seeds) <= 10 else f"{seeds[0]} to {seeds[-1]}"),
        ("Tasks", f"{len(results.rows):,}"),
    ]
    if hashes:
        pairs.append(("Profiles", bullets([role, " ", element("code", sha, class_="hash")] for role, sha in hashes)))
    return [
        element("p", "RESULT is the folder that this page was made from:"),
        element("pre", element("code", command), tabindex="0", aria_label="commands"),
        definitions(pairs),
    ]
