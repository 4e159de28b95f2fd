"""`dsim profile fit`: from timing rows to a latency profile."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsim.cli.inputs import seconds
from dsim.cli.options import DryRun, NewProfile, NoColor, Overwrite, Quiet, file_path
from dsim.cli.output import note
from dsim.errors import InputError

if TYPE_CHECKING:
    from dsim.gpu import Gpu
    from dsim.model import Model
    from profiles.export import Subject
    from profiles.fit import FittedRows
    from profiles.rows import Rows


def fit(
    *,
    rows: Annotated[
        Path, typer.Argument(parser=file_path, metavar="ROWS", help="The CSV file (docs/profile_rows.md).")
    ],
    output: NewProfile = Path("profile.yaml"),
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="The model. [default: as the rows say]")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="The GPU. [default: as in the rows]")] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", help="What the profile is called by. [default: as the rows say]"),
    ] = None,
    host_step: Annotated[
        str | None,
        typer.Option(
            "--host-step", metavar="TIME", help="Driver time in every timed step, to be kept apart, such as 8ms."
        ),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    no_color: NoColor = False,
    quiet: Quiet = False,
) -> int:
    """Fit a latency profile to timing rows, and show it."""
    from dsim.catalog import find_gpu, find_model
    from dsim.cli.output import show, use_color
    from dsim.cli.profile_show import profile_parts
    from dsim.files import write_whole
    from dsim.yamlfile import read_bytes
    from profiles.export import checked_profile, profile_text
    from profiles.fit import fit_rows
    from profiles.rows import parse_rows

    if not dry_run:
        _check_output(output, overwrite=overwrite)
    data = read_bytes(rows)
    given = Given(
        model=None if model is None else find_model(model),
        gpu=None if gpu is None else find_gpu(gpu),
        engine=engine,
        host_step_s=0.0 if host_step is None else seconds("--host-step", host_step),
    )
    read = parse_rows(data, file=str(rows), model=given.model, gpu=given.gpu)
    subject = _subject(given, read, rows)
    _check_host_step(given.host_step_s, read)
    fitted = fit_rows(read, model=subject.model, gpu=subject.gpu, host_step_s=given.host_step_s)
    text = profile_text(fitted, read, data, name=rows.name, subject=subject)
    profile = checked_profile(text, file=str(output))
    show(*profile_parts(profile), color=use_color(no_color=no_color))
    _remark(fitted, subject, quiet=quiet)
    if not dry_run:
        write_whole(output, text)
        note(f"wrote {output}; try: dsim search --profile {output} --slo ttft=1,tpot=0.1", quiet=quiet)
    return 0


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says about the rows; it wins over their head."""

    model: Model | None
    gpu: Gpu | None
    engine: str | None
    host_step_s: float


def _check_output(path: Path, *, overwrite: bool) -> None:
    """See that the profile can be written, before anything is fitted."""
    if path.is_dir():
        raise InputError("--output", "is a directory", value=str(path), hint="give a file, such as my.yaml")
    if path.exists() and not overwrite:
        raise InputError("--output", "is there already", value=str(path), hint="give another path, or --overwrite")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError("--output", f"cannot be written: {folder} is no directory", value=str(path))
    if not os.access(folder, os.W_OK):
        raise InputError("--output", f"cannot be written: no permission in {folder}", value=str(path))


def _subject(given: Given, read: Rows, path: Path) -> Subject:
    """Return what the rows are about, from the options and the head of the file."""
    from profiles.export import Subject

    head = read.metadata
    model, gpu = given.model or head.model, given.gpu or head.gpu
    if model is None or gpu is None:
        option = "--model" if model is None else "--gpu"
        raise InputError(option, f"is needed: the head of {path} does not name one", hint="dsim models, dsim gpus")
    if head.model is not None and head.model.experts not in {None, model.experts}:
        rule = f"contradicts the head of {path}, which has the experts of another model"
        raise InputError("--model", rule, value=model.name, hint="leave --model out")
    if model.experts is None and head.settings.get("experts", "none") != "none":
        rule = "times a mixture of experts, and its head does not say of how many: the room for KV is unknown"
        hint = "add a line such as `# experts: {experts: 8, per_token: 2, ffn_size: 14336}` to the head"
        raise InputError(str(path), rule, hint=hint)
    return Subject(
        model=model,
        gpu=gpu,
        engine=_engine(given.engine or head.engine or "measured"),
        engine_version=head.engine_version or "unknown",
        source=head.source or f"{path.name}, timed by the user",
    )


def _check_host_step(host_step_s: float, read: Rows) -> None:
    if not host_step_s:
        return
    if read.metadata.host_overhead == "excluded":
        rule = f"is not in the steps: {read.file} says that they exclude host work"
        raise InputError("--host-step", rule, value=f"{host_step_s * 1e3:g}ms", hint="add it to `host` in the profile")
    least_s = min(row.step_s for row in read.ok)
    if host_step_s >= least_s:
        rule = f"must be below the shortest step, {least_s:g} s"
        raise InputError("--host-step", rule, value=f"{host_step_s * 1e3:g}ms")


def _remark(fitted: FittedRows, subject: Subject, *, quiet: bool) -> None:
    for tp, found in fitted.by_tp.items():
        if found.saturation is None:
            note(f"note: tp {tp} has too few prefill points for Lm", quiet=quiet)
        elif found.saturation.method == "not-reached":
            note(f"note: tp {tp}: Lm is beyond the timed tokens; time longer prompts", quiet=quiet)
    if subject.model.experts is not None:
        text = "note: KV capacities count all experts; the bounds and the appendix-A form only those a token needs"
        note(text, quiet=quiet)


def _engine(name: str) -> str:
    word = name.strip().lower()
    if not word or not all(c.isalnum() or c in "-_." for c in word):
        raise InputError("--engine", "must be letters, digits, - _ and .", value=name, hint="as in vllm-0.14")
    return word
