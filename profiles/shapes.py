"""What the profiler builds: a model's shape with its experts, from the catalog or a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dsim.catalog import find_model
from dsim.errors import InputError, nearest
from dsim.model import Model

#: Families whose matrices are built here. Activations are SiLU (GELU in OPT), and only OPT has biases: what differs
#: in other families (gemma's GELU, qwen2's biases of queries, keys and values) takes no time that shows.
FAMILIES = ("gemma", "llama", "mistral", "mixtral", "olmoe", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
#: Families that normalise each head's queries and keys.
_QK_NORM = ("olmoe", "qwen3", "qwen3_moe")
#: Families whose output head is the embedding where the file does not say.
_TIED = ("gemma", "opt")
#: Of dtype texts, as config files and `--dtype` have them.
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_LARGEST_CONFIG_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts in every layer of a model.

    Args:
        experts: routed experts of a layer.
        per_token: how many of them compute each token.
        ffn_size: width of one routed expert.
        shared_ffn_size: width of the expert that computes every token; 0 where there is none.
    """

    experts: int
    per_token: int
    ffn_size: int
    shared_ffn_size: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer that can be built and timed.

    Args:
        model: of a mixture of experts, its `ffn_size` is the width that computes each token.
        experts: None where the MLP is dense.
        qk_norm: queries and keys are normalised head by head (Qwen3).
    """

    model: Model
    experts: Experts | None = None
    qk_norm: bool = False

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


def idle_expert_bytes(model: Model, experts: Experts) -> int:
    """Return the bytes of the weights that a mixture holds beyond its model's `ffn_size`: idle experts and routers."""
    width = experts.experts * experts.ffn_size + experts.shared_ffn_size - model.ffn_size
    matrices = 3 if model.gated_mlp else 2
    return model.dtype_bytes * model.layers * model.hidden_size * (matrices * width + experts.experts)


def active_experts(experts: Experts, tokens: float) -> int:
    """Return how many of a layer's experts a step of `tokens` needs, when each token draws its own at random.

    >>> mixtral = Experts(experts=8, per_token=2, ffn_size=14336)
    >>> active_experts(mixtral, 1), active_experts(mixtral, 4), active_experts(mixtral, 1000)
    (2, 5, 8)
    """
    missed: float = (1 - experts.per_token / experts.experts) ** tokens
    return max(experts.per_token, round(experts.experts * (1 - missed)))


def shape_of(name: str, *, where: str = "--model") -> Shape:
    """Return the shape that `name` says: a path of a `config.json` if there is such a file, else the catalog's.

    Raises:
        InputError: no such model, or the file says no shape that can be built.
    """
    if name.endswith(".json") or Path(name).is_file():
        return read_config(Path(name))
    model = find_model(name, where=where)
    return Shape(model, qk_norm=model.name.startswith("qwen3-"))


def read_config(path: Path) -> Shape:
    """Return the shape in a Hugging Face `config.json`.

    Raises:
        InputError: it cannot be read, its family or attention is not built here, or a size is missing or impossible.
    """
    try:
        if path.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise InputError(str(path), "is too large for a config.json")
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise InputError(str(path), "is not JSON", hint="expected a Hugging Face config.json") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict):
        raise InputError(str(path), "must be a JSON object", hint="expected a Hugging Face config.json")
    return _Config(str(path), config).shape()


