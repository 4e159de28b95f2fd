"""The catalog's numbers against nominal ones and datasheets, and its names."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from dsim.catalog import find_gpu, find_model, gpus, models
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.model import Model

SHARED = Path(__file__).parents[2] / "shared" / "data" / "catalog"
NOUNS: list[Model | Gpu] = [*models(), *gpus()]
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the measured facts beside the repository")

#: Billions of parameters as the models' authors state them, and KV bytes per token in 16 bits
#: (2 × layers × KV heads × head size × 2 bytes, from the config files).
NOMINAL = {
    "opt-13b": (13.0, 819_200),
    "opt-66b": (66.0, 2_359_296),
    "opt-175b": (175.0, 4_718_592),
    "llama-2-7b": (6.74, 524_288),
    "llama-2-13b": (13.0, 819_200),
    "llama-2-70b": (69.0, 327_680),
    "llama-3-8b": (8.03, 131_072),
    "llama-3-70b": (70.6, 327_680),
    "llama-3.1-8b": (8.03, 131_072),
    "llama-3.1-70b": (70.6, 327_680),
    "llama-3.1-405b": (405.9, 516_096),
    "llama-3.2-1b": (1.23, 32_768),
    "llama-3.2-3b": (3.21, 114_688),
    "llama-3.3-70b": (70.6, 327_680),
    "qwen3-32b": (32.8, 262_144),
    # Ours, so nominal is what it was made for.
    "dsim-tiny-14m": (0.0136, 12_288),
}


def test_every_model_has_a_nominal_size_to_be_compared_with() -> None:
    assert {m.name for m in models()} == NOMINAL.keys()


@pytest.mark.parametrize("model", models(), ids=lambda m: m.name)
def test_parameters_and_kv_bytes_are_the_nominal_ones(model: Model) -> None:
    billions, kv_bytes = NOMINAL[model.name]
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.015)
    assert model.kv_bytes_per_token == kv_bytes
    assert model.weight_bytes == model.dtype_bytes * model.parameters
    assert model.dtype_bytes == (4 if model.name == "dsim-tiny-14m" else 2)


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
def test_shapes_match_the_collected_configs() -> None:
    with (SHARED / "model_shapes.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["hf_id"]: row for row in csv.DictReader(file)}
    checked = 0
    for model in models():
        row = next((rows[name] for name in (model.hugging_face, *model.aliases) if name in rows), None)
        if row is None:
            continue
        checked += 1
        assert (model.layers, model.hidden_size, model.attention_heads, model.kv_heads, model.head_dim) == tuple(
            int(row[key])
            for key in (
                "num_hidden_layers",
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
            )
        )
        assert (model.ffn_size, model.vocabulary) == (int(row["intermediate_size"]), int(row["vocab_size"]))
        assert model.context_tokens == int(row["max_position_embeddings"])
        assert model.parameters == pytest.approx(float(row["params_total_B_est"]) * 1e9, rel=0.002)
        assert model.kv_bytes_per_token == int(row["kv_bytes_per_token_bf16"])
    assert checked >= 9


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
        ("8b", "--model: '8b' names no model by itself; write one of llama-3-8b, llama-3.1-8b"),
        ("7b", "--model: '7b' names no model by itself; did you mean llama-2-7b"),
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
