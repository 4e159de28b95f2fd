"""Measures: what one task of a sweep gives, as nested plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dsim.latency import Chunk, HostOverhead, LatencyModel
from dsim.metrics import Distribution
from dsim.options import Window
from dsim.plain import finite
from dsim.pools import Parallelism, Placement, Role
from dsim.profile import Profile
from dsim.result import Result
from dsim.simulate import Source, simulate
from dsim.slo import Slo
from dsim.workload import Workload
from experiments.keys import QUANTILES
from experiments.settings import Formula, Measure, Method, Setting, StepPhase, StepSetting
from experiments.spans import SPANS, quantiles_of, span_s
from experiments.spent import timed_processes
from placement import queueing
from placement.authors import authors_settings
from placement.mixes import mix_of
from placement.result import Operation, SearchResult, State, Trial
from placement.runner import local_processes
from placement.search import Question, search
from placement.single import Single, goodput_of

Columns = dict[str, Any]

_ROLES: Final = tuple(role.name.lower() for role in Role)
_SHARES: Final = ("both", "ttft", "tpot")
_DISTRIBUTION: Final = ("mean", "p50", "p90", "p95", "p99")
_INTERVAL: Final = ("low", "best", "high")
_TTFT_PARTS: Final = ("queue", "prefill", "transfer", "decode_admission")
#: Where the time of a request goes, from its arrival to its last token.
_PARTS: Final = ("prefill_queue", "prefill", "transfer", "decode_queue", "decode")
_WHAT: Final = ("model", "gpu", "engine")
_RATES: Final = ("num_gpus", "rate_per_s", "rate_per_gpu_per_s")
_TRIAL: Final = (
    "placement",
    "policy",
    "token_budget",
    "num_gpus",
    "replicas",
    "tied",
    "monotone",
    "replications",
    "rate_per_s",
    "limiting_role",
    "load",
)


def measure(setting: Setting, *, seed: int) -> Columns:
    """Return the columns of one task: nested mappings of plain values, None where a number does not exist.

    The same setting and seed give the same columns, but for `elapsed_s` and `cpu_s` of a search that is timed.

    Raises:
        InputError: a request does not fit, or a step leaves the profile's valid range.
    """
    take: dict[Measure, Callable[[], Columns]] = {
        Measure.SIMULATE: lambda: _simulated(setting, seed),
        Measure.GOODPUT: lambda: _sustained(setting, seed),
        Measure.SEARCH: lambda: _searched(setting, seed),
        Measure.STEP: lambda: _stepped(setting),
        Measure.QUEUEING: lambda: _queued(setting),
    }
    found: Columns = finite(take[setting.measure]())
    return found


def columns(measure: Measure) -> tuple[str, ...]:
    """Return the dotted name of every column that a measure may give."""
    known: dict[Measure, Callable[[], Iterator[str]]] = {
        Measure.SIMULATE: _columns_of_run,
        Measure.GOODPUT: _columns_of_goodput,
        Measure.SEARCH: _columns_of_search,
        Measure.STEP: _columns_of_step,
        Measure.QUEUEING: _columns_of_queueing,
    }
    return tuple(dict.fromkeys(known[measure]()))


# simulate


def _simulated(setting: Setting, seed: int) -> Columns:
    assert setting.placement is not None
    traffic = setting.traffic
    result = simulate(
        setting.placement,
        _source(setting, seed),
        profiles=setting.profiles,
        options=replace(setting.options, seed=seed, track_itl=setting.phase is None),
        window=Window(traffic.warmup, None if traffic.finite else traffic.requests),
        phase=setting.phase,
    )
    summary = result.summary(setting.slo or Slo())
    # One pool alone shows nothing of the other's phase.
    for name in {Role.PREFILL: ("tpot_s", "e2e_s"), Role.DECODE: ("ttft_s", "e2e_s")}.get(
        setting.phase or Role.COLOCATED, ()
    ):
        summary[name] = dict.fromkeys(_DISTRIBUTION)
    if setting.slo is None:
        summary["attainment"] = summary["good_throughput_per_s"] = None
    for name in ("seed", "options", "version", "first_token_after"):
        del summary[name]
    return {
        **summary,
        **_described(setting, setting.placement),
        **_rates(setting, _offered_per_s(setting, result)),
        **_served(setting, result),
        "transfer_s": Distribution.of(_times(result)["transfer_s"]).to_dict(),
        **_breakdown(result),
        "cost_usd_per_h": _cost(setting, setting.placement),
        **({"quantiles": _quantiles(setting, result)} if setting.quantiles else {}),
    }


def _source(setting: Setting, seed: int) -> Source:
    traffic = setting.traffic
    if traffic.trace is not None:
        return traffic.trace
    assert traffic.workload is not None
    rows = traffic.warmup + traffic.requests
    context_tokens = min(profile.model.context_tokens for profile in setting.used.values())
    if traffic.finite:
        return traffic.workload.trace(
            num_requests=rows, seed=seed, context_tokens=context_tokens, rate_per_s=traffic.rate_per_s
        )
    return traffic.workload.steady(
        num_requests=rows, seed=seed, context_tokens=context_tokens, rate_per_s=traffic.rate_per_s
    )


def _offered_per_s(setting: Setting, result: Result) -> float | None:
    """Return the rate asked for, or that of the arrivals replayed."""
    if setting.traffic.rate_per_s is not None:
        return setting.traffic.rate_per_s
    arrival_s = result.column("arrival_s")
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) > 1 else 0.0
    return (len(arrival_s) - 1) / span_s if span_s > 0 else None


def _described(setting: Setting, placement: Placement) -> Columns:
    pool = placement.pools[0]
    profile = setting.profiles[setting.phase or pool.role]
    return {
        "placement": str(placement),
        "policy": None if pool.policy is None else pool.policy.value,
        "token_budget": pool.token_budget,
        "model": profile.model.name,
        "gpu": profile.gpu.name,
        "engine": profile.engine,
    }


def _rates(setting: Setting, rate_per_s: float | None) -> Columns:
    per_gpu = None if rate_per_s is None else rate_per_s / setting.num_gpus
    return {"num_gpus": setting.num_gpus, "rate_per_s": rate_per_s, "rate_per_gpu_per_s": per_gpu}


def _served(setting: Setting, result: Result) -> Columns:
    """Return output tokens per second: of all, per GPU, and of one user once the first token is there."""
    per_s = math.nan if setting.phase is Role.PREFILL else result.rate_of(result.columns["output_tokens"])
    tpot_s = Distribution.of(result.tpot_s).mean
    return {
        "output_tokens_per_s": per_s,
        "output_tokens_per_gpu_per_s": per_s / setting.num_gpus,
        "output_tokens_per_user_per_s": 1 / tpot_s if tpot_s > 0 else math.nan,
    }


def _times(result: Result) -> dict[str, NDArray[np.float64]]:
    """Return the spans of each counted request by name, seconds; NaN where they did not happen."""
    spans = {name: span_s(name, result.column) for name in SPANS}
    return {"ttft_s": result.ttft_s, "tpot_s": result.tpot_s, "e2e_s": result.e2e_s, **spans}


def _breakdown(result: Result) -> Columns:
    """Return the mean seconds of the parts of a request, and their shares of the time of all requests."""
    times = _times(result)
    waits = result.column("decode_start_s") - result.column("prefill_end_s")
    parts = {
        "prefill_queue": times["queue_s"],
        "prefill": times["prefill_s"],
        "transfer": times["transfer_s"],
        "decode_queue": waits - np.nan_to_num(times["transfer_s"]),
        "decode": times["decode_s"],
    }
    total_s = float(np.nansum(times["e2e_s"]))
    return {
        "parts_s": {name: _mean(values) for name, values in parts.items()},
        "parts_share": {
            name: float(np.nansum(values)) / total_s if total_s > 0 else math.nan for name, values in parts.items()
        },
    }


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _cost(setting: Setting, placement: Placement) -> float | None:
    """Return the typical price of the GPUs, US dollars an hour; None where it is unknown."""
    profiles = mix_of(placement, () if setting.search is None else setting.search.mixes, setting.profiles)
    pools = [pool for pool in placement.pools if setting.phase in {None, pool.role}]
    prices = [profiles[pool.role].gpu.price_usd_per_h for pool in pools]
    if len(set(prices)) == 1:
        return None if prices[0] is None else prices[0][0] * sum(pool.num_gpus for pool in pools)
    known = [price[0] * pool.num_gpus for price, pool in zip(prices, pools, strict=True) if price is not None]
    return sum(known) if len(known) == len(pools) else None


def _quantiles(setting: Setting, result: Result) -> Columns:
    times = _times(result)
    return {name: quantiles_of(times[name]) for name in setting.quantiles}


# goodput and search


def question_of(setting: Setting, *, seed: int) -> Question:
    """Return what a setting asks of a search, or of a goodput."""
    assert setting.slo is not None
    assert isinstance(setting.traffic.workload, Workload)
    assert setting.search is not None
    asked = setting.search
    return Question(
        profiles=setting.profiles,
        workload=setting.traffic.workload,
        slo=setting.slo,
        attainment=setting.attainment,
        num_gpus=asked.cluster.num_gpus,
        gpus_per_node=asked.cluster.gpus_per_node,
        affinity=asked.affinity,
        mode=asked.mode,
        policies=asked.policies,
        token_budgets=asked.token_budgets,
        seed=seed,
        top=asked.top,
        precision=asked.precision,
        num_requests=asked.requests,
        options=replace(setting.options, seed=seed),
        mixes=asked.mixes,
        fleet=asked.fleet,
        batches=asked.batches,
    )


def _sustained(setting: Setting, seed: int) -> Columns:
    placement, asked = setting.placement, setting.search
    assert placement is not None
    assert asked is not None
    question = replace(
        question_of(setting, seed=seed),
        # Whether a placement that is given packs into nodes is a question of the search.
        num_gpus=placement.num_gpus,
        gpus_per_node=placement.num_gpus,
    )
    if setting.traffic.finite:
        question = replace(question, num_requests=setting.traffic.requests)
    with local_processes(asked.jobs or 1) as executor:
        found = goodput_of(
            question, placement, phase=setting.phase, counted=setting.traffic.requests, executor=executor
        )
    return {**_described(setting, placement), **_goodput(setting, found), "probes": found.probes}


def _goodput(setting: Setting, found: Single) -> Columns:
    goodput, operation = found.goodput, found.operation
    return {
        "num_gpus": found.num_gpus,
        "goodput_per_gpu_per_s": (goodput.rate_per_s / found.num_gpus).to_dict(),
        "total_per_s": goodput.rate_per_s.to_dict(),
        "monotone": goodput.monotone,
        "replications": len(goodput.log_rates),
        **_operated(operation),
        **_rates(setting, goodput.rate_per_s.best),
        "cost_usd_per_h": None if setting.placement is None else _cost(setting, setting.placement),
        "requests": found.requests,
    }


def _operated(operation: Operation | None) -> Columns:
    if operation is None:
        return {"attainment": None, "utilization": None, "limiting_role": None, "ttft_parts_s": None}
    return {
        "attainment": dict(operation.attainment),
        "utilization": {role.name.lower(): share for role, share in operation.utilization.items()},
        "limiting_role": operation.limiting.name.lower(),
        "ttft_parts_s": dict(operation.ttft_parts_s),
    }


def _searched(setting: Setting, seed: int) -> Columns:
    asked = setting.search
    assert asked is not None
    question = question_of(setting, seed=seed)
    described = {"model": question.model.name, "gpu": question.gpu.name, "max_gpus": question.cluster.num_gpus}
    with timed_processes(asked.jobs or 1) as (executor, spent):
        if asked.method is Method.AUTHORS:
            found = _by_authors(question, executor)
        else:
            found = _answer(setting, search(question, executor=executor))
    timing = {"elapsed_s": spent.elapsed_s, "cpu_s": spent.cpu_s} if asked.timing else {}
    return {**described, **found, **timing}


def _by_authors(question: Question, executor: Executor | None) -> Columns:
    trials = authors_settings(question, executor=executor)
    best = trials[0] if trials and trials[0].low_per_gpu_per_s > 0 else None
    return {
        "placement": None if best is None else str(best.placement),
        "num_gpus": None if best is None else best.placement.num_gpus,
        "rate_per_gpu_per_s": None if best is None else best.low_per_gpu_per_s,
        "candidates": len(trials),
        "probes": sum(trial.probes for trial in trials),
    }


def _answer(setting: Setting, result: SearchResult) -> Columns:
    best = result.best
    winner = _trial(best.overall)
    ratio = best.ratio
    states = [trial.state for trial in result.trials]
    return {
        **winner,
        "engine": None if best.overall is None else setting.profiles[best.overall.placement.pools[0].role].engine,
        "rate_per_gpu_per_s": None if best.overall is None else winner["goodput_per_gpu_per_s"]["best"],
        "cost_usd_per_h": None if best.overall is None else _cost(setting, best.overall.placement),
        "best": {
            "disaggregated": _trial(best.disaggregated),
            "colocated": _trial(best.colocated),
            "ratio": None if ratio is None else ratio.to_dict(),
        },
        "most_total": _trial(result.most_total),
        "candidates": len(states),
        "trials": {state.value.lower(): states.count(state) for state in State},
        "transient": result.transient,
        "probes": result.probes,
        "requests": result.requests,
    }


def _trial(trial: Trial | None) -> Columns:
    """Return a trial's columns, each None where there is no trial."""
    if trial is None:
        return dict.fromkeys((*_TRIAL, "goodput_per_gpu_per_s", "total_per_s", "attainment", "utilization"))
    known = trial.to_dict()
    for name in ("state", "reasons", "bound_per_gpu_per_s", "failed_at_per_gpu_per_s", "tied_in_kind"):
        del known[name]
    return known


