"""The analytic model: its contract, its closed forms, and how far it is from steps that were measured."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsim.analytic import AnalyticLatency, Roofline, analytic_latency, efficiencies, find_efficiency
from dsim.catalog import find_gpu, find_model, gpus, models
from dsim.contract import find_violations, windowed_pairs
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.latency import LatencyModel, ValidRange
from dsim.model import Model, Quantization, SlidingWindow, WeightDtype
from placement.floor import affine_floor

SHARED = Path(__file__).parents[2] / "shared" / "data" / "truth"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the measured facts beside the repository")
GPUS = [gpu for gpu in gpus() if gpu.name != "cpu"]


def latency(model: str, gpu: str = "h100", tp: int = 1) -> AnalyticLatency:
    return analytic_latency(find_model(model), find_gpu(gpu), tp)


def violations(model: Model, gpu: Gpu, tp: int, requests: int = 64) -> list[str]:
    valid = ValidRange(chunk_tokens=model.context_tokens, decode_requests=requests)
    found = analytic_latency(model, gpu, tp, valid_range=valid)
    return [str(v) for v in find_violations(found, model=model, gpu=gpu, tp=tp)]


@pytest.mark.parametrize("model", models(), ids=lambda m: m.name)
def test_contract_of_every_model(model: Model) -> None:
    for tp in (1, 8):
        if model.attention_heads % tp == 0:
            assert violations(model, find_gpu("h100"), tp) == []


@pytest.mark.parametrize("gpu", GPUS, ids=lambda g: g.name)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "qwen3-30b-a3b-fp8"])
def test_contract_on_every_gpu(gpu: Gpu, name: str) -> None:
    assert violations(find_model(name), gpu, 4, requests=32) == []


@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3", "gpt-oss-120b", "qwen3-235b-a22b-fp8", "opt-66b"])
def test_one_step_by_every_way_to_ask(name: str) -> None:
    model = latency(name, tp=4)
    assert isinstance(model, LatencyModel)
    for requests, context in ((1, 1), (1, 700), (32, 32 * 500), (256, 256 * 4000)):
        run = model.decode_run_s(requests, context, 50)
        single = [model.decode_s(requests, context + i * requests) for i in range(50)]
        assert run == pytest.approx(single, rel=1e-12)
        line = model.decode_line(requests)
        assert (line is None) == (name == "gpt-oss-120b")
        if line is not None:
            assert line[0] + line[1] * context == pytest.approx(single[0], rel=1e-12)
    chunks = [(512, 0), (100, 900)]
    assert model.mixed_s(chunks, 0, 0) == model.prefill_s(chunks)
    assert model.mixed_s([], 7, 7000) == model.decode_s(7, 7000)
    parts = model.prefill_s(chunks), model.decode_s(7, 7000)
    assert max(parts) < model.mixed_s(chunks, 7, 7000) < sum(parts)


def test_every_input_counts() -> None:
    model = latency("llama-3.1-8b")
    assert model.prefill_s([(1025, 0)]) > model.prefill_s([(1024, 0)])
    assert model.prefill_s([(1024, 1)]) > model.prefill_s([(1024, 0)])
    assert model.prefill_s([(512, 0), (512, 0)]) < model.prefill_s([(1024, 0)]) * 1.01
    assert model.decode_s(9, 9000) > model.decode_s(8, 9000) > model.decode_s(8, 8999)


def test_chunks_of_a_prompt_pay_for_what_they_read_again() -> None:
    model = latency("llama-3.1-8b")
    whole = model.prefill_s([(8192, 0)])
    chunked = sum(model.prefill_s([(1024, 1024 * i)]) for i in range(8))
    assert whole < chunked < 1.4 * whole


def test_windows_bound_what_context_costs() -> None:
    model = find_model("llama-3.1-8b")
    windowed = replace(model, sliding_window=SlidingWindow(tokens=512, layers=16))
    full, half = (analytic_latency(m, find_gpu("h100"), 1) for m in (model, windowed))
    assert half.decode_s(4, 2048) == pytest.approx(full.decode_s(4, 2048), rel=1e-12)
    more = full.decode_s(4, 20480) - full.decode_s(4, 2048)
    assert half.decode_s(4, 20480) - half.decode_s(4, 2048) == pytest.approx(more / 2, rel=1e-9)
    assert half.prefill_s([(512, 0)]) == pytest.approx(full.prefill_s([(512, 0)]), rel=1e-12)
    assert half.prefill_s([(4096, 0)]) < full.prefill_s([(4096, 0)])


@pytest.mark.parametrize(("tokens", "cached", "window"), [(7, 0, 3), (5, 9, 4), (3, 2, 100), (4, 3, 5)])
def test_windowed_pairs_count_half_of_each_own_key(tokens: int, cached: int, window: int) -> None:
    seen = sum(min(cached + i + 1, window) for i in range(tokens))
    assert windowed_pairs(tokens, cached, window) == pytest.approx(seen, abs=tokens / 2)


def test_latent_attention_is_read_whole_by_every_gpu() -> None:
    slopes = [latency("deepseek-v2-lite", tp=tp).context_slope_s for tp in (1, 2, 4)]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.6)
    assert slopes[1] == slopes[2]
    heads = [latency("llama-3.1-70b", tp=tp).context_slope_s for tp in (1, 8)]
    assert heads[0] == pytest.approx(8 * heads[1])


def test_a_step_reads_the_experts_that_its_tokens_need() -> None:
    moe, dense = latency("mixtral-8x7b", "h200"), latency("mistral-7b", "h200")
    one, many = moe.decode_s(1, 1000), moe.decode_s(64, 64_000)
    assert one > dense.decode_s(1, 1000)
    # 12.9e9 of 46.7e9 weights for one token, all for 64.
    assert many > 2 * one
    split = analytic_latency(find_model("qwen3-235b-a22b"), find_gpu("h200"), 8)
    whole = analytic_latency(find_model("qwen3-235b-a22b"), find_gpu("h200"), 8, expert_parallel=True)
    for tokens, least, most in ((1, 1.05, 1.5), (64, 1.0, 1.4), (8192, 0.8, 1.05)):
        assert least < whole.prefill_s([(tokens, 0)]) / split.prefill_s([(tokens, 0)]) < most


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "qwen3-30b-a3b", "gpt-oss-120b", "mixtral-8x7b"])
@pytest.mark.parametrize("tp", [2, 16])
def test_contract_of_whole_experts(name: str, tp: int) -> None:
    model, gpu = find_model(name), find_gpu("b200")
    valid = ValidRange(chunk_tokens=model.context_tokens, decode_requests=64)
    found = analytic_latency(model, gpu, tp, valid_range=valid, expert_parallel=True)
    assert [str(v) for v in find_violations(found, model=model, gpu=gpu, tp=tp)] == []


def test_no_step_of_the_floor_of_whole_experts_takes_longer() -> None:
    model = find_model("deepseek-v3")
    valid = ValidRange(chunk_tokens=model.context_tokens, decode_requests=256)
    found = analytic_latency(model, find_gpu("h200"), 16, valid_range=valid, expert_parallel=True)
    floor = affine_floor(found)
    for n in (*range(1, 257, 5), 1000, 3000, 9000):
        assert floor.prefill_s([(n, 64)]) <= found.prefill_s([(n, 64)])
        assert floor.decode_s(min(n, 256), 700 * n) <= found.decode_s(min(n, 256), 700 * n)
        assert floor.mixed_s([(n, 0)], 16, 16_000) <= found.mixed_s([(n, 0)], 16, 16_000)


def test_tokens_travel_to_their_experts_and_back() -> None:
    """Beyond all-reduces' latency: the bytes of the GPUs that a token's eight experts lie on."""
    model, gpu = find_model("qwen3-30b-a3b"), find_gpu("h100")
    slow = replace(gpu, nvlink_bytes_per_s=1e9)
    tokens, layers, hidden = 4096, model.layers, model.hidden_size
    split, whole = (
        [analytic_latency(model, g, 8, expert_parallel=ep).prefill_s([(tokens, 0)]) for g in (gpu, slow)]
        for ep in (False, True)
    )
    # All-reduces move 2 · 7/8 of the bytes each, one of two a layer is left with whole experts.
    share = find_efficiency(gpu).all_reduce.share
    one_s = tokens * hidden * 2 * 2 * 7 / 8 * (1 / 1e9 - 1 / gpu.nvlink_bytes_per_s) / share
    head_s = 151936 / 8 * 2 * 2 * 7 / 8 * (1 / 1e9 - 1 / gpu.nvlink_bytes_per_s) / share
    assert split[1] - split[0] == pytest.approx((2 * layers + 1) * one_s + head_s, rel=1e-6)
    exchange_s = (whole[1] - whole[0] - (layers + 1) * one_s - head_s) / layers
    gpus = 7 * (1 - (7 / 8) ** 8)
    mean_s = tokens / 8 * gpus * hidden * 4 * (1 / 1e9 - 1 / gpu.nvlink_bytes_per_s) / share
    assert mean_s < exchange_s < 1.1 * mean_s


def test_all_reduces_between_nodes() -> None:
    """Sums of a node over NVLink, an eighth of them on each GPU's network card, and 20 µs each way."""
    model, gpu = find_model("llama-2-70b"), find_gpu("h100")
    one_node = replace(gpu, gpus_per_node=16, scale_up_domain_gpus=16)
    two, one = (analytic_latency(model, g, 16).prefill_s([(4096, 0)]) for g in (gpu, one_node))
    share, n_bytes = find_efficiency(gpu).all_reduce.share, 4096 * 8192 * 2
    nvlink_s = (2 * 7 / 8 - 2 * 15 / 16) * n_bytes / (gpu.nvlink_bytes_per_s * share)
    network_s = n_bytes / (8 * 0.8 * gpu.network_bytes_per_s)
    # The logits, too, are put together between nodes.
    assert two - one == pytest.approx(161 * (40e-6 + nvlink_s + network_s) + 40e-6, rel=1e-3)


