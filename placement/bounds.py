"""Analytic upper bounds on a placement's goodput: cheap, and never below the truth."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeGuard, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dsim.analytic import AnalyticLatency
from dsim.latency import AffineLatency, AffinePrefill, HostOverhead, LatencyModel
from dsim.options import Options
from dsim.pools import Placement, Policy, Pool, Role
from dsim.profile import BatchLimits, FirstToken, Handover, HandoverMode, Profile
from dsim.sends import SendingLatency, affine_with_sends
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.transfer import transfer_times
from placement.feasibility import LongestRequest
from placement.floor import affine_floor

Floats = NDArray[np.float64]
Known = TypeVar("Known", float, Floats)

#: Standard errors by which a sampled mean is taken lower, so that a bound made from it stays one.
_MARGIN = 4.0
#: Largest decode batch looked at where nothing limits it; beyond it a latency model is taken as linear.
_LARGEST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound on the rate that a placement can sustain within the limits.

    Args:
        name: what bounds it, for the ledger.
        rate_per_s: requests per second of the whole placement.
    """

    name: str
    rate_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Lengths drawn from a workload, float columns of shape (n,), from which the bounds take their means."""

    prompt_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats

    @classmethod
    def of(cls, trace: Trace) -> Sample:
        """Return the lengths of a trace."""
        return cls(
            trace.prompt_tokens.astype(np.float64),
            trace.output_tokens.astype(np.float64),
            trace.cached_prompt_tokens.astype(np.float64),
        )

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
        known, idle: results that candidates share, by what they depend on.
    """

    profiles: Mapping[Role, Profile]
    sample: Sample
    slo: Slo
    target: float
    options: Options = field(default_factory=Options)
    known: dict[tuple[object, Pool], float | Floats] = field(default_factory=dict)
    idle: dict[tuple[tuple[Pool, ...], bool], float] = field(default_factory=dict)

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
    else:
        prefill, decode = placement.pool(Role.PREFILL), placement.pool(Role.DECODE)
        bounds.append(pool_capacity(prefill, case))
        handed = _handed_over(case)
        transfer_s = _lower_mean(_transfer_s(placement, case)[handed]) * float(np.mean(handed))
        driver_s = case.once(_decode_driver_work_s, decode) + (transfer_s if case.handover.stalls_decode else 0.0)
        step_s = case.once(_decode_step_work_s, decode)
        work_s = driver_s + step_s if decode.parallelism.pp == 1 else max(driver_s, step_s)
        bounds.append(_capacity("decode capacity", decode, work_s))
        bounds.append(_capacity("prefill egress", prefill, transfer_s))
        bounds.append(_capacity("decode ingress", decode, transfer_s))
    return tuple(sorted(bounds, key=lambda bound: bound.rate_per_s))


def idle_bound(placement: Placement, case: Case) -> Bound:
    """Return the bound that also holds for a finite run: 0 if too few requests meet the limits alone, else infinity."""
    share = idle_attainment(placement, case)
    error = math.sqrt(share * (1 - share) / len(case.sample.prompt_tokens))
    impossible = share + _MARGIN * error < case.target
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
        step_s, driver_s = case.once(_decode_step_work_s, pool), case.once(_decode_driver_work_s, pool)
        work_s = driver_s + step_s if pool.parallelism.pp == 1 else max(driver_s, step_s)
        return _capacity("decode capacity", pool, work_s)
    if pool.role is Role.PREFILL:
        return _capacity("prefill capacity", pool, case.once(_prefill_work_s, pool))
    return _capacity("colocated capacity", pool, case.once(_colocated_work_s, pool))


