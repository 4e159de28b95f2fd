"""The least time that a request takes of an instance of each role: what capacity and waiting follow from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsim.latency import AffineLatency, HostOverhead
from dsim.pools import Policy, Pool, Role
from dsim.profile import BatchLimits, FirstToken
from placement.decoding import Choice, Demand, StepCosts, least_instance_s
from placement.steps import added_lines, affine, decode_hull, decode_steps_s, is_bounded, prefill_lines
from placement.waiting import Queue, Service

if TYPE_CHECKING:
    from placement.bounds import Case, Sample

Floats = NDArray[np.float64]


def prefill_alone_s(pool: Pool, case: Case) -> Floats:
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


def prefill_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of its prefill instance's first stage; 0 where unknown."""
    profile, sample = case.profiles[pool.role], case.sample
    latency = affine(profile.latency_of(pool.parallelism))
    if not is_bounded(latency):
        return 0.0
    host = profile.host_of(pool.role, pool.parallelism.pp)
    tokens, pp, rest_s = sample.computed_tokens, pool.parallelism.pp, _prompt_rest_s(latency, sample)
    rest_s = host.sequence_s + host.token_s * tokens + rest_s / pp
    return max(
        lower_mean((host.step_s + constant_s / pp) * launches + per_token_s / pp * tokens + rest_s, case.margin)
        for launches in _prefill_launches(pool, case)
        for constant_s, per_token_s in prefill_lines(latency.prefill)
    )


def _prefill_launches(pool: Pool, case: Case) -> list[Floats]:
    """Return shares of a launch, each of shape (n,): in each of them those of a batch add up to 1 at most.

    By tokens, by requests, by KV: a batch may be full in one of them only, so that they are not to be mixed.
    """
    sample, token_limit = case.sample, _prefill_token_limit(pool, case)
    # A prompt over the limit goes alone.
    by_tokens = np.minimum(sample.computed_tokens, token_limit) / token_limit
    by_requests = np.full_like(by_tokens, 1 / _limits(pool, case).requests)
    by_kv = sample.prompt_tokens / max(case.profiles[pool.role].kv_tokens(pool.parallelism), 1)
    return [by_tokens, by_requests, by_kv]


def _prompt_rest_s(latency: AffineLatency, sample: Sample) -> Floats:
    """Return what each sampled prompt adds to a step beside what the number of its tokens does, shape (n,)."""
    p, tokens, cached = latency.prefill, sample.computed_tokens, sample.cached_tokens
    rest_s: Floats = p.per_request_s + p.per_token_squared_s * tokens * (tokens + 2 * cached)
    return rest_s + latency.small.per_context_token_s * cached


def prefill_queue(pool: Pool, case: Case) -> Queue:
    """Return the first stage of a pool's prefill instances as a queue."""
    profile, sample, pp = case.profiles[pool.role], case.sample, pool.parallelism.pp
    latency = affine(profile.latency_of(pool.parallelism))
    assert is_bounded(latency)
    host, alone_s = profile.host_of(pool.role, pp), case.once(prefill_alone_s, pool)
    launches, rest_s = _prefill_launches(pool, case), _prompt_rest_s(latency, sample)
    host_s = host.sequence_s + host.token_s * sample.computed_tokens
    services = []
    for constant_s, per_token_s in prefill_lines(latency.prefill):
        batch_s = host.step_s + constant_s / pp
        request_s = host_s + (per_token_s * sample.computed_tokens + rest_s) / pp
        # Of the ways in which a batch may be full the one that costs the most.
        shares = max(launches, key=lambda share: float(share.mean()))
        services.append(Service(batch_s, request_s, request_s + batch_s * shares))
    return Queue(
        arrival_s=(sample.arrival_s - sample.arrival_s[0]) * sample.rate_per_s,
        services=services,
        alone_s=alone_s,
        after_s=(alone_s - host_s - host.step_s) * (pp - 1) / pp,
        instances=pool.count,
    )


