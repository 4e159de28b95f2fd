"""Measures: the same as the commands and the library say, every column known, deterministic."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.options import Window
from dsim.pools import Role
from dsim.simulate import simulate
from dsim.slo import Slo
from dsim.workload import Poisson, Workload, preset
from dsim.yamlfile import parse_yaml
from experiments.base import parse_setting
from experiments.measures import columns, measure
from experiments.settings import Measure, Setting
from placement.queueing import md1_goodput_per_s
from placement.search import Question, search
from profiles.shipped import find_profile
from tests.cli import Cli

EXPERIMENTS = Path(__file__).parents[1] / "experiments"

BASE = """\
model: 13b
placement: 1xP:tp2pp1 + 1xD:tp1pp1
slo: {ttft: 0.25, tpot: 0.1}
rate: 4
requests: 300
finite: true
"""

CASES = {
    "simulate": BASE + "quantiles: [ttft_s, transfer_s]\n",
    "steady": BASE.replace("finite: true", "warmup: 50"),
    "colocated": BASE.replace("1xP:tp2pp1 + 1xD:tp1pp1", "1xC:tp1pp1").replace("rate: 4", "rate: 1"),
    "prefill": BASE + "phase: prefill\n",
    "decode": BASE + "phase: decode\n",
    "goodput": BASE + "measure: goodput\nworkload: fixed:64,8\n",
    "prefill goodput": BASE + "measure: goodput\nphase: prefill\nworkload: fixed:64,8\n",
    "search": BASE + "measure: search\nworkload: fixed:64,8\nsearch: {gpus: 2, requests: 50, top: 1}\n",
    "authors": BASE + "measure: search\nsearch: {gpus: 4, method: authors, mode: disaggregated, timing: true}\n",
    "prefill step": BASE + "measure: step\nstep: {phase: prefill, batch: 4, prompt_tokens: 512, pp: 2}\n",
    "decode step": BASE + "measure: step\nstep: {phase: decode, batch: 4, context_tokens: 512, tp: 2}\n",
    "mixed step": BASE + "measure: step\nstep: {phase: mixed, batch: 4, context_tokens: 512, prompt_tokens: 64}\n",
    "chunks": BASE + "measure: step\nstep: {phase: chunked, batch: 0, prompt_tokens: 1000, chunk_tokens: 300}\n",
    "queueing": BASE + "measure: queueing\nqueueing: {formula: speedup, prefill_s: 200ms, tp_speedup: 1.7}\n",
}


def setting(text: str) -> Setting:
    return parse_setting(parse_yaml(text.encode(), file="base.yaml"), folder=EXPERIMENTS)


def measured(text: str, seed: int = 0) -> dict[str, Any]:
    return measure(setting(text), seed=seed)


def names(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize("case", CASES)
def test_columns_are_known_plain_and_the_same_again(case: str) -> None:
    asked = setting(CASES[case])
    first, second = measure(asked, seed=3), measure(asked, seed=3)
    for timed in ("elapsed_s", "cpu_s"):
        first.pop(timed, None)
        second.pop(timed, None)
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)
    known = columns(asked.measure)
    stray = [name for name in names(first) if name not in known and not any(k.startswith(f"{name}.") for k in known)]
    assert stray == []
    assert "num_gpus" in first


def test_every_measure_has_columns() -> None:
    for kind in Measure:
        assert len(set(columns(kind))) == len(columns(kind))


def test_simulate_says_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--placement", "1xP:tp2pp1 + 1xD:tp1pp1", "--rate", "4", "--requests", "300", "--warmup", "50"]
    run = Cli(capsys)("simulate", "--model", "13b", "--slo", "ttft=0.25,tpot=0.1", *options, "--format", "json")
    said, found = json.loads(run.out), measured(CASES["steady"])
    for name in ("attainment", "ttft_s", "tpot_s", "itl_s", "e2e_s", "throughput_per_s", "saturation", "kv_peak"):
        assert found[name] == said[name], name


def test_search_says_what_the_library_says() -> None:
    distserve, vllm = (find_profile("13b", "a100-80g", engine=name) for name in ("distserve", "vllm"))
    profiles = {Role.PREFILL: distserve, Role.DECODE: distserve, Role.COLOCATED: vllm}
    lengths = setting(CASES["search"]).traffic.workload
    assert isinstance(lengths, Workload)
    question = Question(profiles, lengths, Slo(0.25, 0.1), num_gpus=2, num_requests=50, top=1)
    best = search(question).best
    found = measured(CASES["search"])
    assert best.disaggregated is not None
    assert found["best"]["disaggregated"]["placement"] == str(best.disaggregated.placement)
    assert best.overall is not None
    assert best.overall.goodput_per_gpu_per_s is not None
    assert found["goodput_per_gpu_per_s"] == best.overall.goodput_per_gpu_per_s.to_dict()


def test_goodput_of_one_placement_is_what_a_search_finds_for_it() -> None:
    """Another start, the same runs and the same estimator: the intervals overlap, and each holds the other's best."""
    text = "model: 13b\nworkload: fixed:512,16\nslo: {ttft: 0.4, tpot: 0.1}\nsearch: {gpus: 2, mode: disaggregated}\n"
    found = measured(text + "measure: goodput\nplacement: 1xP:tp1pp1 + 1xD:tp1pp1\nrequests: 10000\n")
    searched = measured(text + "measure: search\n")
    assert searched["placement"] == found["placement"]
    one, other = found["goodput_per_gpu_per_s"], searched["goodput_per_gpu_per_s"]
    assert one["low"] < other["best"] < one["high"]
    assert other["low"] < one["best"] < other["high"]


