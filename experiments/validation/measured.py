"""What was measured of a run: every request or only statistics of them, and what is known of the benchmark client."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsim.metrics import Distribution
from dsim.slo import Slo

Times = NDArray[np.float64]
Integers = NDArray[np.int64]
#: What an input of a replay can be.
Value = str | int | float | bool | None

METRICS: Final = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")
RATES: Final = ("throughput_per_s", "output_tokens_per_s", "total_tokens_per_s")
ATTAINMENTS: Final = ("attainment.both", "attainment.ttft", "attainment.tpot")


class Kind(enum.Enum):
    """What a file of measurements holds."""

    REQUESTS = "requests"
    VLLM = "vllm"
    AGGREGATE = "aggregate"


class TpotDefinition(enum.Enum):
    """What is called time per output token, of n tokens of which the first one shows at TTFT.

    One request is 0.100, 0.140 and 0.090 s per token: (last - first) / (n - 1) is dsim's, vLLM's and most tools';
    E2E / n is GuideLLM's; (last - first) / n is that of DistServe's simulator.
    """

    VLLM = "vllm"
    GUIDELLM = "guidellm"
    SIMDISTSERVE = "simdistserve"

    def of(self, *, ttft_s: Times, e2e_s: Times, output_tokens: Integers) -> Times:
        """Return the seconds per output token; NaN where there is none."""
        tokens = output_tokens.astype(np.float64)
        if self is TpotDefinition.GUIDELLM:
            every: Times = e2e_s / tokens
            return every
        divisor = tokens if self is TpotDefinition.SIMDISTSERVE else tokens - 1
        later: Times = np.divide(e2e_s - ttft_s, divisor, out=np.full(len(tokens), math.nan), where=output_tokens > 1)
        return later


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """The requests of a run, in order of sending, and what was measured of each.

    Args:
        arrival_s: when each was sent; None where nobody wrote it down.
        ttft_s, tpot_s, e2e_s: NaN where not measured; TPOT is (E2E - TTFT) / (n - 1).
        gaps_s: every gap between tokens, of all requests; None where only their mean is known.
    """

    prompt_tokens: Integers
    output_tokens: Integers
    cached_prompt_tokens: Integers
    ttft_s: Times
    tpot_s: Times
    e2e_s: Times
    arrival_s: Times | None = None
    gaps_s: Times | None = None

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def statistics(self, rows: slice = slice(None), *, slo: Slo | None = None) -> dict[str, float]:
        """Return what is known of these rows, by dotted name, as in `ttft_s.mean`.

        Args:
            slo: limits of the attainment; none without.
        """
        output = self.output_tokens[rows]
        ttft, tpot, e2e = self.ttft_s[rows], self.tpot_s[rows], self.e2e_s[rows]
        gaps = self.gaps_s if rows == slice(None) else None
        found = distributions(ttft_s=ttft, tpot_s=tpot, e2e_s=e2e)
        if gaps is not None:
            found |= _named("itl_s", Distribution.of(gaps))
        else:
            found |= pooled_mean(tpot, output)
        if self.arrival_s is not None:
            found |= rates(self.arrival_s[rows], e2e, prompt_tokens=self.prompt_tokens[rows], output_tokens=output)
        if slo is not None:
            found |= attainment(ttft, tpot, e2e, output_tokens=output, slo=slo)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A measured run.

    Args:
        source: the file, and the row in it, for messages.
        statistics: by dotted name, as in `ttft_s.mean` (METRICS, STATISTICS, RATES, ATTAINMENTS).
        inputs: what the file says about client and engine, by name of the input (`inputs.NAMES`).
        requests: each of them, where the file has them.
        tpot_definition: of the TPOT in `statistics`; that of `requests` is always (E2E - TTFT) / (n - 1).
        remarks: what to know about the numbers, a line each.
    """

    source: str
    kind: Kind
    statistics: Mapping[str, float]
    inputs: Mapping[str, Value] = field(default_factory=dict)
    requests: Requests | None = None
    tpot_definition: TpotDefinition = TpotDefinition.VLLM
    remarks: tuple[str, ...] = ()


def distributions(**columns: Times) -> dict[str, float]:
    """Return mean and percentiles of the columns, without those that have no value."""
    found: dict[str, float] = {}
    for name, values in columns.items():
        found |= _named(name, Distribution.of(values))
    return found


def pooled_mean(tpot_s: Times, output_tokens: Integers) -> dict[str, float]:
    """Return the mean gap between tokens of all requests: their TPOTs weighted with the number of gaps."""
    known = ~np.isnan(tpot_s)
    gaps = output_tokens[known] - 1
    return {"itl_s.mean": float(np.dot(tpot_s[known], gaps) / gaps.sum())} if gaps.sum() else {}


def rates(
    arrival_s: Times,
    e2e_s: Times,
    *,
    prompt_tokens: Integers,
    output_tokens: Integers,
    start_s: float | None = None,
) -> dict[str, float]:
    """Return requests and tokens per second of the finished requests, from `start_s` or the first arrival on."""
    done = ~np.isnan(e2e_s)
    if not done.any():
        return {}
    span_s = float(np.max((arrival_s + e2e_s)[done])) - (float(arrival_s.min()) if start_s is None else start_s)
    if span_s <= 0:
        return {}
    output, prompt = int(output_tokens[done].sum()), int(prompt_tokens[done].sum())
    counts = (int(np.count_nonzero(done)), output, prompt + output)
    return {name: count / span_s for name, count in zip(RATES, counts, strict=True)}


def attainment(ttft_s: Times, tpot_s: Times, e2e_s: Times, *, output_tokens: Integers, slo: Slo) -> dict[str, float]:
    """Return the shares of requests that met the limits; unfinished ones did not, one-token outputs meet any TPOT.

    Shares that rest on something not measured are left out.
    """
    if not len(ttft_s):
        return {}
    finished, one_token = ~np.isnan(e2e_s), output_tokens == 1
    met_ttft = ttft_s <= slo.ttft_s
    met_tpot = (tpot_s <= slo.tpot_s) | (one_token & finished)
    met = met_ttft & met_tpot & (e2e_s <= slo.e2e_s)
    known_ttft, known_e2e = not np.isnan(ttft_s).all(), bool(finished.any())
    known_tpot = bool((~np.isnan(tpot_s) | one_token).all()) or not np.isnan(tpot_s).all()
    shares = (
        (ATTAINMENTS[0], met, known_ttft and known_tpot and known_e2e),
        (ATTAINMENTS[1], met_ttft, known_ttft),
        (ATTAINMENTS[2], met_tpot, known_tpot),
    )
    return {name: float(np.mean(share)) for name, share, known in shares if known}


def _named(metric: str, found: Distribution) -> dict[str, float]:
    return {f"{metric}.{name}": value for name, value in found.to_dict().items() if not math.isnan(value)}
