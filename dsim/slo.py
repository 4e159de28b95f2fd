"""Service-level objectives: the latency limits a request must meet."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on TTFT, TPOT and E2E, seconds, all inclusive; `math.inf` where there is none."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    e2e_s: float = math.inf
