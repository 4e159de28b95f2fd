"""Profiles of an engine whose kernels nobody timed, from another engine's kernels."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from dsim.latency import AffineLatency, LatencyModel
from dsim.options import Evidence
from dsim.pools import Role
from dsim.profile import BatchLimits, Profile
from profiles.estimate import ENGINES, engine_limits, host_overhead
from profiles.kernels.hosts import HOSTS, NOTHING
from profiles.memory import RULES, kv_capacities, usable_bytes

#: How far engines are apart at the same point: the same model, GPU and batch under two engines of a year, 10 to 30 %.
_APART = "engines differ by 10 to 30 % at the same point"


def borrowed_profile(kernels: Profile, engine: str) -> Profile:
    """Return the profile of an engine with another engine's kernels, and its own limits, memory and host work.

    Args:
        kernels: a profile from kernel tables.
        engine: one that `ENGINES` has.
    """
    model, gpu, memory = kernels.model, kernels.gpu, RULES[engine]
    host, theirs = HOSTS[engine], HOSTS.get(kernels.engine, NOTHING)
    limits = engine_limits(ENGINES[engine], gpu)
    valid = [latency.valid_range for latency in kernels.latency.values()]
    within = BatchLimits(
        min(limits.tokens, *(v.prefill_tokens for v in valid)),
        min(limits.requests, *(v.decode_requests for v in valid)),
    )
    error = f"{kernels.expected_error}; " if kernels.expected_error else ""
    return replace(
        kernels,
        name=f"{model.name}-{gpu.name}-{engine}-kernels-of-{kernels.engine}",
        engine=engine,
        engine_version=f"kernels of {kernels.engine}",
        source=(
            f"kernels of {kernels.engine} ({kernels.engine_version}) for want of {engine}'s: {kernels.source}; limits: "
            f"{ENGINES[engine].source}; memory: {memory.source}; {host.source}"
        ),
        latency={tp: _prompts(latency, host.prompt_s - theirs.prompt_s) for tp, latency in kernels.latency.items()},
        host=host_overhead(host, prompts=False),
        host_pipelined={},
        request_s=host.request_s,
        limits={
            Role.PREFILL: within,
            Role.DECODE: BatchLimits(requests=within.requests),
            Role.COLOCATED: within,
        },
        kv_capacity_tokens=kv_capacities(model, gpu, engine, kernels.latency, limits=limits),
        kv_bytes_per_gpu=usable_bytes(model, gpu, engine, limits=limits),
        block_tokens=memory.block_tokens,
        reasons={**kernels.reasons, "kv": memory.source, "host": host.source},
        evidence=Evidence.OTHER_KERNELS,
        expected_error=f"{error}{_APART}",
        sha256=hashlib.sha256(f"{kernels.sha256} {engine} {host} {memory}".encode()).hexdigest(),
    )


def _prompts(latency: LatencyModel, prompt_s: float) -> LatencyModel:
    """Return the step times with so much more for each prompt of a step; profiles from kernel tables are affine."""
    if not isinstance(latency, AffineLatency):
        return latency
    prefill = latency.prefill
    return replace(latency, prefill=replace(prefill, per_request_s=max(prefill.per_request_s + prompt_s, 0.0)))