def test_goodput_of_one_phase_is_erlangs() -> None:
    text = """\
profile: profiles/fig4.yaml
measure: goodput
placement: 1xP:tp1pp1 + 1xD:tp1pp1
phase: prefill
workload: fixed:512,2
slo: {ttft: 0.4}
requests: 20000
"""
    found = measured(text)["goodput_per_gpu_per_s"]
    exact = md1_goodput_per_s(0.2, ttft_s=0.4, attainment=0.9)
    assert found["low"] <= exact <= found["high"]
    assert found["high"] - found["low"] < 0.1 * exact


def test_parts_of_a_request_add_up() -> None:
    found = measured(CASES["simulate"])
    assert math.fsum(found["parts_share"].values()) == pytest.approx(1, abs=1e-9)
    assert len(found["quantiles"]["transfer_s"]) == 101
    assert found["quantiles"]["transfer_s"][50] == pytest.approx(found["transfer_s"]["p50"], rel=1e-12)


def test_one_pool_alone_shows_its_own_phase_only() -> None:
    prefill, decode = measured(CASES["prefill"]), measured(CASES["decode"])
    assert prefill["tpot_s"]["mean"] is None
    assert decode["ttft_s"]["mean"] is None
    assert (prefill["num_gpus"], decode["num_gpus"]) == (2, 1)


def test_steps_are_the_latency_models_own() -> None:
    profile = find_profile("13b", "a100-80g", engine="distserve")
    latency, host = profile.latency_at(2), profile.host_of(Role.DECODE, 1)
    found = measured(CASES["decode step"])
    assert found["step_s"] == pytest.approx(latency.decode_s(4, 2048) + host.launch_s(4, 2048), rel=1e-12)
    assert found["tokens_per_s"] == pytest.approx(4 / found["step_s"], rel=1e-12)