def test_fewer_gpus_of_a_few_tokens_hold_their_experts() -> None:
    """One token's experts on 16 GPUs: the slowest reads more than its share of them, and no more than all."""
    model = find_model("deepseek-v3")
    split, whole = (analytic_latency(model, find_gpu("gb200"), 16, expert_parallel=ep) for ep in (False, True))
    assert split.decode_s(1, 100) < whole.decode_s(1, 100) < 2 * split.decode_s(1, 100)


@pytest.mark.parametrize("dtype", WeightDtype)
def test_fewer_bits_decode_faster(dtype: WeightDtype) -> None:
    model = find_model("llama-3.1-70b")
    quantised = replace(model, quantization=Quantization(dtype))
    for gpu in ("a100-80g", "h100", "b200"):
        plain_s, quantised_s = (analytic_latency(m, find_gpu(gpu), 4).decode_s(1, 500) for m in (model, quantised))
        assert 0.3 < quantised_s / plain_s < 0.95
    fp8_kv = replace(model, kv_dtype_bytes=1)
    slopes = [analytic_latency(m, find_gpu("h100"), 4).context_slope_s for m in (model, fp8_kv)]
    assert slopes[0] == pytest.approx(2 * slopes[1])


def test_all_reduces_cost_what_the_link_allows() -> None:
    nvlink, pcie = (latency("llama-2-70b", gpu, 4).prefill_s([(2048, 0)]) for gpu in ("a100-80g", "a100-80g-pcie"))
    assert pcie > 1.5 * nvlink
    # 2 · 80 + 1 all-reduces of 2048 · 8192 · 2 bytes, 2 · 3 / 4 of them over 32 GB/s.
    assert pcie - nvlink > 161 * 2048 * 8192 * 2 * 1.5 * (1 / 32e9 - 1 / 300e9)


