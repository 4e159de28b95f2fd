"""Profiles composed from kernel tables against measurements of others; nothing is fitted on what it is tested on."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsim.catalog import find_gpu, find_model
from dsim.latency import HostOverhead
from dsim.options import Options
from dsim.pools import Parallelism, Placement, Policy, Role
from dsim.profile import BatchLimits, Preemption, Profile
from dsim.simulate import simulate
from dsim.trace import Trace
from dsim.workload import ClosedLoop, Fixed
from profiles.kernels.layers import read_layers
from profiles.shapes import shape_of
from profiles.shipped import find_profile

Floats = NDArray[np.float64]
SHARED = Path(__file__).parents[2] / "shared" / "data"
TRUTH = SHARED / "truth"
pytestmark = [
    pytest.mark.skipif(not TRUTH.is_dir(), reason="needs the measurements beside the repository"),
    pytest.mark.slow,
]
ONE_GPU = Parallelism(1, 1)
MODELS = {"LLaMA v2 13B": "llama-2-13b", "LLaMA v2 70B": "llama-2-70b"}
GPUS = {"A100-SXM4-80GB": "a100-80g", "H100 80GB HBM3": "h100-sxm"}
#: Closed-loop runs whose steps took less than their prompts' FLOPs allow: prompts were in the prefix cache.
CACHED = {("prefill", 4), ("prefill", 16), ("prefill", 32)}


def rows(name: str) -> list[dict[str, str]]:
    with (TRUTH / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def profile_of(model: str, gpu: str, engine: str) -> Profile:
    return find_profile(model, gpu, engine=engine)


def mean_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean relative error of (predicted, measured)."""
    return float(np.mean([abs(predicted / measured - 1) for predicted, measured in pairs]))


def colocated(policy: Policy, token_budget: int | None = None) -> Placement:
    return Placement.colocated(parallelism=ONE_GPU, count=1, policy=policy, token_budget=token_budget)


def limited(profile: Profile, *, tokens: int, requests: int, kv_tokens: int | None = None) -> Profile:
    """The profile with an engine's settings."""
    limits = {**profile.limits, Role.COLOCATED: BatchLimits(tokens=tokens, requests=requests)}
    capacity = profile.kv_capacity_tokens if kv_tokens is None else {ONE_GPU: kv_tokens}
    return replace(profile, limits=limits, kv_capacity_tokens=capacity)


