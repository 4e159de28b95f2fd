"""What a figure shows: the `plots` entries of a sweep file, checked against the columns there are."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dsim.errors import nearest
from dsim.yamlfile import Field, Scalar, Section
from experiments.plots.labels import quantity


class Kind(enum.Enum):
    """Kinds of figures."""

    ATTAINMENT_RATE = "attainment-rate"
    ATTAINMENT_SCALE = "attainment-scale"
    GOODPUT_BARS = "goodput-bars"
    STAIRCASE = "staircase"
    PARETO = "pareto"
    BREAKDOWN = "breakdown"
    CDF = "cdf"
    TIMELINE = "timeline"
    RATIO = "ratio"
    HEATMAP = "heatmap"
    BANDWIDTH = "bandwidth"
    LINE = "line"


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line.

    Args:
        x: where, in the unit of the data.
        label: its name in the legend.
    """

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSpec:
    """One figure.

    Args:
        file: name of its files without the ending.
        x: column along the axis (of the bars, for bars); what it means depends on the kind.
        y: columns shown.
        series: column whose values are told apart.
        also: further columns whose values make series of their own.
        where: values that the rows shown have in these columns.
        target: attainment (0 to 1) whose crossings are marked.
        marks: vertical lines.
        mark: column with where each series has a vertical line.
        value: column printed in the cells of a heat map.
        best: column with what is best in a cell.
        labels: column with the name of each point of the front.
        price_usd_per_h: of one GPU; None where no cost is shown.
        max_rate_per_s: end of the axis of a staircase.
        share: stacked parts as shares of the whole.
        log_x, log_y: whether the axis is logarithmic.
    """

    kind: Kind
    file: str
    title: str = ""
    x: str | None = None
    y: tuple[str, ...] = ()
    series: str | None = None
    also: tuple[str, ...] = ()
    where: Mapping[str, Scalar] = field(default_factory=dict)
    xlabel: str | None = None
    ylabel: str | None = None
    log_x: bool = False
    log_y: bool = False
    target: float = 0.9
    marks: tuple[Mark, ...] = ()
    mark: str | None = None
    value: str | None = None
    best: str | None = None
    labels: str | None = None
    price_usd_per_h: float | None = None
    max_rate_per_s: float | None = None
    share: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """What one kind of figure takes.

    Args:
        about: what it shows.
        x, y: default columns; None where the key must be given.
        keys: its own keys beside the common ones.
        otherwise: default columns of y where there is none of those.
        no: common keys that it has no use for.
        needs: own keys that must be given.
    """

    about: str
    x: str | None = None
    y: tuple[str, ...] | None = None
    keys: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    no: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    log_x: bool = False


#: Parts of the latency: those that add up to all of it, and those before decoding.
ALL_PARTS = tuple(f"parts_s.{part}" for part in ("prefill_queue", "prefill", "transfer", "decode_queue", "decode"))
TTFT_PARTS = tuple(f"ttft_parts_s.{part}" for part in ("queue", "prefill", "transfer", "decode_admission"))

