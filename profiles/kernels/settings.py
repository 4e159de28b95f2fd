"""What an engine does unless told otherwise, as sections of profile files: limits of a step, memory, host work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsim.gpu import Gpu
from dsim.latency import ValidRange
from dsim.model import Model
from profiles.estimate import ENGINES, engine_limits
from profiles.export import MEMORY_SHARE
from profiles.kernels.hosts import HostConstants
from profiles.memory import RULES, kv_capacities, usable_bytes

_ROLES = ("prefill", "decode", "colocated")


def engine_sections(
    model: Model, gpu: Gpu, engine: str, degrees: Sequence[int], valid: ValidRange
) -> Mapping[str, Mapping[str, object]]:
    """Return the sections `limits` and `kv` of an engine; of one that is not known, what the GPU's memory allows.

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
    capacities = kv_capacities(model, gpu, engine, degrees, limits=limits)
    return {
        "limits": {
            "prefill": {"tokens": tokens, "requests": requests},
            "decode": {"requests": requests},
            "colocated": {"tokens": tokens, "requests": requests},
            "reason": f"defaults of {defaults.source}",
        },
        "kv": {
            "capacity_tokens": {str(at): capacity for at, capacity in capacities.items() if capacity > 0},
            "bytes_per_gpu": float(round(usable_bytes(model, gpu, engine, limits=limits))),
            "block_tokens": rule.block_tokens,
            "reason": rule.source,
        },
    }


def host_section(host: HostConstants) -> Mapping[str, object]:
    """Return the section `host`; what each prompt takes is not in it."""
    launch = {"step_s": host.step_s, "sequence_s": host.sequence_s}
    return {**{role: dict(launch) for role in _ROLES}, "request_s": host.request_s, "reason": host.source}
