"""Model shapes: what a transformer's sizes say about parameters, KV cache and parallel degrees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a dense decoder-only transformer, named as in Hugging Face config files.

    Args:
        name: our name, such as `opt-13b`.
        hugging_face: the repository name, such as `facebook/opt-13b`.
        context_tokens: prompt + output tokens at most.
        gated_mlp: three MLP matrices (SwiGLU) instead of two.
        learned_positions: a position table (OPT) instead of rotary embeddings.
        biases: linear layers and norms carry biases (OPT).
        dtype_bytes: bytes of one weight and of one KV element.
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

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of all layers' matrices: what every token is multiplied by, embeddings and output head apart."""
        h, q, kv = self.hidden_size, self.attention_heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * (h * (q + 2 * kv) + q * h + (3 if self.gated_mlp else 2) * h * self.ffn_size)

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
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.dtype_bytes
