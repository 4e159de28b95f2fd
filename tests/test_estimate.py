"""Profiles of what nobody timed: which one is taken, what an estimate says of itself, and its KV capacity."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsim.catalog import find_gpu, find_model, gpus, models
from dsim.contract import find_violations
from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.model import Model, Quantization, WeightDtype
from dsim.options import Evidence, ExpertSharing, KvDtype, Options
from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import BatchLimits, profiles_by_role
from dsim.simulate import simulate
from dsim.workload import Fixed, Poisson, Workload
from placement.feasibility import cannot_run
from profiles.choice import AS_TIMED, Variant, best_profile, choose_colocated, choose_profile
from profiles.estimate import ENGINES, estimated_profile, expected_error
from profiles.kernels.hosts import HOSTS
from profiles.memory import RULES, Reserve, gpu_token_bytes, kv_capacities, step_bytes, weight_bytes
from profiles.shipped import find_profile, profile_file, shipped_profiles
from tests.cli import Cli
from tests.test_hugging_face import QWEN3

SHARED = Path(__file__).parents[2] / "shared" / "data" / "truth"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the measured facts beside the repository")


def test_a_measured_profile_is_taken_where_there_is_one() -> None:
    for name in ("13b", "66b"):
        assert best_profile(name, "a100-80g") == find_profile(name, "a100-80g", engine="distserve")
        assert best_profile(name, "a100-80g", engine="vllm") == find_profile(name, "a100-80g", engine="vllm")
    assert best_profile("llama-2-70b", "h100", engine="vllm-2023").evidence is Evidence.MEASURED


def test_otherwise_step_times_are_estimated() -> None:
    profile = best_profile("qwen2.5-72b", "a100-80g")
    assert (profile.evidence, profile.engine) == (Evidence.ROOFLINE, "vllm")
    assert profile.name == "qwen2.5-72b-a100-80g-vllm-roofline"
    assert profile.source.startswith("roofline estimate: datasheet of a100-80g and shares of it that kernels reach")
    forced = best_profile("13b", "a100-80g", evidence=Evidence.ROOFLINE)
    assert forced.evidence is Evidence.ROOFLINE
    with pytest.raises(InputError, match=r"--evidence: 'measured' has no profile of qwen2\.5-72b on a100-80g"):
        best_profile("qwen2.5-72b", "a100-80g", evidence=Evidence.MEASURED)
    with pytest.raises(InputError, match="--engine: 'vlm' has no latency profile for opt-13b on a100-80g; did you"):
        best_profile("13b", "a100-80g", engine="vlm")
    # Those that can be estimated are named too, whether something is shipped or not.
    for model, gpu, engines in (
        ("deepseek-v3", "b200", "vllm, sglang"),
        ("llama-3.1-8b", "h100", "trtllm, vllm, sglang"),
    ):
        with pytest.raises(
            InputError, match=f"--engine: 'dynamo' has no latency profile for {model}.*one of {engines}"
        ):
            best_profile(model, gpu, engine="dynamo")


def test_what_an_estimate_says_of_its_error() -> None:
    def error(model: str, gpu: str) -> str:
        return expected_error(find_model(model), find_gpu(gpu))

    assert error("llama-3.1-8b", "h100").startswith("about 10 % (16 bits; Llama-2 on A100 and H100")
    assert error("llama-3.1-8b", "h200").startswith("about 12 % (that of its prefill attention, the least certain")
    assert "(that of its experts, the least certain kernels)" in error("mixtral-8x7b", "h100")
    assert error("llama-3.1-8b", "mi300x").startswith("unknown: no kernels of mi300x were timed, h100-sxm's")


@needs_shared
def test_decode_steps_of_vllm() -> None:
    """Median gaps between tokens of vLLM 0.30, whose host work was fitted to the eight runs called chat."""
    profile = estimated_profile(find_model("qwen3-8b"), find_gpu("h100"))
    latency, host = profile.latency_at(1), profile.host[Role.DECODE]
    with (SHARED / "silybench_qwen3_8b_h100.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    errors = []
    for row in rows:
        users, context = int(row["concurrency"]), int(row["input_len"]) + int(row["output_len"]) // 2
        # Beyond that prompts in between, or memory, decide what runs together.
        if row["workload"] != "chat" and users <= 64 and users * context < profile.kv_tokens(Parallelism(1, 1)) / 2:
            step_s = latency.decode_s(users, users * context) + host.launch_s(users, 0)
            errors.append(abs(step_s * 1e3 / float(row["itl_median_ms"]) - 1))
    assert len(errors) == 22
    assert sum(errors) / len(errors) == pytest.approx(0.016, abs=0.005)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_estimate_keeps_the_contract(engine: str) -> None:
    profile = estimated_profile(find_model("qwen3-32b"), find_gpu("h200"), engine=engine)
    assert sorted(profile.latency) == [1, 2, 4, 8, 16]
    for tp, latency in profile.latency.items():
        assert find_violations(latency, model=profile.model, gpu=profile.gpu, tp=tp) == []
    assert profile.host[Role.DECODE].step_s > 0
    assert 128 <= (profile.saturation_tokens or 0) <= 1024


@pytest.mark.parametrize(
    ("model", "gpu", "limits", "tokens"),
    [
        # What vLLM 0.30 and 0.19 said when they started (tgarg01/silybench-data; casys-kaist/LLMServingSim).
        ("qwen3-8b", "h100", BatchLimits(8192, 1024), 377_024),
        ("llama-3.1-8b", "rtx-pro-6000", BatchLimits(2048, 128), 36_578 * 16),
    ],
)
def test_kv_capacity_is_what_engines_find(model: str, gpu: str, limits: BatchLimits, tokens: int) -> None:
    found = kv_capacities(find_model(model), find_gpu(gpu), "vllm", [1], limits=limits)
    assert found[Parallelism(1, 1)] == pytest.approx(tokens, rel=0.02)


def test_kv_capacity_of_sglang() -> None:
    """What SGLang 0.4.1 printed with mem_fraction_static 0.88 on a GPU of 80 GB (its page "Sending Requests")."""
    model, one = find_model("llama-3.1-8b"), Parallelism(1, 1)
    kv_bytes = Reserve(1, "", share=0.88).kv_bytes(model, find_gpu("h100"), one, BatchLimits())
    assert kv_bytes / gpu_token_bytes(model, one) == pytest.approx(444_500, rel=0.005)
    # Later releases keep 13 GiB back: 512 + 1.5 · 8192 + 2 · 256 + 128 MiB.
    later = RULES["sglang"].kv_bytes(model, find_gpu("h100"), one, BatchLimits())
    assert later < kv_bytes
    assert kv_bytes - later == pytest.approx((13_440 / 81_920 - 0.12) * 84.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "tp", "reserve_mib"),
    [
        ("l4", 1, 512 + 1.5 * 2048 + 2 * 24 + 128),
        ("l4", 4, 512 + 1.5 * 2048 + 2 * 80 + 128 * 4),
        ("a100-40g", 2, 512 + 1.5 * 4096 + 2 * 32 + 128 * 2),
        ("l40s", 8, 512 + 1.5 * 4096 + 2 * 160 + 128 * 8),
        ("h100", 2, 512 + 1.5 * 8192 + 2 * 256 + 128 * 2),
        ("h200", 4, 512 + 1.5 * 8192 + 2 * 512 + 128 * 4),
        ("b200", 1, 512 + 1.5 * 16384 + 2 * 512 + 128),
    ],
)
def test_what_sglang_keeps_back(gpu: str, tp: int, reserve_mib: float) -> None:
    """By size of the GPU: chunks, graphs (larger batches from four GPUs on), and 128 MiB a GPU (server_args.py)."""
    model, found_gpu, at = find_model("qwen3-0.6b"), find_gpu(gpu), Parallelism(tp, 1)
    assert reserve_mib >= 10 * 1024 or found_gpu.memory_bytes < 60 * 2**30
    share = 1 - reserve_mib / (found_gpu.memory_bytes / 2**20)
    expected = Reserve(1, "", share=share).kv_bytes(model, found_gpu, at, BatchLimits())
    assert RULES["sglang"].kv_bytes(model, found_gpu, at, BatchLimits()) == pytest.approx(expected)


def test_activations_of_experts() -> None:
    """Each token's inputs or gates and ups, whichever are wider, of every expert it goes to, and of the shared one."""
    deepseek, mixtral = find_model("deepseek-v3"), find_model("mixtral-8x7b")
    assert step_bytes(deepseek, 8, BatchLimits(8192, 1)) == 8192 * 2 * (4 * 7168 + 8 * (7168 + 2048 / 8) + 3 * 2048 / 8)
    assert step_bytes(mixtral, 1, BatchLimits(8192, 1)) == 8192 * 2 * (4 * 4096 + 2 * (2 * 14336 + 14336))
    # Sampling takes more where many requests have a large vocabulary.
    assert step_bytes(deepseek, 8, BatchLimits(1, 1024)) == 1024 * 129280 * 26


