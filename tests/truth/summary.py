"""The targets of dsim's accuracy beside what is reached: the first table of docs/validation.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.truth import closed_loop, layer_tables, mooncake, open_loop, static_batches
from tests.truth.common import mean_error, percent, signed, table


@dataclass(frozen=True)
class Target:
    """One number that is aimed at.

    Args:
        most: absolute relative error.
        is_mean: of absolute errors, so without a sign.
    """

    run: str
    name: str
    most: float
    reached: float
    is_mean: bool = True

    @property
    def is_met(self) -> bool:
        """Whether the error is within the target."""
        return abs(self.reached) <= self.most


def targets() -> Iterator[Target]:
    """Yield every target with what is reached."""
    run = "vLLM 0.19, RTX PRO 6000, Llama-3.1-8B: one run, nothing fitted"
    found = layer_tables.pairs("bare")
    for metric, most in (("TTFT", 0.10), ("TPOT", 0.05), ("E2E", 0.05)):
        yield Target(run, f"{metric}, mean", most, found[metric, "mean"].error, is_mean=False)
    for metric in layer_tables.METRICS:
        yield Target(run, f"{metric}, p99", 0.10, found[metric, "p99"].error, is_mean=False)
    run = "TensorRT-LLM 0.14 open loop, H100 and H200, Llama-3.1-8B: 30 runs"
    for (name, pairs), most in zip(open_loop.not_fitted().items(), (0.12, 0.25, 0.12), strict=True):
        yield Target(run, name, most, mean_error(pairs))
    run = "vLLM 0.30 closed loop, H100, Qwen3-8B: 47 runs"
    for name, most in (("TPOT p95", 0.10), ("throughput", 0.10), ("TTFT p99", 0.30)):
        yield Target(run, name, most, mean_error(closed_loop.pairs(closed_loop.not_fitted(), name)))
    limits = {"trtllm": (0.15, 0.12), "vllm": (0.15, 0.12), "roofline": (0.25, 0.20)}
    for words, kind in static_batches.KINDS.items():
        run = f"TensorRT-LLM 0.9 static batches, A100 and H100, Llama-2: {words}"
        for name, most, reached in zip(
            ("prefill", "decode"), limits[kind], static_batches.mean_of_places(kind), strict=True
        ):
            yield Target(run, name, most, reached)
    run = "Mooncake KV transfers, Qwen3-8B, TP 8 to TP 8 over RoCE: 9 rows"
    yield Target(run, "transfer time", 0.15, mean_error(mooncake.not_fitted()))


def report() -> str:
    """Return the table."""
    lines = []
    before = ""
    for target in targets():
        reached = percent(target.reached) if target.is_mean else signed(target.reached)
        run = "" if target.run == before else target.run
        before = target.run
        lines.append([run, target.name, f"≤ {100 * target.most:.0f} %", reached, "yes" if target.is_met else "**no**"])
    return table(["measurement", "error of", "target", "reached", "met"], lines)
