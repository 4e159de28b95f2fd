"""The handover that `--handover` and `--kv-link` ask for, of a placement that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsim.errors import InputError

if TYPE_CHECKING:
    from dsim.pools import Placement
    from dsim.profile import Profile


def with_asked_handover(
    profile: Profile,
    placement: Placement,
    handover: str | None,
    kv_link: str | None,
    *,
    nic: str | None = None,
    nodes: int | None = None,
) -> Profile:
    """Return the profile with the handover that the options ask for.

    Where no nodes are named, all KV crosses them if the placement fills one.

    Raises:
        InputError: an option is wrong, or KV does not move in the placement.
    """
    from profiles.handover import asked_handover

    domain_gpus = max(profile.gpu.gpus_per_node, profile.gpu.scale_up_domain_gpus)
    if nic is not None and nodes is None:
        raise InputError("--nic", "belongs to --nodes", value=nic, hint="add --nodes N, or give --kv-link")
    crosses = nodes is None and placement.num_gpus > domain_gpus
    used = asked_handover(profile, handover, kv_link, nic=nic, crosses_nodes=crosses)
    for option, value in (("--handover", handover), ("--kv-link", kv_link)):
        if value is not None and placement.is_colocated:
            hint = "leave it out, or give prefill and decode instances"
            raise InputError(option, "is for disaggregated placements", value=value, hint=hint)
    return used
