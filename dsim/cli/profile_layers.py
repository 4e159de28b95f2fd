"""`dsim profile from-layers`: from tables of one layer's kernel times to a latency profile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dsim.cli.options import DryRun, HostWork, NeededGpu, NewProfile, NoColor, Overwrite, Quiet, ShapeName
from dsim.errors import InputError


def from_layers(
    *,
    tables: Annotated[
        list[str],
        typer.Argument(
            metavar="[TP=]DIR...", help="Directories with dense.csv, per_sequence.csv and attention.csv, one a degree."
        ),
    ],
    model: ShapeName,
    gpu: NeededGpu,
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="Whose kernels they are; its defaults and host work.")
    ] = "vllm",
    engine_version: Annotated[str, typer.Option("--engine-version", metavar="TEXT", help="Its version.")] = "unknown",
    source: Annotated[str, typer.Option("--source", metavar="TEXT", help="Whose tables they are.")] = "",
    host: HostWork = True,
    output: NewProfile = Path("profile.yaml"),
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    no_color: NoColor = False,
    quiet: Quiet = False,
) -> int:
    """Make a latency profile of one-layer kernel times, as LLMServingSim's profiler writes them, and show it."""
    from dsim.catalog import find_gpu
    from dsim.cli.output import note, show, use_color
    from dsim.cli.profile_show import profile_parts
    from dsim.files import write_whole
    from profiles.export import checked_profile
    from profiles.kernels.hosts import HOSTS, NOTHING
    from profiles.kernels.layers import LayerSubject, layers_text, read_layers
    from profiles.shapes import shape_of

    if output.exists() and not overwrite and not dry_run:
        raise InputError("--output", "is there already", value=str(output), hint="give another path, or --overwrite")
    name = engine.strip().lower()
    shape = shape_of(model)
    read = {tp: read_layers(directory, shape=shape, tp=tp) for tp, directory in _directories(tables).items()}
    work = HOSTS.get(name, NOTHING) if host else NOTHING
    if work.prompt_s:
        note(f"note: the {work.prompt_s * 1e3:g} ms that {name} takes a prompt are left out", quiet=quiet)
    subject = LayerSubject(
        model=shape.model,
        gpu=find_gpu(gpu),
        engine=name,
        engine_version=engine_version,
        source=source or "one-layer kernel times, given by the user",
        host=work,
    )
    text = layers_text(read, subject)
    profile = checked_profile(text, file=str(output))
    show(*profile_parts(profile), color=use_color(no_color=no_color))
    for violation in profile.violations:
        note(f"warning: {violation}", quiet=quiet)
    if dry_run:
        return 0
    _check_folder(output)
    write_whole(output, text)
    note(f"wrote {output}; try: dsim simulate --profile {output} -p 1xC:tp1pp1 --rate 1", quiet=quiet)
    return 0


def _directories(texts: list[str]) -> dict[int, Path]:
    """Return directories by degree, as written `2=tables/tp2`; without a degree it is 1."""
    found: dict[int, Path] = {}
    for text in texts:
        degree, equals, rest = text.partition("=")
        written = bool(equals) and degree.isascii() and degree.isdigit()
        tp, directory = (int(degree), Path(rest)) if written else (1, Path(text))
        if not 1 <= tp <= 999:
            raise InputError("tables", "must be of a degree from 1 to 999", value=text, hint="as in 2=tables/tp2")
        if tp in found:
            hint = f"write {tp + 1}={directory} for tp {tp + 1}" if not written else "keep one"
            raise InputError("tables", f"is the second directory of tp {tp}", value=text, hint=hint)
        if not directory.is_dir():
            raise InputError("tables", "is no directory", value=str(directory))
        found[tp] = directory
    return found


def _check_folder(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError("--output", f"cannot be written into {folder}", value=str(path))
