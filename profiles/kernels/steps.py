"""Step times of a model composed from kernel times: layers x (products + attention + all-reduces + traffic) + head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import Chunk
from profiles.kernels.package import KernelPackage
from profiles.kernels.tables import (
    AllReduce,
    Attention,
    Curve,
    ExpertSizes,
    Gemms,
    Heads,
    Source,
    find_all_reduce,
    find_attention,
    find_experts,
    find_gemms,
)
from profiles.shapes import Rank, Shape

#: A small kernel takes at least this: norms, rotary embeddings and activations of 1 token take 1.8 to 2.9 µs.
#: Source: one-layer kernel times of Llama-3.1-8B on an RTX PRO 6000 (casys-kaist/LLMServingSim, MIT).
SMALL_KERNEL_S: Final = 2e-6
#: Share of the memory's rate that element-wise kernels reach.
TRAFFIC_SHARE: Final = 0.8
#: Ranks do not reach an all-reduce at the same instant, as they do where one is timed alone.
#: Source: Llama-3.1-70B in 16 bits on 4 H100 under vLLM 0.15 takes 17.4 ms a step at batch 1, its kernels 14.9 ms and
#: the host work of vLLM 0.2 ms; it has 161 all-reduces.
WAIT_S: Final = 14e-6
#: No kernel reads weights or KV faster than at this share of the memory's rate, which the best of them reach: timed
#: alone again and again, it finds in the L2 cache what a step has to fetch (an L40S's holds a whole layer's).
STREAM_SHARE: Final = 0.93
ALL_REDUCE: Final = "all-reduce"
#: Products timed up to so many tokens will do: beyond, they take time in proportion.
_PRODUCT_TOKENS = 8192
#: Engines capture graphs up to about this many tokens of a step.
_CAPTURED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Part:
    """What one kind of kernel takes of a step."""

    name: str
    seconds: float


class KernelSteps:
    """Kernel times of whole steps of one model at one degree; no host work.

    Args:
        gemms: products of weights and activations.
        experts: times of the routed experts of a layer by tokens, where the model has any.
    """

    def __init__(
        self,
        shape: Shape,
        gpu: Gpu,
        tp: int,
        *,
        gemms: Gemms,
        prefill: Attention,
        decode: Attention,
        all_reduce: AllReduce | None,
        experts: Curve | None = None,
    ) -> None:
        model, rank = shape.model, shape.rank(tp)
        self.model = model
        self.tp = tp
        self.rank = rank
        self._gemms = gemms
        self._prefill = prefill
        self._decode = decode
        self._all_reduce = all_reduce
        self._experts = experts
        self._bytes_per_s = TRAFFIC_SHARE * gpu.hbm_bytes_per_s
        self._stream_bytes_per_s = STREAM_SHARE * gpu.hbm_bytes_per_s
        self._kv_bytes = 2 * rank.kv_heads * model.head_dim * model.dtype_bytes
        h = model.hidden_size
        self._products = [*_attention_products(shape, rank)]
        self._inner = rank.shared_ffn_size if model.experts is not None else rank.ffn_size
        if self._inner:
            self._products += [((2 if model.gated_mlp else 1) * self._inner, h), (h, self._inner)]
        if model.experts is not None:
            self._products.append((model.experts.experts, h))
        # What element-wise kernels read and write of a token in a layer, bytes: norms with their residuals twice,
        # rotary embedding, KV, activation, norms of heads, choice of experts.
        heads = (rank.heads + rank.kv_heads) * model.head_dim
        moved = [4 * h, 4 * h, 2 * heads, 4 * rank.kv_heads * model.head_dim]
        moved += [(3 if model.gated_mlp else 2) * self._inner] if self._inner else []
        moved += [2 * heads] if shape.qk_norm else []
        moved += [2 * model.experts.experts] if model.experts is not None else []
        self._moved_bytes = [elements * model.dtype_bytes for elements in moved]

    def prefill_s(self, chunks: Sequence[Chunk]) -> float:
        """Seconds of a prefill step over equal `chunks`."""
        return sum(part.seconds for part in self.prefill_parts(chunks))

    def decode_s(self, requests: int, context_tokens: float) -> float:
        """Seconds of a decode step of `requests` with `context_tokens` in total."""
        return sum(part.seconds for part in self.decode_parts(requests, context_tokens))

    def prefill_parts(self, chunks: Sequence[Chunk]) -> list[Part]:
        """Return what each kind of kernel takes of a prefill step over equal `chunks`."""
        tokens = sum(t for t, _ in chunks)
        (each, cached), n = chunks[0], len(chunks)
        if any(chunk != chunks[0] for chunk in chunks):
            attention = sum(self._chunk_s(1, t, s) for t, s in chunks)
        else:
            attention = self._chunk_s(n, each, cached)
        return self._parts(tokens, n, attention)

    def decode_parts(self, requests: int, context_tokens: float) -> list[Part]:
        """Return what each kind of kernel takes of a decode step."""
        attention_s = self._decode.seconds(requests, context_tokens / requests)
        attention_s = max(attention_s, context_tokens * self._kv_bytes / self._stream_bytes_per_s)
        return self._parts(requests, requests, attention_s)

    def _product_s(self, tokens: int, n: int, k: int) -> float:
        """Seconds of a product with n x k weights."""
        weights_s = n * k * self.model.dtype_bytes / self._stream_bytes_per_s
        return max(self._gemms.seconds(tokens, n, k), weights_s)

    def _chunk_s(self, n: int, tokens: int, cached: int) -> float:
        """Seconds of one layer's attention of `n` chunks; nobody timed chunks after cached tokens.

        t tokens after s cached ones are the work of s + t tokens without that of s; reading the cached KV is added.
        """
        whole = self._prefill.seconds(n, tokens + cached)
        if not cached:
            return whole
        added = whole - self._prefill.seconds(n, cached)
        alone = self._prefill.seconds(n, tokens)
        return max(added, alone) + n * cached * self._kv_bytes / self._bytes_per_s

    def _parts(self, tokens: int, sequences: int, attention_s: float) -> list[Part]:
        layers, model = self.model.layers, self.model
        gemms = sum(self._product_s(tokens, n, k) for n, k in self._products)
        parts = [
            Part("products", layers * gemms),
            Part("attention", layers * attention_s),
            Part("element-wise", layers * self._small_s(tokens)),
            Part("head", self._product_s(sequences, self.rank.vocabulary, model.hidden_size)),
        ]
        if self._experts is not None:
            parts.append(Part("experts", model.expert_layers * self._experts.at(tokens)))
        if self._all_reduce is not None:
            # Two a layer, and one for the vocabulary-parallel embedding.
            elements = tokens * model.hidden_size
            captured = tokens <= _CAPTURED_TOKENS
            times = 2 * layers + 1
            parts.append(Part(ALL_REDUCE, times * (self._all_reduce.seconds(elements, captured=captured) + WAIT_S)))
        return parts

    def _small_s(self, tokens: int) -> float:
        """Seconds of a layer's element-wise kernels."""
        return sum(max(SMALL_KERNEL_S, each * tokens / self._bytes_per_s) for each in self._moved_bytes)


