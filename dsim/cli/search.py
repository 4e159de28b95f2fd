"""`dsim search`: the placement that serves the most requests per GPU."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.config import rerun_text
from dsim.cli.inputs import described_profiles, display_name, evidence_lines, number_of, rate_per_s, source_line, whole
from dsim.cli.kv_blocks import kv_blocks as capacity
from dsim.cli.kv_blocks import kv_line, kv_reasons, kv_sources, with_kv_blocks
from dsim.cli.nodes import AffinityChoice, NicText, layout_lines
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
from dsim.cli.output import Table
from dsim.cli.plans import not_enough, plan_parts
from dsim.cli.pools import (
    Chosen,
    ColocatedGpu,
    DecodeGpu,
    DecodeProfile,
    Gpus,
    MaxBatchRequests,
    MaxBatchTokens,
    PrefillGpu,
    PrefillProfile,
    RoleOptions,
    TokenBudgets,
    asked_batches,
    asked_budgets,
    by_mix_lines,
    check_lm,
    described_mixes,
    fleet_line,
    mixed_gpus,
    mixed_introduction,
    roles_of,
    there_of_each,
    whole_number_of_gpus,
)
from dsim.cli.prices import PriceOption, asked_prices, price_lines, price_list, usd, with_costs
from dsim.cli.search_runs import (
    CacheFile,
    DaskAddress,
    MergeFolders,
    Resume,
    RetryFailed,
    Runs,
    ShardText,
    TimeLimit,
    asked_runs,
    told_where_to_go_on,
)
from dsim.errors import InputError, by_option
from dsim.options import Evidence, ExpertSharing, KvDtype, Options, PrefillBatching, TokenLimit
from dsim.pools import Placement, Policy, Role
from dsim.slo import parse_slo
from dsim.units import parse_share

if TYPE_CHECKING:
    from dsim.profile import Profile
    from placement.crew import Crew
    from placement.curve import Curve
    from placement.mixes import BatchChoices
    from placement.objective import Prices
    from placement.pareto import Point
    from placement.result import SearchResult, Trial
    from placement.runner import Progress
    from placement.search import Question
    from placement.size import Sizing
    from placement.space import Cluster

#: Rates of the curves, as shares of the placement's goodput.
_CURVE_SHARES = (0.25, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3)


class ObjectiveChoice(enum.Enum):
    """As `placement.objective.Objective`, which takes long to import."""

    GOODPUT_PER_GPU = "goodput_per_gpu"
    GOODPUT_PER_DOLLAR = "goodput_per_dollar"
    MIN_GPUS = "min_gpus"


class ModeChoice(enum.Enum):
    """As `placement.search.Mode`, which takes long to import."""

    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"
    BOTH = "both"


def search(
    context: typer.Context,
    *,
    slo: Annotated[str, SloOption],
    model: ModelName = None,
    gpu: GpuName = None,
    engine: EngineName = None,
    profile: ProfileFile = None,
    evidence: EvidenceOption = None,
    experts: ExpertsOption = ExpertSharing.TP,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    colocated_engine: Annotated[
        str | None,
        typer.Option(
            "--colocated-engine",
            metavar="NAME",
            help="The engine of colocated placements. [default: vllm beside distserve, else --engine]",
        ),
    ] = None,
    colocated_profile: Annotated[
        Path | None,
        typer.Option(
            "--colocated-profile",
            parser=file_path,
            metavar="FILE",
            help="A profile of your own for colocated placements.",
        ),
    ] = None,
    prefill_gpu: PrefillGpu = None,
    decode_gpu: DecodeGpu = None,
    colocated_gpu: ColocatedGpu = None,
    prefill_profile: PrefillProfile = None,
    decode_profile: DecodeProfile = None,
    gpus: Gpus = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", parser=whole_number, metavar="N", help="Whole nodes instead of --gpus.")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", parser=whole_number, metavar="N", help="[default: what the GPU usually has]"),
    ] = None,
    workload: WorkloadText = None,
    arrivals: ArrivalsText = None,
    attainment: Annotated[
        str, typer.Option("--attainment", metavar="SHARE", help="Share of requests within the limits, as 0.9 or 90%.")
    ] = "0.9",
    affinity: Annotated[
        AffinityChoice,
        typer.Option(
            "--affinity",
            help="high: each instance by itself; low: stages of prefill and decode side by side in a node.",
        ),
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
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "-n",
            parser=whole_number,
            metavar="N",
            help="Goodput of finite runs of N requests, a transient, as papers report; not the sustainable rate.",
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", parser=whole_number, metavar="N", help="Placements reported with an interval.")
    ] = 3,
    objective: Annotated[
        ObjectiveChoice,
        typer.Option("--objective", help="What the best placement is the best in; min_gpus: for the rate of --rate."),
    ] = ObjectiveChoice.GOODPUT_PER_GPU,
    rate: Annotated[
        str | None, typer.Option("--rate", metavar="RATE", help="With --objective min_gpus: 40 (per second) or 90/min.")
    ] = None,
    price: PriceOption = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Also simulate what lower TTFT and TPOT cost: the front of all three.")
    ] = False,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="SHARE",
            help="Half width aimed for of the best one's interval; a smaller one than the default buys more runs.",
        ),
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
    shard: ShardText = None,
    merge: MergeFolders = None,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> int:
    """Find the placement that serves the most requests per GPU within the latency targets."""
    del config, assignments
    workers = cores() if jobs is None else whole("--jobs", jobs, at_least=1, at_most=1024)
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
        gpus=gpus,
        nodes=nodes,
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
        requests=requests,
        top=top,
        precision=precision,
        confidence=confidence,
        extrapolate=extrapolate,
        seed=seed,
    )
    sought, question = _sought(question, objective, rate=rate, price=price, pareto=pareto)
    names = ["result.json", "trials.csv", "attainment.csv", "attainment.png", "config.yaml"]
    if pareto:
        names.append("pareto.csv")
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
        shard=shard,
        merge=merge,
        options=rerun_text(context),
    )
    if (runs.shard or runs.merge) and (sought.rate_per_s is not None or (runs.shard and pareto)):
        hint = "leave it out, or search without --shard" if runs.shard else "ask it of dsim size"
        raise InputError("--pareto" if pareto else "--objective", "is not for parts of a search", hint=hint)
    runs.check(names)
    runs.check_shards(question)
    if dry_run:
        _print_plan(asked, question, output_format=output_format, files=runs.files(names))
        return 0
    with told_where_to_go_on(runs, quiet=quiet), runs.opened(question) as store:
        with progress_bar(quiet=quiet, no_color=no_color) as progress, runs.crew(store) as crew:
            result, curves, more = _found(question, sought, runs, crew, progress=progress)
        return _finish(
            context,
            asked,
            question,
            sought,
            runs,
            (result, curves, more),
            output_format=output_format,
            quiet=quiet,
            no_color=no_color,
        )


def _finish(
    context: typer.Context,
    asked: Asked,
    question: Question,
    sought: Sought,
    runs: Runs,
    found: tuple[SearchResult, tuple[Curve, ...], More],
    *,
    output_format: Format,
    quiet: bool,
    no_color: bool,
) -> int:
    """Write and print the answer, and return the exit code."""
    result, curves, more = found
    answer = _with_kv(_with_prices({**result.to_dict(), **described(asked, question)}, result, sought, more), question)
    if runs.folder is not None and runs.shard is None:
        from dsim.cli.output import to_csv, to_json

        files: dict[str, str | bytes] = {
            "result.json": to_json(answer),
            "trials.csv": to_csv(answer["trials"]),
            "config.yaml": rerun_text(context),
        }
        if sought.pareto:
            files["pareto.csv"] = to_csv(answer["pareto"])
        if curves:
            from experiments.plots import attainment_png

            files["attainment.csv"] = to_csv(_curve_rows(curves))
            files["attainment.png"] = attainment_png(curves, target=question.attainment, title=_title(asked, question))
        runs.write(files)
    _print(asked, question, result, answer, sought, more, output_format=output_format, no_color=no_color)
    if runs.folder is not None:
        from dsim.cli.output import note

        names = sorted(files) if runs.shard is None else [runs.files([])[0]]
        note(f"wrote {', '.join(names)} to {runs.folder}", quiet=quiet)
    if runs.shard is not None:
        # Whether anything serves the rate the other parts know, too.
        return 0
    if result.is_feasible and (more.sizing is None or more.sizing.fits):
        return 0
    short = more.sizing is not None and more.sizing.plan is not None
    why = not_enough("--rate", more.sizing, question) if short and more.sizing else nothing_found(question, result)
    typer.echo(f"error: {why}", err=True)
    return 3


def resolved(
    *,
    slo: str,
    model: str | None,
    gpu: str | None,
    engine: str | None,
    profile: Path | None,
    evidence: Evidence | None,
    experts: ExpertSharing = ExpertSharing.TP,
    kv_dtype: KvDtype = KvDtype.AUTO,
    colocated_engine: str | None,
    colocated_profile: Path | None,
    prefill_gpu: str | None = None,
    decode_gpu: str | None = None,
    colocated_gpu: str | None = None,
    prefill_profile: Path | None = None,
    decode_profile: Path | None = None,
    max_batch_tokens: str | None = None,
    max_batch_requests: str | None = None,
    token_budgets: str | None = None,
    gpus: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    workload: str | None,
    arrivals: str | None,
    attainment: str,
    affinity: AffinityChoice,
    mode: ModeChoice,
    policy: list[Policy] | None,
    prefill_batching: PrefillBatching,
    kv_blocks: str | None = None,
    handover: str | None = None,
    kv_link: str | None = None,
    nic: str | None = None,
    requests: int | None,
    top: int,
    precision: str,
    confidence: str,
    extrapolate: bool,
    seed: int,
) -> tuple[Asked, Question]:
    """Return the question that the options of a search ask.

    Raises:
        InputError: a value cannot be used.
    """
    from profiles.choice import Variant, choose_colocated, choose_profile
    from profiles.handover import asked_handover
    from profiles.mixed import Wanted

    whole("--seed", seed, at_least=0, at_most=2**32 - 1)
    parse_slo(slo)
    variant = Variant(experts, kv_dtype)
    batches = asked_batches(prefill_batching, max_batch_tokens, max_batch_requests)
    options = RoleOptions(
        gpus=(prefill_gpu, decode_gpu, colocated_gpu), files=(prefill_profile, decode_profile, colocated_profile)
    )
    mixed = None
    if options.are_given or (gpus is not None and "=" in gpus):
        mixed = options.chosen(
            Wanted(
                model=model,
                gpu=gpu,
                engine=engine,
                profile=profile,
                colocated_engine=colocated_engine,
                evidence=evidence,
                variant=variant,
            ),
            roles=roles_of(mode.value),
            gpus=gpus,
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            side_by_side=affinity is AffinityChoice.LOW,
            handover=handover,
            kv_link=kv_link,
            nic=nic,
        )
        used, colocated, cluster = mixed.first(Role.PREFILL), mixed.first(Role.COLOCATED), mixed.fleet.all
        if prefill_batching is PrefillBatching.LM:
            batches = batches.with_lm()
    else:
        used = choose_profile(model=model, gpu=gpu, engine=engine, file=profile, evidence=evidence, variant=variant)
        colocated = choose_colocated(used, engine=colocated_engine, file=colocated_profile, variant=variant)
        number = whole_number_of_gpus(gpus)
        cluster = _cluster(used, gpus=number, nodes=nodes, gpus_per_node=gpus_per_node, affinity=affinity)
        handing = asked_handover(used, handover, kv_link, nic=nic)
        if colocated is used:
            # Nothing else is about colocated placements: they stay what they are, under one name.
            colocated = handing
        used = handing
    asked = Asked(
        model=model,
        workload="sharegpt" if workload is None else workload,
        arrivals="poisson" if arrivals is None else arrivals,
        used=used,
        colocated=colocated,
        handover_asked=(handover or kv_link or nic) is not None,
        mixed=mixed,
    )
    try:
        question = _question(
            asked,
            slo=slo,
            cluster=cluster,
            attainment=parse_share(attainment, "--attainment"),
            precision=parse_share(precision, "--precision"),
            confidence=parse_share(confidence, "--confidence"),
            affinity=affinity,
            mode=mode,
            policies=tuple(dict.fromkeys(policy or Policy)),
            prefill_token_limit=None if mixed is not None else used.prefill_token_limit(prefill_batching),
            batches=batches,
            token_budgets=asked_budgets(token_budgets),
            kv_blocks=kv_blocks,
            num_requests=None if requests is None else whole("--requests", requests, at_least=10),
            top=whole("--top", top, at_least=1, at_most=1000),
            extrapolate=extrapolate,
            seed=seed,
        )
    except InputError as error:
        raise by_option(error) from None
    return asked, question


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the answer's heading says."""

    model: str | None
    workload: str
    arrivals: str
    used: Profile
    colocated: Profile
    handover_asked: bool = False
    mixed: Chosen | None = None


def cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cluster(
    used: Profile, *, gpus: int | None, nodes: int | None, gpus_per_node: int | None, affinity: AffinityChoice
) -> Cluster:
    """Return the GPUs that there are."""
    from placement.space import asked_cluster

    for option, value, most in (
        ("--gpus-per-node", gpus_per_node, 1024),
        ("--nodes", nodes, 10_000),
        ("--gpus", gpus, 100_000),
    ):
        if value is not None:
            whole(option, value, at_least=1, at_most=most)
    low = affinity is AffinityChoice.LOW
    return asked_cluster(used.gpu, gpus=gpus, nodes=nodes, gpus_per_node=gpus_per_node, side_by_side=low)


def _question(
    asked: Asked,
    *,
    slo: str,
    cluster: Cluster,
    attainment: float,
    precision: float,
    confidence: float,
    affinity: AffinityChoice,
    mode: ModeChoice,
    policies: tuple[Policy, ...],
    prefill_token_limit: TokenLimit | None,
    batches: BatchChoices,
    token_budgets: tuple[int, ...],
    kv_blocks: str | None,
    num_requests: int | None,
    top: int,
    extrapolate: bool,
    seed: int,
) -> Question:
    from dsim.workload import Workload
    from dsim.workload.parse import parse_arrivals, parse_workload
    from placement.search import Affinity, Mode, Question

    workload = Workload(parse_arrivals(asked.arrivals), parse_workload(asked.workload))
    # Requests are drawn when they are needed: see now whether they can be.
    workload.trace(num_requests=1, seed=seed, context_tokens=asked.used.model.context_tokens, rate_per_s=1.0)
    mixed = asked.mixed
    profiles = {Role.PREFILL: asked.used, Role.DECODE: asked.used, Role.COLOCATED: asked.colocated}
    question = Question(
        profiles=with_kv_blocks(profiles if mixed is None else mixed.profiles, kv_blocks),
        mixes=() if mixed is None else tuple(with_kv_blocks(mix, kv_blocks) for mix in mixed.mixes),
        fleet=None if mixed is None else mixed.fleet,
        batches=batches,
        token_budgets=token_budgets,
        workload=workload,
        slo=parse_slo(slo),
        attainment=attainment,
        num_gpus=cluster.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
        affinity=Affinity(affinity.value),
        mode=Mode(mode.value),
        policies=policies,
        seed=seed,
        top=top,
        precision=precision,
        confidence=confidence,
        num_requests=num_requests,
        options=Options(seed=seed, prefill_token_limit=prefill_token_limit, extrapolate=extrapolate),
    )
    check_lm(question)
    return question


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


