"""`dsim sweep`: many runs over factors, from a YAML file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsim.cli.inputs import number_of, workers_of
from dsim.cli.options import (
    DryRun,
    Format,
    FormatOption,
    Jobs,
    NoColor,
    OutputDirectory,
    Quiet,
)
from dsim.errors import InputError

if TYPE_CHECKING:
    from experiments.estimate import Estimate
    from experiments.store import Row, RowKey, RowsFile, SweepResults
    from experiments.sweepfile import Sweep, Task
    from placement.shards import Shard

#: Where results go by default.
_RESULTS = Path("results")


def sweep(
    *,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A sweep file, or the name of a shipped one.", show_default=False),
    ] = None,
    list_shipped: Annotated[bool, typer.Option("--list", help="List the shipped sweep files, and stop.")] = False,
    output_dir: OutputDirectory = None,
    quick: Annotated[bool, typer.Option("--quick", help="The file's own small variant of itself.")] = False,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the file, as in base.requests=300; may be repeated."),
    ] = None,
    jobs: Jobs = None,
    resume: Annotated[bool, typer.Option("--resume", help="Run what the output directory does not have yet.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: run failed tasks again, too.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results in the output directory.")
    ] = False,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="I/N", help="Run the I-th of N equal parts of the tasks only.")
    ] = None,
    dry_run: DryRun = False,
    output_format: FormatOption = Format.TABLE,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> int:
    """Run every combination of a sweep file's factors, and draw what it asks for.

    Results go to results/NAME unless -o says otherwise. A killed sweep goes on with --resume.
    """
    if list_shipped:
        return _list(output_format=output_format, no_color=no_color)
    if file is None:
        raise InputError(
            "FILE", "is needed", hint="give a sweep file, or one of the names that dsim sweep --list shows"
        )
    if resume and overwrite:
        raise InputError("--resume", "contradicts --overwrite", hint="leave one out")
    if retry_failed and not resume:
        raise InputError("--retry-failed", "needs --resume", hint="add --resume")
    from dsim.cli.output import OutputFolder
    from experiments.edits import SET
    from experiments.shipped import find_sweep
    from experiments.store import RowsFile, check_places
    from experiments.sweepfile import read_sweep
    from placement.shards import Shard

    part = None if shard is None else Shard.parse(shard, "--shard")
    path = find_sweep(file, "FILE")
    try:
        chosen = read_sweep(path, assignments=assignments or (), quick=quick)
    except InputError as error:
        if error.where != f"{SET}:1":
            raise
        raise InputError(SET, error.rule, name=error.name, value=error.value, hint=error.hint) from None
    folder = _RESULTS / chosen.outline.name if output_dir is None else output_dir
    OutputFolder(folder).check([])
    asked = _Asked(
        sweep=chosen,
        store=RowsFile(folder, part),
        jobs=_workers(jobs, chosen),
        resume=resume,
        retry_failed=retry_failed,
        overwrite=overwrite,
    )
    check_places(folder, asked.targets)
    _present(asked)
    _check_targets(asked, path)
    if dry_run:
        return _print_plan(asked, output_format=output_format)
    with _progress_bar(quiet=quiet, no_color=no_color) as hear:
        try:
            results, problems = _run(asked, hear)
        except KeyboardInterrupt:
            _note(f"stopped; the same command with --resume goes on with {folder}", quiet=quiet)
            raise
    return _report(asked, results, problems, output_format=output_format, quiet=quiet, no_color=no_color)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What to run, where, and what to do with rows that are there."""

    sweep: Sweep
    store: RowsFile
    jobs: int
    resume: bool
    retry_failed: bool
    overwrite: bool

    @property
    def folder(self) -> Path:
        """Where results go."""
        return self.store.folder

    @property
    def targets(self) -> list[str]:
        """Names of the files that are made of the rows."""
        from experiments.store import SWEEP_FILE

        figures = [f"{spec.file}.{suffix}" for spec in self.sweep.outline.plots for suffix in ("svg", "png")]
        return [SWEEP_FILE, "summary.csv", "summary.json", "compare.csv", *figures]

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks of the part asked for."""
        shard: Shard | None = self.store.shard
        return self.sweep.tasks if shard is None else shard.share(self.sweep.tasks)


def _workers(jobs: int | None, chosen: Sweep) -> int:
    workers = workers_of(jobs)
    return workers if chosen.outline.jobs is None else min(workers, chosen.outline.jobs)


def _present(asked: _Asked) -> dict[RowKey, Row]:
    """Return the rows that count as done.

    Raises:
        InputError: there are rows and neither --resume nor --overwrite, or they are of another sweep.
    """
    from experiments.store import check_same, read_rows, rows_files, task_key

    files = rows_files(asked.folder)
    if asked.overwrite:
        own = asked.store.path
        if asked.store.shard is None:
            return {}
        rows = read_rows(asked.folder, leave_out=own)
        check_same(asked.sweep, rows, asked.folder)
        again = {task_key(task) for task in asked.tasks}
        return {key: row for key, row in rows.items() if key not in again}
    taken = files if asked.store.shard is None else [path for path in files if path == asked.store.path]
    if taken and not asked.resume:
        done = len(read_rows(asked.folder))
        rule = f"has {done} of the {len(asked.sweep.tasks)} rows of a sweep already"
        hint = "go on with --resume, replace them with --overwrite, or give another directory"
        raise InputError("--output-dir", rule, value=str(asked.folder), hint=hint)
    rows = read_rows(asked.folder)
    check_same(asked.sweep, rows, asked.folder)
    if not asked.retry_failed:
        return rows
    mine = {task_key(task) for task in asked.tasks}
    return {key: row for key, row in rows.items() if row.error is None or key not in mine}


def _run(asked: _Asked, hear: Callable[[int, int, int], None]) -> tuple[SweepResults, list[str]]:
    """Run what is missing, and write what is made of all rows; return these, and why figures could not be drawn."""
    from experiments.runner import run_tasks
    from experiments.store import SWEEP_FILE, SweepResults, in_order, made_files, read_rows, task_key

    # Before the folder is made, so that a refusal leaves nothing.
    _present(asked)
    asked.folder.mkdir(parents=True, exist_ok=True)
    with asked.store.locked():
        present = _present(asked)
        if asked.overwrite:
            made = made_files(asked.folder)
            for path in made if asked.store.shard is None else [path for path in made if path == asked.store.path]:
                path.unlink()
        _write(asked.folder, {SWEEP_FILE: asked.sweep.outline.yaml()})
        missing = [task for task in asked.tasks if task_key(task) not in present]
        total, failed = len(asked.tasks), 0
        hear(total - len(missing), total, failed)
        # With nothing to add, a file that is there still loses what a kill left of its last line, and none is made.
        if missing or asked.store.path.exists():
            with asked.store.writer() as writer, contextlib.closing(run_tasks(missing, jobs=asked.jobs)) as rows:
                for done, row in enumerate(rows, total - len(missing) + 1):
                    writer.append(row)
                    failed += row.error is not None
                    hear(done, total, failed)
        outline = asked.sweep.outline
        results = SweepResults(outline, in_order(outline, read_rows(asked.folder).values()))
        if results.is_complete:
            _write(asked.folder, _files(results))
            return results, _draw(results, asked.folder)
    return results, []


def _check_targets(asked: _Asked, source: Path) -> None:
    """See that nothing is replaced which a sweep has not made, before anything runs.

    Raises:
        InputError: a file stands where the sweep's own would.
    """
    from experiments.store import SWEEP_FILE, check_claims

    folder = asked.folder
    target = folder / SWEEP_FILE
    if target.exists() and source.exists() and target.samefile(source):
        hint = "give another directory, or the file another name"
        raise InputError("--output-dir", f"would replace {source}, the sweep file itself", value=str(folder), hint=hint)
    if not asked.overwrite:
        check_claims(folder, asked.targets)


def _write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files of the sweep's own."""
    from dsim.cli.output import OutputFolder
    from experiments.store import claim

    claim(folder, files)
    OutputFolder(folder, overwrite=True).write(files)


