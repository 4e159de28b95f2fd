"""Profiles of pools on different GPUs: which they are, and what KV goes over from one to the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsim.errors import InputError
from dsim.options import Evidence
from dsim.pools import Role
from dsim.profile import Profile
from dsim.yamlfile import Field
from profiles.choice import AS_TIMED, Variant, choose_colocated, choose_profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked for of every role, in the words of the options.

    Args:
        gpus: names of GPUs by role; of a role that is not there those of `gpu`, of colocated pools those of the others.
        files: profiles of one's own by role.
        changes: values by dotted path that stand instead of those of the files.
    """

    model: str | None = None
    gpu: str | None = None
    engine: str | None = None
    profile: Path | None = None
    colocated_engine: str | None = None
    evidence: Evidence | None = None
    variant: Variant = AS_TIMED
    gpus: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    files: Mapping[Role, Path] = field(default_factory=dict)
    changes: Mapping[str, Field] = field(default_factory=dict)


def profiles_of_roles(wanted: Wanted) -> dict[Role, list[Profile]]:
    """Return the profiles of each role, one for each of its GPUs, by the usual order of evidence.

    Raises:
        InputError: a name or a file cannot be used, or two profiles of a role are of one GPU.
    """
    found = {role: _disaggregated(wanted, role) for role in (Role.PREFILL, Role.DECODE)}
    first = found[Role.PREFILL][0]
    if wanted.model is None and found[Role.DECODE][0].model.name != first.model.name:
        both = f"{first.model.name} and {found[Role.DECODE][0].model.name}"
        raise InputError("--decode-profile", "and the prefill profile are of different models", value=both)
    found[Role.COLOCATED] = _colocated(wanted, found)
    return found


def _disaggregated(wanted: Wanted, role: Role) -> list[Profile]:
    option = f"--{role.name.lower()}"
    file, names = wanted.files.get(role), wanted.gpus.get(role, ())
    if file is not None and len(names) > 1:
        raise InputError(f"{option}-gpu", f"does not go with {option}-profile", value=",".join(names))
    if file is None and not names:
        return [_chosen(wanted, role, gpu=wanted.gpu, file=wanted.profile)]
    if file is not None:
        return [_chosen(wanted, role, gpu=names[0] if names else None, file=file)]
    return _of_different_gpus([_chosen(wanted, role, gpu=name, file=None) for name in names], f"{option}-gpu")


def _chosen(wanted: Wanted, role: Role, *, gpu: str | None, file: Path | None) -> Profile:
    model = wanted.model
    if model is None and file is None:
        # The other role's file says which model it is.
        other = wanted.profile or next(iter(wanted.files.values()), None)
        model = None if other is None else choose_profile(file=other).model.name
    try:
        return choose_profile(
            model=model,
            gpu=gpu,
            engine=wanted.engine,
            file=file,
            evidence=wanted.evidence,
            variant=wanted.variant,
            changes=wanted.changes,
        )
    except InputError as error:
        own = file is not None and file == wanted.files.get(role)
        where = {"--gpu": role in wanted.gpus, "--profile": own}
        if not where.get(error.where):
            raise
        option = error.where.replace("--", f"--{role.name.lower()}-")
        raise InputError(option, error.rule, name=error.name, value=error.value, hint=error.hint) from None


def _colocated(wanted: Wanted, found: Mapping[Role, Sequence[Profile]]) -> list[Profile]:
    """Return the profiles of colocated pools: of the GPUs asked for, else of every GPU of the other roles."""
    beside = list({profile.gpu.name: profile for role in found for profile in found[role]}.values())
    names = wanted.gpus.get(Role.COLOCATED)
    if names is not None:
        beside = _of_different_gpus([_chosen(wanted, Role.COLOCATED, gpu=name, file=None) for name in names],
                                    "--colocated-gpu")  # fmt: skip
    file = wanted.files.get(Role.COLOCATED)
    if file is not None:
        own = choose_profile(file=file).gpu.name
        if names is not None and [profile.gpu.name for profile in beside] != [own]:
            rule = f"contradicts --colocated-profile: the profile is for {own}"
            raise InputError("--colocated-gpu", rule, value=",".join(names), hint="leave --colocated-gpu out")
        beside = [p for p in beside if p.gpu.name == own] or [_chosen(wanted, Role.COLOCATED, gpu=own, file=None)]
    return [
        choose_colocated(
            profile, engine=wanted.colocated_engine, file=file, variant=wanted.variant, changes=wanted.changes
        )
        for profile in beside
    ]


def _of_different_gpus(profiles: list[Profile], option: str) -> list[Profile]:
    names = [profile.gpu.name for profile in profiles]
    for name in names:
        if names.count(name) > 1:
            raise InputError(option, "stands twice", value=name, hint="name each GPU once")
    return profiles


def mixes_of(
    found: Mapping[Role, Sequence[Profile]],
    roles: Collection[Role],
    change: Callable[[Profile, str | None], Profile],
) -> tuple[Mapping[Role, Profile], ...]:
    """Return every mix of the roles' GPUs, of prefill and decode and of colocated pools, with its handover.

    Args:
        found: as `profiles_of_roles` returns them.
        roles: that are wanted.
        change: as of `handed_over`; where both ends are on one GPU no link is named.
    """
    mixes: list[Mapping[Role, Profile]] = []
    if Role.PREFILL in roles:
        for prefill, decode in itertools.product(found[Role.PREFILL], found[Role.DECODE]):
            if prefill.gpu.name == decode.gpu.name:
                ends = (change(prefill, None), change(decode, None))
            else:
                ends = handed_over(prefill, decode, change)
            mixes.append({Role.PREFILL: ends[0], Role.DECODE: ends[1]})
    if Role.COLOCATED in roles:
        mixes += [{Role.COLOCATED: profile} for profile in found[Role.COLOCATED]]
    return tuple(mixes)


def handed_over(
    prefill: Profile, decode: Profile, change: Callable[[Profile, str | None], Profile]
) -> tuple[Profile, Profile]:
    """Return the profiles of two roles on different GPUs with the handover between them.

    Their instances never share a node, so KV goes over the network, at the rate of the slower end.

    Args:
        change: returns a profile with the handover that is asked for, over a link of its GPU if it is named.
    """
    ends = (prefill.gpu, decode.gpu)
    slower = replace(
        decode.gpu,
        nvlink_bytes_per_s=min(gpu.nvlink_bytes_per_s for gpu in ends),
        network_bytes_per_s=min(gpu.network_bytes_per_s for gpu in ends),
        pcie_bytes_per_s=min(gpu.pcie_bytes_per_s for gpu in ends),
    )
    found = replace(change(replace(decode, gpu=slower), "nic"), gpu=decode.gpu)
    return change(prefill, None), found
