"""Model shapes: what a transformer's sizes say about parameters, KV cache and parallel degrees."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class WeightDtype(enum.Enum):
    """How the weights of quantised matrices are stored."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight and its share of the scales: a byte for 32 (mxfp4) or 16 (nvfp4), 2.5 for 128 (int4)."""
        return {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2.5 / 128, "mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}[
            self.value
        ]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weights in fewer bits than the rest of the model; embeddings, output head, norms and routers never are.

    Args:
        experts_only: attention and shared parts keep the model's own dtype (gpt-oss).
    """

    dtype: WeightDtype
    experts_only: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in the layers of a model.

    Args:
        experts: routed experts of a layer.
        per_token: how many of them compute each token.
        ffn_size: width of one routed expert.
        shared_ffn_size: width of all experts that compute every token; 0 where there are none.
        dense_layers: first layers, whose MLP is an ordinary one of the model's `ffn_size`.
    """

    experts: int
    per_token: int
    ffn_size: int
    shared_ffn_size: int = 0
    dense_layers: int = 0

    @property
    def active_ffn_size(self) -> int:
        """Width of the experts that compute a token."""
        return self.per_token * self.ffn_size + self.shared_ffn_size

    def distinct(self, tokens: float) -> float:
        """Return how many experts of a layer a step of `tokens` needs on average, each token drawing its own at random.

        >>> Experts(experts=8, per_token=2, ffn_size=14336).distinct(1)
        2.0
        """
        missed: float = (1 - self.per_token / self.experts) ** tokens
        return self.experts * (1 - missed)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): KV is one compressed vector a token, shared by all heads.

    Args:
        kv_lora_rank: width of the compressed vector.
        qk_rope_head_dim: width of the rotary key beside it, shared by all heads.
        qk_nope_head_dim: width of a head's query without the rotary part.
        v_head_dim: width of a head's value.
        q_lora_rank: width of the compressed query; 0 where queries are not compressed.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0

    @property
    def query_head_dim(self) -> int:
        """Width of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_width(self) -> int:
        """KV elements of a token in a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers that attend to the last tokens only.

    Args:
        tokens: as far back as they see.
        layers: how many of the model's layers are such.
    """

    tokens: int
    layers: int


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder-only transformer, named as in Hugging Face config files.

    Args:
        name: our name, such as `opt-13b`.
        hugging_face: the repository name, such as `facebook/opt-13b`.
        head_dim: of one head; not used with latent attention.
        ffn_size: width of the MLP; with experts that of the dense layers, 0 where there are none.
        context_tokens: prompt + output tokens at most.
        gated_mlp: three MLP matrices (SwiGLU) instead of two.
        learned_positions: a position table (OPT) instead of rotary embeddings.
        biases: linear layers and norms carry biases (OPT).
        dtype_bytes: bytes of one weight that is not quantised, and of one KV element unless `kv_dtype_bytes` says else.
        kv_dtype_bytes: bytes of one KV element where they differ (1: fp8 KV cache).
        experts: None where every MLP is dense.
        latent_attention: None where heads have keys and values of their own.
        sliding_window: None where all layers attend to the whole context.
        quantization: None where all weights have `dtype_bytes`.
        nominal_parameters: as the authors state them, to check the shape by; None where they do not.
        nominal_active_parameters: likewise, of one token.
        caveat: what the formulas are known to leave out of this architecture.
        source: where the numbers come from.
    """

    name: str
    hugging_face: str
    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocabulary: int
    context_tokens: int
    gated_mlp: bool
    learned_positions: bool
    biases: bool
    tied_embeddings: bool
    source: str
    aliases: tuple[str, ...] = ()
    dtype_bytes: int = 2
    kv_dtype_bytes: int | None = None
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    sliding_window: SlidingWindow | None = None
    quantization: Quantization | None = None
    nominal_parameters: float | None = None
    nominal_active_parameters: float | None = None
    caveat: str = ""

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one KV element."""
        return self.dtype_bytes if self.kv_dtype_bytes is None else self.kv_dtype_bytes

    @property
    def kv_layer_bytes_per_token(self) -> int:
        """Bytes of one token's KV in one layer."""
        latent = self.latent_attention
        width = 2 * self.kv_heads * self.head_dim if latent is None else latent.kv_width
        return width * self.kv_element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers; windows, which bound them, left aside."""
        return self.layers * self.kv_layer_bytes_per_token

    def kv_copies(self, tp: int) -> int:
        """Return how many of `tp` GPUs hold the same KV: all with latent attention, several with few KV heads."""
        return tp if self.latent_attention is not None else max(tp // self.kv_heads, 1)

    @property
    def dense_layers(self) -> int:
        """Layers with an ordinary MLP."""
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def full_attention_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.layers - (0 if self.sliding_window is None else self.sliding_window.layers)

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP or expert."""
        return 3 if self.gated_mlp else 2

    @property
    def attention_parameters(self) -> int:
        """Weights of the attention matrices of one layer."""
        h, heads, latent = self.hidden_size, self.attention_heads, self.latent_attention
        if latent is None:
            return 2 * h * self.head_dim * (heads + self.kv_heads)
        query = heads * latent.query_head_dim
        queries = latent.q_lora_rank * (h + query) if latent.q_lora_rank else h * query
        keys_values = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        return queries + h * latent.kv_width + keys_values + heads * latent.v_head_dim * h

    def _expert_parameters(self, experts: float) -> float:
        """Weights of so many routed experts of all layers that have them."""
        width = 0 if self.experts is None else self.experts.ffn_size
        return self.expert_layers * experts * self.mlp_matrices * self.hidden_size * width

    @property
    def _shared_parameters(self) -> int:
        """Weights of all layers' matrices that every token is multiplied by, routers apart."""
        shared = 0 if self.experts is None else self.experts.shared_ffn_size
        mlp = self.mlp_matrices * self.hidden_size * (self.dense_layers * self.ffn_size + self.expert_layers * shared)
        return self.layers * self.attention_parameters + mlp

    @property
    def _router_parameters(self) -> int:
        return 0 if self.experts is None else self.expert_layers * self.hidden_size * self.experts.experts

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of all layers' matrices, embeddings and output head apart."""
        experts = 0 if self.experts is None else self.experts.experts
        return self._shared_parameters + self._router_parameters + int(self._expert_parameters(experts))

    @property
    def active_layer_matrix_parameters(self) -> int:
        """Those of them that one token is multiplied by."""
        experts = 0 if self.experts is None else self.experts.per_token
        return self._shared_parameters + self._router_parameters + int(self._expert_parameters(experts))

    @property
    def parameters(self) -> int:
        """Number of weights."""
        h, q, kv = self.hidden_size, self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        vectors = 2 * h
        if self.biases:
            vectors += 2 * h + q + 2 * kv + h + self.ffn_size + h
        embedding = self.vocabulary * h * (1 if self.tied_embeddings else 2)
        # OPT's position table has two rows more than its context (its padding offset).
        positions = (self.context_tokens + 2) * h if self.learned_positions else 0
        final_norm = 2 * h if self.biases else h
        return self.layer_matrix_parameters + self.layers * vectors + embedding + positions + final_norm

    @property
    def active_parameters(self) -> int:
        """Number of weights without those of the experts that do not compute a token; embeddings count whole."""
        return self.parameters - self.layer_matrix_parameters + self.active_layer_matrix_parameters

    @property
    def matrix_weight_bytes(self) -> float:
        """Bytes of one weight of attention, dense MLPs and shared experts."""
        q = self.quantization
        return self.dtype_bytes if q is None or q.experts_only else q.dtype.weight_bytes

    @property
    def expert_weight_bytes(self) -> float:
        """Bytes of one weight of a routed expert."""
        return self.dtype_bytes if self.quantization is None else self.quantization.dtype.weight_bytes

    def layer_matrix_bytes(self, experts: float) -> float:
        """Bytes of all layers' matrices with so many routed experts of each layer."""
        return (
            self._shared_parameters * self.matrix_weight_bytes
            + self._router_parameters * self.dtype_bytes
            + self._expert_parameters(experts) * self.expert_weight_bytes
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        experts = 0 if self.experts is None else self.experts.experts
        rest = self.parameters - self.layer_matrix_parameters
        return math.ceil(self.layer_matrix_bytes(experts) + rest * self.dtype_bytes)
