"""`dsim profile fit`: from timing rows to a latency profile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dsim.cli.inputs import seconds
from dsim.cli.options import DryRun, NoColor, Overwrite, Quiet, file_path
from dsim.errors import InputError


def fit(
    *,
    rows: Annotated[
        Path, typer.Argument(parser=file_path, metavar="ROWS", help="The CSV file (docs/profile_rows.md).")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", parser=file_path, metavar="FILE", help="The profile to write.")
    ] = Path("profile.yaml"),
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
    from dsim.cli.output import note, show, use_color
    from dsim.cli.profile_show import profile_parts
    from dsim.yamlfile import read_bytes
    from profiles.export import Subject, checked_profile, profile_text
    from profiles.fit import fit_rows
    from profiles.rows import parse_rows

    if output.exists() and not overwrite and not dry_run:
        raise InputError("--output", "is there already", value=str(output), hint="give another path, or --overwrite")
    given_model = None if model is None else find_model(model)
    given_gpu = None if gpu is None else find_gpu(gpu)
    host_step_s = 0.0 if host_step is None else seconds("--host-step", host_step)
    data = read_bytes(rows)
    read = parse_rows(data, file=str(rows), model=given_model, gpu=given_gpu)
    head = read.metadata
    known_model, known_gpu = given_model or head.model, given_gpu or head.gpu
    if known_model is None or known_gpu is None:
        option = "--model" if known_model is None else "--gpu"
        raise InputError(option, f"is needed: the head of {rows} does not name one", hint="dsim models, dsim gpus")
    least_s = min(row.step_s for row in read.ok)
    if host_step_s >= least_s:
        raise InputError("--host-step", f"must be below the shortest step, {least_s:g} s", value=host_step)
    fitted = fit_rows(read, model=known_model, gpu=known_gpu)
    subject = Subject(
        model=known_model,
        gpu=known_gpu,
        engine=_engine(engine or head.engine or "measured"),
        engine_version=head.engine_version or "unknown",
        source=head.source or f"{rows.name}, timed by the user",
        host_step_s=host_step_s,
    )
    text = profile_text(fitted, read, data, name=rows.name, subject=subject)
    profile = checked_profile(text, file=str(output))
    show(*profile_parts(profile), color=use_color(no_color=no_color))
    for tp, found in fitted.by_tp.items():
        for warning in found.warnings:
            note(f"warning: {warning}", quiet=quiet)
        if found.saturation is None:
            note(f"note: tp {tp} has too few prefill points for Lm", quiet=quiet)
    if dry_run:
        return 0
    _write(output, text)
    note(f"wrote {output}; try: dsim search --profile {output} --slo ttft=1,tpot=0.1", quiet=quiet)
    return 0


def _engine(name: str) -> str:
    word = name.strip().lower()
    if not word or not all(c.isalnum() or c in "-_." for c in word):
        raise InputError("--engine", "must be letters, digits, - _ and .", value=name, hint="as in vllm-0.14")
    return word


def _write(path: Path, text: str) -> None:
    """Write the file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
