"""Sentences and numbers of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dsim.pools import Placement, Pool, Role
from dsim.slo import Slo
from experiments.report.answer import Answer, TrialRow
from experiments.report.markup import Html, element, joined, number
from placement.statistics import Interval

PARTS = {
    "queue": "queue",
    "prefill": "prefill",
    "transfer": "KV transfer and the wait for it",
    "decode_admission": "decode admission",
}
#: Never at the start of a line.
PERCENT = "\u00a0%"
_INSTANCES = {Role.PREFILL: "prefill instance", Role.DECODE: "decode instance", Role.COLOCATED: "colocated instance"}


def short(value: float) -> Html:
    """Return a number with three digits that matter, the exact one beside it.

    >>> short(2.8664626), short(118.2)
    ('<data value="2.8664626">2.87</data>', '<data value="118.2">118</data>')
    """
    return number(value, rounded(value))


def rounded(value: float) -> str:
    """Return a number with three digits that matter.

    >>> rounded(1.2), rounded(0), rounded(12_345.6)
    ('1.20', '0', '12,346')
    """
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".removesuffix(".")


def percent(share: float) -> Html:
    """Return a share in per cent, the exact share beside it."""
    return number(share, f"{100 * share:.1f}{PERCENT}")


def percent_range(interval: Interval) -> Html:
    """Return the limits of an interval of shares in per cent."""
    low, high = number(interval.low, f"{100 * interval.low:.1f}"), number(interval.high, f"{100 * interval.high:.1f}")
    return element("span", low, "–", high, PERCENT, class_="range")


def milliseconds(seconds: float) -> Html:
    """Return a time in milliseconds, the exact seconds beside it."""
    return number(seconds, f"{1e3 * seconds:,.1f}")


def spread(interval: Interval) -> Html:
    """Return the limits of an interval."""
    return element("span", short(interval.low), "–", short(interval.high), class_="range")


def with_interval(interval: Interval, confidence: float) -> Html:
    """Return the best estimate with its interval in brackets."""
    return joined([short(interval.best), f" ({100 * confidence:g}{PERCENT} interval ", spread(interval), ")"])


def count_of(count: int, noun: str) -> str:
    """Return a number of things.

    >>> count_of(1, "GPU"), count_of(12_000, "run")
    ('1 GPU', '12,000 runs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(items: Iterable[str]) -> str:
    """Return items as in "a, b and c".

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    names = list(items)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def limits(slo: Slo) -> str:
    r"""Return the limits in words.

    >>> limits(Slo(ttft_s=0.4, tpot_s=0.1))
    'a TTFT of 0.4\xa0s and a TPOT of 0.1\xa0s'
    """
    named = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "end-to-end time": slo.e2e_s}
    article = {"TTFT": "a", "TPOT": "a", "end-to-end time": "an"}
    known = {name: value for name, value in named.items() if math.isfinite(value)}
    return listed(f"{article[name]} {name} of {value:g}\u00a0s" for name, value in known.items())


def spelled(placement: Placement) -> str:
    """Return a placement in words.

    >>> spelled(Placement.parse("3xP:tp1pp1 + 1xD:tp2pp2"))
    '3 prefill instances (TP 1) and 1 decode instance (TP 2, PP 2)'
    """
    return listed(_pool(pool) for pool in placement.pools)


def _pool(pool: Pool) -> str:
    degrees = [f"TP {pool.parallelism.tp}"]
    if pool.parallelism.pp > 1:
        degrees.append(f"PP {pool.parallelism.pp}")
    if pool.policy is not None:
        degrees.append(pool.policy.value if pool.token_budget is None else f"{pool.policy.value} {pool.token_budget}")
    return f"{count_of(pool.count, _INSTANCES[pool.role])} ({', '.join(degrees)})"


def kind(trial: TrialRow) -> str:
    """Return which kind of placement it is."""
    return "colocated" if trial.placement.is_colocated else "disaggregated"


def other_kind(trial: TrialRow) -> str:
    """Return the kind that it is not."""
    return "disaggregated" if trial.placement.is_colocated else "colocated"


def recommendation(answer: Answer, model: str, slo: Slo) -> Html:
    """Return the answer in one sentence.

    Args:
        model: its name as people write it.
    """
    trial = answer.recommended
    share = f"{100 * answer.attainment_target:g}{PERCENT}"
    if trial is None or trial.goodput_per_gpu_per_s is None:
        return joined(
            f"No placement of {model} on up to {count_of(answer.num_gpus, 'GPU')} of type {answer.gpu} serves any rate "
            f"with {share} of the requests within {limits(slo)}."
        )
    runs = f" in runs of {answer.num_requests:,} requests" if answer.num_requests is not None else ""
    return joined(
        [
            f"Run {spelled(trial.placement)} of {model} on {count_of(trial.num_gpus, 'GPU')} of type {answer.gpu}: "
            f"this {kind(trial)} placement serves ",
            with_interval(trial.goodput_per_gpu_per_s, answer.confidence),
            f" requests/s per GPU{runs} with {share} of the requests within {limits(slo)}, ",
            _comparison(answer, trial),
            ".",
        ]
    )


def _comparison(answer: Answer, trial: TrialRow) -> Html:
    if answer.advantage is not None and answer.other is not None:
        best = answer.advantage
        factor = [short(best.best), " (", spread(best), f") times what the best {other_kind(trial)} one serves"]
        if best.low <= 1 <= best.high:
            factor.append(", a difference that may be chance")
        return joined(factor)
    if answer.mode != "both":
        return joined(f"and {other_kind(trial)} placements were not searched")
    if answer.other is None:
        return joined(f"and no {other_kind(trial)} placement serves any rate within these limits")
    return joined(f"and the best {other_kind(trial)} one cannot be compared by the same requests")