def _sought(
    question: Question, objective: ObjectiveChoice, *, rate: str | None, price: list[str] | None, pareto: bool
) -> tuple[Sought, Question]:
    """Return what is sought, and the question with the prices where they rank.

    Raises:
        InputError: options that do not go together, or a price that is needed and unknown.
    """
    from placement.objective import check_prices

    prices = asked_prices(price, question.profiles, question.roles, others=question.other_gpus)
    asks_rate = objective is ObjectiveChoice.MIN_GPUS
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


def _found(
    question: Question, sought: Sought, runs: Runs, crew: Crew, *, progress: Progress | None
) -> tuple[SearchResult, tuple[Curve, ...], More]:
    """Return the answer, the curves of the best placements if they are to be drawn, and what else is sought."""
    sizing, points = None, None
    if sought.rate_per_s is not None:
        from placement.size import Rate, size

        sizing = size(
            question,
            Rate(sought.rate_per_s),
            prices=sought.prices,
            available_gpus=question.cluster.num_gpus,
            available_by_type=there_of_each(question),
            executor=crew,
            progress=progress,
        )
    result = sizing.searched if sizing is not None else runs.search(question, crew, progress)
    if sought.pareto:
        from placement.pareto import pareto

        points = pareto(question, result, prices=sought.prices, executor=crew)
    more = More(sizing=sizing, points=points)
    best = [trial for trial in (result.best.disaggregated, result.best.colocated) if trial is not None]
    if runs.folder is None or runs.shard is not None or not best:
        return result, (), more
    from placement.curve import attainment_curves

    curves = attainment_curves(question, best, shares=_CURVE_SHARES, executor=crew, progress=progress)
    return result, curves, more


