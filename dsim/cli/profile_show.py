"""`dsim profile show` and `dsim profile compare`: what a latency profile says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.options import Format, FormatOption, NoColor, Overwrite, file_path
from dsim.errors import InputError
from dsim.pools import Role

if TYPE_CHECKING:
    from dsim.cli.output import Table
    from dsim.latency import AffineLatency, LatencyModel
    from dsim.profile import Profile
    from dsim.profile_fit import Fit, FitReport

#: Prefill tokens and decode batches that tables look at, where the profile knows them.
_PREFILL_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Context of a decoding request in those tables.
_CONTEXT = 512

ProfileName = Annotated[
    str, typer.Argument(metavar="PROFILE", help="A profile file, or the name of a shipped one (dsim profiles).")
]


def show(
    *,
    profile: ProfileName,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", parser=file_path, metavar="DIR", help="Draw throughputs, residuals, speed-ups there."),
    ] = None,
    overwrite: Overwrite = False,
    output_format: FormatOption = Format.TABLE,
    no_color: NoColor = False,
) -> int:
    """Show a profile: constants, Lm, K, errors of the fit, and efficiency against the datasheet."""
    from dsim.cli.output import OutputFolder, emit, note, to_csv, to_json, use_color
    from dsim.cli.output import show as print_parts

    found, path = _load(profile)
    if plot is not None:
        from experiments.profile_plots import profile_plots

        files = profile_plots(found, rows=_rows_beside(found, path))
        OutputFolder(plot, overwrite).write(files)
        note(f"wrote {', '.join(sorted(files))} to {plot}", quiet=False)
    if output_format is Format.JSON:
        emit(to_json(_document(found)))
    elif output_format is Format.CSV:
        emit(to_csv(_steps(found)))
    else:
        print_parts(*profile_parts(found), color=use_color(no_color=no_color))
    return 0


def compare(
    *,
    first: Annotated[str, typer.Argument(metavar="A", help="A profile file, or the name of a shipped one.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    output_format: FormatOption = Format.TABLE,
    no_color: NoColor = False,
) -> int:
    """Compare the step times of two profiles at the points that both know."""
    from dsim.cli.output import Table, emit_data, use_color
    from dsim.cli.output import show as print_parts

    a, b = _load(first)[0], _load(second)[0]
    shared = sorted(set(a.latency) & set(b.latency))
    if not shared:
        raise InputError("B", f"has no tensor parallel degree that {a.name} has", value=b.name)
    rows = compared(a, b)
    if not emit_data(output_format, {"a": a.name, "b": b.name, "steps": rows}, rows=rows):
        table = Table(["TP", "<phase", "tokens / batch", "A ms", "B ms", "B / A"])
        for row in rows:
            table.rows.append(
                [str(row["tp"]), row["phase"], str(row["size"]), f"{row['a_s'] * 1e3:.2f}", f"{row['b_s'] * 1e3:.2f}",
                 f"{row['b_over_a']:.3f}"]
            )  # fmt: skip
        lm = ", ".join(f"{name} {_lm(p)}" for name, p in (("A", a), ("B", b)))
        head = f"A = {a.name} ({a.engine_version})\nB = {b.name} ({b.engine_version})\nLm tokens: {lm}"
        about = f"decode at {_CONTEXT} context tokens a request; kernels and host work together"
        print_parts(head, about, table, color=use_color(no_color=no_color))
    return 0


def compared(a: Profile, b: Profile) -> list[dict[str, Any]]:
    """Return the step times of both profiles where both know them, and their ratio."""
    keys = ("tp", "phase", "size")
    times = {tuple(row[key] for key in keys): row["step_s"] for row in _steps(b)}
    return [
        {**{key: row[key] for key in keys}, "a_s": row["step_s"], "b_s": b_s, "b_over_a": b_s / row["step_s"]}
        for row in _steps(a)
        if (b_s := times.get(tuple(row[key] for key in keys))) is not None
    ]


def profile_parts(profile: Profile) -> list[Table | str]:
    """Return the parts of the report, in order."""
    about = f"step times and efficiency (decode at {_CONTEXT} context tokens a request; kernels and host work together)"
    parts: list[Table | str] = ["\n".join(_introduction(profile))]
    parts += ["constants (seconds)", _constants_table(profile), about, _steps_table(profile)]
    if profile.fit is None:
        return [*parts, "the file says nothing about how well the constants fit"]
    parts += ["errors of the fit, relative", _errors_table(profile.fit)]
    if profile.fit.speed_up:
        parts += ["speed-up K", _speed_up_table(profile.fit)]
    return parts


def _constants_table(profile: Profile) -> Table:
    from dsim.cli.output import Table

    table = Table(["TP", "<constant", "value", "95 % low", "95 % high"])
    for row in _constants(profile):
        shown = [f"{row[key]:.4g}" if row[key] is not None else "-" for key in ("best", "low", "high")]
        table.rows.append([str(row["tp"]), row["name"], *shown])
    return table


def _steps_table(profile: Profile) -> Table:
    from dsim.cli.output import Table

    table = Table(["TP", "<phase", "tokens / batch", "step ms", "of it host", "per s", "<share of peak"])
    for row in _steps(profile):
        what = "FLOP/s" if row["phase"] == "prefill" else "HBM bandwidth"
        table.rows.append(
            [str(row["tp"]), row["phase"], str(row["size"]), f"{row['step_s'] * 1e3:.2f}", f"{row['host_s'] * 1e3:.2f}",
             f"{row['tokens_per_s']:,.0f}", f"{row['efficiency']:.0%} of {what}"]
        )  # fmt: skip
    return table


def _errors_table(fit: FitReport) -> Table:
    from dsim.cli.output import Table

    table = Table(["TP", "<phase", "<region", "points", "mean error", "worst", "R2"])
    for e in fit.errors:
        r2 = "-" if e.r2 != e.r2 else f"{e.r2:.4f}"
        table.rows.append([str(e.tp), e.phase, e.region, str(e.points), f"{e.mean:.1%}", f"{e.worst:.1%}", r2])
    for a in fit.appendix_a:
        table.rows.append([str(a.tp), "prefill", "appendix-A form", "", f"{a.prefill_error:.1%}", "", ""])
        table.rows.append([str(a.tp), "decode", "appendix-A form", "", f"{a.decode_error:.1%}", "", ""])
    return table


def _speed_up_table(fit: FitReport) -> Table:
    from dsim.cli.output import Table

    table = Table(["TP", "of TP", "<phase", "tokens / batch", "context", "K", "low", "high", "all-reduce"])
    for k in fit.speed_up:
        comm = "-" if k.comm_share is None else f"{k.comm_share:.0%}"
        context = "-" if k.context_tokens is None else f"{k.context_tokens:g}"
        table.rows.append(
            [str(k.tp), str(k.base_tp), k.phase, str(k.tokens), context, f"{k.k.best:.2f}", f"{k.k.low:.2f}",
             f"{k.k.high:.2f}", comm]
        )  # fmt: skip
    return table


def _lm(profile: Profile) -> str:
    by_tp = profile.saturation_tokens_at
    if by_tp:
        return " / ".join(map(str, by_tp.values())) + f" (TP {' / '.join(map(str, by_tp))})"
    return str(profile.saturation_tokens or "unknown")


def lm_text(lm: Fit, method: str) -> str:
    """Return Lm with its interval in words.

    >>> from dsim.profile_fit import Fit
    >>> lm_text(Fit(286.0, 307.0, 330.0), "knee"), lm_text(Fit(380.0, 608.0, float("inf")), "knee")
    ('307 tokens (286 - 330), knee', '608 tokens (380 or more), knee')
    >>> lm_text(Fit(512.0, float("inf"), float("inf")), "not-reached")
    '512 tokens or more: not reached by the rows'
    """
    if method == "not-reached":
        return f"{lm.low:.0f} tokens or more: not reached by the rows"
    how = "knee" if method == "knee" else "80 % of the best rate: no knee"
    span = f"{lm.low:.0f} - {lm.high:.0f}" if math.isfinite(lm.high) else f"{lm.low:.0f} or more"
    if not lm.low:
        span = f"up to {lm.high:.0f}" if math.isfinite(lm.high) else "unknown how exactly"
    return f"{lm.best:.0f} tokens ({span}), {how}"


def _introduction(profile: Profile) -> list[str]:
    from dsim.cli.inputs import introduction

    lines = introduction(profile, asked=None)
    fit = profile.fit
    if fit is not None and fit.saturation_tokens:
        for tp, lm in fit.saturation_tokens.items():
            lines.append(f"Lm at TP {tp}: {lm_text(lm, fit.saturation_methods[tp])}")
    else:
        lines.append(f"Lm: {_lm(profile)}")
    lines += [f"tp {tp}: refused: {reason}" for tp, reason in sorted(profile.refused.items())]
    lines += [f"violates the contract: {violation}" for violation in profile.violations]
    host = ", ".join(f"{role.value} {h.step_s * 1e3:g} ms" for role, h in profile.host.items() if h.step_s)
    lines.append(f"host overhead a launch: {host or 'none apart from the constants'}")
    return lines


def _constants(profile: Profile) -> list[dict[str, Any]]:
    """Return the constants in force, with intervals where the fit section has them."""
    from dsim.latency import AffineLatency

    rows: list[dict[str, Any]] = []
    for tp, latency in sorted(profile.latency.items()):
        if not isinstance(latency, AffineLatency):
            continue
        intervals = {} if profile.fit is None else profile.fit.constants.get(tp, {})
        for name, value in _named(latency):
            interval = intervals.get(name)
            low, high = (None, None) if interval is None else (interval.low, interval.high)
            if value or interval is not None:
                rows.append({"tp": tp, "name": name, "best": value, "low": low, "high": high})
    return rows


def _named(latency: AffineLatency) -> list[tuple[str, float]]:
    p = latency.prefill
    named = [
        ("prefill.constant_s", p.constant_s),
        ("prefill.per_token_s", p.per_token_s),
        ("prefill.per_token_squared_s", p.per_token_squared_s),
        ("prefill.per_request_s", p.per_request_s),
        *((f"prefill.bends.{start}.per_token_s", slope) for start, slope in p.bends),
    ]
    regimes = [("decode", latency.small)]
    if latency.large != latency.small:
        regimes.append((f"decode from {latency.threshold_requests} requests", latency.large))
    for name, d in regimes:
        named += [
            (f"{name}.constant_s", d.constant_s),
            (f"{name}.per_context_token_s", d.per_context_token_s),
            (f"{name}.per_request_s", d.per_request_s),
            *((f"{name}.bends.{start}.per_request_s", slope) for start, slope in d.bends),
        ]
    return named


def _steps(profile: Profile) -> list[dict[str, Any]]:
    """Return step times at common sizes within the valid range, with the share of the datasheet's peak they reach."""
    rows: list[dict[str, Any]] = []
    for tp, latency in sorted(profile.latency.items()):
        rows += _prefills(profile, tp, latency)
        rows += _decodes(profile, tp, latency)
    return rows


