"""What a sweep found, in a sentence made of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsim.errors import InputError
from dsim.yamlfile import Scalar
from experiments.plots.data import text_of
from experiments.plots.labels import quantity
from experiments.plots.lines import ShownLine, shown_panels
from experiments.plots.spec import Kind, PlotSpec
from experiments.report.markup import Content, Html, joined
from experiments.report.words import PERCENT, count_of, listed, short
from experiments.store import SweepResults, records_of

_GOODPUT = "goodput_per_gpu_per_s"
#: Combinations that are named one by one.
_MOST = 4
#: Keys of a setting that say what is asked, not what answers it.
_QUESTIONS = ("model", "workload", "arrivals", "trace", "slo", "slo_scale", "attainment", "requests", "finite")


def finding(results: SweepResults) -> Html:
    """Return the sentence: what serves most, how far each curve meets the target, or what was varied.

    Failed tasks are told beside it.
    """
    records = records_of(results.summary)
    curves = [spec for spec in results.plots if spec.kind in {Kind.ATTAINMENT_RATE, Kind.ATTAINMENT_SCALE}]
    if any(f"{_GOODPUT}.best" in record for record in records):
        said = _most_goodput(results, records)
    elif curves:
        said = [_reached(results, spec) for spec in curves]
    else:
        said = [_varied(results)]
    failed = results.failed
    if failed:
        verb = "is" if len(failed) == 1 else "are"
        said.append(f" {count_of(len(failed), 'task')} of {len(results.rows):,} failed and {verb} left out.")
    return joined(said)


def _most_goodput(results: SweepResults, records: Sequence[Mapping[str, Any]]) -> list[Content]:
    """Return which combination serves most, and which may serve as much."""
    goodput = {i: record[f"{_GOODPUT}.best"] for i, record in enumerate(records)}
    ranked = sorted((i for i, best in goodput.items() if best), key=lambda i: -goodput[i])
    if not ranked:
        return [f"None of {count_of(len(records), 'combination')} serves any rate within its limits."]
    best = records[ranked[0]]
    low, high = best.get(f"{_GOODPUT}.low"), best.get(f"{_GOODPUT}.high")
    name = _named(results, best)
    if "placement" not in results.outline.keys and best.get("placement"):
        name += f" ({best['placement']})"
    said: list[Content] = [
        f"Of {count_of(len(records), 'combination')}, {name} serves most: ",
        short(float(best[f"{_GOODPUT}.best"])),
    ]
    if low is not None and high is not None:
        said += [" (95", PERCENT, " interval ", short(float(low)), "–", short(float(high)), ")"]
    said.append(" requests/s per GPU within its limits")
    tied = [i for i in ranked[1:] if low is not None and (records[i].get(f"{_GOODPUT}.high") or 0) >= low]
    if tied:
        names = [_named(results, records[i]) for i in tied[:_MOST]]
        names += [f"{len(tied) - _MOST} more"] if len(tied) > _MOST else []
        verb = "is" if len(tied) == 1 else "are"
        said.append(f"; {listed(names)} {verb} tied with it, as intervals overlap")
    elif low is not None and len(ranked) > 1:
        said.append("; no other interval reaches it")
    said.append(".")
    if len(ranked) < len(records):
        said.append(f" {count_of(len(records) - len(ranked), 'combination')} without any goodput.")
    asked = _asked(results)
    if asked:
        said.append(f" Combinations differ in what they ask ({', '.join(asked)}), so this is no ranking of systems.")
    return said


def _asked(results: SweepResults) -> list[str]:
    """Return the factors that change the question."""
    return [
        factor.key
        for factor in results.outline.factors
        if len(factor.choices) > 1 and any(path.partition(".")[0] in _QUESTIONS for path in factor.paths)
    ]


def _reached(results: SweepResults, spec: PlotSpec) -> Content:
    """Return how far each series of a figure meets the target, among the values swept."""
    try:
        panel = shown_panels(spec, results.summary, None)[0]
    except InputError:  # no row has an attainment, as where all tasks failed
        return f"No attainment to show in {spec.title or spec.file}. "
    about = f"{spec.title}: " if len(results.plots) > 1 and spec.title else ""
    lines = [line for line in panel.lines if len(line.places)]
    parts = [f"{line.label or 'the only series'} {_where(spec, line, panel.x_unit)}" for line in lines]
    return f"{about}{100 * spec.target:g}{PERCENT} of requests within all limits: {'; '.join(parts)}. "


def _where(spec: PlotSpec, line: ShownLine, unit: str) -> str:
    """Return the last rate before the attainment falls below the target, or the first scale from which it stays."""
    target, best = 100 * spec.target, line.values.best
    rate = spec.kind is Kind.ATTAINMENT_RATE
    met = best >= target if rate else (best >= target)[::-1]
    places, values = (
        (line.places, line.values) if rate else (line.places[::-1], line.values.take(np.arange(len(best))[::-1]))
    )
    count = len(met) if met.all() else int(np.argmin(met))
    if not count:
        return f"at no swept {'rate' if rate else 'scale'}"
    i = count - 1
    at = f"{places[i]:g} {unit}" if rate else f"{places[i]:g} times the limits"
    interval = ""
    if values.low[i] < values.high[i]:
        interval = f", 95{PERCENT} interval {values.low[i]:.1f}–{values.high[i]:.1f}{PERCENT}"
        interval += ", too close to call" if values.low[i] < target else ""
    end = ", the end of the sweep" if count == len(met) else ""
    return f"{'up to' if rate else 'from'} {at}{end} ({values.best[i]:.1f}{PERCENT}{interval})"


def _varied(results: SweepResults) -> str:
    """Return what was varied, and how much of it."""
    outline = results.outline
    varied = [
        f"{factor.key} ({_values([choice.value for choice in factor.choices])})"
        for factor in outline.factors
        if len(factor.choices) > 1
    ]
    runs = f", {count_of(outline.replications, 'replication')} each" if outline.replications > 1 else ""
    said = f"{listed(varied)} varied" if varied else "Nothing varied"
    return f"{said}: {count_of(outline.num_combinations, 'combination')}{runs}, {count_of(len(results.rows), 'row')}."


def _values(values: Sequence[Scalar]) -> str:
    if len(values) <= _MOST:
        return ", ".join(map(text_of, values))
    ends = f" from {text_of(values[0])} to {text_of(values[-1])}" if not isinstance(values[0], str) else ""
    return f"{len(values)} values{ends}"


def _named(results: SweepResults, record: Mapping[str, Any]) -> str:
    """Return how a combination is called: texts as they are, numbers with what they are."""
    return ", ".join(_called(key, record[key]) for key in results.outline.keys) or "the only one"


def _called(key: str, value: Scalar) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text_of(value)
    shown = quantity(key)
    return f"{shown.label} {text_of(float(value * shown.factor))} {shown.unit}".strip()
