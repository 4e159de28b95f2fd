"""The analytic latency model: step times from a model's shape and a GPU's datasheet, for what nobody timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsim.contract import windowed_pairs
from dsim.errors import InputError
from dsim.gpu import NETWORK_SHARE, NODE_LATENCY_S, Gpu
from dsim.latency import Chunk, ValidRange
from dsim.model import Model, WeightDtype
from dsim.yamlfile import Section, read_yaml

_FILE = Path(__file__).parent / "catalog" / "efficiencies.yaml"
#: Bytes of an activation.
_ACTIVATION_BYTES = 2
#: Sampling: softmax, sort and draw, whatever the batch, and passes over the logits (vLLM 0.19 on RTX PRO 6000, MIT:
#: casys-kaist/LLMServingSim, 25 µs for one sequence).
_SAMPLER_S, _LOGIT_PASSES = 25e-6, 4
#: Ranks do not reach an all-reduce at the same instant, as they do where one is timed alone. Source: one decode step of
#: Llama-70B in 16 bits on four H100 takes 17.4 ms at batch 1 under vLLM 0.15; its kernels and vLLM's host work, 15.7.
_WAIT_S = 10e-6


@dataclass(frozen=True, slots=True)
class Roofline:
    """How near to the datasheet kernels of one kind come: fixed + (memory^p + compute^p)^(1/p) seconds.

    Args:
        fixed_s: of a kernel however small.
        memory: share of the memory bandwidth that long reads reach.
        compute: share of the peak FLOP/s that large products reach.
        sharpness: p; 1 adds the two times up, a large one takes the longer.
        error: mean relative error against the kernels that it was fitted to; NaN where it was fitted to none.
    """

    fixed_s: float
    memory: float
    compute: float
    sharpness: float = 1.0
    error: float = math.nan

    def time_s(self, memory_s: float, compute_s: float) -> float:
        """Seconds of one kernel that the datasheet allows `memory_s` and `compute_s`."""
        memory, compute, p = memory_s / self.memory, compute_s / self.compute, self.sharpness
        longer = max(memory, compute)
        if longer <= 0:
            return self.fixed_s
        seconds: float = self.fixed_s + longer * (1 + (min(memory, compute) / longer) ** p) ** (1 / p)
        return seconds


@dataclass(frozen=True, slots=True)
class AttentionEfficiency:
    """What attention kernels reach.

    Args:
        share: of the memory bandwidth (decode) or of the peak FLOP/s (prefill).
        padding_tokens: context (decode) or keys of each query (prefill) that blocks of work add.
    """

    fixed_s: float
    share: float
    padding_tokens: float
    error: float = math.nan


@dataclass(frozen=True, slots=True)
class AllReduceEfficiency:
    """What all-reduces reach: fixed + per GPU, and 2 (n − 1) / n of the bytes at a share of the link."""

    fixed_s: float
    per_gpu_s: float
    share: float
    error: float = math.nan


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How near to its datasheet a GPU comes, by kind of kernel.

    Args:
        gemm: by what the weights are computed in: bf16, fp8 or nvfp4.
        experts: by what the experts' weights are stored in.
        elementwise: norms, activations, rotary positions.
        like: the GPU whose kernels these are, where this one's were not timed; else empty.
        source: whose timings.
    """

    gemm: Mapping[str, Roofline]
    experts: Mapping[str, Roofline]
    decode_attention: AttentionEfficiency
    prefill_attention: AttentionEfficiency
    all_reduce: AllReduceEfficiency
    elementwise: Roofline
    like: str
    source: str


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix product of one rank: out × in weights, in `count` layers."""

    out: int
    into: int
    count: int
    dtype: str
    weight_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class AnalyticLatency:
    """Step times of a model on `tp` GPUs as the sum of its kernels' rooflines.

    Args:
        expert_parallel: whole experts on each GPU, as many on all, instead of a slice of every expert. Attention stays
            shared out by heads; tokens go to the GPUs of their experts and come back, instead of an all-reduce.
    """

    model: Model
    gpu: Gpu
    tp: int
    efficiency: Efficiency
    valid_range: ValidRange
    expert_parallel: bool = False
    _dense_s: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _head_s: dict[int, float] = field(default_factory=dict, repr=False, compare=False)
    _products: tuple[_Product, ...] = field(init=False, repr=False, compare=False)
    _decode: tuple[float, float, float] = field(init=False, repr=False, compare=False)
    _prefill: tuple[float, float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_products", tuple(self._layer_products()))
        object.__setattr__(self, "_decode", self._decode_attention())
        object.__setattr__(self, "_prefill", self._prefill_attention())

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step."""
        tokens = sum(t for t, _ in chunks)
        return self._tokens_s(tokens) + self._sequences_s(len(chunks)) + self._chunks_s(chunks)

    def decode_s(self, requests: int, context_tokens: int) -> float:
        """Seconds of a decode step."""
        return self._batch_s(requests) + self._context_s(requests, context_tokens)

    def mixed_s(self, chunks: Sequence[Chunk], requests: int, context_tokens: int) -> float:
        """Seconds of a mixed step: products over all its tokens, attention of both parts."""
        if not requests:
            return self.prefill_s(chunks)
        if not chunks:
            return self.decode_s(requests, context_tokens)
        tokens = requests + sum(t for t, _ in chunks)
        products_s = self._tokens_s(tokens) + self._sequences_s(requests + len(chunks))
        decode_s = self._decode[0] + self._decode[1] * requests + self._context_s(requests, context_tokens)
        return products_s + self._chunks_s(chunks) + decode_s

    def decode_line(self, requests: int) -> tuple[float, float] | None:
        """(a, b) of a decode step of `requests`; None with windows, beyond which context costs less."""
        if self.model.sliding_window is not None:
            return None
        return self._batch_s(requests), self._decode[2] * self.model.layers

    def decode_run_s(self, requests: int, context_tokens: int, steps: int) -> NDArray[np.float64]:
        """Seconds of each of `steps` consecutive decode steps, shape (steps,)."""
        contexts = context_tokens + requests * np.arange(steps, dtype=np.float64)
        slope_s, window = self._decode[2], self.model.sliding_window
        seen = self.model.full_attention_layers * contexts
        if window is not None:
            seen = seen + window.layers * np.minimum(contexts, requests * window.tokens)
        seconds: NDArray[np.float64] = self._batch_s(requests) + slope_s * seen
        return seconds

    @property
    def context_slope_s(self) -> float:
        """Seconds that a further context token of a decode step costs at least."""
        return self._decode[2] * self.model.full_attention_layers

    @property
    def token_pair_s(self) -> float:
        """Seconds that a query and a key, in all layers that see them, cost a prefill step at least."""
        return self._prefill[1] * self.model.full_attention_layers

    @property
    def cached_slope_s(self) -> float:
        """Seconds that a cached token costs a prefill step at least."""
        return self._prefill[2] * self.model.full_attention_layers

    def products_s(self, tokens: int) -> float:
        """Seconds of a prefill step of one prompt of so many tokens, pairs of query and key apart."""
        fixed_s, pair_s, _ = self._prefill
        padding = self.efficiency.prefill_attention.padding_tokens * tokens
        return self._tokens_s(tokens) + self._sequences_s(1) + self.model.layers * (fixed_s + pair_s * padding)

    @property
    def kernel_errors(self) -> dict[str, float]:
        """Mean relative errors of the fits to the kernels that this model runs."""
        efficiency = self.efficiency
        errors = {
            "products": max(efficiency.gemm.get(p.dtype, efficiency.gemm["bf16"]).error for p in self._products),
            "decode attention": efficiency.decode_attention.error,
            "prefill attention": efficiency.prefill_attention.error,
        }
        if self.model.experts is not None:
            errors["experts"] = self._expert_roofline.error
        if self.tp > 1:
            errors["all-reduce"] = efficiency.all_reduce.error
        return errors

    @property
    def _expert_roofline(self) -> Roofline:
        quantization, known = self.model.quantization, self.efficiency.experts
        return known.get("bf16" if quantization is None else _stored(quantization.dtype), known["bf16"])

    def _batch_s(self, requests: int) -> float:
        """Seconds of a decode step without its context."""
        fixed_s, per_request_s, _ = self._decode
        return self._tokens_s(requests) + self._sequences_s(requests) + fixed_s + per_request_s * requests

    def _context_s(self, requests: int, context_tokens: float) -> float:
        window, slope_s = self.model.sliding_window, self._decode[2]
        if window is None:
            return slope_s * (self.model.layers * context_tokens)
        seen = self.model.full_attention_layers * context_tokens
        # Contexts are taken as equal: the batch's total is all that is known.
        return slope_s * (seen + window.layers * min(context_tokens, requests * window.tokens))

    def _chunks_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of the attention of a prefill step."""
        fixed_s, pair_s, cached_s = self._prefill
        padding = self.efficiency.prefill_attention.padding_tokens
        window, full_layers = self.model.sliding_window, self.model.full_attention_layers
        seconds = fixed_s * self.model.layers
        for t, s in chunks:
            pairs = full_layers * (t * (t / 2 + s + padding))
            reread = full_layers * s
            if window is not None:
                pairs += window.layers * (windowed_pairs(t, s, window.tokens) + t * padding)
                reread += window.layers * min(s, window.tokens)
            seconds += pair_s * pairs + cached_s * reread
        return seconds

    def _tokens_s(self, tokens: int) -> float:
        """Seconds of everything but attention and the output head, for so many tokens."""
        known = self._dense_s.get(tokens)
        if known is None:
            known = self._dense_s[tokens] = self._dense(tokens)
        return known

    def _sequences_s(self, sequences: int) -> float:
        """Seconds of output head and sampling."""
        known = self._head_s.get(sequences)
        if known is None:
            model, hbm = self.model, self.gpu.hbm_bytes_per_s
            rows = math.ceil(model.vocabulary / self.tp)
            product = _Product(rows, model.hidden_size, 1, "bf16", model.dtype_bytes)
            logit_bytes = _LOGIT_PASSES * sequences * rows * _ACTIVATION_BYTES
            known = self._product_s(product, sequences) + _SAMPLER_S + logit_bytes / hbm
            known += self._all_reduce_s(sequences * rows * _ACTIVATION_BYTES)
            self._head_s[sequences] = known
        return known

    def _dense(self, tokens: int) -> float:
        model = self.model
        seconds = sum(p.count * self._product_s(p, tokens) for p in self._products)
        seconds += model.expert_layers * self._experts_s(tokens) if model.experts is not None else 0.0
        # After attention, after the MLP, and after the embedding, whose rows are shared out.
        exchanges = model.expert_layers if self.expert_parallel else 0
        reduces = 2 * model.layers + 1 - exchanges
        seconds += reduces * self._all_reduce_s(tokens * model.hidden_size * _ACTIVATION_BYTES)
        if exchanges:
            seconds += exchanges * self._exchange_s(tokens)
        return seconds + self._elementwise_s(tokens)

    def _product_s(self, product: _Product, tokens: float) -> float:
        moved = product.out * product.into * product.weight_bytes
        moved += tokens * (product.into + product.out) * _ACTIVATION_BYTES
        compute_s = 2 * product.out * product.into * tokens / _peak_flops_per_s(self.gpu, product.dtype)
        roofline = self.efficiency.gemm.get(product.dtype, self.efficiency.gemm["bf16"])
        return roofline.time_s(moved / self.gpu.hbm_bytes_per_s, compute_s)

    def _experts_s(self, tokens: int) -> float:
        """Seconds of one layer's routed experts."""
        model, experts = self.model, self.model.experts
        if experts is None:
            return 0.0
        weights = model.mlp_matrices * model.hidden_size * experts.ffn_size / self.tp
        distinct, rows = experts.distinct(tokens), float(tokens * experts.per_token)
        if self.expert_parallel and self.tp > 1:
            excess = self._excess(rows)
            rows, distinct = rows * excess, min(distinct * excess, experts.experts)
        moved = weights * distinct * model.expert_weight_bytes
        moved += rows * (2 * model.hidden_size + 3 * experts.ffn_size / self.tp) * _ACTIVATION_BYTES
        dtype = _computed_in(self.gpu, None if model.quantization is None else model.quantization.dtype)
        compute_s = 2 * weights * rows / _peak_flops_per_s(self.gpu, dtype)
        return self._expert_roofline.time_s(moved / self.gpu.hbm_bytes_per_s, compute_s)

    def _excess(self, rows: float) -> float:
        """Return how many rows more than the mean the slowest GPU has: about the largest of tp Poisson numbers."""
        return 1 + math.sqrt(2 * math.log(self.tp) * self.tp / rows)

    def _exchange_s(self, tokens: int) -> float:
        """Seconds of sending one layer's tokens to the GPUs of their experts, and the sums back.

        Each GPU has its share of the tokens and sends one once to each other GPU that has an expert of it, which are
        (n − 1)(1 − (1 − 1/n)^k) of n on average; the slowest receives as much more as it has rows more.
        """
        experts, tp, hidden = self.model.experts, self.tp, self.model.hidden_size
        if experts is None or tp == 1:
            return 0.0
        wanted, node = 1 - (1 - 1 / tp) ** experts.per_token, self._node_gpus
        copies = tokens / tp * self._excess(tokens * experts.per_token)
        dtype = _computed_in(self.gpu, None if self.model.quantization is None else self.model.quantization.dtype)
        there_bytes = 1 if dtype == "fp8" else _ACTIVATION_BYTES
        efficiency, gpu = self.efficiency.all_reduce, self.gpu
        copy_bytes = copies * wanted * hidden * (there_bytes + _ACTIVATION_BYTES)
        fixed_s = _WAIT_S + efficiency.fixed_s + efficiency.per_gpu_s * tp
        inside_s = (node - 1) * copy_bytes / (gpu.nvlink_bytes_per_s * efficiency.share)
        if node == tp:
            return 2 * fixed_s + inside_s
        # Each GPU sends to other nodes over a network card of its own, meanwhile to its own node.
        across_s = (tp - node) * copy_bytes / (gpu.network_bytes_per_s * NETWORK_SHARE)
        return 2 * (fixed_s + NODE_LATENCY_S) + max(inside_s, across_s)

    @property
    def _node_gpus(self) -> int:
        """GPUs of the instance that one node, or scale-up domain, has."""
        return min(self.tp, max(self.gpu.gpus_per_node, self.gpu.scale_up_domain_gpus))

    def _elementwise_s(self, tokens: int) -> float:
        """Seconds of norms, rotary positions and activations, all layers; quantising is in the products' times."""
        model, tp = self.model, self.tp
        latent = model.latent_attention
        queries = model.attention_heads * (model.head_dim if latent is None else latent.query_head_dim) / tp
        ffn = model.ffn_size / tp
        shared = 0.0 if model.experts is None else model.experts.shared_ffn_size / tp
        widths = model.layers * (8 * model.hidden_size + 3 * queries)
        widths += 3 * (model.dense_layers * ffn + model.expert_layers * shared)
        kernels = 4 if latent is None else 6
        kernels = kernels * model.layers + model.expert_layers
        moved_s = tokens * widths * _ACTIVATION_BYTES / self.gpu.hbm_bytes_per_s
        elementwise = self.efficiency.elementwise
        return kernels * elementwise.fixed_s + moved_s / elementwise.memory

    def _all_reduce_s(self, num_bytes: float) -> float:
        tp, efficiency = self.tp, self.efficiency.all_reduce
        if tp == 1:
            return 0.0
        gpu, node = self.gpu, self._node_gpus
        fixed_s = _WAIT_S + efficiency.fixed_s + efficiency.per_gpu_s * tp
        inside_s = 2 * (node - 1) / node * num_bytes / (gpu.nvlink_bytes_per_s * efficiency.share)
        if node == tp:
            return fixed_s + inside_s
        # Sums of a node, each GPU's part of them between nodes over a network card of its own, and back in the node.
        nodes = math.ceil(tp / node)
        across_s = 2 * (nodes - 1) / nodes * num_bytes / (node * gpu.network_bytes_per_s * NETWORK_SHARE)
        return fixed_s + 2 * NODE_LATENCY_S + inside_s + across_s

    @property
    def _matrix_dtype(self) -> WeightDtype | None:
        quantization = self.model.quantization
        return None if quantization is None or quantization.experts_only else quantization.dtype

    def _layer_products(self) -> list[_Product]:
        """Matrix products of one rank but those of routed experts and of the output head."""
        model, tp = self.model, self.tp
        hidden, layers = model.hidden_size, model.layers
        dtype, weight_bytes = _computed_in(self.gpu, self._matrix_dtype), model.matrix_weight_bytes

        def product(out: float, into: float, count: int) -> _Product:
            return _Product(math.ceil(out), math.ceil(into), count, dtype, weight_bytes)

        latent, heads = model.latent_attention, model.attention_heads / tp
        if latent is None:
            kv_heads = max(model.kv_heads / tp, 1)
            width = model.head_dim
            products = [product((heads + 2 * kv_heads) * width, hidden, layers), product(hidden, heads * width, layers)]
        else:
            queries = heads * latent.query_head_dim
            # The compressions are not shared out: each rank computes them whole.
            first = latent.kv_width + (latent.q_lora_rank or queries)
            products = [product(first, hidden, layers)]
            if latent.q_lora_rank:
                products.append(product(queries, latent.q_lora_rank, layers))
            values = heads * latent.v_head_dim
            products.append(product(heads * latent.qk_nope_head_dim + values, latent.kv_lora_rank, layers))
            products.append(product(hidden, values, layers))
        widths = [(model.ffn_size, model.dense_layers)]
        if model.experts is not None:
            widths.append((model.experts.shared_ffn_size, model.expert_layers))
            products.append(_Product(model.experts.experts, hidden, model.expert_layers, "bf16", model.dtype_bytes))
        for width, count in widths:
            if width and count:
                products.append(product((model.mlp_matrices - 1) * width / tp, hidden, count))
                products.append(product(hidden, width / tp, count))
        return products

    def _decode_attention(self) -> tuple[float, float, float]:
        """Return seconds of all layers, of a request in all layers, and of a context token in one layer."""
        model, efficiency = self.model, self.efficiency.decode_attention
        kv_bytes = model.kv_layer_bytes_per_token * model.kv_copies(self.tp) / self.tp
        slope_s = kv_bytes / (self.gpu.hbm_bytes_per_s * efficiency.share)
        latent = model.latent_attention
        if latent is not None:
            # All heads read one compressed vector: enough work for it to be compute that bounds.
            flops = 2 * model.attention_heads / self.tp * (latent.kv_width + latent.kv_lora_rank)
            share = self.efficiency.prefill_attention.share
            slope_s = max(slope_s, flops / (self.gpu.bf16_flops_per_s * share))
        return model.layers * efficiency.fixed_s, model.layers * slope_s * efficiency.padding_tokens, slope_s

    def _prefill_attention(self) -> tuple[float, float, float]:
        """Return seconds of a kernel, of a pair of query and key, and of reading a cached token's KV; one layer."""
        model, efficiency = self.model, self.efficiency.prefill_attention
        latent = model.latent_attention
        widths = 2 * model.head_dim if latent is None else latent.query_head_dim + latent.v_head_dim
        flops = 2 * model.attention_heads / self.tp * widths
        pair_s = flops / (self.gpu.bf16_flops_per_s * efficiency.share)
        kv_bytes = model.kv_layer_bytes_per_token * model.kv_copies(self.tp) / self.tp
        return (
            efficiency.fixed_s,
            pair_s,
            kv_bytes / (self.gpu.hbm_bytes_per_s * self.efficiency.decode_attention.share),
        )


