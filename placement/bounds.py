"""Analytic upper bounds on a placement's goodput: cheap, and never below the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dsim.options import Options, Routing
from dsim.pools import Placement, Pool, Role
from dsim.profile import FirstToken, Handover, HandoverMode, Profile
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.transfer import transfer_times
from placement.feasibility import LongestRequest
from placement.work import (
    colocated_limited_s,
    colocated_work_s,
    decode_driver_work_s,
    decode_floor,
    decode_limited_s,
    decode_step_work_s,
    lower_mean,
    prefill_alone_s,
    prefill_queue,
    prefill_work_s,
)

Floats = NDArray[np.float64]
Known = TypeVar("Known", float, Floats)


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound on the rate that a placement can sustain within the limits.

    Args:
        name: what bounds it, for the ledger.
        rate_per_s: requests per second of the whole placement.
        by_limits: whether it rests on the limits: without them the placement may do more work.
    """

    name: str
    rate_per_s: float
    by_limits: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Requests drawn from a workload, float columns of shape (n,), from which the bounds take their means.

    Args:
        arrival_s: arrivals of which only the pattern counts: at twice the rate they come in half of the time.
    """

    prompt_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats
    arrival_s: Floats

    @classmethod
    def of(cls, trace: Trace) -> Sample:
        """Return the requests of a trace."""
        return cls(
            trace.prompt_tokens.astype(np.float64),
            trace.output_tokens.astype(np.float64),
            trace.cached_prompt_tokens.astype(np.float64),
            trace.arrival_s.astype(np.float64),
        )

    @property
    def rate_per_s(self) -> float:
        """Arrivals per second, 0 where they do not tell one."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self.arrival_s) - 1) / span_s if span_s > 0 else 0.0

    @property
    def computed_tokens(self) -> Floats:
        """Prompt tokens that are not cached, shape (n,)."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def longest(self) -> LongestRequest:
        """The longest prompt and the largest KV need seen."""
        kv = self.prompt_tokens + np.maximum(self.output_tokens - 1, 0)
        return LongestRequest(int(self.prompt_tokens.max()), int(kv.max()))

    def steps(self, first_token_from: FirstToken) -> Floats:
        """Decode steps of each request, shape (n,)."""
        return self.output_tokens if first_token_from is FirstToken.DECODE else self.output_tokens - 1

    def contexts(self, first_token_from: FirstToken) -> Floats:
        """Sum of the contexts of each request's decode steps, shape (n,)."""
        n, p = self.output_tokens, self.prompt_tokens
        if first_token_from is FirstToken.DECODE:
            return n * p + n * (n - 1) / 2
        return (n - 1) * p + n * (n - 1) / 2


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """What all candidates of one search share.

    Args:
        target: attainment that a sustainable rate must reach, 0 to 1.
        margin: standard errors by which what the sample shows is taken to be better than it is, so that a bound made
            from it stays one.
        known, waits, idle: results that candidates share, by what they depend on.
    """

    profiles: Mapping[Role, Profile]
    sample: Sample
    slo: Slo
    target: float
    options: Options = field(default_factory=Options)
    margin: float = 4.0
    known: dict[tuple[object, Pool], float | Floats] = field(default_factory=dict)
    waits: dict[tuple[Pool, bytes], float] = field(default_factory=dict)
    idle: dict[tuple[tuple[Pool, ...], tuple[bool, ...]], float] = field(default_factory=dict)

    @property
    def handover(self) -> Handover:
        """How KV gets to the decode side."""
        return self.profiles[Role.DECODE].handover

    def once(self, compute: Callable[[Pool, Case], Known], pool: Pool) -> Known:
        """Return what `compute` says of one instance of a pool; computed once for all numbers of instances."""
        key = (compute, replace(pool, count=1))
        if key not in self.known:
            self.known[key] = compute(pool, self)
        return cast(Known, self.known[key])


def upper_bounds(placement: Placement, case: Case) -> tuple[Bound, ...]:
    """Return every bound that applies, tightest first; none of them is below the goodput.

    Three kinds: a request alone on an idle system is never slower than among others, so the share of lengths that meet
    the limits alone bounds attainment; a pool whose work arrives faster than it can be done at the best batching has a
    growing backlog; so has a link.
    """
    bounds = [idle_bound(placement, case)]
    if placement.is_colocated:
        bounds.append(pool_capacity(placement.pools[0], case))
        limited_s = case.once(colocated_limited_s, placement.pools[0])
        bounds.append(_capacity("colocated within its limits", placement.pools[0], limited_s, by_limits=True))
    else:
        prefill, decode = placement.pool(Role.PREFILL), placement.pool(Role.DECODE)
        bounds.append(pool_capacity(prefill, case))
        bounds.append(waiting_bound(placement, case))
        handed = _handed_over(case)
        transfer_s = lower_mean(_transfer_s(placement, case)[handed], case.margin) * float(np.mean(handed))
        stall_s = transfer_s if case.handover.stalls_decode else 0.0
        driver_s = case.once(decode_driver_work_s, decode) + stall_s
        step_s = case.once(decode_step_work_s, decode)
        work_s = driver_s + step_s if decode.parallelism.pp == 1 else max(driver_s, step_s)
        bounds.append(_capacity("decode capacity", decode, work_s))
        limited_s = case.once(decode_limited_s, decode) + (stall_s if decode.parallelism.pp == 1 else 0.0)
        bounds.append(_capacity("decode within its limits", decode, limited_s, by_limits=True))
        bounds.append(_capacity("prefill egress", prefill, transfer_s))
        bounds.append(_capacity("decode ingress", decode, transfer_s))
    return tuple(sorted(bounds, key=lambda bound: bound.rate_per_s))


