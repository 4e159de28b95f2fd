"""Objectives: what the best placement is the best in, and what GPUs cost."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsim.errors import InputError
from dsim.gpu import Gpu
from dsim.pools import Placement, Pool, Role
from dsim.profile import Profile
from placement.goodput import ratio
from placement.result import SearchResult, State, Trial
from placement.statistics import Interval

_SECONDS_PER_HOUR: Final = 3600.0


class Objective(enum.Enum):
    """What is made as large (or, of GPUs, as small) as it can be."""

    GOODPUT_PER_GPU = "goodput_per_gpu"
    GOODPUT_PER_DOLLAR = "goodput_per_dollar"
    MIN_GPUS = "min_gpus"


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour of one GPU costs.

    Args:
        gpu: its name.
        price_usd_per_h: the typical price between the lowest and the highest seen; None where nobody said.
        source: where the prices were seen.
        given: the user said it, instead of the catalog.
    """

    gpu: str
    price_usd_per_h: Interval | None
    source: str
    given: bool = False

    @classmethod
    def of(cls, gpu: Gpu, given_usd_per_h: float | None = None) -> Price:
        """Return a GPU's price: the one given, else the catalog's."""
        if given_usd_per_h is not None:
            spread = Interval(given_usd_per_h, given_usd_per_h, given_usd_per_h)
            return cls(gpu.name, spread, "as given", given=True)
        if gpu.price_usd_per_h is None:
            return cls(gpu.name, None, "unknown")
        typical, low, high = gpu.price_usd_per_h
        return cls(gpu.name, Interval(low, typical, high), gpu.price_source)

    def to_dict(self) -> dict[str, object]:
        """Return the price as in docs/output.md."""
        spread = None if self.price_usd_per_h is None else self.price_usd_per_h.to_dict()
        return {"gpu": self.gpu, "price_usd_per_h": spread, "price_source": self.source, "given": self.given}


#: Prices by role: pools of different roles may have different GPUs.
Prices = Mapping[Role, Price]


class PriceList(dict[Role, Price]):
    """Prices by role, and of every GPU that pools may name.

    Args:
        by_gpu: by the GPU's name.
    """

    def __init__(self, by_role: Mapping[Role, Price], by_gpu: Mapping[str, Price]) -> None:
        super().__init__(by_role)
        self.by_gpu = dict(by_gpu)


def prices_of(
    profiles: Mapping[Role, Profile], given_usd_per_h: Mapping[str, float] | None = None, *, others: Sequence[Gpu] = ()
) -> Prices:
    """Return the price of each role's GPU.

    Args:
        given_usd_per_h: by the GPU's name, instead of the catalog's.
        others: GPUs that pools may name, too.
    """
    given = given_usd_per_h or {}
    by_role = {role: Price.of(profile.gpu, given.get(profile.gpu.name)) for role, profile in profiles.items()}
    if not others:
        return by_role
    gpus = [*(profile.gpu for profile in profiles.values()), *others]
    return PriceList(by_role, {gpu.name: Price.of(gpu, given.get(gpu.name)) for gpu in gpus})


def every_price(prices: Prices) -> list[Price]:
    """Return the different prices, each once."""
    return list(dict.fromkeys([*prices.values(), *(prices.by_gpu.values() if isinstance(prices, PriceList) else ())]))


def price_of(pool: Pool, prices: Prices) -> Price:
    """Return the price of the GPU that a pool lies on."""
    if pool.gpu is not None and isinstance(prices, PriceList) and pool.gpu in prices.by_gpu:
        return prices.by_gpu[pool.gpu]
    return prices[pool.role]


def cost_usd_per_h(placement: Placement, prices: Prices) -> Interval | None:
    """Return what the GPUs of a placement cost, each pool at the price of its own; None where a price is unknown."""
    total = Interval(0.0, 0.0, 0.0)
    for pool in placement.pools:
        price = price_of(pool, prices).price_usd_per_h
        if price is None:
            return None
        total = plus(total, price * pool.num_gpus)
    return total