@needs_shared
def test_kv_capacity_of_distserve_is_what_it_published() -> None:
    with (SHARED.parent / "distserve" / "max_num_tokens.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 76
    for row in rows:
        model, at = find_model(row["model"].split("/")[1]), Parallelism(int(row["tp"]), int(row["pp"]))
        kv_bytes = RULES["distserve"].kv_bytes(model, find_gpu("a100-80g"), at, BatchLimits())
        assert kv_bytes / gpu_token_bytes(model, at) == pytest.approx(int(row["max_num_tokens"]), rel=0.002)


@pytest.mark.parametrize("engine", RULES)
def test_memory_that_the_rules_share_out(engine: str) -> None:
    """More GPUs, more memory and fewer bits leave more room; a model that is too large leaves none."""
    model, gpu, limits = find_model("llama-3.1-70b"), find_gpu("h100"), BatchLimits(8192, 256)

    def tokens(model: Model, gpu: Gpu, tp: int, pp: int = 1) -> int:
        return kv_capacities(model, gpu, engine, [tp], limits=limits)[Parallelism(tp, pp)]

    assert tokens(model, gpu, 1) == 0
    assert 0 < tokens(model, gpu, 4) < tokens(model, gpu, 4, 2) <= tokens(model, gpu, 8) * 1.01
    assert tokens(model, find_gpu("h200"), 4) > 2 * tokens(model, gpu, 4)
    assert tokens(replace(model, quantization=Quantization(WeightDtype.FP8)), gpu, 1) >= 0
    fp8_kv = replace(model, kv_dtype_bytes=1)
    assert tokens(fp8_kv, gpu, 4) == pytest.approx(2 * tokens(model, gpu, 4), abs=RULES[engine].block_tokens)


def test_weights_of_a_gpu() -> None:
    """Shares of all weights add up to them, and to more where GPUs hold the same."""
    dense, latent = find_model("llama-3.1-70b"), find_model("deepseek-v3")
    for tp, pp in ((1, 1), (8, 1)):
        assert weight_bytes(dense, Parallelism(tp, pp)) * tp == pytest.approx(dense.weight_bytes, rel=1e-3)
    # Eight KV heads on sixteen GPUs; compressions and routers whole on each.
    assert 16 * weight_bytes(dense, Parallelism(16, 1)) - dense.weight_bytes > 80 * 2 * 8192 * 1024 * 2 * 0.99
    whole = 61 * 7168 * (1536 + 576) * latent.matrix_weight_bytes + 58 * 7168 * 256 * latent.dtype_bytes
    copies = 8 * weight_bytes(latent, Parallelism(8, 1)) - latent.weight_bytes
    assert copies == pytest.approx(7 * whole, rel=0.01)
    # The stage with the output head is fuller than half of the model.
    assert weight_bytes(dense, Parallelism(1, 2)) > dense.weight_bytes / 2 * 0.999


def test_copies_of_latent_kv_take_room() -> None:
    profile = estimated_profile(find_model("deepseek-v3"), find_gpu("h200"))
    with_tp, with_pp = profile.kv_tokens(Parallelism(16, 1)), profile.kv_tokens(Parallelism(8, 1))
    assert with_pp < with_tp < 2 * with_pp
    assert profile.kv_tokens(Parallelism(1, 1)) <= 0


def test_every_model_can_be_estimated() -> None:
    for model in models():
        profile = estimated_profile(model, find_gpu("b200"))
        assert profile.latency
        assert len(profile.sha256) == 64
        assert profile.expected_error


def test_a_config_file_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3))
    cli = Cli(capsys)
    arguments = [
        "simulate",
        "--model",
        str(path),
        "--gpu",
        "h100",
        "--placement",
        "1xC:tp1pp1",
        "--rate",
        "4",
        "-n",
        "50",
    ]
    shown = cli(*arguments).out
    assert "Qwen3-8B (Qwen/Qwen3-8B) on h100-sxm, engine vllm (estimated)" in shown
    assert "evidence: roofline, no measured steps; expected error of a step about 10 %" in shown
    answer = json.loads(cli(*arguments, "--format", "json").out)
    assert answer["profile"]["evidence"] == "roofline"
    assert answer["model"] == "qwen3-8b"