def _draw(results: SweepResults, folder: Path) -> list[str]:
    """Draw the figures, and return why some could not be drawn."""
    from experiments.plots import render

    summary, problems = results.summary, []
    for spec in results.plots:
        try:
            _write(folder, render(spec, summary, published=results.published))
        except InputError as error:
            problems.append(str(error))
    return problems


def _files(results: SweepResults) -> dict[str, str | bytes]:
    """Return the files made of all rows, but for the figures."""
    from dsim.cli.output import to_csv, to_json
    from experiments.compare import compare
    from experiments.vllm import vllm_records

    files: dict[str, str | bytes] = {
        "summary.csv": results.table().to_csv(index=False, lineterminator="\n"),
        "summary.json": to_json(vllm_records(results)),
    }
    comparisons = compare(results)
    if comparisons:
        files["compare.csv"] = to_csv([comparison.to_dict() for comparison in comparisons])
    return files


def _report(
    asked: _Asked, results: SweepResults, problems: list[str], *, output_format: Format, quiet: bool, no_color: bool
) -> int:
    """Print the summary and return the exit code."""
    tasks, rows = len(asked.sweep.tasks), len(results.rows)
    _print(results, output_format=output_format, no_color=no_color)
    if results.is_complete:
        names = ", ".join(sorted(path.name for path in asked.folder.glob("[!.]*")))
        _note(f"wrote {names} to {asked.folder}", quiet=quiet)
    else:
        _note(f"{rows} of {tasks} tasks are done; --resume without --shard runs the rest and sums up", quiet=quiet)
    for text in _gaps(results):
        _note(text, quiet=quiet)
    if results.failed:
        first = results.failed[0]
        where = _place(first.factors)
        problems.insert(0, f"{number_of(len(results.failed), 'task')} of {rows} failed, first {where}: {first.error}")
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    return 1 if problems else 0