FORMS: Mapping[Kind, Form] = {
    Kind.ATTAINMENT_RATE: Form(
        "SLO attainment against the rate, with the target and where each series falls below it",
        x="rate_per_gpu",
        y=("attainment.both",),
        keys=("target", "marks"),
    ),
    Kind.ATTAINMENT_SCALE: Form(
        "SLO attainment against the SLO scale, with the target and where each series reaches it",
        x="slo_scale",
        y=("attainment.both",),
        keys=("target", "marks"),
    ),
    Kind.GOODPUT_BARS: Form("goodput of each placement with its interval", x="placement", y=("goodput_per_gpu_per_s",)),
    Kind.STAIRCASE: Form(
        "GPUs, and their cost, against the rate that must be served: whole copies of each series' placement",
        x="num_gpus",
        y=("goodput_per_gpu_per_s",),
        keys=("price_usd_per_h", "max_rate_per_s"),
    ),
    Kind.PARETO: Form(
        "throughput per GPU against the speed that a user sees, with the front of the points that none beats in both",
        x="tpot_s.mean",
        y=("output_tokens_per_s",),
        keys=("labels",),
    ),
    Kind.BREAKDOWN: Form(
        "where the latency goes, stacked, one bar for each value of x",
        x="placement",
        y=ALL_PARTS,
        otherwise=TTFT_PARTS,
        keys=("share",),
    ),
    Kind.CDF: Form("distributions of latencies over requests", y=("quantiles.ttft_s",), keys=("log",), no=("x",)),
    Kind.TIMELINE: Form("what each instance does when; drawn by `dsim plot` from the folder of a run", no=("x", "y")),
    Kind.RATIO: Form(
        "a metric against the prefill : decode ratio of the placement in x", x="placement", y=("goodput_per_gpu_per_s",)
    ),
    Kind.HEATMAP: Form(
        "a value over two factors, printed in each cell, and what is best there",
        x="slo.ttft",
        y=("slo.tpot",),
        keys=("value", "best"),
        no=("series",),
        needs=("value",),
    ),
    Kind.BANDWIDTH: Form(
        "a metric against the bandwidth of the KV link",
        x="profile_set.handover.bandwidth_bytes_per_s",
        keys=("marks",),
        log_x=True,
    ),
    Kind.LINE: Form("any column against any other, by series", keys=("log", "marks", "mark", "target")),
}

#: Key to its meaning, for all kinds and for some.
COMMON_KEYS: Mapping[str, str] = {
    "kind": "kind of figure: " + ", ".join(kind.value for kind in Kind if kind is not Kind.TIMELINE),
    "file": "name of the files, without ending; default: the kind",
    "title": "above the figure",
    "x": "column along the axis",
    "y": "column shown, or a list of them: those of one unit share their axes",
    "series": "column whose values get lines, bars or points of their own",
    "where": "mapping of columns to the value that the rows shown have",
    "xlabel": "instead of the label that x has by itself; with the unit in brackets",
    "ylabel": "likewise for y",
}
OWN_KEYS: Mapping[str, str] = {
    "target": "share of requests, 0 to 1, drawn as a line",
    "marks": "list of vertical lines, each with x and label",
    "mark": "column that says where each series has a vertical line, such as Lm",
    "log": "logarithmic axes: x, y or xy; of distributions x",
    "value": "column printed in each cell",
    "best": "column that says what is best in each cell",
    "labels": "column with the name of each point",
    "price_usd_per_h": "price of a GPU for an hour, USD",
    "max_rate_per_s": "end of the axis, requests/s",
    "share": "true: parts as shares of the whole",
}

#: Kinds that show one column of `y`.
_ONE_COLUMN = (Kind.GOODPUT_BARS, Kind.STAIRCASE, Kind.PARETO, Kind.HEATMAP)
#: Kinds along whose axis values stand by name.
_BY_NAME = (Kind.GOODPUT_BARS, Kind.BREAKDOWN, Kind.HEATMAP, Kind.RATIO)

