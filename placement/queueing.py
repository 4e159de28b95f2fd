"""Queueing formulas for Poisson arrivals, against which the simulator and the paper are held."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable


def md1_mean_ttft_s(rate_per_s: float, prefill_s: float) -> float:
    """Return the mean TTFT of one prefill instance without batching, seconds; infinite from rate * time = 1 on.

    Args:
        rate_per_s: Poisson arrivals.
        prefill_s: constant execution time D.

    Source:
        DistServe (OSDI 2024), section 3.1, equation 1: D + R D^2 / (2 (1 - R D)), the mean of an M/D/1 queue.

    >>> round(md1_mean_ttft_s(2.5, 0.2), 12)
    0.3
    """
    load = rate_per_s * prefill_s
    if load >= 1:
        return math.inf
    return prefill_s + load * prefill_s / (2 * (1 - load))


def two_stage_mean_ttft_s(rate_per_s: float, prefill_s: float) -> float:
    """Return the mean TTFT over two equal pipeline stages, seconds; infinite from rate * time = 2 on.

    The request takes `prefill_s` in all, and the stages bound the rate by half of it.

    Source:
        DistServe, section 3.1, equation 2: D + R D^2 / (4 (2 - R D)).

    >>> two_stage_mean_ttft_s(5.0, 0.2)
    0.25
    """
    load = rate_per_s * prefill_s
    if load >= 2:
        return math.inf
    return prefill_s + load * prefill_s / (4 * (2 - load))


def speedup_mean_ttft_s(rate_per_s: float, prefill_s: float, *, tp_speedup: float) -> float:
    """Return the mean TTFT of an instance that tensor parallelism makes `tp_speedup` times as fast, seconds.

    Source:
        DistServe, section 3.1, equation 3: D/K + R D^2 / (2 K (K - R D)); infinite from R D = K on.

    >>> round(speedup_mean_ttft_s(5.0, 0.2, tp_speedup=2.0), 12)
    0.15
    """
    return md1_mean_ttft_s(rate_per_s, prefill_s / tp_speedup)


def parallelism_crossover_per_s(prefill_s: float, *, tp_speedup: float) -> float:
    """Return the arrival rate at which two-way intra- and inter-operator parallelism have the same mean TTFT.

    Below it the faster execution of intra-operator parallelism wins, above it the higher capacity of two stages.

    Args:
        tp_speedup: K of two-way tensor parallelism, 1 < K < 2.

    Source:
        DistServe, section 3.1 and Figure 4: equations 2 and 3 equated.

    >>> round(parallelism_crossover_per_s(0.2, tp_speedup=1.7) / 2, 2)  # per GPU
    3.14
    """

    def difference_s(load: float) -> float:
        rate_per_s = load / prefill_s
        intra_s = speedup_mean_ttft_s(rate_per_s, prefill_s, tp_speedup=tp_speedup)
        return intra_s - two_stage_mean_ttft_s(rate_per_s, prefill_s)

    return _root(difference_s, tp_speedup * (1 - 1e-9)) / prefill_s


def md1_waiting_cdf(wait_s: float, *, rate_per_s: float, service_s: float) -> float:
    """Return the probability that a customer of an M/D/1 queue waits at most `wait_s` for service.

    Source:
        A. K. Erlang (1909): (1 - R D) times the sum over k = 0 .. floor(t / D) of x^k / k! e^-x with x = R (k D - t).

    >>> round(md1_waiting_cdf(0.0, rate_per_s=0.4, service_s=1.0), 12)
    0.6
    """
    load = rate_per_s * service_s
    if load >= 1:
        return 0.0
    if wait_s < 0:
        return 0.0
    # The terms alternate and cancel down from e^(R t).
    with decimal.localcontext() as context:
        context.prec = 30 + math.ceil(rate_per_s * wait_s)
        rate, service, wait = (decimal.Decimal(x) for x in (rate_per_s, service_s, wait_s))
        total = (rate * wait).exp()
        for k in range(1, math.floor(wait_s / service_s) + 1):
            x = rate * (k * service - wait)
            total += x**k / math.factorial(k) * (-x).exp()
        return float((1 - rate * service) * total)


def md1_goodput_per_s(service_s: float, *, ttft_s: float, attainment: float) -> float:
    """Return the largest rate at which this share of an M/D/1 queue's customers has a TTFT within the limit.

    >>> round(md1_goodput_per_s(1.0, ttft_s=2.0, attainment=0.9), 4)
    0.3917
    """
    if ttft_s < service_s:
        return 0.0

    def surplus(load: float) -> float:
        met = md1_waiting_cdf(ttft_s - service_s, rate_per_s=load / service_s, service_s=service_s)
        return met - attainment

    return _root(surplus, 1.0) / service_s


def decode_mean_step_s(
    rate_per_s: float, *, mean_output_tokens: float, constant_s: float, per_request_s: float
) -> float:
    """Return the mean time between the tokens of a request under continuous batching, seconds.

    A step of B requests takes constant + per_request * B, and nothing limits the batch. Infinite where
    rate * tokens * per_request reaches 1.

    Source:
        Requests that share a server whose speed depends on their number B alone have P(B = n) proportional to the
        product over k = 1 .. n of r (constant + per_request * k) / k, r = rate * tokens, whatever the distribution of
        lengths (Cohen 1979, The multiple phase service network with generalized processor sharing). So E[B] is
        r (constant + per_request) / (1 - r per_request), and by Little's law the time of a token is E[B] / r. Exact
        as outputs get long, since tokens come in whole steps.

    >>> decode_mean_step_s(0.5, mean_output_tokens=100, constant_s=0.01, per_request_s=0.001)
    0.011578947368421053
    """
    load = rate_per_s * mean_output_tokens * per_request_s
    return math.inf if load >= 1 else (constant_s + per_request_s) / (1 - load)


def _root(function: Callable[[float], float], high: float) -> float:
    """Return where the function is 0 between 0 and `high`."""
    # Takes most of a second to import, which no other formula needs.
    from scipy.optimize import brentq

    return float(brentq(function, 0.0, high, xtol=1e-14))