def _gaps(results: SweepResults) -> Iterator[str]:
    """Yield a line that says which numbers some replications lack, so that they have no mean."""
    from experiments.store import records_of

    lacking = [record for record in records_of(results.summary) if record["missing"]]
    if lacking:
        first = lacking[0]
        where = _place({key: first[key] for key in results.outline.keys})
        rows = f"{len(lacking)} of {number_of(len(results.summary), 'combination')}"
        yield f"no mean of some numbers in {rows}, first {where}: missing {first['missing']} replications"


def _place(factors: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in factors.items()) or "the only one"


def _print(results: SweepResults, *, output_format: Format, no_color: bool) -> None:
    from dsim.cli.output import emit, to_json

    if output_format is Format.JSON:
        emit(to_json({"name": results.name, "about": results.about, **_printed(results)}))
    elif output_format is Format.CSV:
        emit(results.table().to_csv(index=False, lineterminator="\n"))
    else:
        _show(results, no_color=no_color)


def _printed(results: SweepResults) -> dict[str, Any]:
    from experiments.compare import compare
    from experiments.store import records_of

    return {
        "summary": records_of(results.table()),
        "published": results.outline.published.source or None,
        "comparisons": [comparison.to_dict() for comparison in compare(results)],
        "failed": [{**row.factors, "replication": row.replication, "error": row.error} for row in results.failed],
    }


def _show(results: SweepResults, *, no_color: bool) -> None:
    from dsim.cli.output import Table, show, use_color
    from experiments.compare import closeness, compare
    from experiments.store import records_of

    outline = results.outline
    columns = results.shown
    table = Table([*(f"<{key}" for key in outline.keys), *columns])
    for record in records_of(results.summary):
        table.rows.append([*(_cell(record[key]) for key in outline.keys), *(_metric(record, name) for name in columns)])
    parts: list[Table | str] = [f"{outline.name}: {outline.first_sentence}", table]
    comparisons = compare(results)
    near = Table(["<published", "points", "mean difference", "largest", "simulated / published"])
    for close in closeness(comparisons):
        ratio = "-" if close.mean_ratio is None else f"{close.mean_ratio:.3f}"
        near.rows.append([close.column, str(close.points), f"{close.mean:.4g}", f"{close.worst:.4g}", ratio])
    if near.rows:
        parts += [f"published: {outline.published.source}", near]
    show(*parts, color=use_color(no_color=no_color))