# step


def _stepped(setting: Setting) -> Columns:
    step = setting.step
    assert step is not None
    profile = setting.profiles[step.role]
    latency, host = profile.latency_of(Parallelism(step.tp, step.pp)), profile.host_of(step.role, step.pp)
    make = {
        StepPhase.PREFILL: _prefill_step,
        StepPhase.DECODE: _decode_step,
        StepPhase.MIXED: _mixed_step,
        StepPhase.CHUNKED: _chunked_steps,
    }[step.phase]
    return {
        "model": profile.model.name,
        "gpu": profile.gpu.name,
        "engine": profile.engine,
        "num_gpus": step.tp * step.pp,
        "saturation_tokens": profile.saturation_tokens,
        **make(step, latency, host, profile),
    }


def _prefill_step(step: StepSetting, latency: LatencyModel, host: HostOverhead, profile: Profile) -> Columns:
    del profile
    tokens = step.batch * step.prompt_tokens
    kernel_s, host_s = latency.prefill_s([(step.prompt_tokens, 0)] * step.batch), host.launch_s(step.batch, tokens)
    # The first stage also launches.
    period_s = host_s + kernel_s / step.pp
    return {**_times_of(kernel_s, host_s), **_speed(tokens, period_s, step), "tokens": tokens}


def _decode_step(step: StepSetting, latency: LatencyModel, host: HostOverhead, profile: Profile) -> Columns:
    del profile
    tokens = step.batch * step.context_tokens
    kernel_s, host_s = latency.decode_s(step.batch, tokens), host.launch_s(step.batch, tokens)
    # One driver launches the micro-batches, which then circulate, as many as there are stages.
    cycle_s = max(host_s + kernel_s, step.pp * max(host_s, kernel_s / step.pp))
    return {
        **_times_of(kernel_s, host_s),
        "step_s": cycle_s,
        **_speed(step.batch, cycle_s / step.pp, step),
        "tokens": step.batch,
    }