def test_rooflines() -> None:
    sum_of_both = Roofline(fixed_s=1e-6, memory=0.5, compute=0.25)
    assert sum_of_both.time_s(1e-3, 1e-3) == pytest.approx(6.001e-3)
    sharp = replace(sum_of_both, sharpness=1000.0)
    assert sharp.time_s(1e-3, 1e-3) == pytest.approx(4.001e-3, rel=1e-6)
    assert sharp.time_s(0.0, 0.0) == 1e-6


def test_every_gpu_has_efficiencies_with_a_source() -> None:
    assert efficiencies().keys() == {gpu.name for gpu in GPUS}
    for gpu in GPUS:
        found = find_efficiency(gpu)
        assert found.source
        assert found.gemm["bf16"].error < 0.15
        assert math.isnan(found.elementwise.error)
    with pytest.raises(InputError, match="--gpu: 'cpu' has no known efficiencies"):
        find_efficiency(find_gpu("cpu"))


@needs_shared
def test_static_batches_of_tensorrt_llm() -> None:
    """Mean relative errors against TensorRT-LLM 0.9; nothing was fitted to it, and no host overhead is added."""
    names = {"LLaMA v2 13B": "llama-2-13b", "LLaMA v2 70B": "llama-2-70b"}
    on = {"A100-SXM4-80GB": "a100-80g", "H100 80GB HBM3": "h100-sxm"}
    errors: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    with (SHARED / "trtllm090_static_batch.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 254
    for row in rows:
        gpu, batch, isl, osl = on[row["gpu"]], int(row["batch_size"]), int(row["isl"]), int(row["osl"])
        model = latency(names[row["model"]], gpu, int(row["tp"]))
        prefill_s = model.prefill_s([(isl, 0)] * batch)
        decode_s = float(np.mean(model.decode_run_s(batch, batch * (isl + 1), osl - 1)))
        for phase, ours_s, key in (
            ("prefill", prefill_s, "first_token_latency_ms"),
            ("decode", decode_s, "token_to_token_latency_ms"),
        ):
            errors[phase, gpu].append(abs(ours_s / (float(row[key]) / 1e3) - 1))
    found = {key: float(np.mean(values)) for key, values in errors.items()}
    assert found == pytest.approx(
        {
            ("prefill", "a100-80g"): 0.049,
            ("decode", "a100-80g"): 0.070,
            ("prefill", "h100-sxm"): 0.121,
            ("decode", "h100-sxm"): 0.102,
        },
        abs=0.01,
    )
