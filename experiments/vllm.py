"""Summary of a sweep with the keys that `vllm bench sweep plot_pareto` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsim.pools import Placement
from experiments.store import SweepResults, summarized

#: Its keys for latencies, in milliseconds.
_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}
_STATISTICS = {"mean": "mean", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}


def vllm_records(results: SweepResults) -> list[dict[str, Any]]:
    """Return one record for each combination that has a throughput; the others would be refused.

    Tokens/s per user are there output_throughput / max_concurrency, and tokens/s per GPU output_throughput /
    (tensor_parallel_size x pipeline_parallel_size x data_parallel_size).

    Source:
        vllm/benchmarks/sweep/plot_pareto.py and vllm/benchmarks/serve.py of vLLM 0.12 to 0.15.
    """
    return [record for summary in summarized(results.rows) for record in _record(results, summary)]


def _record(results: SweepResults, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    throughput, requests = summary.get("output_tokens_per_s"), summary.get("throughput_per_s")
    duration = summary.get("e2e_s.mean")
    if throughput is None or not requests or not duration:
        return
    record: dict[str, Any] = {key: summary[key] for key in results.outline.keys}
    record |= {
        "request_throughput": requests,
        "request_goodput": summary.get("good_throughput_per_s"),
        "request_rate": summary.get("rate_per_s"),
        "output_throughput": throughput,
        # Little's law: requests in the system, which is what a user count stands for in an open loop.
        "max_concurrency": requests * duration,
        **_gpus(summary),
    }
    for name, key in _LATENCIES.items():
        for statistic, ours in _STATISTICS.items():
            seconds = summary.get(f"{key}.{ours}")
            if seconds is not None:
                record[f"{statistic}_{name}_ms"] = 1000 * seconds
    yield {key: value for key, value in record.items() if value is not None}


def _gpus(summary: Mapping[str, Any]) -> dict[str, int]:
    """Return degrees whose product is the number of GPUs; those of the instances where all are alike."""
    gpus = int(summary["num_gpus"])
    tp = pp = 1
    placement = summary.get("placement")
    if isinstance(placement, str) and ";" not in placement:
        pools = Placement.parse(placement).pools
        if len(pools) == 1:
            tp, pp = pools[0].parallelism.tp, pools[0].parallelism.pp
    return {
        "num_gpus": gpus,
        "gpu_count": gpus,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": gpus // (tp * pp),
    }
