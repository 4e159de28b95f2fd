"""A simulated run as tables for a planner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsim.cli.inputs import number_of
from dsim.cli.kv_blocks import SOURCE_NAMES, kv_reasons
from dsim.cli.output import Table
from dsim.pools import Role

if TYPE_CHECKING:
    from dsim.result import Run
    from dsim.slo import Slo
    from placement.result import SearchResult, Trial
    from placement.statistics import Interval

_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.COLOCATED: "colocated"}
_PART_NAMES = {
    "queue": "queue",
    "prefill": "prefill",
    "transfer": "transfer and wait for it",
    "decode_admission": "decode admission",
}
_SATURATION = {
    "stable": "stable: the backlog does not grow",
    "near_knee": "near the knee: requests wait three times as long as their prefill and one token take",
    "overloaded": "overloaded: the backlog grows, so longer runs have longer latencies",
}


def run_parts(result: Run, summary: dict[str, Any], slo: Slo | None) -> list[Table | str]:
    """Return the parts of the report, in order."""
    latencies = Table(["<", *_STATISTICS])
    for name, key in (("TTFT ms", "ttft_s"), ("TPOT ms", "tpot_s"), ("ITL ms", "itl_s"), ("E2E ms", "e2e_s")):
        latencies.rows.append([name, *(milliseconds(summary[key][statistic]) for statistic in _STATISTICS)])
    lines = []
    if slo is not None:
        shares = {name: percent(share) for name, share in summary["attainment"].items()}
        lines.append(
            f"attainment of {slo}: {shares['both']} (TTFT alone {shares['ttft']}, TPOT alone {shares['tpot']})"
        )
    throughput = f"throughput: {summary['throughput_per_s']:.3f} requests/s"
    if slo is not None:
        throughput += f", {summary['good_throughput_per_s']:.3f} within the limits"
    lines.append(throughput)
    lines.append(f"saturation: {_SATURATION[summary['saturation']]}")
    counts = f"preemptions: {summary['preemptions']}"
    if summary["rejected"]:
        counts += f"; rejected because they can never fit the KV cache: {summary['rejected']}"
    lines.append(counts)
    return [latencies, "\n".join(lines), *_breakdown(summary), _pools(result), *_kv(result)]


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds."""
    return "-" if seconds is None or math.isnan(seconds) else f"{seconds * 1e3:,.1f}"


def level(confidence: float) -> str:
    """Return a level of confidence, never rounded to certainty.

    >>> level(0.95), level(0.995), level(0.9999)
    ('95%', '99.5%', '99.99%')
    """
    return f"{100 * confidence:.15g}%" if confidence > 0.999_999 else f"{100 * confidence:.6g}%"


def figures(number: float, most: int = 3) -> str:
    """Return a number with so many figures at most, and all of those before the point.

    >>> figures(2.8571), figures(22.86), figures(4072.4), figures(1.3e9, 4), figures(0.00012345)
    ('2.86', '22.9', '4,072', '1,300,000,000', '0.000123')
    """
    return f"{number:,.0f}" if abs(number) >= 10**most else f"{number:.{most}g}"


def percent(share: float | None) -> str:
    """Return a share in per cent."""
    return "-" if share is None or math.isnan(share) else f"{share:.1%}"


def _breakdown(summary: dict[str, Any]) -> tuple[str, Table]:
    """Return where the time to the first token goes, and what follows it before decoding starts."""
    parts = summary["ttft_parts_s"]
    names = list(parts)
    headings, note = _way(names, summary["first_token_after"])
    title = f"where the time to the first token goes, mean ms{note}"
    return title, Table(headings, [[milliseconds(parts[name]) for name in names]])


def _way(names: list[str], first_token_after: str) -> tuple[list[str], str]:
    """Return the headings of the parts, those after the first token in brackets, and what to say of the brackets."""
    before = names[: names.index(first_token_after) + 1]
    headings = [_PART_NAMES[name] if name in before else f"({_PART_NAMES[name]})" for name in names]
    return headings, " (in brackets: after the first token)" if len(before) < len(names) else ""


def _pools(result: Run) -> Table:
    table = Table(["<pool", "instances", "GPUs", "busy", "KV peak", "KV blocks each", "<from"])
    for pool in result.placement.pools:
        role = pool.role
        table.rows.append(
            [
                f"{_NAMES[role]} {pool.parallelism}",
                str(pool.count),
                str(pool.num_gpus),
                percent(result.utilization.get(role)),
                percent(result.kv_peak.get(role)),
                f"{result.kv_blocks.get(role, 0):,}",
                SOURCE_NAMES[result.profiles[role].kv_source(pool.parallelism).value],
            ]
        )
    return table


def _kv(result: Run) -> list[str]:
    """Return why the KV caches have the blocks they have, where the profile says it."""
    reasons = kv_reasons(result.profiles, result.placement)
    return ["\n".join(reasons)] if reasons else []


