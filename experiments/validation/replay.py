"""Replays a measured run under one combination of inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dsim.errors import InfeasiblePlacementError, InputError, by_option
from dsim.kv import num_blocks
from dsim.options import Options, Window
from dsim.pools import Placement, Policy, Pool, Role
from dsim.profile import BatchLimits, Profile
from dsim.result import Result
from dsim.simulate import Source, simulate
from dsim.slo import Slo
from dsim.trace import Trace
from dsim.workload import (
    Arrivals,
    ClosedLoop,
    Constant,
    Fixed,
    Gamma,
    Lengths,
    Poisson,
    Uniform,
    Workload,
    parse_workload,
)
from experiments.validation.inputs import Loop, range_of
from experiments.validation.measured import (
    Measured,
    Requests,
    TpotDefinition,
    Value,
    attainment,
    distributions,
    pooled_mean,
    rates,
)

Case = Mapping[str, Value]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """One simulated run.

    Args:
        statistics: by dotted name, like those of `Measured`.
        peak_requests: most requests that were in the system at one time.
        peak_blocks: most KV blocks that these would have needed all together.
    """

    case: Case
    result: Result
    statistics: Mapping[str, float]
    peak_requests: int
    peak_blocks: int


def replay(
    measured: Measured,
    case: Case,
    *,
    profiles: Mapping[Role, Profile],
    placement: Placement,
    options: Options = Options(),
    slo: Slo | None = None,
) -> Replay:
    """Simulate the run under one combination of inputs and return its statistics.

    Raises:
        InputError: requests or settings that the profile cannot run.
    """
    placed, used = engine_of(case, profiles=profiles, placement=placement)
    context_tokens = used[placed.pools[0].role].model.context_tokens
    source, window = source_of(case, measured, context_tokens=context_tokens)
    options = replace(options, seed=int(case.get("seed") or 0))
    try:
        result = simulate(placed, source, profiles=used, options=options, window=window)
    except InfeasiblePlacementError as error:
        hint = "change the placement or the inputs"
        raise InputError(
            "--placement", "cannot run: " + "; ".join(error.reasons), value=str(placed), hint=hint
        ) from None
    except InputError as error:
        raise by_option(error) from None
    # Benchmark clients count from their start, files of requests from the first of them.
    from_start = measured.requests is None or measured.requests.arrival_s is None
    statistics = statistics_of(result, definition=measured.tpot_definition, slo=slo, from_start=from_start)
    return Replay(case, result, statistics, *_peaks(result, used[placed.pools[0].role].block_tokens))


def statistics_of(
    result: Result,
    *,
    definition: TpotDefinition = TpotDefinition.VLLM,
    slo: Slo | None = None,
    rows: slice | None = None,
    from_start: bool = False,
) -> dict[str, float]:
    """Return the statistics of a run by dotted name.

    Args:
        rows: of the counted requests; None: all of them. Percentiles of gaps are those of all requests.
        from_start: rates count from the start of the run rather than from the first arrival, as benchmarks do.
    """
    part = slice(None) if rows is None else rows
    output, prompt = result.column("output_tokens")[part], result.column("prompt_tokens")[part]
    ttft, tpot, e2e = result.ttft_s[part], result.tpot_s[part], result.e2e_s[part]
    named = (
        definition.of(ttft_s=ttft, e2e_s=e2e, output_tokens=output) if definition is not TpotDefinition.VLLM else tpot
    )
    found = distributions(ttft_s=ttft, tpot_s=named, e2e_s=e2e)
    found |= {f"itl_s.{name}": value for name, value in result.itl().to_dict().items() if not math.isnan(value)}
    found |= pooled_mean(tpot, output)
    arrival = result.column("arrival_s")[part]
    start_s = 0.0 if from_start and not result.window.warmup else None
    found |= rates(arrival, e2e, prompt_tokens=prompt, output_tokens=output, start_s=start_s)
    if slo is not None:
        found |= attainment(ttft, tpot, e2e, output_tokens=output, slo=slo)
    return found


def engine_of(
    case: Case, *, profiles: Mapping[Role, Profile], placement: Placement
) -> tuple[Placement, dict[Role, Profile]]:
    """Return placement and profiles with the engine's inputs of one combination."""
    budget, max_seqs = case.get("token_budget"), case.get("max_seqs")
    pools, used = [], {}
    for pool in placement.pools:
        profile = _with_kv_blocks(profiles[pool.role], placement, pool, case.get("kv_blocks"))
        limits = profile.limits.get(pool.role, BatchLimits())
        if pool.role is not Role.PREFILL and isinstance(max_seqs, int):
            limits = replace(limits, requests=max_seqs)
        if pool.role is Role.PREFILL and isinstance(budget, int):
            limits = replace(limits, tokens=budget)
        used[pool.role] = replace(profile, limits={**profile.limits, pool.role: limits})
        if pool.role is Role.COLOCATED:
            policy = Policy(case["policy"])
            chunk = int(budget) if policy is Policy.CHUNKED and isinstance(budget, int) else None
            pools.append(replace(pool, policy=policy, token_budget=chunk))
        else:
            pools.append(pool)
    return Placement(tuple(pools)), used


