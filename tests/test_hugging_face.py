"""Hugging Face config files: what is read is what the catalog has, what is not modelled is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsim.catalog import find_model
from dsim.errors import InputError
from dsim.hugging_face import is_config, read_config
from dsim.model import Experts, Quantization, SlidingWindow, WeightDtype

DEEPSEEK_V3: dict[str, object] = {
    "_name_or_path": "deepseek-ai/DeepSeek-V3",
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GPT_OSS: dict[str, object] = {
    "_name_or_path": "openai/gpt-oss-120b",
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}
QWEN3: dict[str, object] = {
    "_name_or_path": "Qwen/Qwen3-8B",
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
    "tie_word_embeddings": False,
}


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("config", "name"), [(DEEPSEEK_V3, "deepseek-v3"), (GPT_OSS, "gpt-oss-120b"), (QWEN3, "qwen3-8b")]
)
def test_a_config_file_says_what_the_catalog_says(tmp_path: Path, config: dict[str, object], name: str) -> None:
    read, known = read_config(write(tmp_path, config)), find_model(name)
    same = replace(
        known,
        source=read.source,
        aliases=(),
        hugging_face=str(config["_name_or_path"]),
        nominal_parameters=None,
        nominal_active_parameters=None,
    )
    assert read == same


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "awq", "bits": 4}, WeightDtype.INT4),
        ({"quant_method": "gptq", "bits": 8}, WeightDtype.INT8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, WeightDtype.NVFP4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, WeightDtype.INT8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
                "ignore": ["lm_head"],
                "kv_cache_scheme": {"type": "float", "num_bits": 8},
            },
            WeightDtype.FP8,
        ),
    ],
)
def test_quantised_weights(tmp_path: Path, config: dict[str, object], expected: WeightDtype) -> None:
    model = read_config(write(tmp_path, {**QWEN3, "quantization_config": config}))
    assert model.quantization == Quantization(expected)
    assert model.kv_element_bytes == (1 if "kv_cache_scheme" in config else 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 30}, SlidingWindow(4096, 6)),
        ({"sliding_window": 4096}, None),
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": None}, SlidingWindow(4096, 36)),
        ({"model_type": "gemma2", "sliding_window": 4096, "use_sliding_window": None}, SlidingWindow(4096, 18)),
        ({"model_type": "gemma3_text", "sliding_window": 1024, "use_sliding_window": None}, SlidingWindow(1024, 30)),
    ],
)
def test_windows(tmp_path: Path, change: dict[str, object], expected: SlidingWindow | None) -> None:
    assert read_config(write(tmp_path, {**QWEN3, **change})).sliding_window == expected


def test_shared_experts(tmp_path: Path) -> None:
    change = {"model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    model = read_config(write(tmp_path, {**QWEN3, **change, "shared_expert_intermediate_size": 5632}))
    assert model.experts == Experts(experts=60, per_token=4, ffn_size=1408, shared_ffn_size=5632)
    assert model.ffn_size == 0


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    sparse = read_config(write(tmp_path, {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048}))
    assert "DSA" in sparse.caveat
    towers = read_config(write(tmp_path, {"text_config": QWEN3, "vision_config": {"depth": 2}}))
    assert towers.caveat == "text only: its vision part is not modelled"
    assert not read_config(write(tmp_path, QWEN3)).caveat


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_next"}, "model_type='qwen3_next' has hybrid linear attention, which is not modelled"),
        ({"model_type": "jamba"}, "model_type='jamba' has Mamba (state space) layers, which is not modelled"),
        ({"model_type": "t5"}, "model_type='t5' has an encoder beside its decoder, which is not modelled"),
        ({"model_type": "deepseek_v4"}, "model_type='deepseek_v4' has compressed sparse attention"),
        ({"model_type": "llama4_text"}, "model_type='llama4_text' has chunked attention and layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True means an encoder beside its decoder"),
        ({"mamba_d_state": 16}, "mamba_d_state=16 means Mamba (state space) layers, which is not modelled"),
        ({"linear_num_value_heads": 32}, "linear_num_value_heads=32 means hybrid linear attention"),
        (
            {"model_type": "qwen33"},
            "model_type='qwen33' is not an architecture whose sizes are known here; did you mean",
        ),
        (
            {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["x"]},
            "layer_types='x' is not a kind of layer",
        ),
        (
            {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types=1 must have one entry for each of the 36 layers",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention"] * 18},
            "layer_types='linear_attention' is not a kind of layer that is modelled; choose another",
        ),
        ({"hidden_size": 10**12}, "hidden_size=1000000000000 must be <= 1e+09"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method='hqq' is not a known"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}, "mlp_only_layers=[0] means layers with"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 36},
            "first_k_dense_replace=36 must be < ",
        ),
        ({"num_experts": 4}, "experts_per_token is missing"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path, {**QWEN3, **change})
    with pytest.raises(InputError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "; " in str(caught.value)


def test_a_directory_is_told_from_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "opt-13b").mkdir()
    assert is_config(str(tmp_path))
    assert not is_config(str(tmp_path / "opt-13b"))
    with pytest.raises(InputError, match=r"is a directory; give the config\.json in it"):
        read_config(tmp_path)
