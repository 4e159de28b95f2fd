"""`dsim report`: a result as one offline HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsim.cli.config import Origins
from dsim.cli.groups import taken
from dsim.cli.inputs import display_name, seed_of, workers_of
from dsim.cli.options import Jobs, NoColor, Quiet, file_path, whole_number
from dsim.cli.progress import progress_bar
from dsim.cli.question import QuestionOptions, resolved
from dsim.errors import InputError

if TYPE_CHECKING:
    from dsim.cli.question import Asked
    from dsim.profile import Profile
    from experiments.report.answer import Answer
    from experiments.report.sensitivity import Sensitivity
    from placement.runner import Progress
    from placement.search import Question


def report(
    context: typer.Context,
    *,
    result: Annotated[
        Path,
        typer.Argument(metavar="RESULT", help="A folder that dsim search -o or dsim sweep wrote.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", parser=file_path, metavar="FILE", help="The page. [default: report.html in RESULT]"
        ),
    ] = None,
    no_sensitivity: Annotated[
        bool,
        typer.Option(
            "--no-sensitivity", help="Leave out what 20 % other rates, lengths and step times do: no simulation."
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option("--seed", parser=whole_number, metavar="N", help="Of those simulations. [default: the search's]"),
    ] = None,
    jobs: Jobs = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it is there.")] = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> int:
    """Write a result as one HTML page that needs no network: recommendation, figures, sensitivity, evidence."""
    workers = workers_of(jobs)
    if seed is not None:
        seed_of(seed)
    kind = _kind(result)
    target = _Target(result / "report.html" if output is None else output, overwrite=overwrite)
    target.check()
    if kind == "sweep":
        from experiments.report.sweep_page import render_sweep

        if seed is not None:
            raise InputError("--seed", "belongs to the report of a search", value=seed, hint="leave it out")
        text = render_sweep(result)
    else:
        with progress_bar(quiet=quiet, no_color=no_color) as progress:
            text = _search_page(
                context, result, sensitive=not no_sensitivity, seed=seed, jobs=workers, progress=progress
            )
    target.write(text)
    from dsim.cli.output import note

    note(f"wrote {target.path}", quiet=quiet)
    return 0


def _kind(folder: Path) -> str:
    """Return what wrote the folder, search or sweep."""
    if not folder.is_dir():
        rule = "is no directory" if folder.exists() else "does not exist"
        raise InputError(
            "RESULT", rule, value=str(folder), hint="give the folder that dsim search -o or dsim sweep wrote"
        )
    if (folder / "result.json").is_file():
        return "search"
    if (folder / "sweep.yaml").is_file():
        return "sweep"
    hint = "give the folder that dsim search -o or dsim sweep wrote"
    raise InputError("RESULT", "has neither result.json nor sweep.yaml", value=str(folder), hint=hint)


@dataclass(frozen=True, slots=True)
class _Target:
    """The file that the page is written to, whole or not at all."""

    path: Path
    overwrite: bool

    def check(self) -> None:
        """See beforehand that it can be written."""
        from dsim.cli.output import OutputFolder

        if self.path.is_dir():
            raise InputError("--output", "is a directory", value=str(self.path), hint="give a file, as report.html")
        if self.path.exists() and not self.overwrite:
            hint = "give another file, or --overwrite"
            raise InputError("--output", "is there already", value=str(self.path), hint=hint)
        try:
            OutputFolder(self.path.parent, overwrite=True).check([self.path.name])
        except InputError as error:
            raise InputError("--output", error.rule, value=str(self.path), hint=error.hint) from None

    def write(self, text: str) -> None:
        """Write it; it gets its name only when it is complete."""
        from dsim.cli.output import OutputFolder

        self.check()
        OutputFolder(self.path.parent, overwrite=True).write({self.path.name: text})


def _search_page(
    context: typer.Context, folder: Path, *, sensitive: bool, seed: int | None, jobs: int, progress: Progress | None
) -> str:
    from experiments.report.answer import read_answer
    from experiments.report.evidence import shipped_hashes
    from experiments.report.interactive import bundle
    from experiments.report.search_page import render_search
    from experiments.report.sections import Report

    answer = read_answer(folder)
    if answer.recommended is not None:
        # Know before anything is simulated that it can be drawn.
        bundle()
    asked, question = _asked_again(context, folder / "config.yaml")
    _check_same(folder, asked, question, answer)
    found, options = None, ["--no-sensitivity"]
    if sensitive:
        found, options = _sensitivity(question, answer, seed=seed, jobs=jobs, progress=progress), []
        options += [] if seed is None else [f"--seed {seed}"]
    profiles = _profiles_shown(question, answer)
    return render_search(
        Report(
            answer=answer,
            model_name=display_name(asked.used.model),
            slo=question.slo,
            profiles=profiles,
            shipped=shipped_hashes({profile.name for profile in profiles.values()}),
            sensitivity=found,
            report_options=tuple(options),
        )
    )


def _profiles_shown(question: Question, answer: Answer) -> dict[str, Profile]:
    """Return the profile of each role: of several GPUs that of the placements that are shown first."""
    from placement.mixes import mix_of

    found = {role: question.profiles[role] for role in question.roles}
    for trial in (answer.alternative, answer.recommended):
        if trial is not None and question.mixes:
            found |= mix_of(trial.placement, question.mixes, question.profiles)
    return {role.name.lower(): profile for role, profile in found.items()}


def _asked_again(context: typer.Context, config: Path) -> tuple[Asked, Question]:
    """Return the question that the options in a search's config.yaml ask."""
    command = context.find_root().command.commands["search"]  # type: ignore[attr-defined]
    again = command.make_context("search", ["--config", str(config)], obj=context.find_object(Origins))
    given = again.params
    return resolved(taken(QuestionOptions, given), requests=given["requests"], top=given["top"])