def idle_attainment(placement: Placement, case: Case) -> float:
    """Return the share of the sampled requests that meet all limits when each is served alone."""
    key = tuple(replace(pool, count=1) for pool in placement.pools), _always_crosses(placement)
    if key not in case.idle:
        ttft_s, tpot_s, e2e_s = alone_s(placement, case)
        slo = case.slo
        # Rounding must not turn a request that just meets its limit into one that misses it.
        slack = 1 + 1e-9
        met = (ttft_s <= slo.ttft_s * slack) & (tpot_s <= slo.tpot_s * slack) & (e2e_s <= slo.e2e_s * slack)
        case.idle[key] = float(np.mean(met))
    return case.idle[key]


def _capacity(name: str, pool: Pool, work_s: float) -> Bound:
    return Bound(name, pool.count / work_s if work_s > 0 else math.inf)


def alone_s(placement: Placement, case: Case) -> tuple[Floats, Floats, Floats]:
    """Return lower limits of TTFT, TPOT and E2E of each sampled request, seconds, each shape (n,)."""
    sample, first, second = case.sample, placement.pools[0], placement.pools[-1]
    request_s, prefill_s = case.profiles[first.role].request_s, case.once(_prefill_alone_s, first)
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
    fixed_s, slope_s = _decode_floor(pool, case)
    # Contexts p + 1 to p + n - 1, whoever gives token 1.
    decode_s: Floats = (n - 1) * fixed_s + ((n - 1) * p + n * (n - 1) / 2) * slope_s
    return decode_s


def _first_step_s(pool: Pool, case: Case) -> Floats:
    fixed_s, slope_s = _decode_floor(pool, case)
    step_s: Floats = fixed_s + slope_s * case.sample.prompt_tokens
    return step_s


def _prefill_alone_s(pool: Pool, case: Case) -> Floats:
    """Return launch and step time of each sampled prompt alone, all pipeline stages."""
    profile = case.profiles[pool.role]
    latency, sample = profile.latency_of(pool.parallelism), case.sample
    host = profile.host_of(pool.role, pool.parallelism.pp)
    tokens, cached = sample.computed_tokens, sample.cached_tokens
    launches = np.ones_like(tokens)
    reread = cached
    if pool.token_budget is not None:
        # Chunk j of a prompt re-reads the KV of the chunks before it.
        launches = np.ceil(tokens / pool.token_budget)
        reread = launches * cached + pool.token_budget * launches * (launches - 1) / 2
    if isinstance(latency, AffineLatency):
        p = latency.prefill
        step_s = (p.constant_s + p.per_request_s) * launches + p.least_per_token_s * tokens
        step_s = step_s + p.per_token_squared_s * tokens * (tokens + 2 * cached)
        step_s = step_s + latency.small.per_context_token_s * reread
    else:
        step_s = np.array([latency.prefill_s([(int(t), int(s))]) for t, s in zip(tokens, cached, strict=True)])
    host_s: Floats = launches * (host.step_s + host.sequence_s) + host.token_s * tokens
    return step_s + host_s


def _prefill_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of its prefill instance's first stage; 0 where unknown."""
    profile, sample = case.profiles[pool.role], case.sample
    latency = _affine(profile.latency_of(pool.parallelism))
    if not _bounded(latency):
        return 0.0
    host, p = profile.host_of(pool.role, pool.parallelism.pp), latency.prefill
    tokens, cached = sample.computed_tokens, sample.cached_tokens
    limits = profile.limits.get(pool.role, BatchLimits())
    token_limit = _prefill_token_limit(pool, case)
    launches = np.maximum(np.minimum(tokens, token_limit) / token_limit, 1 / limits.requests)
    launches = np.maximum(launches, sample.prompt_tokens / max(profile.kv_tokens(pool.parallelism), 1))
    rest_s = p.per_request_s + p.per_token_squared_s * tokens * (tokens + 2 * cached)
    rest_s = rest_s + latency.small.per_context_token_s * cached
    host_s = host.step_s * launches + host.sequence_s + host.token_s * tokens
    return max(
        _lower_mean(host_s + (constant_s * launches + per_token_s * tokens + rest_s) / pool.parallelism.pp)
        for constant_s, per_token_s in _prefill_lines(p)
    )


