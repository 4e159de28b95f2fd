"""The catalog's numbers against nominal ones and datasheets, and its names."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dsim.catalog import find_gpu, find_model, gpus, models
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.model import Experts, Model

SHARED = Path(__file__).parents[2] / "shared" / "data" / "catalog"
NOUNS: list[Model | Gpu] = [*models(), *gpus()]
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the measured facts beside the repository")

#: KV bytes per token in 16 bits: 2 × layers × KV heads × head size × 2 bytes, or layers × (compressed vector + rotary
#: key) × 2 bytes, from the config files.
KV_BYTES = {
    "opt-13b": 819_200,
    "opt-66b": 2_359_296,
    "opt-175b": 4_718_592,
    "llama-2-7b": 524_288,
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "llama-3.1-405b": 516_096,
    "llama-3.2-1b": 32_768,
    "qwen3-32b": 262_144,
    "qwen3-235b-a22b": 192_512,
    "mixtral-8x7b": 131_072,
    "deepseek-v3": 70_272,
    "deepseek-v2-lite": 31_104,
    "glm-5": 89_856,
    "gpt-oss-120b": 73_728,
    "dsim-tiny-14m": 12_288,
}


def rounds_to(value: float, stated: float) -> bool:
    """Whether the value is the stated one to within 1.5 %, or rounded or cut to the stated digits (32, 2.4)."""
    step = 1e9 if stated % 1e9 == 0 else 1e8
    return value == pytest.approx(stated, rel=0.015) or -step / 2 <= value - stated < step


@pytest.mark.parametrize("model", models(), ids=lambda m: m.name)
def test_parameters_are_the_nominal_ones(model: Model) -> None:
    if model.name == "dsim-tiny-14m":
        # Ours: nobody has stated anything.
        assert model.nominal_parameters is None
        assert model.dtype_bytes == 4
        return
    assert model.parameters == pytest.approx(model.nominal_parameters, rel=0.015)
    assert (model.nominal_active_parameters is None) == (model.experts is None)
    assert model.active_parameters <= model.parameters
    if model.nominal_active_parameters is not None:
        # Some authors leave the input embedding out, some the output head as well.
        embedding = model.vocabulary * model.hidden_size
        counted = [model.active_parameters - n * embedding for n in range(3)]
        assert any(rounds_to(count, model.nominal_active_parameters) for count in counted)
    if model.quantization is None:
        assert model.weight_bytes == model.dtype_bytes * model.parameters
        assert model.active_layer_matrix_parameters * 2 == model.layer_matrix_bytes(
            0 if model.experts is None else model.experts.per_token
        )


@pytest.mark.parametrize(("name", "kv_bytes"), KV_BYTES.items())
def test_kv_bytes(name: str, kv_bytes: int) -> None:
    assert find_model(name).kv_bytes_per_token == kv_bytes


def test_quantised_weights() -> None:
    # As many bytes as the repositories' safetensors files have: 65.2 GB, 13.8 GB and 688 GB with a 14 GB MTP layer.
    assert find_model("gpt-oss-120b").weight_bytes == pytest.approx(65.2e9, rel=0.01)
    assert find_model("gpt-oss-20b").weight_bytes == pytest.approx(13.8e9, rel=0.01)
    assert find_model("deepseek-v3").weight_bytes == pytest.approx(674e9, rel=0.01)
    assert find_model("qwen3-32b-fp8").weight_bytes < 0.53 * find_model("qwen3-32b").weight_bytes


def test_copies_of_the_kv_cache() -> None:
    assert [find_model("llama-3.1-70b").kv_copies(tp) for tp in (1, 4, 8, 16)] == [1, 1, 1, 2]
    assert [find_model("deepseek-v3").kv_copies(tp) for tp in (1, 8)] == [1, 8]


def test_distinct_experts() -> None:
    experts = Experts(experts=128, per_token=8, ffn_size=768)
    assert experts.distinct(1) == pytest.approx(8)
    assert experts.distinct(2) == pytest.approx(16 - 8 * 8 / 128)
    assert experts.distinct(math.inf) == 128


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Exact counts, as `sum(p.numel() for p in model.parameters())` has them.
    [("llama-2-7b", 6_738_415_616), ("llama-3.1-8b", 8_030_261_248), ("llama-3.2-1b", 1_235_814_400)],
)
def test_exact_parameter_counts(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


def test_layer_matrices_are_most_of_a_model() -> None:
    model = find_model("opt-13b")
    # 12 h² a layer where the MLP is four times as wide as the model.
    assert model.layer_matrix_parameters == 40 * 12 * 5120**2


@needs_shared
def test_every_collected_shape_is_in_the_catalog() -> None:
    with (SHARED / "model_shapes.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 57
    for row in rows:
        if not row["params_total_B_est"]:
            with pytest.raises(InputError, match="which is not modelled"):
                find_model(row["hf_id"])
            continue
        model, experts = find_model(row["hf_id"]), find_model(row["hf_id"]).experts
        keys = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
        keys.append("max_position_embeddings")
        sizes = (model.layers, model.hidden_size, model.attention_heads, model.kv_heads, model.vocabulary)
        assert (*sizes, model.context_tokens) == tuple(int(row[key]) for key in keys)
        latent, width = model.latent_attention, int(row["intermediate_size"])
        assert model.head_dim == int(row["head_dim"])
        assert model.ffn_size == (width if model.dense_layers else 0)
        if experts is None:
            assert not row["num_experts"]
        else:
            assert (experts.experts, experts.per_token) == (int(row["num_experts"]), int(row["experts_per_token"]))
            assert experts.ffn_size == int(row["moe_intermediate_size"] or width)
            assert experts.dense_layers == int(row["first_k_dense_replace"] or 0)
            assert experts.shared_ffn_size == int(row["n_shared_experts"] or 0) * experts.ffn_size
        if latent is None:
            assert not row["kv_lora_rank"]
        else:
            names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
            assert [getattr(latent, name) for name in names] == [int(row[name] or 0) for name in names]
        assert (model.quantization.dtype.value if model.quantization else "") == row["quant"]
        # The estimates leave out norms and biases.
        assert model.parameters == pytest.approx(float(row["params_total_B_est"]) * 1e9, rel=0.002, abs=0.006e9)
        assert model.active_parameters == pytest.approx(float(row["params_active_B_est"]) * 1e9, rel=0.002, abs=0.006e9)
        assert model.kv_bytes_per_token == int(row["kv_bytes_per_token_bf16"])
        assert ("DSA" in row["notes"]) == ("DSA" in model.caveat)


@needs_shared
def test_every_collected_gpu_is_in_the_catalog_as_printed() -> None:
    with (SHARED / "gpus.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # The CPU's stand-in comes last and has no datasheet.
    collected = [gpu for gpu in gpus() if gpu.name != "cpu"]
    assert [*collected, find_gpu("cpu")] == list(gpus())
    assert len(rows) == len(collected)
    for row, gpu in zip(rows, collected, strict=True):
        assert find_gpu(row["gpu"].removesuffix(" (per GPU)")) is gpu
        if row["aic_system"]:
            assert find_gpu(row["aic_system"]) is gpu

        def number(key: str, scale: float, row: dict[str, str] = row) -> float | None:
            return float(row[key]) * scale if row[key] else None

        assert gpu.memory_bytes == pytest.approx(float(row["memory_usable_gib"]) * 2**30, abs=1)
        assert gpu.hbm_bytes_per_s == pytest.approx(number("hbm_tb_s", 1e12), rel=1e-12)
        assert gpu.bf16_flops_per_s == pytest.approx(number("bf16_dense_tflops", 1e12), rel=1e-12)
        for flops_per_s, key in ((gpu.fp8_flops_per_s, "fp8"), (gpu.fp4_flops_per_s, "fp4")):
            printed = number(f"{key}_dense_tflops", 1e12)
            assert flops_per_s == (None if printed is None else pytest.approx(printed, rel=1e-12))
        assert gpu.nvlink_bytes_per_s == pytest.approx(number("nvlink_gb_s_per_gpu_unidir", 1e9))
        assert gpu.network_bytes_per_s == pytest.approx(number("scale_out_gb_s_per_gpu_unidir", 1e9))
        assert gpu.pcie_bytes_per_s == pytest.approx(number("pcie_gb_s_unidir", 1e9))
        assert (gpu.gpus_per_node, gpu.scale_up_domain_gpus) == (
            int(row["gpus_per_node"]),
            int(row["scale_up_domain_gpus"]),
        )
        assert gpu.tdp_w == float(row["tdp_w"])
        assert (gpu.vendor, gpu.architecture, gpu.intra_node_link) == (
            row["vendor"],
            row["arch"],
            row["intra_node_link"],
        )
        assert gpu.source == row["spec_source"]
        assert gpu.notes == row["notes"]
        typical = number("price_typ_usd_per_gpu_h", 1)
        if typical is None:
            assert gpu.price_usd_per_h is None
        else:
            assert gpu.price_usd_per_h == (typical, number("price_low", 1), number("price_high", 1) or typical)
            assert gpu.price_source == row["price_source"]


def test_every_entry_has_a_source() -> None:
    assert all(noun.source for noun in NOUNS)
    assert all(gpu.price_source for gpu in gpus() if gpu.price_usd_per_h)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("13b", "opt-13b"),
        ("13B", "opt-13b"),
        ("opt-13b", "opt-13b"),
        ("OPT_13B", "opt-13b"),
        ("facebook/opt-13b", "opt-13b"),
        ("66b", "opt-66b"),
        ("175b", "opt-175b"),
        ("405b", "llama-3.1-405b"),
        (" llama-3.1-70b ", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("llama3.3-70b", "llama-3.3-70b"),
        ("llama_2_13b", "llama-2-13b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mixtral_8x7b", "mixtral-8x7b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("tiny", "dsim-tiny-14m"),
    ],
)
def test_model_names(name: str, canonical: str) -> None:
    assert find_model(name).name == canonical


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("a100-80g", "a100-80g"),
        ("a100_sxm", "a100-80g"),
        ("A100-80GB-SXM", "a100-80g"),
        ("a100 80gb", "a100-80g"),
        ("a100-40gb", "a100-40g"),
        ("a100-80gb-pcie", "a100-80g-pcie"),
        ("h100", "h100-sxm"),
        ("H100-80GB", "h100-sxm"),
        ("h200", "h200-sxm"),
        ("GB200", "gb200"),
        ("rtx4090", "rtx-4090"),
        ("RTX PRO 6000", "rtx-pro-6000-server"),
        ("mi300x", "mi300x"),
        ("h20", "h20-96g"),
    ],
)
def test_gpu_names(name: str, canonical: str) -> None:
    assert find_gpu(name).name == canonical


@pytest.mark.parametrize("noun", NOUNS, ids=lambda n: n.name)
def test_every_name_and_alias_finds_its_own(noun: Model | Gpu) -> None:
    for name in (noun.name, *noun.aliases):
        find = find_model if isinstance(noun, Model) else find_gpu
        assert find(name.upper().replace("-", "_")) is noun


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "70b",
            "--model: '70b' names no model by itself; "
            "write one of llama-2-70b, llama-3-70b, llama-3.1-70b, llama-3.3-70b",
        ),
        ("8b", "--model: '8b' names no model by itself; write one of llama-3-8b, llama-3.1-8b, qwen3-8b"),
        ("7b", "--model: '7b' names no model by itself; write one of llama-2-7b, mistral-7b, qwen2.5-7b"),
        (
            "qwen3.5-27b",
            "--model: 'qwen3.5-27b' has hybrid linear attention (Qwen3_5ForConditionalGeneration), which",
        ),
        ("qwen3-nxt-80b-a3b", "--model: 'qwen3-nxt-80b-a3b' is not a known model; did you mean 'qwen3-"),
        ("opt", "--model: 'opt' names no model by itself; write one of opt-13b, opt-66b, opt-175b"),
        ("lama-3.1-8b", "--model: 'lama-3.1-8b' is not a known model; did you mean 'llama-3.1-8b'?"),
        ("opt-12b", "--model: 'opt-12b' is not a known model; did you mean 'opt-1"),
        ("", "--model: '' needs the name of a model; such as opt-13b"),
    ],
)
def test_unknown_models_name_the_nearest(name: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        find_model(name)
    assert str(caught.value).startswith(expected)


def test_unknown_gpus_name_the_nearest_and_the_place() -> None:
    with pytest.raises(InputError, match="write one of a100-40g, a100-80g, a100-80g-pcie"):
        find_gpu("a100")
    with pytest.raises(InputError) as caught:
        find_gpu("h1000", where="p.yaml:3")
    assert str(caught.value) == "p.yaml:3: 'h1000' is not a known GPU; did you mean 'h100'?"
    with pytest.raises(InputError, match="expected one of a100-40g, a100-80g"):
        find_gpu("?????")


def test_importing_the_catalog_loads_no_numpy() -> None:
    code = "import dsim.catalog, sys; dsim.catalog.models(); dsim.catalog.gpus(); assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