def _mixed_step(step: StepSetting, latency: LatencyModel, host: HostOverhead, profile: Profile) -> Columns:
    del profile
    context = step.batch * step.context_tokens
    kernel_s = latency.mixed_s([(step.prompt_tokens, 0)], step.batch, context)
    host_s = host.launch_s(1 + step.batch, step.prompt_tokens + context, mixed=True)
    alone_s = latency.decode_s(step.batch, context) + host.launch_s(step.batch, context)
    return {
        **_times_of(kernel_s, host_s),
        "added_s": kernel_s + host_s - alone_s,
        "slowdown": (kernel_s + host_s) / alone_s,
        "tokens": step.prompt_tokens + step.batch,
    }


def _chunked_steps(step: StepSetting, latency: LatencyModel, host: HostOverhead, profile: Profile) -> Columns:
    """Return what a prompt costs that is prefilled in chunks, each in a step with the decoding requests."""
    chunks = _chunks(step.prompt_tokens, step.chunk_tokens)
    context = step.batch * step.context_tokens
    reread = sum(cached for _, cached in chunks)
    kernels, hosts = [], []
    for done, (tokens, cached) in enumerate(chunks):
        # Every decoding request has one token more after each step.
        now = context + done * step.batch
        kernels.append(latency.mixed_s([(tokens, cached)], step.batch, now))
        hosts.append(host.launch_s(1 + step.batch, tokens + now, mixed=step.batch > 0))
    steps_s = [kernel_s + host_s for kernel_s, host_s in zip(kernels, hosts, strict=True)]
    return {
        **_times_of(math.fsum(kernels) / len(chunks), math.fsum(hosts) / len(chunks)),
        "chunks": len(chunks),
        "ttft_s": math.fsum(steps_s),
        "longest_step_s": max(steps_s),
        "reread_chunks": len(chunks) * (len(chunks) - 1) // 2,
        "reread_tokens": reread,
        "reread_bytes": reread * profile.model.kv_bytes_per_token,
        "reread_s": latency.prefill_s([(1, reread)]) - latency.prefill_s([(1, 0)]) if reread else 0.0,
        "tokens": step.prompt_tokens,
    }


