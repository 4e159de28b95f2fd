"""The parts of a search's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsim.profile import Profile
from dsim.slo import Slo
from dsim.version import __version__
from experiments.report import words
from experiments.report.answer import Answer, TrialRow
from experiments.report.command import search_command
from experiments.report.evidence import ProfileEvidence, assumptions, evidence
from experiments.report.figures import BarFigure, Bars, DotFigure, Dots, Figure, Line, LineFigure, Spread
from experiments.report.markup import Content, Html, bullets, definitions, details, element, joined, table
from experiments.report.page import figure
from experiments.report.sensitivity import CasePoint, RatePoint, Sensitivity, Verdict
from placement.statistics import Interval

_FATES = {
    "COMPLETE": ("compared by long runs", "listed above"),
    "BOUNDED": ("ruled out by arithmetic", "an upper bound on their goodput is below what the best serve"),
    "PRUNED": ("ruled out by short runs", "they fell short at rates that the best serve"),
    "FAILED": ("broke off", "a simulation of them ended with an error"),
    "INFEASIBLE": ("cannot run", "for the reasons below"),
}


@dataclass(frozen=True, slots=True)
class Report:
    """What a report is made of.

    Args:
        model_name: as people write it.
        profiles: by role, those of the search.
        shipped: sha256 by name of the profiles that come with dsim.
        sensitivity: None where it was not asked for, or nothing can be served.
        report_options: options of `dsim report` that differ from the default, to reproduce the page.
    """

    answer: Answer
    model_name: str
    slo: Slo
    profiles: Mapping[str, Profile]
    shipped: Mapping[str, str]
    sensitivity: Sensitivity | None = None
    report_options: tuple[str, ...] = ()
    figures: list[Figure] = field(default_factory=list, compare=False)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under a heading of its own."""

    identity: str
    heading: str
    content: Html


def sections(report: Report) -> tuple[Section, ...]:
    """Return the parts in order; those that have nothing to say are left out."""
    parts: list[tuple[str, str, list[Html]]] = [
        ("recommendation", "Recommendation", _recommendation(report)),
        ("alternatives", "Alternatives", _alternatives(report)),
        ("curves", "How attainment falls with the rate", _curves(report)),
        ("breakdown", "Where the time to the first token goes", _breakdown(report)),
        ("utilisation", "What limits it", _utilization(report)),
        ("sensitivity", "What if the assumptions are off by 20 %?", _sensitivity(report)),
        ("assumptions", "Assumptions", [bullets(assumptions(report.answer, report.profiles))]),
        (
            "evidence",
            "Evidence",
            [profile_evidence(found) for found in evidence(report.profiles, shipped=report.shipped)],
        ),
        ("reproduce", "How to get this again", _reproduce(report)),
    ]
    return tuple(Section(identity, heading, joined(content)) for identity, heading, content in parts if content)


