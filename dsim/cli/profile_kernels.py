"""`dsim profile from-kernels`: from a package of kernel times to a latency profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsim.cli.options import DryRun, HostWork, NeededGpu, NewProfile, NoColor, Overwrite, Quiet, ShapeName, file_path
from dsim.errors import InputError


def from_kernels(
    *,
    model: ShapeName,
    gpu: NeededGpu,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="vllm, sglang or trtllm.")] = "vllm",
    tp: Annotated[
        str, typer.Option("--tp", metavar="N,...", help="Tensor parallel degrees; those that do not fit are left out.")
    ] = "1,2,4,8",
    host: HostWork = True,
    output: NewProfile = Path("profile.yaml"),
    rows: Annotated[
        Path | None,
        typer.Option("--rows", parser=file_path, metavar="FILE", help="Write the composed rows too, as CSV."),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option("--tables", metavar="DIR", help="Directory of the tables. [default: the installed package's]"),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    no_color: NoColor = False,
    quiet: Quiet = False,
) -> int:
    """Compose a latency profile from measured kernel times (aiconfigurator-core), and show it."""
    from dsim.catalog import find_gpu
    from dsim.cli.output import note, show, use_color
    from dsim.cli.profile_show import profile_parts
    from dsim.files import write_whole
    from profiles.export import checked_profile
    from profiles.kernels.build import Question, build
    from profiles.kernels.hosts import NOTHING
    from profiles.kernels.package import open_package
    from profiles.shapes import shape_of

    for path in (output, rows):
        if path is not None and path.exists() and not overwrite and not dry_run:
            where = "--output" if path is output else "--rows"
            raise InputError(where, "is there already", value=str(path), hint="give another path, or --overwrite")
    known_gpu, shape = find_gpu(gpu), shape_of(model)
    question = Question(
        shape=shape,
        gpu=known_gpu,
        engine=engine.strip().lower(),
        tps=_degrees(tp),
        host=None if host else NOTHING,
    )
    package = open_package(known_gpu.name, root=tables)
    built = build(package, question, note=lambda text: note(f"note: {text}", quiet=quiet))
    profile = checked_profile(built.profile, file=str(output))
    show(*profile_parts(profile), color=use_color(no_color=no_color))
    for violation in profile.violations:
        note(f"warning: {violation}", quiet=quiet)
    if dry_run:
        return 0
    if rows is not None:
        write_whole(rows, built.rows)
    write_whole(output, built.profile)
    note(f"wrote {output}; try: dsim search --profile {output} --slo ttft=1,tpot=0.1", quiet=quiet)
    return 0


def _degrees(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    degrees = sorted({int(part) for part in parts if part.isascii() and part.isdigit() and 1 <= int(part) <= 999})
    if not degrees or any(not (part.isascii() and part.isdigit()) for part in parts):
        raise InputError("--tp", "must be whole numbers >= 1", value=text, hint="as in 1,2,4,8")
    return tuple(degrees)