def _chunks(prompt_tokens: int, chunk_tokens: int) -> list[Chunk]:
    starts = range(0, prompt_tokens, chunk_tokens)
    return [(min(chunk_tokens, prompt_tokens - start), start) for start in starts]


def _times_of(kernel_s: float, host_s: float) -> Columns:
    return {"kernel_s": kernel_s, "host_s": host_s, "step_s": kernel_s + host_s}


def _speed(tokens: int, period_s: float, step: StepSetting) -> Columns:
    per_s = tokens / period_s
    return {"tokens_per_s": per_s, "tokens_per_gpu_per_s": per_s / (step.tp * step.pp)}


# queueing


def _queued(setting: Setting) -> Columns:
    asked, rate_per_s = setting.queueing, setting.traffic.rate_per_s
    assert asked is not None
    assert rate_per_s is not None
    mean_s = {
        Formula.MD1: lambda: queueing.md1_mean_ttft_s(rate_per_s, asked.prefill_s),
        Formula.TWO_STAGE: lambda: queueing.two_stage_mean_ttft_s(rate_per_s, asked.prefill_s),
        Formula.SPEEDUP: lambda: queueing.speedup_mean_ttft_s(rate_per_s, asked.prefill_s, tp_speedup=asked.tp_speedup),
    }[asked.formula]()
    crossover = None
    if asked.formula is Formula.SPEEDUP and asked.tp_speedup < 2:
        crossover = queueing.parallelism_crossover_per_s(asked.prefill_s, tp_speedup=asked.tp_speedup)
    return {
        **_rates(setting, rate_per_s),
        "ttft_s": {"mean": mean_s},
        "crossover_per_s": crossover,
        "crossover_per_gpu_per_s": None if crossover is None else crossover / asked.num_gpus,
    }