def _prefills(profile: Profile, tp: int, latency: LatencyModel) -> Iterator[dict[str, Any]]:
    """Yield prefill steps of one prompt, with their share of the FLOP/s."""
    from dsim.contract import prefill_bound

    host, valid = profile.host_of(Role.PREFILL, 1), latency.valid_range
    for tokens in _PREFILL_TOKENS:
        if tokens <= min(valid.chunk_tokens, valid.prefill_tokens):
            bound = prefill_bound([(tokens, 0)], model=profile.model, gpu=profile.gpu, tp=tp)
            times = latency.prefill_s([(tokens, 0)]), host.launch_s(1, tokens)
            yield _step(tp, "prefill", tokens, *times, least_s=bound.compute_s)


def _decodes(profile: Profile, tp: int, latency: LatencyModel) -> Iterator[dict[str, Any]]:
    """Yield decode steps, with their share of the memory bandwidth."""
    from dsim.contract import decode_bound

    host, valid = profile.host_of(Role.DECODE, 1), latency.valid_range
    for batch in _BATCHES:
        total = batch * _CONTEXT
        if batch <= valid.decode_requests and total <= valid.context_tokens:
            bound = decode_bound(batch, total, model=profile.model, gpu=profile.gpu, tp=tp)
            times = latency.decode_s(batch, total), host.launch_s(batch, total)
            yield _step(tp, "decode", batch, *times, least_s=bound.memory_s)