def _decode_step_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of its decode instance, driver apart; 0 where unknown.

    With pp stages, K launches of a request keep each stage busy for 1/pp of their time. They also keep its KV: a step
    of S tokens that takes T holds S·T of the cache's tokens times seconds, and the more launches share the context,
    the fewer that is. So the least time is the larger of the two at the number of launches that suits it best.
    """
    profile, pp = case.profiles[pool.role], pool.parallelism.pp
    latency = _affine(profile.latency_of(pool.parallelism))
    if not _bounded(latency):
        return 0.0
    fewest, steps, contexts = _decode_launches(pool, case)
    requests, kv_tokens = _request_limit(pool, profile), max(profile.kv_tokens(pool.parallelism), 1)
    if pp == 1 or not steps:
        return _decode_steps_s(latency, steps, fewest, contexts, requests)
    fixed_s, slope_s = _decode_floor(pool, case)

    def stages_s(launches: float) -> float:
        return _decode_steps_s(latency, steps, launches, contexts, requests) / pp

    def memory_s(launches: float) -> float:
        return (fixed_s + slope_s * contexts / launches) * contexts / kv_tokens

    low, high = fewest, max(steps, fewest)
    if stages_s(low) >= memory_s(low):
        return stages_s(low)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if stages_s(middle) < memory_s(middle) else (low, middle)
    return stages_s(low)


def _decode_driver_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of its decode instance's driver, waits for pulls apart."""
    profile, handover = case.profiles[pool.role], case.handover
    host = profile.host_of(pool.role, pool.parallelism.pp)
    # A launch pays for posting a pull; that of a request without decode steps may come after all launches.
    pays = case.sample.steps(handover.first_token_from) > 0
    blocks = np.ceil(case.sample.prompt_tokens / profile.block_tokens)
    posting_s = np.where(pays, handover.post_s + handover.post_block_s * blocks, 0.0)
    return _host_s(host, *_decode_launches(pool, case)) + _lower_mean(posting_s)


def _decode_launches(pool: Pool, case: Case) -> tuple[float, float, float]:
    """Return launches, steps and total context of a request; launches are shared with as many others as fit."""
    mode, profile = case.handover.first_token_from, case.profiles[pool.role]
    steps, contexts = _lower_mean(case.sample.steps(mode)), _lower_mean(case.sample.contexts(mode))
    kv_tokens, requests = profile.kv_tokens(pool.parallelism), _request_limit(pool, profile)
    return _least_launches(steps, contexts, kv_tokens, requests), steps, contexts


def _colocated_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of a colocated instance's busiest resource; 0 where unknown."""
    profile, sample = case.profiles[pool.role], case.sample
    latency = _affine(profile.latency_of(pool.parallelism))
    if not _bounded(latency):
        return 0.0
    pp = pool.parallelism.pp
    host, p = profile.host_of(pool.role, pp), latency.prefill
    tokens, cached = sample.computed_tokens, sample.cached_tokens
    steps, contexts = _lower_mean(sample.steps(FirstToken.PREFILL)), _lower_mean(sample.contexts(FirstToken.PREFILL))
    requests, kv_tokens = _request_limit(pool, profile), profile.kv_tokens(pool.parallelism) / pp
    launches = _least_launches(steps, contexts, kv_tokens, requests)
    if pool.token_budget is not None:
        launches = max(launches, (_lower_mean(tokens) + steps) / pool.token_budget)
    prompt_s = p.per_request_s + p.least_per_token_s * tokens + p.per_token_squared_s * tokens * (tokens + 2 * cached)
    work_s = _lower_mean(prompt_s + latency.small.per_context_token_s * cached)
    work_s += _decode_steps_s(latency, steps, launches, contexts, requests) if steps else 0.0
    host_s = _host_s(host, launches, steps, contexts) + host.sequence_s + host.token_s * _lower_mean(tokens)
    if pool.policy in {Policy.PREFILL_FIRST, Policy.DECODE_FIRST}:
        # Prompts take steps of their own; under the other policies they ride on decode steps.
        token_limit = _prefill_token_limit(pool, case)
        batches = max(_lower_mean(np.minimum(tokens, token_limit)) / token_limit, 1 / requests)
        work_s += p.constant_s * batches
        host_s += host.step_s * batches
    # Each of the pp loops is busy from a launch's start to its step's end; all share one driver.
    return max(host_s, (host_s + work_s) / pp)


