"""The answer of a search: what is written, what is printed, and why nothing was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsim.cli.inputs import display_name, number_of
from dsim.cli.kv_blocks import kv_blocks, kv_line, kv_reasons, kv_sources
from dsim.cli.mixes import by_mix_lines, mixed_gpus
from dsim.cli.nodes import layout_lines
from dsim.cli.objective import cost_parts, with_prices
from dsim.cli.output import emit, emit_data, show, use_color
from dsim.cli.question import described, introduction
from dsim.pools import Placement, Role

if TYPE_CHECKING:
    from dsim.cli.groups import CommonOptions
    from dsim.cli.objective import More, Sought
    from dsim.cli.options import Format
    from dsim.cli.question import Asked
    from placement.curve import Curve
    from placement.result import SearchResult, Trial
    from placement.search import Question


def answered(asked: Asked, question: Question, result: SearchResult, sought: Sought, more: More) -> dict[str, Any]:
    """Return the answer as in docs/output.md."""
    answer = with_prices({**result.to_dict(), **described(asked, question)}, result, sought, more)
    return _with_kv(answer, question)


def _with_kv(answer: dict[str, Any], question: Question) -> dict[str, Any]:
    """Return the answer with the KV capacity of every trial."""
    best = answer["best"]
    named = (best["disaggregated"], best["colocated"], answer["most_total"], answer["best_by_objective"])
    for trial in (*answer["trials"], *named):
        if trial is not None:
            placement = Placement.parse(trial["placement"])
            profiles = question.profiles_of(placement)
            trial["kv_blocks"] = kv_blocks(profiles, placement)
            trial["kv_source"] = kv_sources(profiles, placement)
    return answer


def _kv_lines(question: Question, result: SearchResult) -> list[str]:
    """Return the KV capacity of the best placements."""
    best = [trial.placement for trial in (result.best.disaggregated, result.best.colocated) if trial is not None]
    used = [(placement, question.profiles_of(placement)) for placement in best]
    lines = [
        f"{placement}: {line}" for placement, p in used for line in layout_lines(placement, p[placement.pools[-1].role])
    ]
    lines += [f"KV blocks of each instance of {placement}: {kv_line(p, placement)}" for placement, p in used]
    reasons = [reason for placement, p in used for reason in kv_reasons(p, placement)]
    return lines + list(dict.fromkeys(reasons))


def curve_rows(curves: Sequence[Curve]) -> list[dict[str, object]]:
    """Return one row for each placement and rate."""
    return [
        {
            "placement": curve.trial.placement.label,
            "num_gpus": curve.trial.num_gpus,
            "rate_per_gpu_per_s": rate,
            "attainment": share.to_dict(),
        }
        for curve in curves
        for rate, share in zip(curve.rate_per_gpu_per_s, curve.attainment, strict=True)
    ]


def title(asked: Asked, question: Question) -> str:
    """Return the title of the figure."""
    return f"{display_name(asked.used.model)}, {mixed_gpus(question)}, {asked.workload}, {question.slo}"


def print_plan(asked: Asked, question: Question, *, output_format: Format, files: list[str]) -> None:
    """Print what a search would compare and write."""
    from placement.search import candidates

    count = len(candidates(question))
    if not emit_data(output_format, {**described(asked, question), "candidates": count, "files": files}):
        lines = [*introduction(asked, question), f"would compare {number_of(count, 'placement')}"]
        emit("\n".join([*lines, *([f"would write {', '.join(files)}"] if files else [])]) + "\n")


def print_answer(
    asked: Asked,
    question: Question,
    result: SearchResult,
    answer: dict[str, Any],
    sought: Sought,
    more: More,
    common: CommonOptions,
) -> None:
    """Print the answer."""
    if emit_data(common.output_format, answer, rows=answer["trials"]):
        return
    from dsim.cli.tables import search_parts

    heading = "\n".join(introduction(asked, question))
    decode = question.profiles.get(Role.DECODE)
    parts = search_parts(
        result,
        num_gpus=question.cluster.num_gpus,
        confidence=question.confidence,
        per_dollar=question.prices is not None,
        first_token_after="prefill" if decode is None else decode.handover.first_token_from.last_part,
    )
    by_mix = by_mix_lines(question, result)
    if by_mix:
        parts.insert(1, "\n".join(by_mix))
    kv = _kv_lines(question, result)
    if kv:
        parts.insert(-1, "\n".join(kv))
    for part in cost_parts(question, result, sought, more):
        parts.insert(-1, part)
    show(heading, *parts, color=use_color(no_color=common.no_color))


def nothing_found(question: Question, result: SearchResult) -> str:
    """Return why no placement will do, and what to change."""
    cannot = [trial for trial in result.trials if trial.state.value == "INFEASIBLE"]
    others = [trial for trial in result.trials if trial.state.value != "INFEASIBLE"]
    gpus = number_of(question.cluster.num_gpus, "GPU")
    if not others:
        # The largest instances are the last that too large a model does not fit into.
        largest = max(cannot, key=_instance_gpus, default=None)
        reason = f" ({_reasons(largest)})" if largest is not None else ""
        remedy = "give more GPUs or another profile"
        return f"--gpus: no placement of {question.model.name} can run on {gpus}{reason}; {remedy}"
    failed = [trial for trial in others if trial.state.value == "FAILED"]
    if failed:
        # What ran to its end fell behind one that then failed: nothing is known of the limits.
        count = f"{len(failed)} of {number_of(len(others), 'placement')} on {gpus} failed"
        rest = ", and the others fell behind" if len(failed) < len(others) else ""
        return f"search: {count}{rest} ({_reasons(failed[0])}); mend what made them fail"
    return (
        f"--slo: no placement on {gpus} serves any rate with {question.attainment:.4g} of the requests within "
        f"{question.slo} ({_reasons(others[0])}); relax the limits, or give more GPUs"
    )


def _instance_gpus(trial: Trial) -> int:
    return max(pool.parallelism.num_gpus for pool in trial.placement.pools)


def _reasons(trial: Trial) -> str:
    return f"{trial.placement.label}: {'; '.join(trial.reasons) or 'no rate'}"
