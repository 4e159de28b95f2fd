"""The contract of every latency model: what step times can never do, checked against shape and datasheet."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dsim.gpu import Gpu
from dsim.latency import Chunk, LatencyModel
from dsim.model import Model, WeightDtype

#: Where a valid range has no end, the checks need one.
_REQUESTS = 1024
#: Relative slack for rounding.
_SLACK = 1e-9


class ViolationKind(enum.Enum):
    """A rule that a latency model breaks."""

    NOT_POSITIVE = "not-positive"
    PREFILL_FALLS = "prefill-falls"
    DECODE_FALLS = "decode-falls"
    BELOW_BOUND = "below-bound"
    INSENSITIVE = "insensitive"


@dataclass(frozen=True, slots=True)
class Violation:
    """The worst place at which one latency model breaks one rule.

    Args:
        share: by how much, as a share of the step time that would keep the rule.
        detail: the place and the amount in words.
        phase: `prefill` or `decode`.
    """

    tp: int
    kind: ViolationKind
    share: float
    detail: str
    phase: str

    def __str__(self) -> str:
        return f"tp {self.tp}: {self.detail}"


def find_violations(latency: LatencyModel, *, model: Model, gpu: Gpu, tp: int) -> list[Violation]:
    """Return the worst violation of each kind within the valid range; empty where the contract holds.

    Step times must be positive, not fall when tokens, context or requests are added, depend on each of these, and never
    be below what the datasheet's FLOP/s and memory bandwidth allow. Tokens and contexts are probed on a grid that
    includes the ends of the range, decode batches one by one.
    """
    worst: dict[ViolationKind, Violation] = {}
    probes = {
        "prefill": [*_prefill(latency, model, gpu, tp), *_insensitive_prefill(latency, model)],
        "decode": [*_decode(latency, model, gpu, tp), *_insensitive_decode(latency, model)],
    }
    for phase, found in probes.items():
        for kind, share, detail in found:
            if share > (worst[kind].share if kind in worst else _SLACK):
                worst[kind] = Violation(tp, kind, share, detail, phase)
    return [worst[kind] for kind in ViolationKind if kind in worst]


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds below which a step cannot be: its FLOPs, and its reads from memory, split over the GPUs without loss."""

    compute_s: float
    memory_s: float

    @property
    def step_s(self) -> float:
        """The larger of the two."""
        return max(self.compute_s, self.memory_s)


def prefill_bound(chunks: Sequence[Chunk], *, model: Model, gpu: Gpu, tp: int) -> Bound:
    """Return what no prefill step can be below: FLOPs and weight reads of the layers.

    Of experts only those that one token needs are taken as read: all tokens may choose the same.
    """
    tokens = sum(t for t, _ in chunks)
    # QK^T and PV, each 2 FLOPs per query, key and channel; causal, so half of a chunk's own square.
    pairs = model.full_attention_layers * sum(t * t / 2 + t * s for t, s in chunks)
    if model.sliding_window is not None:
        window = model.sliding_window
        pairs += window.layers * sum(windowed_pairs(t, s, window.tokens) for t, s in chunks)
    latent = model.latent_attention
    widths = 2 * model.head_dim if latent is None else latent.query_head_dim + latent.v_head_dim
    attention = 2 * model.attention_heads * widths * pairs
    compute_s = (2 * model.active_layer_matrix_parameters * tokens + attention) / _flops_per_s(model, gpu)
    memory_s = _active_layer_bytes(model) / gpu.hbm_bytes_per_s
    return Bound(compute_s / tp, memory_s / tp)