#: Letters of a list of columns in an error at most.
_LONG = 200

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def parse_plot(section: Section, *, columns: Collection[str], varying: Collection[str] = ()) -> PlotSpec:
    """Return the figure that an entry of `plots` asks for.

    Args:
        columns: dotted names of what rows have: factors and metrics.
        varying: factors of more than one value; those that the entry forgets are told apart as series are.

    Raises:
        InputError: a key that the kind does not have, a column that there is none of, a value out of range, or several
            rows for one cell.
    """
    kind = section.need("kind").choice(Kind)
    if kind is Kind.TIMELINE:
        hint = "draw it with dsim plot DIR --kind timeline from the folder of dsim simulate -o DIR --step-log"
        raise section.need("kind").error("is drawn from one run, not from a sweep", hint)
    form = FORMS[kind]
    section.only([key for key in (*COMMON_KEYS, *form.keys) if key not in form.no])
    known = _Columns(columns)
    for key in form.needs:
        section.need(key)
    x = None if "x" in form.no else known.one(section, "x", form.x)
    if kind in _BY_NAME:
        known.exact(section, "x")
    if kind is Kind.STAIRCASE:
        _one_copy(section)
        _check_staircase(section, x, known.several(section, form)[0])
    price, rate = _positive(section, "price_usd_per_h"), _positive(section, "max_rate_per_s")
    log = _log(section, kind)
    spec = PlotSpec(
        kind=kind,
        file=_file(section, kind),
        title=section.text("title", ""),
        x=x,
        y=_columns_shown(section, kind, known),
        series=known.exact(section, "series"),
        where=_where(section, known),
        xlabel=section.text("xlabel") if "xlabel" in section else None,
        ylabel=section.text("ylabel") if "ylabel" in section else None,
        log_x=form.log_x or "x" in log,
        log_y="y" in log,
        target=section.need("target").number(above=0, below=1) if "target" in section else 0.9,
        marks=_marks(section),
        mark=known.optional(section, "mark"),
        value=known.optional(section, "value"),
        best=known.exact(section, "best"),
        labels=known.exact(section, "labels"),
        price_usd_per_h=price,
        max_rate_per_s=rate,
        share=section.flag("share", default=False),
    )
    return replace(spec, also=_also(section, spec, varying))


def _columns_shown(section: Section, kind: Kind, known: _Columns) -> tuple[str, ...]:
    """Return the columns of `y`.

    Raises:
        InputError: there are more than the kind shows, or they do not stack.
    """
    names = known.several(section, FORMS[kind])
    item = section.get("y")
    if item is not None and len(names) > 1 and kind in _ONE_COLUMN:
        raise item.error(f"has {len(names)} columns, and kind {kind.value} shows one", "write one figure for each")
    units = {quantity(name).unit or "no unit" for name in names}
    if kind is Kind.BREAKDOWN and len(units) > 1:
        rule = f"has columns of different units, which do not stack: {', '.join(sorted(units))}"
        raise (item or section.field).error(rule, "name columns of one unit")
    return names