def _least_launches(steps: float, contexts: float, kv_tokens: float, requests: float) -> float:
    """Return the fewest launches a request can take part in, shared with as many others as fit."""
    return max(contexts / max(kv_tokens, 1), steps / requests)


def _decode_steps_s(latency: AffineLatency, steps: float, launches: float, contexts: float, requests: float) -> float:
    """Return the least step time of `steps` tokens of a request in at least `launches` launches.

    A launch of B costs at least f(B) + b·S with f convex (the lower hull over all batch sizes); by Jensen K launches of
    N tokens cost at least K·f(N/K), and K may be larger than the fewest where smaller batches are cheaper a token.
    """
    if steps <= 0:
        return 0.0
    sizes, floor_s, slope_s = _hull(latency, requests)
    mean_batch = min(max(steps / launches, 1.0), requests)
    if mean_batch > sizes[-1]:
        growth_s = float((floor_s[-1] - floor_s[-2]) / (sizes[-1] - sizes[-2])) if len(sizes) > 1 else 0.0
        floor = float(floor_s[-1]) + (mean_batch - float(sizes[-1])) * growth_s
    else:
        floor = float(np.interp(mean_batch, sizes, floor_s))
    smaller = sizes <= mean_batch
    per_token_s = min(floor / mean_batch, float(np.min(floor_s[smaller] / sizes[smaller])))
    return steps * per_token_s + slope_s * contexts