def decode_step_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of its decode instance, driver apart; 0 where unknown.

    With pp stages, K launches of a request keep each stage busy for 1/pp of their time. They also keep its KV: a step
    of S tokens that takes T holds S·T of the cache's tokens times seconds, and the more launches share the context,
    the fewer that is. So the least time is the larger of the two at the number of launches that suits it best.
    """
    profile, pp = case.profiles[pool.role], pool.parallelism.pp
    latency = affine(profile.latency_of(pool.parallelism))
    if not is_bounded(latency):
        return 0.0
    fewest, steps, contexts = _decode_launches(pool, case)
    requests, kv_tokens = _request_limit(pool, case), max(profile.kv_tokens(pool.parallelism), 1)
    if pp == 1 or not steps:
        return decode_steps_s(latency, steps, fewest, contexts, requests)
    fixed_s, slope_s = decode_floor(pool, case)

    def stages_s(launches: float) -> float:
        return decode_steps_s(latency, steps, launches, contexts, requests) / pp

    def memory_s(launches: float) -> float:
        return (fixed_s + slope_s * contexts / launches) * contexts / kv_tokens

    low, high = fewest, max(steps, fewest)
    if stages_s(low) >= memory_s(low):
        return stages_s(low)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if stages_s(middle) < memory_s(middle) else (low, middle)
    return stages_s(low)


def decode_driver_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of its decode instance's driver, waits for pulls apart."""
    host = case.profiles[pool.role].host_of(pool.role, pool.parallelism.pp)
    return _host_s(host, *_decode_launches(pool, case)) + lower_mean(_posting_s(pool, case), case.margin)


def _posting_s(pool: Pool, case: Case) -> Floats:
    """Return what posting each sampled request's pull takes of the driver, shape (n,)."""
    profile, handover = case.profiles[pool.role], case.handover
    # A launch pays for posting a pull; that of a request without decode steps may come after all launches.
    pays = case.sample.steps(handover.first_token_from) > 0
    blocks = np.ceil(case.sample.prompt_tokens / profile.block_tokens)
    posting_s: Floats = np.where(pays, handover.post_s + handover.post_block_s * blocks, 0.0)
    return posting_s


def _decode_launches(pool: Pool, case: Case) -> tuple[float, float, float]:
    """Return launches, steps and total context of a request; launches are shared with as many others as fit."""
    mode, profile = case.handover.first_token_from, case.profiles[pool.role]
    steps, contexts = (
        lower_mean(case.sample.steps(mode), case.margin),
        lower_mean(case.sample.contexts(mode), case.margin),
    )
    kv_tokens, requests = profile.kv_tokens(pool.parallelism), _request_limit(pool, case)
    return _least_launches(steps, contexts, kv_tokens, requests), steps, contexts


def _demand(pool: Pool, case: Case, mode: FirstToken) -> Demand:
    """Return what the sampled requests ask of an instance's decode steps, and how long these may take together."""
    sample, slo = case.sample, case.slo
    steps = np.maximum(sample.output_tokens - 1, 0.0)
    # Rounding must not turn a request that just meets its limit into one that misses it.
    each_s = steps * slo.tpot_s if math.isfinite(slo.tpot_s) else np.full_like(steps, np.inf)
    budget_s = np.minimum(each_s, slo.e2e_s) * (1 + 1e-9)
    # No request has a use for more than all of these seconds.
    unlimited_s = 1e9
    demand = Demand(
        steps=steps,
        prompt_tokens=sample.prompt_tokens,
        first_steps=np.full_like(steps, 1.0 if mode is FirstToken.DECODE else 0.0),
        budget_s=np.minimum(budget_s, unlimited_s),
    )
    demand.possible = (steps == 0) | (_decode_alone_s(pool, case, demand) <= budget_s)
    return demand


def _decode_alone_s(pool: Pool, case: Case, demand: Demand) -> Floats:
    """Return what the counted steps of each sampled request take at least, whatever the batch, shape (n,)."""
    fixed_s, slope_s = decode_floor(pool, case)
    contexts = demand.prompt_tokens + (demand.steps + 1) / 2
    alone_s: Floats = demand.steps * (fixed_s + contexts * slope_s)
    return alone_s