def decode_bound(requests: int, context_tokens: int, *, model: Model, gpu: Gpu, tp: int) -> Bound:
    """Return what no decode step can be below: FLOPs, and reads of layers, output head and KV."""
    head = model.vocabulary * model.hidden_size
    compute_s = 2 * (model.active_layer_matrix_parameters + head) * requests / _flops_per_s(model, gpu)
    weight_bytes = _active_layer_bytes(model) + head * model.dtype_bytes
    contexts = model.full_attention_layers * context_tokens
    if model.sliding_window is not None:
        # One long context among short ones: the fewest tokens within windows.
        contexts += model.sliding_window.layers * min(context_tokens, model.sliding_window.tokens)
    memory_s = (weight_bytes + contexts * model.kv_layer_bytes_per_token) / gpu.hbm_bytes_per_s
    return Bound(compute_s / tp, memory_s / tp)


def prefill_bound_s(chunks: Sequence[Chunk], *, model: Model, gpu: Gpu, tp: int) -> float:
    """Seconds of `prefill_bound`."""
    return prefill_bound(chunks, model=model, gpu=gpu, tp=tp).step_s


def decode_bound_s(requests: int, context_tokens: int, *, model: Model, gpu: Gpu, tp: int) -> float:
    """Seconds of `decode_bound`."""
    return decode_bound(requests, context_tokens, model=model, gpu=gpu, tp=tp).step_s


def windowed_pairs(tokens: int, cached: int, window: int) -> float:
    """Return queries times keys of a chunk after `cached` tokens in which a query sees the last `window` keys at most.

    >>> windowed_pairs(4, 0, 100), windowed_pairs(4, 100, 10), windowed_pairs(10, 0, 4)
    (8.0, 40.0, 32.0)
    """
    growing = min(max(window - cached, 0), tokens)
    return growing * (cached + growing / 2) + (tokens - growing) * float(window)


def _active_layer_bytes(model: Model) -> float:
    return model.layer_matrix_bytes(0 if model.experts is None else model.experts.per_token)


def _flops_per_s(model: Model, gpu: Gpu) -> float:
    """FLOP/s of the fastest units that can multiply weights stored so."""
    bits = 8 if model.dtype_bytes == 1 else 16
    if model.quantization is not None:
        bits = 8 if model.quantization.dtype in {WeightDtype.FP8, WeightDtype.INT8} else 4
    rates = [gpu.bf16_flops_per_s]
    rates += [gpu.fp8_flops_per_s] if bits <= 8 and gpu.fp8_flops_per_s is not None else []
    rates += [gpu.fp4_flops_per_s] if bits == 4 and gpu.fp4_flops_per_s is not None else []
    return max(rates)


def _grid(end: int) -> list[int]:
    """1, 2, 4, ... and the end itself."""
    return sorted({*(2**i for i in range(end.bit_length())), end})