def test_throughput_is_that_of_the_steady_state() -> None:
    """Equal gaps and lengths: what arrives completes at the same pace, 4 requests/s of 50 tokens, on three GPUs."""
    text = BASE.replace("requests: 300", "requests: 40") + "arrivals: constant\nworkload: fixed:64,50\n"
    finite, steady = measured(text), measured(text.replace("finite: true", "warmup: 50"))
    assert steady["throughput_per_s"] == pytest.approx(4, rel=1e-12)
    assert steady["good_throughput_per_s"] == pytest.approx(4, rel=1e-12)
    assert steady["output_tokens_per_s"] == pytest.approx(200, rel=1e-12)
    assert steady["output_tokens_per_gpu_per_s"] == pytest.approx(200 / 3, rel=1e-12)
    assert steady["output_tokens_per_user_per_s"] == pytest.approx(1 / steady["tpot_s"]["mean"], rel=1e-12)
    # All 40 of a finite run count, from the first arrival to the end of the last, one E2E after the 39th gap.
    span_s = 39 / 4 + finite["e2e_s"]["mean"]
    assert finite["throughput_per_s"] == pytest.approx(40 / span_s, rel=1e-2)
    assert finite["output_tokens_per_s"] == pytest.approx(50 * finite["throughput_per_s"], rel=1e-12)
    # So do 20 of a run without a warm-up: nothing would complete while the last of them arrive.
    text = text.replace("requests: 40", "requests: 20").replace("fixed:64,50", "fixed:64,300")
    ramp = measured(text.replace("finite: true", "warmup: 0"))
    assert ramp["throughput_per_s"] == pytest.approx(20 / (19 / 4 + ramp["e2e_s"]["mean"]), rel=0.05)


def test_short_steady_runs_are_not_biased() -> None:
    """Means over 30 seeds of 100 requests: within 2.6 standard errors (1 %) of the rate, Poisson arrivals."""
    text = BASE.replace("requests: 300", "requests: 100").replace("finite: true", "warmup: 100")
    found = [measured(text + "workload: fixed:64,100\n", seed)["throughput_per_s"] for seed in range(30)]
    assert np.mean(found) == pytest.approx(4, abs=2.6 * np.std(found, ddof=1) / math.sqrt(30))
    assert np.std(found, ddof=1) < 0.6


def test_completions_that_count_are_those_within_the_window() -> None:
    asked = setting(CASES["steady"])
    text = CASES["steady"].replace("slo: {ttft: 0.25", "slo: {ttft: 0.1")
    found = measured(text)
    assert asked.placement is not None
    assert isinstance(asked.traffic.workload, Workload)
    result = simulate(
        asked.placement,
        asked.traffic.workload.steady(num_requests=350, seed=0, context_tokens=2048, rate_per_s=4.0),
        profiles=asked.profiles,
        options=asked.options,
        window=Window(50, 300),
    )
    arrival_s, last_s = result.columns["arrival_s"], result.columns["last_token_s"]
    within = [i for i, end in enumerate(last_s) if arrival_s[50] < end <= arrival_s[349]]
    span_s = arrival_s[349] - arrival_s[50]
    assert min(within) < 50, "requests of the warm-up complete there too"
    assert found["throughput_per_s"] == pytest.approx(len(within) / span_s, rel=1e-12)
    tokens = sum(int(result.columns["output_tokens"][i]) for i in within)
    assert found["output_tokens_per_s"] == pytest.approx(tokens / span_s, rel=1e-12)
    first_s = result.columns["first_token_s"]
    good = [
        i
        for i in within
        if first_s[i] - arrival_s[i] <= 0.1 and last_s[i] - first_s[i] <= 0.1 * (result.columns["output_tokens"][i] - 1)
    ]
    assert 0 < len(good) < len(within)
    assert found["good_throughput_per_s"] == pytest.approx(len(good) / span_s, rel=1e-12)


def test_a_price_is_that_of_all_gpus() -> None:
    """Typical price of a GPU, dollars an hour, times three, times two; and a goodput's and a search's likewise."""
    price = find_profile("13b", "a100-80g", engine="distserve").gpu.price_usd_per_h
    assert price is not None
    assert measured(CASES["simulate"])["cost_usd_per_h"] == 3 * price[0]
    assert measured(CASES["prefill"])["cost_usd_per_h"] == 2 * price[0]
    assert measured(CASES["goodput"])["cost_usd_per_h"] == 3 * price[0]
    found = measured(CASES["search"])
    assert found["cost_usd_per_h"] == found["num_gpus"] * price[0]