def decode_limited_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of its decode instance if enough meet the TPOT and E2E limits.

    Waits for pulls apart, and with pp > 1 of one stage.
    """
    profile, pp = case.profiles[pool.role], pool.parallelism.pp
    latency = affine(profile.latency_of(pool.parallelism))
    if not is_bounded(latency):
        return 0.0
    host = profile.host_of(pool.role, pp)
    requests, kv_tokens = _request_limit(pool, case), max(profile.kv_tokens(pool.parallelism), 1)
    sizes, floor_s, slope_s = decode_hull(latency, requests)
    token_s, token_slope_s = floor_s + host.step_s + host.sequence_s * sizes, slope_s + host.token_s
    demand = _demand(pool, case, case.handover.first_token_from)
    if pp == 1:
        costs = StepCosts(sizes, token_s, token_s, token_slope_s, token_slope_s, requests, kv_tokens)
        beside_s = _posting_s(pool, case)
    else:
        costs = StepCosts(sizes, floor_s / pp, token_s, slope_s / pp, token_slope_s, requests)
        beside_s = np.zeros_like(demand.steps)
    return least_instance_s([(costs, lambda rows: beside_s[rows])], demand, target=case.target, margin=case.margin)


def colocated_work_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of a colocated instance's busiest resource; 0 where unknown."""
    profile, sample = case.profiles[pool.role], case.sample
    latency = affine(profile.latency_of(pool.parallelism))
    if not is_bounded(latency):
        return 0.0
    pp = pool.parallelism.pp
    host, p = profile.host_of(pool.role, pp), latency.prefill
    tokens = sample.computed_tokens
    steps, contexts = (
        lower_mean(sample.steps(FirstToken.PREFILL), case.margin),
        lower_mean(sample.contexts(FirstToken.PREFILL), case.margin),
    )
    requests, kv_tokens = _request_limit(pool, case), profile.kv_tokens(pool.parallelism) / pp
    launches = _least_launches(steps, contexts, kv_tokens, requests)
    if pool.token_budget is not None:
        launches = max(launches, (lower_mean(tokens, case.margin) + steps) / pool.token_budget)
    work_s = lower_mean(p.least_per_token_s * tokens + _prompt_rest_s(latency, sample), case.margin)
    work_s += decode_steps_s(latency, steps, launches, contexts, requests) if steps else 0.0
    host_s = _host_s(host, launches, steps, contexts) + host.sequence_s + host.token_s * lower_mean(tokens, case.margin)
    if pool.policy in {Policy.PREFILL_FIRST, Policy.DECODE_FIRST}:
        # Prompts take steps of their own; under the other policies they ride on decode steps.
        token_limit = _prefill_token_limit(pool, case)
        batches = max(lower_mean(np.minimum(tokens, token_limit), case.margin) / token_limit, 1 / requests)
        work_s += p.constant_s * batches
        host_s += host.step_s * batches
    # Each of the pp loops is busy from a launch's start to its step's end; all share one driver.
    return max(host_s, (host_s + work_s) / pp)


def colocated_limited_s(pool: Pool, case: Case) -> float:
    """Return a lower limit of the time a request takes of a colocated instance if enough meet the TPOT and E2E limits.

    Under the policies that mix, prompt tokens lengthen a step by at least b x - a, for several lines: a is taken off
    every step, and b is the price of a prompt token. With a token budget a step that leaves some of it unused is
    cheaper by a price, which each token then costs more. Under the others prompts take steps of their own.
    """
    profile, sample, pp = case.profiles[pool.role], case.sample, pool.parallelism.pp
    latency = affine(profile.latency_of(pool.parallelism))
    if not is_bounded(latency):
        return 0.0
    host, p = profile.host_of(pool.role, pp), latency.prefill
    tokens = sample.computed_tokens
    requests, kv_tokens = _request_limit(pool, case), profile.kv_tokens(pool.parallelism) / pp
    sizes, floor_s, slope_s = decode_hull(latency, requests)
    token_s, token_slope_s = floor_s + host.step_s + host.sequence_s * sizes, slope_s + host.token_s
    demand = _demand(pool, case, FirstToken.PREFILL)
    rest_s = _prompt_rest_s(latency, sample) + host.sequence_s + host.token_s * tokens

    def choice(per_launch_s: float, share: Floats, per_token_s: float, less_s: float, price_s: float) -> Choice:
        budget, most = pool.token_budget or math.inf, max(kv_tokens, 1.0)
        instance_s = (token_s - less_s - price_s + price_s * sizes / budget) / pp
        costs = StepCosts(sizes, instance_s, token_s - less_s, token_slope_s / pp, token_slope_s, requests, most)
        each_s = per_token_s + price_s / budget
        return costs, lambda rows: (rest_s[rows] + per_launch_s * share[rows] + each_s * tokens[rows]) / pp

    if pool.policy in {Policy.PREFILL_FIRST, Policy.DECODE_FIRST}:
        token_limit = _prefill_token_limit(pool, case)
        shares = (np.minimum(tokens, token_limit) / token_limit, np.full_like(tokens, 1 / requests))
        choices = [choice(host.step_s + a, share, b, 0.0, 0.0) for a, b in prefill_lines(p) for share in shares]
        if pool.policy is Policy.DECODE_FIRST:
            # A loop takes one batch of prompts and decodes it to its end before the next: as long as the longest of
            # them takes, and so as their mean by any shares that add up to 1 at most.
            own_s = _decode_alone_s(pool, case, demand)
            in_turns_s = [
                lower_mean(((host.step_s + a) * share + b * tokens + rest_s + own_s * share) / pp, case.margin)
                for a, b in prefill_lines(p)
                for share in shares
            ]
            return max(*in_turns_s, least_instance_s(choices, demand, target=case.target, margin=case.margin))
    else:
        alone_s = host.step_s + p.constant_s
        choices = []
        for less_s, per_token_s in added_lines(profile.latency_of(pool.parallelism), alone_s):
            prices_s = (0.0,) if pool.token_budget is None else (0.0, max(alone_s - less_s, 0.0))
            choices += [choice(0.0, tokens, per_token_s, less_s, price_s) for price_s in prices_s]
    return least_instance_s(choices, demand, target=case.target, margin=case.margin)


