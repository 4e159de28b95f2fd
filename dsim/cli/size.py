"""`dsim size`: how many GPUs a rate, or a population of users, needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.amount import told_how_many
from dsim.cli.config import rerun_text
from dsim.cli.groups import CommonOptions, grouped
from dsim.cli.inputs import number_of, rate_per_s, seconds, whole, workers_of
from dsim.cli.options import Format, ObjectiveChoice, whole_number
from dsim.cli.output import emit, emit_data, note, show, to_csv, to_json, use_color
from dsim.cli.plans import not_enough, plan_parts
from dsim.cli.pools import available_by_type, whole_number_of_gpus
from dsim.cli.prices import PriceOption, asked_prices, price_list, with_costs
from dsim.cli.progress import progress_bar
from dsim.cli.question import Asked, QuestionOptions, described, introduction, resolved
from dsim.cli.search_answer import nothing_found
from dsim.cli.search_runs import RunOptions, asked_runs, told_where_to_go_on
from dsim.errors import InputError

if TYPE_CHECKING:
    from placement.objective import Prices
    from placement.search import Question
    from placement.size import Demand, Sizing

_FILES = ("result.json", "trials.csv", "config.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandOptions:
    """What is to be served."""

    rate: Annotated[
        str | None, typer.Option("--rate", metavar="RATE", help="Arrivals to serve: 40 (per second) or 90/min.")
    ] = None
    users: Annotated[
        int | None, typer.Option("--users", parser=whole_number, metavar="N", help="Users to serve, instead of --rate.")
    ] = None
    think_time: Annotated[
        str | None,
        typer.Option(
            "--think-time", metavar="TIME", help="With --users: mean pause after an answer, as 30s. [default: 0]"
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions(QuestionOptions):
    """What is compared, and the GPUs there are for all copies of it."""

    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="N|GPU=N,...",
            help="GPUs there are, in all or of each type, as h100=8,h20=16. [default: as many as it takes]",
        ),
    ] = None


@grouped
def size(
    context: typer.Context,
    *,
    demanded: DemandOptions,
    options: CopyOptions,
    copy_gpus: Annotated[
        int | None,
        typer.Option(
            "--copy-gpus",
            parser=whole_number,
            metavar="N",
            help="GPUs of a copy at most. [default: one node, of each GPU]",
        ),
    ] = None,
    objective: Annotated[
        ObjectiveChoice,
        typer.Option("--objective", help="min_gpus: the fewest; goodput_per_dollar: the cheapest."),
    ] = ObjectiveChoice.MIN_GPUS,
    price: PriceOption = None,
    run_options: RunOptions,
    common: CommonOptions,
) -> int:
    """Say how many GPUs a rate or a number of users needs, as copies of which placements, at what cost."""
    workers = workers_of(run_options.jobs)
    demand = _demand(demanded)
    most = None if copy_gpus is None else str(whole("--copy-gpus", copy_gpus, at_least=1, at_most=64))
    asked, question = resolved(replace(options, gpus=most, nodes=None))
    by_type, question = available_by_type(question, options.gpus)
    available = sum(by_type.values()) if by_type else _available(question, gpus=options.gpus, nodes=options.nodes)
    if available is not None and available < question.cluster.num_gpus:
        question = replace(question, num_gpus=available)
    prices = asked_prices(price, question.profiles, question.roles, others=question.other_gpus)
    question = _with_objective(question, objective, prices)
    runs = asked_runs(run_options, workers=workers, rerun=rerun_text(context))
    runs.check(list(_FILES))
    about = told_how_many(question, runs, quiet=common.quiet, fewer="smaller --copy-gpus")
    if common.dry_run:
        _print_plan(asked, question, demand, available, output_format=common.output_format)
        return 0
    from placement.size import size as run

    with told_where_to_go_on(runs, quiet=common.quiet), runs.opened(question) as store:
        with (
            progress_bar(quiet=common.quiet, no_color=common.no_color, about=about) as progress,
            runs.crew(store) as crew,
        ):
            sizing = run(
                question,
                demand,
                prices=prices,
                available_gpus=available,
                available_by_type=by_type,
                executor=crew,
                progress=progress,
            )
        answer = _answer(asked, question, demand, sizing, prices, available, objective)
        if runs.folder is not None:
            texts = (to_json(answer), to_csv(answer["trials"]), runs.options)
            runs.write(dict(zip(_FILES, texts, strict=True)))
    _print(asked, question, demand, sizing, answer, prices, common)
    if runs.folder is not None:
        note(f"wrote {', '.join(sorted(_FILES))} to {runs.folder}", quiet=common.quiet)
    if sizing.plan is not None and sizing.fits:
        return 0
    option = "--rate" if demanded.users is None else "--users"
    if sizing.plan is None:
        why = nothing_found(question, sizing.searched)
    else:
        why = not_enough(option, demand.amount, sizing, question)
    typer.echo(f"error: {why}", err=True)
    return 3


def _demand(options: DemandOptions) -> Demand:
    """Return what is to be served."""
    from placement.size import Population, Rate

    rate, users, think_time = options.rate, options.users, options.think_time
    if users is None:
        if think_time is not None:
            raise InputError(
                "--think-time", "belongs to --users", value=think_time, hint="leave it out, or add --users"
            )
        if rate is None:
            raise InputError("--rate", "or --users is needed", hint="as in --rate 40 or --users 10000 --think-time 30s")
        return Rate(rate_per_s(rate))
    if rate is not None:
        raise InputError("--users", "does not go with --rate", value=users, hint="leave one of the two out")
    think_s = 0.0 if think_time is None else seconds("--think-time", think_time)
    return Population(whole("--users", users, at_least=1), think_s)


def _available(question: Question, *, gpus: str | None, nodes: int | None) -> int | None:
    """Return the GPUs there are; None without a limit."""
    if gpus is not None and nodes is not None:
        raise InputError("--nodes", "does not go with --gpus", value=nodes, hint="leave one of the two out")
    if nodes is not None:
        if question.fleet is not None and len(question.fleet.types) > 1:
            raise InputError("--nodes", "does not say of which GPU", value=nodes, hint="give --gpus NAME=N,...")
        return whole("--nodes", nodes, at_least=1, at_most=10_000) * question.cluster.gpus_per_node
    return whole_number_of_gpus(gpus)


def _with_objective(question: Question, objective: ObjectiveChoice, prices: Prices) -> Question:
    """Return the question with the prices where the cheapest GPUs are sought."""
    from placement.objective import check_prices

    if objective is ObjectiveChoice.GOODPUT_PER_GPU:
        hint = "take min_gpus or goodput_per_dollar"
        raise InputError("--objective", "says nothing of GPUs for a rate", value=objective.value, hint=hint)
    if objective is ObjectiveChoice.MIN_GPUS:
        return question
    check_prices(prices)
    return replace(question, prices=prices)


def _assumptions(demand: Demand) -> list[str]:
    """Return what the answer takes for granted."""
    from placement.size import Population

    found = [
        "each copy of a placement gets its share of the requests as an arrival process of the kind asked for; for "
        "poisson arrivals that is what a random split gives",
        "copies share nothing; lower limits do not allow for errors of the profile's step times, nor for the choice of "
        "the placements by the same runs",
    ]
    if isinstance(demand, Population):
        found.append(
            "users: rate = users / (think time + mean E2E at that rate), the interactive response time law, which "
            "holds for means whatever the distributions; the E2E and the attainment are those of an open loop at "
            "this rate: users are many, or think irregularly (exponential or so); with equal think times they bunch "
            "and do worse"
        )
    return found


def _answer(
    asked: Asked,
    question: Question,
    demand: Demand,
    sizing: Sizing,
    prices: Prices,
    available: int | None,
    objective: ObjectiveChoice,
) -> dict[str, Any]:
    from dsim.version import __version__

    return {
        "demand": _described_demand(demand),
        "objective": objective.value,
        "plan": None if sizing.plan is None else sizing.plan.to_dict(),
        "fits": sizing.fits,
        "available_gpus": available,
        "most": sizing.most,
        "prices": [price.to_dict() for price in price_list(prices)],
        "trials": [with_costs(trial.to_dict(), trial, prices) for trial in sizing.trials],
        "assumptions": _assumptions(demand),
        "warnings": list(sizing.searched.warnings),
        "question": question.to_dict(),
        "probes": sizing.probes,
        "requests": sizing.requests,
        "version": __version__,
        **described(asked, question),
    }


def _described_demand(demand: Demand) -> dict[str, Any]:
    from placement.size import Rate

    if isinstance(demand, Rate):
        return {"rate_per_s": demand.rate_per_s, "users": None, "think_time_s": None}
    return {"rate_per_s": None, "users": demand.users, "think_time_s": demand.think_time_s}


def _heading(asked: Asked, question: Question) -> list[str]:
    lines = introduction(asked, question)
    return [f"copies of {line}" if line.startswith("at most ") else line for line in lines]


def _to_serve(demand: Demand, available: int | None = None) -> str:
    from placement.size import Rate

    if isinstance(demand, Rate):
        text = f"to serve: {demand.rate_per_s:g} requests/s"
    else:
        thinking = "who thinks" if demand.users == 1 else "who think"
        text = f"to serve: {number_of(demand.users, 'user')} {thinking} for {demand.think_time_s:g} s"
    return text if available is None else f"{text} on at most {number_of(available, 'GPU')}"


def _print_plan(
    asked: Asked, question: Question, demand: Demand, available: int | None, *, output_format: Format
) -> None:
    from placement.search import candidates

    count = len(candidates(question))
    plan = {
        **described(asked, question),
        "demand": _described_demand(demand),
        "available_gpus": available,
        "candidates": count,
    }
    if not emit_data(output_format, plan):
        lines = [
            *_heading(asked, question),
            _to_serve(demand, available),
            f"would compare {number_of(count, 'placement')}",
        ]
        emit("\n".join(lines) + "\n")


def _print(
    asked: Asked,
    question: Question,
    demand: Demand,
    sizing: Sizing,
    answer: dict[str, Any],
    prices: Prices,
    common: CommonOptions,
) -> None:
    if emit_data(common.output_format, answer, rows=_rows(answer), first=("placement", "copies")):
        return
    heading = "\n".join([*_heading(asked, question), _to_serve(demand, answer["available_gpus"])])
    parts = [] if sizing.plan is None else plan_parts(sizing.plan, question, prices)
    remarks = [f"assumed: {text}" for text in answer["assumptions"]]
    remarks += [f"warning: {warning}" for warning in answer["warnings"]]
    remarks.append(f"{sizing.probes} runs of {sizing.requests:,} requests")
    show(heading, *parts, "\n".join(remarks), color=use_color(no_color=common.no_color))


def _rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each kind of copy, with the whole plan in each."""
    plan = answer["plan"]
    if plan is None:
        return []
    whole_plan = {f"plan.{key}": value for key, value in plan.items() if key != "copies"}
    return [{**kind, **whole_plan} for kind in plan["copies"]]