@functools.lru_cache(maxsize=256)
def _hull(latency: AffineLatency, requests: float) -> tuple[Floats, Floats, float]:
    """Return the lower convex hull (sizes, seconds) of a step without context over batch sizes, and the least slope."""
    largest = int(min(requests, max(_LARGEST_BATCH, 2 * latency.threshold_requests)))
    sizes = np.arange(1, largest + 1, dtype=np.float64)
    small, large = (d.constant_s + np.array([d.requests_s(n) for n in sizes]) for d in (latency.small, latency.large))
    seconds = np.where(sizes < latency.threshold_requests, small, large)
    hull: list[int] = []
    for i in range(largest):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (seconds[b] - seconds[a]) * (i - a) < (seconds[i] - seconds[a]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    slope_s = min(latency.small.per_context_token_s, latency.large.per_context_token_s)
    return sizes[hull], seconds[hull], slope_s


def _decode_floor(pool: Pool, case: Case) -> tuple[float, float]:
    """Return (a, b): no launch with a request of context c in it, whatever its batch, takes less than a + b·c seconds.

    Any batch, because published fits are known to fall where the batch passes a threshold.
    """
    profile = case.profiles[pool.role]
    host = profile.host_of(pool.role, pool.parallelism.pp)
    latency, requests = _affine(profile.latency_of(pool.parallelism)), _request_limit(pool, profile)
    if isinstance(latency, AffineLatency):
        parts = [(latency.small, 1)]
        if requests >= latency.threshold_requests:
            parts.append((latency.large, latency.threshold_requests))
        fixed_s = min(part.constant_s + part.requests_s(size) for part, size in parts)
        slope_s = min(part.per_context_token_s for part, _ in parts)
    else:
        fixed_s, slope_s = latency.decode_s(1, 1), 0.0
    return fixed_s + host.step_s + host.sequence_s, slope_s + host.token_s


def _affine(latency: LatencyModel) -> LatencyModel:
    """Return the model itself, or an affine one below it where it is analytic."""
    if isinstance(latency, SendingLatency):
        below = _affine(latency.model)
        return affine_with_sends(below, latency.sends) if isinstance(below, AffineLatency) else latency
    return affine_floor(latency) if isinstance(latency, AnalyticLatency) else latency


def _bounded(latency: LatencyModel) -> TypeGuard[AffineLatency]:
    """Return whether the fluid bounds know this form and its coefficients are such that they hold."""
    if not isinstance(latency, AffineLatency):
        return False
    p = latency.prefill
    numbers = [p.constant_s, p.per_token_s, p.per_token_squared_s, p.per_request_s, *(slope for _, slope in p.bends)]
    for d in (latency.small, latency.large):
        numbers += [d.constant_s, d.per_context_token_s, d.per_request_s, *(slope for _, slope in d.bends)]
    return min(numbers) >= 0


def _prefill_lines(prefill: AffinePrefill) -> list[tuple[float, float]]:
    """Return lines (a, b), a and b >= 0: constant and tokens of a prefill step never take less than a + b * tokens.

    They are the edges of the lower convex hull that meet the axis at or above zero, and the steepest line through zero.
    """
    corners = [(0.0, prefill.constant_s)]
    corners += [(float(bend), prefill.constant_s + prefill.tokens_s(bend)) for bend, _ in prefill.bends]
    last_s = prefill.bends[-1][1] if prefill.bends else prefill.per_token_s
    lines = [(prefill.constant_s, prefill.least_per_token_s)]
    slopes = {last_s, *((b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(corners) for b in corners[i + 1 :])}
    slopes.add(min([last_s, *(seconds / tokens for tokens, seconds in corners[1:])]))
    for slope_s in slopes:
        if 0 <= slope_s <= last_s:
            constant_s = min(seconds - slope_s * tokens for tokens, seconds in corners)
            if constant_s >= 0:
                lines.append((constant_s, slope_s))
    return lines


def _prefill_token_limit(pool: Pool, case: Case) -> float:
    limit: float = case.profiles[pool.role].limits.get(pool.role, BatchLimits()).tokens
    asked = case.options.prefill_token_limit_at(pool.parallelism.tp)
    if pool.role is Role.PREFILL and asked is not None:
        limit = asked
    # Without any limit a batch may be as large as one likes: then it costs nothing per request.
    return min(limit, 1e18)


def _request_limit(pool: Pool, profile: Profile) -> float:
    limit: float = profile.limits.get(pool.role, BatchLimits()).requests
    return limit if pool.token_budget is None else min(limit, pool.token_budget)


def _transfer_s(placement: Placement, case: Case) -> Floats:
    """Return the time of each sampled request's transfer over the fastest links of any pair, shape (n,)."""
    sender, receiver = (pool.parallelism for pool in placement.pools)
    times = transfer_times(case.profiles[Role.DECODE], sender, receiver, crosses=_always_crosses(placement))
    transfer_s: Floats = times.latency_s + times.per_token_s * case.sample.prompt_tokens
    return transfer_s


def _always_crosses(placement: Placement) -> bool:
    """Return whether KV goes from node to node between whichever instances."""
    crossings = placement.crossings
    return crossings is not None and all(map(all, crossings))


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


def _host_s(host: HostOverhead, launches: float, sequences: float, tokens: float) -> float:
    return host.step_s * launches + host.sequence_s * sequences + host.token_s * tokens


def _lower_mean(values: Floats) -> float:
    """Return the mean, lower by `_MARGIN` standard errors: the true mean is hardly ever below it."""
    if len(values) == 0:
        return 0.0
    error = float(values.std()) / math.sqrt(len(values))
    return max(0.0, float(values.mean()) - _MARGIN * error)