def _least_launches(steps: float, contexts: float, kv_tokens: float, requests: float) -> float:
    """Return the fewest launches a request can take part in, shared with as many others as fit."""
    return max(contexts / max(kv_tokens, 1), steps / requests)


def decode_floor(pool: Pool, case: Case) -> tuple[float, float]:
    """Return (a, b): no launch with a request of context c in it, whatever its batch, takes less than a + b·c seconds.

    Any batch, because published fits are known to fall where the batch passes a threshold.
    """
    profile = case.profiles[pool.role]
    host = profile.host_of(pool.role, pool.parallelism.pp)
    latency, requests = affine(profile.latency_of(pool.parallelism)), _request_limit(pool, case)
    if isinstance(latency, AffineLatency):
        parts = [(latency.small, 1)]
        if requests >= latency.threshold_requests:
            parts.append((latency.large, latency.threshold_requests))
        fixed_s = min(part.constant_s + part.requests_s(size) for part, size in parts)
        slope_s = min(part.per_context_token_s for part, _ in parts)
    else:
        fixed_s, slope_s = latency.decode_s(1, 1), 0.0
    return fixed_s + host.step_s + host.sequence_s, slope_s + host.token_s


def _prefill_token_limit(pool: Pool, case: Case) -> float:
    limit, tp = _limits(pool, case).tokens, pool.parallelism.tp
    asked = case.options.prefill_token_limit_at(tp)
    if pool.role is Role.PREFILL and asked is not None:
        limit = asked
    if not case.options.extrapolate:
        limit = min(limit, case.profiles[pool.role].latency_at(tp).valid_range.prefill_tokens)
    # Without any limit a batch may be as large as one likes: then it costs nothing per request.
    return min(limit, 1e18)


def _request_limit(pool: Pool, case: Case) -> float:
    limit = _limits(pool, case).requests
    if not case.options.extrapolate:
        limit = min(limit, case.profiles[pool.role].latency_at(pool.parallelism.tp).valid_range.decode_requests)
    return limit if pool.token_budget is None else min(limit, pool.token_budget)


def _limits(pool: Pool, case: Case) -> BatchLimits:
    return case.profiles[pool.role].limits.get(pool.role, BatchLimits())


def _host_s(host: HostOverhead, launches: float, sequences: float, tokens: float) -> float:
    return host.step_s * launches + host.sequence_s * sequences + host.token_s * tokens


def lower_mean(values: Floats, margin: float) -> float:
    """Return the mean, lower by `margin` standard errors: the true mean is hardly ever below it."""
    if len(values) == 0:
        return 0.0
    error = float(values.std()) / math.sqrt(len(values))
    return max(0.0, float(values.mean()) - margin * error)