def _attention_products(shape: Shape, rank: Rank) -> list[tuple[int, int]]:
    """Return n and k of a layer's products around attention."""
    model = shape.model
    q, kv = rank.heads * model.head_dim, rank.kv_heads * model.head_dim
    return [(q + 2 * kv, model.hidden_size), (model.hidden_size, q)]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Whose kernel times make up a model's steps at one degree, by kind of kernel."""

    sources: Mapping[str, Source]

    def __str__(self) -> str:
        return "; ".join(f"{name} {source.kernels}" for name, source in self.sources.items())

    @property
    def tables(self) -> list[str]:
        """Paths and digests, each once."""
        return sorted({source.table for source in self.sources.values()})


def find_steps(package: KernelPackage, engine: str, shape: Shape, gpu: Gpu, tp: int) -> tuple[KernelSteps, Kernels]:
    """Return step times of a model at a degree, and whose kernels they are.

    Raises:
        InputError: the degree does not divide the model, or no engine has some kernel of it.
    """
    model, rank = shape.model, shape.rank(tp)
    if model.dtype_bytes != 2 or model.quantization is not None or model.kv_element_bytes != 2:
        raise InputError("--model", "is not in 16 bits, and only such kernels are composed", value=model.name)
    if model.experts is not None and model.dense_layers:
        raise InputError("--model", "has layers of two kinds, which are not composed", value=model.name)
    heads = Heads(rank.heads, rank.kv_heads, model.head_dim)
    gemms = find_gemms(package, engine, dtype="bfloat16", tokens=_PRODUCT_TOKENS)
    prefill = find_attention(package, engine, decode=False, heads=heads)
    decode = find_attention(package, engine, decode=True, heads=heads)
    all_reduce = find_all_reduce(package, engine, tp) if tp > 1 else None
    sources = {"products": gemms.source, "prefill attention": prefill.source, "decode attention": decode.source}
    if all_reduce is not None:
        sources[ALL_REDUCE] = all_reduce.source
    experts = None
    if model.experts is not None:
        e = model.experts
        wanted = ExpertSizes(model.hidden_size, e.ffn_size, e.per_token, e.experts, tp)
        experts, sources["experts"] = find_experts(package, engine, wanted, dtype="bfloat16")
    steps = KernelSteps(
        shape, gpu, tp, gemms=gemms, prefill=prefill, decode=decode, all_reduce=all_reduce, experts=experts
    )
    return steps, Kernels(sources)