def source_of(case: Case, measured: Measured, *, context_tokens: int) -> tuple[Source, Window]:
    """Return the requests of one combination, and which of them count."""
    loop, count, requests = Loop(case["loop"]), int(case["num_requests"] or 0), measured.requests
    if loop is Loop.CLOSED:
        users = min(int(case["users"] or 0), count)
        wave = 0 if case["first_wave_counted"] else users
        if wave >= count:
            rule = f"leaves nothing of {count} requests of {users} users"
            raise InputError("--assume", rule, name="first_wave_counted", value="false", hint="give more num_requests")
        times = {"stagger_s": float(case["stagger_s"] or 0), "turnaround_s": float(case["turnaround_s"] or 0)}
        if requests is not None:
            return _RowsInTurn(users, Fixed(1, 1), count, **times, rows=_rows(requests)), Window(warmup=wave)
        return ClosedLoop(users, _lengths(case), count, **times), Window(warmup=wave)
    lengths = _lengths(case) if requests is None else Fixed(1, 1)
    drawn = Workload(_process(case), lengths).trace(
        num_requests=count,
        rate_per_s=float(case.get("rate_per_s") or 1),
        seed=int(case.get("seed") or 0),
        context_tokens=context_tokens,
    )
    arrival_s = drawn.arrival_s
    if loop is Loop.BURST:
        arrival_s = np.zeros(count)
    elif loop is Loop.OPEN and case["fixed_span"]:
        arrival_s = arrival_s * (count / float(case["rate_per_s"] or 1) / arrival_s[-1])
    if requests is None:
        return Trace(arrival_s, drawn.prompt_tokens, drawn.output_tokens, drawn.cached_prompt_tokens), Window()
    if loop is Loop.REPLAY and requests.arrival_s is not None:
        arrival_s = requests.arrival_s
    tokens = (requests.prompt_tokens, requests.output_tokens, requests.cached_prompt_tokens)
    return Trace(arrival_s, *tokens), Window()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _RowsInTurn(ClosedLoop):
    """A closed loop whose users take rows from one queue, as benchmark clients do; for a single run."""

    rows: Iterator[tuple[int, int]]

    def user_lengths(self, user: int, *, seed: int, context_tokens: int) -> Iterator[tuple[int, int]]:
        """Return the queue of all."""
        del user, seed, context_tokens
        return self.rows


def _rows(requests: Requests) -> Iterator[tuple[int, int]]:
    if requests.cached_prompt_tokens.any():
        rule = "cannot carry cached_prompt_tokens"
        raise InputError("closed loop", rule, hint="drop that column, or assume loop=replay")
    return iter(zip(requests.prompt_tokens.tolist(), requests.output_tokens.tolist(), strict=True))


def _lengths(case: Case) -> Lengths:
    """Return the lengths of requests that are not in the file."""
    text = case.get("workload")
    if text is not None:
        return parse_workload(str(text), option="--assume")
    low, high = range_of(str(case["length_range"]))
    prompt, output = int(case["prompt_tokens"] or 0), int(case["output_tokens"] or 0)
    if low == high == 1:
        return Fixed(prompt, output)
    scale = 2 / (low + high) if case["lengths_are"] == "mean" else 1.0
    return Uniform(max(1, round(prompt * scale)), max(1, round(output * scale)), low, high)


def _process(case: Case) -> Arrivals:
    """Return the arrival process of an open loop; of the others any, as its times are not used."""
    burstiness = float(case.get("burstiness") or 1)
    if burstiness == 1:
        return Poisson()
    return Constant() if math.isinf(burstiness) else Gamma(burstiness**-0.5)


def _with_kv_blocks(profile: Profile, placement: Placement, pool: Pool, blocks: Value) -> Profile:
    """Return the profile with this many KV blocks an instance, or this share of its own."""
    if blocks is None or blocks == "100%":
        return profile
    if isinstance(blocks, str):
        own = max(0, profile.kv_tokens(pool.parallelism)) // profile.block_tokens
        blocks = max(1, int(own * float(blocks.removesuffix("%")) / 100))
    return profile.with_kv_blocks(placement, int(blocks))


def _peaks(result: Result, block_tokens: int) -> tuple[int, int]:
    """Return the most requests, and the most KV blocks of whole requests, that were in the system at one time."""
    columns = result.columns
    served = ~np.isnan(columns["last_token_s"])
    arrival, end = columns["arrival_s"][served], columns["last_token_s"][served]
    tokens = columns["prompt_tokens"][served] + columns["output_tokens"][served] - 1
    blocks = np.array([num_blocks(int(total), block_tokens) for total in tokens], dtype=np.int64)
    if not len(arrival):
        return 0, 0
    at = np.concatenate([arrival, end])
    # Those that leave at an instant at which others come are counted with them: no less than ever was there.
    order = np.lexsort((np.concatenate([np.zeros(len(arrival)), np.ones(len(end))]), at))
    requests = np.cumsum(np.concatenate([np.ones(len(arrival)), -np.ones(len(end))])[order])
    taken = np.cumsum(np.concatenate([blocks, -blocks])[order])
    return int(requests.max()), int(taken.max())
