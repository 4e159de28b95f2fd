"""Small synthetic profiles, traces and placements for tests; their times are exact in binary by default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dsim.gpu import Gpu
from dsim.latency import AffineDecode, AffineLatency, AffinePrefill, HostOverhead
from dsim.model import Model
from dsim.pools import Parallelism, Role
from dsim.profile import BatchLimits, Handover, Preemption, Profile
from dsim.trace import Trace

#: One tick of the synthetic profiles: sums of their times are exact.
TICK_S = 1 / 1024

KV_BYTES_PER_TOKEN = 1024

_MODEL = Model(
    name="tiny",
    hugging_face="none/tiny",
    layers=8,
    hidden_size=64,
    attention_heads=8,
    kv_heads=8,
    head_dim=4,
    ffn_size=256,
    vocabulary=1024,
    context_tokens=1 << 20,
    gated_mlp=False,
    learned_positions=False,
    biases=False,
    tied_embeddings=True,
    source="made up",
)

_GPU = Gpu(
    name="tiny",
    vendor="none",
    architecture="none",
    memory_bytes=1 << 34,
    hbm_bytes_per_s=2.0**40,
    bf16_flops_per_s=2.0**50,
    nvlink_bytes_per_s=2.0**38,
    network_bytes_per_s=2.0**34,
    pcie_bytes_per_s=2.0**35,
    gpus_per_node=8,
    scale_up_domain_gpus=8,
    tdp_w=400.0,
    source="made up",
)


def _times(ticks: Sequence[float], tp: int) -> tuple[float, float, float]:
    first, second, third = (n * TICK_S / tp for n in ticks)
    return first, second, third


def make_profile(
    *,
    tps: Iterable[int] = (1, 2, 4),
    pps: Iterable[int] = (1, 2, 4),
    prefill: tuple[float, float, float] = (8.0, 1.0, 0.0),
    decode: tuple[float, float, float] = (4.0, 0.0, 1.0),
    decode_large: tuple[float, float, float] | None = None,
    threshold_requests: int = 95,
    host: Mapping[Role, HostOverhead] | None = None,
    host_pipelined: Mapping[Role, HostOverhead] | None = None,
    limits: Mapping[Role, BatchLimits] | None = None,
    kv_tokens: int | Mapping[Parallelism, int] = 1 << 20,
    block_tokens: int = 16,
    preemption: Preemption = Preemption.SWAP,
    swap_tokens_per_s: float = math.inf,
    handover: Handover | None = None,
    watermark: float | None = None,
    admission_watermark: float = 0.0,
    request_s: float = 0.0,
) -> Profile:
    """Return a profile of a made-up model.

    Args:
        tps: degrees with coefficients; those of tp n are 1/n of those given.
        pps: degrees with a KV capacity.
        prefill: (constant, per token, per squared token), in ticks of 1/1024 s.
        decode: (constant, per context token, per request), in ticks.
        decode_large: the same from `threshold_requests` on; None: as `decode`.
        host: in seconds; none by default.
        limits: none by default.
        kv_tokens: capacity of an instance, for every parallelism or by parallelism.
        swap_tokens_per_s: of KV, per GPU, each way.
        watermark: replaces that of `handover`.
    """
    parallelisms = [Parallelism(tp, pp) for tp in tps for pp in pps]
    handover = handover or Handover()
    if watermark is not None:
        handover = dataclasses.replace(handover, watermark=watermark)
    assert _MODEL.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    return Profile(
        name="tiny",
        model=_MODEL,
        gpu=_GPU,
        engine="none",
        engine_version="0",
        source="made up",
        latency={
            tp: AffineLatency(
                prefill=AffinePrefill(*_times(prefill, tp)),
                small=AffineDecode(*_times(decode, tp)),
                large=AffineDecode(*_times(decode_large or decode, tp)),
                threshold_requests=threshold_requests,
            )
            for tp in {p.tp for p in parallelisms}
        },
        host=host or {},
        host_pipelined=host_pipelined or {},
        limits=limits or {},
        kv_capacity_tokens=(kv_tokens if isinstance(kv_tokens, Mapping) else dict.fromkeys(parallelisms, kv_tokens)),
        handover=handover,
        admission_watermark=admission_watermark,
        preemption=preemption,
        swap_bytes_per_s=swap_tokens_per_s * KV_BYTES_PER_TOKEN,
        block_tokens=block_tokens,
        request_s=request_s,
    )


def every_role(profile: Profile) -> dict[Role, Profile]:
    """Return the mapping that gives each role the same profile."""
    return dict.fromkeys(Role, profile)


def tokens_per_s(tokens: float) -> float:
    """Return the bandwidth that moves the KV of so many tokens in a second."""
    return tokens * KV_BYTES_PER_TOKEN


def make_trace(
    arrival_ticks: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int],
    cached: Sequence[int] | None = None,
) -> Trace:
    """Return a trace whose arrivals are given in ticks of 1/1024 s."""
    return Trace(
        np.array(arrival_ticks, dtype=np.float64) * TICK_S,
        np.array(prompts, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
        np.array(cached if cached is not None else [0] * len(prompts), dtype=np.int64),
    )