def summary(report: Report) -> Html:
    """Return the question that was asked."""
    answer = report.answer
    nodes = -(-answer.num_gpus // answer.gpus_per_node)
    pairs: list[tuple[Content, Content]] = [
        ("Model", f"{report.model_name} ({answer.hugging_face})"),
        ("GPUs", f"up to {answer.num_gpus} × {answer.gpu}, {words.count_of(nodes, 'node')} of {answer.gpus_per_node}"),
        ("Targets", f"{100 * answer.attainment_target:g}{words.PERCENT} of requests within {words.limits(report.slo)}"),
        ("Traffic", f"{answer.workload} lengths, {answer.arrivals} arrivals"),
    ]
    return element("div", definitions(pairs), class_="question")


def _notes(report: Report) -> list[Html]:
    answer = report.answer
    texts = list(answer.warnings)
    if answer.transient:
        texts.append(
            "Goodput here is that of finite runs from an empty system, a transient that papers report, not a rate that "
            "can be sustained."
        )
    if answer.extrapolated:
        texts.append("Steps outside the valid range of the profiles were allowed: what they take is extrapolated.")
    if answer.version != __version__:
        texts.append(f"The search ran with dsim {answer.version}; this page was made with dsim {__version__}.")
    return [element("p", element("strong", "Note: "), text, class_="note") for text in texts]


def _recommendation(report: Report) -> list[Html]:
    answer, trial = report.answer, report.answer.recommended
    found = [element("p", words.recommendation(answer, report.model_name, report.slo), class_="verdict")]
    if trial is not None:
        found.append(element("p", "Placement: ", element("code", trial.label)))
        found.append(_cards(answer, trial))
    else:
        found.append(element("p", "Relax the limits, give more GPUs, or look below at what rules the placements out."))
    if report.sensitivity is not None:
        found.append(element("p", _robustness(report.sensitivity)))
    return found + _notes(report)


def _cards(answer: Answer, trial: TrialRow) -> Html:
    cards: list[tuple[Content, Content]] = []
    goodput, total, most = trial.goodput_per_gpu_per_s, trial.total_per_s, answer.most_total
    if goodput is not None:
        cards.append(("Requests/s per GPU", [_big(words.short(goodput.best)), words.spread(goodput)]))
    if total is not None:
        copies = "" if trial.replicas == 1 else f", {trial.replicas} copies"
        label = f"Requests/s on {words.count_of(trial.num_gpus * trial.replicas, 'GPU')}{copies}"
        cards.append((label, [_big(words.short(total.best)), words.spread(total)]))
    if answer.advantage is not None and answer.other is not None:
        label = f"Times the best {words.other_kind(trial)} one"
        cards.append((label, [_big(words.short(answer.advantage.best)), words.spread(answer.advantage)]))
    if trial.load is not None:
        cards.append(("Load at that rate", [_big(words.percent(trial.load)), "of the largest stable rate"]))
    if most is not None and most.label != trial.label and most.total_per_s is not None:
        cards.append(
            (
                f"Most in total on {answer.num_gpus} GPUs",
                [_big(words.short(most.total_per_s.best)), f"{most.replicas} × {most.label}"],
            )
        )
    return element("div", definitions(cards), class_="cards")


def _big(value: Html) -> Html:
    return element("strong", value)


def _alternatives(report: Report) -> list[Html]:
    answer = report.answer
    found: list[Html] = []
    if answer.complete:
        found.append(_complete(answer))
    states = Counter(trial.fate for trial in answer.trials)
    runs = f"{words.count_of(answer.probes, 'run')} of {answer.requests:,} requests"
    found.append(element("p", f"{words.count_of(len(answer.trials), 'placement')} considered in {runs}:"))
    rows = [[what, f"{states[fate]:,}", why] for fate, (what, why) in _FATES.items() if fate in states]
    found.append(table("What became of the placements", ["Fate", "Placements", "Why"], rows, texts=(2,)))
    reasons = Counter(reason for t in answer.trials if t.state == "INFEASIBLE" for reason in t.reasons)
    if reasons:
        counted = [[reason, f"{count:,}"] for reason, count in sorted(reasons.items(), key=lambda i: (-i[1], i[0]))]
        caption = "Why placements cannot run (one may have several reasons)"
        listing = table(caption, ["Reason", "Placements"], counted)
        found.append(
            listing if len(counted) <= 12 else details(f"{len(counted)} reasons why placements cannot run", listing)
        )
    failed = [[trial.label, "; ".join(trial.reasons)] for trial in answer.trials if trial.state == "FAILED"]
    if failed:
        found.append(table("Placements whose simulation broke off", ["Placement", "Error"], failed, texts=(1,)))
    found.append(details(f"All {len(answer.trials):,} placements", _everything(answer)))
    return found


def _complete(answer: Answer) -> Html:
    headings = [
        "Placement", "GPUs", "Requests/s per GPU", f"{100 * answer.confidence:g} % interval", "Tie",
        f"Total on {answer.num_gpus} GPUs", "Within TTFT", "Within TPOT", "Limited by", "Busy", "Of saturation",
    ]  # fmt: skip
    recommended = answer.recommended
    marked = next((i for i, t in enumerate(answer.complete) if recommended and t.label == recommended.label), None)
    caption = "Placements compared by long runs, best first; the recommended one is marked"
    return table(
        caption, headings, [_complete_row(answer, trial) for trial in answer.complete], texts=(4, 8, 9), marked=marked
    )


def _complete_row(answer: Answer, trial: TrialRow) -> list[Content]:
    goodput, total = trial.goodput_per_gpu_per_s, trial.total_per_s
    met = trial.attainment or {}
    return [
        element("code", trial.label),
        str(trial.num_gpus),
        None if goodput is None else words.short(goodput.best),
        None if goodput is None else words.spread(goodput),
        _tie(answer, trial),
        None if total is None else words.short(total.best),
        words.percent(met["ttft"]) if "ttft" in met else "–",
        words.percent(met["tpot"]) if "tpot" in met else "–",
        trial.limiting_role or "–",
        [element("div", role, " ", words.percent(share), class_="range") for role, share in _by_role(trial)],
        "–" if trial.load is None else words.percent(trial.load),
    ]


def _tie(answer: Answer, trial: TrialRow) -> str:
    if trial is answer.complete[0]:
        return "best"
    if trial.tied:
        return "with the best"
    kin = [t for t in answer.complete if t.tied_in_kind and words.kind(t) == words.kind(trial)]
    if kin and trial.label == kin[0].label:
        return f"best {words.kind(trial)}"
    return f"with the best {words.kind(trial)}" if trial.tied_in_kind else "–"


def _by_role(trial: TrialRow) -> list[tuple[str, float]]:
    """Return how busy the roles are, prefill first."""
    return sorted((trial.utilization or {}).items(), reverse=True)


def _everything(answer: Answer) -> Html:
    rows = [
        [
            element("code", trial.label),
            str(trial.num_gpus),
            _FATES[trial.fate][0],
            "–" if trial.goodput_per_gpu_per_s is None else words.short(trial.goodput_per_gpu_per_s.best),
            "–" if trial.bound_per_gpu_per_s is None else words.short(trial.bound_per_gpu_per_s),
            "–" if trial.failed_at_per_gpu_per_s is None else words.short(trial.failed_at_per_gpu_per_s),
            element("span", "; ".join(trial.reasons), class_="why"),
        ]
        for trial in answer.trials
    ]
    headings = ["Placement", "GPUs", "Fate", "Goodput", "Upper bound", "Fell short at", "Why"]
    return table("All placements; rates are requests/s per GPU", headings, rows, texts=(2, 6))


def _shown(answer: Answer) -> list[TrialRow]:
    """Return the best of each kind, the recommended one first."""
    found = [answer.recommended, answer.other or answer.alternative]
    return [trial for trial in found if trial is not None]


def _curves(report: Report) -> list[Html]:
    answer = report.answer
    shown = [trial for trial in _shown(answer) if trial.label in answer.curves]
    if not shown:
        return []
    target = 100 * answer.attainment_target
    lines = []
    for number, trial in enumerate(shown):
        points, goodput = answer.curves[trial.label], trial.goodput_per_gpu_per_s
        lines.append(
            Line(
                name=trial.label,
                x=tuple(point.rate_per_gpu_per_s for point in points),
                y=tuple(_per_cent(point.attainment) for point in points),
                colour=number,
                band=None if goodput is None else (goodput.low, goodput.high),
            )
        )
    drawn = LineFigure(
        identity="curves",
        caption="Requests within all limits against the arrival rate. Bars are intervals of runs shorter than those "
        "behind the goodput, whose interval is shaded.",
        summary=_curve_summary(shown, answer),
        x_label="arrival rate (requests/s per GPU)",
        y_label="requests within all limits (%)",
        lines=tuple(lines),
        y_range=(0.0, 103.0),
        target=target,
        target_name=f"target {target:g} %",
    )
    rows: list[list[Content]] = [
        [element("code", trial.label), words.short(point.rate_per_gpu_per_s), words.percent(point.attainment.best),
         words.percent(point.attainment.low), words.percent(point.attainment.high)]
        for trial in shown
        for point in answer.curves[trial.label]
    ]  # fmt: skip
    headings = ["Placement", "Requests/s per GPU", "Within all limits", "Low", "High"]
    return [_figure(report, drawn, table("Attainment by arrival rate", headings, rows))]


def _curve_summary(shown: Sequence[TrialRow], answer: Answer) -> str:
    texts = []
    for trial in shown:
        goodput, points = trial.goodput_per_gpu_per_s, answer.curves[trial.label]
        first, last = points[0], points[-1]
        texts.append(
            f"{trial.label} falls from {first.attainment.best:.0%} at {first.rate_per_gpu_per_s:.3g} to "
            f"{last.attainment.best:.0%} at {last.rate_per_gpu_per_s:.3g} requests/s per GPU"
            + ("" if goodput is None else f" and meets the target up to {goodput.best:.3g}")
        )
    return f"Line chart of attainment against arrival rate: {'; '.join(texts)}."


def _per_cent(interval: Interval) -> Spread:
    return Spread(100 * interval.low, 100 * interval.best, 100 * interval.high)


def _breakdown(report: Report) -> list[Html]:
    shown = [trial for trial in _shown(report.answer) if trial.ttft_parts_s]
    if not shown:
        return []
    decode = report.profiles.get("decode")
    last = "prefill" if decode is None else decode.handover.first_token_from.last_part
    names = list(words.PARTS)
    present = [name for name in names if any(name in (trial.ttft_parts_s or {}) for trial in shown)]
    after = set(names[names.index(last) + 1 :])
    heading = {name: f"({words.PARTS[name]})" if name in after else words.PARTS[name] for name in present}
    rows: list[list[Content]] = []
    for trial in shown:
        parts = trial.ttft_parts_s or {}
        rows.append(
            [element("code", trial.label), *(words.milliseconds(parts[n]) if n in parts else "–" for n in present)]
        )
    longest = [(trial.label, *max((trial.ttft_parts_s or {}).items(), key=lambda item: item[1])) for trial in shown]
    told = "; ".join(f"{label}: most in {words.PARTS.get(part, part)}, {1e3 * s:.0f} ms" for label, part, s in longest)
    drawn = BarFigure(
        identity="breakdown",
        caption="Mean time of the parts of a request's way to its first decode step, at the highest rate that the "
        f"placement was seen to sustain{'; in brackets: after the first token' if after & set(present) else ''}.",
        summary=f"Stacked bar chart of mean milliseconds. {told}.",
        x_label="mean time (ms)",
        rows=tuple(trial.label for trial in shown),
        parts=tuple(
            Bars(
                heading[name],
                tuple(1e3 * t.ttft_parts_s[name] if t.ttft_parts_s and name in t.ttft_parts_s else None for t in shown),
                number,
            )
            for number, name in enumerate(present)
        ),
    )
    listing = table("Mean milliseconds by part", ["Placement", *(heading[name] for name in present)], rows)
    return [_figure(report, drawn, listing)]


def _utilization(report: Report) -> list[Html]:
    shown = [trial for trial in _shown(report.answer) if trial.utilization]
    if not shown:
        return []
    pairs = [(trial, role, share) for trial in shown for role, share in _by_role(trial)]
    names = tuple(f"{role}, {trial.label}" for trial, role, _ in pairs)
    drawn = BarFigure(
        identity="utilisation",
        caption="Share of the time that driver and first stage of the instances of a role are busy, at the highest "
        "rate that the placement was seen to sustain.",
        summary="Bar chart of busy time: "
        + "; ".join(f"{name} {share:.0%}" for name, (_, _, share) in zip(names, pairs, strict=True))
        + ".",
        x_label="busy (%)",
        rows=names,
        parts=(Bars("busy", tuple(100 * share for _, _, share in pairs), 0),),
        most=100.0,
    )
    rows: list[list[Content]] = [
        [element("code", trial.label), role, words.percent(share), "limits it" if trial.limiting_role == role else "–"]
        for trial, role, share in pairs
    ]
    listing = table("Busy time by role", ["Placement", "Role", "Busy", "Limiting"], rows, texts=(1, 3))
    told = [element("p", _limiting(trial)) for trial in shown]
    return [*told, _figure(report, drawn, listing)]


def _limiting(trial: TrialRow) -> list[Content]:
    met, role = trial.attainment or {}, trial.limiting_role or "nothing known"
    what: list[Content] = [" is limited by ", element("strong", role)]
    if role == "colocated":
        what = [" does both phases in one pool"]
    rate = "the rate found" if trial.rate_per_s is None else words.short(trial.rate_per_s / trial.num_gpus)
    told: list[Content] = ["it meets its targets."]
    if {"ttft", "tpot"} <= set(met):
        told = [words.percent(met["ttft"]), " of the requests meet the TTFT limit and ", words.percent(met["tpot"])]
        told.append(" the TPOT limit.")
    return [element("code", trial.label), what, ": at ", rate, " requests/s per GPU ", told]


def _sensitivity(report: Report) -> list[Html]:
    found = report.sensitivity
    if found is None:
        return []
    intro = (
        f"Simulated again with {found.replications} × {found.counted:,} counted requests a number, seed {found.seed}: "
        "shorter runs than those of the search, so \u201cas asked\u201d may differ a little from it."
    )
    held = "" if found.other is None else " Only these two placements are compared; it is no new search."
    return [
        element("p", _robustness(found)),
        element("p", intro + held),
        element("h3", "Arrival rate"),
        *_rates(report, found),
        element("h3", "Lengths and step times"),
        *_cases(report, found),
    ]


def _robustness(found: Sensitivity) -> list[Content]:
    changes = [point.case.label for point in found.cases if point.verdict is Verdict.CHANGES]
    close = [point.case.label for point in found.cases if point.verdict is Verdict.TIED]
    if found.other is None:
        return ["There is no alternative that the recommendation could change to."]
    other: list[Content] = [" against the best alternative, ", element("code", found.other.label)]
    if changes:
        return [element("strong", "The recommendation changes"), other, ", with ", words.listed(changes), "."]
    if close:
        kept = element("strong", f"No change of 20{words.PERCENT} overturns the recommendation")
        return [kept, other, "; too close to call with ", words.listed(close), "."]
    kept = element("strong", "The recommendation stays")
    return [kept, other, f", with prompts, outputs or step times 20{words.PERCENT} shorter or longer."]


def _rates(report: Report, found: Sensitivity) -> list[Html]:
    target = report.answer.attainment_target
    placements = [found.recommended, *([found.other] if found.other is not None else [])]
    headings: list[Content] = ["Rate", "Requests/s per GPU"]
    for name in ("Recommended", "Alternative")[: len(placements)]:
        headings += [f"{name}: within all limits", "Interval"]
    rows = [[*_rate_row(point), _rate_verdict(point, target)] for point in found.rates]
    headings.append(f"Meets {100 * target:g} %")
    listing = table("Attainment around the recommended rate", headings, rows, texts=(len(headings) - 1,))
    lines = []
    for number, placement in enumerate(placements):
        spreads = [point.recommended if number == 0 else point.other for point in found.rates]
        lines.append(
            Line(
                placement.label,
                tuple(point.rate_per_gpu_per_s for point in found.rates),
                tuple(_per_cent(spread) for spread in spreads if spread is not None),
                number,
            )
        )
    told = "; ".join(
        f"at {point.share:.0%} of the recommended rate {point.recommended.best:.0%}"
        + ("" if point.other is None else f" against {point.other.best:.0%}")
        for point in found.rates
    )
    drawn = LineFigure(
        identity="rates",
        caption="Requests within all limits if the arrival rate is 20 % lower or higher than recommended.",
        summary=f"Line chart of attainment, recommended against alternative: {told}.",
        x_label="arrival rate (requests/s per GPU)",
        y_label="requests within all limits (%)",
        lines=tuple(lines),
        y_range=(0.0, 103.0),
        target=100 * target,
        target_name=f"target {100 * target:g} %",
        from_zero=False,
    )
    return [listing, _figure(report, drawn, None)]


def _rate_row(point: RatePoint) -> list[Content]:
    sign = "+" if point.share > 1 else "−"
    change: Content = "as recommended" if point.share == 1 else f"{sign}{100 * abs(point.share - 1):.0f}{words.PERCENT}"
    cells: list[Content] = [element("span", change, class_="range"), words.short(point.rate_per_gpu_per_s)]
    for spread in (point.recommended, point.other):
        if spread is not None:
            cells += [
                words.percent(spread.best),
                words.percent_range(spread),
            ]
    return cells


def _rate_verdict(point: RatePoint, target: float) -> str:
    """Return which placements meet the target, as far as their intervals tell."""
    found = [_meets(spread, target) for spread in (point.recommended, point.other) if spread is not None]
    if len(found) == 1:
        return found[0]
    first, second = found
    if first == second:
        return {"yes": "both", "no": "neither"}.get(first, first)
    return f"recommended: {first}, alternative: {second}"


def _meets(spread: Interval, target: float) -> str:
    if spread.low >= target:
        return "yes"
    return "no" if spread.high < target else Verdict.TIED.value


def _cases(report: Report, found: Sensitivity) -> list[Html]:
    names = ["Recommended", *(["Alternative"] if found.other is not None else [])]
    headings: list[Content] = ["If"]
    for name in names:
        headings += [f"{name}: requests/s per GPU", "Interval"]
    headings += ["Ratio", "Interval", "Recommendation"] if found.other is not None else []
    last = (len(headings) - 1,) if found.other is not None else ()
    rows = [_case_row(point) for point in found.cases]
    listing = table("Goodput under changed assumptions", headings, rows, texts=last)
    told = "; ".join(f"{point.case.label} {point.recommended.best:.3g}" + _against(point) for point in found.cases)
    placements = [found.recommended.label, *([found.other.label] if found.other is not None else [])]
    drawn = DotFigure(
        identity="cases",
        caption="Goodput if one assumption is off by 20 %, with intervals.",
        summary=f"Chart of goodput in requests/s per GPU, recommended against alternative: {told}.",
        x_label="requests/s per GPU",
        rows=tuple(point.case.label for point in found.cases),
        dots=tuple(
            Dots(
                name, tuple(_spread(point.recommended if number == 0 else point.other) for point in found.cases), number
            )
            for number, name in enumerate(placements)
        ),
    )
    notes = [f"{p.case.label}: {reason}" for p in found.cases for reason in p.reasons]
    notes += [
        f"{p.case.label}: {100 * p.cut:.1f} % of the requests no longer fit the model's context and were cut to it."
        for p in found.cases
        if p.cut > 0
    ]
    return [listing, *([bullets(notes)] if notes else []), _figure(report, drawn, None)]


def _against(point: CasePoint) -> str:
    return "" if point.other is None else f" against {point.other.best:.3g}"


def _spread(interval: Interval | None) -> Spread | None:
    return None if interval is None else Spread(interval.low, interval.best, interval.high)


def _case_row(point: CasePoint) -> list[Content]:
    cells: list[Content] = [element("span", point.case.label, class_="range")]
    for spread in (point.recommended, point.other):
        if spread is not None:
            cells += [words.short(spread.best), words.spread(spread)]
    if point.other is not None:
        ratio = point.advantage
        cells += ["–", "–"] if ratio is None else [words.short(ratio.best), words.spread(ratio)]
        cells.append(point.verdict.value)
    return cells


def profile_evidence(found: ProfileEvidence) -> Html:
    """Return what is known of a latency profile."""
    pairs: list[tuple[Content, Content]] = [
        ("Used for", words.listed(found.roles)),
        ("Engine", found.engine),
        ("Source", found.source),
        ("Rests on", found.rests_on),
        ("SHA-256", element("code", found.sha256, class_="hash")),
        ("Valid range", bullets(found.valid)),
        ("Known violations", bullets(found.violations) if found.violations else "none known"),
    ]
    if found.fit:
        pairs.append(("How well it fits", bullets(found.fit)))
    content: list[Content] = [element("h3", "Profile ", element("code", found.name)), definitions(pairs)]
    if found.validation:
        caption = (
            "Measured on real GPUs, repeated by dsim; host overheads were fitted to the runs of DistServe and vLLM"
        )
        content.append(table(caption, ["Against", "Result"], found.validation, texts=(1,)))
    else:
        content.append(element("p", "No comparison of dsim with measured requests is known for this profile."))
    return element("div", content, class_="evidence")


def _reproduce(report: Report) -> list[Html]:
    answer = report.answer
    search = [[element("span", unit, class_="unit"), " "] for unit in search_command(answer.options)]
    page = " ".join(["dsim report RESULT", *report.report_options, "-o report.html"])
    pairs: list[tuple[Content, Content]] = [("dsim", answer.version), ("Seed", str(answer.seed))]
    pairs += [
        (f"Profile, {role}", [profile.name, " ", element("code", profile.sha256, class_="hash")])
        for role, profile in answer.profiles.items()
    ]
    return [
        element("p", "In the directory in which it ran, if the options name files; RESULT is any new directory:"),
        element("pre", element("code", search, "\n", page), tabindex="0", aria_label="commands"),
        definitions(pairs),
    ]


def _figure(report: Report, drawn: Figure, listing: Html | None) -> Html:
    report.figures.append(drawn)
    return figure(drawn, listing)
