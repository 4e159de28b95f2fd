"""Models from Hugging Face `config.json` files: what is understood is read, what is not is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from dsim.errors import InputError, nearest
from dsim.model import Experts, LatentAttention, Model, Quantization, SlidingWindow, WeightDtype

_LARGEST_CONFIG_BYTES = 1_000_000
_LARGEST_SIZE = 10**9
_PROFILE_HINT = "or write its shape into a profile (docs/profiles.md)"

#: Architectures (`model_type`) whose sizes mean what is read here.
FAMILIES: Final = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe"),
    *("glm_moe_dsa", "gpt_oss", "granite", "kimi_k2", "llama", "minimax_m2", "mistral", "mistral3", "mixtral", "olmo2"),
    *("olmoe", "opt", "phi3", "qwen2", "qwen2_moe", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text"),
    "qwen3_vl_moe_text",
)

_SPARSE = "its sparse attention indexer (DSA) is not modelled: attention is taken as dense, which is too slow for long "
#: What of a family is left out, told with every answer.
_CAVEATS: Final = dict.fromkeys(
    ("deepseek_v32", "glm_moe_dsa"), _SPARSE + "contexts, and the indexer's keys are not counted in the KV cache"
)

_LINEAR, _MAMBA = "hybrid linear attention", "Mamba (state space) layers"
_ENCODER_DECODER, _ENCODER = "an encoder beside its decoder", "an encoder and no decoder"
#: Architectures whose KV cache or attention the formulas do not have.
_NOT_MODELLED: Final = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _LINEAR),
    **dict.fromkeys(
        ("kimi_linear", "kimi_k3", "minimax", "minimax_m1", "minimax_text_01", "bailing_moe_linear"), _LINEAR
    ),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "lfm2", "lfm2_moe"), "recurrent layers"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "zamba2", "bamba", "falcon_h1"), _MAMBA),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h", "plamo2", "phi4flash", "samba"), _MAMBA),
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "m2m_100", "marian", "whisper"), _ENCODER_DECODER
    ),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "modernbert", "deberta-v2", "electra", "albert"), _ENCODER),
    **dict.fromkeys(("llama4", "llama4_text"), "chunked attention and layers with and without experts in turn"),
    "deepseek_v4": "compressed sparse attention",
}
#: Keys that mean the same whatever the family is called.
_MARKS: Final = {
    "linear_attn_config": _LINEAR,
    "linear_num_value_heads": _LINEAR,
    "attn_type_list": _LINEAR,
    "mamba_d_state": _MAMBA,
    "mamba_num_heads": _MAMBA,
    "ssm_cfg": _MAMBA,
    "ssm_state_size": _MAMBA,
    "compress_ratios": "compressed sparse attention",
    "attention_chunk_size": "chunked attention",
}
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")


def is_config(name: str) -> bool:
    """Return whether a model's name is the path of a config file, or of a directory that has one.

    >>> is_config("my/config.json"), is_config("llama-3.1-8b")
    (True, False)
    """
    # Path.is_file may raise.
    return name.endswith(".json") or os.path.isfile(name) or os.path.isfile(os.path.join(name, "config.json"))


def read_config(path: Path) -> Model:
    """Return the model that a Hugging Face `config.json` describes.

    Raises:
        InputError: it cannot be read, its architecture is not modelled, or a size is missing or impossible.
    """
    return open_config(path).model()


def open_config(path: Path) -> Config:
    """Return a config file's keys, those of the language model where it has several parts.

    Raises:
        InputError: it cannot be read, or is no JSON object with a `model_type`.
    """
    if os.path.isdir(path):
        raise InputError(str(path), "is a directory", hint="give the config.json in it")
    try:
        if path.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise InputError(str(path), "is too large for a config.json")
        keys = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise InputError(str(path), "is not JSON", hint="expected a Hugging Face config.json") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror}") from None
    if not isinstance(keys, dict):
        raise InputError(str(path), "must be a JSON object", hint="expected a Hugging Face config.json")
    towers = tuple(key.removesuffix("_config") for key in ("vision_config", "audio_config") if keys.get(key))
    if isinstance(keys.get("text_config"), dict):
        # Quantisation and dtype may stand beside the text part.
        outer = {
            key: keys[key] for key in ("quantization_config", "torch_dtype", "dtype", "_name_or_path") if key in keys
        }
        keys = {**outer, **keys["text_config"]}
    family = keys.get("model_type")
    if not isinstance(family, str) or not family:
        raise InputError(str(path), "is missing", name="model_type", hint="expected a Hugging Face config.json")
    return Config(str(path), family, keys, towers)


@dataclass(frozen=True, slots=True)
class Config:
    """A config file's keys; families name the same size differently.

    Args:
        path: named in errors.
        family: `model_type`.
        towers: parts beside the language model, such as `vision`.
    """

    path: str
    family: str
    keys: Mapping[str, object]
    towers: tuple[str, ...] = ()

    def model(self) -> Model:
        """Return the model.

        Raises:
            InputError: its architecture is not modelled, or a size is missing or impossible.
        """
        self._refuse()
        latent = self._latent_attention()
        attention_heads = self.size("num_attention_heads")
        kv_heads = self.size("num_key_value_heads", default=attention_heads)
        if attention_heads % kv_heads:
            self.fail("num_key_value_heads", kv_heads, f"must divide num_attention_heads={attention_heads}")
        hidden_size = self.size("hidden_size")
        if self.keys.get("head_dim") is None and latent is None and hidden_size % attention_heads:
            self.fail("hidden_size", hidden_size, f"must be a multiple of num_attention_heads={attention_heads}")
        head_dim = self.size("head_dim", default=max(hidden_size // attention_heads, 1))
        is_opt = self.family == "opt"
        if head_dim % 2 and latent is None and not is_opt:
            self.fail("head_dim", head_dim, "must be even, for rotary positions")
        layers = self.size("num_hidden_layers")
        experts = self._experts(layers)
        given = self._name()
        return Model(
            name=given.rsplit("/", 1)[-1].lower(),
            hugging_face=given,
            layers=layers,
            hidden_size=hidden_size,
            attention_heads=attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=0
            if experts and not experts.dense_layers
            else self.size("ffn_dim" if is_opt else "intermediate_size"),
            vocabulary=self.size("vocab_size"),
            context_tokens=self.size("max_position_embeddings"),
            gated_mlp=not is_opt,
            learned_positions=is_opt,
            biases=is_opt,
            tied_embeddings=bool(self.keys.get("tie_word_embeddings", is_opt or self.family.startswith("gemma"))),
            source=f"config.json of {given}",
            dtype_bytes=4 if (self.keys.get("torch_dtype") or self.keys.get("dtype")) == "float32" else 2,
            kv_dtype_bytes=self._kv_dtype_bytes(),
            experts=experts,
            latent_attention=latent,
            sliding_window=self._sliding_window(layers),
            quantization=self._quantization(experts),
            caveat=self._caveat(),
        )

    def size(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """Return the whole number at `key`; InputError where it is missing (without a default) or impossible."""
        value = self.keys.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise InputError(self.path, "is missing", name=key, hint="expected a complete Hugging Face config.json")
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            self.fail(key, value, f"must be a whole number >= {at_least}")
        if value > _LARGEST_SIZE:
            self.fail(key, value, f"must be <= {_LARGEST_SIZE:g}")
        return value

    def fail(self, key: str, value: object, rule: str, hint: str | None = None) -> NoReturn:
        """Raise the error that says this key breaks `rule`."""
        raise InputError(self.path, rule, name=key, value=value, hint=hint)

    def _name(self) -> str:
        name, file = self.keys.get("_name_or_path"), Path(self.path)
        if isinstance(name, str) and name.strip("./"):
            return name
        return (file.stem if file.stem != "config" else file.resolve().parent.name) or self.family

    def _refuse(self) -> None:
        reason = _NOT_MODELLED.get(self.family)
        if reason is not None:
            self.fail("model_type", self.family, f"has {reason}, which is not modelled", "choose another model")
        if self.keys.get("is_encoder_decoder") is True:
            rule = f"means {_ENCODER_DECODER}, which is not modelled"
            self.fail("is_encoder_decoder", self.keys["is_encoder_decoder"], rule, "choose another model")
        for key, reason in _MARKS.items():
            if self.keys.get(key):
                self.fail(key, self.keys[key], f"means {reason}, which is not modelled", "choose another model")
        if self.family not in FAMILIES:
            hint = f"{nearest(self.family, FAMILIES)} {_PROFILE_HINT}"
            self.fail("model_type", self.family, "is not an architecture whose sizes are known here", hint)
        kinds = self.keys.get("layer_types")
        if isinstance(kinds, list) and self.family not in _CAVEATS:
            unknown = next((kind for kind in kinds if kind not in _LAYER_TYPES), None)
            if unknown is not None:
                rule = "is not a kind of layer that is modelled"
                self.fail("layer_types", unknown, rule, "choose another model")
        for key, one in (("decoder_sparse_step", 1), ("moe_layer_freq", 1), ("interleave_moe_layer_step", 1)):
            if self.keys.get(key, one) not in (one, None) and self._experts_key():
                value = self.keys[key]
                if isinstance(value, list) and set(value) <= {1}:
                    continue
                rule = "means layers with and without experts in turn, which is not modelled"
                self.fail(key, value, rule, "choose another model")
        if self.keys.get("mlp_only_layers") and self._experts_key():
            rule = "means layers with and without experts in turn, which is not modelled"
            self.fail("mlp_only_layers", self.keys["mlp_only_layers"], rule, "choose another model")

    def _caveat(self) -> str:
        caveats = [_CAVEATS[self.family]] if self.family in _CAVEATS else []
        if self.family not in _CAVEATS and self.keys.get("index_topk"):
            caveats.append(_CAVEATS["deepseek_v32"])
        if self.towers:
            caveats.append(f"text only: its {' and '.join(self.towers)} part is not modelled")
        return "; ".join(caveats)

    def _experts_key(self) -> str | None:
        names = ("n_routed_experts", "num_local_experts", "num_experts")
        return next((key for key in names if self.keys.get(key)), None)

    def _experts(self, layers: int) -> Experts | None:
        key = self._experts_key()
        if key is None:
            return None
        experts = self.size(key)
        per_token = self.size("num_experts_per_tok" if "num_experts_per_tok" in self.keys else "experts_per_token")
        if per_token > experts:
            self.fail("num_experts_per_tok", per_token, f"must be <= {key}={experts}")
        width = self.size("moe_intermediate_size" if "moe_intermediate_size" in self.keys else "intermediate_size")
        dense_layers = self.size("first_k_dense_replace", 0, at_least=0)
        if dense_layers >= layers:
            self.fail("first_k_dense_replace", dense_layers, f"must be < num_hidden_layers={layers}")
        shared = self.size("shared_expert_intermediate_size", 0, at_least=0)
        return Experts(
            experts=experts,
            per_token=per_token,
            ffn_size=width,
            shared_ffn_size=shared or self.size("n_shared_experts", 0, at_least=0) * width,
            dense_layers=dense_layers,
        )

    def _latent_attention(self) -> LatentAttention | None:
        if self.keys.get("kv_lora_rank") is None:
            return None
        return LatentAttention(
            kv_lora_rank=self.size("kv_lora_rank"),
            qk_rope_head_dim=self.size("qk_rope_head_dim"),
            qk_nope_head_dim=self.size("qk_nope_head_dim"),
            v_head_dim=self.size("v_head_dim"),
            q_lora_rank=self.size("q_lora_rank", 0),
        )

    def _sliding_window(self, layers: int) -> SlidingWindow | None:
        if self.keys.get("sliding_window") is None or self.keys.get("use_sliding_window") is False:
            return None
        tokens, kinds = self.size("sliding_window"), self.keys.get("layer_types")
        if isinstance(kinds, list):
            if len(kinds) != layers:
                self.fail("layer_types", len(kinds), f"must have one entry for each of the {layers} layers")
            windowed = sum(kind == "sliding_attention" for kind in kinds)
        elif self.family in {"gpt_oss", "gemma2"}:
            windowed = -(-layers // 2)
        elif self.family == "gemma3_text":
            windowed = layers - layers // self.size("sliding_window_pattern", 6, at_least=2)
        elif self.family.startswith("qwen"):
            # Only layers from this one on have the window.
            windowed = max(layers - self.size("max_window_layers", layers, at_least=0), 0)
        else:
            windowed = layers
        return SlidingWindow(tokens=tokens, layers=windowed) if windowed else None

    def _quantization(self, experts: Experts | None) -> Quantization | None:
        config = self.keys.get("quantization_config")
        if config is None:
            return None
        if not isinstance(config, dict):
            self.fail("quantization_config", config, "must be an object")
        method = config.get("quant_method")
        dtype = _quantized_dtype(str(method), config)
        if dtype is None:
            hint = "known are fp8, mxfp4, gptq, awq, compressed-tensors, modelopt and bitsandbytes"
            self.fail("quantization_config.quant_method", method, "is not a known quantisation", hint)
        spared = config.get("modules_to_not_convert") or config.get("ignore") or ()
        attention = isinstance(spared, Sequence) and any("attn" in str(name) for name in spared)
        return Quantization(dtype, experts_only=experts is not None and attention)

    def _kv_dtype_bytes(self) -> int | None:
        config = self.keys.get("quantization_config")
        scheme = config.get("kv_cache_scheme") if isinstance(config, dict) else None
        return 1 if isinstance(scheme, dict) and scheme.get("num_bits") == 8 else None


def _quantized_dtype(method: str, config: Mapping[str, object]) -> WeightDtype | None:
    """Return what a `quantization_config` stores weights in, None where it is not known."""
    if method in {"fp8", "fbgemm_fp8"}:
        return WeightDtype.FP8
    if method == "mxfp4":
        return WeightDtype.MXFP4
    if method in {"gptq", "awq", "gptq_marlin", "awq_marlin"}:
        return {4: WeightDtype.INT4, 8: WeightDtype.INT8}.get(_whole(config.get("bits", config.get("w_bit", 4))))
    if method == "modelopt":
        algorithm = str(config.get("quant_algo", ""))
        return {"FP8": WeightDtype.FP8, "NVFP4": WeightDtype.NVFP4}.get(algorithm)
    if method == "bitsandbytes":
        return WeightDtype.INT8 if config.get("load_in_8bit") else WeightDtype.INT4
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        if isinstance(weights, dict):
            kinds = {
                ("float", 8): WeightDtype.FP8,
                ("int", 8): WeightDtype.INT8,
                ("int", 4): WeightDtype.INT4,
                ("float", 4): WeightDtype.NVFP4 if weights.get("group_size") == 16 else WeightDtype.MXFP4,
            }
            return kinds.get((str(weights.get("type")), _whole(weights.get("num_bits"))))
    return None


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
