"""Measures: the same as the commands and the library say, every column known, deterministic."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsim.pools import Role
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