def test_caveats_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(capsys)
    arguments = ["search", "--model", "deepseek-v3.2", "--gpu", "h200", "--slo", "ttft=2,tpot=0.1", "--dry-run"]
    shown = cli(*arguments).out
    assert "caveat: its sparse attention indexer (DSA) is not modelled" in shown
    assert shown.count("evidence: roofline") == 1


def test_kernels_are_better_than_estimates_and_say_what_they_are() -> None:
    profile = best_profile("llama-3.1-70b", "h100")
    assert (profile.evidence, profile.engine) == (Evidence.KERNELS, "vllm")
    assert profile.expected_error.startswith("4 to 8 %")
    for name, path in shipped_profiles():
        text = path.read_text(encoding="utf-8")
        composed = re.search("^source: .?composed from kernel times", text, re.MULTILINE) is not None
        if "\nevidence: roofline\n" not in text:
            assert composed == ("\nevidence: kernels\n" in text), name
    with pytest.raises(InputError, match=r"--evidence: 'measured' has no profile of llama-3\.1-70b on h100-sxm"):
        best_profile("llama-3.1-70b", "h100", evidence=Evidence.MEASURED)


def test_without_an_engine_the_best_evidence_decides() -> None:
    assert best_profile("llama-2-70b", "h100").name == "llama-2-70b-h100-sxm-vllm-2023"
    kernels = best_profile("llama-2-70b", "h100", evidence=Evidence.KERNELS)
    assert (kernels.engine, kernels.evidence) == ("vllm", Evidence.KERNELS)
    assert best_profile("opt-13b", "h100").evidence is Evidence.ROOFLINE