def requests_per_usd(trial: Trial, prices: Prices) -> Interval | None:
    """Return the requests that a dollar buys at the trial's goodput, GPUs at their typical prices.

    The limits are those of the goodput: the spread of prices is not in them. None without goodput or price.
    """
    cost = cost_usd_per_h(trial.placement, prices)
    if cost is None or trial.goodput is None or not cost.best:
        return None
    return trial.goodput.rate_per_s * (_SECONDS_PER_HOUR / cost.best)


def thrift(placement: Placement, prices: Prices | None) -> float:
    """Return GPUs over cost, relative to the cheapest GPU: what goodput per GPU is multiplied by to rank by cost.

    It is 1 for every placement where all GPUs have one price: then it changes no ranking.

    Raises:
        InputError: a price is unknown or 0.
    """
    if prices is None:
        return 1.0
    known = _known(prices)
    if len(set(known)) <= 1:
        return 1.0
    cost = sum(_usd_per_h(price_of(pool, prices), "--objective") * pool.num_gpus for pool in placement.pools)
    return min(known) * placement.num_gpus / cost


def is_one_price(prices: Prices) -> bool:
    """Return whether all GPUs have one price, so that goodput per dollar ranks as goodput per GPU does."""
    return len({price.price_usd_per_h for price in every_price(prices)}) == 1


def check_prices(prices: Prices, where: str = "--objective") -> None:
    """See that all prices are known, so that costs can be compared.

    Args:
        where: what needs them, for the error.

    Raises:
        InputError: a price is unknown or 0.
    """
    _known(prices, where)


def ranked(result: SearchResult, prices: Prices | None) -> tuple[Trial, ...]:
    """Return the complete trials that sustain a rate, best first: by goodput per dollar, or per GPU without prices."""
    return tuple(
        sorted(
            (t for t in result.trials if t.state is State.COMPLETE and t.goodput and t.goodput.rate_per_s.best > 0),
            key=lambda t: (-_worth(t, prices), t.num_gpus, t.placement.label),
        )
    )


def tied(trials: Sequence[Trial], prices: Prices | None, *, confidence: float) -> tuple[Trial, ...]:
    """Return the trials, the first one apart, that are not significantly worse than the first, from paired runs."""
    if not trials:
        return ()
    first, found = trials[0], []
    for trial in trials[1:]:
        assert trial.goodput is not None
        assert first.goodput is not None
        paired = ratio(trial.goodput, first.goodput, confidence=confidence)
        scale = _per_goodput(trial.placement, prices) / _per_goodput(first.placement, prices)
        if paired is not None and paired.high * scale >= 1:
            found.append(trial)
    return tuple(found)


def plus(a: Interval, b: Interval) -> Interval:
    """Return the sum of two intervals, limit by limit: where both err the same way."""
    return Interval(a.low + b.low, a.best + b.best, a.high + b.high)


def usd_per_million_tokens(cost: Interval | None, rate_per_s: float, tokens: float) -> Interval | None:
    """Return the cost of a million tokens of which every request has so many, at a rate; None without a cost.

    >>> usd_per_million_tokens(Interval(18.0, 36.0, 72.0), 10.0, 100.0).best
    10.0
    """
    per_hour = rate_per_s * tokens * _SECONDS_PER_HOUR
    return None if cost is None or per_hour <= 0 else cost * (1e6 / per_hour)


def _worth(trial: Trial, prices: Prices | None) -> float:
    assert trial.goodput is not None
    return trial.goodput.rate_per_s.best * _per_goodput(trial.placement, prices)


def _per_goodput(placement: Placement, prices: Prices | None) -> float:
    return thrift(placement, prices) / placement.num_gpus


def _known(prices: Prices, where: str = "--objective") -> list[float]:
    """Return the typical price of each GPU, USD an hour."""
    return [_usd_per_h(price, where) for price in every_price(prices)]


def _usd_per_h(price: Price, where: str) -> float:
    if price.price_usd_per_h is None or not 0 < price.price_usd_per_h.best < math.inf:
        value = None if price.price_usd_per_h is None else price.price_usd_per_h.best
        hint = f"give one, as in --price {price.gpu}=2.50"
        raise InputError(where, f"needs a price above 0 for {price.gpu}", value=value, hint=hint)
    return price.price_usd_per_h.best
