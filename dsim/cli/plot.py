"""`dsim plot`: figures of what sweeps, searches and runs have written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsim.cli.options import OutputDirectory, Overwrite, Quiet, file_path
from dsim.errors import InputError, nearest

if TYPE_CHECKING:
    from experiments.plots import Figures, Kind, PlotSpec
    from experiments.store import SweepResults

_FORMS = ("svg", "png")


def plot(
    *,
    result: Annotated[
        Path,
        typer.Argument(
            parser=file_path,
            metavar="RESULT",
            help="A directory of dsim sweep, or of dsim search or dsim simulate with -o.",
            show_default=False,
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", metavar="KIND", help="Draw this kind of figure only, such as attainment-rate or timeline."
        ),
    ] = None,
    x: Annotated[
        str | None, typer.Option("-x", "--x", metavar="COLUMN", help="Of a sweep: the column along the axis.")
    ] = None,
    y: Annotated[
        list[str] | None,
        typer.Option("-y", "--y", metavar="COLUMN", help="Of a sweep: a column to show; may be repeated."),
    ] = None,
    series: Annotated[
        str | None,
        typer.Option("--series", metavar="COLUMN", help="Of a sweep: the column whose values get lines of their own."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="COLUMN=VALUE", help="Of a sweep: show these rows only; may be repeated."),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another key of `plots` in sweep files, such as value=attainment.both or log=x; may be repeated.",
        ),
    ] = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="START,END", help="Of a timeline, as in 10s,12s.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Title of the figures.")] = None,
    output_dir: OutputDirectory = None,
    overwrite: Overwrite = False,
    forms: Annotated[
        str, typer.Option("--format", metavar="FORMATS", help="svg, png, or both with a comma.")
    ] = "svg,png",
    quiet: Quiet = False,
) -> int:
    """Draw what a sweep asks for, or what a search or a run has found, as SVG and PNG."""
    from dsim.cli.output import OutputFolder, note

    asked = _Asked(
        kind=kind,
        x=x,
        y=tuple(y or ()),
        series=series,
        where=tuple(where or ()),
        keys=tuple(keys or ()),
        title=title,
    )
    wanted = _forms(forms)
    span_s = None if window is None else _window(window)
    figures = _figures(result, asked, span_s)
    if not figures:
        raise InputError(str(result), "has no figure to draw", hint="name one with --kind")
    folder = OutputFolder(result if output_dir is None else output_dir, overwrite=overwrite)
    folder.check([f"{name}.{form}" for name in figures for form in wanted])
    files = _rendered(figures, wanted)
    folder.write(files)
    note(f"wrote {', '.join(files)} to {folder.path}", quiet=quiet)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options that say what is drawn."""

    kind: str | None
    x: str | None
    y: tuple[str, ...]
    series: str | None
    where: tuple[str, ...]
    keys: tuple[str, ...]
    title: str | None

    @property
    def columns(self) -> dict[str, str | None]:
        """The options that name columns of a sweep."""
        return {"-x": self.x, "-y": ", ".join(self.y), "--series": self.series, "--where": ", ".join(self.where)}

    def need_kind(self) -> None:
        """Refuse what only says something about a figure of a kind that is given.

        Raises:
            InputError: there is none.
        """
        for name, value in {**self.columns, "--set": ", ".join(self.keys)}.items():
            if value and self.kind is None:
                raise InputError(name, "needs a kind of figure", value=value, hint="add --kind, such as --kind line")

    def section(self) -> dict[str, object]:
        """Return the keys of `plots` that the options give.

        Raises:
            InputError: one is given twice, or is no key and its value.
        """
        found: dict[str, object] = {"x": self.x, "y": list(self.y), "series": self.series, "title": self.title}
        found["where"] = dict(_assigned("--where", text, "system=vllm", one=True) for text in self.where)
        found = {key: value for key, value in found.items() if value}
        for text in self.keys:
            key, value = _assigned("--set", text, "value=attainment.both")
            if key == "kind":
                raise InputError("--set", "is an option of its own", value=text, hint="give it as --kind")
            if key in found:
                raise InputError("--set", "is given twice", value=text, hint="leave one of them out")
            found[key] = value
        return found


def _forms(text: str) -> tuple[str, ...]:
    """Return the endings of the files, each once."""
    forms = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for form in forms:
        if form not in _FORMS:
            raise InputError("--format", "is not known", value=form, hint=nearest(form, _FORMS))
    return forms


def _window(text: str) -> tuple[float, float]:
    from dsim.cli.inputs import seconds

    parts = text.split(",")
    if len(parts) != 2:
        raise InputError("--window", "must be a start and an end", value=text, hint="as in 10s,12s")
    return seconds("--window", parts[0]), seconds("--window", parts[1])


