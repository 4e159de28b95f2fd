"""Figures of what `dsim search -o DIR` and `dsim simulate -o DIR` wrote."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsim.errors import InputError
from experiments.plots.attainment import attainment_spec
from experiments.plots.cdf import cdf_figure
from experiments.plots.draw import draw
from experiments.plots.given import changed
from experiments.plots.runlog import REQUESTS, STEPS, SUMMARY, read_columns, read_run, read_summary
from experiments.plots.spec import FORMS, Kind, PlotSpec
from experiments.plots.style import Figures
from experiments.plots.timeline import timeline_figure
from experiments.spans import PARTS, quantile_limits, quantiles_of, span_s

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: What a search answered, and the points of its curves.
RESULT, CURVES = "result.json", "attainment.csv"

#: Kinds that can be drawn of a search, and of a run, in the order of drawing.
SEARCH_KINDS = (Kind.GOODPUT_BARS, Kind.ATTAINMENT_RATE, Kind.STAIRCASE, Kind.BREAKDOWN)
RUN_KINDS = (Kind.CDF, Kind.BREAKDOWN, Kind.TIMELINE)

#: Trials shown at most.
_MOST_TRIALS = 12
#: Columns that figures of a run show, and the ends of those of intervals.
_SHOWN = {Kind.CDF: "quantiles.", Kind.BREAKDOWN: "ttft_parts_s."}
_LIMITS = (".low", ".high")
#: Of the intervals of one run, and what they are.
_CONFIDENCE = 0.95
_OF_ONE_RUN = f"95 % interval of this run's quantiles, from {PARTS} parts of it"


def search_figures(folder: Path, *, kind: Kind | None = None, keys: Mapping[str, object] | None = None) -> Figures:
    """Return the figures of a search, by file name: of every kind that there is data for, or of one.

    Args:
        keys: of `plots` in sweep files, as far as the kinds drawn have them.

    Raises:
        InputError: a file is missing or not as `dsim search` writes it, or there is nothing to draw.
    """
    answer = _read_answer(folder)
    try:
        frame = _trials(answer)
        heading = _search_title(answer)
        best = _best(answer, frame)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise _broken(folder / RESULT, "is not what dsim search writes") from None
    if not len(frame):
        raise InputError(str(folder), "has no placement with a goodput to draw", hint="search with other limits")
    found: dict[str, Figure] = {}
    for each in SEARCH_KINDS if kind is None else (kind,):
        rows = best if each is Kind.STAIRCASE else frame
        if each is Kind.ATTAINMENT_RATE:
            if not (folder / CURVES).is_file():
                continue
            rows = _curves(folder, frame)
        spec = changed(_search_spec(each, heading, answer), keys or {}, columns=list(rows.columns))
        found[spec.file] = draw(spec, rows)
    return found


def run_figures(
    folder: Path,
    *,
    kind: Kind | None = None,
    window_s: tuple[float, float] | None = None,
    keys: Mapping[str, object] | None = None,
) -> Figures:
    """Return the figures of a run, by file name: latencies, their parts and, where steps were logged, the timeline.

    Args:
        keys: of `plots` in sweep files, as far as the kinds drawn have them.

    Raises:
        InputError: a file is missing or not as `dsim simulate` writes it, or the window lies outside the run.
    """
    summary = read_summary(folder)
    try:
        heading = _run_title(summary)
        parts = _parts(summary)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise _broken(folder / SUMMARY, "is not what dsim simulate writes") from None
    found: dict[str, Figure] = {}
    for each in RUN_KINDS if kind is None else (kind,):
        spec = PlotSpec(kind=each, file=each.value, title=heading)
        if each is Kind.TIMELINE:
            if kind is each or (folder / STEPS).is_file():
                spec = changed(spec, keys or {}, columns=())
                found[spec.file] = timeline_figure(read_run(folder), window_s=window_s, title=spec.title)
            continue
        frame = _quantiles(folder) if each is Kind.CDF else parts
        names = tuple(name for name in frame.columns if name.startswith(_SHOWN[each]) and not name.endswith(_LIMITS))
        spec = replace(spec, x="placement" if each is Kind.BREAKDOWN else None, y=names)
        spec = changed(spec, keys or {}, columns=list(frame.columns))
        found[spec.file] = cdf_figure(spec, frame, None, band=_OF_ONE_RUN) if each is Kind.CDF else draw(spec, frame)
    return found


def _read_answer(folder: Path) -> Mapping[str, Any]:
    path = folder / RESULT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _broken(path, "is no JSON object")
    return found


def _trials(answer: Mapping[str, Any]) -> pd.DataFrame:
    """Return the complete trials, best first, with their goodput, GPUs and parts of the latency."""
    import pandas as pd

    rows = []
    for trial in answer["trials"]:
        if trial["state"] == "COMPLETE" and trial["goodput_per_gpu_per_s"] is not None:
            row = {"placement": _label(trial), "num_gpus": trial["num_gpus"]}
            row |= {
                f"goodput_per_gpu_per_s.{key}": float(value) for key, value in trial["goodput_per_gpu_per_s"].items()
            }
            row |= {f"ttft_parts_s.{key}": value for key, value in (trial["ttft_parts_s"] or {}).items()}
            rows.append(row)
    return pd.DataFrame(rows[:_MOST_TRIALS])


def _best(answer: Mapping[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the best of each kind; those of all where there is none."""
    best = [answer["best"][kind] for kind in ("disaggregated", "colocated")]
    labels = [_label(trial) for trial in best if trial is not None]
    return frame[frame["placement"].isin(labels)] if labels else frame


