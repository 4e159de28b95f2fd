"""A simulated run as tables for a planner."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dsim.cli.output import Table
from dsim.pools import Role

if TYPE_CHECKING:
    from dsim.result import Result
    from dsim.slo import Slo

_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.COLOCATED: "colocated"}
_PART_NAMES = {
    "queue": "queue",
    "prefill": "prefill",
    "transfer": "transfer",
    "decode_admission": "decode admission",
}
_SATURATION = {
    "stable": "stable: the backlog does not grow",
    "near_knee": "near the knee: requests wait longer than they are prefilled, or the backlog may be growing",
    "overloaded": "overloaded: the backlog grows, so longer runs have longer latencies",
}


def run_parts(result: Result, summary: dict[str, Any], slo: Slo | None) -> list[Table | str]:
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
    return [latencies, "\n".join(lines), *_breakdown(summary), _pools(result)]


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds."""
    return "-" if seconds is None or math.isnan(seconds) else f"{seconds * 1e3:,.1f}"


def percent(share: float | None) -> str:
    """Return a share in per cent."""
    return "-" if share is None or math.isnan(share) else f"{share:.1%}"


def _breakdown(summary: dict[str, Any]) -> tuple[str, Table]:
    """Return where the time to the first token goes, and what follows it before decoding starts."""
    parts = summary["ttft_parts_s"]
    names = list(parts)
    before = names[: names.index(summary["first_token_after"]) + 1]
    headings = [_PART_NAMES[name] if name in before else f"({_PART_NAMES[name]})" for name in names]
    title = "where the time to the first token goes, mean ms"
    if len(before) < len(names):
        title += " (in brackets: after the first token)"
    return title, Table(headings, [[milliseconds(parts[name]) for name in names]])


def _pools(result: Result) -> Table:
    table = Table(["<pool", "instances", "GPUs", "busy", "KV peak", "KV blocks each"])
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
            ]
        )
    return table
