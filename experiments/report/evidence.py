"""What supports the numbers of a report, and what they assume."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsim.latency import ValidRange
from dsim.options import Evidence
from dsim.profile import Profile
from dsim.profile_fit import FitError
from experiments.report.answer import Answer

#: What dsim says beside measurements on real GPUs, by the shipped profile's name: docs/validation.md has every
#: point, what was fitted and what was missed.
VALIDATION: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "opt-13b-a100-80g-distserve": (
        (
            "9 runs of DistServe, OPT-13B, prefill TP 2 + decode TP 1: joint attainment",
            "RMSE 1.2 points, worst 2.3 (leave one out 2.4)",
        ),
        ("the same runs: P90 TTFT, 0.15 to 69 s", "0.93 to 1.10 of measured"),
        (
            "4 runs with decode PP 2: joint attainment",
            "RMSE 2.9, worst 5.4 (leave one out 15: one run fixes the constant)",
        ),
        ("the paper's finite-run goodput of DistServe, OPT-13B", "0.89 of published"),
    ),
    "opt-66b-a100-80g-distserve": (("the paper's finite-run goodput of DistServe, OPT-66B", "0.99 of published"),),
    "opt-13b-a100-80g-vllm": (
        ("4 runs of vLLM, 1 GPU: joint attainment", "RMSE 4.9, worst 6.3 (leave one out 6.2)"),
        ("the paper's finite-run goodput of vLLM, OPT-13B", "cannot be reproduced: no rate reaches 90 %"),
    ),
    "opt-66b-a100-80g-vllm": (("the paper's finite-run goodput of vLLM, OPT-66B", "1.32 of published"),),
}
#: For every one of these profiles.
_CURVES: Final = (
    "figure 8 of the DistServe paper, OPT-13B and OPT-66B, 63 points, nothing fitted: attainment against rate and SLO "
    "scale",
    "mean 2.7 points, worst curve 3.9, worst point 8.4",
)


@dataclass(frozen=True, slots=True)
class ProfileEvidence:
    """A latency profile, what it was fitted on and how well it is known to do.

    Args:
        roles: that it was used for.
        rests_on: what its step times rest on and how far they may be off, in words.
        valid: range of its inputs by tensor parallel degree, in words; equal ones together.
        fit: how far it is from rows, in words.
        validation: (what was measured, how close dsim comes).
    """

    name: str
    roles: tuple[str, ...]
    engine: str
    source: str
    rests_on: str
    sha256: str
    valid: tuple[str, ...]
    violations: tuple[str, ...]
    fit: tuple[str, ...]
    validation: tuple[tuple[str, str], ...]


def evidence(profiles: Mapping[str, Profile], *, shipped: Mapping[str, str]) -> tuple[ProfileEvidence, ...]:
    """Return what is known of the profiles, each once.

    Args:
        profiles: by role.
        shipped: sha256 by name of the profiles that come with dsim; only for those is the validation theirs.
    """
    found = []
    for sha256 in dict.fromkeys(profile.sha256 for profile in profiles.values()):
        roles = tuple(role for role, profile in profiles.items() if profile.sha256 == sha256)
        profile = profiles[roles[0]]
        own = VALIDATION.get(profile.name, ()) if shipped.get(profile.name) == sha256 else ()
        found.append(
            ProfileEvidence(
                name=profile.name,
                roles=roles,
                engine=f"{profile.engine} ({profile.engine_version})",
                source=profile.source,
                rests_on=_rests_on(profile),
                sha256=sha256,
                valid=_valid(profile),
                violations=profile.violations,
                fit=_fit(profile),
                validation=(*own, _CURVES) if own else (),
            )
        )
    return tuple(found)


def _rests_on(profile: Profile) -> str:
    what = {
        Evidence.MEASURED: "whole steps were timed",
        Evidence.KERNELS: "kernels were timed, and their times added up; no whole step was",
        Evidence.OTHER_KERNELS: "another engine's kernels were timed, and added up; the rest is the engine's own",
        Evidence.ROOFLINE: "nothing of this model was timed: the GPU's datasheet, and shares of it that kernels reach",
    }[profile.evidence]
    error = f"; expected error of a step {profile.expected_error}" if profile.expected_error else ""
    caveat = f"; {profile.model.caveat}" if profile.model.caveat else ""
    return f"{what}{error}{caveat}"


def _valid(profile: Profile) -> tuple[str, ...]:
    degrees: dict[ValidRange, list[int]] = {}
    for tp, model in sorted(profile.latency.items()):
        degrees.setdefault(model.valid_range, []).append(tp)
    return tuple(f"TP {', '.join(map(str, tps))}: {_range(valid)}" for valid, tps in degrees.items())


def _range(valid: ValidRange) -> str:
    limits = (
        (valid.chunk_tokens, "prompts up to {:,.0f} tokens"),
        (valid.prefill_tokens, "{:,.0f} tokens in a prefill step"),
        (valid.decode_requests, "{:,.0f} requests in a decode step"),
        (valid.context_tokens, "{:,.0f} context tokens in a decode step"),
    )
    return ", ".join(text.format(limit) for limit, text in limits if math.isfinite(limit)) or "no limit stated"


def _fit(profile: Profile) -> tuple[str, ...]:
    return () if profile.fit is None else tuple(_error(error) for error in profile.fit.errors)


def _error(error: FitError) -> str:
    explained = "" if math.isnan(error.r2) else f", R² {error.r2:.4f}"
    return (
        f"{error.phase} at TP {error.tp}, {error.region}: {error.points} rows, error {error.mean:.1%} in the mean, "
        f"{error.worst:.1%} at worst{explained}"
    )


#: What every simulation takes for granted.
_STEPS: Final = "A step takes what the latency profile says; TP degrees that it does not have are refused."
_ENGINES: Final = (
    "Engines behave as dsim's semantics say, to the step: first come first served, paged KV block by block, swap "
    "or recompute when memory runs out, micro-batches with pipeline parallelism."
)
_NOTHING_ELSE: Final = (
    "No failures, no prefix cache beyond the cached_prompt_tokens of a workload, no speculative decoding."
)


def shipped_hashes(names: Collection[str]) -> dict[str, str]:
    """Return the sha256 of the profiles of these names that come with dsim, by name."""
    from dsim.profile_file import load_profile
    from profiles.shipped import shipped_profiles

    return {name: load_profile(path).sha256 for name, path in shipped_profiles() if name in names}


def sweep_assumptions(replications: int, *, simulated: bool) -> tuple[str, ...]:
    """Return what the numbers of a sweep take for granted.

    Args:
        simulated: whether any of them is from a simulation.
    """
    if not simulated:
        return (_STEPS, "Nothing was simulated: the numbers are those of the latency profile, or of a formula.")
    intervals = "One run a combination: only a goodput, which is searched for with several runs, has an interval."
    if replications > 1:
        intervals = (
            f"An interval is the 95\u00a0% t interval of the mean over {replications} replications, whose requests "
            "differ; those of one replication are the same for every combination. It says how well the simulated "
            "number is known, not how close the simulation is to your servers: for that see the evidence."
        )
    return (_STEPS, _ENGINES, _NOTHING_ELSE, intervals)


def assumptions(answer: Answer, profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    """Return what the answer takes for granted."""
    found = [
        _STEPS,
        _ENGINES,
        *_engines(answer, profiles),
        _cluster(answer),
        _NOTHING_ELSE,
        f"Requests arrive in an open loop ({answer.arrivals}) with {answer.workload} lengths, whether or not earlier "
        "ones have been served.",
    ]
    return (*found, *_meaning(answer))


def _engines(answer: Answer, profiles: Mapping[str, Profile]) -> Sequence[str]:
    engines = {"disaggregated": profiles.get("prefill"), "colocated": profiles.get("colocated")}
    known = {kind: profile.engine for kind, profile in engines.items() if profile is not None}
    names = list(known.values())
    if len(names) == 2 and names[0] != names[1]:
        return (
            f"Disaggregated placements run on engine {names[0]} and colocated ones on engine {names[1]}: the ratio of "
            f"the two kinds is one of engines, too.",
        )
    return (f"All placements run on engine {names[0]}.",) if names else ()


def _cluster(answer: Answer) -> str:
    if answer.num_gpus <= answer.gpus_per_node:
        return f"One node of {answer.gpus_per_node} GPUs, of which at most {answer.num_gpus} are used."
    return (
        f"{answer.num_gpus} GPUs in nodes of {answer.gpus_per_node}; KV that goes from node to node takes the "
        "network, at what the handover says or 80\u00a0% of the datasheet's rate."
    )


def _meaning(answer: Answer) -> tuple[str, ...]:
    share = f"{100 * answer.attainment_target:g}\u00a0%"
    level = f"{100 * answer.confidence:g}\u00a0%"
    if answer.transient:
        return (
            f"Goodput is the largest arrival rate per GPU at which {share} of the requests of a finite run of "
            f"{answer.num_requests:,} from an empty system meet all limits: a transient, not a rate that can be "
            "sustained.",
            f"An interval is the {level} confidence interval of that rate over runs with different requests.",
        )
    return (
        f"Goodput is the largest arrival rate per GPU at which {share} of the requests meet all limits in the steady "
        "state: warm-up dropped, backlog not growing.",
        f"An interval is the {level} confidence interval of that rate over runs with different requests, drift within "
        "the runs added. It says how well the simulated rate is known, not how close the simulation is to your "
        "servers: for that see the evidence.",
        "Placements were ranked, and dropped, on shorter runs first.",
    )