def test_the_rate_of_a_trace_is_its_gaps_over_its_time(tmp_path: Path) -> None:
    """Requests at 0, 1, 2 and 10 s: three gaps in ten seconds, on three GPUs; two at one instant have no rate."""
    for times, rate_per_s in (("0 1 2 10", 0.3), ("5 5", None), ("5", None)):
        lines = ["arrival_s,prompt_tokens,output_tokens", *(f"{time},64,4" for time in times.split())]
        (tmp_path / "trace.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        text = "model: 13b\nplacement: 1xP:tp2pp1 + 1xD:tp1pp1\ntrace: trace.csv\n"
        found = measure(parse_setting(parse_yaml(text.encode(), file="a.yaml"), folder=tmp_path), seed=0)
        assert found["rate_per_s"] == rate_per_s
        assert found["rate_per_gpu_per_s"] == (None if rate_per_s is None else pytest.approx(0.1))


def test_stages_of_a_prefill_work_side_by_side() -> None:
    """Two stages: a batch takes the kernels' whole time, the next one leaves after half of it and the launch."""
    profile = find_profile("13b", "a100-80g", engine="distserve")
    kernel_s = profile.latency_at(1).prefill_s([(512, 0)] * 4)
    host_s = profile.host_of(Role.PREFILL, 2).launch_s(4, 2048)
    found = measured(CASES["prefill step"])
    assert found["tokens"] == 2048
    assert (found["kernel_s"], found["host_s"]) == (kernel_s, host_s)
    assert found["step_s"] == pytest.approx(kernel_s + host_s, rel=1e-12)
    assert found["tokens_per_s"] == pytest.approx(2048 / (host_s + kernel_s / 2), rel=1e-12)
    assert found["tokens_per_gpu_per_s"] == pytest.approx(found["tokens_per_s"] / 2, rel=1e-12)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (1, 4)])
def test_micro_batches_of_a_decode_step_circulate(tp: int, pp: int) -> None:
    """A micro-batch comes round when all stages and launches are done; the driver launches one at a time."""
    profile = find_profile("13b", "a100-80g", engine="distserve")
    kernel_s = profile.latency_at(tp).decode_s(16, 16 * 256)
    host_s = profile.host_of(Role.DECODE, pp).launch_s(16, 16 * 256)
    step = f"step: {{phase: decode, batch: 16, context_tokens: 256, tp: {tp}, pp: {pp}}}"
    found = measured(f"measure: step\nmodel: 13b\n{step}\n")
    cycle_s = max(host_s + kernel_s, pp * host_s)
    assert (found["kernel_s"], found["host_s"]) == (kernel_s, host_s)
    assert found["step_s"] == pytest.approx(cycle_s, rel=1e-12)
    assert found["tokens_per_s"] == pytest.approx(16 * pp / cycle_s, rel=1e-12)
    assert found["tokens_per_gpu_per_s"] == pytest.approx(16 / tp / cycle_s, rel=1e-12)


def test_a_prompt_slows_the_decoding_requests_of_its_step() -> None:
    profile = find_profile("13b", "a100-80g", engine="distserve")
    latency, host = profile.latency_at(1), profile.host_of(Role.COLOCATED, 1)
    both_s = latency.mixed_s([(64, 0)], 4, 2048) + host.launch_s(5, 64 + 2048, mixed=True)
    alone_s = latency.decode_s(4, 2048) + host.launch_s(4, 2048)
    found = measured(CASES["mixed step"])
    assert found["step_s"] == pytest.approx(both_s, rel=1e-12)
    assert found["added_s"] == pytest.approx(both_s - alone_s, rel=1e-12)
    assert found["slowdown"] == pytest.approx(both_s / alone_s, rel=1e-12)
    assert found["slowdown"] > 1
    assert found["tokens"] == 68