# Names


def _dotted(name: str, parts: Sequence[str]) -> Iterator[str]:
    return (f"{name}.{part}" for part in parts)


def _columns_of_run() -> Iterator[str]:
    yield from ("num_requests", *_dotted("attainment", _SHARES))
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "transfer_s"):
        yield from _dotted(name, _DISTRIBUTION)
    yield from ("throughput_per_s", "good_throughput_per_s", "saturation", *_dotted("ttft_parts_s", _TTFT_PARTS))
    for name in ("utilization", "kv_peak", "kv_blocks"):
        yield from _dotted(name, _ROLES)
    yield from ("preemptions", "rejected", "placement", "policy", "token_budget", *_WHAT, *_RATES)
    yield from ("output_tokens_per_s", "output_tokens_per_gpu_per_s", "output_tokens_per_user_per_s")
    yield from (*_dotted("parts_s", _PARTS), *_dotted("parts_share", _PARTS), "cost_usd_per_h")
    yield from _dotted("quantiles", QUANTILES)


def _columns_of_goodput() -> Iterator[str]:
    yield from ("placement", "policy", "token_budget", *_WHAT, *_RATES)
    yield from (*_dotted("goodput_per_gpu_per_s", _INTERVAL), *_dotted("total_per_s", _INTERVAL))
    yield from ("monotone", "replications", *_dotted("attainment", _SHARES), *_dotted("utilization", _ROLES))
    yield from ("limiting_role", *_dotted("ttft_parts_s", _TTFT_PARTS), "cost_usd_per_h", "probes", "requests")


def _columns_of_trial() -> Iterator[str]:
    yield from (*_TRIAL, *_dotted("goodput_per_gpu_per_s", _INTERVAL), *_dotted("total_per_s", _INTERVAL))
    yield from (*_dotted("attainment", _SHARES), *_dotted("utilization", _ROLES))
    yield from _dotted("ttft_parts_s", _TTFT_PARTS)


def _columns_of_search() -> Iterator[str]:
    yield from ("max_gpus", *_columns_of_trial(), *_WHAT, "rate_per_gpu_per_s", "cost_usd_per_h")
    for name in ("best.disaggregated", "best.colocated", "most_total"):
        yield from _dotted(name, tuple(_columns_of_trial()))
    yield from (*_dotted("best.ratio", _INTERVAL), "candidates", "transient", "probes", "requests")
    yield from (*_dotted("trials", [state.value.lower() for state in State]), "elapsed_s", "cpu_s")


def _columns_of_step() -> Iterator[str]:
    yield from (*_WHAT, "num_gpus", "saturation_tokens", "kernel_s", "host_s", "step_s", "tokens")
    yield from ("tokens_per_s", "tokens_per_gpu_per_s", "added_s", "slowdown")
    yield from ("chunks", "ttft_s", "longest_step_s", "reread_chunks", "reread_tokens", "reread_bytes", "reread_s")


def _columns_of_queueing() -> Iterator[str]:
    yield from (*_RATES, "ttft_s.mean", "crossover_per_s", "crossover_per_gpu_per_s")
