"""Sweep files: what is simulated over which factors, what is drawn, and what was published."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dsim.errors import InputError, nearest
from dsim.hugging_face import is_config
from dsim.version import __version__
from dsim.workload import names_a_file
from dsim.yamlfile import Field, Scalar, Section, read_yaml
from experiments.base import SEEDS, parse_setting
from experiments.edits import edited, parse_assignment, plain
from experiments.expected import expected
from experiments.factors import MOST_TASKS, Factor, check_count, parse_factors, row_value
from experiments.keys import KEYS as SETTING_KEYS
from experiments.measures import columns
from experiments.plots import PlotSpec, check_plot, parse_plot
from experiments.settings import Measure, Setting

if TYPE_CHECKING:
    from collections.abc import Collection

#: The version of the format.
FORMAT = 1

#: Keys of a sweep file and of its parts, and what they mean.
FILE_KEYS = {
    "dsim_sweep": f"version of the format: {FORMAT}; needed",
    "name": "name of the sweep and of its folder in `results`; default: the file's name",
    "about": "what is measured, what is simulated, and how far it is from what was published; a sentence first; needed",
    "base": "the setting that all tasks share; needed",
    "factors": "what varies: every combination of their values is run, the last factor varying fastest",
    "replications": "runs of every combination, with seeds `seed`, `seed` + 1, ...; default 1",
    "jobs": "at most so many processes, for tasks that time something; default: no limit but `--jobs`",
    "outputs": "columns kept in summary.csv; the name of a group such as `ttft_s` keeps all of it; default: all",
    "plots": "list of figures",
    "published": "numbers to compare with",
    "quick": "what `--quick` sets: dotted paths as in `--set`, and values",
}
PUBLISHED_KEYS = {
    "source": "where they were published; needed",
    "points": "list of points, each with `where` and the columns that were published; needed",
}
POINT_KEYS = {
    "where": "mapping of factors to the values that choose the combinations",
    "note": "a remark on this point",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: Keys of a profile file, which the loader of profiles knows.
_FREE = "profile_set."
#: Keys of a setting that name files, relative to the sweep file.
_FILE_KEYS = ("profile", "prefill_profile", "decode_profile", "colocated_profile", "trace")
#: Keys that name a file or something else.
_MAYBE_FILE_KEYS = ("model", "workload", "arrivals")
#: Columns of the summary that are no metric.
COUNTS = ("replications", "failed", "missing")


@dataclass(frozen=True, slots=True)
class Point:
    """One published number.

    Args:
        where: factor values, by factor.
        column: the metric.
        value: as published.
    """

    where: Mapping[str, Scalar]
    column: str
    value: float
    note: str
    field: Field


@dataclass(frozen=True, slots=True)
class Published:
    """Published numbers and their source."""

    source: str = ""
    points: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class Outline:
    """A sweep file without its settings: what it varies and what becomes of the rows.

    Args:
        tree: the file with all changes made; the folder of the results has it as `sweep.yaml`.
        folder: of the file; paths in it start there.
        outputs: metrics kept in summary.csv; empty: all.
        measured: every column that its measures may give.
    """

    tree: Field
    folder: Path
    name: str
    about: str
    factors: tuple[Factor, ...]
    replications: int
    jobs: int | None
    outputs: tuple[str, ...]
    plots: tuple[PlotSpec, ...]
    published: Published
    measured: frozenset[str]

    @property
    def keys(self) -> tuple[str, ...]:
        """The factors' columns."""
        return tuple(factor.key for factor in self.factors)

    @property
    def first_sentence(self) -> str:
        """The first sentence of `about`."""
        return re.split(r"(?<=[.!?])\s", self.about, maxsplit=1)[0]

    @property
    def num_combinations(self) -> int:
        """Combinations of factor values."""
        return math.prod(len(factor.choices) for factor in self.factors)

    def values(self) -> Iterator[tuple[Scalar, ...]]:
        """Yield the factor values of every combination, in order."""
        for combination in itertools.product(*(factor.choices for factor in self.factors)):
            yield tuple(choice.value for choice in combination)

    @property
    def resolved(self) -> Mapping[str, object]:
        """The file as plain values, its files' names absolute: the same from whatever folder it was read."""
        return _with_absolute_paths(plain(self.tree), self.folder)

    def yaml(self) -> str:
        """Return the file's text, from which the same sweep can be run again from any folder of this machine."""
        return f"# dsim {__version__}\n" + yaml.safe_dump(dict(self.resolved), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True, slots=True)
