"""What an answer says of GPUs of several types, and of the profile of each role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsim.cli.inputs import described_profiles, display_name, evidence_lines, number_of, source_line
from dsim.pools import Placement, Role

if TYPE_CHECKING:
    from dsim.model import Model
    from dsim.profile import Profile
    from placement.mixes import Mix
    from placement.result import SearchResult, Trial
    from placement.search import Question


def mixed_gpus(question: Question) -> str:
    """Return the GPUs of a search by name."""
    return ", ".join(dict.fromkeys(p.gpu.name for mix in question.mixes for p in mix.values())) or question.gpu.name


def described_mixes(question: Question) -> list[dict[str, Any]]:
    """Return the profiles of every mix by role, as in docs/output.md; none where no pool names its GPU."""
    return [described_profiles(mix, list(mix)) for mix in question.mixes]


def mixed_introduction(question: Question, *, model: str | None) -> list[str]:
    """Return the lines that say which profiles a search over mixes has, and what KV goes over."""
    from profiles.handover import handover_line

    mixes = question.mixes
    lines = [
        named_on(question.model, mixed_gpus(question), asked=model),
        *role_lines([(role, profile) for mix in mixes for role, profile in mix.items()]),
    ]
    for mix in mixes:
        if Role.PREFILL in mix and mix[Role.PREFILL].gpu.name != mix[Role.DECODE].gpu.name:
            lines.append(f"KV {mixed_ends(mix)}: {handover_line(mix[Role.DECODE])}")
    return lines


def named_on(model: Model, gpus: str, *, asked: str | None) -> str:
    """Return the line that says what a name was taken for, and on which GPUs."""
    name = f"{display_name(model)} ({model.hugging_face}) on {gpus}"
    return f"{asked} = {name}" if asked else name


def role_lines(profiles: Sequence[tuple[Role, Profile]]) -> list[str]:
    """Return the lines that say which profile the roles have on each GPU, and how good it is."""
    roles: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], Profile] = {}
    for role, profile in profiles:
        key = (profile.gpu.name, profile.name)
        first.setdefault(key, profile)
        if role.name.lower() not in roles.setdefault(key, []):
            roles[key].append(role.name.lower())
    lines = [f"{gpu} ({', '.join(roles[gpu, name])}): {source_line(first[gpu, name])}" for gpu, name in roles]
    return lines + [f"{gpu}: {line}" for gpu, name in roles for line in evidence_lines(first[gpu, name])]


def mixed_ends(mix: Mix) -> str:
    """Return from where to where KV goes, in words."""
    ends = f"{mix[Role.PREFILL].gpu.name} to {mix[Role.DECODE].gpu.name}"
    return f"from {ends} crosses nodes, at the rate of the slower end"


def fleet_line(question: Question) -> str:
    """Return how many GPUs there are, in words."""
    fleet = question.fleet
    assert fleet is not None
    types = [
        f"{part.num_gpus} {name} ({number_of(part.num_nodes, 'node')} of {part.gpus_per_node})"
        for name, part in fleet.types.items()
    ]
    roles = [f"{number} for {role.name.lower()}" for role, number in fleet.by_role.items()]
    text = f"at most {number_of(question.cluster.num_gpus, 'GPU')}, of which at most {', '.join(types)}"
    return text + (f", and {', '.join(roles)}" if roles else "")


def by_mix_lines(question: Question, result: SearchResult) -> list[str]:
    """Return the best that is known of every mix of GPUs, best first; nothing where there is one type."""
    if question.fleet is None or len(question.fleet.types) < 2:
        return []
    seen: dict[tuple[str, ...], Trial] = {}
    for trial in result.trials:
        if trial.state.value in ("COMPLETE", "PRUNED"):
            seen.setdefault(_kind(trial.placement), trial)
    if len(seen) < 2:
        return []
    lines = ["the best known of each kind, per GPU of whatever type:" if question.prices is None else
             "the best known of each kind, in the order of goodput per dollar:"]  # fmt: skip
    for kind, trial in seen.items():
        goodput = trial.goodput_per_gpu_per_s
        if goodput is not None:
            known = f"{goodput.best:.3g} ({goodput.low:.3g} - {goodput.high:.3g}) requests/s per GPU"
        else:
            known = "; ".join(trial.reasons)
        lines.append(f"  {' '.join(kind)}: {trial.placement.label}: {known}")
    return lines


def _kind(placement: Placement) -> tuple[str, ...]:
    return tuple(f"{pool.role.value} {pool.gpu}" for pool in placement.pools)
