"""Pools of a setting on GPUs of their own: the profiles of each role, and of every mix that a search compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dsim.options import Evidence
from dsim.pools import Placement, Role
from dsim.profile import Profile
from dsim.yamlfile import Field, Section
from experiments.settings import Measure
from experiments.values import choice_at, file_at, placed, text_at
from placement.mixes import check_mixes
from placement.search import Mode
from profiles.mixed import Wanted, mixes_of, profiles_of_roles

Mix = Mapping[Role, Profile]

_KEYS: Final = ("prefill_gpu", "decode_gpu", "colocated_gpu", "prefill_profile", "decode_profile")


def are_apart(section: Section) -> bool:
    """Return whether a setting says something of the GPUs or profiles of single roles."""
    return any(key in section for key in _KEYS) or bool(_named(section))


def mixes_at(
    section: Section,
    measure: Measure,
    *,
    model: str | None,
    changes: Mapping[str, Field],
    hand_over: Callable[[Profile, str | None], Profile],
    folder: Path,
) -> tuple[Mix, ...]:
    """Return every mix of the GPUs that a setting names, with the handover of each.

    Args:
        model: name, or path of a config file.
        hand_over: as `profiles.mixed.handed_over` takes it.

    Raises:
        InputError: the key, what is wrong with it and what to do.
    """
    evidence, search = section.get("evidence"), section.get("search")
    files = {
        role: file
        for role, key in zip(Role, ("prefill_profile", "decode_profile", "colocated_profile"), strict=True)
        if (file := file_at(section, key, folder)) is not None
    }
    named: dict[Role, tuple[str, ...]] = {role: (gpu,) for role, gpu in _named(section).items()}
    for role in Role:
        key = f"{role.name.lower()}_gpu"
        if key in section:
            names = tuple(name.strip() for name in section.need(key).text().split(","))
            if len(names) > 1 and measure is not Measure.SEARCH:
                raise section.need(key).error("names more than one GPU", "name one; a search takes several")
            if role in named:
                raise section.need(key).error("stands beside the GPU in placement", "leave one of the two out")
            named[role] = names
    wanted = Wanted(
        model=model,
        gpu=text_at(section, "gpu"),
        engine=text_at(section, "engine"),
        profile=file_at(section, "profile", folder),
        colocated_engine=text_at(section, "colocated_engine"),
        evidence=None if evidence is None else evidence.choice(Evidence),
        gpus=named,
        files=files,
        changes=changes,
    )
    mode = Mode.BOTH if search is None else choice_at(search.section(), "mode", Mode.BOTH)
    roles = [role for role in Role if mode is Mode.BOTH or (role is Role.COLOCATED) == (mode is Mode.COLOCATED)]
    with placed(section, "decode_gpu", files={f"{role.name.lower()}_profile": file for role, file in files.items()}):
        mixes = mixes_of(profiles_of_roles(wanted), roles if measure is Measure.SEARCH else list(Role), hand_over)
        check_mixes(mixes)
    return mixes


def first_of(mixes: tuple[Mix, ...]) -> dict[Role, Profile]:
    """Return the profiles of the first mix of each kind; of a role that no mix has, those of another one."""
    found: dict[Role, Profile] = {}
    for mix in mixes:
        found = {**mix, **found}
    other = next(iter(found.values()))
    return {role: found.get(role, other) for role in Role}


def on_gpus(section: Section, placement: Placement, profiles: Mapping[Role, Profile]) -> Placement:
    """Return the placement with the name of each pool's GPU, where it is given or they differ."""
    if not are_apart(section) or not profiles:
        return placement
    gpus = {pool.role: profiles[pool.role].gpu.name for pool in placement.pools}
    if len(set(gpus.values())) == 1 and not _named(section):
        return placement
    return replace(placement, pools=tuple(replace(pool, gpu=gpus[pool.role]) for pool in placement.pools))


def _named(section: Section) -> dict[Role, str]:
    """Return the GPUs that the pools of a setting's placement name."""
    field = section.get("placement")
    if field is None or not isinstance(field.value, str) or "@" not in field.value:
        return {}
    with placed(section, "placement"):
        pools = Placement.parse(field.value).pools
    return {pool.role: pool.gpu for pool in pools if pool.gpu is not None}
