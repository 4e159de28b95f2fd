"""Shapes for the profiler: Hugging Face config files, experts, and one rank's share."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dsim.catalog import models
from dsim.errors import InputError
from dsim.model import Experts, Model
from profiles.shapes import active_experts, read_config, shape_of

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "_name_or_path": "meta-llama/Llama-3.1-8B",
}
OPT: dict[str, object] = {
    "model_type": "opt",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
    "_name_or_path": "facebook/opt-13b",
}
MIXTRAL: dict[str, object] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "llama-3.1-8b"), (OPT, "opt-13b")])
def test_a_config_file_says_what_the_catalog_says(tmp_path: Path, config: dict[str, object], name: str) -> None:
    read, known = read_config(write(tmp_path, config)).model, shape_of(name).model
    assert read.name == known.name
    for key in ("layers", "hidden_size", "attention_heads", "kv_heads", "head_dim", "ffn_size", "vocabulary"):
        assert getattr(read, key) == getattr(known, key)
    for key in ("context_tokens", "gated_mlp", "learned_positions", "biases", "tied_embeddings", "dtype_bytes"):
        assert getattr(read, key) == getattr(known, key)
    assert read.parameters == known.parameters


def test_experts(tmp_path: Path) -> None:
    mixtral = read_config(write(tmp_path, MIXTRAL))
    assert mixtral.experts == Experts(experts=8, per_token=2, ffn_size=14336)
    # 46.7e9 parameters, as Mistral states them; norms are left out here.
    assert mixtral.weight_bytes(1, 2) / 2 == pytest.approx(46.7e9, rel=1e-3)
    qwen = read_config(write(tmp_path, QWEN3_MOE))
    assert qwen.experts == Experts(experts=128, per_token=8, ffn_size=768)
    assert qwen.qk_norm
    # 30.5e9 parameters, 3.3e9 of them active for each token.
    assert qwen.weight_bytes(1, 2) / 2 == pytest.approx(30.5e9, rel=2e-3)
    active = 48 * qwen.layer_flops_per_token(1) / 2 + 2 * 151936 * 2048
    assert active == pytest.approx(3.35e9, rel=0.01)


def test_a_mixtures_model_knows_what_computes_a_token(tmp_path: Path) -> None:
    """So the datasheet's bounds hold: they count what each token needs, and no expert more."""
    for config in (MIXTRAL, QWEN3_MOE):
        shape = read_config(write(tmp_path, config))
        assert shape.experts is not None
        router = shape.model.hidden_size * shape.experts.experts
        flops = 2 * (shape.model.active_layer_matrix_parameters / shape.model.layers - router)
        assert shape.layer_flops_per_token(1) == pytest.approx(flops)
        # Norms aside.
        assert shape.model.weight_bytes == pytest.approx(shape.weight_bytes(1, 2), rel=1e-4)


def test_a_gemma_has_tied_embeddings_unless_it_says_otherwise(tmp_path: Path) -> None:
    """As transformers' GemmaConfig has it: 2.51e9 parameters, 256000 x 2048 of them embeddings, once."""
    config = {"model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 8,
              "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 16384, "vocab_size": 256000,
              "max_position_embeddings": 8192}  # fmt: skip
    model = read_config(write(tmp_path, config)).model
    assert model.tied_embeddings
    assert model.parameters == pytest.approx(2.506e9, rel=1e-3)
    assert not read_config(write(tmp_path, {**config, "tie_word_embeddings": False})).model.tied_embeddings
    assert not read_config(write(tmp_path, LLAMA)).model.tied_embeddings


def test_the_name_of_a_nameless_config_is_its_folder(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    config = {key: value for key, value in LLAMA.items() if key != "_name_or_path"}
    assert read_config(write(tmp_path / "my-model", config)).model.name == "my-model"


def test_nested_text_configs_and_windows(tmp_path: Path) -> None:
    shape = read_config(write(tmp_path, {"text_config": {**LLAMA, "sliding_window": 4096}}))
    assert shape.model.context_tokens == 4096
    unused = read_config(write(tmp_path, {**LLAMA, "sliding_window": 4096, "use_sliding_window": False}))
    assert unused.model.context_tokens == 131072


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type is missing; expected a Hugging Face config.json"),
        ({"model_type": "lama"}, "model_type='lama' is not a family that is built here; did you mean 'llama'?"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 4096.5}, "hidden_size=4096.5 must be a whole number >= 1"),
        ({"hidden_size": True}, "hidden_size=True must be a whole number >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number >= 1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 must divide num_attention_heads=32"),
        ({"hidden_size": 4097}, "hidden_size=4097 must be a multiple of num_attention_heads=32"),
        ({"head_dim": 127}, "head_dim=127 must be even, for rotary positions"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
            "has multi-head latent attention, which are not timed",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "has quantised weights, which are not timed"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "num_experts_per_tok=8 must be <= num_experts=4"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
            "decoder_sparse_step=2 means layers with and without experts in turn, which is not modelled",
        ),
    ],
)
def test_what_is_wrong_with_a_config_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path, {**LLAMA, **change})
    with pytest.raises(InputError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "; " in str(caught.value)


@pytest.mark.parametrize("text", ["", "nonsense", "[1, 2]", "null", "[" * 100_000])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match="JSON"):
        read_config(path)


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        shape_of(str(tmp_path / "config.json"))
    (tmp_path / "huge.json").write_bytes(b" " * 1_000_001)
    with pytest.raises(InputError, match="too large"):
        read_config(tmp_path / "huge.json")


def is_built(model: Model) -> bool:
    try:
        shape_of(model.name)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("model", [m for m in models() if is_built(m)], ids=lambda m: m.name)
def test_all_ranks_together_are_the_model(model: Model) -> None:
    shape = shape_of(model.name)
    whole = shape.layer_matrix_parameters(1, math.inf)
    router = 0 if model.experts is None else model.hidden_size * model.experts.experts
    assert whole * model.layers == model.layer_matrix_parameters
    flops = shape.layer_flops_per_token(1)
    assert model.layers * (flops / 2 + router) == model.active_layer_matrix_parameters
    for tp in (2, 4):
        if model.attention_heads % tp:
            continue
        # Each rank has a router of its own.
        assert tp * (shape.layer_matrix_parameters(tp, math.inf) - router) == whole - router
        assert tp * shape.layer_flops_per_token(tp) == flops
        assert tp * shape.kv_bytes_per_token(tp, 2) == shape.kv_bytes_per_token(1, 2)


def test_more_ranks_than_kv_heads_copy_them() -> None:
    assert shape_of("llama-3.1-70b").rank(16).kv_heads == 1


def test_impossible_degrees() -> None:
    with pytest.raises(InputError, match=r"^--tp: 3 must divide attention_heads=40 of opt-13b; "):
        shape_of("opt-13b").rank(3)


def test_active_experts_are_those_that_some_token_draws() -> None:
    experts = Experts(experts=128, per_token=8, ffn_size=768)
    counts = [active_experts(experts, tokens) for tokens in (1, 2, 4, 16, 64, 1024, math.inf)]
    assert counts[0] == 8
    assert counts == sorted(counts)
    assert counts[-2:] == [128, 128]
