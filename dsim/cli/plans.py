"""A plan for a rate or a population as tables and lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsim.cli.inputs import number_of
from dsim.cli.output import Table
from dsim.cli.prices import price_lines, usd

if TYPE_CHECKING:
    from placement.objective import Prices
    from placement.search import Question
    from placement.size import Plan, Sizing
    from placement.statistics import Interval


def plan_parts(plan: Plan, question: Question, prices: Prices) -> list[Table | str]:
    """Return the parts of a plan's report, in order."""
    from dsim.cli.tables import figures, level, percent
    from placement.cover import gpus_by_type

    copies = ", ".join(f"{kind.count} x ({kind.placement.label})" for kind in plan.copies)
    capacity, load = plan.capacity_per_s, plan.load
    tokens = ", ".join(f"{name} {usd(amount)}" for name, amount in plan.usd_per_million_tokens.items())
    types: dict[str, int] = {}
    for kind in plan.copies:
        for gpu, number in gpus_by_type(kind.placement).items():
            if gpu is not None:
                types[gpu] = types.get(gpu, 0) + kind.count * number
    of_types = "".join(f"{number} {gpu}, " for gpu, number in types.items())
    lines = [
        f"needs {number_of(plan.num_gpus, 'GPU')} ({of_types}{_nodes(plan, question)}): {copies}",
        f"GPUs if every goodput were its estimate: {plan.gpus_at_estimate}; its upper limit: "
        f"{plan.gpus_at_most_optimistic}",
        f"safe: it serves {figures(capacity.low, 4)} requests/s at the lower limits of the goodputs, "
        f"{figures(plan.rate_per_s, 4)} are "
        f"asked for; the probability that these limits hold is at least {level(plan.confidence)}",
        f"headroom: {percent(load.best)} ({percent(load.low)} - {percent(load.high)}) of the goodput of "
        f"{_interval(capacity)} requests/s is used",
        f"{number_of(plan.gpus_may_fail, 'GPU')} may fail, wherever, before requests may miss the target; for each "
        f"more, add a copy of the largest, {number_of(max(k.placement.num_gpus for k in plan.copies), 'GPU')}",
    ]
    if plan.e2e_s is not None:
        lines.append(f"mean E2E there: {_interval(plan.e2e_s)} s, which with the think time gives that rate")
    lines += [
        f"cost: {usd(plan.cost_usd_per_h)} USD/h; USD per million tokens, the whole cost over each: {tokens}",
        *price_lines(prices),
    ]
    table = Table(["<placement", "copies", "GPUs each", "requests/s each", "goodput each, requests/s", "load"])
    for kind in plan.copies:
        table.rows.append(
            [
                kind.placement.label,
                str(kind.count),
                str(kind.placement.num_gpus),
                f"{kind.rate_per_s:.3f}",
                _interval(kind.goodput_per_s),
                percent(kind.rate_per_s / kind.goodput_per_s.best),
            ]
        )
    return ["\n".join(lines), table]


def not_enough(option: str, amount: float, sizing: Sizing, question: Question) -> str:
    """Return why a plan does not fit on the GPUs there are, and what to change.

    Args:
        amount: of requests per second, or of users, that the option asks for.
    """
    from dsim.cli.tables import figures

    plan = sizing.plan
    assert plan is not None
    if sizing.most is None:
        most = ""
    elif sizing.most < amount:
        most = f", of which the GPUs there are serve {figures(sizing.most, 4)} safely"
    else:
        most = ", and such copies do not pack into the nodes there are"
    return (
        f"{option}: needs {number_of(plan.num_gpus, 'GPU')} on {_nodes(plan, question)}{most}; "
        "give more GPUs, ask for less, or relax the limits"
    )


def _nodes(plan: Plan, question: Question) -> str:
    """Return the nodes of a plan, and their GPUs where all have as many."""
    types = [question.cluster] if question.fleet is None else question.fleet.types.values()
    sizes = {part.gpus_per_node for part in types}
    nodes = number_of(plan.num_nodes, "node")
    return f"{nodes} of {sizes.pop()}" if len(sizes) == 1 else nodes


def _interval(interval: Interval) -> str:
    from dsim.cli.tables import figures

    return f"{figures(interval.best, 4)} ({figures(interval.low, 4)} - {figures(interval.high, 4)})"
