"""`dsim size`: how many GPUs a rate, or a population of users, needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.config import rerun_text
from dsim.cli.inputs import rate_per_s, seconds, whole
from dsim.cli.nodes import AffinityChoice, NicText
from dsim.cli.options import (
    ArrivalsText,
    Assignments,
    Config,
    DryRun,
    EngineName,
    EvidenceOption,
    ExpertsOption,
    Format,
    FormatOption,
    GpuName,
    HandoverText,
    Jobs,
    KvBlocksText,
    KvDtypeOption,
    KvLinkText,
    ModelName,
    NoColor,
    OutputDirectory,
    Overwrite,
    PrefillBatchingOption,
    ProfileFile,
    Quiet,
    Seed,
    SloOption,
    WorkloadText,
    file_path,
    whole_number,
)
from dsim.cli.plans import not_enough, plan_parts
from dsim.cli.pools import (
    ColocatedGpu,
    DecodeGpu,
    DecodeProfile,
    MaxBatchRequests,
    MaxBatchTokens,
    PrefillGpu,
    PrefillProfile,
    TokenBudgets,
    available_by_type,
    whole_number_of_gpus,
)
from dsim.cli.prices import PriceOption, asked_prices, price_list, with_costs
from dsim.cli.search import (
    Asked,
    ModeChoice,
    ObjectiveChoice,
    cores,
    described,
    introduction,
    nothing_found,
    progress_bar,
    resolved,
)
from dsim.cli.search_runs import (
    CacheFile,
    DaskAddress,
    Resume,
    RetryFailed,
    TimeLimit,
    asked_runs,
    told_where_to_go_on,
)
from dsim.errors import InputError
from dsim.options import ExpertSharing, KvDtype, PrefillBatching
from dsim.pools import Policy

if TYPE_CHECKING:
    from placement.objective import Prices
    from placement.search import Question
    from placement.size import Demand, Sizing

_FILES = ("result.json", "trials.csv", "config.yaml")


def size(
    context: typer.Context,
    *,
    slo: Annotated[str, SloOption],
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="RATE", help="Arrivals to serve: 40 (per second) or 90/min.")
    ] = None,
    users: Annotated[
        int | None, typer.Option("--users", parser=whole_number, metavar="N", help="Users to serve, instead of --rate.")
    ] = None,
    think_time: Annotated[
        str | None,
        typer.Option(
            "--think-time", metavar="TIME", help="With --users: mean pause after an answer, as 30s. [default: 0]"
        ),
    ] = None,
    model: ModelName = None,
    gpu: GpuName = None,
    engine: EngineName = None,
    profile: ProfileFile = None,
    evidence: EvidenceOption = None,
    experts: ExpertsOption = ExpertSharing.TP,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    colocated_engine: Annotated[
        str | None,
        typer.Option("--colocated-engine", metavar="NAME", help="The engine of colocated placements; see dsim search."),
    ] = None,
    colocated_profile: Annotated[
        Path | None,
        typer.Option("--colocated-profile", parser=file_path, metavar="FILE", help="A profile of your own for them."),
    ] = None,
    prefill_gpu: PrefillGpu = None,
    decode_gpu: DecodeGpu = None,
    colocated_gpu: ColocatedGpu = None,
    prefill_profile: PrefillProfile = None,
    decode_profile: DecodeProfile = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="N|GPU=N,...",
            help="GPUs there are, in all or of each type, as h100=8,h20=16. [default: as many as it takes]",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", parser=whole_number, metavar="N", help="Whole nodes instead of --gpus.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", parser=whole_number, metavar="N", help="[default: what the GPU usually has]"),
    ] = None,
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
    workload: WorkloadText = None,
    arrivals: ArrivalsText = None,
    attainment: Annotated[
        str, typer.Option("--attainment", metavar="SHARE", help="Share of requests within the limits, as 0.9 or 90%.")
    ] = "0.9",
    affinity: Annotated[
        AffinityChoice,
        typer.Option("--affinity", help="high: each instance by itself; low: prefill and decode side by side."),
    ] = AffinityChoice.HIGH,
    mode: Annotated[ModeChoice, typer.Option("--mode", help="Which kinds of placement compete.")] = ModeChoice.BOTH,
    policy: Annotated[
        list[Policy] | None,
        typer.Option("--policy", help="A policy of colocated instances to try; may be repeated. [default: all]"),
    ] = None,
    prefill_batching: PrefillBatchingOption = PrefillBatching.ENGINE,
    max_batch_tokens: MaxBatchTokens = None,
    max_batch_requests: MaxBatchRequests = None,
    token_budgets: TokenBudgets = None,
    kv_blocks: KvBlocksText = None,
    handover: HandoverText = None,
    kv_link: KvLinkText = None,
    nic: NicText = None,
    precision: Annotated[
        str, typer.Option("--precision", metavar="SHARE", help="Half width aimed for of the best one's interval.")
    ] = "0.03",
    confidence: Annotated[
        str, typer.Option("--confidence", metavar="SHARE", help="Level of the intervals, as 0.95 or 95%.")
    ] = "0.95",
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Go beyond the profiles' valid range; the result says so.")
    ] = False,
    seed: Seed = 0,
    jobs: Jobs = None,
    dask: DaskAddress = None,
    time_limit: TimeLimit = None,
    output_format: FormatOption = Format.TABLE,
    output_dir: OutputDirectory = None,
    resume: Resume = False,
    retry_failed: RetryFailed = False,
    overwrite: Overwrite = False,
    cache: CacheFile = None,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> int:
    """Say how many GPUs a rate or a number of users needs, as copies of which placements, at what cost."""
    del config, assignments
    workers = cores() if jobs is None else whole("--jobs", jobs, at_least=1, at_most=1024)
    demand = _demand(rate, users, think_time)
    asked, question = resolved(
        slo=slo,
        model=model,
        gpu=gpu,
        engine=engine,
        profile=profile,
        evidence=evidence,
        experts=experts,
        kv_dtype=kv_dtype,
        colocated_engine=colocated_engine,
        colocated_profile=colocated_profile,
        prefill_gpu=prefill_gpu,
        decode_gpu=decode_gpu,
        colocated_gpu=colocated_gpu,
        prefill_profile=prefill_profile,
        decode_profile=decode_profile,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=max_batch_requests,
        token_budgets=token_budgets,
        gpus=None if copy_gpus is None else str(whole("--copy-gpus", copy_gpus, at_least=1, at_most=64)),
        nodes=None,
        gpus_per_node=gpus_per_node,
        workload=workload,
        arrivals=arrivals,
        attainment=attainment,
        affinity=affinity,
        mode=mode,
        policy=policy,
        prefill_batching=prefill_batching,
        kv_blocks=kv_blocks,
        handover=handover,
        kv_link=kv_link,
        nic=nic,
        requests=None,
        top=3,
        precision=precision,
        confidence=confidence,
        extrapolate=extrapolate,
        seed=seed,
    )
    by_type, question = available_by_type(question, gpus)
    available = sum(by_type.values()) if by_type else _available(question, gpus=gpus, nodes=nodes)
    if available is not None and available < question.cluster.num_gpus:
        question = replace(question, num_gpus=available)
    prices = asked_prices(price, question.profiles, question.roles, others=question.other_gpus)
    question = _with_objective(question, objective, prices)
    runs = asked_runs(
        jobs=jobs,
        workers=workers,
        dask=dask,
        output_dir=output_dir,
        cache=cache,
        time_limit=time_limit,
        resume=resume,
        retry_failed=retry_failed,
        overwrite=overwrite,
        options=rerun_text(context),
    )
    runs.check(list(_FILES))
    if dry_run:
        _print_plan(asked, question, demand, available, output_format=output_format)
        return 0
    from placement.size import size as run

    with told_where_to_go_on(runs, quiet=quiet), runs.opened(question) as store:
        with progress_bar(quiet=quiet, no_color=no_color) as progress, runs.crew(store) as crew:
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
        if output_dir is not None:
            from dsim.cli.output import note, to_csv, to_json

            texts = (to_json(answer), to_csv(answer["trials"]), rerun_text(context))
            runs.write(dict(zip(_FILES, texts, strict=True)))
    _print(asked, question, demand, sizing, answer, prices, output_format=output_format, no_color=no_color)
    if output_dir is not None:
        note(f"wrote {', '.join(sorted(_FILES))} to {output_dir}", quiet=quiet)
    if sizing.plan is not None and sizing.fits:
        return 0
    option = "--rate" if users is None else "--users"
    why = nothing_found(question, sizing.searched) if sizing.plan is None else not_enough(option, sizing, question)
    typer.echo(f"error: {why}", err=True)
    return 3


def _demand(rate: str | None, users: int | None, think_time: str | None) -> Demand:
    """Return what is to be served."""
    from placement.size import Population, Rate

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
        text = f"to serve: {demand.users:,} users who think for {demand.think_time_s:g} s"
    return text if available is None else f"{text} on at most {available} GPUs"


def _print_plan(
    asked: Asked, question: Question, demand: Demand, available: int | None, *, output_format: Format
) -> None:
    from dsim.cli.output import emit, to_csv, to_json
    from placement.search import candidates

    count = len(candidates(question))
    plan = {
        **described(asked, question),
        "demand": _described_demand(demand),
        "available_gpus": available,
        "candidates": count,
    }
    if output_format is Format.JSON:
        emit(to_json(plan))
    elif output_format is Format.CSV:
        emit(to_csv([plan]))
    else:
        lines = [*_heading(asked, question), _to_serve(demand, available), f"would compare {count} placements"]
        emit("\n".join(lines) + "\n")


def _print(
    asked: Asked,
    question: Question,
    demand: Demand,
    sizing: Sizing,
    answer: dict[str, Any],
    prices: Prices,
    *,
    output_format: Format,
    no_color: bool,
) -> None:
    from dsim.cli.output import emit, show, to_csv, to_json, use_color

    if output_format is Format.JSON:
        emit(to_json(answer))
    elif output_format is Format.CSV:
        emit(to_csv(_rows(answer), first=("placement", "copies")))
    else:
        heading = "\n".join([*_heading(asked, question), _to_serve(demand, answer["available_gpus"])])
        parts = [] if sizing.plan is None else plan_parts(sizing.plan, question, prices)
        remarks = [f"assumed: {text}" for text in answer["assumptions"]]
        remarks += [f"warning: {warning}" for warning in answer["warnings"]]
        remarks.append(f"{sizing.probes} runs of {sizing.requests:,} requests")
        show(heading, *parts, "\n".join(remarks), color=use_color(no_color=no_color))


def _rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each kind of copy, with the whole plan in each."""
    plan = answer["plan"]
    if plan is None:
        return []
    whole_plan = {f"plan.{key}": value for key, value in plan.items() if key != "copies"}
    return [{**kind, **whole_plan} for kind in plan["copies"]]
