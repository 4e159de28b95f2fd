"""One rank's share of a transformer with random weights: layers, embedding and head, and a step through them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everybody writes it

from dsim.model import Experts
from profiles.grid import BLOCK_TOKENS, computed_tokens, decoding_requests
from profiles.rows import Point
from profiles.shapes import Rank, Shape, active_experts

#: torch is untyped where it is not installed.
Tensor = Any
Dtype = Any

_EPSILON = 1e-5
#: Standard deviation of weights: activations stay finite through any number of layers, and numbers look like real ones.
_SCALE = 0.02
#: Numbers that are drawn of a tensor, a prime, so that its rows differ; the rest are these again.
_DRAWN = 65_537


@dataclass(slots=True)
class Layer:
    """Weights of one layer on one rank; matrices are (out, in), and None where the model has no such."""

    norms: list[Tensor]
    norm_biases: list[Tensor] | None
    qk_norms: list[Tensor] | None
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    up: Tensor | None
    up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    router: Tensor | None
    expert_up: Tensor | None
    expert_down: Tensor | None


@dataclass(slots=True)
class Routing:
    """Which expert computes which token, drawn evenly.

    Args:
        experts: those that compute any.
        tokens: rows of the step for each expert one after the other, (experts * tokens per expert,).
        weights: one per such row, (experts * tokens per expert, 1).
    """

    experts: int
    tokens: Tensor
    weights: Tensor


@dataclass(slots=True)
class Step:
    """The inputs of one step: prompts first, then decoding requests, in rows of one token each.

    Args:
        ids: token ids, (tokens,).
        hidden: activations between layers, (tokens, hidden).
        last: rows whose next token is asked for, (requests,).
        cos, sin: of rotary positions, (tokens, 1, head_dim); the first half of `sin` is negated.
        prompt_kv, decode_kv: K and V per layer copy, (2, requests, kv_heads, context, head_dim); None where unused.
        mask: which keys a prompt's tokens see, where some of it was cached.
    """

    point: Point
    ids: Tensor
    positions: Tensor
    hidden: Tensor
    last: Tensor
    cos: Tensor
    sin: Tensor
    prompt_kv: list[Tensor]
    decode_kv: list[Tensor]
    mask: Tensor | None
    routing: Routing | None


class RankModel:
    """One tensor parallel rank: a few copies of its layer, its embedding and its head.

    Layers are copies with their own weights and KV cache, run one after the other, so that a layer finds neither in the
    caches that its predecessor filled. All-reduces are no part of it.

    Args:
        copies: layers that are built, at most those of the model.
    """

    def __init__(self, shape: Shape, tp: int, *, dtype: Dtype, device: str, copies: int) -> None:
        self.shape, self.rank = shape, shape.rank(tp)
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device=device).manual_seed(0)
        self.layers = [self._layer() for _ in range(copies)]
        model = shape.model
        self._embedding = self._weight(self.rank.vocabulary, model.hidden_size)
        self._head = self._embedding if model.tied_embeddings else self._weight(self.rank.vocabulary, model.hidden_size)
        self._positions = self._weight(model.context_tokens + 2, model.hidden_size) if model.learned_positions else None
        self._final_norm = torch.ones(model.hidden_size, dtype=dtype, device=device)
        self._final_norm_bias = torch.zeros_like(self._final_norm) if model.biases else None
        #: Grouped queries go to the attention kernel as they are; else keys and values are expanded first.
        self.groups_natively = True

    def step(self, point: Point, *, copies: int) -> Step:
        """Return inputs for the point; each of the first `copies` layers gets its own KV cache."""
        model = self.shape.model
        tokens, decoding = computed_tokens(point), decoding_requests(point)
        prompts = point.requests if point.prompt_tokens else 0
        prompt_context = point.prompt_tokens + point.cached_tokens
        context = int(point.context_tokens)
        starts = torch.arange(point.cached_tokens, prompt_context, device=self._device).repeat(prompts)
        decode_positions = torch.full((decoding,), max(context - 1, 0), device=self._device)
        positions = torch.cat([starts, decode_positions])
        ends = torch.arange(1, prompts + 1, device=self._device) * point.prompt_tokens - 1
        last = torch.cat([ends, torch.arange(tokens - decoding, tokens, device=self._device)])
        cos, sin = self._rotary(positions)
        return Step(
            point=point,
            ids=torch.randint(self.rank.vocabulary, (tokens,), generator=self._generator, device=self._device),
            positions=positions + 2,
            hidden=self._random(tokens, model.hidden_size),
            last=last,
            cos=cos,
            sin=sin,
            prompt_kv=[self._cache(prompts, prompt_context) for _ in range(copies if prompts else 0)],
            decode_kv=[self._cache(decoding, context) for _ in range(copies if decoding else 0)],
            mask=self._mask(point) if prompts and point.cached_tokens and point.prompt_tokens > 1 else None,
            routing=None if self.shape.experts is None else self._routing(self.shape.experts, tokens),
        )

    def run_layers(self, step: Step, copies: int) -> Tensor:
        """Return what the first `copies` layers make of the step's activations, (tokens, hidden)."""
        hidden = step.hidden
        for number in range(copies):
            hidden = self._run_layer(self.layers[number], step, number, hidden)
        return hidden

    def run_ends(self, step: Step) -> Tensor:
        """Look up the embedding, normalise the last tokens and return their logits, (requests, vocabulary share)."""
        hidden = F.embedding(step.ids, self._embedding)
        if self._positions is not None:
            hidden = hidden + F.embedding(step.positions, self._positions)
        rows = self._norm(hidden.index_select(0, step.last), self._final_norm, self._final_norm_bias)
        return F.linear(rows, self._head)

    def _run_layer(self, layer: Layer, step: Step, number: int, hidden: Tensor) -> Tensor:
        biases = [None, None] if layer.norm_biases is None else layer.norm_biases
        x = self._norm(hidden, layer.norms[0], biases[0])
        hidden = hidden + F.linear(self._attention(layer, step, number, x), layer.out, layer.out_bias)
        x = self._norm(hidden, layer.norms[1], biases[1])
        return hidden + self._mlp(layer, step, x)

    def _attention(self, layer: Layer, step: Step, number: int, x: Tensor) -> Tensor:
        rank, point, head_dim = self.rank, step.point, self.shape.model.head_dim
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, rank.heads + 2 * rank.kv_heads, head_dim)
        qk, v = heads[:, : rank.heads + rank.kv_heads], heads[:, rank.heads + rank.kv_heads :]
        if layer.qk_norms is not None:
            q, k = (
                self._norm(part, weight, None)
                for part, weight in zip((qk[:, : rank.heads], qk[:, rank.heads :]), layer.qk_norms, strict=True)
            )
            qk = torch.cat([q, k], dim=1)
        if not self.shape.model.learned_positions:
            qk = torch.addcmul(qk * step.cos, qk.roll(head_dim // 2, -1), step.sin)
        q, k = qk[:, : rank.heads], qk[:, rank.heads :]
        split = point.requests * point.prompt_tokens
        parts = []
        if split:
            parts.append(self._prompts(step, number, q[:split], k[:split], v[:split]))
        if decoding_requests(point):
            parts.append(self._decodes(step, number, q[split:], k[split:], v[split:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prompts(self, step: Step, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        point = step.point
        cached, end = point.cached_tokens, point.cached_tokens + point.prompt_tokens

        def batched(x: Tensor) -> Tensor:
            return x.view(point.requests, point.prompt_tokens, x.shape[1], x.shape[2]).transpose(1, 2)

        q, k, v = batched(q), batched(k), batched(v)
        cache = step.prompt_kv[number]
        cache[0, :, :, cached:end].copy_(k)
        cache[1, :, :, cached:end].copy_(v)
        if cached:
            k, v = cache[0, :, :, :end], cache[1, :, :, :end]
        grouped = self.rank.heads != self.rank.kv_heads
        if grouped and not self.groups_natively:
            times = self.rank.heads // self.rank.kv_heads
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
            grouped = False
        is_causal = not cached and point.prompt_tokens > 1
        more = {"enable_gqa": True} if grouped else {}
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=step.mask, is_causal=is_causal, **more)
        return out.transpose(1, 2).reshape(point.requests * point.prompt_tokens, -1)

    def _decodes(self, step: Step, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with one query per request; a group's queries share their KV head's keys as rows of one matrix."""
        context, rank = int(step.point.context_tokens), self.rank
        cache = step.decode_kv[number]
        cache[0, :, :, context - 1].copy_(k)
        cache[1, :, :, context - 1].copy_(v)
        q = q.reshape(q.shape[0], rank.kv_heads, rank.heads // rank.kv_heads, q.shape[2])
        out = F.scaled_dot_product_attention(q, cache[0, :, :, :context], cache[1, :, :, :context])
        return out.reshape(q.shape[0], -1)

    def _mlp(self, layer: Layer, step: Step, x: Tensor) -> Tensor:
        out = None
        if layer.up is not None:
            up = F.linear(x, layer.up, layer.up_bias)
            out = F.linear(self._activated(up), layer.down, layer.down_bias)
        if layer.expert_up is None or layer.expert_down is None or step.routing is None:
            return out
        # Each token's scores, as the router has them; the assignment itself is drawn beforehand, evenly.
        scores, _ = torch.topk(torch.softmax(F.linear(x, layer.router), -1), self._per_token, dim=-1)
        routing = step.routing
        chosen = x.index_select(0, routing.tokens).view(routing.experts, -1, x.shape[1])
        up = torch.bmm(chosen, layer.expert_up[: routing.experts].transpose(1, 2))
        down = torch.bmm(self._activated(up), layer.expert_down[: routing.experts].transpose(1, 2))
        weighted = down.view(-1, x.shape[1]) * (routing.weights * scores[0, 0])
        base = torch.zeros_like(x) if out is None else out
        return base.index_add_(0, routing.tokens, weighted)

    @property
    def _per_token(self) -> int:
        return 1 if self.shape.experts is None else self.shape.experts.per_token

    def _activated(self, up: Tensor) -> Tensor:
        if not self.shape.model.gated_mlp:
            return F.relu(up)
        half = up.shape[-1] // 2
        return F.silu(up[..., :half]) * up[..., half:]

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            return F.layer_norm(x, (x.shape[-1],), weight, bias, _EPSILON)
        return F.rms_norm(x, (x.shape[-1],), weight, _EPSILON)

    def _layer(self) -> Layer:
        model, rank, experts = self.shape.model, self.rank, self.shape.experts
        hidden, head_dim = model.hidden_size, model.head_dim
        qkv, width = (rank.heads + 2 * rank.kv_heads) * head_dim, self._mlp_width(rank, experts)
        gate = 2 if model.gated_mlp else 1

        def ones(size: int) -> Tensor:
            return torch.ones(size, dtype=self._dtype, device=self._device)

        def bias(size: int) -> Tensor | None:
            return torch.zeros(size, dtype=self._dtype, device=self._device) if model.biases else None

        return Layer(
            norms=[ones(hidden), ones(hidden)],
            norm_biases=[torch.zeros_like(ones(hidden)), torch.zeros_like(ones(hidden))] if model.biases else None,
            qk_norms=[ones(head_dim), ones(head_dim)] if self.shape.qk_norm else None,
            qkv=self._weight(qkv, hidden),
            qkv_bias=bias(qkv),
            out=self._weight(hidden, rank.heads * head_dim),
            out_bias=bias(hidden),
            up=self._weight(gate * width, hidden) if width else None,
            up_bias=bias(gate * width) if width else None,
            down=self._weight(hidden, width) if width else None,
            down_bias=bias(hidden) if width else None,
            router=self._weight(experts.experts, hidden) if experts else None,
            expert_up=self._weight(experts.experts, gate * rank.expert_ffn_size, hidden) if experts else None,
            expert_down=self._weight(experts.experts, hidden, rank.expert_ffn_size) if experts else None,
        )

    @staticmethod
    def _mlp_width(rank: Rank, experts: Experts | None) -> int:
        return rank.ffn_size if experts is None else rank.shared_ffn_size

    def _routing(self, experts: Experts, tokens: int) -> Routing:
        active = active_experts(experts, tokens)
        each = math.ceil(tokens * experts.per_token / active)
        indices = torch.arange(active * each, device=self._device) % tokens
        shuffled = indices[torch.randperm(active * each, generator=self._generator, device=self._device)]
        weights = torch.full((active * each, 1), 1.0, dtype=self._dtype, device=self._device)
        return Routing(active, shuffled, weights)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = self.shape.model.head_dim // 2
        inverse = 1e4 ** (-torch.arange(half, device=self._device, dtype=torch.float32) / half)
        angles = positions.to(torch.float32)[:, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat([cos, cos], -1).to(self._dtype)[:, None],
            torch.cat([-sin, sin], -1).to(self._dtype)[:, None],
        )

    def _mask(self, point: Point) -> Tensor:
        end = point.prompt_tokens + point.cached_tokens
        if self._device == "cpu":
            # Made once; the CPU's kernel would make it anew from the form below in every layer.
            whole = torch.ones(point.prompt_tokens, end, dtype=torch.bool)
            return whole.tril(point.cached_tokens)
        # Imported late: it pulls in torch's compiler, seconds that the CPU need not wait for.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(point.prompt_tokens, end)

    def _cache(self, requests: int, context: int) -> Tensor:
        blocks = math.ceil(context / BLOCK_TOKENS)
        return self._random(2, requests, self.rank.kv_heads, blocks * BLOCK_TOKENS, self.shape.model.head_dim)

    def _weight(self, *sizes: int) -> Tensor:
        return self._random(*sizes, scale=_SCALE)

    def _random(self, *sizes: int, scale: float = 1.0) -> Tensor:
        tensor = torch.empty(*sizes, dtype=self._dtype, device=self._device)
        flat = tensor.view(-1)
        first = flat[:_DRAWN].normal_(0.0, scale, generator=self._generator)
        whole = flat.numel() // _DRAWN
        if whole:
            # Drawing takes longer than many a step; times do not depend on whether numbers come again.
            flat[_DRAWN : whole * _DRAWN].view(-1, _DRAWN).copy_(first)
            flat[whole * _DRAWN :].copy_(first[: flat.numel() - whole * _DRAWN])
        return tensor
