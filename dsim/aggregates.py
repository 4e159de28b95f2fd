"""Aggregates: what a run says as a whole, in a memory that does not grow with the number of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsim.metrics import Distribution, Saturation
from dsim.options import Options, Window
from dsim.pools import Placement, Role
from dsim.profile import Profile
from dsim.result import Attainment, first_token_after, summary_of_run
from dsim.sketch import RELATIVE_ERROR
from dsim.slo import Slo


@dataclass(frozen=True, slots=True, eq=False)
class Aggregates:
    """Statistics of one run, those of its `Result` as far as single requests are not needed.

    Counts, shares, rates and means are exact (to rounding); percentiles differ from the linear ones of the requests by
    at most `percentile_error` of their value.

    Args:
        num_requests: that count.
        attainment: of `slo`.
        percentile_error: relative.
    """

    placement: Placement
    profiles: Mapping[Role, Profile]
    options: Options
    window: Window
    phase: Role | None
    slo: Slo
    num_requests: int
    attainment: Attainment
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    throughput_per_s: float
    good_throughput_per_s: float
    saturation: Saturation
    ttft_parts_s: Mapping[str, float]
    utilization: Mapping[Role, float]
    kv_peak: Mapping[Role, float]
    kv_blocks: Mapping[Role, int]
    preemptions: int
    rejected: int
    events: int
    drained: bool
    elapsed_s: float
    percentile_error: float = RELATIVE_ERROR

    @property
    def first_token_after(self) -> str:
        """The last of the parts of `ttft_parts_s` that the first token waits for."""
        return first_token_after(self.placement, self.profiles)

    def summary(self) -> dict[str, Any]:
        """Return the machine-readable summary (docs/output.md): that of a result, and `percentile_error`."""
        shares = self.attainment
        return {
            "num_requests": self.num_requests,
            "attainment": {"both": shares.both, "ttft": shares.ttft, "tpot": shares.tpot},
            "ttft_s": self.ttft_s.to_dict(),
            "tpot_s": self.tpot_s.to_dict(),
            "itl_s": self.itl_s.to_dict(),
            "e2e_s": self.e2e_s.to_dict(),
            "throughput_per_s": self.throughput_per_s,
            "good_throughput_per_s": self.good_throughput_per_s,
            "saturation": self.saturation.value,
            "ttft_parts_s": dict(self.ttft_parts_s),
            **summary_of_run(self, preemptions=self.preemptions, rejected=self.rejected),
            "percentile_error": self.percentile_error,
        }