def test_an_engine_without_kernels_takes_another_ones() -> None:
    """Kernel times of vLLM; limits, memory and host work of SGLang. Better than an estimate, worse than its own."""
    theirs = best_profile("llama-3.1-8b", "h100", engine="vllm")
    profile = best_profile("llama-3.1-8b", "h100", engine="sglang")
    assert (profile.evidence, profile.engine) == (Evidence.OTHER_KERNELS, "sglang")
    assert profile.name == "llama-3.1-8b-h100-sxm-sglang-kernels-of-vllm"
    assert profile.source.startswith("kernels of vllm (")
    assert profile.expected_error.endswith("engines differ by 10 to 30 % at the same point")
    assert profile.latency_at(2).decode_s(8, 8000) == theirs.latency_at(2).decode_s(8, 8000)
    assert profile.request_s == HOSTS["sglang"].request_s
    limits = profile.limits[Role.COLOCATED]
    rule = kv_capacities(profile.model, profile.gpu, "sglang", [1], limits=BatchLimits(8192, 1024))
    assert profile.kv_tokens(Parallelism(1, 1)) == rule[Parallelism(1, 1)]
    assert limits.requests <= theirs.latency_at(1).valid_range.decode_requests
    assert best_profile("llama-3.1-8b", "h100", engine="sglang", evidence=Evidence.OTHER_KERNELS) == profile
    assert (
        best_profile("llama-3.1-8b", "h100", engine="sglang", evidence=Evidence.ROOFLINE).evidence is Evidence.ROOFLINE
    )


def test_colocated_placements_of_another_engine() -> None:
    used = best_profile("llama-3.1-8b", "h100")
    assert choose_colocated(used, engine="sglang") == best_profile("llama-3.1-8b", "h100", engine="sglang")
    assert choose_colocated(used, engine="trtllm").evidence is Evidence.KERNELS
    estimate = best_profile("qwen3-30b-a3b", "h100", variant=Variant(ExpertSharing.EP, KvDtype.FP8))
    other = choose_colocated(estimate, engine="trtllm", variant=Variant(ExpertSharing.EP, KvDtype.FP8))
    assert (other.engine, other.name[-7:], other.model) == ("trtllm", "-ep-kv8", estimate.model)


