"""docs/gallery.md: one figure of each kind, from runs that take seconds; `python -m tests.gallery` draws it anew."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import pandas as pd

from dsim.cli import main
from dsim.options import Options
from dsim.pools import Placement, Policy, Role
from dsim.result import Result
from dsim.simulate import simulate
from dsim.slo import Slo
from dsim.workload import Poisson, Workload, preset
from dsim.yamlfile import parse_yaml
from experiments.plots import draw, parse_plot, rendered, run_figures
from experiments.spans import quantiles_of
from placement.statistics import mean_interval
from profiles.shipped import find_profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = DOCS / "gallery"
PAGE = DOCS / "gallery.md"

_SLO = Slo(ttft_s=0.25, tpot_s=0.1)
_REQUESTS, _SEEDS = 300, 5
_SYSTEMS = {
    "prefill TP 2 + decode TP 1": (Placement.parse("1xP:tp2pp1 + 1xD:tp1pp1"), "distserve"),
    "colocated, prefill first": (Placement.parse("1xC:tp1pp1", policy=Policy.PREFILL_FIRST), "vllm"),
}
_RATES = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
_FINITE = f"finite runs of {_REQUESTS} requests"

#: What a search for OPT-13B on at most 8 GPUs at 0.4 s and 0.1 s found (README.md).
_SEARCH = pd.DataFrame(
    [
        ("3xP:tp1pp1 + 5xD:tp1pp1", 8, 2.797, 2.881, 2.967),
        ("2xP:tp1pp1 + 3xD:tp1pp1", 5, 2.643, 2.683, 2.725),
        ("3xP:tp1pp1 + 4xD:tp1pp1", 7, 2.501, 2.628, 2.762),
        ("6xC:tp1pp1 (orca)", 6, 2.362, 2.403, 2.444),
    ],
    columns=["placement", "num_gpus", *(f"goodput_per_gpu_per_s.{end}" for end in ("low", "best", "high"))],
)


#: Data behind figure 8 of DistServe (LLMServe/DistServe, Apache-2.0), OPT-13B, at `_RATES`.
_PUBLISHED = pd.DataFrame(
    [
        {"system": system, "rate_per_gpu": rate, "attainment.both": share}
        for system, shares in zip(
            _SYSTEMS,
            ((1, 1, 1, 1, 0.93667, 0.84667, 0.74667), (0.9, 0.9, 0.85, 0.81, 0.71, 0.68, 0.55)),
            strict=True,
        )
        for rate, share in zip(_RATES, shares, strict=True)
    ]
)


@dataclass(frozen=True)
class Entry:
    """One figure of the gallery: its `plots` entry, what it says, and its rows."""

    plot: str
    about: str
    rows: Callable[[], pd.DataFrame]
    published: pd.DataFrame | None = None


@functools.cache
def _run(system: str, rate_per_gpu: float, seed: int, bandwidth_bytes_per_s: float | None = None) -> Result:
    placement, engine = _SYSTEMS.get(system) or (Placement.parse(system), "distserve")
    profile = find_profile("13b", "a100-80g", engine=engine)
    if bandwidth_bytes_per_s is not None:
        profile = replace(profile, handover=replace(profile.handover, bandwidth_bytes_per_s=bandwidth_bytes_per_s))
    workload = Workload(Poisson(), preset("sharegpt"))
    trace = workload.trace(
        num_requests=_REQUESTS,
        seed=seed,
        rate_per_s=rate_per_gpu * placement.num_gpus,
        context_tokens=profile.model.context_tokens,
    )
    return simulate(placement, trace, profiles=dict.fromkeys(Role, profile), options=Options(track_itl=False))


def _measured(results: list[Result], slo: Slo = _SLO) -> dict[str, float]:
    """Return the means of a few metrics over replications, with their intervals."""
    each: dict[str, list[float]] = {}
    for result in results:
        attainment = result.attainment(slo)
        tokens = result.throughput_per_s * float(np.mean(result.column("output_tokens")))
        values = {
            "attainment.both": attainment.both,
            "attainment.ttft": attainment.ttft,
            "attainment.tpot": attainment.tpot,
            "tpot_s.mean": float(np.nanmean(result.tpot_s)),
            "e2e_s.mean": float(np.nanmean(result.e2e_s)),
            "output_tokens_per_s": tokens,
            **{f"ttft_parts_s.{part}": seconds for part, seconds in result.ttft_parts_s().items()},
        }
        for name, value in values.items():
            each.setdefault(name, []).append(value)
    row: dict[str, float] = {}
    for name, seen in each.items():
        interval = mean_interval(seen, confidence=0.95)
        row |= {name: interval.best, f"{name}.low": interval.low, f"{name}.high": interval.high}
    return row


def _by_rate() -> pd.DataFrame:
    rows = []
    for system, (placement, _) in _SYSTEMS.items():
        for rate in _RATES:
            row = _measured([_run(system, rate, seed) for seed in range(_SEEDS)])
            rows.append({"system": system, "rate_per_gpu": rate, "num_gpus": placement.num_gpus, **row})
    return pd.DataFrame(rows)


def _by_scale() -> pd.DataFrame:
    rows = []
    for system in _SYSTEMS:
        results = [_run(system, 1.0, seed) for seed in range(_SEEDS)]
        for scale in (0.4, 0.6, 0.8, 1.0, 1.25, 1.5):
            slo = Slo(ttft_s=scale * _SLO.ttft_s, tpot_s=scale * _SLO.tpot_s)
            rows.append({"system": system, "slo_scale": scale, **_measured(results, slo)})
    return pd.DataFrame(rows)


def _best_on_8() -> pd.DataFrame:
    return _SEARCH.iloc[[0, 3]]


def _parts() -> pd.DataFrame:
    frame = _by_rate()
    return frame[frame["rate_per_gpu"].isin([0.5, 1.5])]


def _quantiles() -> pd.DataFrame:
    rows = []
    for system in _SYSTEMS:
        results = [_run(system, 1.0, seed) for seed in range(_SEEDS)]
        row: dict[str, object] = {"system": system}
        for name, each in {"ttft_s": [r.ttft_s for r in results], "tpot_s": [r.tpot_s for r in results]}.items():
            quantiles = zip(*(quantiles_of(values) or [] for values in each), strict=True)
            intervals = [mean_interval(values, confidence=0.95) for values in quantiles]
            row[f"quantiles.{name}"] = [interval.best for interval in intervals]
            row[f"quantiles.{name}.low"] = [max(0.0, interval.low) for interval in intervals]
            row[f"quantiles.{name}.high"] = [interval.high for interval in intervals]
        rows.append(row)
    return pd.DataFrame(rows)


def _by_ratio() -> pd.DataFrame:
    rows = []
    for prefill in range(1, 8):
        placement = f"{prefill}xP:tp1pp1 + {8 - prefill}xD:tp1pp1"
        rows.append({"placement": placement, **_measured([_run(placement, 2.5, seed) for seed in range(_SEEDS)])})
    return pd.DataFrame(rows)


def _by_targets() -> pd.DataFrame:
    results = {system: [_run(system, 1.0, seed) for seed in range(_SEEDS)] for system in _SYSTEMS}
    rows = []
    for ttft_s in (0.1, 0.2, 0.4, 0.8):
        for tpot_s in (0.04, 0.05, 0.06, 0.08):
            measured = {name: _measured(runs, Slo(ttft_s, tpot_s)) for name, runs in results.items()}
            best = max(measured, key=lambda name: measured[name]["attainment.both"])
            row = {name: value for name, value in measured[best].items() if name.startswith("attainment.both")}
            row |= {name: min(value, 1.0) for name, value in row.items()}
            rows.append({"slo.ttft": ttft_s, "slo.tpot": tpot_s, "system": best, **row})
    return pd.DataFrame(rows)


def _by_bandwidth() -> pd.DataFrame:
    rows = []
    for bandwidth in (0.5e9, 1e9, 2e9, 4e9, 8e9, 16e9, 64e9):
        results = [_run("prefill TP 2 + decode TP 1", 1.0, seed, bandwidth) for seed in range(_SEEDS)]
        rows.append({"profile_set.handover.bandwidth_bytes_per_s": bandwidth, **_measured(results)})
    return pd.DataFrame(rows)


def _steps() -> pd.DataFrame:
    profile = find_profile("13b", "a100-80g", engine="distserve")
    rows = []
    for tp in (1, 2, 4):
        for tokens in (32, 64, 128, 256, 512, 1024, 2048):
            step_s = profile.latency_at(tp).prefill_s([(tokens, 0)])
            row = {"step.tp": tp, "tokens": tokens, "tokens_per_s": tokens / step_s}
            rows.append({**row, "saturation_tokens": profile.saturation_tokens})
    return pd.DataFrame(rows)


_ENTRIES = (
    Entry(
        "{kind: attainment-rate, series: system, "
        f'title: "OPT-13B on A100-80GB, ShareGPT, 0.25 s and 0.1 s, {_FINITE}"}}',
        "How many requests meet the limits as the rate rises, and up to which rate enough of them do.",
        _by_rate,
        _PUBLISHED,
    ),
    Entry(
        "{kind: attainment-scale, y: [attainment.both, attainment.ttft, attainment.tpot], series: system, "
        f'title: "The same at 1 request/s per GPU, {_FINITE}"}}',
        "How much looser the limits would have to be, and which of them is missed.",
        _by_scale,
    ),
    Entry(
        '{kind: goodput-bars, title: "OPT-13B on at most 8 A100-80GB, ShareGPT, 0.4 s and 0.1 s"}',
        "Which placement serves most per GPU, and how sure that is.",
        lambda: _SEARCH,
    ),
    Entry(
        "{kind: staircase, series: placement, price_usd_per_h: 1.3, "
        'title: "The best of each kind: GPUs for the traffic that is expected"}',
        "How many GPUs a rate needs, in whole copies, and what they cost; the band is the goodput's interval.",
        _best_on_8,
    ),
    Entry(
        '{kind: pareto, series: system, labels: rate_per_gpu, title: "Throughput against the speed that a user sees"}',
        "What throughput costs in speed; pale points are beaten in both.",
        _by_rate,
    ),
    Entry(
        '{kind: breakdown, x: rate_per_gpu, series: system, title: "Where the latency goes"}',
        "Where requests spend their time; what comes before decoding has a panel of its own. The end of a bar has its "
        "interval: that of the parts together, where that of their sum is not known, which is no wider.",
        _parts,
    ),
    Entry(
        "{kind: cdf, y: [quantiles.ttft_s, quantiles.tpot_s], series: system, "
        'title: "Latencies at 1 request/s per GPU"}',
        "How latencies spread over requests; bands are intervals over replications, or of one run from parts of it.",
        _quantiles,
    ),
    Entry(
        f'{{kind: ratio, y: attainment.both, title: "8 GPUs at 20 requests/s, 0.25 s and 0.1 s, {_FINITE}"}}',
        "How many of the instances should prefill.",
        _by_ratio,
    ),
    Entry(
        "{kind: heatmap, value: attainment.both, best: system, "
        'title: "Which system meets which limits best at 1 request/s per GPU"}',
        "What changes with the limits; the letter says what is best there, the second line is the value's interval.",
        _by_targets,
    ),
    Entry(
        '{kind: bandwidth, y: e2e_s.mean, marks: [{x: 3.125e+9, label: "25 Gbit/s"}], '
        'title: "What a slower link costs"}',
        "Whether the link between the pools matters.",
        _by_bandwidth,
    ),
    Entry(
        "{kind: line, x: tokens, y: tokens_per_s, series: step.tp, log: x, mark: saturation_tokens, "
        'title: "Prefill of one prompt of OPT-13B on A100-80GB"}',
        "Any column against any other; here the latency profile alone, with Lm.",
        _steps,
    ),
)


def _draw(entry: Entry) -> tuple[str, Figure]:
    frame = entry.rows()
    columns = [name for name in frame.columns if not name.endswith((".low", ".high"))]
    spec = parse_plot(parse_yaml(entry.plot.encode(), file="gallery"), columns=columns)
    return spec.file, draw(spec, frame, published=entry.published)


def _timeline() -> Figure:
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command = "simulate -m 13b -p 1xP:tp2pp1+1xD:tp1pp1 --finite -n 100 -r 6 --step-log -q -o"
        assert main([*command.split(), folder]) == 0
        title = "opt-13b on a100-80g, 1xP:tp2pp1 + 1xD:tp1pp1, 6 requests/s"
        return run_figures(Path(folder), window_s=(10.0, 12.0), keys={"title": title})["timeline"]


def figures() -> Iterator[tuple[str, str, str, Figure]]:
    """Yield file name, `plots` entry, what it says, and the figure."""
    for entry in _ENTRIES:
        name, figure = _draw(entry)
        yield name, entry.plot, entry.about, figure
    about = "What the instances did in a window of one run, who waited, and how full their memory was."
    yield "timeline", "", about, _timeline()


def files() -> Mapping[Path, bytes]:
    """Return the page and its pictures."""
    found: dict[Path, bytes] = {}
    parts = [_HEAD.format(version=matplotlib.__version__)]
    for name, plot, about, figure in figures():
        found[FOLDER / f"{name}.svg"] = rendered(figure, "svg")
        how = f"```yaml\nplots:\n- {plot}\n```" if plot else f"```\n{_TIMELINE}\n```"
        parts.append(f"## {name}\n\n{about}\n\n![{name}: {about}](gallery/{name}.svg)\n\n{how}\n")
    return {PAGE: "\n".join(parts).encode(), **found}


_TIMELINE = """dsim simulate -m 13b -p "1xP:tp2pp1 + 1xD:tp1pp1" --finite -n 100 -r 6 --step-log -o run
dsim plot run --window 10s,12s"""

_HEAD = """# Gallery

One figure of each kind that sweep files can ask for (`plots`, [sweeps.md](sweeps.md)) and `dsim plot` draws. Bars
and bands are 95 % intervals, hollow markers published numbers (here those behind figure 8 of DistServe). Colours are
told apart with any colour vision, and markers, hatches and line styles without colour. The numbers are from short runs
of the shipped profiles, made to show the figures. `python -m tests.gallery` makes this page, and a test compares it
(drawn with matplotlib {version}).

`dsim plot RESULT` draws what the sweep in RESULT asks for, or one figure that options describe (`--kind`, `-x`, `-y`,
`--series`, `--where`, and `--set KEY=VALUE` for every other key); of a directory that `dsim search -o` wrote goodput,
attainment, GPUs and latency; of one that `dsim simulate -o` wrote latencies, their parts and, with `--step-log`, the
timeline.
"""

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, content in files().items():
        path.write_bytes(content)
    sys.stdout.write(f"wrote {PAGE}\n")