def _step(tp: int, phase: str, size: int, kernel_s: float, host_s: float, *, least_s: float) -> dict[str, Any]:
    step_s = kernel_s + host_s
    return {
        "tp": tp,
        "phase": phase,
        "size": size,
        "step_s": step_s,
        "kernel_s": kernel_s,
        "host_s": host_s,
        # A step computes as many tokens as its size says in both phases.
        "tokens_per_s": size / step_s,
        "efficiency": least_s / step_s,
    }


def _document(profile: Profile) -> dict[str, Any]:
    from dataclasses import asdict

    fit = profile.fit
    return {
        "name": profile.name,
        "model": profile.model.name,
        "gpu": profile.gpu.name,
        "engine": profile.engine,
        "engine_version": profile.engine_version,
        "source": profile.source,
        "sha256": profile.sha256,
        "saturation_tokens": profile.saturation_tokens,
        "saturation_tokens_at": dict(profile.saturation_tokens_at),
        "violations": list(profile.violations),
        "constants": _constants(profile),
        "steps": _steps(profile),
        "fit": None if fit is None else asdict(fit),
    }


def _load(name: str) -> tuple[Profile, Path]:
    from dsim.errors import nearest
    from dsim.profile_file import load_profile
    from profiles.shipped import shipped_profiles

    path = dict(shipped_profiles()).get(name)
    if path is None:
        path = Path(name)
        if not path.exists() and "/" not in name and not name.endswith((".yaml", ".yml")):
            known: Sequence[str] = [known_name for known_name, _ in shipped_profiles()]
            raise InputError("PROFILE", "is no file and no shipped profile", value=name, hint=nearest(name, known))
    return load_profile(path), path


def _rows_beside(profile: Profile, path: Path) -> Path | None:
    """Return the rows file that the profile was fitted to where it lies beside it, unchanged."""
    import hashlib

    if profile.fit is None:
        return None
    rows = path.parent / profile.fit.rows
    if not rows.is_file() or hashlib.sha256(rows.read_bytes()).hexdigest() != profile.fit.rows_sha256:
        return None
    return rows