@dataclass(frozen=True, slots=True)
class _Config:
    """A config file's keys; families name the same size differently."""

    path: str
    keys: Mapping[str, object]

    def shape(self) -> Shape:
        family = self.keys.get("model_type")
        if not isinstance(family, str):
            raise InputError(self.path, "is missing", name="model_type", hint="expected a Hugging Face config.json")
        self._refuse(family)
        experts = self._experts()
        attention_heads = self._size("num_attention_heads")
        kv_heads = self._size("num_key_value_heads", default=attention_heads)
        if attention_heads % kv_heads:
            self._fail("num_key_value_heads", kv_heads, f"must divide num_attention_heads={attention_heads}")
        hidden_size = self._size("hidden_size")
        if self.keys.get("head_dim") is None and hidden_size % attention_heads:
            self._fail("hidden_size", hidden_size, f"must be a multiple of num_attention_heads={attention_heads}")
        head_dim = self._size("head_dim", default=max(hidden_size // attention_heads, 1))
        if head_dim % 2 and family != "opt":
            self._fail("head_dim", head_dim, "must be even, for rotary positions")
        context = self._size("max_position_embeddings")
        window = self.keys.get("sliding_window")
        if window is not None and self.keys.get("use_sliding_window") is not False:
            # Beyond its window attention costs no more, which nothing here would know.
            context = min(context, self._size("sliding_window"))
        is_opt = family == "opt"
        name = self.keys.get("_name_or_path")
        file = Path(self.path)
        given = name if isinstance(name, str) and name else file.stem if file.stem != "config" else file.parent.name
        given = given or family
        model = Model(
            name=given.rsplit("/", 1)[-1].lower(),
            hugging_face=given,
            layers=self._size("num_hidden_layers"),
            hidden_size=hidden_size,
            attention_heads=attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=self._ffn_size(experts, is_opt=is_opt),
            vocabulary=self._size("vocab_size"),
            context_tokens=context,
            gated_mlp=not is_opt,
            learned_positions=is_opt,
            biases=is_opt,
            tied_embeddings=bool(self.keys.get("tie_word_embeddings", family in _TIED)),
            source=f"config.json of {given}",
            dtype_bytes=self._dtype_bytes(),
        )
        return Shape(model, experts, qk_norm=family in _QK_NORM)

    def _refuse(self, family: str) -> None:
        if family not in FAMILIES:
            self._fail("model_type", family, "is not a family that is built here", nearest(family, FAMILIES))
        for key, what in (
            ("kv_lora_rank", "multi-head latent attention"),
            ("quantization_config", "quantised weights"),
        ):
            if self.keys.get(key) is not None:
                raise InputError(self.path, f"means {what}, which are not timed", name=key)

    def _experts(self) -> Experts | None:
        key = next((k for k in ("num_local_experts", "num_experts", "n_routed_experts") if self.keys.get(k)), None)
        if key is None:
            return None
        experts = self._size(key)
        per_token = self._size("num_experts_per_tok")
        if per_token > experts:
            self._fail("num_experts_per_tok", per_token, f"must be <= {key}={experts}")
        dense = self._size("intermediate_size")
        if self.keys.get("mlp_only_layers") or self.keys.get("decoder_sparse_step", 1) != 1:
            raise InputError(self.path, "means layers of two kinds, which are not timed", name="decoder_sparse_step")
        shared = self.keys.get("shared_expert_intermediate_size")
        return Experts(
            experts=experts,
            per_token=per_token,
            ffn_size=self._size("moe_intermediate_size", default=dense),
            shared_ffn_size=self._size("shared_expert_intermediate_size") if shared else 0,
        )

    def _ffn_size(self, experts: Experts | None, *, is_opt: bool) -> int:
        """Return the width of the MLP, of a mixture the width that computes each token."""
        if experts is not None:
            return experts.per_token * experts.ffn_size + experts.shared_ffn_size
        return self._size("ffn_dim" if is_opt else "intermediate_size")

    def _dtype_bytes(self) -> int:
        dtype = self.keys.get("torch_dtype") or self.keys.get("dtype") or "bfloat16"
        return 4 if dtype == "float32" else 2

    def _size(self, key: str, default: int | None = None) -> int:
        value = self.keys.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise InputError(self.path, "is missing", name=key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
            self._fail(key, value, "must be a whole number >= 1")
        return value

    def _fail(self, key: str, value: object, rule: str, hint: str | None = None) -> NoReturn:
        raise InputError(self.path, rule, name=key, value=value, hint=hint)
