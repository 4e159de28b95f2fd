"""Fits an engine's host constants to half of a run's requests and tests them on the other half."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsim.errors import InputError
from dsim.latency import HostOverhead
from dsim.options import Options
from dsim.pools import Role
from dsim.profile import Profile
from dsim.result import Result
from experiments.validation.measured import RATES, Requests
from experiments.validation.replay import Case, Replay, replay, statistics_of
from experiments.validation.report import Comparison, Validation, compare

#: What is fitted, with a typical size that the search starts its steps from.
CONSTANTS: Final[Mapping[str, float]] = {"step_s": 1e-3, "sequence_s": 1e-5, "token_s": 1e-7, "request_s": 1e-2}
#: Statistics whose relative errors are made small together.
_FITTED: Final = ("ttft_s.mean", "ttft_s.p50", "tpot_s.mean", "tpot_s.p50", "e2e_s.mean", "e2e_s.p50")
_EVEN, _ODD = slice(0, None, 2), slice(1, None, 2)
#: Fewer requests say nothing about four numbers.
LEAST_REQUESTS: Final = 20
_MOST_RUNS: Final = 200


@dataclass(frozen=True, slots=True, eq=False)
class HostFit:
    """Host constants fitted to the even requests of a run (counted from 0), and how far off they are on the odd ones.

    Args:
        constants: seconds by name, of every role alike: of a launch, of each of its sequences, of each of its tokens,
            and of a request before it is queued.
        fitted: the comparisons of the even requests, which the constants were chosen by.
        held_out: those of the odd ones.
        runs: simulations.
    """

    constants: Mapping[str, float]
    fitted: tuple[Comparison, ...]
    held_out: tuple[Comparison, ...]
    runs: int


def fit_host(found: Validation, *, options: Options = Options()) -> HostFit:
    """Return host constants that make the errors of the even requests small, and their errors on the odd ones.

    Args:
        found: a validation of known inputs.
        options: as of `validate`.

    Raises:
        InputError: requests are not known, too few, or not those that were replayed; or an input is not known.
    """
    from scipy.optimize import minimize

    requests = _check(found)
    case = found.replays[0].case
    start = _constants(found)
    goal = requests.statistics(_EVEN)
    names = [name for name in _FITTED if name in goal]
    runs: dict[tuple[float, ...], Replay] = {}

    def run(values: tuple[float, ...]) -> Replay:
        if values not in runs:
            runs[values] = _run(found, case, dict(zip(CONSTANTS, values, strict=True)), options)
        return runs[values]

    def loss(scaled: NDArray[np.float64]) -> float:
        reached = statistics_of(run(_values(scaled)).result, rows=_EVEN)
        return sum(math.log(reached[name] / goal[name]) ** 2 for name in names)

    scales = np.array(list(CONSTANTS.values()))
    first = np.array([start[name] for name in CONSTANTS]) / scales
    # Both ways from the profile's own numbers, but never below 0.
    simplex = np.vstack([first, first + np.eye(len(first)) * np.maximum(0.5 * first, 0.5)])
    best = minimize(
        loss,
        first,
        method="Nelder-Mead",
        bounds=[(0.0, None)] * len(first),
        options={"initial_simplex": simplex, "maxfev": _MOST_RUNS, "xatol": 1e-3, "fatol": 1e-8},
    )
    values = _values(best.x)
    result = run(values).result
    return HostFit(
        constants=dict(zip(CONSTANTS, values, strict=True)),
        fitted=_compared(requests, result, _EVEN),
        held_out=_compared(requests, result, _ODD),
        runs=len(runs),
    )


def _compared(requests: Requests, result: Result, rows: slice) -> tuple[Comparison, ...]:
    """Return the comparisons of these requests; half of them have no throughput."""
    latencies = {name: value for name, value in requests.statistics(rows).items() if name not in RATES}
    return compare(latencies, [statistics_of(result, rows=rows)], one_number=True)


def _values(scaled: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(max(0.0, float(x) * scale) for x, scale in zip(scaled, CONSTANTS.values(), strict=True))


def _check(found: Validation) -> Requests:
    """Return the requests; InputError where no fit is possible."""
    requests = found.measured.requests
    where = "--fit-host"
    if requests is None:
        raise InputError(where, "needs the requests of a run, not statistics of them", hint="leave it out")
    if len(requests) < LEAST_REQUESTS:
        raise InputError(where, f"needs at least {LEAST_REQUESTS} requests", value=len(requests), hint="leave it out")
    matter = [item.name for item in found.unknown if item.name not in found.without_effect]
    if matter:
        rule = f"needs every input that matters, and does not know {', '.join(matter)}"
        raise InputError(where, rule, hint=f"add --assume {matter[0]}=VALUE")
    if any(item.name == "loop" and item.values == ("open",) for item in found.inputs):
        raise InputError(where, "needs the arrivals of the requests, which were drawn", hint="leave it out")
    return requests


def _constants(found: Validation) -> dict[str, float]:
    """Return the profile's own constants: of the role that decodes."""
    pool = found.placement.pools[-1]
    host = found.profiles[pool.role].host.get(pool.role, HostOverhead())
    front = found.profiles[found.placement.pools[0].role]
    return {"step_s": host.step_s, "sequence_s": host.sequence_s, "token_s": host.token_s, "request_s": front.request_s}


def with_host(profile: Profile, constants: Mapping[str, float]) -> Profile:
    """Return the profile with these host constants for every role."""
    launch = {name: constants[name] for name in ("step_s", "sequence_s", "token_s")}
    own = {role: profile.host.get(role, HostOverhead()) for role in Role}
    host = {role: replace(each, **launch) for role, each in own.items()}
    return replace(profile, host=host, host_pipelined={}, request_s=constants["request_s"])


def _run(found: Validation, case: Case, constants: Mapping[str, float], options: Options) -> Replay:
    profiles = {role: with_host(profile, constants) for role, profile in found.profiles.items()}
    return replay(found.measured, case, profiles=profiles, placement=found.placement, options=options)
