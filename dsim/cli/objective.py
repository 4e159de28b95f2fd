"""What the best placement of a search is the best in, what GPUs cost, and what an answer says of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsim.cli.inputs import rate_per_s
from dsim.cli.options import ObjectiveChoice
from dsim.cli.output import Table
from dsim.cli.plans import plan_parts
from dsim.cli.prices import asked_prices, price_lines, price_list, usd, with_costs
from dsim.errors import InputError

if TYPE_CHECKING:
    from placement.objective import Prices
    from placement.pareto import Point
    from placement.result import SearchResult
    from placement.search import Question
    from placement.size import Sizing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """What the best placement is the best in, and what GPUs cost."""

    objective: ObjectiveChoice
    rate_per_s: float | None
    prices: Prices
    pareto: bool
    priced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What was found beside the search's own answer."""

    sizing: Sizing | None
    points: tuple[Point, ...] | None


def asked_objective(
    question: Question, objective: ObjectiveChoice, *, rate: str | None, price: list[str] | None, pareto: bool
) -> tuple[Sought, Question]:
    """Return what is sought, and the question with the prices where they rank.

    Raises:
        InputError: options that do not go together, or a price that is needed and unknown.
    """
    from placement.objective import check_prices

    prices = asked_prices(price, question.profiles, question.roles, others=question.other_gpus)
    asks_rate = objective is ObjectiveChoice.MIN_GPUS
    if asks_rate and question.fleet is not None and question.fleet.by_role:
        hint = f"give numbers by GPU, as in {next(iter(question.fleet.types))}=8"
        raise InputError("--gpus", "is by role, and min_gpus plans copies by GPU", hint=hint)
    if asks_rate and rate is None:
        raise InputError("--rate", "is needed with --objective min_gpus", hint="as in --rate 40 (requests per second)")
    if rate is not None and not asks_rate:
        hint = "add --objective min_gpus, or ask dsim size"
        raise InputError("--rate", "belongs to --objective min_gpus", value=rate, hint=hint)
    for option, used in (("--objective", asks_rate), ("--pareto", pareto)):
        if used and question.num_requests is not None:
            hint = "leave --requests out"
            raise InputError(option, "does not go with --requests: what a finite run serves does not last", hint=hint)
    if objective is ObjectiveChoice.GOODPUT_PER_DOLLAR or pareto:
        check_prices(prices, "--pareto" if pareto else "--objective")
    if objective is ObjectiveChoice.GOODPUT_PER_DOLLAR:
        question = replace(question, prices=prices)
    sought = Sought(
        objective=objective,
        rate_per_s=None if rate is None else rate_per_s(rate),
        prices=prices,
        pareto=pareto,
        priced=price is not None or pareto or objective is not ObjectiveChoice.GOODPUT_PER_GPU,
    )
    return sought, question


def with_prices(answer: dict[str, Any], result: SearchResult, sought: Sought, more: More) -> dict[str, Any]:
    """Return the answer with what GPUs cost, and the best by the objective."""
    from placement.objective import ranked

    prices = sought.prices
    answer["trials"] = [with_costs(r, t, prices) for r, t in zip(answer["trials"], result.trials, strict=True)]
    named = {"disaggregated": result.best.disaggregated, "colocated": result.best.colocated}
    for kind, trial in named.items():
        if trial is not None:
            answer["best"][kind] = with_costs(answer["best"][kind], trial, prices)
    if result.most_total is not None:
        answer["most_total"] = with_costs(answer["most_total"], result.most_total, prices)
    by_cost = sought.objective is ObjectiveChoice.GOODPUT_PER_DOLLAR
    best = next(iter(ranked(result, prices if by_cost else None)), None)
    if sought.rate_per_s is not None:
        best = None
    plan = None if more.sizing is None or more.sizing.plan is None else more.sizing.plan
    return {
        **answer,
        "objective": sought.objective.value,
        "best_by_objective": None if best is None else with_costs(best.to_dict(), best, prices),
        "prices": [price.to_dict() for price in price_list(prices)],
        "plan": None if plan is None else plan.to_dict(),
        "fits": None if more.sizing is None else more.sizing.fits,
        "pareto": None if more.points is None else [point.to_dict() for point in more.points],
    }


def cost_parts(question: Question, result: SearchResult, sought: Sought, more: More) -> list[Table | str]:
    """Return the best by the objective, and what it costs."""
    if not sought.priced or not result.is_feasible:
        return []
    from placement.objective import cost_usd_per_h, is_one_price, ranked, requests_per_usd, tied

    parts: list[Table | str] = []
    lines: list[str] = []
    if more.sizing is not None and more.sizing.plan is not None:
        parts += plan_parts(more.sizing.plan, question, sought.prices)
    elif sought.objective is not ObjectiveChoice.MIN_GPUS:
        by_cost = sought.objective is ObjectiveChoice.GOODPUT_PER_DOLLAR
        prices = sought.prices if by_cost else None
        trials = ranked(result, prices)
        if by_cost:
            lines.append(f"best per dollar: {trials[0].placement.label}")
            also = tied(trials, prices, confidence=question.confidence)
            if also:
                lines.append(f"not significantly worse per dollar: {', '.join(t.placement.label for t in also)}")
            if is_one_price(sought.prices):
                lines.append("all GPUs have one price: goodput per dollar ranks placements as goodput per GPU does")
        for trial in trials:
            bought = requests_per_usd(trial, sought.prices)
            line = f"{trial.placement.label}: {usd(cost_usd_per_h(trial.placement, sought.prices))} USD/h"
            if bought is not None:
                line += f", {bought.best:,.0f} ({bought.low:,.0f} - {bought.high:,.0f}) requests/USD at its goodput"
            lines.append(line)
        lines += price_lines(sought.prices)
        parts.append("\n".join(lines))
    if more.points is not None:
        parts += _pareto_parts(question, more.points)
    return parts


def _pareto_parts(question: Question, points: Sequence[Point]) -> list[Table | str]:
    from dsim.cli.tables import milliseconds, percent

    share = f"P{100 * question.attainment:g}"
    best = [point for point in points if point.is_best]
    table = Table(
        ["<placement", "GPUs", "requests/s per GPU", f"TTFT {share} ms", f"TPOT {share} ms",
         "USD per million output tokens", "within limits"]
    )  # fmt: skip
    for point in best:
        table.rows.append(
            [
                point.placement.label,
                str(point.placement.num_gpus),
                f"{point.rate_per_gpu_per_s:.3f}",
                milliseconds(point.ttft_s.best),
                milliseconds(point.tpot_s.best),
                usd(point.usd_per_million_output_tokens),
                percent(point.attainment),
            ]
        )
    title = f"of {len(points)} simulated points, those that no other beats in TTFT, TPOT and cost at once, by cost"
    return [title, table]