class Task:
    """One run.

    Args:
        id: of its content: setting, seed, and the version of dsim.
        factors: value by factor.
        replication: counted from 0.
        profiles: SHA-256 of the latency profiles, by role.
    """

    id: str
    factors: Mapping[str, Scalar]
    replication: int
    profiles: Mapping[str, str]
    seed: int
    setting: Setting


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep, ready to run: every task is known to be valid."""

    outline: Outline
    tasks: tuple[Task, ...]


def read_outline(path: Path, *, assignments: Sequence[str] = (), quick: bool = False) -> Outline:
    """Return what a sweep file says apart from its settings.

    Raises:
        InputError: anything in it is wrong.
    """
    tree = read_yaml(path).field
    _check_keys(tree.section())
    check_count(tree.section())
    original = _factors(tree.section())
    quick_changes = _quick_changes(tree.section())
    changes = [*(quick_changes if quick else ()), *(parse_assignment(text) for text in assignments)]
    for name, value in changes:
        _check_change(tree, name, value)
        tree = edited(tree, name, value)
    _check_keys(tree.section())
    check_count(tree.section())
    values = tree.value
    assert isinstance(values, dict)
    kept = {key: field for key, field in values.items() if key != "quick"}
    if "name" not in kept:
        kept["name"] = Field(tree.file, 1, "name", _name_of(path))
    return _outline(replace(tree, value=kept), original, folder=path.parent)


def read_sweep(path: Path, *, assignments: Sequence[str] = (), quick: bool = False) -> Sweep:
    """Return the sweep that a file describes, with the changes asked for.

    Raises:
        InputError: anything in it is wrong, the setting of any task included, and of those of its quick variant.
    """
    outline = read_outline(path, assignments=assignments, quick=quick)
    tasks = tuple(_tasks(outline))
    sweep = Sweep(replace(outline, plots=tuple(_plots_of_rows(outline, tasks))), tasks)
    if not quick and "quick" in read_yaml(path):
        read_sweep(path, assignments=assignments, quick=True)
    return sweep


def _name_of(path: Path) -> str:
    """Return the name of a sweep whose file gives it none: the file's own."""
    if not _NAME.fullmatch(path.stem):
        hint = "add a name: of letters, digits, - and _"
        raise InputError(f"{path}:1", "is the file's name and cannot be the sweep's", value=path.stem, hint=hint)
    return path.stem


def _check_keys(section: Section) -> None:
    if "dsim_sweep" not in section:
        section.only(FILE_KEYS)
        section.need("dsim_sweep")
    version = section.need("dsim_sweep")
    if type(version.value) is not int or version.value != FORMAT:
        raise version.error(f"is not the format that this dsim reads, {FORMAT}", f"write dsim_sweep: {FORMAT}")
    section.only(FILE_KEYS)


def _factors(section: Section) -> tuple[Factor, ...]:
    field = section.get("factors")
    factors = () if field is None or field.value is None else parse_factors(field.section())
    for factor in factors:
        for choice in factor.choices:
            for number, (path, value) in enumerate(choice.settings):
                _check_path(path, value)
                for other, before in choice.settings[:number]:
                    if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."):
                        rule = f"stands beside {other} on line {before.line}, and one of them would replace the other"
                        raise value.error_of_key(rule, "write them as one")
    return factors


def _check_path(path: str, value: Field) -> None:
    """Refuse a path that is no key of a setting."""
    known = [key.name for key in SETTING_KEYS]
    if path not in known and not path.startswith(_FREE):
        hint = nearest(path, known)
        hint = hint if hint.startswith("did") else "docs/sweeps.md lists the keys of base"
        raise InputError(value.where, "is no key of base", value=path, hint=hint)


def _quick_changes(section: Section) -> list[tuple[str, Field]]:
    """Return what `quick` sets, tried on the file so that it is known to fit even where it is not asked for."""
    field = section.get("quick")
    if field is None:
        return []
    changes = []
    for path, value in field.section().fields.items():
        if not all(path.split(".")):
            raise value.error_of_key("is no dotted path", "as in base.requests")
        root = path.partition(".")[0]
        if root not in FILE_KEYS or root == "quick":
            raise value.error_of_key("is no path of this file", nearest(root, [k for k in FILE_KEYS if k != "quick"]))
        edited(section.field, path, value)
        changes.append((path, value))
    return changes


def _check_change(tree: Field, path: str, value: Field) -> None:
    """Refuse to set what the file does not have, or what a factor sets anyway."""
    root, _, key = path.partition(".")
    if root not in FILE_KEYS or root in ("dsim_sweep", "quick"):
        known = [name for name in FILE_KEYS if name not in ("dsim_sweep", "quick")]
        hint = nearest(root, known)
        if root not in FILE_KEYS and not hint.startswith("did"):
            hint = f"settings are in base, as in base.{path}"
        raise value.error_of_key("is no path of a sweep file", hint)
    if root != "base":
        return
    for factor in _factors(tree.section()):
        for taken in factor.paths:
            if f"{key}.".startswith(f"{taken}.") or f"{taken}.".startswith(f"{key}."):
                hint = f"set factors.{factor.key}.choices instead"
                raise value.error_of_key(f"would have no effect: the factor {factor.key} sets {taken}", hint)


