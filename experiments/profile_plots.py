"""Plots of latency profiles: throughputs with Lm, residuals, speed-ups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dsim.profile import Profile
from experiments.plots import STYLES, new_figure, rendered
from profiles.fit import predict, timed
from profiles.rows import Phase, read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from profiles.rows import Row

#: Context of a decoding request in the decode plot.
_CONTEXT = 512


def profile_plots(profile: Profile, *, rows: Path | None = None) -> Mapping[str, bytes]:
    """Return PNG files by name: prefill and decode throughput, speed-up, and residuals where there are rows.

    Args:
        rows: the rows file that the profile was fitted to; its points are drawn too.

    Source:
        Figures 3a, 3b and 5 of DistServe (arXiv 2401.09670v3) show the same for a 13B model.
    """
    ok = () if rows is None else read_rows(rows, model=profile.model, gpu=profile.gpu).ok
    draw: dict[str, Callable[[Axes], None]] = {
        "prefill_throughput.png": lambda axes: _prefill(axes, profile, ok),
        "decode_throughput.png": lambda axes: _decode(axes, profile, ok),
    }
    if len(profile.latency) > 1:
        draw["tp_speed_up.png"] = lambda axes: _speed_up(axes, profile)
    if ok:
        draw["residuals.png"] = lambda axes: _residuals(axes, profile, ok)
    files = {}
    for name, plot in draw.items():
        figure = new_figure()
        axes = figure.add_subplot()
        plot(axes)
        axes.grid(visible=True, alpha=0.3)
        axes.set_title(profile.name, fontsize="medium")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
        files[name] = rendered(figure, "png")
    return files


def _sizes(most: float, limit: int) -> list[int]:
    end = int(min(most, limit))
    return sorted({int(n) for n in np.geomspace(1, max(end, 1), 60).round()})


def _prefill(axes: Axes, profile: Profile, rows: tuple[Row, ...]) -> None:
    for number, (tp, latency) in enumerate(sorted(profile.latency.items())):
        colour, marker = STYLES[number % len(STYLES)]
        valid = latency.valid_range
        sizes = [n for n in _sizes(min(valid.chunk_tokens, valid.prefill_tokens), 1 << 15) if n >= 16]
        axes.plot(sizes, [n / latency.prefill_s([(n, 0)]) for n in sizes], color=colour, label=f"TP {tp}, one prompt")
        points = timed(rows, Phase.PREFILL, tp)
        tokens = [p.requests * p.prompt_tokens for p in points.points]
        if tokens:
            axes.plot(tokens, np.array(tokens) / points.step_s, marker, color=colour, markersize=4, label="timed")
        lm = None if profile.fit is None else profile.fit.saturation_tokens.get(tp)
        if lm is not None:
            axes.axvline(lm.best, color=colour, linestyle=":", label=f"Lm {lm.best:.0f}")
            axes.axvspan(lm.low, lm.high, color=colour, alpha=0.08, linewidth=0)
    if profile.fit is None and profile.saturation_tokens is not None:
        axes.axvline(profile.saturation_tokens, color="#555555", linestyle=":", label=f"Lm {profile.saturation_tokens}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of the prefill step")
    axes.set_ylabel("tokens/s")


def _decode(axes: Axes, profile: Profile, rows: tuple[Row, ...]) -> None:
    for number, (tp, latency) in enumerate(sorted(profile.latency.items())):
        colour, marker = STYLES[number % len(STYLES)]
        sizes = _sizes(latency.valid_range.decode_requests, 1024)
        rate = [n / latency.decode_s(n, n * _CONTEXT) for n in sizes]
        axes.plot(sizes, rate, color=colour, label=f"TP {tp}, {_CONTEXT} context tokens a request")
        points = timed(rows, Phase.DECODE, tp)
        batch = [p.requests for p in points.points]
        if batch:
            axes.plot(batch, np.array(batch) / points.step_s, marker, color=colour, markersize=4, label="timed")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("decode batch (requests)")
    axes.set_ylabel("tokens/s")


def _speed_up(axes: Axes, profile: Profile) -> None:
    degrees = sorted(profile.latency)
    base = profile.latency[degrees[0]]
    for number, tp in enumerate(degrees[1:]):
        colour, _ = STYLES[number % len(STYLES)]
        latency = profile.latency[tp]
        most = min(min(m.valid_range.chunk_tokens, m.valid_range.prefill_tokens) for m in (base, latency))
        sizes = [n for n in _sizes(most, 1 << 15) if n >= 16]
        ratio = [base.prefill_s([(n, 0)]) / latency.prefill_s([(n, 0)]) for n in sizes]
        axes.plot(sizes, ratio, color=colour, label=f"prefill, TP {tp} over TP {degrees[0]}")
        batches = _sizes(min(m.valid_range.decode_requests for m in (base, latency)), 1024)
        ratio = [base.decode_s(n, n * _CONTEXT) / latency.decode_s(n, n * _CONTEXT) for n in batches]
        axes.plot(batches, ratio, color=colour, linestyle="--", label=f"decode, TP {tp} over TP {degrees[0]}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of the prefill step, or decode batch")
    axes.set_ylabel("speed-up K")


def _residuals(axes: Axes, profile: Profile, rows: tuple[Row, ...]) -> None:
    from dsim.latency import AffineLatency

    number = 0
    for tp, latency in sorted(profile.latency.items()):
        for phase in Phase:
            points = timed(rows, phase, tp)
            if not points.points or not isinstance(latency, AffineLatency):
                continue
            colour, marker = STYLES[number % len(STYLES)]
            number += 1
            error = 100 * (predict(latency, points.points) / points.step_s - 1)
            axes.plot(points.step_s * 1e3, error, marker, color=colour, markersize=4, label=f"TP {tp} {phase.value}")
    axes.axhline(0, color="#555555", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("timed step (ms)")
    axes.set_ylabel("fit - timed (%)")