def analytic_latency(
    model: Model, gpu: Gpu, tp: int, *, valid_range: ValidRange | None = None, expert_parallel: bool = False
) -> AnalyticLatency:
    """Return the analytic step times of a model on `tp` GPUs, with the efficiencies of the catalog.

    Raises:
        InputError: the GPU is one whose efficiencies nobody has stated.
    """
    valid = ValidRange(chunk_tokens=model.context_tokens) if valid_range is None else valid_range
    return AnalyticLatency(model, gpu, tp, find_efficiency(gpu), valid, expert_parallel)


def find_efficiency(gpu: Gpu) -> Efficiency:
    """Return what a GPU's kernels reach: timed ones, else those of the GPU it is like.

    Raises:
        InputError: the GPU is one whose efficiencies nobody has stated.
    """
    known = efficiencies().get(gpu.name)
    if known is None:
        hint = f"there are efficiencies for {', '.join(efficiencies())}; or give --profile FILE (docs/profiles.md)"
        raise InputError("--gpu", "has no known efficiencies to estimate step times with", value=gpu.name, hint=hint)
    return known


@functools.cache
def efficiencies() -> Mapping[str, Efficiency]:
    """Return the efficiencies of the catalog by GPU."""
    top = read_yaml(_FILE).only(("dsim_efficiencies", "timed", "like"))
    timed = {name: _efficiency(top.section("timed").section(name)) for name in top.section("timed")}
    return {**timed, **{name: _alike(top.section("like").section(name), timed) for name in top.section("like")}}


