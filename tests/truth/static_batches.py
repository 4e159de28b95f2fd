"""TensorRT-LLM 0.9, fp16: Llama-2-13B and 70B on A100 and H100, TP 1 to 8, whole prefills and mean decode steps.

One number is fitted where it says so, host work of a step, to every other row by model, GPU, TP, batch and time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsim.analytic import analytic_latency
from dsim.catalog import find_gpu, find_model
from dsim.latency import LatencyModel
from profiles.kernels.hosts import HOSTS
from tests.truth.common import Pair, mean_error, percent, profile_of, rows, signed, table, worst_error

FILE = "trtllm090_static_batch.csv"
MODELS = {"LLaMA v2 13B": "llama-2-13b", "LLaMA v2 70B": "llama-2-70b"}
GPUS = {"A100-SXM4-80GB": "a100-80g", "H100 80GB HBM3": "h100-sxm"}
NAMES = {"llama-2-13b": "Llama-2-13B", "llama-2-70b": "Llama-2-70B", "a100-80g": "A100", "h100-sxm": "H100"}
SETTINGS = (
    "client: one static batch, all prompts at once, exact lengths; engine: its settings are not published (paged KV "
    "and its own all-reduce are likely); decode compared at the mean context of the run, prompt + half of the output"
)
Place = tuple[str, str, int]
#: By what step times come from.
KINDS = {
    "kernels of TensorRT-LLM": "trtllm",
    "kernels of vLLM": "vllm",
    "roofline": "roofline",
}


@dataclass(frozen=True)
class Step:
    """One row, kernels only; `what` says which."""

    place: Place
    order: tuple[int, float]
    what: str
    prefill: Pair
    decode: Pair


@functools.cache
def _latency(kind: str, place: Place) -> LatencyModel:
    model, gpu, tp = place
    if kind == "roofline":
        return analytic_latency(find_model(model), find_gpu(gpu), tp)
    return profile_of(model, gpu, kind).latency_at(tp)


@functools.cache
def steps(kind: str) -> tuple[Step, ...]:
    """Return all rows in the order in which every other one is fitted."""
    found = []
    # What each prompt takes under Triton did not serve these batches.
    prompt_s = HOSTS["trtllm"].prompt_s if kind == "trtllm" else 0.0
    for row in rows(FILE):
        place = MODELS[row["model"]], GPUS[row["gpu"]], int(row["tp"])
        latency = _latency(kind, place)
        batch, prompt, output = (int(row[name]) for name in ("batch_size", "isl", "osl"))
        first_s, next_s = (float(row[f"{name}_latency_ms"]) / 1e3 for name in ("first_token", "token_to_token"))
        prefill_s = latency.prefill_s([(prompt, 0)] * batch) - prompt_s * batch
        decode_s = latency.decode_s(batch, batch * (prompt + output // 2))
        what = f"{batch} x {prompt} + {output}"
        found.append(Step(place, (batch, first_s), what, Pair(prefill_s, first_s), Pair(decode_s, next_s)))
    return tuple(sorted(found, key=lambda step: (step.place, step.order)))


def _hosted(pair: Pair, host_s: float) -> Pair:
    return Pair(pair.predicted + host_s, pair.measured)


@functools.cache
def host_s(kind: str) -> float:
    """Return the host work of a step, fitted to decode steps of every other row; none for the roofline."""
    if kind == "roofline":
        return 0.0
    fitted = steps(kind)[0::2]
    return min((i * 2e-5 for i in range(500)), key=lambda s: mean_error(_hosted(step.decode, s) for step in fitted))


def tested(kind: str) -> dict[Place, list[Step]]:
    """Return what was not fitted, by place, host work included."""
    found: dict[Place, list[Step]] = {}
    start = 0 if kind == "roofline" else 1
    for step in steps(kind)[start :: start + 1]:
        prefill, decode = (_hosted(pair, host_s(kind)) for pair in (step.prefill, step.decode))
        found.setdefault(step.place, []).append(replace(step, prefill=prefill, decode=decode))
    return found


def mean_of_places(kind: str) -> tuple[float, float]:
    """Return the mean error of prefill and of decode over places."""
    by_place = tested(kind).values()
    prefill = [mean_error(step.prefill for step in found) for found in by_place]
    decode = [mean_error(step.decode for step in found) for found in by_place]
    return float(np.mean(prefill)), float(np.mean(decode))


def _cells(pairs: Sequence[Pair]) -> list[str]:
    signs = float(np.mean([pair.error for pair in pairs]))
    return [f"{percent(mean_error(pairs))} ({signed(signs)})", percent(worst_error(pairs))]


def report() -> str:
    """Return a table for each kind."""
    parts = [f"Settings: {SETTINGS}."]
    for words, kind in KINDS.items():
        by_place = tested(kind)
        count = sum(len(found) for found in by_place.values())
        fitted = f"host work of a step fitted to the other rows: {1e3 * host_s(kind):.2f} ms"
        parts.append(f"*{words}* ({count} rows; {fitted if host_s(kind) else 'nothing fitted, no host work'})")
        lines = []
        for (model, gpu, tp), found in sorted(by_place.items()):
            bad = max(found, key=lambda step: max(abs(step.prefill.error), abs(step.decode.error)))
            name = f"{NAMES[model]}, {NAMES[gpu]}, TP {tp}"
            cells = *_cells([step.prefill for step in found]), *_cells([step.decode for step in found])
            lines.append([name, *cells, bad.what])
        prefill, decode = mean_of_places(kind)
        lines.append(["**mean**", f"**{percent(prefill)}**", "", f"**{percent(decode)}**", "", ""])
        head = ["model, GPU", "prefill, mean (signed)", "worst", "decode, mean (signed)", "worst", "worst row of both"]
        parts.append(table(head, lines))
    return "\n\n".join(parts)
