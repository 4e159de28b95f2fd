"""Profiles of what nobody timed: analytic step times, an engine's defaults, and KV capacity from memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dsim.analytic import AnalyticLatency, analytic_latency, find_efficiency
from dsim.errors import InputError, nearest
from dsim.gpu import NETWORK_SHARE, NODE_LATENCY_S, Gpu
from dsim.latency import HostOverhead, ValidRange
from dsim.model import Model
from dsim.options import Evidence, ExpertSharing
from dsim.pools import Role
from dsim.profile import BatchLimits, FirstToken, Handover, PointToPoint, Preemption, Profile
from profiles.kernels.hosts import HOSTS, HostConstants
from profiles.memory import RULES, MemoryRule, kv_capacities, usable_bytes

#: Largest tensor parallel degree looked at.
_MOST_TP = 16
#: Share of the intra-node link that a transfer reaches, as in profile files that say nothing.
_LINK_SHARE = 0.8
#: Tensors that pass from stage to stage.
_SENT_TENSORS: Final = 2
#: Prompt tokens at which Lm is looked for, and the share of the best rate that it must reach (as in fitted profiles).
_LM_TOKENS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_LM_SHARE = 0.8
#: Mean errors of whole steps, of the 254 static batches of TensorRT-LLM 0.9 that tests/test_analytic.py compares with.
_COMPARED_GPUS = ("a100-80g", "h100-sxm")
_DENSE_ERROR = "about 10 % (16 bits; Llama-2 on A100 and H100 under TensorRT-LLM 0.9: prefill 8 %, decode 9 %)"


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine does unless told otherwise.

    Args:
        tokens, requests: limits of a step on large GPUs; on small ones (below 70 GiB, and A100) 2048 and 256.
        source: where these are written.
    """

    tokens: int
    requests: int
    source: str


ENGINES: Final[Mapping[str, Engine]] = MappingProxyType(
    {
        "vllm": Engine(8192, 1024, "vLLM: max_num_batched_tokens, max_num_seqs"),
        "sglang": Engine(8192, 1024, "SGLang 0.5: chunked_prefill_size"),
        "trtllm": Engine(8192, 2048, "TensorRT-LLM 1.0: max_num_tokens, max_batch_size"),
    }
)
_SMALL_GPU_BYTES, _SMALL_TOKENS, _SMALL_REQUESTS = 70 * 2**30, 2048, 256


def estimated_profile(
    model: Model, gpu: Gpu, *, engine: str = "vllm", experts: ExpertSharing = ExpertSharing.TP
) -> Profile:
    """Return a profile with analytic step times for every tensor parallel degree that divides the model.

    Args:
        experts: how the GPUs of a stage share experts; nothing else where the model has none.

    Raises:
        InputError: no such engine, or a GPU about whose kernels nothing is known.
    """
    defaults, host = ENGINES.get(engine), HOSTS.get(engine)
    if defaults is None or host is None:
        rule = f"has no profile for {model.name} on {gpu.name}, and its step times cannot be estimated"
        raise InputError("--engine", rule, value=engine, hint=f"{nearest(engine, ENGINES)} or give --profile FILE")
    limits = engine_limits(defaults, gpu)
    valid = ValidRange(chunk_tokens=model.context_tokens, decode_requests=limits.requests)
    whole = experts is ExpertSharing.EP and model.experts is not None
    degrees = [tp for tp in range(1, _MOST_TP + 1) if _divides(model, tp, whole_experts=whole)]
    latency = {tp: analytic_latency(model, gpu, tp, valid_range=valid, expert_parallel=whole) for tp in degrees}
    expected = expected_error(model, gpu) + ("; experts spread over GPUs were not compared at all" if whole else "")
    return Profile(
        name="-".join([model.name, gpu.name, engine, "roofline", *_marks(model, whole_experts=whole)]),
        model=model,
        gpu=gpu,
        engine=engine,
        engine_version="estimated",
        source=", ".join(["roofline estimate", *_marks(model, whole_experts=whole)])
        + _source(gpu, defaults, RULES[engine], host),
        latency=latency,
        host=host_overhead(host, prompts=True),
        request_s=host.request_s,
        limits={
            Role.PREFILL: BatchLimits(tokens=limits.tokens, requests=limits.requests),
            Role.DECODE: BatchLimits(requests=limits.requests),
            Role.COLOCATED: limits,
        },
        handover=Handover(
            FirstToken.PREFILL,
            stalls_decode=False,
            latency_s=0.001,
            bandwidth_bytes_per_s=_LINK_SHARE * gpu.nvlink_bytes_per_s,
        ),
        p2p=point_to_point(gpu),
        preemption=Preemption.RECOMPUTE,
        kv_capacity_tokens=kv_capacities(model, gpu, engine, degrees, limits=limits),
        kv_bytes_per_gpu=usable_bytes(model, gpu, engine, limits=limits),
        block_tokens=RULES[engine].block_tokens,
        reasons={"kv": RULES[engine].source},
        saturation_tokens=_saturation_tokens(latency[degrees[0]]),
        evidence=Evidence.ROOFLINE,
        expected_error=expected,
        sha256=hashlib.sha256(repr((model, gpu, engine, whole, find_efficiency(gpu))).encode()).hexdigest(),
    )


