"""Profiles of what nobody timed: which one is taken, what an estimate says of itself, and its KV capacity."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from dsim.catalog import find_gpu, find_model, models
from dsim.contract import find_violations
from dsim.errors import InputError
from dsim.options import Evidence
from dsim.pools import Parallelism, Role
from dsim.profile import profiles_by_role
from dsim.profile_file import load_profile
from profiles.choice import best_profile
from profiles.estimate import ENGINES, estimated_profile, expected_error
from profiles.shipped import find_profile, shipped_profiles
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
    profile = best_profile("opt-175b", "a100-80g")
    assert (profile.evidence, profile.engine) == (Evidence.ROOFLINE, "vllm")
    assert profile.name == "opt-175b-a100-80g-vllm-roofline"
    assert profile.source.startswith("roofline estimate: datasheet of a100-80g and shares of it that kernels reach")
    forced = best_profile("13b", "a100-80g", evidence=Evidence.ROOFLINE)
    assert forced.evidence is Evidence.ROOFLINE
    with pytest.raises(InputError, match="--evidence: 'measured' has no profile of opt-175b on a100-80g"):
        best_profile("opt-175b", "a100-80g", evidence=Evidence.MEASURED)
    with pytest.raises(InputError, match="--engine: 'vlm' has no latency profile for opt-13b on a100-80g; did you"):
        best_profile("13b", "a100-80g", engine="vlm")


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
    assert len(errors) == 23
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
    ("model", "gpu", "tokens"),
    [
        # What vLLM 0.30 and 0.19 said when they started (tgarg01/silybench-data; casys-kaist/LLMServingSim).
        ("qwen3-8b", "h100", 377_024),
        ("llama-3.1-8b", "rtx-pro-6000", 36_578 * 16),
    ],
)
def test_kv_capacity_is_what_engines_find(model: str, gpu: str, tokens: int) -> None:
    profile = estimated_profile(find_model(model), find_gpu(gpu))
    assert profile.kv_tokens(Parallelism(1, 1)) == pytest.approx(tokens, rel=0.05)


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
    assert profile.expected_error.startswith("4 to 7 %")
    for name, path in shipped_profiles():
        profile = load_profile(path)
        composed = profile.source.startswith("composed from kernel times")
        assert profile.evidence is (Evidence.KERNELS if composed else Evidence.MEASURED), name
    with pytest.raises(InputError, match=r"--evidence: 'measured' has no profile of llama-3\.1-70b on h100-sxm"):
        best_profile("llama-3.1-70b", "h100", evidence=Evidence.MEASURED)


def test_without_an_engine_the_best_evidence_decides() -> None:
    assert best_profile("llama-2-70b", "h100").name == "llama-2-70b-h100-sxm-vllm-2023"
    kernels = best_profile("llama-2-70b", "h100", evidence=Evidence.KERNELS)
    assert (kernels.engine, kernels.evidence) == ("vllm", Evidence.KERNELS)
    assert best_profile("opt-13b", "h100").evidence is Evidence.ROOFLINE


def test_capacity_within_the_range_holds_for_all_evidence() -> None:
    for evidence in Evidence:
        profile = best_profile("llama-2-70b", "h100", evidence=evidence)
        capped = profiles_by_role(profile, extrapolate=False)[Role.DECODE]
        for tp in (4, 8):
            full, most = profile.kv_tokens(Parallelism(tp, 1)), profile.latency[tp].valid_range.context_tokens
            assert full > 0
            assert capped.kv_tokens(Parallelism(tp, 1)) == min(full, most)
