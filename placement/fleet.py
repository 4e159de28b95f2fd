"""How many GPUs there are of each type, as users say it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dsim.catalog import find_gpu
from dsim.errors import InputError, nearest
from dsim.pools import Role
from dsim.profile import Profile
from placement.mixes import Fleet
from placement.space import asked_cluster

_ROLES = {role.name.lower(): role for role in Role}
_MOST = 100_000


def number_of_gpus(text: str, where: str = "--gpus") -> int:
    """Return a plain number of GPUs.

    Raises:
        InputError: it is no number.
    """
    hint = "as in 24, or h100=8,h20=16, or prefill=8,decode=16"
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text.strip()) is None:
        raise InputError(where, "must be a whole number, or numbers by GPU or role", value=text, hint=hint)
    value = int(text)
    if not 1 <= value <= _MOST:
        raise InputError(where, f"must be {'>= 1' if value < 1 else f'<= {_MOST}'}", value=value)
    return value


def budgets(
    text: str, gpus: Sequence[str], roles: Sequence[Role], where: str = "--gpus"
) -> tuple[dict[str, int], dict[Role, int]]:
    """Return how many GPUs there are of each type, and for each role.

    Args:
        text: as in `h100=8,h20=16` or `prefill=8,decode=16`.
        gpus: names of the GPUs that are searched.
        roles: whose pools are searched.

    Raises:
        InputError: it says something else, or the same twice.
    """
    of_gpu: dict[str, int] = {}
    of_role: dict[Role, int] = {}
    for part in text.split(","):
        key, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(where, "does not say of what", value=part.strip(), hint="as in h100=8,h20=16")
        value = number_of_gpus(number, where)
        role = _ROLES.get(key.lower())
        if role is not None:
            if role not in roles:
                raise InputError(where, "is a role that is not searched", value=key, hint="leave it out")
            if role in of_role:
                raise InputError(where, "stands twice", value=key)
            of_role[role] = value
            continue
        try:
            name = key if key in gpus else find_gpu(key, where=where).name
        except InputError:
            hint = nearest(key, [*gpus, *(role.name.lower() for role in roles)])
            raise InputError(where, "is neither a GPU nor a role", value=key, hint=hint) from None
        if name not in gpus:
            raise InputError(where, f"is not searched: {', '.join(gpus)}", value=key, hint="leave it out")
        if name in of_gpu:
            raise InputError(where, "stands twice", value=key)
        of_gpu[name] = value
    return of_gpu, of_role


def fleet_of(
    profiles: Mapping[Role, Sequence[Profile]],
    *,
    roles: Sequence[Role],
    gpus: str | None,
    nodes: int | None,
    gpus_per_node: int | None,
    side_by_side: bool,
    where: str = "--gpus",
) -> Fleet:
    """Return the GPUs that there are of each type.

    Raises:
        InputError: numbers that cannot be, or that leave out a GPU.
    """
    types = {p.gpu.name: p.gpu for role in roles for p in profiles[role]}
    if nodes is not None and len(types) > 1:
        hint = f"give GPUs, as in --gpus {','.join(f'{name}=8' for name in types)}"
        raise InputError("--nodes", "does not say of which GPU", value=nodes, hint=hint)
    of_gpu: dict[str, int] = {}
    of_role: dict[Role, int] = {}
    total: int | None = None
    if gpus is not None and "=" in gpus:
        of_gpu, of_role = budgets(gpus, list(types), roles, where)
        if not of_gpu:
            on = {role: [p.gpu.name for p in profiles[role]] for role in roles}
            of_gpu, total = _by_role(of_role, on, list(types), where)
        missing = [name for name in types if name not in of_gpu]
        if missing:
            raise InputError(where, f"says nothing of {missing[0]}", value=gpus, hint=f"add {missing[0]}=N")
    elif gpus is not None:
        total = number_of_gpus(gpus, where)
        of_gpu = dict.fromkeys(types, total)
    clusters = {
        name: asked_cluster(
            gpu, gpus=of_gpu.get(name), nodes=nodes, gpus_per_node=gpus_per_node, side_by_side=side_by_side
        )
        for name, gpu in types.items()
    }
    return Fleet(clusters, total or sum(cluster.num_gpus for cluster in clusters.values()), of_role)


def _by_role(
    of_role: Mapping[Role, int], on: Mapping[Role, Sequence[str]], types: Sequence[str], where: str
) -> tuple[dict[str, int], int]:
    """Return how many GPUs there are of each type and in all where only roles have numbers.

    Colocated pools without a number may use what the others may.

    Args:
        on: the types that each role's pools may lie on.
    """
    pairs = [role for role in on if role is not Role.COLOCATED]
    missing = [role.name.lower() for role in pairs if role not in of_role]
    if missing:
        text = ",".join(f"{role.name.lower()}={number}" for role, number in of_role.items())
        raise InputError(where, f"says nothing of {missing[0]}", value=text, hint=f"add {missing[0]}=N")
    whole_pair, colocated = sum(of_role[role] for role in pairs), of_role.get(Role.COLOCATED, 0)
    found = {}
    for name in types:
        own = sum(of_role[role] for role in pairs if name in on[role])
        found[name] = max(own, colocated if name in on.get(Role.COLOCATED, ()) else 0) or whole_pair
    return found, max(whole_pair, colocated)