def point_to_point(gpu: Gpu) -> PointToPoint:
    """Return what sends between pipeline stages are assumed to take; nobody timed them.

    Within a node a send starts as an all-reduce of two GPUs does and reaches the same share of the link. vLLM sends
    hidden states and the residual apart, so each of them has half of it.
    """
    efficiency = find_efficiency(gpu).all_reduce
    return PointToPoint(
        latency_s=efficiency.fixed_s + 2 * efficiency.per_gpu_s,
        bandwidth_bytes_per_s=efficiency.share * gpu.nvlink_bytes_per_s / _SENT_TENSORS,
        node_latency_s=NODE_LATENCY_S,
        node_bandwidth_bytes_per_s=NETWORK_SHARE * gpu.network_bytes_per_s / _SENT_TENSORS,
    )


def expected_error(model: Model, gpu: Gpu) -> str:
    """Return how far analytic step times may be off, in words."""
    efficiency = find_efficiency(gpu)
    if efficiency.like:
        return f"unknown: no kernels of {gpu.name} were timed, {efficiency.like}'s shares of the datasheet are taken"
    dense = model.experts is None and model.quantization is None and model.latent_attention is None
    if dense and model.kv_element_bytes == model.dtype_bytes and gpu.name in _COMPARED_GPUS:
        return _DENSE_ERROR
    errors = analytic_latency(model, gpu, 1).kernel_errors
    worst = max(errors, key=lambda kind: errors[kind])
    share = f"{100 * errors[worst]:.0f} %"
    return f"about {share} (that of its {worst}, the least certain kernels); no whole steps to compare with"


def _divides(model: Model, tp: int, *, whole_experts: bool) -> bool:
    experts = model.experts
    widths = [model.attention_heads, model.ffn_size if model.dense_layers else 0]
    if experts is not None:
        widths += [experts.experts if whole_experts else experts.ffn_size, experts.shared_ffn_size]
    kv = model.latent_attention is not None or model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return kv and not any(width % tp for width in widths)


def engine_limits(engine: Engine, gpu: Gpu) -> BatchLimits:
    """Return the limits of a step that an engine takes on a GPU unless told otherwise."""
    if gpu.memory_bytes < _SMALL_GPU_BYTES or gpu.name.startswith("a100"):
        return BatchLimits(min(engine.tokens, _SMALL_TOKENS), min(engine.requests, _SMALL_REQUESTS))
    return BatchLimits(engine.tokens, engine.requests)


def _marks(model: Model, *, whole_experts: bool) -> list[str]:
    """Return words for what is run otherwise than usual."""
    kv = [] if model.kv_dtype_bytes in {None, model.dtype_bytes} else [f"kv{8 * model.kv_element_bytes}"]
    return [*(["ep"] if whole_experts else []), *kv]


def host_overhead(host: HostConstants, *, prompts: bool) -> dict[Role, HostOverhead]:
    """Return the host work of each role's launches.

    Args:
        prompts: what a prompt takes is in a prefill launch, not in its step times.
    """
    launch = HostOverhead(step_s=host.step_s, sequence_s=host.sequence_s)
    prefill = HostOverhead(step_s=host.step_s, sequence_s=host.sequence_s + (host.prompt_s if prompts else 0.0))
    return {Role.PREFILL: prefill, Role.DECODE: launch, Role.COLOCATED: launch}


def _saturation_tokens(latency: AnalyticLatency) -> int:
    """Return Lm: the fewest prompt tokens that reach 80 % of the best rate."""
    rates = {tokens: tokens / latency.prefill_s([(tokens, 0)]) for tokens in _LM_TOKENS}
    best = max(rates.values())
    reached = [tokens for tokens, rate in rates.items() if rate >= _LM_SHARE * best]
    return reached[0]


def _source(gpu: Gpu, engine: Engine, memory: MemoryRule, host: HostConstants) -> str:
    efficiency = find_efficiency(gpu)
    like = f" ({efficiency.like}'s, for want of its own)" if efficiency.like else ""
    return (
        f": datasheet of {gpu.name} and shares of it that kernels reach{like}, fitted to "
        f"{efficiency.source}; limits: {engine.source}; memory: {memory.source}; {host.source}"
    )