def _metric(record: Mapping[str, Any], name: str) -> str:
    """Return a metric with its interval, where it has one."""
    best = record.get(name, record.get(f"{name}.best"))
    low, high = record.get(f"{name}.low"), record.get(f"{name}.high")
    text, interval = _cell(best), f"[{_cell(low)}, {_cell(high)}]"
    return text if low is None or interval in (f"[{text}, {text}]", f"[{_cell(low)}, -]") else f"{text} {interval}"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_plan(asked: _Asked, *, output_format: Format) -> int:
    from dsim.cli.output import emit, emit_data
    from experiments.estimate import estimated
    from experiments.store import task_key

    present = _present(asked)
    outline = asked.sweep.outline
    missing = [task for task in asked.tasks if task_key(task) not in present]
    counts = {factor.key: len(factor.choices) for factor in outline.factors}
    took = estimated(missing, jobs=asked.jobs)
    plan = {
        "name": outline.name,
        "factors": counts,
        "replications": outline.replications,
        "tasks": len(asked.tasks),
        "done": len(asked.tasks) - len(missing),
        "estimated_s": took.middle_s,
        "estimated_low_s": took.low_s,
        "estimated_high_s": took.high_s,
        "jobs": asked.jobs,
        "output_dir": str(asked.folder),
    }
    if not emit_data(output_format, plan):
        factors = " x ".join(f"{key} ({count})" for key, count in counts.items()) or "one combination"
        runs, tasks = number_of(outline.replications, "replication"), number_of(len(asked.tasks), "task")
        processes = "one process" if asked.jobs == 1 else f"{asked.jobs} processes"
        lines = [
            f"{outline.name}: {outline.first_sentence}",
            f"{factors} x {runs}: {tasks}, {len(asked.tasks) - len(missing)} of them done",
            f"the rest takes {_between(took)} on {processes}, into {asked.folder}",
        ]
        emit("\n".join(lines) + "\n")
    return 0


def _between(took: Estimate) -> str:
    low, high = _duration(took.low_s), _duration(took.high_s)
    return f"about {low}" if low == high else f"between {low} and {high}"


def _duration(seconds: float) -> str:
    """Return a time with two digits at most."""
    if seconds < 90:
        return f"{max(1, round(float(f'{seconds:.2g}')))} s"
    minutes = seconds / 60
    return f"{float(f'{minutes:.2g}'):g} min" if minutes < 90 else f"{float(f'{minutes / 60:.2g}'):g} h"


def _list(*, output_format: Format, no_color: bool) -> int:
    from dsim.cli.output import Table, print_rows
    from experiments.shipped import shipped_sweeps
    from experiments.sweepfile import read_outline

    rows = []
    table = Table(["<name", "tasks", "<about"])
    for name, path in shipped_sweeps().items():
        outline = read_outline(path)
        tasks = outline.num_combinations * outline.replications
        rows.append({"name": name, "tasks": tasks, "about": outline.about, "file": str(path)})
        table.rows.append([name, str(tasks), outline.first_sentence])
    return print_rows(rows, table, output_format=output_format, no_color=no_color)


@contextlib.contextmanager
def _progress_bar(*, quiet: bool, no_color: bool) -> Iterator[Callable[[int, int, int], None]]:
    """Show on stderr how far the sweep is, where somebody looks."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total, _failed: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, no_color=no_color or None)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tasks"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("sweep", total=None)

        def hear(done: int, total: int, failed: int) -> None:
            description = f"sweep, {failed} failed" if failed else "sweep"
            bar.update(task, description=description, completed=done, total=total)

        yield hear


def _note(text: str, *, quiet: bool) -> None:
    from dsim.cli.output import note

    note(text, quiet=quiet)
