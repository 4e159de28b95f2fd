"""The number of simulator events of three scenarios, pinned: an extra event per step shows here, not in noisy timings.

Where a change to the simulator moves a number on purpose, run this file, put the new number in `PINNED`, and say in the
commit what it buys; a number that grows needs a reason. Times must not move with it: the twin's tests see to that.
"""

from __future__ import annotations

import pytest

from dsim.latency import HostOverhead
from dsim.options import Options
from dsim.pools import Placement, Policy, Role
from dsim.profile import BatchLimits
from dsim.result import Result
from dsim.simulate import simulate
from tests.reference.systems import every_role, make_profile, make_trace

#: 200 requests, some simultaneous, with 20 to 89 prompt and 1 to 60 output tokens: 6,040 tokens in all.
TRACE = make_trace(
    [60 * (i - i % 3) for i in range(200)],
    [20 + (37 * i) % 70 for i in range(200)],
    [1 + (11 * i) % 60 for i in range(200)],
)

PINNED = {
    "1P + 1D": 582,
    "2C chunked": 671,
    "1P + 1D, decode pp 2": 790,
}


def play(scenario: str) -> Result:
    """Run a scenario with ample memory."""
    placement = {
        "1P + 1D": Placement.parse("1xP:tp1pp1 + 1xD:tp1pp1"),
        "2C chunked": Placement.parse("2xC:tp1pp1", policy=Policy.CHUNKED, token_budget=64),
        "1P + 1D, decode pp 2": Placement.parse("1xP:tp1pp1 + 1xD:tp1pp2"),
    }[scenario]
    profile = make_profile(
        prefill=(8.0, 0.5, 0.0),
        decode=(4.0, 1 / 64, 0.5),
        host={role: HostOverhead(step_s=1 / 1024) for role in Role},
        limits={Role.PREFILL: BatchLimits(256, 8), Role.DECODE: BatchLimits(requests=64)},
    )
    return simulate(placement, TRACE, profiles=every_role(profile), options=Options(check=True))


@pytest.mark.parametrize("scenario", PINNED)
def test_costs_as_many_events_as_ever(scenario: str) -> None:
    assert play(scenario).events == PINNED[scenario]


@pytest.mark.parametrize("scenario", ["1P + 1D", "2C chunked"])
def test_costs_fewer_events_than_tokens(scenario: str) -> None:
    assert int(TRACE.output_tokens.sum()) > 3 * play(scenario).events
