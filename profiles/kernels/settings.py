"""What an engine does unless told otherwise, as sections of profile files: limits of a step, memory, host work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsim.gpu import Gpu
from dsim.latency import ValidRange
from dsim.model import Model
from dsim.pools import Parallelism
from profiles.estimate import ENGINES, engine_limits, point_to_point
from profiles.export import MEMORY_SHARE
from profiles.kernels.hosts import HostConstants
from profiles.memory import RULES, kv_capacities, weight_bytes

_ROLES = ("prefill", "decode", "colocated")


def engine_sections(
    model: Model, gpu: Gpu, engine: str, degrees: Sequence[int], valid: ValidRange
) -> Mapping[str, Mapping[str, object]]:
    """Return the sections `limits`, `p2p` and `kv` of an engine; of one that is not known, what memory allows alone.

    Args:
        valid: where step times hold; no limit is beyond it.
    """
    if engine not in ENGINES or engine not in RULES:
        reason = f"assumed: {MEMORY_SHARE:.0%} of the GPU's memory for weights and KV cache"
        return {"kv": {"bytes_per_gpu": float(MEMORY_SHARE * gpu.memory_bytes), "reason": reason}}
    defaults, rule = ENGINES[engine], RULES[engine]
    limits = engine_limits(defaults, gpu)
    tokens = int(min(limits.tokens, valid.prefill_tokens))
    requests = int(min(limits.requests, valid.decode_requests))
    widest = Parallelism(max(degrees), 1)
    capacities = kv_capacities(model, gpu, engine, degrees, limits=limits)
    return {
        "limits": {
            "prefill": {"tokens": tokens, "requests": requests},
            "decode": {"requests": requests},
            "colocated": {"tokens": tokens, "requests": requests},
            "reason": f"defaults of {defaults.source}",
        },
        "p2p": _p2p(gpu),
        "kv": {
            "capacity_tokens": {str(at): capacity for at, capacity in capacities.items() if capacity > 0},
            "bytes_per_gpu": float(round(rule.kv_bytes(model, gpu, widest, limits) + weight_bytes(model, widest))),
            "block_tokens": rule.block_tokens,
            "reason": rule.source,
        },
    }


def _p2p(gpu: Gpu) -> Mapping[str, object]:
    sends = point_to_point(gpu)
    return {
        "latency_s": _number(sends.latency_s),
        "bandwidth_bytes_per_s": _number(sends.bandwidth_bytes_per_s),
        "across_nodes": {
            "latency_s": _number(sends.node_latency_s),
            "bandwidth_bytes_per_s": _number(sends.node_bandwidth_bytes_per_s),
        },
        "reason": "assumed, nobody timed it: an all-reduce's latency and share of the link, 80 % of the network's",
    }


def _number(value: float) -> float:
    """Return the number with four significant digits."""
    return float(f"{value:.4g}")


def host_section(host: HostConstants) -> Mapping[str, object]:
    """Return the section `host`; what each prompt takes is not in it."""
    launch = {"step_s": host.step_s, "sequence_s": host.sequence_s}
    return {**{role: dict(launch) for role in _ROLES}, "request_s": host.request_s, "reason": host.source}
