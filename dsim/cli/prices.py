"""What GPUs cost, as an option says it or the catalog has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.inputs import number
from dsim.errors import InputError
from dsim.units import split_quantity

if TYPE_CHECKING:
    from dsim.gpu import Gpu
    from dsim.pools import Role
    from dsim.profile import Profile
    from placement.objective import Price, Prices
    from placement.result import Trial
    from placement.statistics import Interval

PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="[GPU=]USD",
        help="Price of a GPU for an hour, as 2.5 or h100=2.5; may be repeated. [default: the catalog's]",
    ),
]
#: Highest price of a GPU, USD an hour: more is a mistake.
_MOST_USD = 1e6
_HINT = "as in --price 2.5 or --price h100=2.5 (USD an hour and GPU)"


def asked_prices(
    texts: Sequence[str] | None,
    profiles: Mapping[Role, Profile],
    roles: Collection[Role],
    *,
    others: Sequence[Gpu] = (),
) -> Prices:
    """Return the price of each role's GPU.

    Args:
        others: GPUs that pools may name.

    Raises:
        InputError: a text is no price, or for a GPU that is not used.
    """
    from placement.objective import prices_of

    used = {role: profile for role, profile in profiles.items() if role in roles}
    names = list(dict.fromkeys(gpu.name for gpu in (*(profile.gpu for profile in used.values()), *others)))
    given: dict[str, float] = {}
    of_all: float | None = None
    for text in (part for item in texts or () for part in item.split(",")):
        gpu, equals, amount = text.rpartition("=")
        value, unit = split_quantity(amount, "--price", hint=_HINT)
        if unit is not None:
            raise InputError("--price", f"has a unit {unit!r}", value=text, hint=_HINT)
        if number("--price", value, at_least=0) > _MOST_USD:
            raise InputError("--price", f"must be <= {_MOST_USD:g}", value=text, hint=_HINT)
        if equals:
            name = _used(gpu.strip(), names)
            if name in given:
                raise InputError("--price", "is given twice", value=name)
            given[name] = value
        elif of_all is not None:
            hint = "give one price of all GPUs, and others by name, as in --price 2.5 --price h100=4"
            raise InputError("--price", "is given twice for all GPUs", value=text, hint=hint)
        else:
            of_all = value
    if of_all is not None:
        given = dict.fromkeys(names, of_all) | given
    return prices_of(used, given, others=others)


def _used(gpu: str, names: Sequence[str]) -> str:
    """Return the name of the GPU that is used and meant."""
    if gpu in names:
        return gpu
    from dsim.catalog import find_gpu

    name = find_gpu(gpu, where="--price").name
    if name not in names:
        raise InputError("--price", f"is not used: {', '.join(names)}", value=gpu, hint="leave it out")
    return name


def price_list(prices: Prices) -> list[Price]:
    """Return the prices, each GPU once."""
    from placement.objective import every_price

    return list({price.gpu: price for price in every_price(prices)}.values())


def price_lines(prices: Prices) -> list[str]:
    """Return where the prices come from."""
    lines = []
    for price in price_list(prices):
        if price.price_usd_per_h is None:
            lines.append(f"price of {price.gpu}: unknown; give one, as in --price {price.gpu}=2.50")
        elif price.given:
            lines.append(f"price of {price.gpu}: {price.price_usd_per_h.best:g} USD/h, as given")
        else:
            p = price.price_usd_per_h
            lines.append(
                f"price of {price.gpu}: {p.best:g} USD/h, seen from {p.low:g} to {p.high:g} [{price.source}]; "
                f"one source, not a quotation: --price {price.gpu}=USD"
            )
    return lines


def usd(amount: Interval | None) -> str:
    """Return a cost with its spread, where there is one.

    >>> from placement.statistics import Interval
    >>> usd(Interval(12.8, 20.8, 65.6)), usd(Interval(0.25, 0.25, 0.25)), usd(None)
    ('20.8 (12.8 - 65.6)', '0.25', 'unknown')
    """
    if amount is None:
        return "unknown"
    if amount.low == amount.high:
        return _usd(amount.best)
    return f"{_usd(amount.best)} ({_usd(amount.low)} - {_usd(amount.high)})"


def _usd(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:.3g}"


def with_costs(row: dict[str, Any], trial: Trial, prices: Prices) -> dict[str, Any]:
    """Return a trial's row with what it costs."""
    from placement.objective import cost_usd_per_h, requests_per_usd

    cost, bought = cost_usd_per_h(trial.placement, prices), requests_per_usd(trial, prices)
    return {
        **row,
        "cost_usd_per_h": None if cost is None else cost.to_dict(),
        "requests_per_usd": None if bought is None else bought.to_dict(),
    }