class TestStaticBatches:
    """TensorRT-LLM 0.9, Llama-2 13B and 70B, A100 and H100, TP 1 to 8: whole prefills and mean decode steps.

    One number is fitted, host work of a step, to every other row by model, GPU, TP, batch and length.
    """

    @dataclass(frozen=True)
    class Step:
        place: tuple[str, str, int]
        order: tuple[int, float]
        prefill: tuple[float, float]
        decode: tuple[float, float]

    def steps(self, engine: str) -> list[Step]:
        found = []
        for row in rows("trtllm090_static_batch.csv"):
            place = MODELS[row["model"]], GPUS[row["gpu"]], int(row["tp"])
            latency = profile_of(place[0], place[1], engine).latency_at(place[2])
            batch, prompt, output = (int(row[name]) for name in ("batch_size", "isl", "osl"))
            measured = [float(row[name]) / 1e3 for name in ("first_token_latency_ms", "token_to_token_latency_ms")]
            decode_s = latency.decode_s(batch, batch * (prompt + output // 2))
            prefill_s = latency.prefill_s([(prompt, 0)] * batch)
            order = batch, measured[0]
            found.append(self.Step(place, order, (prefill_s, measured[0]), (decode_s, measured[1])))
        return sorted(found, key=lambda step: (step.place, step.order))

    @staticmethod
    def fitted_host_s(steps: Sequence[Step]) -> float:
        def loss(host_s: float) -> float:
            return mean_error((p + host_s, m) for p, m in (step.decode for step in steps))

        return min((i * 2e-5 for i in range(500)), key=loss)

    @pytest.mark.parametrize(
        ("engine", "worst_prefill", "worst_decode"), [("trtllm", 0.165, 0.12), ("vllm", 0.18, 0.13)]
    )
    def test_steps(self, engine: str, worst_prefill: float, worst_decode: float) -> None:
        steps = self.steps(engine)
        # 1.63 ms of each prompt are Triton's, which did not serve these.
        prompt_s = 1.63e-3 if engine == "trtllm" else 0.0
        host_s = self.fitted_host_s(steps[0::2])
        assert 0.5e-3 < host_s < 3e-3
        errors = {}
        for place in sorted({step.place for step in steps}):
            tested = [step for step in steps[1::2] if step.place == place]
            decode = mean_error((p + host_s, m) for p, m in (step.decode for step in tested))
            prefill = mean_error(
                (step.prefill[0] + host_s - prompt_s * step.order[0], step.prefill[1]) for step in tested
            )
            errors[place] = prefill, decode
            print(f"{engine} {place}: prefill {prefill:.1%}, decode {decode:.1%}")  # noqa: T201
        prefills, decodes = zip(*errors.values(), strict=True)
        print(f"{engine}: host {host_s * 1e3:.2f} ms, prefill {np.mean(prefills):.1%}, decode {np.mean(decodes):.1%}")  # noqa: T201
        assert np.mean(prefills) <= 0.10
        assert np.mean(decodes) <= 0.07
        assert max(prefills) <= worst_prefill
        assert max(decodes) <= worst_decode


class TestClosedLoop:
    """vLLM 0.30, Qwen3-8B in bf16 on one H100, exact lengths, 1 to 512 users; host work is fitted to `chat` only.

    Engine settings: 8192 batched tokens and 1024 sequences (vLLM's defaults there), the KV cache it printed.
    """

    def runs(self) -> list[tuple[tuple[str, int], Mapping[str, tuple[float, float]]]]:
        profile = profile_of("qwen3-8b", "h100-sxm", "vllm")
        profile = limited(profile, tokens=8192, requests=1024, kv_tokens=377_024)
        found: list[tuple[tuple[str, int], Mapping[str, tuple[float, float]]]] = []
        for row in rows("silybench_qwen3_8b_h100.csv"):
            users, prompt, output, requests = (
                int(row[name]) for name in ("concurrency", "input_len", "output_len", "num_prompts")
            )
            loop = ClosedLoop(users, Fixed(prompt, output), requests)
            result = simulate(colocated(Policy.CHUNKED, 8192), loop, profiles=profile)
            arrival_s, first_s, last_s = (result.column(f"{n}_s") for n in ("arrival", "first_token", "last_token"))
            tpot_s = (last_s - first_s) / (output - 1)
            numbers = {
                "tpot": (float(np.quantile(tpot_s, 0.95)), float(row["tpot_p95_ms"]) / 1e3),
                "throughput": (requests / float(last_s.max()), float(row["request_throughput"])),
                "ttft": (float(np.quantile(first_s - arrival_s, 0.99)), float(row["ttft_p99_ms"]) / 1e3),
            }
            found.append(((row["workload"], users), numbers))
        return found

    def test_errors(self) -> None:
        runs = self.runs()
        kinds = sorted({kind for (kind, _), _ in runs})
        for kind in kinds:
            shown = {
                name: mean_error(numbers[name] for (k, _), numbers in runs if k == kind)
                for name in ("tpot", "throughput", "ttft")
            }
            print(kind, {name: f"{error:.1%}" for name, error in shown.items()})  # noqa: T201
        tested = [(key, numbers) for key, numbers in runs if key[0] != "chat"]
        bounds = {"tpot": 0.04, "throughput": 0.06, "ttft": 0.20}
        for name, bound in bounds.items():
            assert mean_error(numbers[name] for _, numbers in tested) <= bound, name
        for key, numbers in tested:
            assert mean_error([numbers["tpot"]]) <= 0.10, key
            if key not in CACHED:
                assert mean_error([numbers["throughput"]]) <= 0.10, key
                assert mean_error([numbers["ttft"]]) <= 0.32, key


class TestOpenLoop:
    """TensorRT-LLM 0.14 under Triton, Llama-3.1-8B in bf16 on H100 and H200, 500 requests.

    Host work is fitted to the six H100 rows with 467 prompt and 256 output tokens. Lengths of 467 are taken as exact,
    those with means of 202 and 214 (ShareGPT) as exponential up to 1024.
    """

    FITTED = ("h100-sxm", 467, 256)

    @staticmethod
    def trace(rate_per_s: float, prompt: int, output: int, *, seed: int, requests: int = 500) -> Trace:
        rng = np.random.default_rng(seed)
        arrival_s = np.zeros(requests)
        if math.isfinite(rate_per_s):
            arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, requests))
        lengths = []
        for mean in (prompt, output):
            drawn = np.full(requests, float(mean))
            if prompt == 202:
                drawn = rng.exponential(mean, requests)
                for _ in range(20):
                    drawn = np.clip(drawn * mean / drawn.mean(), 4, 1024)
            lengths.append(np.round(drawn).astype(np.int64))
        return Trace(arrival_s, lengths[0], lengths[1], np.zeros(requests, np.int64))

    def test_errors(self) -> None:
        tested: dict[str, list[tuple[float, float]]] = {"itl": [], "ttft": [], "throughput": []}
        for row in rows("trtllm014_online_qps.csv"):
            gpu = "h100-sxm" if "H100" in row["gpu"] else "h200-sxm"
            prompt, output, rate_per_s = int(row["isl"]), int(row["osl"]), float(row["qps"])
            profile = limited(profile_of("llama-3.1-8b", gpu, "trtllm"), tokens=8192, requests=1024)
            numbers = []
            for seed in (1, 2, 3):
                trace = self.trace(rate_per_s, prompt, output, seed=seed)
                result = simulate(colocated(Policy.ORCA), trace, profiles=profile, options=Options(track_itl=False))
                arrival_s, first_s, last_s = (result.column(f"{n}_s") for n in ("arrival", "first_token", "last_token"))
                itl_s = (last_s - first_s).sum() / (trace.output_tokens - 1).sum()
                numbers.append((itl_s, (first_s - arrival_s).mean(), len(trace) / (last_s.max() - arrival_s[0])))
            itl_s, ttft_s, throughput = (float(x) for x in np.mean(numbers, axis=0))
            measured = [float(row[name]) for name in ("mean_itl_ms", "mean_ttft_ms", "tput_req_s")]
            print(  # noqa: T201
                f"{gpu} {prompt}/{output} at {rate_per_s}: ITL {itl_s * 1e3:.1f} of {measured[0]:g} ms, "
                f"TTFT {ttft_s * 1e3:.0f} of {measured[1]:g} ms, {throughput:.1f} of {measured[2]:g} requests/s"
            )
            if (gpu, prompt, output) == self.FITTED:
                continue
            tested["itl"].append((itl_s, measured[0] / 1e3))
            if math.isfinite(rate_per_s):
                tested["ttft"].append((ttft_s, measured[1] / 1e3))
            else:
                tested["throughput"].append((throughput, measured[2]))
        errors = {name: mean_error(pairs) for name, pairs in tested.items()}
        print(errors)  # noqa: T201
        assert errors["itl"] <= 0.12
        assert errors["ttft"] <= 0.10
        assert max(abs(p / m - 1) for p, m in tested["ttft"]) <= 0.25
        assert errors["throughput"] <= 0.12


