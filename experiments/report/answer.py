"""What `dsim search -o DIR` left: read back, with every fault of the files as one line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsim.errors import InputError
from dsim.nodes import Nodes
from dsim.pools import Placement, Policy
from placement.statistics import Interval

_REMEDY = "run dsim search -o again with this release"


@dataclass(frozen=True, slots=True)
class Node:
    """An object of a JSON file, with the place it stands at."""

    file: str
    path: str
    value: Mapping[str, Any]

    def error(self, key: str, rule: str, value: object = None) -> InputError:
        """Return the error that says that the value of a key breaks a rule."""
        return InputError(self.file, rule, name=f"{self.path}{key}", value=value, hint=_REMEDY)

    def need(self, key: str) -> Any:  # noqa: ANN401 - JSON holds anything; the callers check
        """Return a value that must be there."""
        if key not in self.value:
            raise self.error(key, "is missing")
        return self.value[key]

    def node(self, key: str) -> Node:
        """Return an object."""
        found = self.maybe(key)
        if found is None:
            raise self.error(key, "must be an object")
        return found

    def maybe(self, key: str) -> Node | None:
        """Return an object or None where it is null."""
        value = self.need(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, "must be an object", value)
        return None if value is None else Node(self.file, f"{self.path}{key}.", value)

    def text(self, key: str) -> str:
        """Return a text."""
        value = self.need(key)
        if not isinstance(value, str):
            raise self.error(key, "must be a text", value)
        return value

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, "must be a number", value)
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """Return a number or None where it is null."""
        return None if self.need(key) is None else self.number(key)

    def whole(self, key: str) -> int:
        """Return a whole number >= 0."""
        value = self.number(key)
        if value < 0 or not value.is_integer():
            raise self.error(key, "must be a whole number >= 0", value)
        return int(value)

    def flag(self, key: str) -> bool:
        """Return a truth value."""
        value = self.need(key)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self.need(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of texts", value)
        return tuple(value)

    def numbers(self, key: str) -> dict[str, float] | None:
        """Return an object of numbers or None where it is null."""
        found = self.maybe(key)
        return None if found is None else {name: found.number(name) for name in found.value}

    def interval(self, key: str) -> Interval | None:
        """Return an interval or None where it is null."""
        found = self.maybe(key)
        return None if found is None else Interval(found.number("low"), found.number("best"), found.number("high"))


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One candidate as in `trials` of docs/output.md."""

    placement: Placement
    replicas: int
    state: str
    reasons: tuple[str, ...]
    goodput_per_gpu_per_s: Interval | None
    total_per_s: Interval | None
    bound_per_gpu_per_s: float | None
    failed_at_per_gpu_per_s: float | None
    tied: bool
    tied_in_kind: bool
    replications: int | None
    rate_per_s: float | None
    attainment: Mapping[str, float] | None
    utilization: Mapping[str, float] | None
    limiting_role: str | None
    ttft_parts_s: Mapping[str, float] | None
    load: float | None

    @property
    def label(self) -> str:
        """The notation with policy and token budget."""
        return self.placement.label

    @property
    def num_gpus(self) -> int:
        """GPUs of one copy."""
        return self.placement.num_gpus

    @property
    def fate(self) -> str:
        """Its state, those pruned without a simulation apart."""
        bounded = self.state == "PRUNED" and self.failed_at_per_gpu_per_s is None
        return "BOUNDED" if bounded else self.state


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Attainment of one placement at one rate."""

    rate_per_gpu_per_s: float
    attainment: Interval


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A latency profile that the search used for a role."""

    name: str
    engine: str
    sha256: str
    source: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The files of one search.

    Args:
        options: those of config.yaml, by long name without dashes.
        curves: by placement label, rates rising.
        question: what was asked, as `question` of docs/output.md.
    """

    trials: tuple[TrialRow, ...]
    disaggregated: TrialRow | None
    colocated: TrialRow | None
    ratio: Interval | None
    most_total: TrialRow | None
    transient: bool
    num_requests: int | None
    model: str
    hugging_face: str
    gpu: str
    num_gpus: int
    gpus_per_node: int
    slo: str
    attainment_target: float
    confidence: float
    mode: str
    affinity: str
    workload: str
    arrivals: str
    profiles: Mapping[str, ProfileRow]
    seed: int
    probes: int
    requests: int
    version: str
    warnings: tuple[str, ...] = ()
    extrapolated: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    curves: Mapping[str, tuple[CurvePoint, ...]] = field(default_factory=dict)
    question: Mapping[str, object] = field(default_factory=dict)

    @property
    def complete(self) -> tuple[TrialRow, ...]:
        """The trials with a goodput, best first."""
        return tuple(t for t in self.trials if t.state == "COMPLETE" and _sustains(t))

    @property
    def recommended(self) -> TrialRow | None:
        """The best of both kinds."""
        kinds = [trial for trial in (self.disaggregated, self.colocated) if trial is not None]
        return min(kinds, key=_rank, default=None)

    @property
    def other(self) -> TrialRow | None:
        """The best of the other kind than the recommended one's."""
        recommended = self.recommended
        if recommended is None:
            return None
        return self.disaggregated if recommended.placement.is_colocated else self.colocated

    @property
    def alternative(self) -> TrialRow | None:
        """What the recommendation is held against: the best of the other kind, else the runner-up."""
        others = [trial for trial in self.complete if trial.placement != getattr(self.recommended, "placement", None)]
        return self.other or (others[0] if others else None)

    @property
    def advantage(self) -> Interval | None:
        """Goodput per GPU of the recommended / of the best of the other kind."""
        if self.ratio is None or self.recommended is None or not self.recommended.placement.is_colocated:
            return self.ratio
        return Interval(1 / self.ratio.high, 1 / self.ratio.best, 1 / self.ratio.low)