def _figures(result: Path, asked: _Asked, window_s: tuple[float, float] | None) -> Figures:
    """Return the figures of a directory, by file name."""
    from experiments.plots import SEARCH_KINDS, Kind, run_figures, search_figures
    from experiments.plots.results import RESULT, RUN_KINDS
    from experiments.plots.runlog import SUMMARY
    from experiments.store import SWEEP_FILE

    if not result.is_dir():
        rule = "is no directory" if result.exists() else "does not exist"
        raise InputError("RESULT", rule, value=str(result), hint="give what dsim sweep, search or simulate wrote to")
    if (result / SWEEP_FILE).is_file():
        kind = None if asked.kind is None else _kind(asked.kind, [each for each in Kind if each is not Kind.TIMELINE])
        _only_timeline(window_s, kind)
        return _of_sweep(result, asked, kind)
    for name, value in asked.columns.items():
        if value:
            hint = f"leave it out; {result} is no sweep's directory"
            raise InputError(name, "belongs to sweeps", value=value, hint=hint)
    asked.need_kind()
    if (result / RESULT).is_file():
        kind = None if asked.kind is None else _kind(asked.kind, SEARCH_KINDS)
        _only_timeline(window_s, kind)
        with _named_by_option(kind):
            return search_figures(result, kind=kind, keys=asked.section())
    if (result / SUMMARY).is_file():
        kind = None if asked.kind is None else _kind(asked.kind, RUN_KINDS)
        if window_s is not None and kind is None:
            kind = Kind.TIMELINE
        _only_timeline(window_s, kind)
        with _named_by_option(kind):
            return run_figures(result, kind=kind, window_s=window_s, keys=asked.section())
    hint = "give what dsim sweep, dsim search -o or dsim simulate -o wrote to"
    raise InputError("RESULT", f"has none of {SWEEP_FILE}, {RESULT}, {SUMMARY}", value=str(result), hint=hint)


def _kind(text: str, kinds: Sequence[Kind]) -> Kind:
    for kind in kinds:
        if kind.value == text:
            return kind
    names = [kind.value for kind in kinds]
    raise InputError("--kind", "cannot be drawn of this result", value=text, hint=nearest(text, names))


def _only_timeline(window_s: tuple[float, float] | None, kind: Kind | None) -> None:
    from experiments.plots import Kind

    if window_s is not None and kind is not Kind.TIMELINE:
        text = f"{window_s[0]:g},{window_s[1]:g}"
        hint = "give the directory of dsim simulate -o DIR --step-log, and --kind timeline or no --kind"
        raise InputError("--window", "belongs to timelines", value=text, hint=hint)


def _of_sweep(folder: Path, asked: _Asked, kind: Kind | None) -> Figures:
    """Return the figures that a sweep asks for, or the one that the options do."""
    from experiments.plots import draw
    from experiments.store import load_sweep

    results = load_sweep(folder)
    results.check_complete(folder)
    asked.need_kind()
    specs: Sequence[PlotSpec] = results.plots if kind is None else (_spec(asked, kind, results),)
    if not specs:
        hint = "name one with --kind, -x and -y, or add plots to the sweep file"
        raise InputError(str(folder), "is of a sweep without plots", hint=hint)
    summary = results.summary
    return {spec.file: draw(spec, summary, published=results.published) for spec in specs}


def _spec(asked: _Asked, kind: Kind, results: SweepResults) -> PlotSpec:
    """Return the figure that the options ask for, checked as an entry of a sweep file is."""
    from experiments.plots import parse_plot, plot_section

    varying = [factor.key for factor in results.outline.factors if len(factor.choices) > 1]
    with _named_by_option(kind):
        return parse_plot(plot_section(kind, asked.section()), columns=list(results.summary.columns), varying=varying)


def _assigned(option: str, text: str, example: str, *, one: bool = False) -> tuple[str, object]:
    """Return a name and its value, which is written as in YAML.

    Args:
        one: the value is no list and no mapping.
    """
    from dsim.yamlfile import parse_yaml

    what = "a column" if one else "a key"
    name, equals, value = text.partition("=")
    if not name.strip() or not equals or not value.strip():
        raise InputError(option, f"must be {what} and its value", value=text, hint=f"as in {example}")
    field = parse_yaml(f"value: {value.strip()}".encode(), file=option).need("value")
    if one and isinstance(field.value, tuple | dict):
        raise InputError(option, "must be one value", value=text, hint=f"as in {example}")
    return name.strip(), field.plain


@contextlib.contextmanager
def _named_by_option(kind: Kind | None) -> Iterator[None]:
    """Let errors in the keys of a figure name the options that gave them."""
    from experiments.plots import GIVEN

    try:
        yield
    except InputError as error:
        if kind is None or error.where.partition(":")[0] != GIVEN:
            raise
        raise _by_option(error, kind) from None


def _by_option(error: InputError, kind: Kind) -> InputError:
    """Return the error with the option's name for that of the key."""
    from experiments.plots import COMMON_KEYS, OWN_KEYS

    options = {"x": "-x", "y": "-y", "series": "--series", "where": "--where", "title": "--title"}
    if error.rule.startswith("is not a known key"):
        name = str(error.value)
        if name not in {*COMMON_KEYS, *OWN_KEYS}:
            return InputError("--set", "is not a known key", value=name, hint=error.hint)
        rule = f"has no use in a figure of kind {kind.value}"
        if name in options:
            return InputError(options[name], rule, hint="leave it out")
        return InputError("--set", rule, value=name, hint="leave it out")
    key, _, rest = (error.name or "").partition(".")
    key = key.partition("[")[0]
    if key in OWN_KEYS or (key in COMMON_KEYS and key not in options):
        hint = f"add --set {key}=COLUMN" if error.rule == "is missing" else error.hint
        return InputError("--set", error.rule, name=error.name, value=error.value, hint=hint)
    value = error.value if error.value is not None else rest or None
    return InputError(options.get(key, "--kind"), error.rule, value=value, hint=error.hint)


def _rendered(figures: Figures, forms: Sequence[str]) -> dict[str, bytes]:
    from experiments.plots import rendered

    return {
        f"{name}.{form}": rendered(figure, "svg" if form == "svg" else "png")
        for name, figure in figures.items()
        for form in forms
    }