@contextlib.contextmanager
def progress_bar(*, quiet: bool, no_color: bool) -> Iterator[Progress | None]:
    """Show on stderr how far the search is, where somebody looks."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, no_color=no_color or None)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def hear(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total)

        yield hear


def _with_prices(answer: dict[str, Any], result: SearchResult, sought: Sought, more: More) -> dict[str, Any]:
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


def _cost_parts(question: Question, result: SearchResult, sought: Sought, more: More) -> list[Table | str]:
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


def _with_kv(answer: dict[str, Any], question: Question) -> dict[str, Any]:
    """Return the answer with the KV capacity of every trial."""
    best = answer["best"]
    named = (best["disaggregated"], best["colocated"], answer["most_total"], answer["best_by_objective"])
    for trial in (*answer["trials"], *named):
        if trial is not None:
            placement = Placement.parse(trial["placement"])
            profiles = question.profiles_of(placement)
            trial["kv_blocks"] = capacity(profiles, placement)
            trial["kv_source"] = kv_sources(profiles, placement)
    return answer


def _kv_lines(question: Question, result: SearchResult) -> list[str]:
    """Return the KV capacity of the best placements."""
    best = [trial.placement for trial in (result.best.disaggregated, result.best.colocated) if trial is not None]
    used = [(placement, question.profiles_of(placement)) for placement in best]
    lines = [
        f"{placement}: {line}" for placement, p in used for line in layout_lines(placement, p[placement.pools[-1].role])
    ]
    lines += [f"KV blocks of each instance of {placement}: {kv_line(p, placement)}" for placement, p in used]
    reasons = [reason for placement, p in used for reason in kv_reasons(p, placement)]
    return lines + list(dict.fromkeys(reasons))


def _curve_rows(curves: Sequence[Curve]) -> list[dict[str, object]]:
    return [
        {
            "placement": curve.trial.placement.label,
            "num_gpus": curve.trial.num_gpus,
            "rate_per_gpu_per_s": rate,
            "attainment": share.to_dict(),
        }
        for curve in curves
        for rate, share in zip(curve.rate_per_gpu_per_s, curve.attainment, strict=True)
    ]


def described(asked: Asked, question: Question) -> dict[str, Any]:
    """Return what the answer depends on, beside the question itself."""
    slo = question.slo
    return {
        "model": asked.used.model.name,
        "hugging_face": asked.used.model.hugging_face,
        "gpu": mixed_gpus(question),
        "num_gpus": question.cluster.num_gpus,
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s},
        "attainment_target": question.attainment,
        "workload": asked.workload,
        "arrivals": asked.arrivals,
        "profiles": described_profiles(question.profiles, question.roles),
        "mixes": described_mixes(question),
        "extrapolated": question.options.extrapolate,
        "seed": question.seed,
    }


def introduction(asked: Asked, question: Question) -> list[str]:
    """Return the lines that say what was asked and with which numbers."""
    from dsim.cli.tables import percent

    if question.fleet is not None:
        return [
            *mixed_introduction(question, model=asked.model),
            fleet_line(question),
            f"{asked.workload} lengths, {asked.arrivals} arrivals, {percent(question.attainment)} of requests within "
            f"{question.slo}, seed {question.seed}",
        ]
    model = asked.used.model
    name = f"{display_name(model)} ({model.hugging_face})"
    lines = [f"{asked.model} = {name} on {asked.used.gpu.name}" if asked.model else f"{name} on {asked.used.gpu.name}"]
    roles = {Role.PREFILL: "disaggregated", Role.COLOCATED: "colocated"}
    for role, kind in roles.items():
        if role in question.roles:
            lines.append(f"{kind}: {source_line(question.profiles[role])}")
    lines += dict.fromkeys(
        line for role in roles if role in question.roles for line in evidence_lines(question.profiles[role])
    )
    if asked.handover_asked and Role.DECODE in question.roles:
        from profiles.handover import handover_line

        across = question.cluster.num_nodes > 1
        lines.append(handover_line(question.profiles[Role.DECODE], across=across))
    cluster = question.cluster
    nodes = f"{number_of(cluster.num_nodes, 'node')} of {cluster.gpus_per_node}"
    lines.append(
        f"at most {number_of(cluster.num_gpus, 'GPU')} ({nodes}), {asked.workload} lengths, {asked.arrivals} arrivals, "
        f"{percent(question.attainment)} of requests within {question.slo}, seed {question.seed}"
    )
    return lines


def _title(asked: Asked, question: Question) -> str:
    return f"{display_name(asked.used.model)}, {mixed_gpus(question)}, {asked.workload}, {question.slo}"


def _print_plan(asked: Asked, question: Question, *, output_format: Format, files: list[str]) -> None:
    from dsim.cli.output import emit, to_csv, to_json
    from placement.search import candidates

    count = len(candidates(question))
    plan = {**described(asked, question), "candidates": count, "files": files}
    if output_format is Format.JSON:
        emit(to_json(plan))
    elif output_format is Format.CSV:
        emit(to_csv([plan]))
    else:
        lines = [*introduction(asked, question), f"would compare {count} placements"]
        emit("\n".join([*lines, *([f"would write {', '.join(files)}"] if files else [])]) + "\n")


def _print(
    asked: Asked,
    question: Question,
    result: SearchResult,
    answer: dict[str, Any],
    sought: Sought,
    more: More,
    *,
    output_format: Format,
    no_color: bool,
) -> None:
    from dsim.cli.output import emit, show, to_csv, to_json, use_color

    if output_format is Format.JSON:
        emit(to_json(answer))
    elif output_format is Format.CSV:
        emit(to_csv(answer["trials"]))
    else:
        from dsim.cli.tables import search_parts

        heading = "\n".join(introduction(asked, question))
        decode = question.profiles.get(Role.DECODE)
        parts = search_parts(
            result,
            num_gpus=question.cluster.num_gpus,
            confidence=question.confidence,
            first_token_after="prefill" if decode is None else decode.handover.first_token_from.last_part,
        )
        by_mix = by_mix_lines(question, result)
        if by_mix:
            parts.insert(1, "\n".join(by_mix))
        kv = _kv_lines(question, result)
        if kv:
            parts.insert(-1, "\n".join(kv))
        for part in _cost_parts(question, result, sought, more):
            parts.insert(-1, part)
        show(heading, *parts, color=use_color(no_color=no_color))


def nothing_found(question: Question, result: SearchResult) -> str:
    """Return why no placement will do, and what to change."""
    cannot = [trial for trial in result.trials if trial.state.value == "INFEASIBLE"]
    others = [trial for trial in result.trials if trial.state.value != "INFEASIBLE"]
    gpus = number_of(question.cluster.num_gpus, "GPU")
    if not others:
        # The largest instances are the last that too large a model does not fit into.
        largest = max(cannot, key=_instance_gpus, default=None)
        reason = f" ({_reasons(largest)})" if largest is not None else ""
        remedy = "give more GPUs or another profile"
        return f"--gpus: no placement of {question.model.name} can run on {gpus}{reason}; {remedy}"
    failed = [trial for trial in others if trial.state.value == "FAILED"]
    if failed:
        # What ran to its end fell behind one that then failed: nothing is known of the limits.
        count = f"{len(failed)} of {number_of(len(others), 'placement')} on {gpus}"
        return f"search: {count} failed, and the others fell behind ({_reasons(failed[0])}); mend what made them fail"
    return (
        f"--slo: no placement on {gpus} serves any rate with {question.attainment:.4g} of the requests within "
        f"{question.slo} ({_reasons(others[0])}); relax the limits, or give more GPUs"
    )


def _instance_gpus(trial: Trial) -> int:
    return max(pool.parallelism.num_gpus for pool in trial.placement.pools)


def _reasons(trial: Trial) -> str:
    return f"{trial.placement.label}: {'; '.join(trial.reasons) or 'no rate'}"