def idle_bound(placement: Placement, case: Case) -> Bound:
    """Return the bound that also holds for a finite run: 0 if too few requests meet the limits alone, else infinity."""
    share = idle_attainment(placement, case)
    error = math.sqrt(share * (1 - share) / len(case.sample.prompt_tokens))
    impossible = share + case.margin * error < case.target
    return Bound(f"alone on an idle system {share:.1%} meet the limits", 0.0 if impossible else math.inf)


def headroom(placement: Placement, case: Case) -> float:
    """Return a guess, from 0 to 1, of the share of its capacity that a placement may use: where to look, not a bound.

    The fewer requests miss the limits alone, the more of them may miss because of others.
    """
    spare = (idle_attainment(placement, case) - case.target) / (1 - case.target)
    return math.sqrt(min(max(spare, 0.01), 1.0))


def pool_capacity(pool: Pool, case: Case) -> Bound:
    """Return the rate beyond which the work of a pool, transfers apart, piles up."""
    if pool.role is Role.DECODE:
        step_s, driver_s = case.once(decode_step_work_s, pool), case.once(decode_driver_work_s, pool)
        work_s = driver_s + step_s if pool.parallelism.pp == 1 else max(driver_s, step_s)
        return _capacity("decode capacity", pool, work_s)
    if pool.role is Role.PREFILL:
        return _capacity("prefill capacity", pool, case.once(prefill_work_s, pool))
    return _capacity("colocated capacity", pool, case.once(colocated_work_s, pool))


def waiting_bound(placement: Placement, case: Case) -> Bound:
    """Return the rate beyond which too many requests wait too long for one prefill instance; infinite where unknown.

    It needs to know which instance a request goes to, as it does with one of them, or when they take turns.
    """
    pool, sample, name = placement.pools[0], case.sample, "waiting for prefill"
    turns = case.options.prefill_routing is Routing.ROUND_ROBIN
    most_per_s = pool_capacity(pool, case).rate_per_s
    if not (pool.count == 1 or turns) or not math.isfinite(most_per_s) or not sample.rate_per_s:
        return Bound(name, math.inf)
    limits_s = _prefill_limits_s(placement, case)
    key = (pool, limits_s.tobytes())
    if key not in case.waits:
        queue = prefill_queue(pool, case)
        case.waits[key] = queue.highest_rate_per_s(
            limits_s, target=case.target, most_per_s=most_per_s, margin=case.margin
        )
    rate_per_s = case.waits[key]
    return Bound(name, rate_per_s if rate_per_s < most_per_s else math.inf, by_limits=True)


def _prefill_limits_s(placement: Placement, case: Case) -> Floats:
    """Return by when after it is queued each sampled request's prefill must end if it is to meet all limits.

    TTFT and E2E grow with the end of the prefill second by second, if at all.
    """
    slo, slack = case.slo, 1 + 1e-9
    ttft_s, tpot_s, e2e_s = alone_s(placement, case)
    met = (ttft_s <= slo.ttft_s * slack) & (tpot_s <= slo.tpot_s * slack) & (e2e_s <= slo.e2e_s * slack)
    late_s = case.once(prefill_alone_s, placement.pools[0])
    late_ttft_s, late_e2e_s = ttft_s, e2e_s
    if case.handover.mode is HandoverMode.LAYER_WISE:
        # Then they do so only once it is later than the transfer.
        late_s = np.full_like(ttft_s, 1e4)
        late_ttft_s, _, late_e2e_s = alone_s(placement, case, late_s)
    spare_s = np.minimum(slo.ttft_s * slack - late_ttft_s, slo.e2e_s * slack - late_e2e_s)
    limits_s: Floats = np.where(met, late_s + spare_s + 1e-9, -1.0)
    return limits_s