def test_host_work_of_prompts_is_the_engines_own() -> None:
    trtllm = best_profile("llama-2-13b", "h100", engine="trtllm")
    forced = best_profile("llama-2-13b", "h100", engine="vllm", evidence=Evidence.OTHER_KERNELS)
    assert forced.name.endswith("-vllm-kernels-of-trtllm")
    two, one = ([(100, 0), (100, 0)], [(200, 0)])
    mine, theirs = (p.latency_at(1).prefill_s(two) - p.latency_at(1).prefill_s(one) for p in (forced, trtllm))
    assert theirs - mine == pytest.approx(HOSTS["trtllm"].prompt_s - HOSTS["vllm"].prompt_s, rel=1e-6)


def test_order_of_evidence() -> None:
    """Measured, own kernels, other kernels, estimates: each only where nothing better is."""
    found = {
        engine: best_profile("llama-2-70b", "h100", engine=engine).evidence
        for engine in ("vllm-2023", "vllm", "trtllm", "sglang")
    }
    assert list(found.values()) == [Evidence.MEASURED, Evidence.KERNELS, Evidence.KERNELS, Evidence.OTHER_KERNELS]
    assert best_profile("llama-2-7b", "h100", engine="sglang").evidence is Evidence.ROOFLINE
    with pytest.raises(
        InputError, match="--evidence: 'other-kernels' has no profile of llama-2-7b on h100-sxm under sg"
    ):
        best_profile("llama-2-7b", "h100", engine="sglang", evidence=Evidence.OTHER_KERNELS)
    with pytest.raises(InputError, match="; name the engine that has none of its own, as in --engine sglang"):
        best_profile("llama-2-70b", "h100", evidence=Evidence.OTHER_KERNELS)