def _label(trial: Mapping[str, Any]) -> str:
    """Return how a trial is called, as in the table: with the policy of its instances."""
    if trial["policy"] is None:
        return str(trial["placement"])
    budget = "" if trial["token_budget"] is None else f" {trial['token_budget']}"
    return f"{trial['placement']} ({trial['policy']}{budget})"


def _search_spec(kind: Kind, title: str, answer: Mapping[str, Any]) -> PlotSpec:
    if kind is Kind.ATTAINMENT_RATE:
        # The search itself has written a file of that spec's name.
        target = float(answer.get("attainment_target") or 0.9)
        return replace(attainment_spec(target=target, title=title), file=kind.value)
    form = FORMS[kind]
    spec = PlotSpec(kind=kind, file=kind.value, title=title, x=form.x, y=form.otherwise or form.y or ())
    if kind is Kind.STAIRCASE:
        return replace(spec, series="placement", price_usd_per_h=_price(answer.get("gpu")))
    return spec


def _price(gpu: object) -> float | None:
    """Return the typical price of a GPU that dsim knows, USD/h."""
    from dsim.catalog import find_gpu

    try:
        prices = find_gpu(str(gpu)).price_usd_per_h
    except InputError:
        return None
    return None if prices is None else prices[0]


def _curves(folder: Path, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the points of the curves, each with the goodput of its placement."""
    import pandas as pd

    names = ("rate_per_gpu_per_s", "attainment.low", "attainment.best", "attainment.high")
    frame = pd.DataFrame(read_columns(folder, CURVES, names))
    with (folder / CURVES).open(encoding="utf-8", newline="") as file:
        frame.insert(0, "placement", [row.get("placement") or "" for row in csv.DictReader(file)])
    return frame.merge(trials, on="placement", how="left")


def _search_title(answer: Mapping[str, Any]) -> str:
    limits = _limits(answer["slo"])
    share = f"{100 * float(answer['attainment_target']):g}\u00a0% of requests within {limits}"
    kind = " (finite runs, a transient)" if answer["transient"] else ""
    return f"{answer['model']} on {answer['gpu']}, {answer['workload']} lengths, {share}{kind}"


def _run_title(summary: Mapping[str, Any]) -> str:
    policy = "" if summary["policy"] is None else f" ({summary['policy']})"
    rate = summary["traffic"].get("rate_per_s")
    load = "" if rate is None else f", {rate:g} requests/s"
    return f"{summary['model']} on {summary['gpu']}, {summary['placement']}{policy}{load}"


def _limits(slo: Mapping[str, float | None]) -> str:
    names = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
    return ", ".join(f"{names[key]} {value:g} s" for key, value in slo.items() if value is not None)


def _parts(summary: Mapping[str, Any]) -> pd.DataFrame:
    import pandas as pd

    row: dict[str, object] = {"placement": summary["placement"], "e2e_s.mean": summary["e2e_s"]["mean"]}
    row |= {f"ttft_parts_s.{key}": value for key, value in summary["ttft_parts_s"].items()}
    return pd.DataFrame([row])


def _quantiles(folder: Path) -> pd.DataFrame:
    """Return one row with the quantiles, and their limits, of TTFT, TPOT and, where prompts moved, the KV transfer.

    Those of the counted requests that have the time: rejected and unfinished ones are left out, and
    one-token outputs from TPOT.
    """
    import pandas as pd

    columns = read_columns(folder, REQUESTS, ("ttft_s", "tpot_s", "transfer_start_s", "transfer_end_s"))
    times = {
        "ttft_s": columns["ttft_s"],
        "tpot_s": columns["tpot_s"],
        "transfer_s": span_s("transfer_s", columns.__getitem__),
    }
    row: dict[str, Sequence[float]] = {}
    for name, values in times.items():
        best = quantiles_of(values)
        if best is not None:
            row[f"quantiles.{name}"] = best
            limits = quantile_limits(values, confidence=_CONFIDENCE)
            row |= {} if limits is None else {f"quantiles.{name}.{end}": limits[end] for end in limits}
    if not row:
        raise InputError(str(folder / REQUESTS), "has no latency to draw", hint="simulate a rate that can be served")
    return pd.DataFrame([row])


def _broken(path: Path, rule: str) -> InputError:
    return InputError(str(path), rule, hint="run the command that wrote it again")