def _alike(section: Section, timed: Mapping[str, Efficiency]) -> Efficiency:
    section.only(("gpu", "all_reduce", "experts", "compute", "reason"))
    name = section.text("gpu")
    other, factor = timed[name], section.number("compute", 1.0, above=0, at_most=1)

    def slower(rooflines: Mapping[str, Roofline]) -> dict[str, Roofline]:
        return {dtype: replace(r, compute=factor * r.compute) for dtype, r in rooflines.items()}

    return replace(
        other,
        gemm=slower(other.gemm),
        experts=slower({**other.experts, **timed[section.text("experts", name)].experts}),
        prefill_attention=replace(other.prefill_attention, share=factor * other.prefill_attention.share),
        all_reduce=timed[section.text("all_reduce", name)].all_reduce,
        like=name,
    )


def _efficiency(section: Section) -> Efficiency:
    kinds = ("gemm", "experts", "decode_attention", "prefill_attention", "all_reduce", "elementwise", "source")
    section.only(kinds)

    def rooflines(key: str) -> dict[str, Roofline]:
        return {dtype: _roofline(section.section(key).section(dtype)) for dtype in section.section(key)}

    def attention(key: str) -> AttentionEfficiency:
        entry = section.section(key).only(("fixed_s", "share", "padding_tokens", "error"))
        return AttentionEfficiency(*(entry.number(name) for name in ("fixed_s", "share", "padding_tokens", "error")))

    reduce = section.section("all_reduce").only(("fixed_s", "per_gpu_s", "share", "error"))
    return Efficiency(
        gemm=rooflines("gemm"),
        experts=rooflines("experts"),
        decode_attention=attention("decode_attention"),
        prefill_attention=attention("prefill_attention"),
        all_reduce=AllReduceEfficiency(*(reduce.number(k) for k in ("fixed_s", "per_gpu_s", "share", "error"))),
        elementwise=_roofline(section.section("elementwise")),
        like="",
        source=section.text("source"),
    )