def _outline(tree: Field, original: Sequence[Factor], *, folder: Path) -> Outline:
    section = tree.section()
    name = section.text("name")
    if not _NAME.fullmatch(name):
        raise section.need("name").error("must be a plain name of letters, digits, - and _", "as in fig8-opt13b")
    base = section.section("base")
    factors = _factors(section)
    replications = section.integer("replications", 1, at_least=1, at_most=MOST_TASKS)
    measured = _measured(base, factors)
    known = frozenset(factor.key for factor in factors) | measured | frozenset(COUNTS)
    for factor in factors:
        if factor.key in COUNTS or (factor.key not in factor.paths and _is_column(factor.key, measured)):
            rule = "is the name of a column of results, so a linked factor cannot have it"
            raise factor.field.error_of_key(rule, "call it something else, as in system")
    published = _published(section, [*factors, *original], measured)
    points = tuple(point for point in published.points if _is_run(point, factors))
    if len(points) < len(published.points):
        # What is not run, of a quick sweep say, is not compared; the file in the results' folder has to agree.
        tree = _with_points(tree, [point.field for point in points])
    return Outline(
        tree=tree,
        folder=folder,
        name=name,
        about=section.text("about"),
        factors=factors,
        replications=replications,
        jobs=section.integer("jobs", at_least=1, at_most=1024) if "jobs" in section else None,
        outputs=_outputs(section, measured),
        plots=_plots(section, known, varying=[factor.key for factor in factors if len(factor.choices) > 1]),
        published=replace(published, points=points),
        measured=measured,
    )


def _is_column(name: str, measured: Collection[str]) -> bool:
    """Return whether results may have a column of this name: a metric, a limit of its interval, or a group of some."""
    group, _, last = name.rpartition(".")
    return (
        name in measured
        or (last in ("low", "high") and group in measured)
        or any(column.startswith(f"{name}.") for column in measured)
    )


def _measured(base: Section, factors: Sequence[Factor]) -> frozenset[str]:
    """Return every column that the measures of the sweep may give."""
    chosen = [field for factor in factors for choice in factor.choices for path, field in choice.settings
              if path == "measure"]  # fmt: skip
    if not chosen and "measure" in base:
        chosen = [base.need("measure")]
    measures = [field.choice(Measure) for field in chosen] or [Measure.SIMULATE]
    return frozenset(name for measure in measures for name in columns(measure))


def _outputs(section: Section, measured: Collection[str]) -> tuple[str, ...]:
    field = section.get("outputs")
    if field is None:
        return ()
    names: list[str] = []
    for item in field.items():
        name = item.text()
        found = [column for column in sorted(measured) if column == name or column.startswith(f"{name}.")]
        if not found:
            groups = {column.rpartition(".")[0] for column in measured if "." in column}
            raise item.error("is no column of this measure", nearest(name, sorted({*groups, *measured})))
        if name in names:
            raise item.error("stands twice", "keep one of the two")
        names.append(name)
    if not names:
        raise field.error("must not be empty", "list columns, or leave the key out to keep all")
    return tuple(names)


def _plots(section: Section, known: Collection[str], *, varying: Collection[str]) -> tuple[PlotSpec, ...]:
    field = section.get("plots")
    if field is None:
        return ()
    specs: dict[str, PlotSpec] = {}
    for item in field.items():
        spec = parse_plot(item.section(), columns=known, varying=varying)
        if spec.file in specs:
            raise item.error_of_key(f"would overwrite the figure {spec.file}", "give each figure its own `file`")
        specs[spec.file] = spec
    return tuple(specs.values())


def _published(section: Section, factors: Sequence[Factor], measured: Collection[str]) -> Published:
    field = section.get("published")
    if field is None:
        return Published()
    inner = field.section().only(PUBLISHED_KEYS)
    source = inner.text("source")
    values: dict[str, list[Scalar]] = {}
    for factor in factors:
        known = values.setdefault(factor.key, [])
        known += [choice.value for choice in factor.choices if choice.value not in known]
    points: list[Point] = []
    for item in inner.need("points").items():
        points += _points(item.section(), values, measured)
    return Published(source, tuple(points))


