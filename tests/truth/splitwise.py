"""vLLM of 2023, Llama-2-70B on A100 and H100, TP 2 to 8: static batches published with Splitwise (MIT).

Fitted to odd repeats of even grid points, tested on every other row; and predicted from what was never fitted to it.
"""

from __future__ import annotations

import functools

from dsim.analytic import analytic_latency
from dsim.catalog import find_gpu, find_model
from dsim.latency import LatencyModel
from profiles.forms import fit_latency
from profiles.rows import Phase, Row
from profiles.splitwise import GPUS, read_splitwise
from profiles.timed import timed
from tests.truth.common import TRUTH, Pair, mean_error, percent, profile_of, signed, table

FILE = "splitwise_iteration.csv"
MODEL = "llama-2-70b"
DEGREES = (2, 4, 8)
PHASES = (Phase.PREFILL, Phase.DECODE)
SETTINGS = (
    "client: one static batch of equal prompts, 15 repeats; engine: vLLM of 2023, its settings are not published; rows "
    "that stopped early (512 output tokens and more) and TP 2 with batch 64 left out"
)


@functools.cache
def measured(gpu: str) -> tuple[Row, ...]:
    """Return the usable rows of one GPU."""
    return tuple(read_splitwise(TRUTH / FILE, model="llama2-70b", gpu=gpu))


def _phases(found: LatencyModel, rows: list[Row]) -> dict[Phase, list[Pair]]:
    pairs: dict[Phase, list[Pair]] = {Phase.PREFILL: [], Phase.DECODE: []}
    for row in rows:
        point = row.point
        if point.phase == Phase.PREFILL.value:
            predicted = found.prefill_s([(point.prompt_tokens, 0)] * point.requests)
            pairs[Phase.PREFILL].append(Pair(predicted, row.step_s))
        else:
            predicted = found.decode_s(point.requests, round(point.requests * point.context_tokens))
            pairs[Phase.DECODE].append(Pair(predicted, row.step_s))
    return pairs


@functools.cache
def held_out(gpu: str, tp: int) -> dict[Phase, list[Pair]]:
    """Return predictions of what was not fitted: all but odd repeats of even grid points."""
    own = [row for row in measured(gpu) if row.point.tp == tp]
    even = {point for phase in PHASES for point in timed(own, phase, tp).points[::2]}
    fitted = [row for row in own if row.point in even and row.repeat % 2]
    latency = fit_latency(fitted, tp, model=find_model(MODEL), gpu=find_gpu(GPUS[gpu])).latency
    return _phases(latency, [row for row in own if row not in fitted])


@functools.cache
def predicted(kind: str, gpu: str, tp: int) -> dict[Phase, list[Pair]]:
    """Return predictions of all points by today's kernels, or by the datasheet: neither knows this engine."""
    if kind == "roofline":
        latency: LatencyModel = analytic_latency(find_model(MODEL), find_gpu(GPUS[gpu]), tp)
    else:
        latency = profile_of(MODEL, GPUS[gpu], kind).latency_at(tp)
    return _phases(latency, [row for row in measured(gpu) if row.point.tp == tp])


def report() -> str:
    """Return the table by GPU and degree."""
    lines = []
    for gpu in GPUS:
        for tp in DEGREES:
            own = held_out(gpu, tp)
            cells = [percent(mean_error(own[phase])) for phase in PHASES]
            for kind in ("vllm", "roofline"):
                found = predicted(kind, gpu, tp)
                for phase in PHASES:
                    signs = [pair.error for pair in found[phase]]
                    cells.append(signed(sum(signs) / len(signs)))
            lines.append([f"{gpu.removesuffix('-80gb').upper()}, TP {tp}", *cells])
    columns = ["GPU", "prefill, held out", "decode, held out"]
    columns += [f"{p}, {k}" for k in ("vLLM's kernels of today", "roofline") for p in ("prefill", "decode")]
    return f"Settings: {SETTINGS}.\n\n{table(columns, lines)}"