class TestLayerTables:
    """vLLM 0.19, Llama-3.1-8B on one RTX PRO 6000: 300 requests, replayed with one-layer tables, nothing fitted."""

    def test_errors(self) -> None:
        latency = read_layers(
            SHARED / "tables" / "rtxpro6000-llama-3.1-8b-tp1", shape=shape_of("llama-3.1-8b")
        ).latency()
        profile = Profile(
            name="rtx",
            model=find_model("llama-3.1-8b"),
            gpu=find_gpu("rtx-pro-6000-server"),
            engine="vllm",
            engine_version="0.19",
            source="",
            latency={1: latency},
            host={Role.COLOCATED: HostOverhead()},
            limits={Role.COLOCATED: BatchLimits(tokens=2048, requests=128)},
            kv_capacity_tokens={ONE_GPU: 36_578 * 16},
            preemption=Preemption.RECOMPUTE,
            admission_watermark=0.0,
        )
        requests = sorted(rows("vllm_rtxpro6000_llama31_8b_requests.csv"), key=lambda row: float(row["arrival_s"]))
        measured = {
            name: np.array([float(row[f"{name}_s"]) for row in requests])
            for name in ("arrival", "first_token", "last_token")
        }
        prompt, output = (np.array([int(row[f"{n}_tokens"]) for row in requests]) for n in ("prompt", "output"))
        trace = Trace(measured["arrival"], prompt, output, np.zeros(len(requests), np.int64))
        result = simulate(colocated(Policy.CHUNKED, 2048), trace, profiles=profile)
        predicted = {name: result.column(f"{name}_s") for name in measured}
        for name, mean_bound in (("ttft", 0.10), ("tpot", 0.05), ("e2e", 0.05)):
            mine, theirs = (self.values(name, times, output) for times in (predicted, measured))
            errors = mine.mean() / theirs.mean() - 1, np.quantile(mine, 0.99) / np.quantile(theirs, 0.99) - 1
            print(f"{name}: mean {errors[0]:+.1%}, p99 {errors[1]:+.1%}")  # noqa: T201
            assert abs(errors[0]) <= mean_bound
            assert abs(errors[1]) <= 0.10

    @staticmethod
    def values(name: str, times: Mapping[str, Floats], output: NDArray[np.int64]) -> Floats:
        if name == "ttft":
            return times["first_token"] - times["arrival"]
        if name == "e2e":
            return times["last_token"] - times["arrival"]
        tpot_s: Floats = (times["last_token"] - times["first_token"]) / (output - 1)
        return tpot_s