def read_answer(folder: Path) -> Answer:
    """Return what a search left in a folder.

    Raises:
        InputError: a file is missing, cannot be read, or does not hold what this release writes.
    """
    top = _read_json(folder / "result.json")
    best, question = top.node("best"), top.node("question")
    trials = top.need("trials")
    if not isinstance(trials, list) or not all(isinstance(item, dict) for item in trials):
        raise top.error("trials", "must be a list of objects")
    requests = question.maybe_number("num_requests")
    return Answer(
        trials=tuple(_trial(Node(top.file, f"trials.{i}.", item)) for i, item in enumerate(trials)),
        disaggregated=_maybe_trial(best, "disaggregated"),
        colocated=_maybe_trial(best, "colocated"),
        ratio=best.interval("ratio"),
        most_total=_maybe_trial(top, "most_total"),
        transient=top.flag("transient"),
        num_requests=None if requests is None else int(requests),
        model=top.text("model"),
        hugging_face=top.text("hugging_face"),
        gpu=top.text("gpu"),
        num_gpus=top.whole("num_gpus"),
        gpus_per_node=question.whole("gpus_per_node"),
        slo=question.text("slo"),
        attainment_target=top.number("attainment_target"),
        confidence=question.number("confidence"),
        mode=question.text("mode"),
        affinity=question.text("affinity"),
        workload=top.text("workload"),
        arrivals=top.text("arrivals"),
        profiles={role: _profile(top.node("profiles").node(role)) for role in top.node("profiles").value},
        seed=top.whole("seed"),
        probes=top.whole("probes"),
        requests=top.whole("requests"),
        version=top.text("version"),
        warnings=top.texts("warnings"),
        # A key that the first releases did not write.
        extrapolated="extrapolated" in top.value and top.flag("extrapolated"),
        options=_options(folder / "config.yaml"),
        curves=_curves(folder / "attainment.csv"),
        question=question.value,
    )


def _read_json(path: Path) -> Node:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(str(path), "does not exist", hint="give the folder that dsim search -o wrote") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(str(path), f"is no JSON: {error}", hint=_REMEDY) from None
    if not isinstance(value, dict):
        raise InputError(str(path), "must hold an object", hint=_REMEDY)
    return Node(str(path), "", value)


def _maybe_trial(parent: Node, key: str) -> TrialRow | None:
    found = parent.maybe(key)
    return None if found is None else _trial(found)


def _trial(node: Node) -> TrialRow:
    limiting = node.need("limiting_role")
    replications = node.maybe_number("replications")
    return TrialRow(
        placement=_placement(node),
        replicas=node.whole("replicas"),
        state=node.text("state"),
        reasons=node.texts("reasons"),
        goodput_per_gpu_per_s=node.interval("goodput_per_gpu_per_s"),
        total_per_s=node.interval("total_per_s"),
        bound_per_gpu_per_s=node.maybe_number("bound_per_gpu_per_s"),
        failed_at_per_gpu_per_s=node.maybe_number("failed_at_per_gpu_per_s"),
        tied=node.flag("tied"),
        tied_in_kind=node.flag("tied_in_kind"),
        replications=None if replications is None else int(replications),
        rate_per_s=node.maybe_number("rate_per_s"),
        attainment=node.numbers("attainment"),
        utilization=node.numbers("utilization"),
        limiting_role=None if limiting is None else node.text("limiting_role"),
        ttft_parts_s=node.numbers("ttft_parts_s"),
        load=node.maybe_number("load"),
    )


def _placement(node: Node) -> Placement:
    policy = Policy.PREFILL_FIRST
    if node.need("policy") is not None:
        try:
            policy = Policy(node.text("policy"))
        except ValueError:
            raise node.error("policy", "is no policy", node.text("policy")) from None
    budget = node.maybe_number("token_budget")
    where = f"{node.file}: {node.path}placement"
    placement = Placement.parse(
        node.text("placement"), policy=policy, token_budget=None if budget is None else int(budget), where=where
    )
    if "layout" not in node.value:
        return placement
    at = node.node("layout")
    nodes = Nodes(at.whole("num_gpus"), at.whole("gpus_per_node"), side_by_side=at.flag("side_by_side"))
    if not placement.packs(nodes):
        raise at.error("num_gpus", f"are too few for {placement}", nodes.num_gpus)
    return placement.on(nodes)


def _profile(node: Node) -> ProfileRow:
    return ProfileRow(node.text("name"), node.text("engine"), node.text("sha256"), node.text("source"))


def _options(path: Path) -> dict[str, object]:
    from dsim.yamlfile import read_yaml

    return {key: value.plain for key, value in read_yaml(path).fields.items()}


def _curves(path: Path) -> dict[str, tuple[CurvePoint, ...]]:
    """Return the curves, none where no placement sustains any rate and so none were drawn."""
    if not path.exists():
        return {}
    curves: dict[str, list[CurvePoint]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                spread = Interval(*(float(row[f"attainment.{name}"]) for name in ("low", "best", "high")))
                point = CurvePoint(float(row["rate_per_gpu_per_s"]), spread)
                curves.setdefault(row["placement"], []).append(point)
            except (KeyError, TypeError, ValueError):
                raise InputError(f"{path}:{number}", "is no row of an attainment curve", hint=_REMEDY) from None
    return {label: tuple(points) for label, points in curves.items()}


def _sustains(trial: TrialRow) -> bool:
    return trial.goodput_per_gpu_per_s is not None and trial.goodput_per_gpu_per_s.best > 0


def _rank(trial: TrialRow) -> tuple[float, int, str]:
    goodput = trial.goodput_per_gpu_per_s
    return (-(goodput.best if goodput is not None else 0.0), trial.num_gpus, trial.label)