def search_parts(
    result: SearchResult, *, num_gpus: int, confidence: float, per_dollar: bool, first_token_after: str
) -> list[Table | str]:
    """Return the parts of a search's answer, in order.

    Args:
        per_dollar: placements are compared by goodput per dollar.
        first_token_after: the last part of the way that the first token of a disaggregated placement waits for.
    """
    parts: list[Table | str] = []
    if result.transient:
        parts.append("goodput of finite runs from an empty system: a transient, not a rate that can be sustained")
    parts.append("\n".join(_verdict(result, num_gpus=num_gpus, per_dollar=per_dollar)))
    if result.complete:
        parts.append(_trials(result, num_gpus=num_gpus, confidence=confidence))
        headings, note = _way(list(_PART_NAMES), first_token_after)
        parts += [f"where the time to the first token goes at that rate, mean ms{note}"]
        parts += [_search_breakdown(result, headings)]
    parts.append("\n".join(_remarks(result)))
    return parts


def _verdict(result: SearchResult, *, num_gpus: int, per_dollar: bool) -> list[str]:
    best = result.best
    lines = []
    for kind, trial in (("disaggregated", best.disaggregated), ("colocated", best.colocated)):
        if trial is not None and trial.goodput_per_gpu_per_s is not None:
            lines.append(
                f"best {kind}: {trial.placement.label} on {number_of(trial.num_gpus, 'GPU')}, "
                f"{_interval(trial.goodput_per_gpu_per_s)} requests/s per GPU"
            )
    if best.ratio is not None:
        by = ", per dollar" if per_dollar else ""
        lines.append(f"disaggregated / colocated{by}: {_interval(best.ratio)}")
    total = result.most_total
    if total is not None and total.total_per_s is not None:
        copies = f"{total.replicas} x ({total.placement.label})" if total.replicas > 1 else total.placement.label
        lines.append(
            f"most on {number_of(num_gpus, 'GPU')}: {copies}, {_interval(total.total_per_s)} requests/s in total"
        )
    return lines or ["no placement sustains any rate within the limits"]


def _trials(result: SearchResult, *, num_gpus: int, confidence: float) -> Table:
    table = Table(
        ["<placement", "GPUs", "requests/s per GPU", f"{level(confidence)} interval", "<tied", f"total on {num_gpus}",
         "TTFT met", "TPOT met", "<limited by", "<busy", "of saturation"]
    )  # fmt: skip
    for trial in result.complete:
        goodput, total, operation = trial.goodput_per_gpu_per_s, trial.total_per_s, trial.operation
        if goodput is None or total is None:
            continue
        table.rows.append(
            [
                trial.placement.label,
                str(trial.num_gpus),
                f"{goodput.best:.3f}",
                f"{goodput.low:.3f} - {goodput.high:.3f}",
                _tie(result, trial),
                f"{total.best:.2f}",
                *([percent(operation.attainment[limit]) for limit in ("ttft", "tpot")] if operation else ["-", "-"]),
                "-" if operation is None else _NAMES[operation.limiting],
                "-" if operation is None else _busy(operation.utilization),
                percent(trial.load),
            ]
        )
    return table


def _tie(result: SearchResult, trial: Trial) -> str:
    if trial.tied:
        return "="
    is_colocated = trial.placement.is_colocated
    kin = [t for t in result.complete if t.tied_in_kind and t.placement.is_colocated is is_colocated]
    return "~" if trial.tied_in_kind and len(kin) > 1 else ""


def _fate(trial: Trial) -> str:
    """Return the state of a trial, those pruned without a simulation apart."""
    pruned_by_bound = trial.state.value == "PRUNED" and trial.failed_at_per_gpu_per_s is None
    return "BOUNDED" if pruned_by_bound else trial.state.value


def _busy(utilization: Mapping[Role, float]) -> str:
    return ", ".join(f"{role.value} {utilization[role]:.0%}" for role in Role if role in utilization)


def _search_breakdown(result: SearchResult, headings: list[str]) -> Table:
    table = Table(["<placement", *headings])
    for trial in (result.best.disaggregated, result.best.colocated):
        if trial is not None and trial.operation is not None:
            parts = trial.operation.ttft_parts_s
            table.rows.append([trial.placement.label, *(milliseconds(parts.get(name)) for name in _PART_NAMES)])
    return table


def _remarks(result: SearchResult) -> list[str]:
    """Return what else became of the candidates."""
    states = [_fate(trial) for trial in result.trials]
    counts = ", ".join(
        f"{states.count(state)} {what}"
        for state, what in (
            ("COMPLETE", "with an interval"),
            ("BOUNDED", "pruned by a bound"),
            ("PRUNED", "pruned as short runs fell short"),
            ("FAILED", "failed"),
            ("INFEASIBLE", "infeasible"),
        )
        if state in states
    )
    runs = f"{number_of(result.probes, 'run')} of {result.requests:,} requests"
    lines = [f"{number_of(len(states), 'placement')}: {counts}; {runs}" if states else "no placement to compare"]
    lines += [f"infeasible, {len(found)}: {reason}" for reason, found in result.infeasible.items()]
    lines += [f"failed: {trial.placement.label}: {'; '.join(trial.reasons)}" for trial in _failed(result)]
    lines += [f"warning: {warning}" for warning in result.warnings]
    if any(trial.tied for trial in result.complete[1:]):
        lines.append("= tied: not significantly below the best")
    if any(_tie(result, trial) == "~" for trial in result.complete):
        lines.append("~ tied: not significantly below the best of its kind (disaggregated, colocated)")
    return lines


def _failed(result: SearchResult) -> list[Trial]:
    return [trial for trial in result.trials if trial.state.value == "FAILED"]


def _interval(interval: Interval) -> str:
    return f"{figures(interval.best)} ({figures(interval.low)} - {figures(interval.high)})"
