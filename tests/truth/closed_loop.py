"""vLLM 0.30, Qwen3-8B in bf16 on one H100: 55 closed-loop runs of 1 to 512 users; host work is fitted to `chat` only.

Source: tgarg01/silybench-data (CC BY 4.0).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsim.catalog import find_gpu, find_model
from dsim.contract import prefill_bound_s
from dsim.pools import Policy
from dsim.simulate import simulate
from dsim.workload import ClosedLoop, Fixed
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

FILE = "silybench_qwen3_8b_h100.csv"
FITTED = "chat"
#: Tokens of a step: vLLM's default on this GPU, which the runs do not state, first.
BUDGETS = (8192, 2048, 16384)
METRICS = ("TPOT p95", "throughput", "TTFT p99")
SETTINGS = (
    "client: closed loop without think time, exact lengths, all users start at once, first wave counted; engine: "
    "chunked, 8192 tokens and 1024 requests a step (vLLM's defaults there, not stated by the source), the 377,024 KV "
    "tokens it printed, no prefix cache"
)


@dataclass(frozen=True)
class Run:
    """One run."""

    workload: str
    users: int
    prompt_tokens: int
    output_tokens: int
    pairs: dict[str, Pair]

    @property
    def is_cached(self) -> bool:
        """Whether its prompts took less time than their FLOPs allow: they were in the prefix cache."""
        measured_s = self.pairs["TTFT p99"].measured
        prompts = [(self.prompt_tokens, 0)] * self.users
        bound_s = prefill_bound_s(prompts, model=find_model("qwen3-8b"), gpu=find_gpu("h100-sxm"), tp=1)
        return measured_s < bound_s


@functools.cache
def runs(token_budget: int = BUDGETS[0]) -> tuple[Run, ...]:
    """Simulate every run."""
    profile = profile_of("qwen3-8b", "h100-sxm", "vllm")
    profile = limited(profile, tokens=token_budget, requests=1024, kv_tokens=377_024)
    found = []
    for row in rows(FILE):
        users, prompt, output, requests = (
            int(row[name]) for name in ("concurrency", "input_len", "output_len", "num_prompts")
        )
        loop = ClosedLoop(users, Fixed(prompt, output), requests)
        result = simulate(colocated(Policy.CHUNKED, token_budget), loop, profiles=profile)
        arrival_s, first_s, last_s = (result.column(f"{n}_s") for n in ("arrival", "first_token", "last_token"))
        tpot_s = (last_s - first_s) / (output - 1)
        numbers = {
            "TPOT p95": Pair(float(np.quantile(tpot_s, 0.95)), float(row["tpot_p95_ms"]) / 1e3),
            "throughput": Pair(requests / float(last_s.max()), float(row["request_throughput"])),
            "TTFT p99": Pair(float(np.quantile(first_s - arrival_s, 0.99)), float(row["ttft_p99_ms"]) / 1e3),
        }
        found.append(Run(row["workload"], users, prompt, output, numbers))
    return tuple(found)


def not_fitted(token_budget: int = BUDGETS[0], *, cached: bool = True) -> list[Run]:
    """Return the runs that nothing was fitted to; without those from the prefix cache if asked."""
    return [run for run in runs(token_budget) if run.workload != FITTED and (cached or not run.is_cached)]


def pairs(found: Sequence[Run], metric: str) -> list[Pair]:
    """Return one metric of several runs."""
    return [run.pairs[metric] for run in found]


def _workloads() -> list[str]:
    return sorted({run.workload for run in runs()})


def _of(workload: str, token_budget: int = BUDGETS[0]) -> list[Run]:
    return [run for run in runs(token_budget) if run.workload == workload]


def settings_report() -> str:
    """Return means by workload with other tokens a step."""
    lines = []
    for kind in _workloads():
        cells = [
            " / ".join(percent(mean_error(pairs(_of(kind, budget), metric))) for budget in BUDGETS)
            for metric in METRICS
        ]
        lines.append([kind, *cells])
    return table(["workload", *METRICS], lines)


def report() -> str:
    """Return means by workload, and every run."""
    lines = []
    for kind in _workloads():
        own = _of(kind)
        cells = [percent(mean_error(pairs(own, metric))) for metric in METRICS]
        lengths = f"{own[0].prompt_tokens} + {own[0].output_tokens}"
        lines.append([f"{kind} ({lengths}){', fitted' if kind == FITTED else ''}", str(len(own)), *cells])
    for words, found in (("**tested**", not_fitted()), ("**tested, but for prefix hits**", not_fitted(cached=False))):
        cells = [
            f"**{percent(mean_error(pairs(found, m)))}**, worst {percent(worst_error(pairs(found, m)))}"
            for m in METRICS
        ]
        lines.append([words, str(len(found)), *cells])
    parts = [f"Settings: {SETTINGS}.", table(["workload (prompt + output)", "runs", *METRICS], lines)]
    every = []
    for run in runs():
        cells = []
        for metric in METRICS:
            pair = run.pairs[metric]
            unit = 1.0 if metric == "throughput" else 1e3
            cells.append(f"{_shown(unit * pair.measured)} / {_shown(unit * pair.predicted)} ({signed(pair.error)})")
        every.append([run.workload, str(run.users), *cells, "prefix hits" if run.is_cached else ""])
    parts.append("Every run, measured / simulated (error):")
    parts.append(table(["workload", "users", "TPOT p95, ms", "requests/s", "TTFT p99, ms", ""], every))
    return "\n\n".join(parts)


def _shown(value: float) -> str:
    """Return a number with three or four digits.

    >>> _shown(0.06951), _shown(12.59), _shown(1234.5)
    ('0.0695', '12.6', '1,234')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