def _roofline(section: Section) -> Roofline:
    section.only(("fixed_s", "memory", "compute", "sharpness", "error"))
    return Roofline(
        fixed_s=section.number("fixed_s", at_least=0),
        memory=section.number("memory", above=0, at_most=1),
        compute=section.number("compute", 1.0, above=0, at_most=1),
        sharpness=section.number("sharpness", 1.0, at_least=1),
        error=section.number("error") if "error" in section else math.nan,
    )


def _stored(dtype: WeightDtype) -> str:
    return "fp8" if dtype is WeightDtype.INT8 else dtype.value


def _computed_in(gpu: Gpu, dtype: WeightDtype | None) -> str:
    """Return what matrices stored so are multiplied in: 8 bits where the GPU can, 4 bits only as NVFP4, else 16."""
    if dtype in {WeightDtype.FP8, WeightDtype.INT8} and gpu.fp8_flops_per_s is not None:
        return "fp8"
    if dtype is WeightDtype.NVFP4 and gpu.fp4_flops_per_s is not None:
        return "nvfp4"
    return "bf16"


def _peak_flops_per_s(gpu: Gpu, dtype: str) -> float:
    peaks = {"fp8": gpu.fp8_flops_per_s, "nvfp4": gpu.fp4_flops_per_s}
    return peaks.get(dtype) or gpu.bf16_flops_per_s