def idle_attainment(placement: Placement, case: Case) -> float:
    """Return the share of the sampled requests that meet all limits when each is served alone."""
    key = tuple(replace(pool, count=1) for pool in placement.pools), _crossings(placement)
    if key not in case.idle:
        ttft_s, tpot_s, e2e_s = alone_s(placement, case)
        slo = case.slo
        # Rounding must not turn a request that just meets its limit into one that misses it.
        slack = 1 + 1e-9
        met = (ttft_s <= slo.ttft_s * slack) & (tpot_s <= slo.tpot_s * slack) & (e2e_s <= slo.e2e_s * slack)
        case.idle[key] = float(np.mean(met))
    return case.idle[key]


def _capacity(name: str, pool: Pool, work_s: float, *, by_limits: bool = False) -> Bound:
    return Bound(name, pool.count / work_s if work_s > 0 else math.inf, by_limits)


def alone_s(placement: Placement, case: Case, prefill_s: Floats | None = None) -> tuple[Floats, Floats, Floats]:
    """Return lower limits of TTFT, TPOT and E2E of each sampled request, seconds, each shape (n,).

    Args:
        prefill_s: from when each request is queued to the end of its prefill; None: what it takes alone.
    """
    sample, first, second = case.sample, placement.pools[0], placement.pools[-1]
    request_s = case.profiles[first.role].request_s
    prefill_s = case.once(prefill_alone_s, first) if prefill_s is None else prefill_s
    ttft_s: Floats = request_s + prefill_s
    decode_s = np.where(sample.output_tokens > 1, case.once(_decode_alone_s, second), 0.0)
    rest_s, e2e_s = decode_s, ttft_s + decode_s
    if not placement.is_colocated:
        mode, late_s = case.handover.first_token_from, _after_prefill_s(placement, case)
        there_s = request_s + prefill_s + late_s
        if case.handover.mode is HandoverMode.LAYER_WISE:
            # A transfer begins no sooner than the prefill, which others may make longer.
            there_s = np.maximum(there_s, request_s + _transfer_s(placement, case))
        if mode is FirstToken.PREFILL:
            rest_s = np.where(sample.output_tokens > 1, decode_s + late_s, 0.0)
            e2e_s = np.where(sample.output_tokens > 1, there_s + decode_s, ttft_s)
        else:
            # Of n steps the first shows token 1; only those after it count in TPOT.
            ttft_s = there_s + (case.once(_first_step_s, second) if mode is FirstToken.DECODE else 0.0)
            e2e_s = ttft_s + decode_s
    return ttft_s, rest_s / np.maximum(sample.output_tokens - 1, 1), e2e_s


def _decode_alone_s(pool: Pool, case: Case) -> Floats:
    """Return a lower limit of the decode steps' time of each sampled request from token 1 to the last, seconds."""
    n, p = case.sample.output_tokens, case.sample.prompt_tokens
    fixed_s, slope_s = decode_floor(pool, case)
    # Contexts p + 1 to p + n - 1, whoever gives token 1.
    decode_s: Floats = (n - 1) * fixed_s + ((n - 1) * p + n * (n - 1) / 2) * slope_s
    return decode_s


def _first_step_s(pool: Pool, case: Case) -> Floats:
    fixed_s, slope_s = decode_floor(pool, case)
    step_s: Floats = fixed_s + slope_s * case.sample.prompt_tokens
    return step_s


def _transfer_s(placement: Placement, case: Case) -> Floats:
    """Return the time of each sampled request's transfer over the fastest links of any pair, shape (n,)."""
    sender, receiver = (pool.parallelism for pool in placement.pools)
    kinds = [
        transfer_times(case.profiles[Role.DECODE], sender, receiver, crosses=crosses)
        for crosses in _crossings(placement)
    ]
    tokens = case.sample.prompt_tokens
    transfer_s: Floats = np.minimum.reduce([times.latency_s + times.per_token_s * tokens for times in kinds])
    return transfer_s


def _crossings(placement: Placement) -> tuple[bool, ...]:
    """Return whether KV of any pair of instances stays in a node, as False, and whether any goes to another, as True.

    A link to another node may be the faster one, if a user says so.
    """
    crossings = placement.crossings
    return (False,) if crossings is None else tuple(sorted({crosses for row in crossings for crosses in row}))


def _after_prefill_s(placement: Placement, case: Case) -> Floats:
    """Return the least time from the end of each sampled request's prefill to that of its transfer, shape (n,).

    Without the posting of its pull, which the launch of another may pay for while the transfer is under way.
    """
    handover, transfer_s = case.handover, _transfer_s(placement, case)
    if handover.mode is not HandoverMode.LAYER_WISE:
        return handover.hop_s + transfer_s
    layers = case.profiles[Role.DECODE].model.layers
    last_layer_s: Floats = handover.latency_s + (transfer_s - handover.latency_s) / layers
    return last_layer_s


def _handed_over(case: Case) -> NDArray[np.bool_]:
    """Return which sampled requests reach the decode side, shape (n,)."""
    if case.handover.first_token_from is FirstToken.PREFILL:
        return case.sample.output_tokens > 1
    return np.ones(len(case.sample.output_tokens), dtype=np.bool_)