def _points(section: Section, values: Mapping[str, Sequence[Scalar]], measured: Collection[str]) -> Iterator[Point]:
    where: dict[str, Scalar] = {}
    chosen = section.section("where").fields if "where" in section else {}
    for key, field in chosen.items():
        if key not in values:
            raise InputError(field.where, "is no factor of this sweep", value=key, hint=nearest(key, values))
        # A label stands in rows as it is written.
        value = field.value if field.value in values[key] and isinstance(field.value, str) else row_value(field)
        if value not in values[key]:
            shown = ", ".join(map(str, values[key]))
            raise field.error(
                "is no value of this factor", f"it has {shown if len(shown) < 200 else shown[:200] + '...'}"
            )
        where[key] = value
    metrics = [key for key in section if key not in POINT_KEYS]
    if not metrics:
        raise section.field.error("has no published number", "add a column of the measure, as in attainment.both: 0.9")
    for key in metrics:
        if key not in measured:
            raise InputError(
                section.need(key).where,
                "is no column of this measure",
                value=key,
                hint=nearest(key, [*POINT_KEYS, *sorted(measured)]),
            )
        yield Point(where, key, section.number(key), section.text("note", ""), section.field)


def _is_run(point: Point, factors: Sequence[Factor]) -> bool:
    values = {factor.key: [choice.value for choice in factor.choices] for factor in factors}
    return all(value in values.get(key, ()) for key, value in point.where.items())


def _with_points(tree: Field, points: Sequence[Field]) -> Field:
    assert isinstance(tree.value, dict)
    if not points:
        return replace(tree, value={key: field for key, field in tree.value.items() if key != "published"})
    unique = tuple({id(point): point for point in points}.values())
    published = tree.value["published"]
    assert isinstance(published.value, dict)
    listed = {**published.value, "points": replace(published.value["points"], value=unique)}
    return replace(tree, value={**tree.value, "published": replace(published, value=listed)})


def _with_absolute_paths(tree: object, folder: Path) -> Mapping[str, object]:
    """Return the plain tree of a sweep file with its files' names made absolute, in rows' words as they were."""
    assert isinstance(tree, dict)

    def absolute(setting: Mapping[str, object]) -> dict[str, object]:
        return {
            key: str((folder / value).absolute()) if isinstance(value, str) and is_file(key, value) else value
            for key, value in setting.items()
        }

    def is_file(key: str, value: str) -> bool:
        if key == "model":
            return is_config(str(folder / value))
        return key in _FILE_KEYS or (key in _MAYBE_FILE_KEYS and names_a_file(value, folder=folder))

    factors = {}
    for key, factor in (tree.get("factors") or {}).items():
        choices = factor.get("choices")
        if choices is not None and any(isinstance(choice, str) and is_file(key, choice) for choice in choices):
            choices = [choice if isinstance(choice, dict) else {"label": choice, key: choice} for choice in choices]
        if choices is None:
            factors[key] = factor
        else:
            changed = [absolute(choice) if isinstance(choice, dict) else choice for choice in choices]
            factors[key] = {**factor, "choices": changed}
    return {**tree, "base": absolute(tree["base"]), **({"factors": factors} if factors else {})}


def _tasks(outline: Outline) -> Iterator[Task]:
    base = outline.tree.section().need("base")
    for choices in itertools.product(*(factor.choices for factor in outline.factors)):
        changed = base
        for choice in choices:
            for path, field in choice.settings:
                changed = edited(changed, path, field)
        setting = parse_setting(changed.section(), folder=outline.folder)
        if setting.seed + outline.replications > SEEDS:
            rule = f"leaves no seeds for {outline.replications} replications: the last would be above {SEEDS - 1}"
            raise changed.section().need("seed").error(rule, f"take at most {SEEDS - outline.replications}")
        identity = setting.identity()
        factors = dict(zip(outline.keys, (choice.value for choice in choices), strict=True))
        for replication in range(outline.replications):
            seed = setting.seed + replication
            yield Task(content_id(identity, seed), factors, replication, identity["profiles"], seed, setting)


def _plots_of_rows(outline: Outline, tasks: Sequence[Task]) -> Iterator[PlotSpec]:
    """Yield the figures, which are known to show something."""
    field = outline.tree.section().get("plots")
    if field is None:
        return
    rows = [expected(task.setting, task.factors, others=COUNTS) for task in tasks[:: outline.replications]]
    for item, spec in zip(field.items(), outline.plots, strict=True):
        yield check_plot(item.section(), spec, rows)


def content_id(identity: Mapping[str, object], seed: int) -> str:
    """Return the id of a run's content: the same for the same setting, seed and version of dsim, on any machine."""
    content = {"setting": identity, "seed": seed, "version": __version__}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