def test_the_ttft_of_a_chunked_prompt_is_that_of_its_steps() -> None:
    """Chunks of 300, 300, 300 and 100 tokens beside two requests, whose contexts grow by one token each a step."""
    profile = find_profile("13b", "a100-80g", engine="distserve")
    latency, host = profile.latency_at(1), profile.host_of(Role.COLOCATED, 1)
    step = "{phase: chunked, batch: 2, context_tokens: 100, prompt_tokens: 1000, chunk_tokens: 300}"
    found = measured(f"measure: step\nmodel: 13b\nstep: {step}\n")
    steps_s = [
        latency.mixed_s([chunk], 2, context) + host.launch_s(3, chunk[0] + context, mixed=True)
        for chunk, context in (((300, 0), 200), ((300, 300), 202), ((300, 600), 204), ((100, 900), 206))
    ]
    assert found["ttft_s"] == pytest.approx(math.fsum(steps_s), rel=1e-12)
    assert found["longest_step_s"] == max(steps_s)
    assert found["step_s"] == pytest.approx(math.fsum(steps_s) / 4, rel=1e-12)
    # K and V of 40 layers, 5120 wide, 2 bytes each; 300 + 600 + 900 tokens.
    assert (found["chunks"], found["reread_tokens"]) == (4, 1800)
    assert found["reread_bytes"] == 1800 * 2 * 40 * 5120 * 2
    slope_s = latency.prefill_s([(1, 1)]) - latency.prefill_s([(1, 0)])
    assert found["reread_s"] == pytest.approx(1800 * slope_s, rel=1e-6)


def test_formulas_of_two_gpus() -> None:
    """DistServe's equations at 4/s and D = 0.2 s: 0.2 + 4 · 0.04 / (4 (2 - 0.8)), and with K = 1.7."""
    base = "measure: queueing\nrate: 4\nqueueing: "
    stages = measured(base + "{formula: two-stage, prefill_s: 0.2}\n")
    assert stages["ttft_s"]["mean"] == pytest.approx(0.2 + 4 * 0.04 / (4 * (2 - 0.8)), rel=1e-12)
    assert (stages["num_gpus"], stages["rate_per_gpu_per_s"], stages["crossover_per_s"]) == (2, 2, None)
    faster = measured(base + "{formula: speedup, prefill_s: 0.2, tp_speedup: 1.7}\n")
    assert faster["ttft_s"]["mean"] == pytest.approx(0.2 / 1.7 + 4 * 0.04 / (2 * 1.7 * (1.7 - 0.8)), rel=1e-12)
    assert faster["crossover_per_gpu_per_s"] == faster["crossover_per_s"] / 2
    single = measured(base + "{formula: md1, prefill_s: 0.2}\n")
    assert single["ttft_s"]["mean"] == pytest.approx(0.2 + 4 * 0.04 / (2 * (1 - 0.8)), rel=1e-12)
    assert single["num_gpus"] == 1


def test_chunks_read_earlier_chunks_again() -> None:
    """N equal chunks of c tokens read c N (N - 1) / 2 cached tokens."""
    for chunk in (16, 64, 512):
        step = f"{{phase: chunked, batch: 0, prompt_tokens: 1024, chunk_tokens: {chunk}}}"
        found, n = measured(f"measure: step\nmodel: 13b\nstep: {step}\n"), 1024 // chunk
        assert (found["chunks"], found["reread_chunks"]) == (n, n * (n - 1) // 2)
        assert found["reread_tokens"] == chunk * n * (n - 1) // 2


def test_the_quadratic_part_of_chunks_is_that_of_the_whole_prompt() -> None:
    profile = find_profile("13b", "a100-80g", engine="distserve")
    latency, host = profile.latency_at(1), profile.host_of(Role.COLOCATED, 1)
    found = measured(CASES["chunks"])
    constants_s = 4 * (latency.prefill_s([(1, 0)]) - (latency.prefill_s([(2, 0)]) - latency.prefill_s([(1, 0)])))
    whole_s = latency.prefill_s([(1000, 0)])
    rest_s = found["ttft_s"] - host.launch_s(1, 1000) - found["reread_s"] - whole_s
    assert rest_s == pytest.approx(constants_s * 3 / 4, rel=1e-3)


def test_requests_of_one_seed_are_the_same_for_every_placement() -> None:
    workload = Workload(Poisson(), preset("sharegpt"))
    trace = workload.trace(num_requests=300, seed=7, context_tokens=2048, rate_per_s=4.0)
    found = measured(CASES["simulate"], seed=7)
    assert found["num_requests"] == len(trace)
    assert found["rate_per_gpu_per_s"] == pytest.approx(4 / 3)
    assert np.isfinite(found["output_tokens_per_gpu_per_s"])
