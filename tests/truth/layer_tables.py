"""vLLM 0.19, Llama-3.1-8B on one RTX PRO 6000: 300 requests of one run, by tables of one layer's kernels.

Source: casys-kaist/LLMServingSim (MIT), the run and the tables.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsim.catalog import find_gpu, find_model
from dsim.pools import Policy, Role
from dsim.profile import Profile
from dsim.profile_file import parse_profile
from dsim.simulate import simulate
from dsim.trace import Trace
from profiles.estimate import estimated_profile
from profiles.kernels.hosts import HOSTS, NOTHING, HostConstants
from profiles.kernels.layers import LayerSubject, layers_text, read_layers
from profiles.shapes import shape_of
from tests.truth.common import ONE_GPU, SHARED, Pair, colocated, limited, rows, signed, table

Floats = NDArray[np.float64]
METRICS = ("TTFT", "TPOT", "E2E")
KV_TOKENS = 36_578 * 16
SETTINGS = (
    "client: the measured arrivals and lengths, replayed; engine: chunked, 2048 tokens and 128 requests a step, "
    "36,578 KV blocks of 16 tokens, no prefix cache, as the run was set"
)
#: By what was simulated.
KINDS = {
    "tables alone, nothing fitted": "bare",
    "and vLLM's host work, fitted to another engine version, model and GPU": "hosted",
    "roofline: no tables, the datasheet": "roofline",
}


@dataclass(frozen=True)
class Run:
    """What was measured or simulated of each request, seconds."""

    ttft: Floats
    tpot: Floats
    e2e: Floats

    @classmethod
    def of(cls, times: Mapping[str, Floats], output_tokens: NDArray[np.int64]) -> Run:
        """Return the latencies of arrival, first and last token."""
        arrival, first, last = (times[name] for name in ("arrival", "first_token", "last_token"))
        return cls(first - arrival, (last - first) / (output_tokens - 1), last - arrival)


@functools.cache
def measured() -> tuple[Run, Trace]:
    """Return the run and its requests."""
    requests = sorted(rows("vllm_rtxpro6000_llama31_8b_requests.csv"), key=lambda row: float(row["arrival_s"]))
    times = {
        name: np.array([float(row[f"{name}_s"]) for row in requests])
        for name in ("arrival", "first_token", "last_token")
    }
    prompt, output = (np.array([int(row[f"{n}_tokens"]) for row in requests]) for n in ("prompt", "output"))
    return Run.of(times, output), Trace(times["arrival"], prompt, output, np.zeros(len(requests), np.int64))


@functools.cache
def tables_profile(host: HostConstants) -> Profile:
    """Return the profile that `dsim profile from-layers` writes, with the settings of the run."""
    shape, gpu = shape_of("llama-3.1-8b"), find_gpu("rtx-pro-6000-server")
    tables = read_layers(SHARED / "tables" / "rtxpro6000-llama-3.1-8b-tp1", shape=shape)
    subject = LayerSubject(shape.model, gpu, "vllm", "0.19", "LLMServingSim (MIT)", host)
    profile = parse_profile(layers_text({1: tables}, subject).encode(), file="rtx-pro-6000")
    return limited(profile, tokens=2048, requests=128, kv_tokens=KV_TOKENS)


@functools.cache
def simulated(kind: str) -> Run:
    """Replay the run."""
    trace = measured()[1]
    if kind == "roofline":
        estimate = estimated_profile(find_model("llama-3.1-8b"), find_gpu("rtx-pro-6000-server"))
        profile = limited(estimate, tokens=2048, requests=128, kv_tokens=KV_TOKENS)
    else:
        profile = tables_profile(HOSTS["vllm"] if kind == "hosted" else NOTHING)
    profile = replace(profile, admission_watermark=0.0)
    assert profile.kv_tokens(ONE_GPU) == KV_TOKENS
    assert profile.limits[Role.COLOCATED].requests == 128
    result = simulate(colocated(Policy.CHUNKED, 2048), trace, profiles=profile)
    times = {name: result.column(f"{name}_s") for name in ("arrival", "first_token", "last_token")}
    return Run.of(times, trace.output_tokens)


def pairs(kind: str) -> dict[tuple[str, str], Pair]:
    """Return simulated and measured by metric and statistic."""
    found = {}
    mine, theirs = simulated(kind), measured()[0]
    for metric in METRICS:
        a, b = getattr(mine, metric.lower()), getattr(theirs, metric.lower())
        found[metric, "mean"] = Pair(float(a.mean()), float(b.mean()))
        found[metric, "median"] = Pair(float(np.median(a)), float(np.median(b)))
        found[metric, "p99"] = Pair(float(np.quantile(a, 0.99)), float(np.quantile(b, 0.99)))
    return found


def report() -> str:
    """Return the table of the run."""
    head = ["simulated from", *(f"{m} {s}" for m in METRICS for s in ("mean", "median", "p99"))]
    run = measured()[0]
    lines = [["*measured*"]]
    for metric in METRICS:
        values = getattr(run, metric.lower())
        for value in (values.mean(), np.median(values), np.quantile(values, 0.99)):
            lines[0].append(f"*{1e3 * value:.1f} ms*" if metric == "TPOT" else f"*{value:.2f} s*")
    for words, kind in KINDS.items():
        lines.append([words, *(signed(pair.error) for pair in pairs(kind).values())])
    return f"Settings: {SETTINGS}.\n\n{table(head, lines)}"
