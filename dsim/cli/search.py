"""`dsim search`: the placement that serves the most requests per GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsim.cli.amount import told_how_many
from dsim.cli.config import rerun_text
from dsim.cli.groups import CommonOptions, grouped
from dsim.cli.inputs import workers_of
from dsim.cli.objective import More, Sought, asked_objective
from dsim.cli.options import ObjectiveChoice, whole_number
from dsim.cli.output import note, to_csv, to_json
from dsim.cli.plans import not_enough
from dsim.cli.pools import there_of_each
from dsim.cli.prices import PriceOption
from dsim.cli.progress import progress_bar
from dsim.cli.question import Asked, QuestionOptions, resolved
from dsim.cli.search_answer import answered, curve_rows, nothing_found, print_answer, print_plan, title
from dsim.cli.search_runs import MergeFolders, RunOptions, Runs, ShardText, asked_runs, told_where_to_go_on
from dsim.errors import InputError

if TYPE_CHECKING:
    from placement.crew import Crew
    from placement.curve import Curve
    from placement.result import SearchResult
    from placement.runner import Progress
    from placement.search import Question

#: Rates of the curves, as shares of the placement's goodput.
_CURVE_SHARES = (0.25, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3)


@grouped
def search(
    context: typer.Context,
    *,
    options: QuestionOptions,
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
    run_options: RunOptions,
    shard: ShardText = None,
    merge: MergeFolders = None,
    common: CommonOptions,
) -> int:
    """Find the placement that serves the most requests per GPU within the latency targets."""
    workers = workers_of(run_options.jobs)
    asked, question = resolved(options, requests=requests, top=top)
    sought, question = asked_objective(question, objective, rate=rate, price=price, pareto=pareto)
    names = ["result.json", "trials.csv", "attainment.csv", "attainment.png", "config.yaml"]
    if pareto:
        names.append("pareto.csv")
    runs = asked_runs(run_options, workers=workers, shard=shard, merge=merge, rerun=rerun_text(context))
    if (runs.shard or runs.merge) and (sought.rate_per_s is not None or (runs.shard and pareto)):
        hint = "leave it out, or search without --shard" if runs.shard else "ask it of dsim size"
        raise InputError("--pareto" if pareto else "--objective", "is not for parts of a search", hint=hint)
    runs.check(names)
    runs.check_shards(question)
    only = ("a smaller --top",) if runs.shard else ("a smaller --top", "--shard on several machines")
    about = told_how_many(question, runs, quiet=common.quiet, fewer="fewer GPUs", only=only)
    if common.dry_run:
        print_plan(asked, question, output_format=common.output_format, files=runs.files(names))
        return 0
    with told_where_to_go_on(runs, quiet=common.quiet), runs.opened(question) as store:
        with (
            progress_bar(quiet=common.quiet, no_color=common.no_color, about=about) as progress,
            runs.crew(store) as crew,
        ):
            found = _found(question, sought, runs, crew, progress=progress)
        return _finish(asked, question, sought, runs, found, common)


def _finish(
    asked: Asked,
    question: Question,
    sought: Sought,
    runs: Runs,
    found: tuple[SearchResult, tuple[Curve, ...], More],
    common: CommonOptions,
) -> int:
    """Write and print the answer, and return the exit code."""
    result, curves, more = found
    answer = answered(asked, question, result, sought, more)
    if runs.folder is not None and runs.shard is None:
        files: dict[str, str | bytes] = {
            "result.json": to_json(answer),
            "trials.csv": to_csv(answer["trials"]),
            "config.yaml": runs.options,
        }
        if sought.pareto:
            files["pareto.csv"] = to_csv(answer["pareto"])
        if curves:
            from experiments.plots import attainment_png

            files["attainment.csv"] = to_csv(curve_rows(curves))
            files["attainment.png"] = attainment_png(curves, target=question.attainment, title=title(asked, question))
        runs.write(files)
    print_answer(asked, question, result, answer, sought, more, common)
    if runs.folder is not None:
        names = sorted(files) if runs.shard is None else [runs.files([])[0]]
        note(f"wrote {', '.join(names)} to {runs.folder}", quiet=common.quiet)
    if runs.shard is not None:
        # Whether anything serves the rate the other parts know, too.
        return 0
    if result.is_feasible and (more.sizing is None or more.sizing.fits):
        return 0
    if sought.rate_per_s is not None and more.sizing is not None and more.sizing.plan is not None:
        why = not_enough("--rate", sought.rate_per_s, more.sizing, question)
    else:
        why = nothing_found(question, result)
    typer.echo(f"error: {why}", err=True)
    return 3


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