def _also(section: Section, spec: PlotSpec, varying: Collection[str]) -> tuple[str, ...]:
    """Return the factors that vary among rows of one point and one series, and so make series of their own.

    Raises:
        InputError: the figure has no series.
    """
    if spec.kind is Kind.PARETO or not set(spec.where) <= set(varying):
        return ()
    shown = {spec.series, *spec.where}
    if spec.kind not in {Kind.CDF, Kind.STAIRCASE}:
        shown |= {spec.x, *(spec.y if spec.kind is Kind.HEATMAP else ())}
    left = tuple(name for name in varying if name not in shown)
    # A metric along the axis, or a series of one, may go with a factor: only rows can tell.
    follows = [name for name in (spec.x, spec.series) if name is not None and name not in varying]
    if len(left) <= len(follows):
        return ()
    if spec.kind is Kind.HEATMAP:
        hint = f"make {left[0]} the x or the y, or choose one of its values with `where`"
        raise section.field.error_of_key(f"would have several rows in one cell: {' and '.join(left)} vary", hint)
    return left


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns that there are; an interval is known by its name and by its limits."""

    names: Collection[str]

    def check(self, item: Field) -> str:
        name = item.text()
        if not self.has(name):
            raise item.error("is no column of the rows", nearest(name, sorted(self.bases())))
        return name

    def has(self, name: str) -> bool:
        return name in self.names or f"{name}.best" in self.names

    def bases(self) -> set[str]:
        return {name.removesuffix(".best") for name in self.names if not name.endswith((".low", ".high"))}

    def one(self, section: Section, key: str, default: str | None) -> str:
        item = section.get(key)
        if item is not None:
            return self.check(item)
        if default is None or not self.has(default):
            instead = "" if default is None else f", since there is no {default}"
            said = ", ".join(sorted(self.bases()))
            said = said if len(said) < _LONG else f"{said[:_LONG]}..., all in docs/sweeps.md"
            raise section.field.error_of_key(
                f"needs the key {key}{instead}", f"add the column to show; there are {said}"
            )
        return default

    def several(self, section: Section, form: Form) -> tuple[str, ...]:
        item = section.get("y")
        if "y" in form.no:
            return ()
        if item is None:
            for defaults in (form.y or (), form.otherwise):
                present = tuple(name for name in defaults if self.has(name))
                if present:
                    return present
            return (self.one(section, "y", None),)
        items = item.items() if isinstance(item.value, tuple) else (item,)
        if not items:
            raise item.error("must not be empty")
        names = [self.check(item) for item in items]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise items[i].error("stands twice", "keep one of the two")
        return tuple(names)

    def exact(self, section: Section, key: str) -> str | None:
        """Return the column at a key whose values are shown as they are, so that an interval is none."""
        item = section.get(key)
        if item is None:
            return None
        name = self.check(item)
        if name not in self.names:
            raise item.error("is an interval", f"name {name}.best")
        return name

    def optional(self, section: Section, key: str) -> str | None:
        item = section.get(key)
        return None if item is None else self.check(item)


def _one_copy(section: Section) -> None:
    """Refuse a goodput of all copies together: the GPUs beside it are those of one."""
    item = section.get("y")
    items = () if item is None else item.items() if isinstance(item.value, tuple) else (item,)
    for each in items:
        group, dot, name = str(each.value).removesuffix(".best").rpartition(".")
        if name == "total_per_s":
            raise each.error("is of all copies together", f"name {group}{dot}goodput_per_gpu_per_s")


def _check_staircase(section: Section, x: str | None, y: str) -> None:
    """Refuse stairs of anything but GPUs over a rate."""
    item = section.get("x")
    if item is not None and x is not None and not x.endswith("gpus"):
        raise item.error("is no number of GPUs", "name num_gpus, or leave x out")
    item = section.get("y")
    if item is not None and not y.removesuffix(".best").endswith("_per_s"):
        raise item.error("is no rate", "name goodput_per_gpu_per_s, or leave y out")


def _log(section: Section, kind: Kind) -> str:
    """Return the axes that are logarithmic; shares of requests, which begin at 0, have none."""
    item = section.get("log")
    if item is None:
        return ""
    known = ("x",) if kind is Kind.CDF else ("x", "y", "xy")
    if (log := item.text()) not in known:
        raise item.error("is not known", "expected x, y or xy" if "y" in known else "expected x")
    return log


def _file(section: Section, kind: Kind) -> str:
    name = section.text("file", kind.value)
    if not _FILE.fullmatch(name):
        hint = "letters, digits, - and _, as in fig8a"
        raise section.need("file").error("must be a plain name of at most 100 characters", hint)
    return name


def _positive(section: Section, key: str) -> float | None:
    item = section.get(key)
    return None if item is None else item.number(above=0)


def _where(section: Section, known: _Columns) -> Mapping[str, Scalar]:
    if "where" not in section:
        return {}
    chosen: dict[str, Scalar] = {}
    mapping = section.section("where")
    for name, item in mapping.fields.items():
        if not known.has(name):
            raise item.error_of_key("is no column of the rows", nearest(name, sorted(known.bases())))
        if name not in known.names:
            raise item.error_of_key("is an interval", f"name {name}.best")
        if isinstance(item.value, tuple | dict):
            raise item.error("must be one value", "write one figure for each value")
        chosen[name] = item.value
    return chosen


def _marks(section: Section) -> tuple[Mark, ...]:
    if "marks" not in section:
        return ()
    found = []
    for item in section.need("marks").items():
        entry = item.section().only(("x", "label"))
        found.append(Mark(entry.number("x"), entry.text("label")))
    return tuple(found)