def test_what_runs_otherwise_than_timed_is_estimated() -> None:
    fp8_kv = Variant(kv_dtype=KvDtype.FP8)
    plain, halved = (
        best_profile("llama-3.1-8b", "h100", variant=v, evidence=e)
        for v, e in ((AS_TIMED, Evidence.ROOFLINE), (fp8_kv, None))
    )
    assert halved.evidence is Evidence.ROOFLINE
    assert halved.name == "llama-3.1-8b-h100-sxm-vllm-roofline-kv8"
    one = Parallelism(1, 1)
    assert halved.kv_tokens(one) == pytest.approx(2 * plain.kv_tokens(one), abs=32)
    slopes = [p.latency_at(1).decode_s(8, 80_000) - p.latency_at(1).decode_s(8, 8_000) for p in (halved, plain)]
    assert slopes[1] == pytest.approx(2 * slopes[0])
    with pytest.raises(
        InputError, match=r"'kernels' has no profile of llama-3\.1-8b on h100-sxm with --kv-dtype fp8; leave"
    ):
        best_profile("llama-3.1-8b", "h100", variant=fp8_kv, evidence=Evidence.KERNELS)
    # What changes nothing leaves the evidence as it is.
    same = Variant(ExpertSharing.EP, KvDtype.BF16)
    assert best_profile("llama-3.1-8b", "h100", variant=same) == best_profile("llama-3.1-8b", "h100")
    whole = best_profile("qwen3-30b-a3b", "h100", variant=same)
    assert (whole.evidence, whole.name[-3:]) == (Evidence.ROOFLINE, "-ep")
    assert whole.sha256 != best_profile("qwen3-30b-a3b", "h100", evidence=Evidence.ROOFLINE).sha256
    path = profile_file(model="qwen3-30b-a3b", gpu="h100", engine="vllm")
    with pytest.raises(InputError, match="--experts: 'ep' does not go with --profile, whose steps are otherwise"):
        choose_profile(file=path, variant=same)


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-r1", "kimi-k2", "qwen3-235b-a22b", "gpt-oss-120b"])
def test_models_with_experts_answer_with_whole_ones(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-m", model, "--gpu", "b200", "-p", "1xP:tp8pp1 + 1xD:tp8pp1", "-r", "2", "-n", "60", "--warmup", "0"]
    answers = []
    for experts in ("tp", "ep"):
        run = Cli(capsys)("simulate", *arguments, "--experts", experts, "--evidence", "roofline", "--format", "json")
        assert run.code == 0
        answers.append(json.loads(run.out))
    assert answers[1]["profile"]["source"].startswith("roofline estimate, ep: ")
    split, whole = (answer["tpot_s"]["mean"] for answer in answers)
    assert 0.7 < whole / split < 1.5
    assert whole != split


def _pairs() -> list[tuple[Model, Gpu]]:
    """Every model once or more and every GPU several times."""
    known = [gpu for gpu in gpus() if gpu.name != "cpu"]
    return [(model, known[(7 * i + j) % len(known)]) for i, model in enumerate(models()) for j in (0, 3)]


def test_every_model_and_gpu_answers_or_says_why_not() -> None:
    """On the smallest instance of a node that holds the model: within the laws, and no faster than the datasheet."""
    lengths, refused = Workload(Poisson(), Fixed(512, 32)), 0
    for model, gpu in _pairs():
        profile = best_profile(model.name, gpu.name)
        within = [at for at in map(Parallelism, sorted(profile.latency)) if at.tp <= gpu.gpus_per_node]
        placements = [
            Placement.colocated(parallelism=at, count=1, policy=Policy.CHUNKED, token_budget=2048) for at in within
        ]
        reasons = [cannot_run(placement, dict.fromkeys(Role, profile)) for placement in placements]
        usable = [placement for placement, found in zip(placements, reasons, strict=True) if not found]
        if not usable:
            assert "leave no room for KV in" in reasons[-1][-1], (model.name, gpu.name, reasons)
            refused += 1
            continue
        trace = lengths.trace(num_requests=20, seed=0, context_tokens=model.context_tokens, rate_per_s=0.2)
        result = simulate(usable[0], trace, profiles=profile, options=Options(check=True))
        num_gpus, tables = usable[0].num_gpus, model.vocabulary * model.hidden_size
        flops_per_s = max(gpu.bf16_flops_per_s, gpu.fp8_flops_per_s or 0.0, gpu.fp4_flops_per_s or 0.0)
        prompt_s = 2 * 512 * (model.active_parameters - 2 * tables) / (flops_per_s * num_gpus)
        read = model.layer_matrix_bytes(0 if model.experts is None else model.experts.per_token)
        assert float(np.min(result.ttft_s)) > prompt_s, (model.name, gpu.name)
        assert float(np.min(result.tpot_s)) > read / (gpu.hbm_bytes_per_s * num_gpus), (model.name, gpu.name)
    assert 5 < refused < len(_pairs()) / 2


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("a100-80g", "h100"),
        ("h100", "h200"),
        ("h200", "b200"),
        ("l4", "l40s"),
        ("mi300x", "mi355x"),
        ("a10g", "rtx-4090"),
    ],
)
def test_better_gpus_are_faster(slower: str, faster: str) -> None:
    """Estimates of steps that kernels bound, at the same degree, beyond a node too."""
    for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3", "gpt-oss-120b"):
        one, two = (estimated_profile(find_model(name), find_gpu(gpu)) for gpu in (slower, faster))
        for tp in one.latency:
            before, after = one.latency_at(tp), two.latency_at(tp)
            assert after.decode_s(64, 64 * 1024) < before.decode_s(64, 64 * 1024), (name, tp)
            assert after.prefill_s([(4096, 0)]) < before.prefill_s([(4096, 0)]), (name, tp)


def test_capacity_within_the_range_holds_for_all_evidence() -> None:
    for evidence in Evidence:
        engine = "sglang" if evidence is Evidence.OTHER_KERNELS else None
        profile = best_profile("llama-2-70b", "h100", engine=engine, evidence=evidence)
        capped = profiles_by_role(profile, extrapolate=False)[Role.DECODE]
        for tp in (4, 8):
            full, most = profile.kv_tokens(Parallelism(tp, 1)), profile.latency[tp].valid_range.context_tokens
            assert full > 0
            assert capped.kv_tokens(Parallelism(tp, 1)) == min(full, most)