def _check_same(folder: Path, asked: Asked, question: Question, answer: Answer) -> None:
    """See that the question is the one that was answered, with the same profiles.

    Raises:
        InputError: it is another one.
    """
    where = str(folder / "result.json")
    for role in question.roles:
        now, then = question.profiles[role], answer.profiles.get(role.name.lower())
        if then is not None and now.sha256 != then.sha256:
            rule = f"had sha256 {then.sha256[:12]} in the search and has {now.sha256[:12]} now"
            hint = "restore that profile, or run dsim search -o again"
            raise InputError(where, rule, name=f"profile {now.name}", hint=hint)
    now_asked: Mapping[str, object] = {**question.to_dict(), "workload": asked.workload, "arrivals": asked.arrivals}
    then_asked: Mapping[str, object] = {**answer.question, "workload": answer.workload, "arrivals": answer.arrivals}
    for key, value in now_asked.items():
        if key != "profiles" and value != then_asked.get(key):
            rule = f"is not what config.yaml beside it asks, {value!r}"
            raise InputError(where, rule, name=key, value=then_asked.get(key), hint="run dsim search -o again")


def _sensitivity(
    question: Question, answer: Answer, *, seed: int | None, jobs: int, progress: Progress | None
) -> Sensitivity | None:
    from experiments.report.sensitivity import Contender, sensitivity
    from placement.runner import local_processes

    contenders = [
        Contender(trial.placement, trial.goodput_per_gpu_per_s.best * trial.num_gpus)
        for trial in (answer.recommended, answer.alternative)
        if trial is not None and trial.goodput_per_gpu_per_s is not None
    ]
    if not contenders:
        return None
    if seed is not None:
        question = replace(question, seed=seed, options=replace(question.options, seed=seed))
    other = contenders[1] if len(contenders) > 1 else None
    with local_processes(jobs) as executor:
        return sensitivity(question, contenders[0], other, executor=executor, progress=progress)
