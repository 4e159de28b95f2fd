"""Plots of latency profiles: throughputs with Lm, residuals, speed-ups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsim.latency import AffineLatency
from dsim.pools import Role
from dsim.profile import Profile
from experiments.plots.style import NEUTRAL, STYLES, Figures, finish, new_figure, plain_ticks, rendered, tidy
from profiles.rows import Phase, read_rows
from profiles.timed import Timed, predict, timed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from profiles.rows import Point, Row

#: Context of a decoding request in the decode plot, and how far (a factor) from it a timed point belongs to its line.
_CONTEXT = 512
_NEAR = 1.5
LineStyle = Literal["-", "--", "-."]
_LINES: tuple[LineStyle, ...] = ("-", "--", "-.")


def profile_plots(profile: Profile, *, rows: Path | None = None) -> Mapping[str, bytes]:
    """Return PNG files by name, of `profile_figures`."""
    found = profile_figures(profile, rows=rows)
    return {f"{name}.png": rendered(figure, "png") for name, figure in found.items()}


def profile_figures(profile: Profile, *, rows: Path | None = None) -> Figures:
    """Return figures by name: prefill and decode throughput, speed-up, and residuals where there are rows.

    Args:
        rows: the rows file that the profile was fitted to; its points are drawn too.

    Source:
        Figures 3a, 3b and 5 of DistServe (arXiv 2401.09670v3) show the same for a 13B model.
    """
    read = None if rows is None else read_rows(rows, model=profile.model, gpu=profile.gpu)
    ok = () if read is None else read.ok
    includes_host = read is not None and read.metadata.host_overhead != "excluded"
    draw: dict[str, Callable[[Axes], None]] = {
        "prefill_throughput": lambda axes: _prefill(axes, profile, ok),
        "decode_throughput": lambda axes: _decode(axes, profile, ok),
    }
    if len(profile.latency) > 1:
        draw["tp_speed_up"] = lambda axes: _speed_up(axes, profile)
    if ok:
        draw["residuals"] = lambda axes: _residuals(axes, profile, ok, includes_host=includes_host)
    figures = {}
    for name, plot in draw.items():
        figures[name] = figure = new_figure()
        axes = figure.add_subplot()
        plot(axes)
        tidy(axes)
        plain_ticks(axes)
        finish(figure, profile.name, axes.get_legend_handles_labels()[0])
    return figures


def _line(number: int) -> LineStyle:
    """Return how a line that has no markers is told from the others without colour; dots are those of Lm."""
    return _LINES[number % len(_LINES)]


def _sizes(most: float, limit: int) -> list[int]:
    end = int(min(most, limit))
    return sorted({int(n) for n in np.geomspace(1, max(end, 1), 60).round()})


def _prefill(axes: Axes, profile: Profile, rows: tuple[Row, ...]) -> None:
    for number, (tp, latency) in enumerate(sorted(profile.latency.items())):
        colour, marker = STYLES[number % len(STYLES)]
        valid = latency.valid_range
        sizes = [n for n in _sizes(min(valid.chunk_tokens, valid.prefill_tokens), 1 << 15) if n >= 16]
        rate = [n / latency.prefill_s([(n, 0)]) for n in sizes]
        axes.plot(sizes, rate, color=colour, linestyle=_line(number), label=f"TP {tp}, one prompt")
        points = timed(rows, Phase.PREFILL, tp)
        tokens = [p.requests * p.prompt_tokens for p in points.points]
        if tokens:
            rates = np.array(tokens) / points.step_s
            axes.plot(tokens, rates, marker, color=colour, markersize=4, label=f"TP {tp}, timed")
        lm = None if profile.fit is None else profile.fit.saturation_tokens.get(tp)
        if lm is not None and math.isfinite(lm.best):
            axes.axvline(lm.best, color=colour, linestyle=":", label=f"TP {tp}, Lm {lm.best:.0f}")
            # An open end is drawn as far as the line goes.
            axes.axvspan(max(lm.low, sizes[0]), min(lm.high, sizes[-1]), color=colour, alpha=0.08, linewidth=0)
    if profile.fit is None and profile.saturation_tokens is not None:
        axes.axvline(profile.saturation_tokens, color=NEUTRAL, linestyle=":", label=f"Lm {profile.saturation_tokens}")
    axes.set_xscale("log")
    axes.set_xlabel("tokens of the prefill step")
    axes.set_ylabel("prefill throughput (tokens/s)")


def _decode(axes: Axes, profile: Profile, rows: tuple[Row, ...]) -> None:
    for number, (tp, latency) in enumerate(sorted(profile.latency.items())):
        colour, marker = STYLES[number % len(STYLES)]
        sizes = _sizes(latency.valid_range.decode_requests, 1024)
        rate = [n / latency.decode_s(n, n * _CONTEXT) for n in sizes]
        label = f"TP {tp}, {_CONTEXT} context tokens a request"
        axes.plot(sizes, rate, color=colour, linestyle=_line(number), label=label)
        near = near_context(timed(rows, Phase.DECODE, tp))
        if near.points:
            batch = near.column("requests")
            label = f"TP {tp}, timed, {_CONTEXT / _NEAR:.0f} – {_CONTEXT * _NEAR:.0f} context tokens"
            axes.plot(batch, batch / near.step_s, marker, color=colour, markersize=4, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("decode batch (requests)")
    axes.set_ylabel("decode throughput (tokens/s)")


def near_context(points: Timed) -> Timed:
    """Return the decode points whose context is about that of the line they are drawn at."""
    context = points.column("context_tokens")
    return points.only((context >= _CONTEXT / _NEAR) & (context <= _CONTEXT * _NEAR))


def _speed_up(axes: Axes, profile: Profile) -> None:
    degrees = sorted(profile.latency)
    base = profile.latency[degrees[0]]
    for number, tp in enumerate(degrees[1:]):
        colour, marker = STYLES[number % len(STYLES)]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "markevery": 8}
        latency = profile.latency[tp]
        most = min(min(m.valid_range.chunk_tokens, m.valid_range.prefill_tokens) for m in (base, latency))
        sizes = [n for n in _sizes(most, 1 << 15) if n >= 16]
        ratio = [base.prefill_s([(n, 0)]) / latency.prefill_s([(n, 0)]) for n in sizes]
        axes.plot(sizes, ratio, **look, label=f"prefill, TP {tp} over TP {degrees[0]}")
        batches = _sizes(min(m.valid_range.decode_requests for m in (base, latency)), 1024)
        ratio = [base.decode_s(n, n * _CONTEXT) / latency.decode_s(n, n * _CONTEXT) for n in batches]
        axes.plot(batches, ratio, **look, linestyle="--", label=f"decode, TP {tp} over TP {degrees[0]}")
    axes.set_xscale("log")
    axes.set_xlabel("prefill step (tokens), or decode batch (requests)")
    axes.set_ylabel("speed-up K")


def _residuals(axes: Axes, profile: Profile, rows: tuple[Row, ...], *, includes_host: bool) -> None:
    number = 0
    for tp in sorted(profile.latency):
        for phase in Phase:
            points = timed(rows, phase, tp)
            if not points.points or not isinstance(profile.latency[tp], AffineLatency):
                continue
            colour, marker = STYLES[number % len(STYLES)]
            number += 1
            error = 100 * residuals(profile, points, tp, includes_host=includes_host)
            axes.plot(points.step_s * 1e3, error, marker, color=colour, markersize=4, label=f"TP {tp} {phase.value}")
    axes.axhline(0, color=NEUTRAL, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("timed step (ms)")
    axes.set_ylabel("fit less timed (%)")


def residuals(profile: Profile, points: Timed, tp: int, *, includes_host: bool) -> NDArray[np.float64]:
    """Return how far the profile is from the timed steps, as shares of these, shape (n,).

    Args:
        includes_host: the steps contain the host work that the profile keeps apart.
    """
    latency = profile.latency[tp]
    if not isinstance(latency, AffineLatency):
        raise TypeError(f"latency must be AffineLatency, is {type(latency).__name__}")
    expected_s = predict(latency, points.points)
    if includes_host:
        expected_s = expected_s + np.array([_host_s(profile, point) for point in points.points])
    return expected_s / points.step_s - 1


def _host_s(profile: Profile, point: Point) -> float:
    """Return the host work of one launch."""
    roles = {Phase.PREFILL.value: Role.PREFILL, Phase.DECODE.value: Role.DECODE, Phase.MIXED.value: Role.COLOCATED}
    decoding = point.decode_requests or (0 if point.prompt_tokens else point.requests)
    prompts = point.requests if point.prompt_tokens else 0
    tokens = prompts * point.prompt_tokens + round(decoding * point.context_tokens)
    mixed = point.phase == Phase.MIXED.value
    return profile.host_of(roles[point.phase], 1).launch_s(prompts + decoding, tokens, mixed=mixed)