def _prefill(latency: LatencyModel, model: Model, gpu: Gpu, tp: int) -> Iterator[tuple[ViolationKind, float, str]]:
    valid = latency.valid_range
    longest = int(min(valid.chunk_tokens, model.context_tokens))
    grid = _grid(longest)
    most = min(valid.prefill_tokens, 16 * longest)
    batches = [[(tokens, 0)] for tokens in grid if tokens <= most]
    # The longest chunk is computed against ever more cached tokens only as far as the context reaches.
    batches += [[(longest - cached, cached)] for cached in grid if cached < longest and longest - cached <= most]
    batches += [[(longest, 0)] * n for n in range(2, int(most // longest) + 1)]
    for batch in batches:
        step_s = latency.prefill_s(batch)
        place = f"{len(batch)} x {batch[0][0]} tokens" + (f" after {batch[0][1]} cached" if batch[0][1] else "")
        if not step_s > 0:
            yield ViolationKind.NOT_POSITIVE, math.inf, f"prefill of {place} takes {step_s:g} s"
            continue
        bound_s = prefill_bound_s(batch, model=model, gpu=gpu, tp=tp)
        yield ViolationKind.BELOW_BOUND, 1 - step_s / bound_s, _below(f"prefill of {place}", step_s, bound_s, gpu)
    orders = [[(latency.prefill_s([(t, 0)]), f"from {t} tokens on") for t in grid if t <= most]]
    orders += [[(latency.prefill_s([(1, s)]), f"of 1 token from {s} cached ones on") for s in grid if s < longest]]
    orders += [
        [(latency.prefill_s(b), f"from {len(b)} x {longest} tokens on") for b in batches if b[0] == (longest, 0)]
    ]
    for order in orders:
        for (before_s, place), (after_s, _) in pairwise(order):
            if before_s > 0:
                share = 1 - after_s / before_s
                yield ViolationKind.PREFILL_FALLS, share, f"prefill falls by {share:.1%} {place}"


def _decode(latency: LatencyModel, model: Model, gpu: Gpu, tp: int) -> Iterator[tuple[ViolationKind, float, str]]:
    valid = latency.valid_range
    longest = int(min(valid.context_tokens, model.context_tokens))
    most = int(min(valid.decode_requests, _REQUESTS))
    for context in _grid(longest):
        before_s = 0.0
        for requests in range(1, most + 1):
            total = requests * context
            if total > valid.context_tokens:
                break
            step_s = latency.decode_s(requests, total)
            place = f"at {context} context tokens a request"
            if not step_s > 0:
                yield ViolationKind.NOT_POSITIVE, math.inf, f"decode of {requests} {place} takes {step_s:g} s"
                break
            if step_s < before_s:
                share = 1 - step_s / before_s
                detail = f"decode falls by {share:.1%} where the batch passes {requests - 1} -> {requests} {place}"
                yield ViolationKind.DECODE_FALLS, share, detail
            before_s = step_s
            bound_s = decode_bound_s(requests, total, model=model, gpu=gpu, tp=tp)
            if step_s < bound_s:
                detail = _below(f"decode of {requests} {place}", step_s, bound_s, gpu)
                yield ViolationKind.BELOW_BOUND, 1 - step_s / bound_s, detail
    for requests in _grid(most):
        run = [(latency.decode_s(requests, requests * c), c) for c in _grid(longest)]
        for (before_s, context), (after_s, _) in pairwise(run):
            if 0 < after_s < before_s:
                share = 1 - after_s / before_s
                detail = f"decode of {requests} falls by {share:.1%} from {context} context tokens a request on"
                yield ViolationKind.DECODE_FALLS, share, detail


def _insensitive_prefill(latency: LatencyModel, model: Model) -> Iterator[tuple[ViolationKind, float, str]]:
    """Yield that tokens change nothing between 1 and their most."""
    valid = latency.valid_range
    longest = int(min(valid.chunk_tokens, valid.prefill_tokens, model.context_tokens))
    if longest > 1 and latency.prefill_s([(1, 0)]) == latency.prefill_s([(longest, 0)]):
        yield ViolationKind.INSENSITIVE, 1.0, f"prefill takes the same for 1 and for {longest} tokens"


def _insensitive_decode(latency: LatencyModel, model: Model) -> Iterator[tuple[ViolationKind, float, str]]:
    """Yield which of requests and context change nothing between 1 and their most."""
    valid = latency.valid_range
    most = int(min(valid.decode_requests, valid.context_tokens, _REQUESTS))
    if most > 1 and latency.decode_s(1, 1) == latency.decode_s(most, most):
        yield ViolationKind.INSENSITIVE, 1.0, f"decode takes the same for 1 and for {most} requests"
    context = int(min(valid.context_tokens, model.context_tokens))
    if context > 1 and latency.decode_s(1, 1) == latency.decode_s(1, context):
        yield ViolationKind.INSENSITIVE, 1.0, f"decode takes the same for 1 and for {context} context tokens"


def _below(step: str, step_s: float, bound_s: float, gpu: Gpu) -> str:
    return f"{step} takes {step_s * 1e3:.3g} ms, below the {bound_s * 1e3:.3g} ms that {gpu.name}'s datasheet allows"
