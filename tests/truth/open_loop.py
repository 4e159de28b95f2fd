"""TensorRT-LLM 0.14 under Triton, Llama-3.1-8B in bf16 on H100 and H200: 36 open-loop runs.

Host work is fitted to the six H100 runs with 467 prompt and 256 output tokens.
Source: TensorRT-LLM's performance overview (Apache-2.0).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsim.options import Options
from dsim.pools import Policy
from dsim.simulate import simulate
from dsim.trace import Trace
from tests.truth.common import (
    Pair,
    colocated,
    limited,
    mean_error,
    percent,
    profile_of,
    rows,
    signed,
    table,
    worst_error,
)

FILE = "trtllm014_online_qps.csv"
FITTED = ("H100", 467, 256)
SEEDS = (1, 2, 3)
REQUESTS = 500
METRICS = ("ITL", "TTFT", "requests/s")
SETTINGS = (
    "client: open loop, Poisson arrivals, 500 requests (assumed), mean of three seeds; lengths of 467 exact, those of "
    "ShareGPT (means 202 and 214) exponential up to 1024 (neither is published, only means); engine: prompts join the "
    "running batch whole (`orca`), 8192 tokens and 1024 requests a step (not published)"
)
#: What is not published, and is tried: how prompts join, and how lengths spread.
VARIANTS = {
    "as above": (Policy.ORCA, "as above"),
    "chunks of 8192 tokens a step": (Policy.CHUNKED, "as above"),
    "all lengths exact": (Policy.ORCA, "exact"),
    "all lengths uniform up to twice the mean": (Policy.ORCA, "uniform"),
}


@dataclass(frozen=True)
class Run:
    """One row; `at_once` where all requests come at once."""

    gpu: str
    prompt_tokens: int
    output_tokens: int
    rate_per_s: float
    pairs: dict[str, Pair]

    @property
    def at_once(self) -> bool:
        """Whether all requests came at once."""
        return math.isinf(self.rate_per_s)

    @property
    def is_fitted(self) -> bool:
        """Whether host work was fitted to it."""
        return (self.gpu, self.prompt_tokens, self.output_tokens) == FITTED


def _lengths(rng: np.random.Generator, mean: int, spread: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    drawn = np.full(REQUESTS, float(mean))
    if spread == "exponential":
        drawn = rng.exponential(mean, REQUESTS)
        for _ in range(20):
            drawn = np.clip(drawn * mean / drawn.mean(), 4, 1024)
    elif spread == "uniform":
        drawn = rng.uniform(1, 2 * mean - 1, REQUESTS)
    return np.maximum(np.round(drawn), 2).astype(np.int64)


def trace(rate_per_s: float, prompt: int, output: int, *, seed: int, lengths: str) -> Trace:
    """Return the requests of one run."""
    rng = np.random.default_rng(seed)
    arrival_s = np.zeros(REQUESTS)
    if math.isfinite(rate_per_s):
        arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, REQUESTS))
    spread = lengths if lengths != "as above" else "exponential" if prompt == 202 else "exact"
    drawn = [_lengths(rng, mean, spread) for mean in (prompt, output)]
    return Trace(arrival_s, drawn[0], drawn[1], np.zeros(REQUESTS, np.int64))


@functools.cache
def runs(variant: str = "as above") -> tuple[Run, ...]:
    """Simulate every row, mean of three seeds."""
    policy, lengths = VARIANTS[variant]
    found = []
    for row in rows(FILE):
        gpu = "H100" if "H100" in row["gpu"] else "H200"
        prompt, output, rate_per_s = int(row["isl"]), int(row["osl"]), float(row["qps"])
        profile = limited(profile_of("llama-3.1-8b", f"{gpu.lower()}-sxm", "trtllm"), tokens=8192, requests=1024)
        numbers = []
        for seed in SEEDS:
            sent = trace(rate_per_s, prompt, output, seed=seed, lengths=lengths)
            placement = colocated(policy, 8192 if policy is Policy.CHUNKED else None)
            result = simulate(placement, sent, profiles=profile, options=Options(track_itl=False))
            arrival_s, first_s, last_s = (result.column(f"{n}_s") for n in ("arrival", "first_token", "last_token"))
            itl_s = (last_s - first_s).sum() / (sent.output_tokens - 1).sum()
            numbers.append((itl_s, (first_s - arrival_s).mean(), len(sent) / (last_s.max() - arrival_s[0])))
        itl_s, ttft_s, throughput = (float(x) for x in np.mean(numbers, axis=0))
        pairs = {
            "ITL": Pair(itl_s, float(row["mean_itl_ms"]) / 1e3),
            "TTFT": Pair(ttft_s, float(row["mean_ttft_ms"]) / 1e3),
            "requests/s": Pair(throughput, float(row["tput_req_s"])),
        }
        found.append(Run(gpu, prompt, output, rate_per_s, pairs))
    return tuple(found)


def not_fitted(variant: str = "as above") -> dict[str, list[Pair]]:
    """Return what the targets are about, of the runs that nothing was fitted to."""
    own = [run for run in runs(variant) if not run.is_fitted]
    return {
        "ITL": [run.pairs["ITL"] for run in own],
        "TTFT below saturation": [run.pairs["TTFT"] for run in own if not run.at_once],
        "throughput of all at once": [run.pairs["requests/s"] for run in own if run.at_once],
    }


def settings_report() -> str:
    """Return means under every variant of what is not published."""
    lines = []
    for variant in VARIANTS:
        found = not_fitted(variant)
        lines.append([variant, *(f"{percent(mean_error(p))}, worst {percent(worst_error(p))}" for p in found.values())])
    return table(["settings", *not_fitted()], lines)


def report() -> str:
    """Return means, and every run."""
    means = [f"{name} {percent(mean_error(found))}" for name, found in not_fitted().items()]
    head = ["GPU, prompt + output", "requests/s sent", "ITL, ms", "TTFT, ms", "requests/s served", ""]
    parts = [
        f"Settings: {SETTINGS}.",
        f"Mean errors of the thirty runs that nothing was fitted to: {', '.join(means)}.",
        "Every run, measured / simulated (error); measured numbers are rounded to whole milliseconds and requests: "
        "± 7 % of the smallest:",
        table(head, _every(runs())),
    ]
    return "\n\n".join(parts)


def _every(found: Sequence[Run]) -> list[list[str]]:
    lines = []
    for run in found:
        cells = []
        for metric in METRICS:
            pair, unit = run.pairs[metric], 1.0 if metric == "requests/s" else 1e3
            cells.append(f"{unit * pair.measured:.0f} / {unit * pair.predicted:.1f} ({signed(pair.error)})")
        rate = "all at once" if run.at_once else f"{run.rate_per_s:g}"
        name = f"{run.gpu}, {run.prompt_tokens} + {run.output_tokens}"
        lines.append([name, rate, *cells, "fitted" if run.is_fitted else ""])
    return lines
