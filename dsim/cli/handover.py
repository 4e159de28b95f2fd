"""The handover that `--handover`, `--kv-link` and `--nic` ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsim.cli.options import HandoverText, KvLinkText, NicText
from dsim.errors import InputError

if TYPE_CHECKING:
    from dsim.pools import Placement
    from dsim.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverOptions:
    """How KV gets to the decode side, and over what."""

    handover: HandoverText = None
    kv_link: KvLinkText = None
    nic: NicText = None

    @property
    def are_given(self) -> bool:
        """Whether any is."""
        return (self.handover or self.kv_link or self.nic) is not None

    def of(self, profile: Profile, *, crosses_nodes: bool = False) -> Profile:
        """Return a profile with the handover asked for.

        Raises:
            InputError: an option, what is wrong with it and what to do.
        """
        from profiles.handover import asked_handover

        return asked_handover(profile, self.handover, self.kv_link, nic=self.nic, crosses_nodes=crosses_nodes)

    def check_moves(self, placement: Placement, *, nic: bool) -> None:
        """Refuse options about KV that does not move.

        Args:
            nic: `--nic` is about nothing else here.

        Raises:
            InputError: one is given, and the placement is colocated.
        """
        given = {"--handover": self.handover, "--kv-link": self.kv_link, "--nic": self.nic if nic else None}
        for option, value in given.items():
            if value is not None and placement.is_colocated:
                hint = "leave it out, or give prefill and decode instances"
                raise InputError(option, "is for disaggregated placements", value=value, hint=hint)


def with_asked_handover(
    profile: Profile, placement: Placement, options: HandoverOptions, *, nodes: int | None = None
) -> Profile:
    """Return the profile with the handover that the options ask for of a placement that is known.

    Where no nodes are named, all KV crosses them if the placement fills one.

    Raises:
        InputError: an option is wrong, or KV does not move in the placement.
    """
    if options.nic is not None and nodes is None:
        raise InputError("--nic", "belongs to --nodes", value=options.nic, hint="add --nodes N, or give --kv-link")
    used = options.of(profile, crosses_nodes=fills_a_node(placement, profile, nodes))
    options.check_moves(placement, nic=False)
    return used


def fills_a_node(placement: Placement, profile: Profile, nodes: int | None) -> bool:
    """Return whether a placement is larger than what fast links join, where no nodes are named."""
    return nodes is None and placement.num_gpus > max(profile.gpu.gpus_per_node, profile.gpu.scale_up_domain_gpus)
