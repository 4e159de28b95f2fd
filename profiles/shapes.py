"""What the profiler builds: a model's shape with its experts, from the catalog or a Hugging Face `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from dsim.catalog import find_model
from dsim.errors import InputError, nearest
from dsim.hugging_face import is_config, open_config
from dsim.model import Experts, Model

#: Families whose matrices are built here. Activations are SiLU (GELU in OPT), and only OPT has biases: what differs
#: in other families (gemma's GELU, qwen2's biases of queries, keys and values) takes no time that shows.
FAMILIES = ("gemma", "llama", "mistral", "mixtral", "olmoe", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
#: Families that normalise each head's queries and keys.
_QK_NORM = ("olmoe", "qwen3", "qwen3_moe")
#: Of dtype texts, as config files and `--dtype` have them.
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer that can be built and timed.

    Args:
        qk_norm: queries and keys are normalised head by head (Qwen3).
    """

    model: Model
    qk_norm: bool = False

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts in every layer, None where the MLP is dense."""
        return self.model.experts

    def rank(self, tp: int) -> Rank:
        """Return what one of `tp` ranks holds.

        >>> shape_of("llama-3.1-8b").rank(4)
        Rank(tp=4, heads=8, kv_heads=2, ffn_size=3584, vocabulary=32064, expert_ffn_size=0, shared_ffn_size=0)

        Raises:
            InputError: heads, KV heads or the MLP's width cannot be divided so.
        """
        model = self.model
        sizes = {"attention_heads": model.attention_heads}
        if self.experts is None:
            sizes["ffn_size"] = model.ffn_size
        else:
            sizes["ffn_size of an expert"] = self.experts.ffn_size
            sizes["ffn_size of the shared expert"] = self.experts.shared_ffn_size
        for name, size in sizes.items():
            if size % tp:
                raise InputError("--tp", f"must divide {name}={size} of {model.name}", value=tp)
        # More ranks than KV heads: each head is copied to several, as engines do.
        if model.kv_heads % tp and tp % model.kv_heads:
            raise InputError("--tp", f"must divide or be a multiple of kv_heads={model.kv_heads}", value=tp)
        return Rank(
            tp=tp,
            heads=model.attention_heads // tp,
            kv_heads=max(model.kv_heads // tp, 1),
            ffn_size=0 if self.experts is not None else model.ffn_size // tp,
            vocabulary=math.ceil(model.vocabulary / tp),
            expert_ffn_size=0 if self.experts is None else self.experts.ffn_size // tp,
            shared_ffn_size=0 if self.experts is None else self.experts.shared_ffn_size // tp,
        )

    def layer_matrix_parameters(self, tp: int, tokens: float) -> float:
        """Weights of one rank's layer that a step of `tokens` reads: of experts, those that some token needs."""
        model, rank = self.model, self.rank(tp)
        attention = model.hidden_size * model.head_dim * (2 * rank.heads + 2 * rank.kv_heads)
        matrices = 3 if model.gated_mlp else 2
        if self.experts is None:
            return attention + matrices * model.hidden_size * rank.ffn_size
        width = active_experts(self.experts, tokens) * rank.expert_ffn_size + rank.shared_ffn_size
        return attention + matrices * model.hidden_size * width + model.hidden_size * self.experts.experts

    def layer_flops_per_token(self, tp: int) -> float:
        """FLOPs of one rank's matrices of a layer for one token, attention scores apart."""
        model, rank = self.model, self.rank(tp)
        width: float = rank.ffn_size
        if self.experts is not None:
            width = self.experts.per_token * rank.expert_ffn_size + rank.shared_ffn_size
        attention = model.hidden_size * model.head_dim * (2 * rank.heads + 2 * rank.kv_heads)
        return 2 * (attention + (3 if model.gated_mlp else 2) * model.hidden_size * width)

    def weight_bytes(self, tp: int, dtype_bytes: int) -> float:
        """Bytes of one rank's weights, all layers, embedding and head."""
        model = self.model
        head = (1 if model.tied_embeddings else 2) * self.rank(tp).vocabulary * model.hidden_size
        return dtype_bytes * (model.layers * self.layer_matrix_parameters(tp, math.inf) + head)

    def kv_bytes_per_token(self, tp: int, dtype_bytes: int) -> int:
        """Bytes of K and V of one token on one rank, all layers."""
        return 2 * self.model.layers * self.rank(tp).kv_heads * self.model.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class Rank:
    """The share of one tensor parallel rank; experts' widths are 0 where the MLP is dense, and the other way round."""

    tp: int
    heads: int
    kv_heads: int
    ffn_size: int
    vocabulary: int
    expert_ffn_size: int = 0
    shared_ffn_size: int = 0


def active_experts(experts: Experts, tokens: float) -> int:
    """Return how many of a layer's experts a step of `tokens` needs, when each token draws its own at random.

    >>> mixtral = Experts(experts=8, per_token=2, ffn_size=14336)
    >>> active_experts(mixtral, 1), active_experts(mixtral, 4), active_experts(mixtral, 1000)
    (2, 5, 8)
    """
    return max(experts.per_token, round(experts.distinct(tokens)))


def shape_of(name: str, *, where: str = "--model") -> Shape:
    """Return the shape that `name` says: a path of a `config.json` if there is such a file, else the catalog's.

    Raises:
        InputError: no such model, or the file says no shape that can be built.
    """
    if is_config(name):
        return read_config(Path(name))
    model = find_model(name, where=where)
    return Shape(_buildable(model, where=where, value=name), qk_norm=model.name.startswith("qwen3-"))


def read_config(path: Path) -> Shape:
    """Return the shape in a Hugging Face `config.json`.

    Raises:
        InputError: it cannot be read, its family or attention is not built here, or a size is missing or impossible.
    """
    config = open_config(path)
    if config.family not in FAMILIES:
        rule = "is not a family that is built here"
        config.fail("model_type", config.family, rule, nearest(config.family, FAMILIES))
    return Shape(_buildable(config.model(), where=str(path)), qk_norm=config.family in _QK_NORM)


def _buildable(model: Model, *, where: str, value: str | None = None) -> Model:
    """Return the model as it is built here; InputError where one of its parts is not."""
    parts = {
        "multi-head latent attention": model.latent_attention is not None,
        "quantised weights": model.quantization is not None,
        "dense layers before those with experts": model.experts is not None and model.experts.dense_layers > 0,
        "windows in some of its layers": model.sliding_window is not None and model.full_attention_layers > 0,
    }
    for part, has in parts.items():
        if has:
            hint = "time another model, or let `dsim search` estimate this one"
            raise InputError(where, f"has {part}, which are not timed", value=value, hint=hint)
    if model.sliding_window is None:
        return model
    # Beyond its window attention costs no more, which a fit of squared tokens would not know.
    return replace(model, context_tokens=min(model.context_tokens, model.sliding_window.tokens), sliding_window=None)
